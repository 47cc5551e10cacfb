//! Feature gates: one table with the stages and defaults of Kubernetes v1.36.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::metrics::{Family, Gauge, registry};
use crate::nearest;

/// The maturity of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Alpha,
    Beta,
    Stable,
    Deprecated,
}

impl Stage {
    /// Upstream's name, as in the metric `kubernetes_feature_enabled`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Alpha => "ALPHA",
            Self::Beta => "BETA",
            Self::Stable => "",
            Self::Deprecated => "DEPRECATED",
        }
    }
}

/// A gate of v1.36.
#[derive(Debug, Clone, Copy)]
pub struct Gate {
    pub name: &'static str,
    pub stage: Stage,
    /// On unless set otherwise.
    pub default: bool,
}

/// Every gate, by name.
static GATES: LazyLock<BTreeMap<&'static str, Gate>> = LazyLock::new(|| {
    let rows = include_str!("gates.tsv").lines().skip(1);
    rows.filter_map(|row| {
        let mut columns = row.split('\t');
        let name = columns.next()?;
        let stage = match columns.next()? {
            "ALPHA" => Stage::Alpha,
            "BETA" => Stage::Beta,
            "DEPRECATED" => Stage::Deprecated,
            _ => Stage::Stable,
        };
        Some((name, Gate { name, stage, default: columns.next()? == "on" }))
    })
    .collect()
});

/// Gates that are read by our code, so that setting them changes something.
const READ: &[&str] = &[
    "CPUManagerPolicyAlphaOptions",
    "CPUManagerPolicyBetaOptions",
    "ClusterTrustBundle",
    "ClusterTrustBundleProjection",
    "PodCertificateRequest",
    "StorageVersionMigrator",
];

/// Gates that can be set, with the gate that each needs.
const NEEDS: &[(&str, &str)] = &[("ClusterTrustBundleProjection", "ClusterTrustBundle")];

/// An invalid setting of gates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    #[error("unrecognized feature gate: {name}{}", did_you_mean(name))]
    Unknown { name: String },
    #[error("invalid value of feature gate {text:?}: use NAME=true or NAME=false")]
    Form { text: String },
    #[error("cannot set feature gate {name} to {value}, feature is locked to {}", !value)]
    Locked { name: String, value: bool },
    /// Upstream would take it. We say so instead of doing nothing.
    #[error("feature gate {name} cannot be set to {value}: Ferrite has this feature as v1.36 has it by default ({})", !value)]
    NotSwitchable { name: String, value: bool },
    #[error(
        "{name} cannot be {value}: Ferrite can set only some of these feature gates, so name them one by one"
    )]
    Group { name: &'static str, value: bool },
    #[error("{name} is enabled, but depends on features that are disabled: [{needs}]")]
    Dependency { name: &'static str, needs: &'static str },
}

fn did_you_mean(name: &str) -> String {
    nearest(name, GATES.keys().copied()).map(|known| format!(" (did you mean {known}?)")).unwrap_or_default()
}

/// The gates as a component was started with them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FeatureGates {
    set: BTreeMap<&'static str, bool>,
}

impl FeatureGates {
    /// Reads pairs of names and values, as `--feature-gates` and configuration files have them. `AllAlpha` and
    /// `AllBeta` stand for all gates of that stage that nobody set by name.
    pub fn new<'a>(pairs: impl IntoIterator<Item = (&'a str, bool)>) -> Result<Self, GateError> {
        let mut gates = Self::default();
        let (mut named, mut all) = (Vec::new(), Vec::new());
        for (name, value) in pairs {
            match name {
                "AllAlpha" => all.push((Stage::Alpha, value)),
                "AllBeta" => all.push((Stage::Beta, value)),
                _ => named.push((name, value)),
            }
        }
        for (stage, value) in all {
            for gate in GATES.values().filter(|gate| gate.stage == stage) {
                // A gate that somebody names has its own setting.
                if named.iter().any(|(name, _)| *name == gate.name) {
                    continue;
                }
                if value != gate.default && !READ.contains(&gate.name) {
                    let name = if stage == Stage::Alpha { "AllAlpha" } else { "AllBeta" };
                    return Err(GateError::Group { name, value });
                }
                gates.set.insert(gate.name, value);
            }
        }
        for (name, value) in named {
            let gate = GATES.get(name).ok_or_else(|| GateError::Unknown { name: name.to_owned() })?;
            if value != gate.default {
                let name = name.to_owned();
                if gate.stage == Stage::Stable {
                    return Err(GateError::Locked { name, value });
                }
                if !READ.contains(&gate.name) {
                    return Err(GateError::NotSwitchable { name, value });
                }
            }
            gates.set.insert(gate.name, value);
        }
        match NEEDS.iter().find(|(name, needs)| gates.enabled(name) && !gates.enabled(needs)) {
            Some((name, needs)) => Err(GateError::Dependency { name, needs }),
            None => Ok(gates),
        }
    }

    /// Reads `A=true,B=false`. A gate may have the name of its component before it: `kube:A=true`.
    pub fn parse(text: &str) -> Result<Self, GateError> {
        let mut pairs = Vec::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let form = || GateError::Form { text: pair.chars().take(128).collect() };
            let (name, value) = pair.split_once('=').ok_or_else(form)?;
            let name = name.trim();
            let name = name.strip_prefix("kube:").unwrap_or(name);
            let value = match value.trim() {
                "true" | "True" | "TRUE" | "t" | "T" | "1" => true,
                "false" | "False" | "FALSE" | "f" | "F" | "0" => false,
                _ => return Err(form()),
            };
            pairs.push((name, value));
        }
        Self::new(pairs)
    }

    /// True if the feature is on. A name that is no gate is off.
    pub fn enabled(&self, name: &str) -> bool {
        self.set.get(name).copied().unwrap_or_else(|| GATES.get(name).is_some_and(|gate| gate.default))
    }

    /// Reports the state of every gate as upstream's metric `kubernetes_feature_enabled`.
    pub fn report(&self) {
        static FAMILY: LazyLock<Arc<Family<Gauge>>> = LazyLock::new(|| {
            let help = "Whether a feature is enabled.";
            registry().gauge("kubernetes_feature_enabled", help, &["name", "stage"])
        });
        for (gate, enabled) in self.all() {
            FAMILY.with(&[gate.name, gate.stage.as_str()]).set(i64::from(enabled));
        }
    }

    /// The gates that were set, by name.
    pub fn given(&self) -> &BTreeMap<&'static str, bool> {
        &self.set
    }

    /// Every gate with its state, by name.
    pub fn all(&self) -> impl Iterator<Item = (&'static Gate, bool)> + '_ {
        GATES.values().map(|gate| (gate, self.enabled(gate.name)))
    }
}

/// The gates that were set, as `--feature-gates` reads them.
impl std::fmt::Display for FeatureGates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pairs: Vec<String> = self.set.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&pairs.join(","))
    }
}

impl std::str::FromStr for FeatureGates {
    type Err = GateError;

    fn from_str(text: &str) -> Result<Self, GateError> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_the_table() {
        let gates = FeatureGates::default();
        assert!(GATES.len() > 200);
        for (gate, enabled) in gates.all() {
            assert_eq!(enabled, gate.default, "{}", gate.name);
        }
        assert!(gates.enabled("APIServerIdentity"));
        assert!(!gates.enabled("APIServingWithRoutine"));
        assert!(!gates.enabled("NoSuchGate"));
    }

    #[test]
    fn gates_are_written_as_they_are_read() {
        let text = "ClusterTrustBundle=true,PodCertificateRequest=false";
        assert_eq!(FeatureGates::parse(text).unwrap().to_string(), text);
        let of_component = "kube:ClusterTrustBundle=true,PodCertificateRequest=false";
        assert_eq!(FeatureGates::parse(of_component).unwrap().to_string(), text);
        assert_eq!(FeatureGates::default().to_string(), "");
    }

    #[test]
    fn a_setting_is_taken_or_refused_with_the_reason() {
        for (text, error) in [
            ("", None),
            ("APIServerIdentity=true", None),
            (" APIServingWithRoutine = false ,", None),
            ("AllAlpha=false", None),
            (
                "AllAlpha=true",
                Some(
                    "AllAlpha cannot be true: Ferrite can set only some of these feature gates, so name them one by one",
                ),
            ),
            (
                "AllBeta=false",
                Some(
                    "AllBeta cannot be false: Ferrite can set only some of these feature gates, so name them one by one",
                ),
            ),
            ("ClusterTrustBundle=true,ClusterTrustBundleProjection=true,PodCertificateRequest=true", None),
            (
                "ClusterTrustBundleProjection=true",
                Some(
                    "ClusterTrustBundleProjection is enabled, but depends on features that are disabled: [ClusterTrustBundle]",
                ),
            ),
            (
                "APIServerIdentty=true",
                Some("unrecognized feature gate: APIServerIdentty (did you mean APIServerIdentity?)"),
            ),
            (
                "APIServerIdentity",
                Some("invalid value of feature gate \"APIServerIdentity\": use NAME=true or NAME=false"),
            ),
            (
                "APIServerIdentity=yes",
                Some("invalid value of feature gate \"APIServerIdentity=yes\": use NAME=true or NAME=false"),
            ),
            (
                "APIServerTracing=false",
                Some("cannot set feature gate APIServerTracing to false, feature is locked to true"),
            ),
            (
                "APIServingWithRoutine=true",
                Some(
                    "feature gate APIServingWithRoutine cannot be set to true: Ferrite has this feature as v1.36 has it by default (false)",
                ),
            ),
        ] {
            let message = FeatureGates::parse(text).err().map(|error| error.to_string());
            assert_eq!(message.as_deref(), error, "{text}");
        }
    }
}
