//! Debian's systemd, asked for units by our client.

#![allow(clippy::unwrap_used)]

use ferrite_cgroup::{Limits, Version};
use ferrite_systemd::testing::Machine;
use ferrite_systemd::{Manager, ScopeRequest, Slice, Value};
use std::path::Path;
use std::process::{Child, Command};

const SCOPE: &str = "org.freedesktop.systemd1.Scope";
const SLICE: &str = "org.freedesktop.systemd1.Slice";
const UNIT: &str = "org.freedesktop.systemd1.Unit";

/// A process that does nothing, ended with the value.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(path)).unwrap().trim().to_owned()
}

#[test]
fn units_with_a_hierarchy_per_controller() {
    if !Machine::is_inside() {
        let machine = Machine::start(Version::V1);
        return machine.run_again("units_with_a_hierarchy_per_controller");
    }
    let mut manager = Manager::connect(Version::V1).unwrap();
    assert!(manager.version() > 200);
    let slice = Slice::parse("kubepods-burstable-pod1_2.slice").unwrap();
    let limits =
        Limits { memory: Some(64 << 20), cpu_shares: Some(512), pids: Some(50), ..Limits::default() };
    manager.ensure_slice(&slice, &limits).unwrap();
    let directory = slice.path();
    assert_eq!(read(&format!("memory{directory}/memory.limit_in_bytes")), (64 << 20).to_string());
    assert_eq!(read(&format!("cpu{directory}/cpu.shares")), "512");
    assert_eq!(read(&format!("pids{directory}/pids.max")), "50");
    // Once more, with other limits: the existing slice is updated.
    manager.ensure_slice(&slice, &Limits { memory: Some(32 << 20), ..limits }).unwrap();
    assert_eq!(read(&format!("memory{directory}/memory.limit_in_bytes")), (32 << 20).to_string());

    let process = Sleeper::start();
    let limits = Limits {
        memory: Some(16 << 20),
        cpu_quota: Some(50_000),
        cpu_period: Some(100_000),
        ..Limits::default()
    };
    let request = ScopeRequest {
        unit: "ferrite-abc.scope",
        slice: &slice,
        description: "a container",
        pid: process.0.id(),
        limits: &limits,
    };
    manager.start_scope(&request).unwrap();
    let place = format!("{directory}/ferrite-abc.scope");
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", process.0.id())).unwrap();
    assert!(groups.lines().any(|line| line.ends_with(&format!(":memory:{place}"))), "{groups}");
    assert_eq!(read(&format!("memory{place}/memory.limit_in_bytes")), (16 << 20).to_string());
    assert_eq!(manager.property("ferrite-abc.scope", SCOPE, "Delegate").unwrap(), Some(Value::Bool(true)));
    let quota = manager.property("ferrite-abc.scope", SCOPE, "CPUQuotaPerSecUSec").unwrap();
    assert_eq!(quota, Some(Value::U64(500_000)));
    assert_eq!(read(&format!("cpu{place}/cpu.cfs_quota_us")), "50000");
    // A second one of that name is refused, and says so.
    let error = manager.start_scope(&request).unwrap_err();
    assert!(error.is_unit_exists(), "{error}");
    manager.update("ferrite-abc.scope", &Limits { memory: Some(24 << 20), ..Limits::default() }).unwrap();
    assert_eq!(read(&format!("memory{place}/memory.limit_in_bytes")), (24 << 20).to_string());
    manager.stop("ferrite-abc.scope").unwrap();
    assert_eq!(manager.property("ferrite-abc.scope", UNIT, "ActiveState").unwrap(), None, "it is forgotten");
    manager.stop("ferrite-abc.scope").unwrap();
    let tasks = manager.property(&slice.to_string(), SLICE, "TasksMax").unwrap();
    assert_eq!(tasks, Some(Value::U64(50)));
    manager.stop(&slice.to_string()).unwrap();
    assert!(!Path::new("/sys/fs/cgroup/memory").join(directory.trim_start_matches('/')).exists());
}

#[test]
fn units_with_the_unified_hierarchy() {
    if !Machine::is_inside() {
        let machine = Machine::start(Version::V2);
        return machine.run_again("units_with_the_unified_hierarchy");
    }
    let mut manager = Manager::connect(Version::V2).unwrap();
    let slice = Slice::parse("kubepods-pod3.slice").unwrap();
    let limits = Limits {
        memory: Some(64 << 20),
        cpu_shares: Some(512),
        pids: Some(50),
        cpus: Some("0".into()),
        ..Limits::default()
    };
    manager.ensure_slice(&slice, &limits).unwrap();
    // The controllers may all be on other hierarchies: systemd's own values count.
    for (name, value) in [("MemoryMax", 64 << 20), ("CPUWeight", 59), ("TasksMax", 50)] {
        let found = manager.property(&slice.to_string(), SLICE, name).unwrap();
        assert_eq!(found, Some(Value::U64(value)), "{name}");
    }
    let process = Sleeper::start();
    let request = ScopeRequest {
        unit: "ferrite-def.scope",
        slice: &slice,
        description: "a container",
        pid: process.0.id(),
        limits: &Limits::default(),
    };
    manager.start_scope(&request).unwrap();
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", process.0.id())).unwrap();
    let place = format!("0::{}/ferrite-def.scope", slice.path());
    assert!(groups.lines().any(|line| line == place), "{groups}");
    manager.stop("ferrite-def.scope").unwrap();
    manager.stop(&slice.to_string()).unwrap();
    assert_eq!(manager.property(&slice.to_string(), UNIT, "ActiveState").unwrap_or(None), None);
}

#[test]
fn a_machine_without_systemd() {
    if Path::new("/run/systemd/private").exists() || Path::new("/run/dbus/system_bus_socket").exists() {
        eprintln!("SKIPPED: this machine has systemd");
        return;
    }
    let error = Manager::connect(Version::V1).err().unwrap();
    assert!(error.to_string().contains("could not reach systemd"), "{error}");
}
