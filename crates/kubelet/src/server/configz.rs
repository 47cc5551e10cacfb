//! `/configz`: the configuration this kubelet runs with, in the words of upstream's KubeletConfiguration.

use crate::clock::go_duration;
use crate::config::{Authorization, Config};
use ferrite_cri::v1::CgroupDriver;
use ferrite_json::{Value, json};

/// Every setting of [`Config`] that KubeletConfiguration has a field for. `driver` is the one in use: the runtime may
/// have asked for another than was configured.
pub(super) fn configuration(config: &Config, driver: CgroupDriver) -> Value {
    // Taken apart, so that a new setting is not forgotten here.
    let Config {
        node_name: _,
        node_ips: _,
        root_dir: _,
        local_volumes: _,
        log_dir,
        cgroup_root,
        cgroup_driver: _,
        server_address,
        tls,
        access,
        debugging_handlers,
        system_log_handler,
        system_log_dir: _,
        static_pod_path,
        file_check_frequency,
        static_pod_url,
        http_check_frequency,
        standalone: _,
        healthz_address,
        cluster_dns,
        cluster_domain,
        resolv_conf,
        node_labels: _,
        max_pods,
        api_server: _,
        reserved_cpu_milli,
        reserved_memory,
        eviction_memory: _,
        eviction,
        node_lease_duration,
        node_status_report_frequency,
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
        "healthzPort": healthz_address.map_or(0, |address| address.port()),
        "healthzBindAddress": healthz_address.map(|address| address.ip().to_string()).unwrap_or_default(),
        "staticPodPath": static_pod_path.as_ref().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
        "fileCheckFrequency": go_duration(*file_check_frequency),
        "staticPodURL": static_pod_url.as_ref().map(|(url, _)| url.clone()).unwrap_or_default(),
        "httpCheckFrequency": go_duration(*http_check_frequency),
        "enableDebuggingHandlers": debugging_handlers,
        "enableSystemLogHandler": system_log_handler,
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
        "maxPods": max_pods,
        "systemReserved": {"cpu": format!("{reserved_cpu_milli}m"), "memory": reserved_memory.to_string()},
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
        "topologyManagerPolicy": resources.topology_policy.name(),
        "topologyManagerScope": resources.topology_scope.name(),
        "topologyManagerPolicyOptions": resources.topology_options(),
    }})
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    #[test]
    fn settings_are_shown_as_they_are() {
        let usual = Config::new("node", Ipv4Addr::LOCALHOST.into());
        let changed = Config {
            max_pods: 7,
            cluster_dns: Some(Ipv4Addr::new(10, 96, 0, 10).into()),
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
