//! The store's own commands, and etcd's tools, on the data of a real API server.

use crate::server::*;
use crate::world::*;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Flips one bit in the middle of a file.
fn damage(path: &Path) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let (mut byte, middle) = ([0], file.metadata().unwrap().len() / 2);
    file.read_exact_at(&mut byte, middle).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], middle).unwrap();
}

fn files(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)).map(|e| e.path()).collect()
}

#[test]
fn a_store_is_checked_saved_damaged_and_restored() {
    let world = World::prepare(&[]);
    assert!(fails(&world, &["store", "check"]).contains("store"), "there is none yet");
    assert_eq!(succeeds(&world, &["snapshot", "list"]), "", "nothing was saved yet");
    let server = Server::start(&world, &[]);
    kubectl(&world, &["create", "configmap", "kept", "--from-literal=a=1"]);

    // Checking and saving work while it runs; commands that would disturb it do not.
    assert!(succeeds(&world, &["store", "check"]).contains("every checksum matches"));
    assert!(succeeds(&world, &["store", "stats"]).contains("/registry/configmaps"));
    assert!(fails(&world, &["store", "compact"]).contains("the cluster is running"));
    assert!(succeeds(&world, &["snapshot", "save"]).starts_with("saved "));
    let saved = files(&world.data().join("snapshots"), "0").remove(0);
    let saved_text = saved.to_str().unwrap();
    assert!(succeeds(&world, &["snapshot", "list"]).contains(saved_text));
    assert!(fails(&world, &["snapshot", "save", saved_text]).contains("exists"));
    for more in [&[][..], &["--replace"]] {
        let refused = fails(&world, &[&["snapshot", "restore", saved_text], more].concat());
        assert!(refused.contains("stop it first"), "{refused}");
    }
    let second = Server::try_start(&world, &["--secure-port", "6444"]).err().expect("the directory is held");
    assert!(second.contains("is in use by process"), "{second}");

    kubectl(&world, &["create", "configmap", "later", "--from-literal=a=1"]);
    let version =
        kubectl(&world, &["get", "configmap", "later", "-o", "jsonpath={.metadata.resourceVersion}"]);
    server.stop();
    assert!(succeeds(&world, &["store", "compact"]).contains("bytes now"));
    let store = world.data().join("store");
    let checkpoint = files(&store, "checkpoint-").remove(0);

    // Damage is found, named, and nothing is served from it.
    damage(&checkpoint);
    for complaint in [fails(&world, &["store", "check"]), Server::try_start(&world, &[]).err().unwrap()] {
        assert!(complaint.contains(checkpoint.to_str().unwrap()), "{complaint}");
        assert!(complaint.contains("checksum"), "{complaint}");
    }

    assert!(fails(&world, &["snapshot", "restore", saved_text]).contains("--replace"));
    let restored = succeeds(&world, &["snapshot", "restore", saved_text, "--replace"]);
    assert!(restored.contains("the old store is in") && restored.contains("restored"), "{restored}");
    let server = Server::start(&world, &[]);
    let names = kubectl(&world, &["get", "configmaps", "-o", "name"]);
    assert!(names.contains("configmap/kept") && !names.contains("configmap/later"), "{names}");
    kubectl(&world, &["create", "configmap", "anew", "--from-literal=a=1"]);
    let anew = kubectl(&world, &["get", "configmap", "anew", "-o", "jsonpath={.metadata.resourceVersion}"]);
    let number = |text: &str| text.parse::<u64>().unwrap();
    assert!(number(&anew) > number(&version) + 900_000, "no revision means two things: {anew}");
    server.stop();

    // The check rejects a damaged copy, and restore does not write it over anything.
    succeeds(&world, &["snapshot", "save"]);
    damage(&saved);
    let listed = fails(&world, &["snapshot", "list"]);
    assert_eq!(listed.lines().filter(|l| l.contains("keys")).count(), 1, "{listed}");
    assert!(fails(&world, &["snapshot", "restore", saved_text, "--replace"]).contains("checksum"));
    assert!(succeeds(&world, &["store", "check"]).contains("every checksum matches"));
}

#[test]
fn the_etcd_api_is_served_to_those_with_a_certificate_for_it() {
    let world = World::prepare(&[]);
    let _server = Server::start(&world, &["--etcd-listen", "127.0.0.1:2379"]);
    let pki = world.data().join("pki");
    let etcdctl = |certificate: Option<PathBuf>, arguments: &[&str]| -> Output {
        let mut command = world.command("etcdctl", &["--endpoints", "https://127.0.0.1:2379"]);
        command.args(["--dial-timeout", "3s", "--command-timeout", "5s"]).env("ETCDCTL_API", "3");
        command.arg("--cacert").arg(pki.join("etcd/ca.crt"));
        if let Some(certificate) = certificate {
            command.arg("--cert").arg(certificate.with_extension("crt"));
            command.arg("--key").arg(certificate.with_extension("key"));
        }
        command.args(arguments).output().expect("etcdctl can be run")
    };
    let ours = || Some(pki.join("etcd/client"));
    let keys = text(&etcdctl(ours(), &["get", "/registry/namespaces/", "--prefix", "--keys-only"]));
    assert!(keys.contains("/registry/namespaces/kube-system"), "{keys}");
    let health = text(&etcdctl(ours(), &["endpoint", "health"]));
    assert!(health.contains("is healthy"), "{health}");
    let members = text(&etcdctl(ours(), &["member", "list"]));
    assert!(members.contains("https://127.0.0.1:2379"), "{members}");
    // Neither nobody nor the cluster's administrator, whose certificate is of the API's authority.
    assert!(pki.join("admin.crt").exists());
    for other in [None, Some(pki.join("admin"))] {
        let refused = etcdctl(other.clone(), &["get", "/registry/namespaces/default"]);
        assert!(!refused.status.success(), "{other:?}: {}", text(&refused));
    }
}

#[test]
fn a_control_plane_without_a_node() {
    let world = World::prepare(&[]);
    let server = Server::try_run(&world, "server", &[]).unwrap();
    kubectl(&world, &["create", "deployment", "a", "--image=x"]);
    eventually("controllers run", || {
        let pods = kubectl(&world, &["get", "pods", "-l", "app=a", "-o", "name"]);
        (!pods.trim().is_empty()).then_some(())
    });
    let unscheduled = ["wait", "pod", "-l", "app=a", "--for=condition=PodScheduled=false", "--timeout=30s"];
    kubectl(&world, &unscheduled);
    server.stop();
}
