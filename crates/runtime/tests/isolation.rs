//! Tests of the limits of a container: the things that it can see and do, and those that it cannot.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use std::os::unix::fs::symlink;

use ferrite_cri::RuntimeService;
use ferrite_cri::v1::*;
use world::{World, container, list_with, own_pid, secure, shell};

fn mount(host: &std::path::Path, inside: &str) -> Mount {
    Mount { container_path: inside.into(), host_path: host.display().to_string(), ..Default::default() }
}

#[tokio::test]
async fn the_usual_places_are_there() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    for (script, expected) in [
        ("hostname", "pod-host\n"),
        ("cat /etc/resolv.conf", "nameserver 10.0.0.10\n"),
        ("cat /etc/hostname", "pod-host\n"),
        ("echo $$ >/dev/null; readlink /proc/self/exe", "/bin/busybox\n"),
        ("echo x > /dev/full", "sh: write error: No space left on device\n"),
        ("head -c 3 /dev/zero | wc -c", "3\n"),
        ("echo hi > /dev/shm/x; cat /dev/shm/x", "hi\n"),
        ("ls /proc/1/cwd | head -n 1", "bin\n"),
        ("pwd; id -u; id -g", "/\n0\n0\n"),
        ("cat /proc/1/cmdline | tr '\\0' ' '", "sleep 100 "),
        ("ls /dev/mqueue | wc -l", "0\n"),
        ("cat /sys/class/net/lo/operstate", "unknown\n"),
        ("ls /sys/class/net", "lo\n"),
    ] {
        assert_eq!(world.exec_out(&id, script).await, expected, "{script}");
    }
    // Shared memory is the pod's.
    let other = world.start(&sandbox, shell("b", "sleep 100")).await;
    assert_eq!(world.exec_out(&other, "cat /dev/shm/x").await, "hi\n");
    let seen = world.exec_out(&other, "ps").await;
    assert_eq!(seen.matches("sleep 100").count(), 1, "only its own processes: {seen}");
}

#[tokio::test]
async fn kernel_files_are_masked_and_read_only() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    assert_eq!(world.exec_out(&id, "cat /proc/cpuinfo | wc -c").await, "0\n");
    assert_eq!(world.exec_out(&id, "ls /sys/firmware | wc -l").await, "0\n");
    for path in ["/proc/sys/kernel/domainname", "/sys/kernel/mm/ksm/run", "/sys/fs/cgroup/memory/tasks"] {
        let said = world.exec_out(&id, &format!("echo 1 > {path}")).await;
        assert!(said.contains("Read-only file system") || said.contains("nonexistent"), "{path}: {said}");
    }
    // The group shown is the container's own.
    let procs = world
        .exec_out(
            &id,
            "cat /sys/fs/cgroup/pids/cgroup.procs /sys/fs/cgroup/cgroup.procs 2>/dev/null | head -n 1",
        )
        .await;
    assert_eq!(procs.trim(), "1");

    let open = secure(shell("b", "sleep 100"), |s| {
        s.privileged = true;
    });
    let id = world.start(&sandbox, open).await;
    assert_eq!(
        world.exec_out(&id, "echo x > /proc/sys/kernel/domainname && cat /proc/sys/kernel/domainname").await,
        "x\n"
    );
}

#[tokio::test]
async fn capabilities_are_those_asked_for() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let script = |set: &str| format!("grep Cap{set} /proc/self/status");
    let value = |text: String| u64::from_str_radix(text.split_whitespace().last().unwrap(), 16).unwrap();
    const DEFAULT: u64 = 0xa804_25fb;

    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    for (set, expected) in [("Bnd", DEFAULT), ("Eff", DEFAULT), ("Prm", DEFAULT), ("Inh", 0), ("Amb", 0)] {
        assert_eq!(value(world.exec_out(&id, &script(set)).await), expected, "{set}");
    }
    let none = secure(shell("b", "sleep 100"), |s| {
        s.capabilities = Some(Capability { drop_capabilities: vec!["ALL".into()], ..Default::default() });
        s.no_new_privs = true;
    });
    let id = world.start(&sandbox, none).await;
    for set in ["Bnd", "Eff", "Prm", "Inh", "Amb"] {
        assert_eq!(value(world.exec_out(&id, &script(set)).await), 0, "{set}");
    }
    assert!(world.exec_out(&id, "grep NoNewPrivs /proc/self/status").await.ends_with("1\n"));
    // The container's first process too, not only execs.
    assert_eq!(value(world.exec_out(&id, "grep CapBnd /proc/1/status").await), 0);

    let user = secure(shell("c", "sleep 100"), |s| s.run_as_user = Some(Int64Value { value: 1000 }));
    let id = world.start(&sandbox, user).await;
    assert_eq!(value(world.exec_out(&id, &script("Eff")).await), 0, "a plain user has none in effect");
    assert_eq!(value(world.exec_out(&id, &script("Prm")).await), 0);
}

#[tokio::test]
async fn users_and_groups_come_from_the_image_and_the_pod() {
    let world = World::with(|_, images| images.view.user = "web".into()).await;
    let sandbox = world.sandbox().await;
    let mut config = shell("a", "id; pwd; echo $HOME");
    config.working_dir = "/made/by/us".into();
    let (_, output) = world.run(&sandbox, config).await;
    assert_eq!(output, "uid=101(web) gid=102(web) groups=44(log),102(web)\n/made/by/us\n/srv\n");
    let config = secure(shell("b", "id"), |s| {
        s.run_as_user = Some(Int64Value { value: 7 });
        s.run_as_group = Some(Int64Value { value: 8 });
        s.supplemental_groups = vec![9];
    });
    let (status, output) = world.run(&sandbox, config).await;
    assert_eq!(output, "uid=7 gid=8 groups=8,9\n");
    let user = status.user.unwrap().linux.unwrap();
    assert_eq!((user.uid, user.gid, user.supplemental_groups), (7, 8, vec![8, 9]));
}

#[tokio::test]
async fn mount_targets_cannot_leave_the_root() {
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().join("victim");
    std::fs::create_dir(&target).unwrap();
    let absolute = target.clone();
    let world = World::with(move |root, _| {
        symlink(&absolute, root.join("absolute")).unwrap();
        symlink("../../../../../../../../../../../../tmp/escaped-by-dots", root.join("dots")).unwrap();
        symlink("/run", root.join("var/run")).unwrap();
    })
    .await;
    let source = world.directory.path().join("source");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("mark"), "here").unwrap();
    let file = world.directory.path().join("file");
    std::fs::write(&file, "a file").unwrap();
    let mut config = shell(
        "a",
        "cat /absolute/mark; echo; cat /dots/mark; echo; cat /var/run/deep/mark; echo; cat /absolute-not/f; sleep 100",
    );
    config.mounts = vec![
        mount(&source, "/absolute"),
        mount(&source, "/dots"),
        mount(&source, "/var/run/deep"),
        mount(&file, "/absolute-not/f"),
    ];
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, config).await;
    let seen = world
        .exec_out(
            &id,
            "cat /absolute/mark /dots/mark /run/deep/mark /absolute-not/f; ls -d /tmp/escaped-by-dots",
        )
        .await;
    assert_eq!(seen, "hereherehereaa file/tmp/escaped-by-dots\n".replace("aa file", "a file"));
    assert_eq!(std::fs::read_dir(&target).unwrap().count(), 0, "nothing was mounted or made outside");
    assert!(!std::path::Path::new("/tmp/escaped-by-dots").exists());
}

#[tokio::test]
async fn mounts_are_read_only_when_asked_and_roots_too() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let source = world.directory.path().join("source");
    std::fs::create_dir(&source).unwrap();
    let mut config = secure(shell("a", "sleep 100"), |s| s.readonly_rootfs = true);
    config.mounts = vec![Mount { readonly: true, ..mount(&source, "/ro") }, mount(&source, "/rw")];
    let id = world.start(&sandbox, config).await;
    assert!(world.exec_out(&id, "touch /ro/x").await.contains("Read-only file system"));
    assert!(world.exec_out(&id, "touch /x").await.contains("Read-only file system"));
    assert_eq!(world.exec_out(&id, "touch /rw/x; touch /dev/shm/y").await, "");
    assert!(source.join("x").exists());
}

#[tokio::test]
async fn many_layers_are_stacked_in_order() {
    let world = World::with(|root, images| {
        let parent = root.parent().unwrap();
        let mut layers: Vec<_> = (0..120)
            .map(|number| {
                let layer = parent.join(format!("layer-with-a-rather-long-name-{number:04}"));
                std::fs::create_dir(&layer).unwrap();
                std::fs::write(layer.join("who"), format!("{number}\n")).unwrap();
                std::fs::write(layer.join(format!("f{number}")), "").unwrap();
                layer
            })
            .collect();
        layers.append(&mut images.layers);
        images.layers = layers;
    })
    .await;
    let sandbox = world.sandbox().await;
    let (_, output) =
        world.run(&sandbox, shell("a", "cat /who; ls -d /f* | wc -l; echo new > /who; cat /who")).await;
    assert_eq!(output, "0\n120\nnew\n");
}

#[tokio::test]
async fn seccomp_default_forbids_what_it_should() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let default = |config| {
        secure(config, |s| {
            s.seccomp = Some(SecurityProfile {
                profile_type: security_profile::ProfileType::RuntimeDefault.into(),
                ..Default::default()
            });
        })
    };
    let id = world.start(&sandbox, default(shell("a", "sleep 100"))).await;
    assert!(world.exec_out(&id, "grep Seccomp: /proc/self/status").await.ends_with("2\n"));
    assert!(world.exec_out(&id, "unshare -U true").await.contains("Operation not permitted"));
    assert_eq!(world.exec_out(&id, "ls / | wc -l; sh -c 'echo ok'").await.lines().last(), Some("ok"));
    let free = world.start(&sandbox, shell("b", "sleep 100")).await;
    assert!(world.exec_out(&free, "grep Seccomp: /proc/self/status").await.ends_with("0\n"));
    let both = secure(default(shell("c", "sleep 100")), |s| {
        s.no_new_privs = true;
        s.run_as_user = Some(Int64Value { value: 1000 });
    });
    let id = world.start(&sandbox, both).await;
    assert!(world.exec_out(&id, "grep Seccomp: /proc/1/status").await.ends_with("2\n"));
}

#[tokio::test]
async fn devices_can_be_made_but_not_used() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 100")).await;
    let said = world.exec_out(&id, "mknod /tmp/mem c 1 1; head -c 1 /tmp/mem").await;
    assert!(said.contains("Operation not permitted"), "{said}");
    let mut config = shell("b", "sleep 100");
    config.devices.push(Device {
        container_path: "/dev/extra".into(),
        host_path: "/dev/zero".into(),
        permissions: "rwm".into(),
    });
    let id = world.start(&sandbox, config).await;
    assert_eq!(world.exec_out(&id, "head -c 2 /dev/extra | wc -c").await, "2\n");
}

#[tokio::test]
async fn no_descriptor_and_no_handle_to_our_binary_reaches_a_container() {
    let world = World::with(|root, _| symlink("/proc/self/exe", root.join("bin/self")).unwrap()).await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "ls /proc/self/fd; echo; sleep 100")).await;
    assert_eq!(world.exec_out(&id, "ls /proc/1/fd | tr '\\n' ' '").await, "0 1 2 ");
    // ls itself opens the directory as the fourth.
    assert_eq!(world.exec_out(&id, "ls /proc/self/fd | tr '\\n' ' '").await, "0 1 2 3 ");
    // Running the target of /proc/self/exe during set-up runs our supervisor: it must not be writable.
    let own = world.create(&sandbox, container("b", &["/bin/self", "/"])).await;
    let started = world.try_start(&own).await;
    let binary = env!("CARGO_BIN_EXE_ferrite-supervisor");
    let before = std::fs::metadata(binary).unwrap();
    if started.is_ok() {
        world.wait(&own).await;
    }
    assert_eq!(std::fs::metadata(binary).unwrap().len(), before.len());
    let view = world.config.run.join("sandboxes").join(&sandbox).join("supervisor");
    let supervisor = std::fs::read_to_string(view).unwrap();
    let pid = supervisor.split(' ').next().unwrap();
    let error = std::fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/exe")).unwrap_err();
    assert!(
        matches!(error.raw_os_error(), Some(libc::EROFS | libc::ETXTBSY)),
        "not even the node's root writes through it: {error}"
    );
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
}

#[tokio::test]
async fn processes_can_be_shared_within_the_pod_or_with_the_node() {
    let world = World::new().await;
    let mut config = world.sandbox_config();
    let shared = NamespaceOption { pid: NamespaceMode::Pod.into(), ..Default::default() };
    let linux = config.linux.as_mut().unwrap();
    linux.security_context.as_mut().unwrap().namespace_options = Some(shared.clone());
    let sandbox = world.run_sandbox(config).await;
    let in_pod = |config| secure(config, |s| s.namespace_options = Some(shared.clone()));
    let a = world.start(&sandbox, in_pod(shell("a", "sleep 333 & sleep 334"))).await;
    let b = world.start(&sandbox, in_pod(shell("b", "sleep 100"))).await;
    let seen = world.exec_out(&b, &list_with("sleep 333")).await;
    assert!(seen.contains("sleep 333") && seen.contains("sleep 100"), "{seen}");
    let root = world.exec_out(&b, "ls /proc/1/root/ 2>&1").await;
    assert!(!root.contains("etc"), "the pod's first process shows nothing of the node: {root}");
    // Ending one takes its processes, not the other's.
    world.stop(&a, 0).await;
    let mut seen = world.exec_out(&b, "ps").await;
    for _ in 0..200 {
        if !seen.contains("sleep 33") {
            break;
        }
        seen = world.exec_out(&b, "ps").await;
    }
    assert!(!seen.contains("sleep 33") && seen.contains("sleep 100"), "{seen}");

    let host = secure(shell("c", "sleep 100"), |s| {
        s.namespace_options = Some(NamespaceOption { pid: NamespaceMode::Node.into(), ..own_pid() });
    });
    let id = world.start(&sandbox, host).await;
    let me = std::process::id().to_string();
    assert!(world.exec_out(&id, &format!("ls -d /proc/{me}")).await.contains(&me));
    world.stop(&id, 0).await;
    assert_eq!(world.status(&id).await.exit_code, 137);
}

#[tokio::test]
async fn a_pod_on_the_host_network_sees_the_nodes() {
    let world = World::new().await;
    let mut config = world.sandbox_config();
    let options = NamespaceOption { network: NamespaceMode::Node.into(), ..own_pid() };
    config.hostname = String::new();
    config.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options =
        Some(options.clone());
    let sandbox = world.run_sandbox(config).await;
    let request = PodSandboxStatusRequest { pod_sandbox_id: sandbox.clone(), verbose: false };
    let status = world.runtime().pod_sandbox_status(request).await.unwrap().status.unwrap();
    assert_eq!(status.network.unwrap().ip, "", "the kubelet uses the node's own");
    let id =
        world.start(&sandbox, secure(shell("a", "sleep 100"), |s| s.namespace_options = Some(options))).await;
    let ours = std::fs::read_link("/proc/self/ns/net").unwrap();
    assert_eq!(world.exec_out(&id, "readlink /proc/self/ns/net").await.trim(), ours.display().to_string());
}

#[tokio::test]
async fn mounts_propagate_as_asked() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let shared = world.directory.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    use nix::mount::{MntFlags, MsFlags, mount as do_mount, umount2};
    do_mount(Some("tmpfs"), &shared, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    do_mount(None::<&str>, &shared, None::<&str>, MsFlags::MS_SHARED, None::<&str>).unwrap();
    struct Unmount(std::path::PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            for path in [self.0.join("later"), self.0.join("back"), self.0.clone()] {
                let _ = umount2(&path, MntFlags::MNT_DETACH);
            }
        }
    }
    let _unmount = Unmount(shared.clone());
    for name in ["later", "back"] {
        std::fs::create_dir(shared.join(name)).unwrap();
    }
    let with = |name: &str, propagation: MountPropagation| {
        let mut config = secure(shell(name, "sleep 100"), |s| s.privileged = true);
        config.mounts.push(Mount { propagation: propagation.into(), ..mount(&shared, "/s") });
        config
    };
    let private = world.start(&sandbox, with("p", MountPropagation::PropagationPrivate)).await;
    let slave = world.start(&sandbox, with("h", MountPropagation::PropagationHostToContainer)).await;
    let both = world.start(&sandbox, with("b", MountPropagation::PropagationBidirectional)).await;
    do_mount(Some("tmpfs"), &shared.join("later"), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    std::fs::write(shared.join("later/x"), "").unwrap();
    assert_eq!(world.exec_out(&private, "ls /s/later").await, "");
    assert_eq!(world.exec_out(&slave, "ls /s/later").await, "x\n");
    assert_eq!(world.exec_out(&both, "mount -t tmpfs none /s/back; touch /s/back/y").await, "");
    assert!(shared.join("back/y").exists(), "a mount made in the container is on the node");
    assert_eq!(world.exec_out(&slave, "ls /s/back").await, "y\n");
}

/// A 32-bit program that writes "32" and ends with the error of `add_key(0, 0, 0, 0, 0)` as its code.
#[cfg(target_arch = "x86_64")]
fn program_of_32_bits() -> Vec<u8> {
    const BASE: u32 = 0x0804_8000;
    const HEADERS: u32 = 52 + 32;
    let code: &[u8] = &[
        0xb8, 4, 0, 0, 0, // mov eax, write
        0xbb, 1, 0, 0, 0, // mov ebx, 1
        0xb9, 0, 0, 0, 0, // mov ecx, text
        0xba, 3, 0, 0, 0, // mov edx, 3
        0xcd, 0x80, // int 0x80
        0xb8, 0x1e, 1, 0, 0, // mov eax, add_key
        0x31, 0xdb, // xor ebx, ebx
        0x31, 0xc9, // xor ecx, ecx
        0x31, 0xd2, // xor edx, edx
        0x31, 0xf6, // xor esi, esi
        0x31, 0xff, // xor edi, edi
        0xcd, 0x80, // int 0x80
        0xf7, 0xd8, // neg eax
        0x89, 0xc3, // mov ebx, eax
        0xb8, 1, 0, 0, 0, // mov eax, exit
        0xcd, 0x80, // int 0x80
    ];
    let mut code = code.to_vec();
    let text = BASE + HEADERS + code.len() as u32;
    code[11..15].copy_from_slice(&text.to_le_bytes());
    code.extend(b"32\n");
    let mut file = vec![0x7f, b'E', b'L', b'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let words = |file: &mut Vec<u8>, words: &[u32]| file.extend(words.iter().flat_map(|w| w.to_le_bytes()));
    let halves =
        |file: &mut Vec<u8>, halves: &[u16]| file.extend(halves.iter().flat_map(|h| h.to_le_bytes()));
    halves(&mut file, &[2, 3]);
    words(&mut file, &[1, BASE + HEADERS, 52, 0, 0]);
    halves(&mut file, &[52, 32, 1, 0, 0, 0]);
    let size = HEADERS + code.len() as u32;
    words(&mut file, &[1, 0, BASE, BASE, size, size, 5, 0x1000]);
    file.extend(code);
    file
}

#[tokio::test]
#[cfg(target_arch = "x86_64")]
async fn a_program_of_32_bits_is_filtered_too() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::with(|root, _| {
        let path = root.join("bin/short");
        std::fs::write(&path, program_of_32_bits()).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    })
    .await;
    let sandbox = world.sandbox().await;
    let profile = world.directory.path().join("profile.json");
    let text = r#"{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"],"syscalls":[]}"#;
    std::fs::write(&profile, text.replace("[]", r#"[{"names":["mkdir"],"action":"SCMP_ACT_ERRNO"}]"#))
        .unwrap();
    use security_profile::ProfileType::{Localhost, RuntimeDefault, Unconfined};
    for (name, kind, code, said) in [
        ("free", Unconfined, libc::EFAULT, "32\n"),
        ("confined", RuntimeDefault, libc::EPERM, "32\n"),
        ("unlisted", Localhost, 128 + libc::SIGSYS, ""),
    ] {
        let config = secure(container(name, &["/bin/short"]), |s| {
            s.seccomp = Some(SecurityProfile {
                profile_type: kind.into(),
                localhost_ref: profile.display().to_string(),
            });
        });
        let (status, output) = world.run(&sandbox, config).await;
        assert_eq!((status.exit_code, output.as_str()), (code, said), "{name}");
    }
}
