//! Settings that limit pulls, images, logs and restarts.

use super::settings::{Settings, SettingsError};
use ferrite_api::quantity::Quantity;
use ferrite_client::RateLimit;
use ferrite_kubelet::{
    CpuQuota, LogLimits, PullLimits, ShutdownPeriod, SwapBehavior, UnsafeSysctls, shutdown_periods,
};
use serde::Deserialize;
use std::time::Duration;

fn bad(field: &'static str, problem: impl Into<String>) -> SettingsError {
    SettingsError::Value { field, problem: problem.into() }
}

/// A number that is not negative.
fn count(settings: &Settings, field: &'static str) -> Result<u32, SettingsError> {
    u32::try_from(settings.int(field)).map_err(|_| bad(field, "it is negative or too large"))
}

/// Limits of image pulls: at a time, and per second. As upstream, pulls wait for one another unless a setting says
/// that they do not.
pub(super) fn pulls(settings: &Settings) -> Result<PullLimits, SettingsError> {
    const PARALLEL: &str = "maxParallelImagePulls";
    let most = match settings.is_set(PARALLEL) {
        true => Some(usize::try_from(count(settings, PARALLEL)?).unwrap_or(usize::MAX)),
        false => None,
    };
    if most == Some(0) {
        return Err(bad(PARALLEL, "it is not a positive number"));
    }
    let serialize = match settings.is_set("serializeImagePulls") {
        true => settings.bool("serializeImagePulls"),
        false => most.is_none_or(|most| most == 1),
    };
    if serialize && most.is_some_and(|most| most > 1) {
        return Err(bad(PARALLEL, "it cannot be larger than 1 unless serializeImagePulls is false"));
    }
    let qps = count(settings, "registryPullQPS")?;
    let burst = count(settings, "registryBurst")?;
    Ok(PullLimits { parallel: if serialize { Some(1) } else { most }, qps: (qps > 0).then_some(qps), burst })
}

/// An age at which images go must leave those that are too young to go.
pub(super) fn image_maximum_gc_age(settings: &Settings) -> Result<Duration, SettingsError> {
    const FIELD: &str = "imageMaximumGCAge";
    let (most, least) = (settings.duration(FIELD), settings.duration("imageMinimumGCAge"));
    match most.is_zero() || most >= least {
        true => Ok(most),
        false => Err(bad(FIELD, "it is less than imageMinimumGCAge")),
    }
}

pub(super) fn logs(settings: &Settings) -> Result<LogLimits, SettingsError> {
    const SIZE: &str = "containerLogMaxSize";
    let text = settings.text(SIZE);
    let size = Quantity::parse(&text).map_err(|_| bad(SIZE, format!("{text:?} is no quantity")))?;
    let at_least = |field: &'static str, least: usize| {
        let value = usize::try_from(settings.int(field)).ok().filter(|value| *value >= least);
        value.ok_or_else(|| bad(field, format!("it is less than {least}")))
    };
    const INTERVAL: &str = "containerLogMonitorInterval";
    let interval = settings.duration(INTERVAL);
    if interval < Duration::from_secs(3) {
        return Err(bad(INTERVAL, "it is less than 3s"));
    }
    Ok(LogLimits {
        max_size: size.value().try_into().map_err(|_| bad(SIZE, "it is negative"))?,
        max_files: at_least("containerLogMaxFiles", 2)?,
        workers: at_least("containerLogMaxWorkers", 1)?,
        interval,
    })
}

/// One entry of `shutdownGracePeriodByPodPriority`.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct PriorityPeriod {
    priority: i32,
    shutdown_grace_period_seconds: u32,
}

/// The time that pods have when the machine shuts down.
pub(super) fn shutdown(settings: &Settings) -> Result<Vec<ShutdownPeriod>, SettingsError> {
    const ALL: &str = "shutdownGracePeriod";
    const CRITICAL: &str = "shutdownGracePeriodCriticalPods";
    const BY_PRIORITY: &str = "shutdownGracePeriodByPodPriority";
    let (all, critical) = (settings.duration(ALL), settings.duration(CRITICAL));
    let whole = |time: Duration| time.is_zero() || time >= Duration::from_secs(1);
    for (field, time) in [(ALL, all), (CRITICAL, critical)] {
        if !whole(time) {
            return Err(bad(field, "it is neither zero nor at least 1s"));
        }
    }
    if critical > all {
        return Err(bad(CRITICAL, "it is larger than shutdownGracePeriod"));
    }
    let given: Vec<PriorityPeriod> = ferrite_json::from_value(settings.value(BY_PRIORITY))
        .map_err(|error| bad(BY_PRIORITY, error.to_string()))?;
    if given.is_empty() {
        return Ok(shutdown_periods(all, critical));
    }
    if !all.is_zero() {
        return Err(bad(BY_PRIORITY, "it cannot be set together with shutdownGracePeriod"));
    }
    let period = |given: PriorityPeriod| ShutdownPeriod {
        priority: given.priority,
        grace: Duration::from_secs(given.shutdown_grace_period_seconds.into()),
    };
    Ok(given.into_iter().map(period).collect())
}

pub(super) fn max_restart_backoff(settings: &Settings) -> Result<Duration, SettingsError> {
    const FIELD: &str = "crashLoopBackOff.maxContainerRestartPeriod";
    let period = settings.duration(FIELD);
    match (Duration::from_secs(1)..=Duration::from_secs(300)).contains(&period) {
        true => Ok(period),
        false => Err(bad(FIELD, "it is not between 1s and 300s")),
    }
}

/// Requests to the API server a second. Zero stands for the default, as upstream documents it.
pub(super) fn api_requests(settings: &Settings) -> Result<RateLimit, SettingsError> {
    let (qps, burst) = (count(settings, "kubeAPIQPS")?, count(settings, "kubeAPIBurst")?);
    Ok(RateLimit { qps: if qps == 0 { 50.0 } else { f64::from(qps) }, burst })
}

/// Events a second. As upstream, zero stands for a client's usual limits.
pub(super) fn events(settings: &Settings) -> Result<RateLimit, SettingsError> {
    let (qps, burst) = (count(settings, "eventRecordQPS")?, count(settings, "eventBurst")?);
    Ok(RateLimit {
        qps: if qps == 0 { 5.0 } else { f64::from(qps) },
        burst: if burst == 0 { 10 } else { burst },
    })
}

pub(super) fn cpu_quota(settings: &Settings) -> Result<CpuQuota, SettingsError> {
    const PERIOD: &str = "cpuCFSQuotaPeriod";
    let period = settings.duration(PERIOD);
    let micros = i64::try_from(period.as_micros()).unwrap_or(i64::MAX);
    if !(Duration::from_millis(1)..=Duration::from_secs(1)).contains(&period) {
        return Err(bad(PERIOD, "it is not between 1ms and 1s"));
    }
    Ok(CpuQuota { enforced: settings.bool("cpuCFSQuota"), period: micros })
}

pub(super) fn swap_behavior(settings: &Settings) -> Result<SwapBehavior, SettingsError> {
    const FIELD: &str = "memorySwap.swapBehavior";
    match settings.text(FIELD).as_str() {
        "" | "NoSwap" => Ok(SwapBehavior::NoSwap),
        "LimitedSwap" => Ok(SwapBehavior::LimitedSwap),
        _ => Err(bad(FIELD, "it is neither NoSwap nor LimitedSwap")),
    }
}

pub(super) fn unsafe_sysctls(settings: &Settings) -> Result<UnsafeSysctls, SettingsError> {
    const FIELD: &str = "allowedUnsafeSysctls";
    let patterns = settings.texts(FIELD);
    UnsafeSysctls::parse(patterns.iter().map(String::as_str)).map_err(|error| bad(FIELD, error.to_string()))
}

/// Identities of a pod with its own users.
pub(super) fn ids_per_pod(settings: &Settings) -> Result<u32, SettingsError> {
    const FIELD: &str = "userNamespaces.idsPerPod";
    let length = u32::try_from(settings.int(FIELD)).ok().filter(|length| *length > 0 && length % 65_536 == 0);
    length.ok_or_else(|| bad(FIELD, "it is no multiple of 65536 below 4294967296"))
}

/// The interval at which volumes are measured. As upstream, a negative one means never.
pub(super) fn volume_stats_period(settings: &Settings) -> Option<Duration> {
    const FIELD: &str = "volumeStatsAggPeriod";
    let is_negative = settings.text(FIELD).trim_start().starts_with('-');
    (!is_negative).then(|| settings.duration(FIELD))
}

pub(super) fn system_log_query(settings: &Settings) -> Result<bool, SettingsError> {
    const FIELD: &str = "enableSystemLogQuery";
    let asked = settings.bool(FIELD);
    match asked && !settings.bool("enableSystemLogHandler") {
        true => Err(bad(FIELD, "enableSystemLogHandler is required for it")),
        false => Ok(asked),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::settings::testing::settings;

    #[test]
    fn limits_of_pulls() {
        let limits = |parallel| PullLimits { parallel, qps: Some(5), burst: 10 };
        for (text, expected) in [
            ("", Ok(limits(Some(1)))),
            ("serializeImagePulls: false\n", Ok(limits(None))),
            ("maxParallelImagePulls: 3\n", Ok(limits(Some(3)))),
            ("maxParallelImagePulls: 1\n", Ok(limits(Some(1)))),
            ("serializeImagePulls: false\nmaxParallelImagePulls: 1\n", Ok(limits(Some(1)))),
            (
                "registryPullQPS: 0\nregistryBurst: 1\n",
                Ok(PullLimits { qps: None, burst: 1, ..limits(Some(1)) }),
            ),
            ("serializeImagePulls: true\nmaxParallelImagePulls: 3\n", Err("cannot be larger than 1")),
            ("maxParallelImagePulls: 0\n", Err("not a positive number")),
            ("registryPullQPS: -1\n", Err("negative")),
        ] {
            match (pulls(&settings(text)), expected) {
                (Ok(read), Ok(expected)) => assert_eq!(read, expected, "{text}"),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{text}: {error}"),
                (read, _) => panic!("{text}: {read:?}"),
            }
        }
    }

    #[test]
    fn limits_of_requests_and_events() {
        let limit = |qps, burst| RateLimit { qps, burst };
        assert_eq!(api_requests(&settings("")).unwrap(), limit(50.0, 100));
        assert_eq!(api_requests(&settings("kubeAPIQPS: 10\nkubeAPIBurst: 20\n")).unwrap(), limit(10.0, 20));
        assert_eq!(events(&settings("")).unwrap(), limit(50.0, 100));
        assert_eq!(events(&settings("eventRecordQPS: 0\neventBurst: 3\n")).unwrap(), limit(5.0, 3));
        assert!(events(&settings("eventRecordQPS: -1\n")).is_err());
        assert!(api_requests(&settings("kubeAPIBurst: -1\n")).is_err());
    }

    #[test]
    fn rules_for_containers() {
        let quota = |enforced, period| CpuQuota { enforced, period };
        assert_eq!(cpu_quota(&settings("")).unwrap(), quota(true, 100_000));
        assert_eq!(cpu_quota(&settings("cpuCFSQuota: false\n")).unwrap(), quota(false, 100_000));
        assert_eq!(cpu_quota(&settings("cpuCFSQuotaPeriod: 5ms\n")).unwrap(), quota(true, 5000));
        assert!(cpu_quota(&settings("cpuCFSQuotaPeriod: 2s\n")).is_err());
        assert_eq!(swap_behavior(&settings("")).unwrap(), SwapBehavior::NoSwap);
        let limited = settings("memorySwap: {swapBehavior: LimitedSwap}\n");
        assert_eq!(swap_behavior(&limited).unwrap(), SwapBehavior::LimitedSwap);
        assert!(swap_behavior(&settings("memorySwap: {swapBehavior: UnlimitedSwap}\n")).is_err());
        assert!(unsafe_sysctls(&settings("allowedUnsafeSysctls: [net.core.somaxconn]\n")).is_ok());
        assert!(unsafe_sysctls(&settings("allowedUnsafeSysctls: [kernel.hostname]\n")).is_err());
        assert_eq!(ids_per_pod(&settings("userNamespaces: {idsPerPod: 131072}\n")).unwrap(), 131_072);
        for wrong in ["0", "65537", "4294967296", "-65536"] {
            assert!(ids_per_pod(&settings(&format!("userNamespaces: {{idsPerPod: {wrong}}}\n"))).is_err());
        }
        assert_eq!(volume_stats_period(&settings("volumeStatsAggPeriod: -1s\n")), None);
        assert_eq!(volume_stats_period(&settings("")), Some(Duration::from_secs(60)));
        assert!(system_log_query(&settings("enableSystemLogQuery: true\n")).unwrap());
        let without = "enableSystemLogQuery: true\nenableSystemLogHandler: false\n";
        assert!(system_log_query(&settings(without)).is_err());
    }

    #[test]
    fn times_of_a_shutdown() {
        let period = |priority, seconds| ShutdownPeriod { priority, grace: Duration::from_secs(seconds) };
        let by_priority = "shutdownGracePeriodByPodPriority: [{priority: 5, shutdownGracePeriodSeconds: 60}, {shutdownGracePeriodSeconds: 7}]\n";
        let both = format!("shutdownGracePeriod: 5s\n{by_priority}");
        for (text, expected) in [
            ("", Ok(vec![])),
            (
                "shutdownGracePeriod: 30s\nshutdownGracePeriodCriticalPods: 10s\n",
                Ok(vec![period(0, 20), period(2_000_000_000, 10)]),
            ),
            (by_priority, Ok(vec![period(5, 60), period(0, 7)])),
            ("shutdownGracePeriod: 500ms\n", Err("neither zero")),
            ("shutdownGracePeriodCriticalPods: 10s\n", Err("larger than")),
            (both.as_str(), Err("together with")),
            ("shutdownGracePeriodByPodPriority: [{priority: 5, seconds: 60}]\n", Err("unknown field")),
            ("shutdownGracePeriodByPodPriority: [{shutdownGracePeriodSeconds: -1}]\n", Err("invalid value")),
        ] {
            match (shutdown(&settings(text)), expected) {
                (Ok(read), Ok(expected)) => assert_eq!(read, expected, "{text}"),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{text}: {error}"),
                (read, _) => panic!("{text}: {read:?}"),
            }
        }
    }

    #[test]
    fn limits_of_logs_images_and_restarts() {
        assert_eq!(logs(&settings("")).unwrap(), LogLimits::default());
        let all = "containerLogMaxSize: 1Ki\ncontainerLogMaxFiles: 3\ncontainerLogMaxWorkers: 4\ncontainerLogMonitorInterval: 3s\n";
        let expected =
            LogLimits { max_size: 1024, max_files: 3, workers: 4, interval: Duration::from_secs(3) };
        assert_eq!(logs(&settings(all)).unwrap(), expected);
        for (text, part) in [
            ("containerLogMaxFiles: 1\n", "less than 2"),
            ("containerLogMaxWorkers: 0\n", "less than 1"),
            ("containerLogMonitorInterval: 1s\n", "less than 3s"),
            ("containerLogMaxSize: much\n", "no quantity"),
        ] {
            let said = logs(&settings(text)).unwrap_err().to_string();
            assert!(said.contains(part), "{text}: {said}");
        }
        assert_eq!(image_maximum_gc_age(&settings("")).unwrap(), Duration::ZERO);
        assert_eq!(
            image_maximum_gc_age(&settings("imageMaximumGCAge: 3m\n")).unwrap(),
            Duration::from_secs(180)
        );
        assert!(image_maximum_gc_age(&settings("imageMaximumGCAge: 1m\n")).is_err());
        assert_eq!(max_restart_backoff(&settings("")).unwrap(), Duration::from_secs(300));
        for (period, fits) in [("1s", true), ("60s", true), ("301s", false), ("500ms", false)] {
            let text = format!("crashLoopBackOff: {{maxContainerRestartPeriod: {period}}}\n");
            assert_eq!(max_restart_backoff(&settings(&text)).is_ok(), fits, "{period}");
        }
    }
}
