//! Containers as scopes of a real systemd: this program runs itself again on a machine whose init is systemd.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use ferrite_cgroup::Version;
use ferrite_cri::v1::*;
use ferrite_cri::{Code, RuntimeService};
use ferrite_systemd::testing::Machine;
use ferrite_systemd::{Manager, Value};
use world::{World, limited, shell};

const SLICE: &str = "kubepods-burstable-podu.slice";
const PATH: &str = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podu.slice";
const SCOPE: &str = "org.freedesktop.systemd1.Scope";

fn inside(test: &str, version: Version, life: impl Future<Output = ()>) {
    if Machine::is_inside() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        return runtime.block_on(life);
    }
    Machine::start(version).run_again(test);
}

async fn run_sandbox(world: &World, handler: &str, attempt: u32) -> String {
    let mut config = world.sandbox_config();
    config.metadata.as_mut().unwrap().attempt = attempt;
    config.linux.as_mut().unwrap().cgroup_parent = SLICE.into();
    let request = RunPodSandboxRequest { config: Some(config), runtime_handler: handler.into() };
    world.runtime().run_pod_sandbox(request).await.unwrap().pod_sandbox_id
}

fn memory(bytes: i64) -> LinuxContainerResources {
    LinuxContainerResources { memory_limit_in_bytes: bytes, cpu_shares: 512, ..Default::default() }
}

/// A container's life as systemd sees it. `version` says where the test reads the limits.
async fn life(version: Version) {
    let mut world = World::new().await;
    world.config.cgroup_driver = CgroupDriver::Systemd;
    world.reopen().await;
    let told = world.runtime().runtime_config(RuntimeConfigRequest {}).await.unwrap();
    assert_eq!(told.linux.unwrap().cgroup_driver(), CgroupDriver::Systemd);
    let mut systemd = Manager::connect(version).unwrap();
    let handlers: Vec<String> = match version {
        // crun does not get along with a unified hierarchy beside the others that has controllers, and cannot
        // make up for its absence where systemd has made the place read-only.
        Version::V1 => world.config.handlers.keys().filter(|name| *name == "runc").cloned().collect(),
        Version::V2 => Vec::new(),
    };
    for (attempt, handler) in std::iter::once(String::new()).chain(handlers).enumerate() {
        let sandbox = run_sandbox(&world, &handler, attempt as u32).await;
        let limits =
            if version == Version::V1 { memory(64 << 20) } else { LinuxContainerResources::default() };
        let id = world.start(&sandbox, limited(shell("a", "exec sleep 1000"), limits)).await;
        let unit = format!("ferrite-{id}.scope");
        let place = format!("{PATH}/{unit}");
        let pid = world.pid(&id).await;
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        let controller = if version == Version::V1 { ":memory:" } else { "0::" };
        assert!(
            groups.lines().any(|line| line.ends_with(&format!("{controller}{place}"))),
            "{handler}: {groups}"
        );
        let mut know = |name: &str| systemd.property(&unit, SCOPE, name).unwrap();
        assert_eq!(know("Slice"), Some(Value::Text(SLICE.into())));
        assert_eq!(know("Delegate"), Some(Value::Bool(true)));
        if version == Version::V1 {
            assert_eq!(know("MemoryLimit"), Some(Value::U64(64 << 20)));
            assert_eq!(know("CPUShares"), Some(Value::U64(512)));
            let request = UpdateContainerResourcesRequest {
                container_id: id.clone(),
                linux: Some(memory(96 << 20)),
                ..Default::default()
            };
            world.runtime().update_container_resources(request).await.unwrap();
            assert_eq!(know("MemoryLimit"), Some(Value::U64(96 << 20)));
            let file = format!("/sys/fs/cgroup/memory{place}/memory.limit_in_bytes");
            assert_eq!(std::fs::read_to_string(file).unwrap().trim(), (96 << 20).to_string());
        }
        assert_eq!(world.exec_out(&id, "echo here").await, "here\n");
        world.reopen().await;
        assert_eq!(world.pid(&id).await, pid, "it outlives the runtime");
        assert_eq!(systemd.property(&unit, SCOPE, "Delegate").unwrap(), Some(Value::Bool(true)));
        world.stop(&id, 0).await;
        assert_eq!(world.status(&id).await.exit_code, 137);
        // One that cannot be started leaves no scope.
        let broken = world.create(&sandbox, world::container("b", &["/no/such"])).await;
        assert!(world.try_start(&broken).await.is_err());
        world
            .runtime()
            .remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox })
            .await
            .unwrap();
        for id in [&id, &broken] {
            let unit = format!("ferrite-{id}.scope");
            assert_eq!(
                systemd.property(&unit, SCOPE, "Slice").unwrap(),
                None,
                "{handler}: the scope is gone"
            );
        }
        let left: Vec<_> = std::fs::read_dir("/sys/fs/cgroup")
            .unwrap()
            .flatten()
            .map(|entry| entry.path().join(place.trim_start_matches('/')))
            .filter(|path| path.exists())
            .collect();
        assert!(left.is_empty(), "{handler}: {left:?}");
    }
    // A name that is none.
    let mut config = world.sandbox_config();
    config.linux.as_mut().unwrap().cgroup_parent = "kubepods--x.slice".into();
    let request = RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
    assert_eq!(world.runtime().run_pod_sandbox(request).await.unwrap_err().code, Code::InvalidArgument);
    systemd.stop("kubepods.slice").unwrap();
    world.close().await;
}

#[test]
fn containers_are_scopes() {
    inside("containers_are_scopes", Version::V1, life(Version::V1));
}

#[test]
fn containers_are_scopes_of_the_unified_hierarchy() {
    inside("containers_are_scopes_of_the_unified_hierarchy", Version::V2, life(Version::V2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_without_systemd_says_so() {
    if std::path::Path::new("/run/systemd/private").exists()
        || std::path::Path::new("/run/dbus/system_bus_socket").exists()
    {
        eprintln!("SKIPPED: this machine has systemd");
        return;
    }
    let world = World::new().await;
    let sandbox = run_sandbox(&world, "", 0).await;
    let id = world.create(&sandbox, shell("a", "true")).await;
    let error = world.try_start(&id).await.unwrap_err();
    assert!(error.message.contains("could not reach systemd"), "{error}");
}
