//! The hierarchies of this machine, and the directories of a group on them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::CgroupError;

/// The version of the control groups that carry the controllers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Controllers on hierarchies of their own.
    V1,
    /// The unified hierarchy.
    V2,
}

/// One mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    pub mount: PathBuf,
    /// The controllers on it (`memory`, `name=systemd`). Empty for version 2, where each group has its own list.
    pub controllers: Vec<String>,
}

/// The control group hierarchies of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    version: Version,
    /// Just one for version 2.
    hierarchies: Vec<Hierarchy>,
    /// The unified hierarchy of a hybrid layout. It carries no controllers that we use, but systemd and OCI
    /// runtimes make groups there.
    beside: Option<PathBuf>,
}

impl Layout {
    /// Reads the mounts of this process.
    pub fn detect() -> Result<Self, CgroupError> {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").map_err(CgroupError::Mounts)?;
        // Another mount may cover a hierarchy.
        let is_visible = |mount: &Path| mount.join("cgroup.procs").exists();
        Self::parse(&mountinfo, is_visible).ok_or(CgroupError::NotMounted)
    }

    /// Version 1 wins when any controller lives there: in hybrid layouts the unified hierarchy has none.
    fn parse(mountinfo: &str, is_visible: impl Fn(&Path) -> bool) -> Option<Self> {
        let mut hierarchies: Vec<Hierarchy> = Vec::new();
        let mut unified = None;
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let Some(mount) = left.split(' ').nth(4).map(Path::new) else { continue };
            let mut right = right.split(' ');
            let (kind, options) = (right.next()?, right.nth(1).unwrap_or(""));
            match kind {
                "cgroup2" if unified.is_none() && is_visible(mount) => unified = Some(mount.to_owned()),
                "cgroup" => {
                    let controllers: Vec<String> = options
                        .split(',')
                        .filter(|o| !matches!(*o, "rw" | "ro" | "xattr" | "clone_children" | "noprefix"))
                        .filter(|o| !o.starts_with("release_agent="))
                        .map(str::to_owned)
                        .collect();
                    // A hierarchy can be mounted twice (a chroot, a nested container): once is enough.
                    if !hierarchies.iter().any(|h| h.controllers == controllers) && is_visible(mount) {
                        hierarchies.push(Hierarchy { mount: mount.to_owned(), controllers });
                    }
                }
                _ => {}
            }
        }
        if hierarchies.iter().any(|h| h.controllers.iter().any(|c| !c.starts_with("name="))) {
            Some(Self { version: Version::V1, hierarchies, beside: unified })
        } else {
            unified.map(Self::v2)
        }
    }

    /// The unified hierarchy at a mount point.
    pub fn v2(mount: impl Into<PathBuf>) -> Self {
        let hierarchy = Hierarchy { mount: mount.into(), controllers: Vec::new() };
        Self { version: Version::V2, hierarchies: vec![hierarchy], beside: None }
    }

    /// Hierarchies of version 1. With none at all every group is absent and no limit is enforced.
    pub fn v1(hierarchies: Vec<Hierarchy>) -> Self {
        Self { version: Version::V1, hierarchies, beside: None }
    }

    pub fn version(&self) -> Version {
        self.version
    }

    pub fn is_v2(&self) -> bool {
        self.version == Version::V2
    }

    pub(crate) fn hierarchies(&self) -> &[Hierarchy] {
        &self.hierarchies
    }

    /// Every mount point that we use.
    pub fn mounts(&self) -> Vec<&Path> {
        self.hierarchies.iter().map(|h| h.mount.as_path()).collect()
    }

    /// The mount points that may have groups of ours: those we use, and the unified one of a hybrid layout.
    pub(crate) fn all_mounts(&self) -> impl Iterator<Item = &Path> {
        self.mounts().into_iter().chain(self.beside.as_deref())
    }

    /// The mount point of the unified hierarchy of a hybrid layout.
    pub fn beside(&self) -> Option<&Path> {
        self.beside.as_deref()
    }

    /// As [`Layout::beside`], where that hierarchy has a controller.
    pub fn controllers_beside(&self) -> Option<&Path> {
        let mount = self.beside.as_deref()?;
        let controllers = fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default();
        (!controllers.trim().is_empty()).then_some(mount)
    }

    /// The directory of group `path` that carries `controller`.
    pub fn directory(&self, controller: &str, path: &str) -> Option<PathBuf> {
        let carries = |h: &&Hierarchy| self.is_v2() || h.controllers.iter().any(|c| c == controller);
        self.hierarchies.iter().find(carries).map(|h| below(&h.mount, path))
    }

    /// The directory used to find and end the processes of a group.
    pub(crate) fn members(&self, path: &str) -> Option<PathBuf> {
        self.directory("pids", path)
            .or_else(|| self.directory("freezer", path))
            .or_else(|| self.hierarchies.first().map(|h| below(&h.mount, path)))
    }

    /// The group's directory on the unified hierarchy, where that carries the controllers.
    pub(crate) fn unified(&self, path: &str) -> Option<PathBuf> {
        let mount = &self.hierarchies.first().filter(|_| self.is_v2())?.mount;
        Some(below(mount, path))
    }

    /// True if the kernel can limit the swap of one group (upstream's check: its own group has the file).
    pub fn limits_swap(&self) -> bool {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
        self.unified(own).is_some_and(|directory| directory.join("memory.swap.max").exists())
    }
}

pub(crate) fn below(mount: &Path, path: &str) -> PathBuf {
    mount.join(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts() {
        let parse = |text: &str| Layout::parse(text, |mount| !mount.starts_with("/covered"));
        let hybrid = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            32 31 0:29 / /covered/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
            32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
            35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
            50 31 0:32 / /srv/jail/memory rw - cgroup cgroup rw,memory\n";
        let layout = parse(hybrid).expect("v1");
        assert_eq!(layout.version(), Version::V1);
        assert_eq!(layout.mounts().len(), 3);
        assert_eq!(layout.beside(), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(layout.directory("cpuacct", "/a/b"), Some("/sys/fs/cgroup/cpu/a/b".into()));
        assert_eq!(layout.directory("memory", "a"), Some("/sys/fs/cgroup/memory/a".into()));
        assert_eq!(layout.directory("pids", "a"), None);
        assert_eq!(layout.members("a"), Some("/sys/fs/cgroup/cpu/a".into()));
        assert_eq!(layout.unified("a"), None);

        let unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(parse(unified), Some(Layout::v2("/sys/fs/cgroup")));
        assert_eq!(parse("30 23 0:26 / /covered rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"), None);

        // Only systemd's bookkeeping on version 1: the controllers are on version 2.
        let named = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(parse(named), Some(Layout::v2("/sys/fs/cgroup/unified")));
        assert_eq!(parse("22 27 0:21 / /proc rw - proc proc rw\n"), None);
    }

    #[test]
    fn without_a_hierarchy_there_is_no_group() {
        let none = Layout::v1(Vec::new());
        assert_eq!(
            (none.directory("memory", "/a"), none.members("/a"), none.exists("/a")),
            (None, None, false)
        );
        assert!(none.create("/a").is_ok() && none.remove("/a").is_ok());
    }
}
