//! Volumes that the kubelet writes as root.

use super::*;
use crate::world::{World, eventually};
use std::path::Path;

/// A pod that may do nothing, as the restricted policy has it, with every kind of volume the kubelet writes.
fn restricted(name: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{a: b}}}}
spec:
  securityContext: {{runAsNonRoot: true, runAsUser: 1000, fsGroup: 2000, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: c
    image: {SHELL}
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
    volumeMounts:
    - {{name: secret, mountPath: /v/secret}}
    - {{name: config, mountPath: /v/config, readOnly: false}}
    - {{name: projected, mountPath: /v/projected}}
    - {{name: downward, mountPath: /v/downward}}
    - {{name: secret, mountPath: /v/key, subPath: key}}
    - {{name: scratch, mountPath: /scratch}}
    - {{name: scratch, mountPath: /sub, subPath: made/here}}
  volumes:
  - {{name: secret, secret: {{secretName: s, defaultMode: 0400}}}}
  - {{name: config, configMap: {{name: c}}}}
  - {{name: projected, projected: {{sources: [{{secret: {{name: s}}}}, {{serviceAccountToken: {{path: token}}}}]}}}}
  - {{name: downward, downwardAPI: {{items: [{{path: labels, fieldRef: {{fieldPath: metadata.labels}}}}]}}}}
  - {{name: scratch, emptyDir: {{}}}}
"#
    )
}

fn with_objects() -> World {
    let world = world_with_shell();
    world.kubectl(&["create", "secret", "generic", "s", "--from-literal=key=one"]);
    world.kubectl(&["create", "configmap", "c", "--from-literal=key=one"]);
    world
}

#[test]
fn volumes_of_the_kubelet_cannot_be_written() {
    let world = with_objects();
    world.create(&restricted("p"));
    let pod = world.wait_ready("p");
    let victim = world.path("victim");
    std::fs::create_dir(&victim).unwrap();
    std::fs::write(victim.join("kept"), "x").unwrap();

    // The intended use of the volumes works.
    let read = sh(&world, "p", "cat /v/secret/key /v/config/key /v/projected/key /v/downward/labels /v/key");
    assert_eq!(read, "oneoneonea=\"b\"one");
    assert!(sh(&world, "p", "cat /v/projected/token").len() > 100);
    assert_eq!(sh(&world, "p", "echo x > /scratch/f && echo y > /sub/f && cat /scratch/made/here/f"), "y\n");
    assert!(sh(&world, "p", "cat /etc/hosts /etc/resolv.conf /etc/hostname").contains("localhost"));

    for volume in ["secret", "config", "projected", "downward"] {
        let dir = format!("/v/{volume}");
        for attack in [
            format!("touch {dir}/new"),
            format!("/bin/busybox ln -s {} {dir}/..data_tmp", victim.display()),
            format!("/bin/busybox mv {dir}/..data {dir}/gone"),
            format!("/bin/busybox rm -f {dir}/..data"),
            format!("/bin/busybox mkdir {dir}/..2026_01_01_00_00_00_0000000000000000"),
            format!("/bin/busybox chmod 777 {dir}"),
            format!("cd {dir}/..2* && echo x > planted"),
        ] {
            let said = sh(&world, "p", &format!("({attack}) 2>&1; echo ended with $?"));
            assert!(
                said.contains("Read-only file system") || said.contains("not permitted"),
                "{attack}: {said}"
            );
            assert!(!said.contains("ended with 0"), "{attack}: {said}");
        }
        let on_host = std::fs::read_dir(pod_dir(&world, &pod).join("volumes")).unwrap().flatten();
        for plugin in on_host.filter(|plugin| !plugin.file_name().to_string_lossy().contains("empty-dir")) {
            for one in std::fs::read_dir(plugin.path()).unwrap().flatten() {
                let mode = std::os::unix::fs::MetadataExt::mode(&one.metadata().unwrap()) & 0o7777;
                assert_eq!(mode, 0o2755, "{}", one.path().display());
            }
        }
    }
    let said = sh(&world, "p", "(echo x > /v/key) 2>&1; echo ended with $?");
    assert!(said.contains("Read-only file system"), "{said}");

    // Updates still arrive.
    let patch = r#"{"stringData":{"key":"two"}}"#;
    world.kubectl(&["patch", "secret", "s", "-p", patch]);
    eventually("the update is in the volume", || {
        (sh(&world, "p", "cat /v/secret/key /v/projected/key") == "twotwo").then_some(())
    });
    assert_eq!(std::fs::read_to_string(victim.join("kept")).unwrap(), "x");
}

/// `..data` and the time-stamped directory as a container left them that had the volume writable: the update neither
/// deletes the directory the link leads to nor writes into it.
#[test]
fn an_update_stays_in_its_volume() {
    let world = with_objects();
    world.create(&restricted("p"));
    let pod = world.wait_ready("p");
    let victim = world.path("victim");
    std::fs::create_dir(&victim).unwrap();
    std::fs::write(victim.join("kept"), "x").unwrap();
    let volume = pod_dir(&world, &pod).join("volumes/kubernetes.io~secret/secret");
    let data = volume.join("..data");
    let stamp = volume.join(std::fs::read_link(&data).unwrap());
    std::fs::remove_file(&data).unwrap();
    std::os::unix::fs::symlink(&victim, &data).unwrap();
    std::fs::rename(&stamp, volume.join("..2000_moved")).unwrap();
    std::os::unix::fs::symlink(&victim, &stamp).unwrap();
    std::fs::create_dir(volume.join("..data_tmp")).unwrap();

    world.kubectl(&["patch", "secret", "s", "-p", r#"{"stringData":{"key":"two","more":"3"}}"#]);
    eventually("the update is in the volume", || {
        (sh(&world, "p", "cat /v/secret/key /v/secret/more") == "two3").then_some(())
    });
    let left: Vec<_> = std::fs::read_dir(&victim).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["kept"]);
    let leftovers = || {
        let names =
            std::fs::read_dir(&volume).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("..")).count()
    };
    // `..data` and the directory it points at.
    eventually("leftovers are removed", || (leftovers() == 2).then_some(()));
}

fn mount_tmpfs(at: &Path, flags: nix::mount::MsFlags) {
    std::fs::create_dir_all(at).unwrap();
    nix::mount::mount(Some("tmpfs"), at, Some("tmpfs"), nix::mount::MsFlags::empty(), None::<&str>).unwrap();
    nix::mount::mount(None::<&str>, at, None::<&str>, flags, None::<&str>).unwrap();
}

/// Unmounts the test's mounts, also when it fails.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = ferrite_hostfs::mounts::unmount_below(&self.0);
    }
}

#[test]
fn mounts_of_the_host_below_a_host_path_survive_the_pod() {
    let world = world_with_shell();
    let host = world.path("host");
    let mounted = Mounted(host.clone());
    mount_tmpfs(&host, nix::mount::MsFlags::MS_SHARED);
    mount_tmpfs(&host.join("data/disk"), nix::mount::MsFlags::MS_SHARED);
    std::fs::write(host.join("data/disk/kept"), "x").unwrap();
    std::fs::write(host.join("data/seen"), "y").unwrap();
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: {SHELL}
    volumeMounts: [{{name: h, mountPath: /h, subPath: data}}]
  volumes: [{{name: h, hostPath: {{path: {}}}}}]
"#,
        host.display()
    ));
    let pod = world.wait_ready("p");
    assert_eq!(sh(&world, "p", "cat /h/seen"), "y");
    world.kubectl(&["delete", "pod", "p"]);
    eventually("the pod's directory is gone", || (!pod_dir(&world, &pod).exists()).then_some(()));
    assert_eq!(std::fs::read_to_string(host.join("data/disk/kept")).unwrap(), "x");
    assert!(ferrite_hostfs::mounts::is_mount_point(&host.join("data/disk")).unwrap());
    drop(mounted);
}
