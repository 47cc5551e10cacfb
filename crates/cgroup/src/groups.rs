//! The life of a group: made, limited, entered, halted, emptied, removed.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::layout::{Layout, Version, below};
use crate::limits::{Setting, shares_of_weight};
use crate::{CgroupError, Limits, devices, stats};

/// Rounds of killing the processes of a group before we give up.
const KILL_ROUNDS: u32 = 200;

impl Layout {
    /// Makes the group and the missing groups above it, ready for processes and limits.
    pub fn create(&self, path: &str) -> io::Result<()> {
        for hierarchy in self.hierarchies() {
            if self.is_v2() {
                create_unified(&hierarchy.mount, path)?;
            } else if hierarchy.controllers.iter().any(|c| c == "cpuset") {
                create_cpuset(&hierarchy.mount, path)?;
            } else {
                fs::create_dir_all(below(&hierarchy.mount, path))?;
            }
        }
        Ok(())
    }

    /// Returns true if the group exists on any hierarchy.
    pub fn exists(&self, path: &str) -> bool {
        !path.trim_matches('/').is_empty() && self.mounts().iter().any(|mount| below(mount, path).exists())
    }

    /// Writes limits, and restricts devices. A limit that the kernel lacks and that a container can do without
    /// (swap accounting, huge pages) is skipped; the result has a sentence for each of those.
    pub fn apply(&self, path: &str, limits: &Limits) -> Result<Vec<String>, CgroupError> {
        let skipped = self.write_all(path, &limits.settings(self.version()))?;
        let program = limits.devices.as_deref().and_then(devices::program);
        if let (Some(directory), Some(program)) = (self.unified(path), program) {
            devices::attach(&directory, &program).map_err(CgroupError::Devices)?;
        }
        Ok(skipped)
    }

    /// As [`Layout::apply`], for a group that has other limits. Devices stay as they are.
    pub fn update(&self, path: &str, limits: &Limits) -> Result<Vec<String>, CgroupError> {
        let mut settings = limits.settings(self.version());
        self.write_all(path, &settings).or_else(|_| {
            // Version 1 wants memory <= memory+swap at every moment: when growing, swap goes first.
            settings.reverse();
            self.write_all(path, &settings)
        })
    }

    /// Writes the limits that this kernel has: a controller that the kernel was built without enforces nothing.
    pub fn apply_available(&self, path: &str, limits: &Limits) -> Result<(), CgroupError> {
        limits.settings(self.version()).iter().try_for_each(|setting| match self.write(path, setting) {
            Err(error) if error.is_missing() => Ok(()),
            other => other,
        })
    }

    fn write_all(&self, path: &str, settings: &[Setting]) -> Result<Vec<String>, CgroupError> {
        let mut skipped = Vec::new();
        for setting in settings {
            match self.write(path, setting) {
                Err(_) if !setting.required => {
                    skipped.push(format!("this machine cannot set {}", setting.file));
                }
                other => other?,
            }
        }
        Ok(skipped)
    }

    fn write(&self, path: &str, setting: &Setting) -> Result<(), CgroupError> {
        let directory = self.directory(setting.controller, path);
        let directory = directory.ok_or(CgroupError::NoController(setting.controller))?;
        let file = directory.join(setting.file.as_ref());
        write_control(&file, &setting.value).map_err(|source| CgroupError::Write {
            file,
            value: setting.value.clone(),
            source,
        })
    }

    /// The limits of processor and memory that the group has now; `None` where the kernel shows none. On version 2, the
    /// shares are the fewest that make the group's weight.
    pub fn limits(&self, path: &str) -> Limits {
        let read = |controller: &str, file: &str| {
            let text = fs::read_to_string(self.directory(controller, path)?.join(file)).ok()?;
            Some(text.trim().to_owned())
        };
        let number = |controller: &str, file: &str| read(controller, file)?.parse::<i64>().ok();
        match self.version() {
            Version::V1 => Limits {
                // "Unlimited" is the largest page-aligned number.
                memory: number("memory", "memory.limit_in_bytes")
                    .map(|limit| if limit < 1 << 62 { limit } else { -1 }),
                cpu_shares: number("cpu", "cpu.shares").and_then(|shares| u64::try_from(shares).ok()),
                cpu_quota: number("cpu", "cpu.cfs_quota_us"),
                cpu_period: number("cpu", "cpu.cfs_period_us").and_then(|period| u64::try_from(period).ok()),
                ..Limits::default()
            },
            Version::V2 => {
                let amount = |text: &str| if text == "max" { Some(-1) } else { text.parse().ok() };
                let max = read("cpu", "cpu.max");
                let max = max.as_deref().and_then(|max| max.split_once(' '));
                let weight = number("cpu", "cpu.weight").and_then(|weight| u64::try_from(weight).ok());
                Limits {
                    memory: read("memory", "memory.max").and_then(|limit| amount(&limit)),
                    cpu_shares: weight.map(shares_of_weight),
                    cpu_quota: max.and_then(|(quota, _)| amount(quota)),
                    cpu_period: max.and_then(|(_, period)| period.parse().ok()),
                    ..Limits::default()
                }
            }
        }
    }

    /// Moves the calling, single-threaded process into the group.
    ///
    /// On version 1 it writes `0` to `tasks`, not to `cgroup.procs`: a thread that moves itself does not
    /// take the system-wide thread-group lock, whose writer waits for an RCU grace period (several
    /// milliseconds per container).
    pub fn join(&self, path: &str) -> io::Result<()> {
        let file = if self.is_v2() { "cgroup.procs" } else { "tasks" };
        self.hierarchies().iter().try_for_each(|h| fs::write(below(&h.mount, path).join(file), "0"))
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
        if self.is_v2() {
            return self.join(exec);
        }
        self.join(container)?;
        match self.members(exec) {
            Some(directory) => fs::write(directory.join("tasks"), "0"),
            None => Ok(()),
        }
    }

    /// The group's directory for a fork straight into it; only version 2 can.
    pub fn open_unified(&self, path: &str) -> io::Result<Option<OwnedFd>> {
        self.unified(path).map(|directory| Ok(fs::File::open(directory)?.into())).transpose()
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
        if let Some(directory) = self.unified(path) {
            // Older kernels lack the file; the loop kills there. Elsewhere it only waits.
            let _ = fs::write(directory.join("cgroup.kill"), "1");
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
        let mut result = Ok(());
        for mount in self.all_mounts() {
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
            let _ = fs::write(below(unified, path).join("cgroup.procs"), pid.to_string());
        }
    }

    /// Removes the group where it has neither processes nor children; keeps it where it has.
    pub fn remove_if_empty(&self, path: &str) {
        for mount in self.all_mounts() {
            let _ = fs::remove_dir(below(mount, path));
        }
    }

    /// Halts the processes of a group and those below it, or lets them go on.
    pub fn freeze(&self, path: &str, frozen: bool) -> Result<(), CgroupError> {
        let (file, value) = match (self.version(), frozen) {
            (Version::V1, true) => ("freezer.state", "FROZEN"),
            (Version::V1, false) => ("freezer.state", "THAWED"),
            (Version::V2, true) => ("cgroup.freeze", "1"),
            (Version::V2, false) => ("cgroup.freeze", "0"),
        };
        self.write(path, &Setting::required("freezer", file, value))
    }

    /// Number of processes in this group that the kernel's OOM killer has killed.
    pub fn oom_kills(&self, path: &str) -> u64 {
        let file = if self.is_v2() { "memory.events" } else { "memory.oom_control" };
        self.directory("memory", path)
            .and_then(|directory| fs::read_to_string(directory.join(file)).ok())
            .and_then(|text| stats::field(&text, "oom_kill"))
            .unwrap_or(0)
    }
}

/// Writes a control file that is there. With the flag to create one, the kernel would say that permission is
/// denied where it means that there is no such file.
fn write_control(file: &Path, value: &str) -> io::Result<()> {
    use std::io::Write;
    fs::OpenOptions::new().write(true).truncate(true).open(file)?.write_all(value.as_bytes())
}

/// A cpuset without CPUs takes no process, and a new one has none: copy the parent's, from the top.
fn create_cpuset(mount: &Path, path: &str) -> io::Result<()> {
    let mut parent = mount.to_owned();
    for part in Path::new(path.trim_start_matches('/')) {
        let directory = parent.join(part);
        create_directory(&directory)?;
        for file in ["cpuset.cpus", "cpuset.mems"] {
            // systemd makes cpusets, too, and leaves them empty.
            if fs::read_to_string(directory.join(file))?.trim().is_empty() {
                let value = fs::read_to_string(parent.join(file))?;
                write_control(&directory.join(file), value.trim())?;
            }
        }
        parent = directory;
    }
    Ok(())
}

fn create_directory(directory: &Path) -> io::Result<()> {
    match fs::create_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
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
        create_directory(&directory)?;
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
    use crate::HugePages;

    fn all_limits() -> Limits {
        Limits {
            cpu_shares: Some(1024),
            cpu_quota: Some(50_000),
            cpu_period: Some(100_000),
            cpus: Some("0-1".into()),
            memory_nodes: Some("0".into()),
            memory: Some(64 << 20),
            memory_and_swap: Some(96 << 20),
            pids: Some(100),
            huge_pages: vec![HugePages { size: "2MB".into(), limit: 4 << 20 }],
            io_weight: Some(500),
            unified: [("memory.high".to_owned(), "1000".to_owned())].into(),
            devices: None,
        }
    }

    #[test]
    fn unified_files() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::v2(root.path());
        fs::write(root.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        layout.create("/a/b").unwrap();
        layout.create("/a/b").unwrap();
        let enabled = fs::read_to_string(root.path().join("cgroup.subtree_control")).unwrap();
        assert_eq!(enabled, "+memory", "each is asked for by itself; a plain file keeps the last");
        let group = root.path().join("a/b");
        let files = [
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
        ];
        layout.apply_available("/a/b", &all_limits()).unwrap();
        assert_eq!(fs::read_dir(&group).unwrap().count(), 0, "this kernel has no limit at all");
        assert!(layout.apply("/a/b", &all_limits()).unwrap_err().to_string().contains("cpu.weight"));
        for (file, _) in files {
            fs::write(group.join(file), "").unwrap();
        }
        assert_eq!(layout.apply("/a/b", &all_limits()).unwrap(), [""; 0]);
        for (file, want) in files {
            assert_eq!(fs::read_to_string(group.join(file)).unwrap(), want, "{file}");
        }
        let Limits { memory, cpu_quota, cpu_period, .. } = all_limits();
        let limits = Limits { memory, cpu_quota, cpu_period, cpu_shares: Some(1012), ..Limits::default() };
        assert_eq!(layout.limits("/a/b"), limits);
        let none = Limits { memory: Some(-1), cpu_quota: Some(-1), ..limits };
        layout.apply("/a/b", &none).unwrap();
        assert_eq!(layout.limits("/a/b"), none);
        assert_eq!(layout.limits("/gone"), Limits::default());
        for file in ["io.weight", "hugetlb.2MB.max"] {
            fs::remove_file(group.join(file)).unwrap();
        }
        let skipped = ["this machine cannot set hugetlb.2MB.max", "this machine cannot set io.weight"];
        assert_eq!(layout.apply("/a/b", &all_limits()).unwrap(), skipped);
        fs::write(group.join("cgroup.freeze"), "").unwrap();
        layout.freeze("/a/b", true).unwrap();
        assert_eq!(fs::read_to_string(group.join("cgroup.freeze")).unwrap(), "1");
        fs::write(group.join("memory.events"), "low 0\noom 3\noom_kill 2\n").unwrap();
        assert_eq!(layout.oom_kills("/a/b"), 2);
        fs::create_dir(group.join("exec")).unwrap();
        fs::write(group.join("cgroup.procs"), "11\n").unwrap();
        fs::write(group.join("exec/cgroup.procs"), "12\n0\n").unwrap();
        assert_eq!(layout.processes("/a/b"), [11, 12], "0 is a process of another namespace");
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
        let layout = Layout::v2(mount);
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
        let available: Vec<Setting> = all_limits()
            .settings(Version::V2)
            .into_iter()
            .filter(|setting| controllers.split_whitespace().any(|known| known == setting.controller))
            .collect();
        let skipped = layout.write_all(&group, &available).unwrap();
        assert!(skipped.is_empty(), "{controllers}: {skipped:?}");

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
