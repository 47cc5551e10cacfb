//! A pod's user namespace.
//!
//! File systems are mounted before the container's process joins it: as the host's root, with identities
//! mapped mount by mount. Files made for the container in this phase must therefore belong to the host
//! numbers of its users.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::sched::{CloneFlags, setns, unshare};
use oci_spec::runtime::{LinuxNamespaceType, Spec};

use super::error::{Context, SetupError};
use crate::spec::IdMap;

pub struct UserNamespace {
    namespace: OwnedFd,
    map: IdMap,
}

impl UserNamespace {
    /// The one a description names, if it does.
    pub fn of(spec: &Spec) -> Result<Option<Self>, SetupError> {
        let Some(linux) = spec.linux() else { return Ok(None) };
        let path = linux
            .namespaces()
            .iter()
            .flatten()
            .find(|namespace| namespace.typ() == LinuxNamespaceType::User)
            .and_then(|namespace| namespace.path().clone());
        let Some(path) = path else { return Ok(None) };
        let namespace = open(&path)?;
        let map = IdMap {
            uids: linux.uid_mappings().clone().unwrap_or_default(),
            gids: linux.gid_mappings().clone().unwrap_or_default(),
        };
        Ok(Some(Self { namespace, map }))
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }

    /// The host's numbers for a user and a group; one that is not mapped becomes the namespace's root.
    pub fn host(&self, uid: u32, gid: u32) -> (u32, u32) {
        let (root_uid, root_gid) = self.root();
        (self.map.host_uid(uid).unwrap_or(root_uid), self.map.host_gid(gid).unwrap_or(root_gid))
    }

    /// The host's numbers for the namespace's root, which is always mapped.
    pub fn root(&self) -> (u32, u32) {
        (self.map.host_uid(0).unwrap_or(0), self.map.host_gid(0).unwrap_or(0))
    }

    /// Mount options with the host's numbers in them.
    pub fn translate(&self, kind: &str, options: &str) -> String {
        let (uid, gid) = self.root();
        let mut out: Vec<String> = Vec::new();
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let number = |name: &str| option.strip_prefix(name).and_then(|text| text.parse::<u32>().ok());
            if let Some(given) = number("gid=") {
                out.push(format!("gid={}", self.host(0, given).1));
            } else if let Some(given) = number("uid=") {
                out.push(format!("uid={}", self.host(given, 0).0));
            } else {
                out.push(option.to_owned());
            }
        }
        if kind == "tmpfs" {
            for (name, number) in [("uid=", uid), ("gid=", gid)] {
                if !out.iter().any(|option| option.starts_with(name)) {
                    out.push(format!("{name}{number}"));
                }
            }
        }
        out.join(",")
    }

    /// Makes the calling process a member, with a mount namespace that belongs to it: existing mounts are
    /// locked, and processes with the right capabilities may mount more.
    pub fn enter(&self) -> Result<(), SetupError> {
        setns(&self.namespace, CloneFlags::CLONE_NEWUSER).context("join the pod's user namespace")?;
        unshare(CloneFlags::CLONE_NEWNS).context("make a mount namespace in the user namespace")?;
        become_root()
    }
}

/// Until the process takes its own identity it is the namespace's root, not a stranger there.
pub fn become_root() -> Result<(), SetupError> {
    nix::unistd::setgroups(&[]).context("leave the host's groups")?;
    nix::unistd::setresgid(0.into(), 0.into(), 0.into()).context("become the namespace's root group")?;
    nix::unistd::setresuid(0.into(), 0.into(), 0.into()).context("become the namespace's root")
}

fn open(path: &Path) -> Result<OwnedFd, SetupError> {
    std::fs::File::open(path).map(Into::into).with(|| format!("open user namespace {}", path.display()))
}
