//! Resources that are reserved for the system and the kubelet, and the control groups that hold to that.

use super::resources;
use super::settings::{Settings, SettingsError};
use ferrite_api::quantity::Quantity;
use ferrite_kubelet::{Enforcement, GroupLimits, ReservedGroup};

fn bad(field: &'static str, problem: impl Into<String>) -> SettingsError {
    SettingsError::Value { field, problem: problem.into() }
}

/// Amounts that pods cannot have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Reserved {
    pub(super) cpu_milli: i64,
    pub(super) memory: i64,
    pub(super) ephemeral_storage: i64,
    pub(super) pids: i64,
}

/// The amounts of one field, each if it is there.
#[derive(Debug, Clone, Copy, Default)]
struct Amounts {
    cpu_milli: Option<i64>,
    memory: Option<i64>,
    ephemeral_storage: Option<i64>,
    pids: Option<i64>,
}

impl Amounts {
    fn of(settings: &Settings, field: &'static str) -> Result<Self, SettingsError> {
        let mut amounts = Self::default();
        for (resource, text) in settings.map(field) {
            let amount =
                Quantity::parse(&text).map_err(|_| bad(field, format!("{text:?} is no quantity")))?;
            if amount.value() < 0 {
                return Err(bad(
                    field,
                    format!("resource quantity for {resource} cannot be negative: {text}"),
                ));
            }
            match resource.as_str() {
                "cpu" => amounts.cpu_milli = Some(amount.milli_value()),
                "memory" => amounts.memory = Some(amount.value()),
                "ephemeral-storage" => amounts.ephemeral_storage = Some(amount.value()),
                "pid" => amounts.pids = Some(amount.value()),
                other => {
                    let problem =
                        format!("cannot reserve {other:?}; name cpu, memory, ephemeral-storage and pid");
                    return Err(bad(field, problem));
                }
            }
        }
        Ok(amounts)
    }

    fn limits(&self) -> GroupLimits {
        GroupLimits { memory: self.memory, cpu_milli: self.cpu_milli, pids: self.pids }
    }
}

impl Reserved {
    pub(super) fn of(settings: &Settings) -> Result<Self, SettingsError> {
        let mut reserved = Self::default();
        for field in ["systemReserved", "kubeReserved"] {
            let amounts = Amounts::of(settings, field)?;
            let add = |sum: &mut i64, amount: Option<i64>| *sum = sum.saturating_add(amount.unwrap_or(0));
            add(&mut reserved.cpu_milli, amounts.cpu_milli);
            add(&mut reserved.memory, amounts.memory);
            add(&mut reserved.ephemeral_storage, amounts.ephemeral_storage);
            add(&mut reserved.pids, amounts.pids);
        }
        if let Some(count) = resources::reserved_cpus(settings)? {
            reserved.cpu_milli = i64::try_from(count).unwrap_or(i64::MAX).saturating_mul(1000);
        }
        Ok(reserved)
    }
}

/// The control groups that keep pods, the system and the kubelet to their shares, by upstream's rules.
pub(super) fn enforcement(settings: &Settings) -> Result<Enforcement, SettingsError> {
    const FIELD: &str = "enforceNodeAllocatable";
    let keys = settings.texts(FIELD);
    for (index, key) in keys.iter().enumerate() {
        if keys[..index].contains(key) {
            return Err(bad(FIELD, format!("{key:?} is there twice")));
        }
    }
    let has = |key: &str| keys.iter().any(|known| known == key);
    let mut enforcement = Enforcement { pods: has("pods"), system: None, kube: None };
    for key in &keys {
        let (group, amounts) = match key.as_str() {
            "pods" => continue,
            "none" if keys.len() == 1 => continue,
            "none" => return Err(bad(FIELD, "none stands alone")),
            "system-reserved" | "system-reserved-compressible" => ("systemReservedCgroup", "systemReserved"),
            "kube-reserved" | "kube-reserved-compressible" => ("kubeReservedCgroup", "kubeReserved"),
            other => {
                let known = "pods, system-reserved, system-reserved-compressible, kube-reserved, \
                             kube-reserved-compressible and none";
                return Err(bad(FIELD, format!("{other:?} is none of {known}")));
            }
        };
        let name = settings.text(group);
        if name.is_empty() {
            return Err(bad(FIELD, format!("{group} must be specified for {key:?}")));
        }
        let wanted = ReservedGroup {
            name,
            limits: Amounts::of(settings, amounts)?.limits(),
            compressible_only: key.ends_with("-compressible"),
        };
        let place = if amounts == "systemReserved" { &mut enforcement.system } else { &mut enforcement.kube };
        if place.replace(wanted).is_some() {
            return Err(bad(FIELD, format!("both forms of {amounts} cannot be specified together")));
        }
    }
    let names = [settings.text("systemReservedCgroup"), settings.text("kubeReservedCgroup")];
    if !settings.text("reservedSystemCPUs").is_empty() && names.iter().any(|name| !name.is_empty()) {
        let problem = "it cannot be used with systemReservedCgroup or kubeReservedCgroup";
        return Err(bad("reservedSystemCPUs", problem));
    }
    Ok(enforcement)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::settings::testing::settings;

    #[test]
    fn amounts_are_added() {
        let text = "systemReserved: {cpu: 100m, memory: 1Gi, pid: '5', ephemeral-storage: 1Mi}\nkubeReserved: {cpu: '1', memory: '7'}\n";
        let expected =
            Reserved { cpu_milli: 1100, memory: (1 << 30) + 7, ephemeral_storage: 1 << 20, pids: 5 };
        assert_eq!(Reserved::of(&settings(text)).unwrap(), expected);
        let named = format!("{text}reservedSystemCPUs: 0-2\n");
        assert_eq!(
            Reserved::of(&settings(&named)).unwrap().cpu_milli,
            3000,
            "names count in place of amounts"
        );
        for (text, part) in [
            ("kubeReserved: {gpu: '1'}\n", "cannot reserve"),
            ("kubeReserved: {cpu: many}\n", "no quantity"),
            ("kubeReserved: {cpu: '-1'}\n", "cannot be negative"),
        ] {
            let said = Reserved::of(&settings(text)).unwrap_err().to_string();
            assert!(said.contains(part), "{text}: {said}");
        }
    }

    #[test]
    fn groups_are_kept_to_their_shares() {
        assert_eq!(enforcement(&settings("")).unwrap(), Enforcement::default());
        let none = Enforcement { pods: false, system: None, kube: None };
        assert_eq!(enforcement(&settings("enforceNodeAllocatable: [none]\n")).unwrap(), none);
        let all = "enforceNodeAllocatable: [pods, system-reserved, kube-reserved-compressible]\n\
                   systemReservedCgroup: /system\nkubeReservedCgroup: /kube\nsystemReserved: {memory: '5', pid: '2'}\n";
        let read = enforcement(&settings(all)).unwrap();
        let system = read.system.unwrap();
        assert_eq!((system.name.as_str(), system.compressible_only), ("/system", false));
        assert_eq!(system.limits, GroupLimits { memory: Some(5), cpu_milli: None, pids: Some(2) });
        assert!(read.pods && read.kube.unwrap().compressible_only);
        for (text, part) in [
            ("enforceNodeAllocatable: [system-reserved]\n", "systemReservedCgroup must be specified"),
            ("enforceNodeAllocatable: [none, pods]\n", "stands alone"),
            ("enforceNodeAllocatable: [pods, pods]\n", "twice"),
            ("enforceNodeAllocatable: [all]\n", "is none of"),
            (
                "enforceNodeAllocatable: [kube-reserved, kube-reserved-compressible]\nkubeReservedCgroup: /k\n",
                "specified together",
            ),
            ("reservedSystemCPUs: '0'\nkubeReservedCgroup: /k\n", "cannot be used with"),
        ] {
            let said = enforcement(&settings(text)).unwrap_err().to_string();
            assert!(said.contains(part), "{text}: {said}");
        }
    }
}
