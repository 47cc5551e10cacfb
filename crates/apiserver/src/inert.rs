//! Kinds that are stored although nothing acts on them yet. A client that writes one gets a warning, if the
//! server is part of a cluster that is meant to be whole (`ferrite up`, `ferrite server`).
//!
//! A bare `ferrite kube-apiserver` warns of none: upstream's controllers and nodes may complete it, and its answers are
//! compared with upstream's, in which no write of these kinds carries a warning.
//!
//! To make a kind work is to remove its row here, and its name from README.md and docs/differences.md.

use ferrite_api::resource::Resource;
use ferrite_component::FeatureGates;

/// A kind on which nothing acts.
struct Inert {
    group: &'static str,
    plural: &'static str,
    kind: &'static str,
    /// The missing behaviour.
    missing: &'static str,
    /// The feature gate with which something acts on it.
    gate: Option<&'static str>,
}

const fn row(group: &'static str, plural: &'static str, kind: &'static str, missing: &'static str) -> Inert {
    Inert { group, plural, kind, missing, gate: None }
}

impl Inert {
    const fn without(self, gate: &'static str) -> Self {
        Self { gate: Some(gate), ..self }
    }
}

const NETWORKING: &str = "networking.k8s.io";
const STORAGE: &str = "storage.k8s.io";
const NO_VOLUME: &str = "volumes are not changed by it";
const NO_MIGRATION: &str =
    "nothing is migrated unless the cluster is started with --feature-gates=StorageVersionMigrator=true";
const NO_ROUTE: &str = "no traffic is routed unless the cluster is started with --enable ingress";

#[rustfmt::skip]
const INERT: &[Inert] = &[
    row(NETWORKING, "ingressclasses", "IngressClass", NO_ROUTE),
    row(NETWORKING, "ingresses", "Ingress", NO_ROUTE),
    row(STORAGE, "volumeattributesclasses", "VolumeAttributesClass", NO_VOLUME),
    row("storagemigration.k8s.io", "storageversionmigrations", "StorageVersionMigration", NO_MIGRATION).without("StorageVersionMigrator"),
];

/// The warning for a write of an object on which nothing acts.
pub(crate) fn warning(resource: &Resource, gates: &FeatureGates) -> Option<String> {
    let row = INERT.iter().find(|row| row.group == resource.group && row.plural == resource.plural)?;
    if row.gate.is_some_and(|gate| gates.enabled(gate)) {
        return None;
    }
    Some(format!("{} is stored, but nothing acts on it yet: {}", row.kind, row.missing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_of_resources_that_exist() {
        let served = ferrite_api::kinds::built_in();
        for row in INERT {
            let found = served.iter().find(|r| r.group == row.group && r.plural == row.plural);
            assert_eq!(found.map(|r| r.kind.as_ref()), Some(row.kind), "{}", row.plural);
        }
    }

    #[test]
    fn the_documents_name_the_same_kinds() {
        for (name, text) in [
            ("README.md", include_str!("../../../README.md")),
            ("docs/differences.md", include_str!("../../../docs/differences.md")),
        ] {
            for row in INERT {
                assert!(text.contains(&format!("`{}`", row.kind)), "{name} does not name {}", row.kind);
            }
        }
    }

    #[test]
    fn kinds_that_work_are_not_warned_of() {
        let served = ferrite_api::kinds::built_in();
        for plural in ["pods", "customresourcedefinitions", "validatingwebhookconfigurations"] {
            let resource = served.iter().find(|r| r.plural == plural).unwrap();
            assert_eq!(warning(resource, &FeatureGates::default()), None, "{plural}");
        }
    }

    #[test]
    fn a_gate_makes_a_kind_work() {
        let served = ferrite_api::kinds::built_in();
        let resource = served.iter().find(|r| r.plural == "storageversionmigrations").unwrap();
        assert!(warning(resource, &FeatureGates::default()).is_some());
        let on = FeatureGates::parse("StorageVersionMigrator=true").unwrap();
        assert_eq!(warning(resource, &on), None);
    }
}
