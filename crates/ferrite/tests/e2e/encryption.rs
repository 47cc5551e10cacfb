//! Encryption at rest: what etcd's own tools see of it, keys that are rotated, and files that cannot be used.

use crate::server::{Server, fails, kubectl, text};
use crate::world::*;
use std::path::Path;
use std::process::{Child, Stdio};

/// An etcd of its own, ended with this value.
struct Etcd(Child);

impl Etcd {
    fn start(world: &World) -> Self {
        let mut etcd = world.command("etcd", &["--data-dir", world.path("etcd").to_str().unwrap()]);
        let log = std::fs::File::create(world.path("etcd.log")).unwrap();
        let etcd = etcd.stdout(Stdio::null()).stderr(log).spawn();
        let etcd = Self(etcd.expect("etcd is not installed: run `cargo xtask test --install`"));
        let healthy = "127.0.0.1:2379".parse().unwrap();
        eventually("etcd serves", || world.netns.http_get(healthy, "/health").ok());
        etcd
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn key(letter: &str) -> String {
    // Thirty-two times the same letter.
    match letter {
        "a" => "YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWE=".to_owned(),
        _ => "YmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmI=".to_owned(),
    }
}

fn configuration(providers: &str) -> String {
    format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: [secrets]\n  providers:\n{providers}"
    )
}

/// The value of a key, as etcd has it.
fn stored(world: &World, key: &str) -> Vec<u8> {
    let mut command = world.command("etcdctl", &["get", key, "--print-value-only"]);
    let output = command.env("ETCDCTL_API", "3").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    output.stdout
}

fn begins(world: &World, key: &str, prefix: &str) -> bool {
    stored(world, key).starts_with(prefix.as_bytes())
}

#[test]
fn secrets_are_encrypted_in_a_real_etcd_and_keys_are_rotated() {
    let world = World::prepare(&[]);
    let _etcd = Etcd::start(&world);
    let file = world.path("encryption.yaml");
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    let old = format!("  - aescbc: {{keys: [{{name: key1, secret: {}}}]}}\n  - identity: {{}}\n", key("a"));
    write(&configuration(&old));
    let flags = [
        "--etcd-servers=http://127.0.0.1:2379",
        "--encryption-provider-config",
        file.to_str().unwrap(),
        "--encryption-provider-config-automatic-reload",
    ];
    // Written before there was any encryption.
    let server = Server::start(&world, &flags[..1]);
    kubectl(&world, &["create", "secret", "generic", "early", "--from-literal=a=classified"]);
    assert!(begins(&world, "/registry/secrets/default/early", "{"));
    server.stop();

    let server = Server::start(&world, &flags);
    kubectl(&world, &["create", "secret", "generic", "late", "--from-literal=a=classified"]);
    kubectl(&world, &["create", "configmap", "open", "--from-literal=a=known"]);
    let late = "/registry/secrets/default/late";
    assert!(begins(&world, late, "k8s:enc:aescbc:v1:key1:"));
    assert!(begins(&world, "/registry/configmaps/default/open", "{"));
    // Y2xhc3NpZmllZA== is what the object has.
    let both = kubectl(&world, &["get", "secrets", "-o", "jsonpath={.items[*].data.a}"]);
    assert_eq!(both.trim(), "Y2xhc3NpZmllZA== Y2xhc3NpZmllZA==");
    assert!(kubectl(&world, &["get", "secret", "late", "-o", "yaml"]).contains("Y2xhc3NpZmllZA=="));

    // A file that is half written, and one that is wrong, leave everything as it was.
    write(&configuration("  - aescbc: {keys: [{na"));
    write("apiVersion: v1\nkind: Pod\n");
    kubectl(&world, &["create", "secret", "generic", "meanwhile", "--from-literal=a=b"]);
    assert!(begins(&world, "/registry/secrets/default/meanwhile", "k8s:enc:aescbc:v1:key1:"));

    // Another key and another cipher: the next write has it, and a write that changes nothing is one.
    let new = format!("  - secretbox: {{keys: [{{name: key2, secret: {}}}]}}\n", key("b"));
    let next = world.path("next.yaml");
    std::fs::write(&next, configuration(&format!("{new}{old}"))).unwrap();
    std::fs::rename(&next, &file).unwrap();
    let version =
        |name: &str| kubectl(&world, &["get", "secret", name, "-o", "jsonpath={.metadata.resourceVersion}"]);
    let before = version("late");
    // As everybody does after a new key: what is there is written again.
    let rewrite = || {
        let every = kubectl(&world, &["get", "secrets", "-o", "json"]);
        let file = world.write("every.json", &every);
        kubectl(&world, &["replace", "-f", file.to_str().unwrap()]);
    };
    eventually("values that the new key has encrypted", || {
        rewrite();
        begins(&world, late, "k8s:enc:secretbox:v1:key2:").then_some(())
    });
    assert_ne!(version("late"), before);
    let rewritten = version("late");
    rewrite();
    assert_eq!(version("late"), rewritten, "nothing changes, and the key is the present one");
    for name in ["early", "late", "meanwhile"] {
        let path = format!("/registry/secrets/default/{name}");
        assert!(begins(&world, &path, "k8s:enc:secretbox:v1:key2:"), "{name}");
    }
    server.stop();

    // The old key is not needed any more.
    write(&configuration(&new));
    let server = Server::start(&world, &flags);
    assert!(kubectl(&world, &["get", "secret", "late", "-o", "yaml"]).contains("Y2xhc3NpZmllZA=="));
    server.stop();

    // Without the configuration nothing of it can be read, and everything else can.
    let server = Server::start(&world, &flags[..1]);
    let kubeconfig = world.data().join("config/admin.kubeconfig");
    let refused =
        world.command("kubectl", &["get", "secrets"]).env("KUBECONFIG", kubeconfig).output().unwrap();
    let refused = text(&refused);
    assert!(refused.contains("identity transformer tried to read encrypted data"), "{refused}");
    assert!(kubectl(&world, &["get", "configmap", "open"]).contains("open"));
    server.stop();
}

#[test]
fn objects_are_stored_as_protobuf_where_a_flag_says_so() {
    let world = World::prepare(&[]);
    let _etcd = Etcd::start(&world);
    let file = world.write(
        "encryption.yaml",
        &configuration(&format!("  - secretbox: {{keys: [{{name: key1, secret: {}}}]}}\n", key("a"))),
    );
    let etcd = "--etcd-servers=http://127.0.0.1:2379";
    let encryption = ["--encryption-provider-config", file.to_str().unwrap()];
    let as_protobuf = "--storage-media-type=application/vnd.kubernetes.protobuf";
    let (map, secret) = ("/registry/configmaps/default/a", "/registry/secrets/default/a");
    let custom = "apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: cats.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: cats, singular: cat, kind: Cat}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
";
    let apply = |name: &str, text: &str| {
        let file = world.write(name, text);
        kubectl(&world, &["apply", "-f", file.to_str().unwrap()]);
    };
    let server = Server::start(&world, &[&[etcd, as_protobuf][..], &encryption].concat());
    kubectl(&world, &["create", "configmap", "a", "--from-literal=a=known"]);
    kubectl(&world, &["create", "secret", "generic", "a", "--from-literal=a=classified"]);
    kubectl(&world, &["create", "deployment", "web", "--image=x", "--replicas=0"]);
    apply("crd.yaml", custom);
    kubectl(&world, &["wait", "--for=condition=established", "crd/cats.example.com"]);
    apply("cat.yaml", "apiVersion: example.com/v1\nkind: Cat\nmetadata: {name: tom}\ncolour: grey\n");
    assert!(begins(&world, map, "k8s\0") && begins(&world, secret, "k8s:enc:secretbox:v1:key1:"));
    assert!(begins(&world, "/registry/deployments/default/web", "k8s\0"));
    assert!(begins(&world, "/registry/example.com/cats/default/tom", "{"));
    let every = || {
        let kinds = "configmaps,secrets,deployments,cats,clusterroles,flowschemas,priorityclasses,services";
        kubectl(&world, &["get", kinds, "-A", "-o", "yaml"])
    };
    let before = every();
    // Patches read and write both forms.
    kubectl(&world, &["patch", "configmap", "a", "-p", "{\"data\":{\"b\":\"new\"}}"]);
    kubectl(&world, &["patch", "configmap", "a", "-p", "{\"data\":{\"b\":null}}"]);
    server.stop();

    // A server that writes JSON reads both, and a write of an object changes its form.
    let server = Server::start(&world, &[&[etcd][..], &encryption].concat());
    let without_versions = |text: &str| {
        let kept = |line: &&str| !line.contains("resourceVersion:") && !line.contains("time: ");
        text.lines().filter(kept).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(without_versions(&every()), without_versions(&before));
    kubectl(&world, &["label", "configmap", "a", "x=y"]);
    assert!(begins(&world, map, "{"));
    assert!(begins(&world, "/registry/deployments/default/web", "k8s\0"));
    let (same, replaced) = (kubectl(&world, &["get", "deployment", "web", "-o", "json"]), "web.json");
    let file = world.write(replaced, &same);
    kubectl(&world, &["replace", "-f", file.to_str().unwrap()]);
    assert!(begins(&world, "/registry/deployments/default/web", "{"));
    server.stop();
}

fn find(dir: &Path, part: &[u8]) -> bool {
    std::fs::read_dir(dir).unwrap().any(|file| {
        let path = file.unwrap().path();
        match path.is_dir() {
            true => find(&path, part),
            false => {
                std::fs::read(&path).unwrap_or_default().windows(part.len()).any(|window| window == part)
            }
        }
    })
}

#[test]
fn the_embedded_store_has_no_plain_text_on_disk() {
    let world = World::prepare(&[]);
    let providers = format!("  - aesgcm: {{keys: [{{name: k, secret: {}}}]}}\n", key("a"));
    let file = world.write("encryption.yaml", &configuration(&providers));
    let flags = ["--encryption-provider-config", file.to_str().unwrap()];
    let server = Server::start(&world, &flags);
    kubectl(&world, &["create", "secret", "generic", "one", "--from-literal=a=classified"]);
    kubectl(&world, &["create", "configmap", "two", "--from-literal=a=well-known"]);
    server.stop();
    let store = world.data().join("data/store");
    let store = if store.exists() { store } else { world.data() };
    assert!(find(&store, b"well-known"), "the store is where it is expected");
    assert!(!find(&store, b"Y2xhc3NpZmllZA==") && find(&store, b"k8s:enc:aesgcm:v1:k:"));
    let server = Server::start(&world, &flags);
    assert!(kubectl(&world, &["get", "secret", "one", "-o", "yaml"]).contains("Y2xhc3NpZmllZA=="));
    server.stop();
}

#[test]
fn a_configuration_that_cannot_be_used_is_refused() {
    let world = World::prepare(&[]);
    let run = |text: &str| {
        let file = world.write("encryption.yaml", text);
        fails(&world, &["kube-apiserver", "--encryption-provider-config", file.to_str().unwrap()])
    };
    let short = run(&configuration("  - aescbc: {keys: [{name: k, secret: aHVudGVyMg==}]}\n"));
    assert!(
        short.contains("secret is not of the expected length, got 7, expected one of [16 24 32]"),
        "{short}"
    );
    assert!(!short.contains("aHVudGVyMg"), "{short}");
    assert!(run("nothing").contains("cannot use --encryption-provider-config"));
}
