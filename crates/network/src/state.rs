//! The network's files: a record of the things that were made, and of their users.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::{Cidrs, NetworkError};

/// The things that one network made on the machine: enough to remove them without the configuration that
/// made them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) bridge: String,
    #[serde(rename = "pod_cidr")]
    pub(crate) pod_cidrs: Cidrs,
    #[serde(rename = "cluster_cidr")]
    pub(crate) cluster_cidrs: Cidrs,
    #[serde(rename = "service_cidr")]
    pub(crate) service_cidrs: Option<Cidrs>,
    /// The value of `net.ipv4.ip_forward` before this network turned it on, and in which boot: after a
    /// reboot the value is the machine's own again and nothing is to be restored.
    pub(crate) ip_forward: Option<Before>,
    /// The same for the settings that forwarding of IPv6 needs, by name.
    #[serde(default)]
    pub(crate) ipv6_settings: BTreeMap<String, Before>,
}

impl Record {
    /// Returns true if both describe the same links and routes.
    pub(crate) fn same_network(&self, other: &Self) -> bool {
        let key = |r: &Self| (r.bridge.clone(), r.pod_cidrs, r.cluster_cidrs, r.service_cidrs);
        key(self) == key(other)
    }
}

/// A kernel setting's earlier value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Before {
    pub(crate) value: String,
    pub(crate) boot: String,
}

/// The state directory, held by one process at a time.
#[derive(Debug)]
pub(crate) struct State {
    dir: PathBuf,
    _lock: Flock<File>,
}

impl State {
    pub(crate) fn open(dir: &Path) -> Result<Self, NetworkError> {
        let fail = |what| move |source| NetworkError::State { path: dir.to_owned(), what, source };
        ferrite_hostfs::private_dir(dir).map_err(fail("create"))?;
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join("lock"))
            .map_err(fail("open the lock"))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            nix::errno::Errno::EWOULDBLOCK => NetworkError::Locked(dir.to_owned()),
            other => NetworkError::State { path: dir.to_owned(), what: "lock", source: other.into() },
        })?;
        Ok(Self { dir: dir.to_owned(), _lock: lock })
    }

    pub(crate) fn reservations(&self) -> PathBuf {
        self.dir.join("addresses")
    }

    pub(crate) fn host_ports(&self) -> PathBuf {
        self.dir.join("host-ports")
    }

    pub(crate) fn load(&self) -> Result<Option<Record>, NetworkError> {
        let path = self.dir.join("network.json");
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| NetworkError::State {
                path,
                what: "parse",
                source: error.into(),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(NetworkError::State { path, what: "read", source }),
        }
    }

    pub(crate) fn save(&self, record: &Record) -> Result<(), NetworkError> {
        let path = self.dir.join("network.json");
        let bytes = serde_json::to_vec_pretty(record).map_err(|error| NetworkError::State {
            path: path.clone(),
            what: "encode",
            source: error.into(),
        })?;
        write_atomic(&path, &bytes)
    }

    /// Removes the files; the record goes last, so that an interrupted removal can be repeated.
    pub(crate) fn clear(&self) -> Result<(), NetworkError> {
        remove(&self.reservations(), ferrite_hostfs::remove_tree)?;
        remove(&self.host_ports(), ferrite_hostfs::remove_tree)?;
        remove(&self.dir.join("network.json"), |p| fs::remove_file(p))?;
        sync_dir(&self.dir)
    }
}

/// This boot's identity.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|s| s.trim().to_owned()).unwrap_or_default()
}

/// Replaces the file at `path` so that a crash leaves the old or the new content.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), NetworkError> {
    let fail = |what| move |source| NetworkError::State { path: path.to_owned(), what, source };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let mut file = File::create(&temporary).map_err(fail("create"))?;
    file.write_all(bytes).map_err(fail("write"))?;
    file.sync_data().map_err(fail("sync"))?;
    fs::rename(&temporary, path).map_err(fail("rename"))?;
    sync_dir(path.parent().unwrap_or(Path::new(".")))
}

pub(crate) fn sync_dir(dir: &Path) -> Result<(), NetworkError> {
    File::open(dir).and_then(|file| file.sync_all()).map_err(|source| NetworkError::State {
        path: dir.to_owned(),
        what: "sync",
        source,
    })
}

fn remove(path: &Path, with: impl Fn(&Path) -> io::Result<()>) -> Result<(), NetworkError> {
    match with(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(NetworkError::State { path: path.to_owned(), what: "remove", source })
        }
        _ => Ok(()),
    }
}
