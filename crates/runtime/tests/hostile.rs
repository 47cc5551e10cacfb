//! Containers that misbehave: they are held, reported and cleared away.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use std::path::Path;

use ferrite_cri::RuntimeService;
use ferrite_cri::v1::security_profile::ProfileType;
use ferrite_cri::v1::*;
use world::{World, secure, shell, traces};

fn with_seccomp(config: ContainerConfig, profile: ProfileType) -> ContainerConfig {
    secure(config, |context| {
        context.seccomp = Some(SecurityProfile { profile_type: profile.into(), ..Default::default() });
    })
}

/// Limits the pod's processes where the kubelet does: in the pod's own group.
fn limit_processes(world: &World, count: u32) {
    let hierarchy =
        ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(Path::new).into_iter().find(|root| root.exists());
    let group = format!("{}/pods/pod1", world.config.cgroup_parent.trim_start_matches('/'));
    let group = hierarchy.expect("control groups are mounted").join(group);
    std::fs::create_dir_all(&group).unwrap();
    std::fs::write(group.join("pids.max"), count.to_string()).unwrap();
}

#[tokio::test]
async fn a_fork_bomb_stops_at_the_limit() {
    let mut world = World::new().await;
    let sandbox = world.sandbox().await;
    limit_processes(&world, 30);
    let id = world.start(&sandbox, shell("bomb", "b() { b | b & }; b; sleep 1000")).await;
    // The node still answers, the pod's other containers run, and the bomb can be put out.
    let (status, _) = world.run(&sandbox, shell("other", "exit 4")).await;
    assert_eq!(status.exit_code, 4);
    world.stop(&id, 0).await;
    world.close().await;
    ferrite_runtime::destroy(world.config.clone()).await.unwrap();
    assert_eq!(traces(&world.config), Vec::<String>::new());
}

#[tokio::test]
async fn orphans_are_reaped_and_end_with_their_container() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let script = "for i in 1 2 3 4 5; do (sleep 0 &) ; done; (sleep 1000 &); echo ready; exec sleep 1000";
    let id = world.start(&sandbox, shell("a", script)).await;
    world.stop(&id, 0).await;
    let members: Vec<String> =
        traces(&world.config).into_iter().filter(|trace| trace.starts_with("member")).collect();
    // At most the supervisor is left of the pod, never a process of the container.
    for member in &members {
        let pid = member.trim_start_matches("member ");
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        assert!(!command.contains("sleep"), "{member} outlived its container: {command}");
    }
}

#[tokio::test]
async fn the_kernels_controls_are_out_of_reach() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, with_seccomp(shell("a", "sleep 1000"), ProfileType::RuntimeDefault)).await;
    for attempt in [
        "mount -t proc proc /proc",
        "mount -t tmpfs tmpfs /proc/sys",
        "mount -o remount,rw /proc/sys",
        "mount -t cgroup -o memory cgroup /mnt",
        "umount /proc/sys",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo x > /proc/sysrq-trigger",
        "echo 1 > /proc/sys/kernel/panic",
        "mkdir /sys/fs/cgroup/memory/escape",
        "mkdir /sys/fs/cgroup/escape",
        "echo /bin/sh > /sys/fs/cgroup/release_agent",
        "echo /bin/sh > /sys/kernel/uevent_helper",
        "mknod /tmp/disk b 254 0 && dd if=/tmp/disk of=/dev/null count=1",
        "chroot /proc/1/root/../../.. true && test -e /lib/modules",
        "unshare -m true",
        "unshare -U true",
    ] {
        let request = ExecSyncRequest {
            container_id: id.clone(),
            cmd: vec!["/bin/sh".into(), "-c".into(), attempt.into()],
            timeout: 10,
        };
        let answer = world.runtime().exec_sync(request).await.unwrap();
        assert_ne!(answer.exit_code, 0, "`{attempt}` must fail");
    }
}

#[tokio::test]
async fn without_seccomp_capabilities_still_hold() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, with_seccomp(shell("a", "sleep 1000"), ProfileType::Unconfined)).await;
    for attempt in ["mount -t tmpfs tmpfs /mnt", "mount -o remount,rw /proc/sys", "unshare -m true"] {
        let command = format!("{attempt} 2>/dev/null && echo done || echo refused");
        assert_eq!(world.exec_out(&id, &command).await, "refused\n", "{attempt}");
    }
}

#[tokio::test]
async fn a_flood_of_output_does_not_stop_anybody() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("flood", "exec yes 0123456789012345678901234567890123456789")).await;
    // While it writes as fast as it can, the log moves on, others run, and it ends on request.
    let request = ReopenContainerLogRequest { container_id: id.clone() };
    let log = world.status(&id).await.log_path;
    std::fs::rename(&log, format!("{log}.1")).unwrap();
    world.runtime().reopen_container_log(request).await.unwrap();
    std::fs::remove_file(format!("{log}.1")).unwrap();
    let (status, output) = world.run(&sandbox, shell("other", "echo quiet")).await;
    assert_eq!((status.exit_code, output.as_str()), (0, "quiet\n"));
    world.stop(&id, 0).await;
    let text = std::fs::read_to_string(&log).unwrap();
    let whole = text.lines().all(|line| line.splitn(4, ' ').count() == 4);
    assert!(whole, "every line of the log has its time, stream and tag");
}

#[tokio::test]
async fn a_container_that_ignores_every_signal_is_killed() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let script = "trap '' TERM INT HUP QUIT; echo ready; while :; do sleep 1; done";
    let id = world.start(&sandbox, shell("stubborn", script)).await;
    world.stop(&id, 1).await;
    let status = world.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
}

#[tokio::test]
async fn a_missing_interpreter_is_named() {
    let world = World::with(|root, _| {
        std::fs::write(root.join("bin/script"), "#!/no/such/shell\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(root.join("bin/script"), mode).unwrap();
    })
    .await;
    let sandbox = world.sandbox().await;
    let id = world.create(&sandbox, world::container("a", &["/bin/script"])).await;
    let error = world.try_start(&id).await.unwrap_err().to_string();
    assert!(error.contains("/no/such/shell"), "{error}");
}

/// The time of the last change of the node's /dev/null.
fn null_changed() -> (i64, i64) {
    use std::os::unix::fs::MetadataExt;
    let null = std::fs::metadata("/dev/null").unwrap();
    (null.ctime(), null.ctime_nsec())
}

#[tokio::test]
async fn the_nodes_null_device_is_out_of_reach() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let before = null_changed();
    // The mode stays the same, so that a failure of this test harms nobody.
    let change = "chmod 666 /proc/self/fd/0";
    let id = world.start(&sandbox, shell("a", &format!("{change}; sleep 1000"))).await;
    // Masked files are the null device, too.
    let masked = "chmod 666 /proc/cpuinfo && echo changed";
    let said = world.exec_out(&id, &format!("({masked}) 2>/dev/null; cat /proc/cpuinfo | wc -c")).await;
    assert_eq!(said, "0\n");
    world.exec_out(&id, change).await;
    assert_eq!(
        world.exec_out(&id, "readlink /proc/1/fd/0; readlink /proc/self/fd/0").await,
        "/dev/null\n/dev/null\n"
    );
    // A container without the device reads nothing from its stdin, and still does not reach the node's.
    let said = world.exec_out(&id, "rm /dev/null; mkfifo /dev/null").await;
    assert_eq!(said, "");
    let said = world.exec_out(&id, &format!("{change} 2>&1; cat | wc -c")).await;
    assert_eq!(said, "chmod: /proc/self/fd/0: Read-only file system\n0\n");
    assert_eq!(null_changed(), before, "a container changed the node's /dev/null");
}

/// Bytes of this process in memory.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[tokio::test(flavor = "multi_thread")]
async fn the_output_of_many_commands_does_not_fill_the_memory() {
    const MANY: usize = 24;
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "mkdir /done; sleep 1000")).await;
    let before = resident();
    // Each closes its streams and goes on, as the handler of a long probe could.
    let print = "head -c 16777216 /dev/zero; head -c 16777216 /dev/zero >&2; exec >&- 2>&-; \
                 touch /done/$$; while [ ! -e /end ]; do sleep 0.1; done";
    let request = ExecSyncRequest {
        container_id: id.clone(),
        cmd: vec!["/bin/sh".into(), "-c".into(), print.into()],
        timeout: 120,
    };
    let running: Vec<_> = (0..MANY)
        .map(|_| {
            let (runtime, request) = (world.runtime().clone(), request.clone());
            tokio::spawn(async move { runtime.exec_sync(request).await })
        })
        .collect();
    let wait = format!("while [ $(ls /done | wc -l) -lt {MANY} ]; do sleep 0.1; done");
    assert_eq!(world.exec_out(&id, &wait).await, "");
    let grown = resident().saturating_sub(before);
    world.exec_out(&id, "touch /end").await;
    for one in running {
        let answer = one.await.unwrap().unwrap();
        assert!(answer.exit_code == 0 && answer.stdout.len() >= 64 << 10);
    }
    assert!(grown < 400 << 20, "{grown} bytes");
    // The memory is there again for others.
    let answer = world.runtime().exec_sync(request).await.unwrap();
    assert_eq!((answer.stdout.len(), answer.stderr.len()), (16 << 20, 16 << 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_files_of_a_container_with_many_are_counted_beside() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let script = "mkdir /m; cd /m; seq 25000 | xargs touch; echo done; exec sleep 1000";
    let id = world.start(&sandbox, shell("a", script)).await;
    assert_eq!(world.exec_out(&id, "while [ ! -e /m/25000 ]; do sleep 0.1; done").await, "");
    let mut shown = Vec::new();
    for _ in 0..20_000 {
        let request = ContainerStatsRequest { container_id: id.clone() };
        let stats = world.runtime().container_stats(request).await.unwrap().stats.unwrap();
        let inodes = stats.writable_layer.unwrap().inodes_used.unwrap().value;
        if shown.last() != Some(&inodes) {
            shown.push(inodes);
        }
        if inodes >= 25_001 {
            break;
        }
    }
    // First the files that are counted at once, then all of them.
    assert!(shown.len() == 2 && shown[0] == 20_000 && shown[1] >= 25_001, "{shown:?}");
}

#[tokio::test]
async fn the_files_of_a_pod_are_counted() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 1000")).await;
    let script =
        "for file in hosts hostname resolv.conf; do head -c 1048576 /dev/zero > /etc/$file; done; sync";
    assert_eq!(world.exec_out(&id, script).await, "");
    let request = ContainerStatsRequest { container_id: id };
    let stats = world.runtime().container_stats(request).await.unwrap().stats.unwrap();
    let used = stats.writable_layer.unwrap().used_bytes.unwrap().value;
    assert!(used >= 3 << 20, "{used} bytes");
}

#[tokio::test]
async fn proc_is_procfs_and_nothing_else() {
    let world = World::with(|root, images| {
        let link = root.join("to-proc");
        std::os::unix::fs::symlink("/proc", &link).unwrap();
        images.view.env.push("PATH=/bin".into());
    })
    .await;
    let sandbox = world.sandbox().await;
    let own = world.directory.path().join("own");
    std::fs::create_dir_all(own.join("self/attr/apparmor")).unwrap();
    std::fs::write(own.join("self/attr/apparmor/exec"), "").unwrap();
    for (number, place) in ["/proc", "/proc/", "/bin/../proc", "/to-proc"].into_iter().enumerate() {
        let mut config = shell(&format!("c{number}"), "true");
        let host_path = own.display().to_string();
        config.mounts.push(Mount { container_path: place.into(), host_path, ..Default::default() });
        let id = world.create(&sandbox, config).await;
        let error = world.try_start(&id).await.unwrap_err().to_string();
        assert!(error.contains("/proc"), "{place}: {error}");
    }
}

#[tokio::test]
async fn an_image_cannot_hide_proc_behind_a_link() {
    let world = World::with(|root, _| {
        std::fs::remove_dir_all(root.join("dev")).ok();
        std::os::unix::fs::symlink("/proc", root.join("dev")).unwrap();
    })
    .await;
    let sandbox = world.sandbox().await;
    let id = world.create(&sandbox, shell("a", "true")).await;
    let error = world.try_start(&id).await.unwrap_err().to_string();
    assert!(error.contains("nothing may be mounted inside /proc"), "{error}");
}

#[tokio::test]
async fn containers_have_session_keyrings_of_their_own() {
    let keyrings = |id: &str| {
        let keys = std::fs::read_to_string("/proc/keys").unwrap_or_default();
        keys.lines().filter(|line| line.contains(&format!("_ses.{id}"))).count()
    };
    if !Path::new("/proc/keys").exists() {
        eprintln!("skipped: this kernel has no keys");
        return;
    }
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 1000")).await;
    assert_eq!(keyrings(&id), 1);
    // A command in the container finds the container's.
    assert_eq!(world.exec_out(&id, "echo ran").await, "ran\n");
    assert_eq!(keyrings(&id), 1);
}
