//! The share of all pods, and reservations of others, as limits of control groups.

use super::Cgroups;
use crate::config::Config;
use crate::container::resources;
use crate::node::{self, Machine};
use crate::pod::context::Context;
use crate::pod::model::{self, QosClass};
use ferrite_cgroup::Limits;
use ferrite_client::EventType;
use ferrite_cri::v1::CgroupDriver;
use ferrite_systemd::Slice;
use k8s_openapi::api::core::v1::Pod;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Between attempts to limit a group that uses more than the limit.
const RETRY: Duration = Duration::from_secs(60);

/// Limits of a control group that is not a pod's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupLimits {
    pub memory: Option<i64>,
    pub cpu_milli: Option<i64>,
    pub pids: Option<i64>,
}

impl From<&GroupLimits> for Limits {
    fn from(limits: &GroupLimits) -> Self {
        Self {
            memory: limits.memory,
            cpu_shares: limits.cpu_milli.map(|milli| resources::cpu_shares(milli).cast_unsigned()),
            pids: limits.pids,
            ..Self::default()
        }
    }
}

/// A group of the system's or the cluster's own processes, which may use no more than was reserved for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservedGroup {
    pub name: String,
    pub limits: GroupLimits,
    /// Only its share of the processors is enforced.
    pub compressible_only: bool,
}

/// The choices of `enforceNodeAllocatable`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enforcement {
    /// All pods together may use no more than the node offers.
    pub pods: bool,
    pub system: Option<ReservedGroup>,
    pub kube: Option<ReservedGroup>,
}

impl Default for Enforcement {
    fn default() -> Self {
        Self { pods: true, system: None, kube: None }
    }
}

impl Enforcement {
    /// In the words of the configuration.
    pub(crate) fn names(&self) -> Vec<String> {
        let reserved = |group: &Option<ReservedGroup>, name: &str| {
            let suffix = |group: &ReservedGroup| if group.compressible_only { "-compressible" } else { "" };
            group.as_ref().map(|group| format!("{name}{}", suffix(group)))
        };
        let pods = self.pods.then(|| "pods".to_owned());
        let names = [pods, reserved(&self.system, "system-reserved"), reserved(&self.kube, "kube-reserved")];
        let names: Vec<String> = names.into_iter().flatten().collect();
        if names.is_empty() { vec!["none".to_owned()] } else { names }
    }
}

/// A reservation cannot be enforced.
#[derive(Debug, thiserror::Error)]
#[error("failed to enforce {what} cgroup limits on {name:?}")]
pub struct EnforcementError {
    what: &'static str,
    name: String,
    #[source]
    source: io::Error,
}

/// The limits of all pods together. As upstream: pods that are not kept to the node's share have the whole machine.
fn pods_limits(config: &Config, machine: &Machine, most_pids: Option<i64>) -> GroupLimits {
    let kept = |amount: i64, reserved: i64| match config.enforcement.pods {
        true => amount.saturating_sub(reserved).max(0),
        false => amount,
    };
    GroupLimits {
        memory: Some(kept(machine.memory, config.reserved_memory)),
        cpu_milli: Some(kept(machine.cpus.saturating_mul(1000), config.reserved_cpu_milli)),
        pids: most_pids.map(|most| kept(most, config.reserved_pids)),
    }
}

/// Limits the groups of reservations. They must be there.
pub(crate) fn enforce_reserved(cgroups: &Cgroups, enforcement: &Enforcement) -> Result<(), EnforcementError> {
    let groups = [("System Reserved", &enforcement.system), ("Kube Reserved", &enforcement.kube)];
    for (what, group) in groups {
        let Some(group) = group else { continue };
        let limits = match group.compressible_only {
            true => GroupLimits { cpu_milli: group.limits.cpu_milli, ..GroupLimits::default() },
            false => group.limits,
        };
        cgroups.limit_existing(&group.name, &limits).map_err(|source| EnforcementError {
            what,
            name: group.name.clone(),
            source,
        })?;
    }
    Ok(())
}

/// Limits the group of all pods, again and again while they use more than that: eviction brings them below it.
pub(crate) async fn run(context: Arc<Context>, config: Arc<Config>, machine: Machine) {
    let about = node::reference(&config.node_name);
    let most_pids = crate::server::stats::node::processes().map(|(most, _)| most);
    let limits = pods_limits(&config, &machine, most_pids.and_then(|most| i64::try_from(most).ok()));
    loop {
        let cgroups = context.cgroups.clone();
        let done = tokio::task::spawn_blocking(move || cgroups.limit_pods(&limits)).await;
        let error = match done.map_err(io::Error::other).flatten() {
            Ok(()) => {
                let message = "Updated Node Allocatable limit across pods";
                context.recorder.event(&about, EventType::Normal, "NodeAllocatableEnforced", message);
                return;
            }
            Err(error) => error,
        };
        let message = format!("Failed to update Node Allocatable Limits: {error}");
        context.recorder.event(&about, EventType::Warning, "FailedNodeAllocatableEnforcement", message);
        tokio::time::sleep(RETRY).await;
    }
}

/// The requests of all Burstable pods, in thousandths of a processor: their class has as many shares.
fn burstable_request(pods: &[Arc<Pod>]) -> i64 {
    let burstable =
        |pod: &&Arc<Pod>| model::qos_class(pod) == QosClass::Burstable && !model::is_finished(pod);
    let requests = pods.iter().filter(burstable).map(|pod| resources::pod_resources(pod).cpu_request);
    requests.fold(0, i64::saturating_add)
}

impl Cgroups {
    /// Gives the class of Burstable pods the share that they ask for together.
    pub(crate) async fn weigh_burstable(&self, pods: &[Arc<Pod>]) -> io::Result<()> {
        let request = burstable_request(pods);
        if self.burstable.swap(request, std::sync::atomic::Ordering::AcqRel) == request {
            return Ok(());
        }
        let limits = GroupLimits { cpu_milli: Some(request), ..GroupLimits::default() };
        let cgroups = self.clone();
        let done =
            tokio::task::spawn_blocking(move || cgroups.limit_group(&["kubepods", "burstable"], &limits));
        done.await.map_err(io::Error::other).flatten()
    }

    fn limit_pods(&self, limits: &GroupLimits) -> io::Result<()> {
        self.limit_group(&["kubepods"], limits)
    }

    /// Makes a group of ours, and limits it.
    fn limit_group(&self, below: &[&str], limits: &GroupLimits) -> io::Result<()> {
        let parts: Vec<&str> =
            self.root.split('/').filter(|part| !part.is_empty()).chain(below.iter().copied()).collect();
        if self.driver == CgroupDriver::Systemd {
            return Ok(self.systemd()?.ensure_slice(&Slice::of(parts.iter().copied()), &limits.into())?);
        }
        let path = parts.join("/");
        self.layout.create(&path)?;
        Ok(self.layout.apply_available(&path, &limits.into())?)
    }

    /// Limits a group of others.
    fn limit_existing(&self, name: &str, limits: &GroupLimits) -> io::Result<()> {
        let plain = name.trim_matches('/');
        if plain.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no path of a cgroup"));
        }
        let slice = format!("{plain}.slice");
        let found = [plain, slice.as_str()].into_iter().find(|path| self.layout.exists(path));
        let path = found.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "the cgroup does not exist; its service manager must make it",
            )
        })?;
        Ok(self.layout.apply_available(path, &limits.into())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cgroup::Layout;
    use ferrite_json::json;

    #[test]
    fn pods_have_the_machine_less_reservations() {
        let machine = Machine { cpus: 4, memory: 1000, ..Machine::default() };
        let mut config = Config::new("n", "192.0.2.1".parse().unwrap());
        (config.reserved_cpu_milli, config.reserved_memory, config.reserved_pids) = (500, 100, 10);
        let limits =
            |memory, cpu_milli, pids| GroupLimits { memory: Some(memory), cpu_milli: Some(cpu_milli), pids };
        assert_eq!(pods_limits(&config, &machine, Some(50)), limits(900, 3500, Some(40)));
        assert_eq!(config.enforcement.names(), ["pods"]);
        config.enforcement.pods = false;
        assert_eq!(pods_limits(&config, &machine, None), limits(1000, 4000, None));
        assert_eq!(config.enforcement.names(), ["none"]);
        let group =
            ReservedGroup { name: "/a".into(), limits: GroupLimits::default(), compressible_only: true };
        config.enforcement = Enforcement { pods: true, system: None, kube: Some(group) };
        assert_eq!(config.enforcement.names(), ["pods", "kube-reserved-compressible"]);
    }

    #[test]
    fn burstable_pods_have_what_they_ask_for() {
        let pod = |phase: &str, resources: ferrite_json::Value| -> Arc<Pod> {
            let pod = json!({"metadata": {}, "status": {"phase": phase},
                "spec": {"containers": [{"name": "c", "resources": resources}]}});
            Arc::new(ferrite_json::from_value(pod).unwrap())
        };
        let some = json!({"requests": {"cpu": "300m"}});
        let all = json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}});
        let pods = [
            pod("Running", some.clone()),
            pod("Pending", some.clone()),
            pod("Succeeded", some),
            pod("Running", all),
        ];
        assert_eq!(burstable_request(&pods), 600);
    }

    /// A hierarchy of version 2 that is made of plain files.
    fn hierarchy(groups: &[&str]) -> (tempfile::TempDir, Cgroups) {
        let dir = tempfile::tempdir().unwrap();
        for group in groups {
            std::fs::create_dir_all(dir.path().join(group)).unwrap();
            for file in ["cpu.weight", "memory.max", "pids.max"] {
                std::fs::write(dir.path().join(group).join(file), "").unwrap();
            }
        }
        let cgroups = Cgroups::new(Layout::v2(dir.path()), "/");
        (dir, cgroups)
    }

    #[test]
    fn groups_of_reservations_must_be_there() {
        let (dir, cgroups) = hierarchy(&["system.slice", "kube"]);
        let limits = GroupLimits { memory: Some(5), cpu_milli: Some(1000), pids: Some(7) };
        let group =
            |name: &str, compressible_only| ReservedGroup { name: name.into(), limits, compressible_only };
        let both = Enforcement {
            pods: true,
            system: Some(group("/system", false)),
            kube: Some(group("/kube", true)),
        };
        enforce_reserved(&cgroups, &both).unwrap();
        let read = |file: &str| std::fs::read_to_string(dir.path().join(file)).ok();
        assert_eq!(read("system.slice/memory.max").as_deref(), Some("5"));
        assert_eq!(read("system.slice/pids.max").as_deref(), Some("7"));
        assert_eq!(read("kube/cpu.weight").as_deref(), Some("100"));
        assert_eq!(read("kube/memory.max").as_deref(), Some(""), "unchanged");
        for name in ["/missing", "/../etc", "/", "/kube/../system.slice"] {
            let wrong = Enforcement { pods: true, system: Some(group(name, false)), kube: None };
            assert!(enforce_reserved(&cgroups, &wrong).is_err(), "{name}");
        }
    }

    #[tokio::test]
    async fn shares_of_a_class_are_written_once() {
        let (dir, cgroups) = hierarchy(&["kubepods", "kubepods/burstable"]);
        let pod: Pod = ferrite_json::from_value(json!({"metadata": {}, "spec": {"containers": [
            {"name": "c", "resources": {"requests": {"cpu": "1"}}}]}}))
        .unwrap();
        let file = dir.path().join("kubepods/burstable/cpu.weight");
        cgroups.weigh_burstable(&[Arc::new(pod.clone())]).await.unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "100");
        std::fs::write(&file, "7").unwrap();
        cgroups.weigh_burstable(&[Arc::new(pod)]).await.unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "7", "nothing changed");
        cgroups.weigh_burstable(&[]).await.unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "1");
    }
}
