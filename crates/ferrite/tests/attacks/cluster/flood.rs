//! More connections than there are descriptors, and more bytes than there is memory.

use crate::server::*;
use crate::world::*;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::sync::Arc;
use std::time::Duration;

/// The usual default limit of open files.
const DESCRIPTORS: u64 = 1024;

#[test]
fn strangers_lock_nobody_out() {
    let world = World::prepare(&[]);
    let mut starting = command(&world, &["kube-apiserver", "--bind-address", "127.0.0.1"]);
    // SAFETY: one system call, which is async-signal-safe.
    unsafe {
        starting.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS, DESCRIPTORS)?));
    }
    let _server = Server::try_spawn(&mut starting).unwrap();
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    // Idle connections that never even begin a handshake, and more of them than the server has descriptors.
    let strangers = world.netns.run(|| {
        let address: SocketAddr = "127.0.0.1:6443".parse().unwrap();
        (0..2 * DESCRIPTORS).filter_map(|_| TcpStream::connect(address).ok()).collect::<Vec<_>>()
    });
    assert!(strangers.len() as u64 > DESCRIPTORS, "{}", strangers.len());
    kubectl(&world, &["create", "configmap", "written", "--request-timeout=20s"]);
    kubectl(&world, &["get", "configmap", "written", "--request-timeout=20s"]);
    drop(strangers);
}

/// A user without any rights may still ask which it has.
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
const MIB: usize = 1 << 20;

/// Memory of a process, in bytes.
fn memory(pid: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn bodies_that_never_end_do_not_fill_the_memory() {
    let world = World::prepare(&[]);
    let tokens = world.write("tokens.csv", "password,mallory,1\n");
    let server = Server::start(&world, &["--token-auth-file", tokens.to_str().unwrap()]);
    let before = memory(server.0.id());
    let tls = Arc::new(ferrite_pki::unverified_client_config().unwrap());
    let address: SocketAddr = "127.0.0.1:6443".parse().unwrap();
    let head = format!(
        "POST {REVIEWS} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer password\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        3 * MIB - 1
    );
    // Together 450 MiB, of requests that lack their last byte.
    let body = vec![b' '; 3 * MIB - 2];
    let held: Vec<_> = world.netns.run(move || {
        (0..150)
            .map(|_| {
                let name = "localhost".try_into().unwrap();
                let client = rustls::ClientConnection::new(Arc::clone(&tls), name).unwrap();
                let socket = TcpStream::connect(address).unwrap();
                socket.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
                let mut stream = rustls::StreamOwned::new(client, socket);
                // The server may refuse the request before it is sent whole.
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
                stream
            })
            .collect()
    });
    let grown = memory(server.0.id()).saturating_sub(before);
    assert!(grown < 250 * MIB, "{} MiB", grown / MIB);
    kubectl(&world, &["create", "configmap", "written", "--request-timeout=20s"]);
    drop(held);
}
