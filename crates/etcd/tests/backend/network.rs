//! Network namespaces for members: one each, joined by a bridge in one more, and no way out of any of them.

use nix::sched::{CloneFlags, setns, unshare};
use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// They end with their last holder: this value and the processes inside.
pub struct Network {
    /// Where the bridge is, and the test.
    hub: File,
    members: Vec<File>,
}

/// A namespace with nothing in it.
fn namespace() -> File {
    let made = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("tests that cut networks need root");
        File::open("/proc/thread-self/ns/net").unwrap()
    });
    made.join().unwrap()
}

fn enter_before_exec(namespace: &File, command: &mut Command) {
    let fd: RawFd = namespace.as_raw_fd();
    // SAFETY: setns is async-signal-safe; the descriptor stays open in the parent until after the fork.
    unsafe {
        command.pre_exec(move || match libc::setns(fd, libc::CLONE_NEWNET) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

/// Runs `ip` inside a namespace.
fn ip(namespace: &File, arguments: &str) {
    let mut command = Command::new("ip");
    enter_before_exec(namespace, command.args(arguments.split(' ')));
    let output = command.output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Network {
    pub fn new(size: usize) -> Self {
        let network = Self { hub: namespace(), members: (0..size).map(|_| namespace()).collect() };
        ip(&network.hub, "link set lo up");
        ip(&network.hub, "link add name hub0 type bridge");
        ip(&network.hub, "addr add 10.77.0.254/24 dev hub0");
        ip(&network.hub, "link set hub0 up");
        for (n, member) in network.members.iter().enumerate() {
            let there = format!("/proc/{}/fd/{}", std::process::id(), member.as_raw_fd());
            ip(&network.hub, &format!("link add name m{n} type veth peer name eth0 netns {there}"));
            ip(&network.hub, &format!("link set m{n} master hub0 up"));
            ip(member, "link set lo up");
            ip(member, &format!("addr add {}/24 dev eth0", network.address(n)));
            ip(member, "link set eth0 up");
        }
        network
    }

    pub fn size(&self) -> usize {
        self.members.len()
    }

    pub fn address(&self, n: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, u8::try_from(n + 1).unwrap())
    }

    /// Takes the calling thread to where the bridge is.
    pub fn enter_hub(&self) {
        setns(&self.hub, CloneFlags::CLONE_NEWNET).unwrap();
    }

    /// Makes the command run where member `n` is.
    pub fn enter(&self, n: usize, command: &mut Command) {
        enter_before_exec(&self.members[n], command);
    }

    /// A runtime all of whose threads are where the bridge is.
    pub fn runtime(&self) -> tokio::runtime::Runtime {
        let hub = self.hub.try_clone().unwrap();
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .on_thread_start(move || setns(&hub, CloneFlags::CLONE_NEWNET).unwrap())
            .build()
            .unwrap()
    }

    /// Nobody reaches member `n`, nor it anybody.
    pub fn unplug(&self, n: usize) {
        ip(&self.hub, &format!("link set m{n} down"));
    }

    pub fn plug_in(&self, n: usize) {
        ip(&self.hub, &format!("link set m{n} up"));
    }

    /// Member `n` and the other members no longer hear each other; clients still reach all of them.
    pub fn cut_off_from_peers(&self, n: usize) {
        self.routes_to_peers(n, "add");
    }

    pub fn join_with_peers(&self, n: usize) {
        self.routes_to_peers(n, "del");
    }

    fn routes_to_peers(&self, n: usize, what: &str) {
        for peer in (0..self.size()).filter(|peer| *peer != n) {
            ip(&self.members[n], &format!("route {what} blackhole {}/32", self.address(peer)));
        }
    }
}
