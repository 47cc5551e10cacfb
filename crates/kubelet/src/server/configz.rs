//! `/configz`: the configuration this kubelet runs with, in the words of upstream's KubeletConfiguration.

use crate::clock::go_duration;
use crate::config::{Authorization, Config};
use crate::container::resources::SwapBehavior;
use ferrite_cri::v1::CgroupDriver;
use ferrite_json::{Value, json};
use std::time::Duration;

/// Every setting of [`Config`] that KubeletConfiguration has a field for. `driver` is the one in use: the runtime may
/// have asked for another than was configured.
pub(super) fn configuration(config: &Config, driver: CgroupDriver) -> Value {
    // Taken apart, so that a new setting is not forgotten here.
    let Config {
        node_name: _,
        node_ips: _,
        root_dir: _,
        feature_gates,
        local_volumes: _,
        log_dir,
        cgroup_root,
        cgroup_driver: _,
        server_address,
        tls,
        access,
        debugging_handlers,
        system_log_handler,
        system_log_query,
        set_verbosity,
        system_log_dir: _,
        static_pod_path,
        file_check_frequency,
        static_pod_url,
        http_check_frequency,
        standalone: _,
        read_only_address,
        healthz_address,
        cluster_dns,
        cluster_domain,
        resolv_conf,
        node_labels: _,
        register_node,
        register_with_taints,
        provider_id,
        node_status_max_images,
        max_pods,
        pod_pids_limit,
        ids_per_pod,
        cpu_quota,
        swap_behavior,
        unsafe_sysctls,
        seccomp_default,
        api_server: _,
        reserved_cpu_milli,
        reserved_memory,
        reserved_ephemeral_storage,
        reserved_pids,
        enforcement,
        local_storage_isolation,
        cloud_provider: _,
        eviction_memory: _,
        eviction,
        node_lease_duration,
        node_status_report_frequency,
        node_status_update_frequency,
        sync_frequency,
        event_limit,
        volume_stats_period,
        pod_cidr,
        flags: _,
        image_gc_high_threshold,
        image_gc_low_threshold,
        image_minimum_gc_age,
        image_maximum_gc_age,
        pull_limits,
        logs,
        single_process_oom_kill,
        shutdown_periods,
        max_restart_backoff,
        resources,
        image_credential_providers: _,
        image_verification,
    } = config;
    json!({"kubeletconfig": {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "enableServer": tls.is_some(),
        "address": server_address.ip().to_string(),
        "port": server_address.port(),
        "readOnlyPort": read_only_address.map_or(0, |address| address.port()),
        "healthzPort": healthz_address.map_or(0, |address| address.port()),
        "healthzBindAddress": healthz_address.map(|address| address.ip().to_string()).unwrap_or_default(),
        "staticPodPath": static_pod_path.as_ref().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        "fileCheckFrequency": go_duration(*file_check_frequency),
        "staticPodURL": static_pod_url.as_ref().map(|(url, _)| url.clone()).unwrap_or_default(),
        "httpCheckFrequency": go_duration(*http_check_frequency),
        "enableDebuggingHandlers": debugging_handlers,
        "enableSystemLogHandler": system_log_handler,
        "enableSystemLogQuery": system_log_query,
        "enableDebugFlagsHandler": set_verbosity.is_some(),
        "authentication": {
            "anonymous": {"enabled": access.anonymous},
            "webhook": {"enabled": access.webhook_tokens, "cacheTTL": go_duration(access.token_ttl)},
        },
        "authorization": {
            "mode": match access.authorization {
                Authorization::Webhook => "Webhook",
                Authorization::AlwaysAllow => "AlwaysAllow",
            },
            "webhook": {
                "cacheAuthorizedTTL": go_duration(access.authorized_ttl),
                "cacheUnauthorizedTTL": go_duration(access.unauthorized_ttl),
            },
        },
        "podLogsDir": log_dir.to_string_lossy(),
        "cgroupRoot": cgroup_root,
        "cgroupDriver": match driver {
            CgroupDriver::Systemd => "systemd",
            CgroupDriver::Cgroupfs => "cgroupfs",
        },
        "clusterDomain": cluster_domain,
        "clusterDNS": cluster_dns.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "resolvConf": resolv_conf.to_string_lossy(),
        "registerNode": register_node,
        "registerWithTaints": register_with_taints,
        "providerID": provider_id,
        "nodeStatusMaxImages": node_status_max_images.map_or(-1, |most| i64::try_from(most).unwrap_or(i64::MAX)),
        "maxPods": max_pods,
        "featureGates": feature_gates.given(),
        "podPidsLimit": pod_pids_limit.unwrap_or(-1),
        "seccompDefault": seccomp_default,
        "userNamespaces": {"idsPerPod": ids_per_pod},
        "cpuCFSQuota": cpu_quota.enforced,
        "cpuCFSQuotaPeriod": go_duration(Duration::from_micros(u64::try_from(cpu_quota.period).unwrap_or(0))),
        "memorySwap": {"swapBehavior": match swap_behavior {
            SwapBehavior::NoSwap => "NoSwap",
            SwapBehavior::LimitedSwap => "LimitedSwap",
        }},
        "allowedUnsafeSysctls": unsafe_sysctls.patterns(),
        "systemReserved": {
            "cpu": format!("{reserved_cpu_milli}m"),
            "memory": reserved_memory.to_string(),
            "ephemeral-storage": reserved_ephemeral_storage.to_string(),
            "pid": reserved_pids.to_string(),
        },
        "enforceNodeAllocatable": enforcement.names(),
        "systemReservedCgroup": enforcement.system.as_ref().map(|group| group.name.clone()).unwrap_or_default(),
        "kubeReservedCgroup": enforcement.kube.as_ref().map(|group| group.name.clone()).unwrap_or_default(),
        "localStorageCapacityIsolation": local_storage_isolation,
        "nodeStatusUpdateFrequency": go_duration(*node_status_update_frequency),
        "syncFrequency": go_duration(*sync_frequency),
        "eventRecordQPS": event_limit.map_or(0, |limit| limit.qps as i64),
        "eventBurst": event_limit.map_or(0, |limit| limit.burst),
        "volumeStatsAggPeriod": volume_stats_period.map_or_else(|| "-1s".to_owned(), go_duration),
        "podCIDR": pod_cidr,
        "evictionHard": eviction.hard,
        "evictionSoft": eviction.soft,
        "evictionSoftGracePeriod": eviction
            .soft_grace
            .iter()
            .map(|(signal, grace)| (signal.clone(), go_duration(*grace)))
            .collect::<std::collections::BTreeMap<_, _>>(),
        "evictionMinimumReclaim": eviction.minimum_reclaim,
        "evictionPressureTransitionPeriod": go_duration(eviction.transition),
        "evictionMaxPodGracePeriod": eviction.max_pod_grace.as_secs(),
        "nodeLeaseDurationSeconds": node_lease_duration.as_secs(),
        "nodeStatusReportFrequency": go_duration(*node_status_report_frequency),
        "imageGCHighThresholdPercent": image_gc_high_threshold,
        "imageGCLowThresholdPercent": image_gc_low_threshold,
        "imagePullCredentialsVerificationPolicy": image_verification.name(),
        "preloadedImagesVerificationAllowlist": image_verification.allowlist(),
        "imageMinimumGCAge": go_duration(*image_minimum_gc_age),
        "imageMaximumGCAge": go_duration(*image_maximum_gc_age),
        "serializeImagePulls": pull_limits.parallel == Some(1),
        "maxParallelImagePulls": pull_limits.parallel,
        "registryPullQPS": pull_limits.qps.unwrap_or(0),
        "registryBurst": pull_limits.burst,
        "singleProcessOOMKill": single_process_oom_kill,
        "shutdownGracePeriodByPodPriority": shutdown_periods
            .iter()
            .map(|period| {
                let seconds = period.grace.as_secs();
                json!({"priority": period.priority, "shutdownGracePeriodSeconds": seconds})
            })
            .collect::<Vec<_>>(),
        "crashLoopBackOff": {"maxContainerRestartPeriod": go_duration(*max_restart_backoff)},
        "containerLogMaxSize": logs.max_size.to_string(),
        "containerLogMaxFiles": logs.max_files,
        "containerLogMaxWorkers": logs.workers,
        "containerLogMonitorInterval": go_duration(logs.interval),
        "cpuManagerPolicy": resources.cpu_policy.name(),
        "cpuManagerPolicyOptions": resources.cpu_policy.options(),
        "cpuManagerReconcilePeriod": go_duration(resources.cpu_reconcile_period),
        "reservedSystemCPUs": resources.reserved_cpus,
        "memoryManagerPolicy": resources.memory_policy.name(),
        "reservedMemory": resources
            .reserved_memory
            .iter()
            .map(|reserved| {
                let limits: std::collections::BTreeMap<&String, String> =
                    reserved.limits.iter().map(|(kind, bytes)| (kind, bytes.to_string())).collect();
                json!({"numaNode": reserved.numa_node, "limits": limits})
            })
            .collect::<Vec<_>>(),
        "topologyManagerPolicy": resources.topology_policy.name(),
        "topologyManagerScope": resources.topology_scope.name(),
        "topologyManagerPolicyOptions": resources.topology_options(),
    }})
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn settings_are_shown_as_they_are() {
        let usual = Config::new("node", Ipv4Addr::LOCALHOST.into());
        let changed = Config {
            max_pods: 7,
            cluster_dns: vec![Ipv4Addr::new(10, 96, 0, 10).into()],
            cgroup_root: "/other".into(),
            node_status_report_frequency: Duration::from_secs(90),
            eviction_memory: 5,
            reserved_cpu_milli: 250,
            ..usual.clone()
        };
        let shown = configuration(&changed, CgroupDriver::Systemd);
        for (pointer, value) in [
            ("maxPods", json!(7)),
            ("clusterDNS", json!(["10.96.0.10"])),
            ("cgroupRoot", json!("/other")),
            ("registerNode", json!(true)),
            ("nodeStatusMaxImages", json!(50)),
            ("cgroupDriver", json!("systemd")),
            ("nodeStatusReportFrequency", json!("1m30s")),
            ("evictionHard/memory.available", json!("100Mi")),
            ("systemReserved/cpu", json!("250m")),
            ("enableServer", json!(false)),
        ] {
            assert_eq!(shown.pointer(&format!("/kubeletconfig/{pointer}")), Some(&value), "{pointer}");
        }
        let shown = configuration(&usual, CgroupDriver::Cgroupfs);
        assert_eq!(shown["kubeletconfig"]["cgroupDriver"], "cgroupfs");
    }
}
