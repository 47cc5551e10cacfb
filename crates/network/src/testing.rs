//! Network namespaces for tests.

#![allow(clippy::unwrap_used, reason = "a test that fails should stop at once")]

use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;

use ferrite_netlink::{Connection, Netns};
use ferrite_nft::Ruleset;

/// A network namespace that lives as long as the value: an idle thread keeps it.
#[derive(Debug)]
pub struct TestNs {
    pub path: PathBuf,
    stop: Option<mpsc::Sender<()>>,
    keeper: Option<thread::JoinHandle<()>>,
}

impl TestNs {
    #[expect(clippy::new_without_default, reason = "it makes something of the kernel's")]
    pub fn new() -> Self {
        let (ready, made) = mpsc::channel();
        let (stop, stopped) = mpsc::channel::<()>();
        let keeper = thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("these tests need root");
            let tid = nix::unistd::gettid();
            ready.send(PathBuf::from(format!("/proc/self/task/{tid}/ns/net"))).unwrap();
            let _ = stopped.recv();
        });
        Self { path: made.recv().unwrap(), stop: Some(stop), keeper: Some(keeper) }
    }

    /// Runs `work` on a thread inside the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.netns().run(work).unwrap()
    }

    pub fn netns(&self) -> Netns {
        Netns::from_path(&self.path).unwrap()
    }

    /// Links, addresses and routes of the namespace.
    pub fn route(&self) -> Connection {
        Connection::new_in(&self.netns()).unwrap()
    }

    /// Rules of the packet filter of the namespace.
    pub fn ruleset(&self) -> Ruleset {
        Ruleset::open(Some(&self.netns())).unwrap()
    }
}

impl Drop for TestNs {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}
