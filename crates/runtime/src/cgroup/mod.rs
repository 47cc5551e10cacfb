//! Control groups: one view of version 1 (one hierarchy per controller) and version 2.
//!
//! A group is named by its path below the mount points (`/ferrite/kubepods/pod…/<container>`).

mod devices;
mod limits;
mod stats;
pub mod systemd;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

pub use limits::{Setting, settings};
use oci_spec::runtime::LinuxDeviceCgroup;

/// Rounds of killing the processes of a group before we give up.
const KILL_ROUNDS: u32 = 200;

/// One mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    pub mount: PathBuf,
    /// The controllers on it (`memory`, `name=systemd`); for version 2 this is empty.
    pub controllers: Vec<String>,
}

/// The control group hierarchies of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// Controllers on hierarchies of their own.
    V1(Vec<Hierarchy>),
    /// The unified hierarchy.
    V2(PathBuf),
}

impl Layout {
    /// Reads the mounts of this process.
    pub fn detect() -> io::Result<Self> {
        Self::parse(&fs::read_to_string("/proc/self/mountinfo")?).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "no cgroup hierarchy is mounted; mount cgroup2 at /sys/fs/cgroup",
            )
        })
    }

    /// Version 1 wins when any controller lives there: in hybrid layouts the unified hierarchy has none.
    fn parse(mountinfo: &str) -> Option<Self> {
        let mut v1: Vec<Hierarchy> = Vec::new();
        let mut v2 = None;
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let Some(mount) = left.split(' ').nth(4) else { continue };
            let mut right = right.split(' ');
            let (kind, options) = (right.next()?, right.nth(1).unwrap_or(""));
            match kind {
                "cgroup2" => v2 = v2.or(Some(PathBuf::from(mount))),
                "cgroup" => {
                    let controllers: Vec<String> = options
                        .split(',')
                        .filter(|o| !matches!(*o, "rw" | "ro" | "xattr" | "clone_children" | "noprefix"))
                        .filter(|o| !o.starts_with("release_agent="))
                        .map(str::to_owned)
                        .collect();
                    // A hierarchy can be mounted twice (a chroot, a nested container): once is enough.
                    if !v1.iter().any(|h| h.controllers == controllers) {
                        v1.push(Hierarchy { mount: PathBuf::from(mount), controllers });
                    }
                }
                _ => {}
            }
        }
        if v1.iter().any(|h| h.controllers.iter().any(|c| !c.starts_with("name="))) {
            Some(Self::V1(v1))
        } else {
            v2.map(Self::V2)
        }
    }

    pub fn is_v2(&self) -> bool {
        matches!(self, Self::V2(_))
    }

    /// Every mount point.
    pub fn mounts(&self) -> Vec<&Path> {
        match self {
            Self::V1(hierarchies) => hierarchies.iter().map(|h| h.mount.as_path()).collect(),
            Self::V2(mount) => vec![mount],
        }
    }

    /// The unified hierarchy of a hybrid layout. We do not use it, but OCI runtimes make groups there.
    fn beside(&self) -> Option<PathBuf> {
        match self {
            Self::V1(hierarchies) => {
                let unified = hierarchies.first()?.mount.parent()?.join("unified");
                unified.join("cgroup.procs").exists().then_some(unified)
            }
            Self::V2(_) => None,
        }
    }

    /// The directory of group `path` that carries `controller`.
    pub fn directory(&self, controller: &str, path: &str) -> Option<PathBuf> {
        match self {
            Self::V1(hierarchies) => hierarchies
                .iter()
                .find(|h| h.controllers.iter().any(|c| c == controller))
                .map(|h| below(&h.mount, path)),
            Self::V2(mount) => Some(below(mount, path)),
        }
    }

    /// The directory used to find and end the processes of a group.
    fn members(&self, path: &str) -> Option<PathBuf> {
        self.directory("pids", path)
            .or_else(|| self.directory("freezer", path))
            .or_else(|| self.mounts().first().map(|mount| below(mount, path)))
    }

    /// Makes the group and the missing groups above it, ready for processes and limits.
    pub fn create(&self, path: &str) -> io::Result<()> {
        match self {
            Self::V1(hierarchies) => {
                for hierarchy in hierarchies {
                    let target = below(&hierarchy.mount, path);
                    if hierarchy.controllers.iter().any(|c| c == "cpuset") {
                        create_cpuset(&hierarchy.mount, path)?;
                    } else {
                        fs::create_dir_all(&target)?;
                    }
                }
                Ok(())
            }
            Self::V2(mount) => create_unified(mount, path),
        }
    }

    /// Returns true if the group exists on any hierarchy.
    pub fn exists(&self, path: &str) -> bool {
        !path.trim_matches('/').is_empty() && self.mounts().iter().any(|mount| below(mount, path).exists())
    }

    /// Writes limits. A limit that the kernel lacks and that the pod can do without (swap accounting, huge
    /// pages) is skipped and returned, so that the caller can report it.
    pub fn apply(&self, path: &str, settings: &[Setting]) -> io::Result<Vec<String>> {
        let mut passed_over = Vec::new();
        for setting in settings {
            let written = match self.directory(setting.controller, path) {
                Some(directory) => {
                    let file = directory.join(setting.file.as_ref());
                    fs::write(&file, &setting.value).map_err(|error| {
                        let message = format!("write {:?} to {}: {error}", setting.value, file.display());
                        io::Error::new(error.kind(), message)
                    })
                }
                None => {
                    let message = format!("cgroup controller {} is not available", setting.controller);
                    Err(io::Error::new(io::ErrorKind::Unsupported, message))
                }
            };
            match written {
                Ok(()) => {}
                Err(_) if !setting.required => {
                    passed_over.push(format!("this machine cannot set {}", setting.file));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(passed_over)
    }

    /// Limits the group to the devices of these rules, where that takes a program (version 2).
    pub fn restrict_devices(&self, path: &str, rules: &[LinuxDeviceCgroup]) -> io::Result<()> {
        match (self, devices::program(rules)) {
            (Self::V2(mount), Some(program)) => devices::attach(&below(mount, path), &program)
                .map_err(|error| io::Error::new(error.kind(), format!("restrict devices: {error}"))),
            _ => Ok(()),
        }
    }

    /// Moves the calling, single-threaded process into the group.
    ///
    /// On version 1 it writes `0` to `tasks`, not to `cgroup.procs`: a thread that moves itself does not
    /// take the system-wide thread-group lock, whose writer waits for an RCU grace period (several
    /// milliseconds per container).
    pub fn join(&self, path: &str) -> io::Result<()> {
        match self {
            Self::V1(hierarchies) => {
                for hierarchy in hierarchies {
                    fs::write(below(&hierarchy.mount, path).join("tasks"), "0")?;
                }
                Ok(())
            }
            Self::V2(mount) => fs::write(below(mount, path).join("cgroup.procs"), "0"),
        }
    }

    /// Makes a group for one exec below the container's, on a single hierarchy: it only serves to find
    /// the processes again. Returns its path below the mount.
    pub fn create_exec(&self, container: &str, exec: &str) -> io::Result<String> {
        let path = format!("{container}/{exec}");
        if let Some(directory) = self.members(&path) {
            fs::create_dir(directory)?;
        }
        Ok(path)
    }

    /// Joins the container's group and, below it, the exec's.
    pub fn join_exec(&self, container: &str, exec: &str) -> io::Result<()> {
        match self {
            Self::V1(_) => {
                self.join(container)?;
                if let Some(directory) = self.members(exec) {
                    fs::write(directory.join("tasks"), "0")?;
                }
                Ok(())
            }
            Self::V2(mount) => fs::write(below(mount, exec).join("cgroup.procs"), "0"),
        }
    }

    /// The group's directory for a fork straight into it; only version 2 can.
    pub fn open_unified(&self, path: &str) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::V1(_) => Ok(None),
            Self::V2(mount) => Ok(Some(fs::File::open(below(mount, path))?.into())),
        }
    }

    /// The processes in the group and below it.
    pub fn processes(&self, path: &str) -> Vec<i32> {
        let mut found = Vec::new();
        if let Some(directory) = self.members(path) {
            collect_processes(&directory, 0, &mut found);
        }
        found
    }

    /// Kills everything in the group and below it and waits until the kernel has taken them away.
    /// Returns true if the group is empty now.
    pub fn kill(&self, path: &str) -> bool {
        if let Self::V2(mount) = self
            && fs::write(below(mount, path).join("cgroup.kill"), "1").is_ok()
        {
            // The kernel kills asynchronously; the loop below only waits.
        }
        for round in 0..KILL_ROUNDS {
            let processes = self.processes(path);
            if processes.is_empty() {
                return true;
            }
            for pid in &processes {
                // SAFETY: a signal to a process found in our own group; no memory is involved.
                unsafe { libc::kill(*pid, libc::SIGKILL) };
            }
            wait_for_end(&processes, 5 + round as i32);
        }
        self.processes(path).is_empty()
    }

    /// Removes the group and everything below it from every hierarchy. Absent groups are fine.
    pub fn remove(&self, path: &str) -> io::Result<()> {
        self.forget_scope(path);
        let mut result = Ok(());
        for mount in self.mounts().into_iter().chain(self.beside().as_deref()) {
            if let Err(error) = remove_tree(&below(mount, path), 0) {
                result = Err(error);
            }
        }
        result
    }

    /// In hybrid layouts systemd uses the unified hierarchy to see if a scope is in use, and we put no
    /// process there. The container's first process stands for all of it; one that has ended needs no
    /// scope.
    pub fn show_to_systemd(&self, path: &str, pid: i32) {
        if let Some(unified) = self.beside() {
            let _ = fs::write(below(&unified, path).join("cgroup.procs"), pid.to_string());
        }
    }

    /// Asks systemd to end a group that systemd made. The caller then removes the rest, or the whole group
    /// if systemd does not answer.
    fn forget_scope(&self, path: &str) {
        if let Some(scope) = systemd::Scope::of(path)
            && let Err(error) = scope.stop(self)
        {
            tracing::warn!(path, %error, "systemd did not end a scope");
        }
    }

    /// Removes the group where it has neither processes nor children; keeps it where it has.
    pub fn remove_if_empty(&self, path: &str) {
        self.forget_scope(path);
        for mount in self.mounts().into_iter().chain(self.beside().as_deref()) {
            let _ = fs::remove_dir(below(mount, path));
        }
    }

    /// Halts the processes of a group and those below it, or lets them go on.
    pub fn freeze(&self, path: &str, frozen: bool) -> io::Result<()> {
        let (file, value) = match (self, frozen) {
            (Self::V1(_), true) => ("freezer.state", "FROZEN"),
            (Self::V1(_), false) => ("freezer.state", "THAWED"),
            (Self::V2(_), true) => ("cgroup.freeze", "1"),
            (Self::V2(_), false) => ("cgroup.freeze", "0"),
        };
        let directory = self.directory("freezer", path).ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "this machine has no freezer control group")
        })?;
        fs::write(directory.join(file), value)
    }

    /// Number of processes in this group that the kernel's OOM killer has killed.
    pub fn oom_kills(&self, path: &str) -> u64 {
        let (file, key) = match self {
            Self::V1(_) => ("memory.oom_control", "oom_kill"),
            Self::V2(_) => ("memory.events", "oom_kill"),
        };
        self.directory("memory", path)
            .and_then(|directory| fs::read_to_string(directory.join(file)).ok())
            .and_then(|text| stats::field(&text, key))
            .unwrap_or(0)
    }
}

fn below(mount: &Path, path: &str) -> PathBuf {
    mount.join(path.trim_start_matches('/'))
}

/// A cpuset without CPUs takes no process, and a new one has none: copy the parent's, from the top.
fn create_cpuset(mount: &Path, path: &str) -> io::Result<()> {
    let mut parent = mount.to_owned();
    for part in Path::new(path.trim_start_matches('/')) {
        let directory = parent.join(part);
        match fs::create_dir(&directory) {
            Ok(()) => {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let value = fs::read_to_string(parent.join(file))?;
                    fs::write(directory.join(file), value.trim())?;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        parent = directory;
    }
    Ok(())
}

/// Enables every available controller on the way down, so that the leaf can be limited.
fn create_unified(mount: &Path, path: &str) -> io::Result<()> {
    let mut parent = mount.to_owned();
    for part in Path::new(path.trim_start_matches('/')) {
        let available = fs::read_to_string(parent.join("cgroup.controllers")).unwrap_or_default();
        for controller in available.split_whitespace() {
            // One by one: a controller the parent cannot delegate must not keep the others away.
            let _ = fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
        }
        let directory = parent.join(part);
        match fs::create_dir(&directory) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        parent = directory;
    }
    Ok(())
}

/// Depth of nested groups we are ready to walk; containers cannot nest deeper than the kernel lets them.
const MAX_DEPTH: u32 = 64;

fn collect_processes(directory: &Path, depth: u32, found: &mut Vec<i32>) {
    if let Ok(text) = fs::read_to_string(directory.join("cgroup.procs")) {
        found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0));
    }
    if depth >= MAX_DEPTH {
        return;
    }
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_processes(&entry.path(), depth + 1, found);
        }
    }
}

fn remove_tree(directory: &Path, depth: u32) -> io::Result<()> {
    if depth < MAX_DEPTH {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove_tree(&entry.path(), depth + 1)?;
            }
        }
    }
    // A group stays busy for a moment after its last process has ended.
    for _ in 0..50 {
        match fs::remove_dir(directory) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => wait_for_end(&[], 10),
            Err(error) => return Err(error),
        }
    }
    fs::remove_dir(directory)
}

/// Waits until one of the processes has ended, at most `milliseconds`.
fn wait_for_end(processes: &[i32], milliseconds: i32) {
    use std::os::fd::{AsRawFd, FromRawFd};
    let pidfd = processes.first().and_then(|pid| {
        // SAFETY: no pointers; a descriptor or -1 comes back.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, *pid, 0) } as i32;
        // SAFETY: the kernel has just made this descriptor for us.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    });
    let mut poll =
        libc::pollfd { fd: pidfd.as_ref().map_or(-1, AsRawFd::as_raw_fd), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd; a negative descriptor is ignored, which makes this a plain wait.
    unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts() {
        let hybrid = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
            32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
            35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
            50 31 0:32 / /srv/jail/memory rw - cgroup cgroup rw,memory\n";
        let layout = Layout::parse(hybrid).expect("v1");
        assert_eq!(layout.mounts().len(), 3);
        assert_eq!(layout.directory("cpuacct", "/a/b"), Some("/sys/fs/cgroup/cpu/a/b".into()));
        assert_eq!(layout.directory("memory", "a"), Some("/sys/fs/cgroup/memory/a".into()));
        assert_eq!(layout.directory("pids", "a"), None);

        let unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(Layout::parse(unified), Some(Layout::V2("/sys/fs/cgroup".into())));

        // Only systemd's bookkeeping on version 1: the controllers are on version 2.
        let named = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(Layout::parse(named), Some(Layout::V2("/sys/fs/cgroup/unified".into())));
        assert_eq!(Layout::parse("22 27 0:21 / /proc rw - proc proc rw\n"), None);
    }

    fn all_limits() -> oci_spec::runtime::LinuxResources {
        use oci_spec::runtime::{
            LinuxBlockIo, LinuxCpu, LinuxHugepageLimit, LinuxMemory, LinuxPids, LinuxResources,
        };
        let mut cpu = LinuxCpu::default();
        cpu.set_shares(Some(1024)).set_quota(Some(50_000)).set_period(Some(100_000));
        cpu.set_cpus(Some("0-1".into())).set_mems(Some("0".into()));
        let mut memory = LinuxMemory::default();
        memory.set_limit(Some(64 << 20)).set_swap(Some(96 << 20));
        let mut pids = LinuxPids::default();
        pids.set_limit(100);
        let mut huge = LinuxHugepageLimit::default();
        huge.set_page_size("2MB".into()).set_limit(4 << 20);
        let mut io = LinuxBlockIo::default();
        io.set_weight(Some(500));
        let mut all = LinuxResources::default();
        all.set_cpu(Some(cpu))
            .set_memory(Some(memory))
            .set_pids(Some(pids))
            .set_hugepage_limits(Some(vec![huge]))
            .set_block_io(Some(io))
            .set_unified(Some([("memory.high".to_owned(), "1000".to_owned())].into()))
            .set_devices(None);
        all
    }

    #[test]
    fn unified_files() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::V2(root.path().to_owned());
        fs::write(root.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        layout.create("/a/b").unwrap();
        layout.create("/a/b").unwrap();
        let enabled = fs::read_to_string(root.path().join("cgroup.subtree_control")).unwrap();
        assert_eq!(enabled, "+memory", "each is asked for by itself; a plain file keeps the last");
        let group = root.path().join("a/b");
        let passed_over = layout.apply("/a/b", &settings(&layout, &all_limits())).unwrap();
        assert!(passed_over.is_empty(), "{passed_over:?}");
        for (file, want) in [
            ("cpu.weight", "100"),
            ("cpu.max", "50000 100000"),
            ("cpuset.cpus", "0-1"),
            ("cpuset.mems", "0"),
            ("memory.max", "67108864"),
            ("memory.swap.max", "33554432"),
            ("memory.high", "1000"),
            ("pids.max", "100"),
            ("hugetlb.2MB.max", "4194304"),
            ("io.weight", "4950"),
        ] {
            assert_eq!(fs::read_to_string(group.join(file)).unwrap(), want, "{file}");
        }
        layout.freeze("/a/b", true).unwrap();
        assert_eq!(fs::read_to_string(group.join("cgroup.freeze")).unwrap(), "1");
        fs::write(group.join("memory.events"), "low 0\noom 3\noom_kill 2\n").unwrap();
        assert_eq!(layout.oom_kills("/a/b"), 2);
        fs::create_dir(group.join("exec")).unwrap();
        fs::write(group.join("cgroup.procs"), "11\n").unwrap();
        fs::write(group.join("exec/cgroup.procs"), "12\n0\n").unwrap();
        assert_eq!(layout.processes("/a/b"), [11, 12], "0 is a process of another namespace");
        // A value that the kernel refuses is an error, or is returned if the pod can do without it.
        let gone = layout.apply("/no/such", &settings(&layout, &all_limits()));
        assert!(gone.unwrap_err().to_string().contains("cpu.weight"));
    }

    /// On the real kernel, wherever the unified hierarchy is mounted; its limits are those it has.
    #[test]
    fn a_unified_group_lives_and_dies() {
        use std::os::unix::process::CommandExt;
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts.lines().find(|l| l.split(' ').nth(2) == Some("cgroup2"));
        let Some(mount) = mount.and_then(|line| line.split(' ').nth(1)) else {
            eprintln!("SKIPPED: no cgroup2 hierarchy is mounted");
            return;
        };
        let layout = Layout::V2(mount.into());
        let parent = format!("/ferrite-test-unified-{}", std::process::id());
        struct Remove(Layout, String);
        impl Drop for Remove {
            fn drop(&mut self) {
                self.0.kill(&self.1);
                let _ = self.0.remove(&self.1);
            }
        }
        let _remove = Remove(layout.clone(), parent.clone());
        let group = format!("{parent}/pod/container");
        layout.create(&group).unwrap();
        let controllers =
            fs::read_to_string(below(Path::new(mount), &group).join("cgroup.controllers")).unwrap();
        let available: Vec<Setting> = settings(&layout, &all_limits())
            .into_iter()
            .filter(|setting| controllers.split_whitespace().any(|known| known == setting.controller))
            .collect();
        let passed_over = layout.apply(&group, &available).unwrap();
        assert!(passed_over.is_empty(), "{controllers}: {passed_over:?}");

        let (inside, exec) = (layout.clone(), layout.create_exec(&group, "exec").unwrap());
        let mut command = std::process::Command::new("/bin/sleep");
        command.arg("1000");
        let place = exec.clone();
        // SAFETY: only opens and writes a file between fork and exec.
        unsafe { command.pre_exec(move || inside.join(&place)) };
        let mut child = command.spawn().unwrap();
        let pid = child.id() as i32;
        assert_eq!(layout.processes(&parent), [pid]);
        layout.freeze(&group, true).unwrap();
        layout.freeze(&group, false).unwrap();
        layout.remove_if_empty(&exec);
        assert_eq!(layout.processes(&group), [pid], "a group with a process stays");
        let waiter = std::thread::spawn(move || child.wait().unwrap());
        assert!(layout.kill(&parent));
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(waiter.join().unwrap().signal(), Some(libc::SIGKILL));
        layout.remove(&parent).unwrap();
        assert!(!below(Path::new(mount), &parent).exists());
    }
}
