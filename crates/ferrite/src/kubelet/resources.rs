//! The settings of the CPU manager and of the topology manager.

use super::memory;
use super::settings::{Settings, SettingsError};
use ferrite_kubelet::{CpuOptions, CpuPolicy, ResourceSettings, TopologyPolicy, TopologyScope};

/// Of a machine with more NUMA nodes every combination of them would have to be compared.
const MOST_NUMA_NODES: usize = 16;

fn bad(field: &'static str, problem: impl ToString) -> SettingsError {
    SettingsError::Value { field, problem: problem.to_string() }
}

/// Reads the settings. `gate` says which feature gates are on.
pub(super) fn read(
    settings: &Settings,
    gate: impl Fn(&str) -> bool,
) -> Result<ResourceSettings, SettingsError> {
    let mut read = ResourceSettings {
        cpu_policy: cpu_policy(settings, gate)?,
        reserved_cpus: settings.text("reservedSystemCPUs"),
        cpu_reconcile_period: settings.duration("cpuManagerReconcilePeriod"),
        memory_policy: memory::policy(settings)?,
        reserved_memory: memory::reservations(settings)?,
        ..ResourceSettings::default()
    };
    let policy = settings.text("topologyManagerPolicy");
    read.topology_policy = TopologyPolicy::parse(&policy).ok_or_else(|| {
        bad("topologyManagerPolicy", "it is none of none, best-effort, restricted and single-numa-node")
    })?;
    read.topology_scope = TopologyScope::parse(&settings.text("topologyManagerScope"))
        .ok_or_else(|| bad("topologyManagerScope", "it is neither container nor pod"))?;
    const OPTIONS: &str = "topologyManagerPolicyOptions";
    for (name, value) in settings.map(OPTIONS) {
        match name.as_str() {
            "prefer-closest-numa-nodes" => {
                read.prefer_closest_numa =
                    value.parse().map_err(|_| bad(OPTIONS, format!("bad value for option {name:?}")))?;
            }
            "max-allowable-numa-nodes" => {
                let least = ResourceSettings::default().most_numa_nodes;
                let nodes = value.parse().ok().filter(|nodes| (least..=MOST_NUMA_NODES).contains(nodes));
                let range = format!("{name:?} must be between {least} and {MOST_NUMA_NODES}");
                read.most_numa_nodes = nodes.ok_or_else(|| bad(OPTIONS, range))?;
            }
            _ => return Err(bad(OPTIONS, format!("unknown Topology Manager Policy option: {name:?}"))),
        }
    }
    Ok(read)
}

fn cpu_policy(settings: &Settings, gate: impl Fn(&str) -> bool) -> Result<CpuPolicy, SettingsError> {
    const OPTIONS: &str = "cpuManagerPolicyOptions";
    let options = settings.map(OPTIONS);
    match settings.text("cpuManagerPolicy").as_str() {
        "none" if options.is_empty() => Ok(CpuPolicy::None),
        "none" => Err(bad(OPTIONS, "None policy: received unsupported options")),
        "static" => {
            let (alpha, beta) = (gate("CPUManagerPolicyAlphaOptions"), gate("CPUManagerPolicyBetaOptions"));
            let named = options.iter().map(|(name, value)| (name.as_str(), value.as_str()));
            CpuOptions::parse(named, alpha, beta).map(CpuPolicy::Static).map_err(|e| bad(OPTIONS, e))
        }
        _ => Err(bad("cpuManagerPolicy", "it is neither none nor static")),
    }
}

/// Processors that are reserved by name count in place of amounts, as upstream.
pub(super) fn reserved_cpus(settings: &Settings) -> Result<Option<usize>, SettingsError> {
    const FIELD: &str = "reservedSystemCPUs";
    let text = settings.text(FIELD);
    if text.is_empty() {
        return Ok(None);
    }
    let count = ferrite_kubelet::cpu_count(&text).map_err(|e| bad(FIELD, e))?;
    Ok(Some(count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::settings::testing::settings;

    #[test]
    fn policies_and_options_are_read() {
        let read = |text: &str| super::read(&settings(text), |gate| gate == "CPUManagerPolicyBetaOptions");
        assert_eq!(read("").unwrap().cpu_policy, CpuPolicy::None);
        let all = read(
            "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: 'true'}\nreservedSystemCPUs: 0-1\n\
             topologyManagerPolicy: restricted\ntopologyManagerScope: pod\n\
             topologyManagerPolicyOptions: {prefer-closest-numa-nodes: 'true', max-allowable-numa-nodes: '10'}\n",
        )
        .unwrap();
        assert_eq!(
            all.cpu_policy,
            CpuPolicy::Static(CpuOptions { full_pcpus_only: true, ..CpuOptions::default() })
        );
        assert_eq!(
            (all.topology_policy, all.topology_scope),
            (TopologyPolicy::Restricted, TopologyScope::Pod)
        );
        assert!(all.prefer_closest_numa && all.most_numa_nodes == 10 && all.reserved_cpus == "0-1");
        for (text, problem) in [
            ("cpuManagerPolicy: best\n", "cpuManagerPolicy: it is neither none nor static"),
            ("cpuManagerPolicyOptions: {full-pcpus-only: 'true'}\n", "received unsupported options"),
            (
                "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {align-by-socket: 'true'}\n",
                "Alpha-level Options not enabled",
            ),
            ("topologyManagerPolicy: strict\n", "it is none of none, best-effort"),
            ("topologyManagerScope: node\n", "neither container nor pod"),
            ("topologyManagerPolicyOptions: {max-allowable-numa-nodes: '4'}\n", "between 8 and 16"),
            ("topologyManagerPolicyOptions: {x: 'true'}\n", "unknown Topology Manager Policy option"),
        ] {
            let said = read(text).unwrap_err().to_string();
            assert!(said.contains(problem), "{text}: {said}");
        }
        assert_eq!(reserved_cpus(&settings("reservedSystemCPUs: 0,2-3\n")).unwrap(), Some(3));
        assert!(reserved_cpus(&settings("reservedSystemCPUs: a\n")).is_err());
    }
}
