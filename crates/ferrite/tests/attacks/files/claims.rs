//! Persistent volumes, which a container writes as root and which root removes.

use super::*;

/// The remains of a hostile pod in its volume are removed with the volume, and nothing else is.
#[test]
fn links_in_a_volume_lead_nowhere() {
    let world = world_with_shell();
    let victim = world.path("victim");
    std::fs::create_dir(&victim).unwrap();
    std::fs::write(victim.join("kept"), "x").unwrap();
    let claim = |name: &str| {
        format!(
            r#"
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}
"#
        )
    };
    let pod = |name: &str, claim: &str, group: &str| {
        format!(
            r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  {group}
  containers:
  - name: c
    image: {SHELL}
    volumeMounts: [{{name: data, mountPath: /data}}]
  volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]
"#
        )
    };
    world.create(&claim("neighbour"));
    world.create(&pod("good", "neighbour", ""));
    world.wait_ready("good");
    sh(&world, "good", "echo mine > /data/file");

    world.create(&claim("hostile"));
    world.create(&pod("evil", "hostile", ""));
    let evil = world.wait_ready("evil");
    let volume = world.get(&["pvc", "hostile"])["spec"]["volumeName"].as_str().unwrap().to_owned();
    let other = world.get(&["pvc", "neighbour"])["spec"]["volumeName"].as_str().unwrap().to_owned();
    let victim_path = victim.display();
    let script = format!(
        "cd /data; ln -s {victim_path} out; ln -s ../{other} next; ln -s / root; mkfifo fifo; mkdir deep; \
         ln -s {victim_path}/kept file; ln -s . loop"
    );
    let said = sh(&world, "evil", &script);
    let planted = world.data().join("volumes").join(&volume);
    for link in ["out", "next", "root", "file", "loop"] {
        assert!(std::fs::symlink_metadata(planted.join(link)).unwrap().is_symlink(), "{link}: {said}");
    }
    nest(inside(crate::world::container_pid(&evil), "data/deep"), 3000);
    world.kubectl(&["delete", "pod", "evil"]);

    // A group for the volume: every entry is given to it, and nothing that a link points at.
    let owner = |path: &Path| std::os::unix::fs::MetadataExt::gid(&std::fs::metadata(path).unwrap());
    world.create(&pod("again", "hostile", "securityContext: {fsGroup: 4321}"));
    world.wait_ready("again");
    assert_eq!((owner(&victim), owner(&victim.join("kept"))), (0, 0));
    assert_eq!(owner(&world.data().join("volumes").join(&other).join("file")), 0);
    world.kubectl(&["delete", "pod", "again"]);

    world.kubectl(&["delete", "pvc", "hostile"]);
    world.kubectl(&["wait", "--for=delete", &format!("pv/{volume}"), "--timeout=60s"]);
    assert!(!world.data().join("volumes").join(&volume).exists());
    assert_eq!(std::fs::read_to_string(victim.join("kept")).unwrap(), "x");
    assert_eq!(sh(&world, "good", "cat /data/file"), "mine\n");
}
