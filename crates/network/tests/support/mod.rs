//! Network namespaces, and traffic between them.
#![allow(clippy::unwrap_used, dead_code, reason = "a test may panic, and need not use all of it")]

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ferrite_network::{Bridge, PodNetwork, PodRef};
use nlink::netlink::namespace::Netns;
use nlink::netlink::{Connection, Route};

/// A network namespace that lives as long as the value: an idle thread keeps it.
pub struct TestNs {
    pub path: PathBuf,
    stop: Option<mpsc::Sender<()>>,
    keeper: Option<thread::JoinHandle<()>>,
}

impl TestNs {
    pub fn new() -> Self {
        let (ready, made) = mpsc::channel();
        let (stop, stopped) = mpsc::channel::<()>();
        let keeper = thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("these tests need root");
            let tid = nix::unistd::gettid();
            ready.send(PathBuf::from(format!("/proc/self/task/{tid}/ns/net"))).unwrap();
            let _ = stopped.recv();
        });
        let path = made.recv().unwrap();
        Self { path, stop: Some(stop), keeper: Some(keeper) }
    }

    /// Runs `work` on a thread inside the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Netns::from_path(&self.path).unwrap().run(work).unwrap()
    }

    pub fn route(&self) -> Connection<Route> {
        Connection::new_in(self.path.as_path()).unwrap()
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

pub fn pod(name: &str) -> PodRef {
    PodRef { namespace: "default".into(), name: name.into(), uid: format!("uid-{name}"), ..PodRef::default() }
}

pub async fn attach(bridge: &Bridge, sandbox: &str, ns: &TestNs) -> IpAddr {
    bridge.attach(sandbox, &ns.path, &pod(sandbox)).await.unwrap().ips[0]
}

/// Sends a line from `from` to a server at `address` in `to` and returns its response.
pub fn echo(from: &TestNs, to: &TestNs, address: IpAddr) -> String {
    let listener = to.run(|| TcpListener::bind((address, 0)).unwrap());
    let target = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let (mut stream, peer) = listener.accept().unwrap();
        let mut word = [0; 4];
        stream.read_exact(&mut word).unwrap();
        stream.write_all(&word).unwrap();
        peer
    });
    let mut stream = from.run(|| TcpStream::connect_timeout(&target, Duration::from_secs(10)).unwrap());
    stream.write_all(b"ping").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    format!("{text} from {}", server.join().unwrap().ip())
}

pub fn connect_error(from: &TestNs, target: &str) -> io::ErrorKind {
    let target: SocketAddr = target.parse().unwrap();
    from.run(|| TcpStream::connect_timeout(&target, Duration::from_secs(10)).unwrap_err().kind())
}
