//! A log that was changed behind the store's back.

use crate::server::*;
use crate::world::*;
use std::path::PathBuf;

/// The last log and where its last block with something in it begins.
fn last_batch(world: &World) -> (PathBuf, Vec<u8>, usize) {
    let mut logs: Vec<PathBuf> = std::fs::read_dir(world.data().join("store"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("log-"))
        .collect();
    logs.sort();
    let log = logs.pop().unwrap();
    let bytes = std::fs::read(&log).unwrap();
    let key = b"configmaps/default/acknowledged";
    let at = bytes.windows(key.len()).rposition(|window| window == key).unwrap();
    (log, bytes, at)
}

#[test]
fn an_acknowledged_write_is_never_dropped_silently() {
    let world = World::prepare(&[]);
    let mut server = Server::start(&world, &["--port", "0"]);
    kubectl(&world, &["create", "configmap", "acknowledged", "--from-literal=k=v"]);
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    let (log, mut bytes, at) = last_batch(&world);
    bytes[at + 3] ^= 4;
    std::fs::write(&log, &bytes).unwrap();

    let told = fails(&world, &["store", "check"]);
    assert!(told.contains("is damaged at byte"), "{told}");
    let Err(refused) = Server::try_start(&world, &["--port", "0"]) else {
        panic!("the server must not start without what it acknowledged")
    };
    assert!(refused.contains("ferrite store repair"), "{refused}");

    let repaired = succeeds(&world, &["store", "repair"]);
    assert!(repaired.contains("kept as it was"), "{repaired}");
    let _server = Server::start(&world, &["--port", "0"]);
    kubectl(&world, &["create", "configmap", "acknowledged"]);
}
