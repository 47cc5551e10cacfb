//! File systems that never answer, and devices without a file system.

use crate::testing::Harness;
use ferrite_json::json;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::os::fd::AsRawFd;
use std::path::Path;

/// A mount namespace of this test's own: nothing that it mounts is seen by others, nor stays.
fn alone() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("the tests need root");
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Nobody answers on the other end of this FUSE mount: whoever looks at it waits.
#[test]
fn a_file_system_that_hangs_holds_up_its_own_pod_alone() {
    alone();
    let dir = tempfile::tempdir().unwrap();
    let Ok(device) = std::fs::File::options().read(true).write(true).open("/dev/fuse") else {
        eprintln!("skipped: this kernel has no FUSE");
        return;
    };
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    mount(Some("hang"), dir.path(), Some("fuse"), MsFlags::empty(), Some(options.as_str())).unwrap();
    let path = dir.path().to_string_lossy().into_owned();
    let runtime = runtime();
    runtime.block_on(async {
        let h = Harness::start().await;
        let container = json!([{"name": "c", "image": "busybox:1", "imagePullPolicy": "IfNotPresent",
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]);
        let volumes = json!([{"name": "v", "hostPath": {"path": path, "type": "Directory"}}]);
        h.create("stuck", json!({"containers": &container, "volumes": volumes}));
        let volumes = json!([{"name": "v", "emptyDir": {}}]);
        for name in ["one", "two"] {
            h.create(name, json!({"containers": &container, "volumes": &volumes}));
            h.until_phase(name, "Running").await;
        }
        assert_eq!(h.pod("stuck").unwrap()["status"]["phase"], "Pending");
        // Figures of volumes are there for the others.
        let figures = h.context.volumes.figures().await;
        assert!(figures.get("uid-one").is_some_and(|volumes| volumes.len() == 1), "{figures:?}");
        h.delete("one", 0);
        h.until_gone("one").await;
        // The other end goes: the pod is told.
        drop(device);
        umount2(Path::new(&path), MntFlags::MNT_DETACH).unwrap();
        h.until_phase("stuck", "Running").await;
    });
    runtime.shutdown_background();
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = std::process::Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// A loop device. It and its mounts are gone when it is dropped.
struct LoopDevice(String);

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let ours = mounts.lines().filter(|line| line.split(' ').any(|word| word == self.0));
        for point in ours.filter_map(|line| line.split(' ').nth(4)) {
            let _ = umount2(Path::new(point), MntFlags::MNT_DETACH);
        }
        let _ = std::process::Command::new("losetup").args(["-d", &self.0]).status();
    }
}

#[test]
fn a_device_without_a_file_system_gets_one_and_keeps_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let found = std::process::Command::new("losetup").args(["-f", "--show"]).arg(&image).output();
    let Some(output) = found.ok().filter(|output| output.status.success()) else {
        eprintln!("skipped: this machine has no loop devices");
        return;
    };
    let device = LoopDevice(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let runtime = runtime();
    runtime.block_on(async {
        let h = Harness::start().await;
        h.api.put("nodes", json!({"metadata": {"name": "node", "labels": {"here": "yes"}}}));
        h.api.put("persistentvolumes", json!({"metadata": {"name": "pv"}, "spec": {
            "capacity": {"storage": "16Mi"}, "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem",
            "claimRef": {"name": "claim", "namespace": "default", "uid": "claim"},
            "local": {"path": device.0, "fsType": "ext4"}}}));
        h.api.put("persistentvolumeclaims", json!({"metadata": {"name": "claim", "namespace": "default", "uid": "claim"},
            "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}}));
        let spec = json!({"containers": [{"name": "c", "image": "busybox:1", "imagePullPolicy": "IfNotPresent",
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "claim"}}]});
        h.create("one", spec.clone());
        h.until_phase("one", "Running").await;
        let place = h.dir.path().join("kubelet/pods/uid-one/volumes/kubernetes.io~local-volume/pv");
        assert_eq!(run("stat", &["-f", "-c", "%T", place.to_str().unwrap()]), "ext2/ext3");
        std::fs::write(place.join("file"), "kept").unwrap();
        let figures = h.context.volumes.figures().await;
        let volume = &figures["uid-one"][0];
        assert_eq!(volume.claim.as_deref(), Some("claim"));
        assert!(volume.figures.capacity.is_some_and(|bytes| (1 << 20..16 << 20).contains(&bytes)), "{volume:?}");
        h.delete("one", 0);
        h.until_gone("one").await;
        assert!(!place.exists());
        h.create("two", spec);
        h.until_phase("two", "Running").await;
        let place = h.dir.path().join("kubelet/pods/uid-two/volumes/kubernetes.io~local-volume/pv");
        assert_eq!(std::fs::read_to_string(place.join("file")).unwrap(), "kept", "it is not formatted again");
        h.delete("two", 0);
        h.until_gone("two").await;
    });
    runtime.shutdown_background();
}
