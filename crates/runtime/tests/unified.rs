//! The runtime on a machine that has nothing but the unified hierarchy (cgroup version 2): this program runs
//! itself again where only that is mounted. Limits are tried as far as its controllers go.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use ferrite_cri::RuntimeService;
use ferrite_cri::v1::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use world::{World, container, shell};

const MOUNT: &str = "/sys/fs/cgroup";
/// Its presence says that this is the second run.
const INSIDE: &str = "FERRITE_UNIFIED";

/// Leaves this mount namespace for one with the unified hierarchy alone.
fn only_unified(mounts: &[String]) -> std::io::Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
    for point in mounts {
        umount2(point.as_str(), MntFlags::MNT_DETACH)?;
    }
    mount(Some("cgroup2"), MOUNT, Some("cgroup2"), MsFlags::empty(), None::<&str>)?;
    Ok(())
}

#[test]
fn a_machine_with_version_2_alone() {
    if std::env::var_os(INSIDE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        return runtime.block_on(life());
    }
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let point = |line: &str| line.split(' ').nth(1).map(str::to_owned);
    let mut mounts: Vec<String> =
        table.lines().filter_map(point).filter(|path| Path::new(path).starts_with(MOUNT)).collect();
    // Unmount in reverse order: the last mount lies on top.
    mounts.reverse();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_machine_with_version_2_alone", "--nocapture", "--test-threads=1"]);
    command.env(INSIDE, "1");
    // SAFETY: system calls between fork and exec; the strings were made before.
    unsafe { command.pre_exec(move || only_unified(&mounts)) };
    assert!(command.status().unwrap().success());
}

async fn life() {
    assert!(Path::new(MOUNT).join("cgroup.controllers").exists());
    let mut world = World::new().await;
    let group = Path::new(MOUNT).join(world.config.cgroup_parent.trim_start_matches('/'));
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "trap 'exit 3' TERM; while :; do sleep 0.1; done")).await;
    // The container is in a group of its own, sees it as its root, and cannot write there.
    // The kernel lists the other hierarchies as long as anybody has them mounted.
    assert!(world.exec_out(&id, "cat /proc/1/cgroup").await.lines().any(|line| line == "0::/"));
    assert!(world.exec_out(&id, "cat /sys/fs/cgroup/cgroup.procs").await.lines().any(|pid| pid == "1"));
    let said = world.exec_out(&id, "echo 1 > /sys/fs/cgroup/cgroup.freeze").await;
    assert!(said.contains("Read-only file system"), "{said}");
    // Devices are a matter of a program there.
    assert_eq!(world.exec_out(&id, "echo x > /dev/null && head -c 2 /dev/zero | wc -c").await, "2\n");
    let said = world.exec_out(&id, "mknod /tmp/kmsg c 1 11 && cat /tmp/kmsg").await;
    assert!(said.contains("Operation not permitted"), "{said}");
    // An exec that takes too long is ended with everything it started.
    let late = world.exec(&id, &["/bin/sh", "-c", "sleep 1000 & sleep 1000"], 1).await;
    assert!(late.is_err());
    let gone = "while ps | grep -q 'sleep 100[0]'; do :; done; echo gone";
    assert_eq!(world.exec_out(&id, gone).await, "gone\n");
    // It outlives the runtime, and ends as it likes.
    let pid = world.pid(&id).await;
    world.reopen().await;
    assert_eq!(world.pid(&id).await, pid);
    world.stop(&id, 10).await;
    assert_eq!(world.status(&id).await.exit_code, 3);
    let (status, output) = world.run(&sandbox, container("b", &["/bin/echo", "short"])).await;
    assert_eq!((status.exit_code, output.as_str()), (0, "short\n"));
    world.runtime().remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();
    world.close().await;
    drop(world);
    assert!(!group.exists(), "nothing is left of its groups");
}
