//! More connections than there are descriptors.

use crate::server::*;
use crate::world::*;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;

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
