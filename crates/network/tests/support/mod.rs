//! Network namespaces, and traffic between them.
#![allow(clippy::unwrap_used, dead_code, reason = "a test may panic, and need not use all of it")]

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

pub use ferrite_network::testing::TestNs;
use ferrite_network::{Bridge, PodNetwork, PodRef};

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
