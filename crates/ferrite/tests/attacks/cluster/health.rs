//! A store that takes no more changes: the server must say that it is not well.

use crate::server::*;
use crate::world::*;
use std::process::{Command, Stdio};

fn health(world: &World, path: &str) -> String {
    let kubeconfig = world.data().join("config/admin.kubeconfig");
    let output =
        world.command("kubectl", &["get", "--raw", path]).env("KUBECONFIG", kubeconfig).output().unwrap();
    text(&output)
}

const PATHS: [&str; 4] = ["/readyz", "/livez", "/healthz", "/readyz/etcd"];

#[test]
fn a_full_disk_is_no_health() {
    let world = World::prepare(&[]);
    std::fs::create_dir(world.data()).unwrap();
    // Large enough to start with, and soon full.
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=24m", "none"]).arg(world.data());
    assert!(mount.status().unwrap().success());
    let _unmount = Unmount(&world);
    let server = Server::start(&world, &[]);
    for path in PATHS {
        assert_eq!(health(&world, path), "ok", "{path}");
    }
    let ballast = world.data().join("ballast");
    let mut fill = Command::new("dd");
    fill.arg("if=/dev/zero").arg(format!("of={}", ballast.display())).arg("bs=64k");
    let full = text(&fill.output().unwrap());
    assert!(full.contains("No space left"), "{full}");
    let refused = (0..64)
        .map(|i| create(&world, &format!("c{i}"), 200_000))
        .find(|output| output.contains("could not be written"));
    assert!(refused.is_some(), "a write fails when the disk is full");
    for path in PATHS {
        let answer = health(&world, path);
        assert!(
            answer.contains("etcd failed") || answer.contains("could not be written"),
            "{path}: {answer}"
        );
    }
    std::fs::remove_file(&ballast).unwrap();
    for path in PATHS {
        assert_eq!(health(&world, path), "ok", "{path}: there is room again");
    }
    server.stop();
}

fn create(world: &World, name: &str, size: usize) -> String {
    let kubeconfig = world.data().join("config/admin.kubeconfig");
    let file = world.write("large", &"x".repeat(size));
    let from = format!("--from-file={}", file.display());
    let output = world
        .command("kubectl", &["create", "configmap", name, &from])
        .env("KUBECONFIG", kubeconfig)
        .output()
        .unwrap();
    text(&output)
}

/// Unmounts the world's directory again.
struct Unmount<'a>(&'a World);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.data()).status();
    }
}

#[test]
fn an_etcd_that_is_away_is_no_health() {
    let world = World::prepare(&[]);
    let (client, peer) = ("http://127.0.0.1:2379", "http://127.0.0.1:2380");
    let arguments =
        ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer];
    let mut etcd = world
        .command("etcd", &arguments)
        .arg("--data-dir")
        .arg(world.path("etcd"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _server = Server::start(&world, &["--etcd-servers", client]);
    for path in PATHS {
        assert_eq!(health(&world, path), "ok", "{path}");
    }
    etcd.kill().unwrap();
    etcd.wait().unwrap();
    for path in PATHS {
        let answer = health(&world, path);
        assert!(
            answer.contains("etcd failed") || answer.contains("internal server error"),
            "{path}: {answer}"
        );
    }
    assert_eq!(health(&world, "/livez/ping"), "ok");
}
