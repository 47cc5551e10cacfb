//! Settings of the Node's registration, and of what the node offers.

use super::settings::{Settings, SettingsError};
use ferrite_json::Value;
use k8s_openapi::api::core::v1::Taint;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

fn bad(field: &'static str, problem: impl Into<String>) -> SettingsError {
    SettingsError::Value { field, problem: problem.into() }
}

/// One taint of a flag: `key=value:effect` or `key:effect`.
fn flag_taint(text: &str) -> Option<Taint> {
    let (name, effect) = text.rsplit_once(':')?;
    let (key, value) = name.split_once('=').map_or((name, None), |(key, value)| (key, Some(value)));
    let value = value.filter(|value| !value.is_empty()).map(str::to_owned);
    Some(Taint { key: key.to_owned(), value, effect: effect.to_owned(), time_added: None })
}

/// The taints of a flag, as the configuration has them. None if one is no taint.
pub(super) fn flag_taints(text: &str) -> Option<Value> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let taints: Option<Vec<Taint>> = parts.map(flag_taint).collect();
    ferrite_json::to_value(taints?).ok()
}

/// Taints that the Node is created with.
pub(super) fn taints(settings: &Settings) -> Result<Vec<Taint>, SettingsError> {
    const FIELD: &str = "registerWithTaints";
    let given = settings.value(FIELD);
    let taints: Vec<Taint> =
        ferrite_json::from_value(given).map_err(|error| bad(FIELD, error.to_string()))?;
    for (index, taint) in taints.iter().enumerate() {
        if taint.key.is_empty() {
            return Err(bad(FIELD, "a taint has no key"));
        }
        if !matches!(taint.effect.as_str(), "NoSchedule" | "PreferNoSchedule" | "NoExecute") {
            return Err(bad(FIELD, format!("{:?} is no effect of a taint", taint.effect)));
        }
        if taints[..index].iter().any(|other| other.key == taint.key && other.effect == taint.effect) {
            return Err(bad(FIELD, format!("{}:{} is there twice", taint.key, taint.effect)));
        }
    }
    Ok(taints)
}

/// Images named in the Node's status. As upstream, -1 stands for all.
pub(super) fn max_images(settings: &Settings) -> Result<Option<usize>, SettingsError> {
    const FIELD: &str = "nodeStatusMaxImages";
    match settings.int(FIELD) {
        -1 => Ok(None),
        most => usize::try_from(most).map(Some).map_err(|_| bad(FIELD, "it is less than -1")),
    }
}

/// Pods that the node takes: `maxPods`, or fewer where there are not enough processors for them.
pub(super) fn max_pods(settings: &Settings, cpus: i64) -> Result<i64, SettingsError> {
    let (most, each) = (settings.int("maxPods"), settings.int("podsPerCore"));
    match each {
        ..0 => Err(bad("podsPerCore", "it is negative")),
        0 => Ok(most),
        each => Ok(most.min(each.saturating_mul(cpus))),
    }
}

/// Processes that a pod may have. As upstream, there is no limit unless it is positive.
pub(super) fn pids_limit(settings: &Settings) -> Result<Option<i64>, SettingsError> {
    Ok(Some(settings.int("podPidsLimit")).filter(|limit| *limit > 0))
}

/// Lets this process open as many files as `maxOpenFiles` says. Without privileges a process cannot raise its limit above
/// the one that it was started with.
pub(super) fn raise_open_files(settings: &Settings) -> Result<(), SettingsError> {
    const FIELD: &str = "maxOpenFiles";
    let wanted = u64::try_from(settings.int(FIELD)).map_err(|_| bad(FIELD, "it is negative"))?;
    let known = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard);
    let raised = setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted.max(known))
        .or_else(|_| setrlimit(Resource::RLIMIT_NOFILE, wanted.min(known), known));
    if let Err(error) = raised {
        tracing::warn!(%error, wanted, "cannot set the number of files that may be open");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::settings::testing::settings;

    #[test]
    fn taints_of_a_new_node() {
        let list =
            "registerWithTaints: [{key: a, value: b, effect: NoSchedule}, {key: a, effect: NoExecute}]\n";
        let flag = format!("registerWithTaints: {}\n", flag_taints("a=b:NoSchedule, a:NoExecute").unwrap());
        for text in [list, &flag] {
            let read = taints(&settings(text)).unwrap();
            let shown: Vec<_> =
                read.iter().map(|t| (t.key.as_str(), t.value.as_deref(), t.effect.as_str())).collect();
            assert_eq!(shown, [("a", Some("b"), "NoSchedule"), ("a", None, "NoExecute")], "{text}");
        }
        assert!(taints(&settings("")).unwrap().is_empty() && flag_taints("a").is_none());
        for (text, part) in [
            ("[{key: a, effect: Sometimes}]", "no effect"),
            ("[{key: '', effect: NoSchedule}]", "has no key"),
            ("[{key: a, effect: NoSchedule}, {key: a, value: c, effect: NoSchedule}]", "twice"),
        ] {
            let said = taints(&settings(&format!("registerWithTaints: {text}\n"))).unwrap_err().to_string();
            assert!(said.contains(part), "{text}: {said}");
        }
    }

    #[test]
    fn amounts() {
        for (text, cpus, pods) in [
            ("", 1, 110),
            ("podsPerCore: 10\n", 4, 40),
            ("podsPerCore: 100\n", 4, 110),
            ("podsPerCore: 10\nmaxPods: 20\n", 4, 20),
        ] {
            assert_eq!(max_pods(&settings(text), cpus).unwrap(), pods, "{text}");
        }
        assert!(max_pods(&settings("podsPerCore: -1\n"), 1).is_err());
        assert_eq!(pids_limit(&settings("")).unwrap(), None);
        assert_eq!(pids_limit(&settings("podPidsLimit: 100\n")).unwrap(), Some(100));
        for (text, expected) in
            [("", Some(50)), ("nodeStatusMaxImages: -1\n", None), ("nodeStatusMaxImages: 0\n", Some(0))]
        {
            assert_eq!(max_images(&settings(text)).unwrap(), expected, "{text}");
        }
        assert!(max_images(&settings("nodeStatusMaxImages: -2\n")).is_err());
    }
}
