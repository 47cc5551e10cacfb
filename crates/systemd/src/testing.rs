//! A real systemd for tests: the first process of namespaces of its own, with control groups of its own.
//!
//! A test runs itself again inside ([`Machine::run_again`]), on a machine whose init is systemd. Everything
//! ends with the value.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test that fails should stop at once")]

use ferrite_cgroup::Version;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const SYSTEMD: &str = "/lib/systemd/systemd";
/// Time limit for the start of systemd; only a bound.
const PATIENCE: Duration = Duration::from_secs(60);
/// Says to a program that it is the second run.
const INSIDE: &str = "FERRITE_INSIDE_SYSTEMD";

/// Files that would lead systemd to start this machine's services are covered, and so are those that it
/// could change for everybody.
const PREPARE: &str = r#"
set -e
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/systemd
mount -t tmpfs tmpfs /var/log
mkdir -p /run/lock /etc/systemd/system
printf '[Unit]\nDefaultDependencies=no\n' > /etc/systemd/system/test.target
# The file system is everybody's: the services of a start would empty /tmp.
for unit in sysinit.target systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service \
  systemd-tmpfiles-clean.service systemd-journald.service systemd-udevd.service; do
  ln -s /dev/null /etc/systemd/system/$unit
done
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
umount -R /sys/fs/cgroup
if [ "$1" = unified ]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  for controller in cpu cpuacct cpuset memory devices freezer blkio pids; do
    mkdir /sys/fs/cgroup/$controller
    mount -t cgroup -o $controller cgroup /sys/fs/cgroup/$controller
  done
  mkdir /sys/fs/cgroup/systemd
  mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi
exec env -i container=test NOTIFY_SOCKET="$2" PATH="$PATH" \
  /lib/systemd/systemd --system --unit=test.target --log-target=null --show-status=no
"#;

/// A running systemd.
pub struct Machine {
    unshare: Child,
    /// systemd, as this process sees it.
    pid: i32,
    groups: Groups,
    _directory: tempfile::TempDir,
}

/// Control groups of the machine, below which it sees nothing of ours. Removed with the value.
struct Groups(Vec<PathBuf>);

impl Groups {
    fn make() -> Self {
        let name = format!("ferrite-systemd-{}", std::process::id());
        let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let mut groups = Self(Vec::new());
        for line in table.lines() {
            let mut fields = line.split(' ').skip(1);
            let (Some(point), Some(kind)) = (fields.next(), fields.next()) else { continue };
            if !kind.starts_with("cgroup") {
                continue;
            }
            let group = Path::new(point).join(&name);
            std::fs::create_dir_all(&group).unwrap();
            for file in ["cpuset.cpus", "cpuset.mems"] {
                // A cpuset without CPUs takes no processes.
                if let Ok(value) = std::fs::read_to_string(Path::new(point).join(file)) {
                    let _ = std::fs::write(group.join(file), value.trim());
                }
            }
            groups.0.push(group);
        }
        groups
    }

    /// Makes the command run in them.
    fn enter(&self, command: &mut Command) {
        let files: Vec<PathBuf> = self.0.iter().map(|group| group.join("cgroup.procs")).collect();
        // SAFETY: writes to files between fork and exec; the child of a test may allocate.
        unsafe { command.pre_exec(move || files.iter().try_for_each(|file| std::fs::write(file, "0"))) };
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.0.iter().for_each(|group| remove(group));
    }
}

fn remove(group: &Path) {
    for entry in std::fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _ = std::fs::remove_dir(group);
}

impl Machine {
    /// Starts one.
    pub fn start(cgroups: Version) -> Self {
        assert!(Path::new(SYSTEMD).exists(), "systemd is not installed: run `cargo xtask test --install`");
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let groups = Groups::make();
        let mut command = Command::new("unshare");
        command.args(["--cgroup", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"]);
        command.args(["--mount-proc", "--propagation", "private", "/bin/sh", "-c", PREPARE, "prepare"]);
        command.arg(if cgroups == Version::V2 { "unified" } else { "v1" }).arg(&path);
        command.stdin(Stdio::null());
        groups.enter(&mut command);
        let mut machine = Self { unshare: command.spawn().unwrap(), pid: 0, groups, _directory: directory };
        let mut buffer = [0; 4096];
        loop {
            let count = socket.recv(&mut buffer).expect("systemd says that it is ready");
            if String::from_utf8_lossy(&buffer[..count]).lines().any(|line| line == "READY=1") {
                break;
            }
        }
        let unshare = machine.unshare.id();
        let children = std::fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).unwrap();
        machine.pid = children.trim().parse().unwrap();
        machine
    }

    /// Returns true if this program runs on such a machine.
    pub fn is_inside() -> bool {
        std::env::var_os(INSIDE).is_some()
    }

    /// Runs one test of this program again, inside. It must succeed.
    pub fn run_again(&self, test: &str) {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid.to_string()]);
        command.args(["--mount", "--cgroup", "--net", "--ipc", "--uts", "--pid", "--"]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(INSIDE, "1");
        self.groups.enter(&mut command);
        assert!(command.status().unwrap().success(), "{test} failed inside");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.pid > 0 {
            // SAFETY: a signal to a process that our child holds unreaped. Its namespace ends with it.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
        } else {
            let _ = self.unshare.kill();
        }
        let _ = self.unshare.wait();
    }
}
