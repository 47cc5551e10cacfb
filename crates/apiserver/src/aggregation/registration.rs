//! APIServices for the groups that this server serves itself, built-in and custom.

use super::mounted::MountedGroup;
use super::services::{self, CUSTOM, Priority};
use crate::registry::ResourceMap;
use ferrite_api::meta;
use ferrite_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The label of APIServices that the server keeps by itself.
const MANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";
/// This group's APIService would be about itself, so there is none.
const OWN_GROUP: &str = "apiregistration.k8s.io";
/// The rank that servers of such groups usually ask for.
const MOUNTED: Priority = Priority { group: 100, version: 100 };

/// The time for which the server maintains an APIService.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Upkeep {
    /// Once, when the server starts. The administrator may change it afterwards.
    OnStart,
    Always,
}

impl Upkeep {
    fn label(self) -> &'static str {
        match self {
            Self::OnStart => "onstart",
            Self::Always => "true",
        }
    }

    fn of(object: &Value) -> Option<Self> {
        match meta::labels(object).and_then(|labels| labels.get(MANAGED)?.as_str()) {
            Some("onstart") => Some(Self::OnStart),
            Some("true") => Some(Self::Always),
            _ => None,
        }
    }
}

/// An APIService that there should be.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Desired {
    pub upkeep: Upkeep,
    pub spec: Value,
    /// One that names a Service is the administrator's, also at the next start.
    pub yields: bool,
}

impl Desired {
    fn new(group: &str, version: &str, priority: Priority, upkeep: Upkeep) -> Self {
        let mut spec = json!({
            "version": version,
            "groupPriorityMinimum": priority.group,
            "versionPriority": priority.version,
        });
        if !group.is_empty() {
            spec["group"] = group.into();
        }
        Self { upkeep, spec, yields: false }
    }

    pub fn object(&self, name: &str) -> Value {
        json!({
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": name, "labels": {MANAGED: self.upkeep.label()}},
            "spec": self.spec,
        })
    }
}

/// The APIServices of the resources served now, by name.
pub(super) fn desired(table: &ResourceMap, mounted: &[Arc<dyn MountedGroup>]) -> BTreeMap<String, Desired> {
    let mut all = BTreeMap::new();
    for group in mounted {
        let desired = Desired::new(group.group(), group.version(), MOUNTED, Upkeep::OnStart);
        let name = services::name_of(group.group(), group.version());
        all.insert(name, Desired { yields: true, ..desired });
    }
    for row in table.rows().iter().filter(|row| row.group != OWN_GROUP) {
        let (group, version) = (&*row.group, &*row.version);
        let name = services::name_of(group, version);
        let desired = match services::built_in_priority(group, version) {
            _ if row.custom.is_some() => Desired::new(group, version, CUSTOM, Upkeep::Always),
            Some(priority) => Desired::new(group, version, priority, Upkeep::OnStart),
            // As upstream: without a rank there is no APIService.
            None => continue,
        };
        // A built-in resource decides for its group version, whatever definitions add to it.
        match desired.upkeep {
            Upkeep::OnStart => drop(all.insert(name, desired)),
            Upkeep::Always => drop(all.entry(name).or_insert(desired)),
        }
    }
    all
}

/// The write that brings one APIService to its desired state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Keep,
    Create,
    /// Replace the specification.
    Update,
    Delete,
}

/// Upstream's table. `synced`: this server has made the object once before. `at_start`: the stored object
/// was there when the server started.
pub(super) fn decide(
    stored: Option<&Value>,
    desired: Option<&Desired>,
    synced: bool,
    at_start: bool,
) -> Action {
    let once = desired.is_some_and(|desired| desired.upkeep == Upkeep::OnStart) && synced;
    let Some(stored) = stored else {
        return if desired.is_some() && !once { Action::Create } else { Action::Keep };
    };
    match Upkeep::of(stored) {
        _ if once => Action::Keep,
        // Somebody else's.
        None => Action::Keep,
        _ if desired.is_some_and(|desired| desired.yields) && stored["spec"]["service"].is_object() => {
            Action::Keep
        }
        Some(Upkeep::OnStart) if !at_start || synced => Action::Keep,
        Some(_) => match desired {
            None => Action::Delete,
            Some(desired) if stored["spec"] == desired.spec => Action::Keep,
            Some(_) => Action::Update,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apiservices_are_kept_as_upstream_keeps_them() {
        let desired = |upkeep| Desired::new("a.example", "v1", CUSTOM, upkeep);
        let (once, always) = (desired(Upkeep::OnStart), desired(Upkeep::Always));
        let stored = |label: &str, spec: &Value| json!({"metadata": {"name": "v1.a.example", "labels": {MANAGED: label}}, "spec": spec});
        let other = json!({"group": "a.example", "version": "v1", "groupPriorityMinimum": 5});
        let (foreign, on_start, kept) =
            (stored("no", &other), stored("onstart", &other), stored("true", &other));
        let good = stored("true", &always.spec);
        let yielding = Desired { yields: true, ..desired(Upkeep::OnStart) };
        let replaced = json!({"group": "a.example", "version": "v1", "service": {"name": "s"}});
        let replaced = stored("onstart", &replaced);
        // Stored; desired; synced before; there at the start; action.
        type Row<'a> = (Option<&'a Value>, Option<&'a Desired>, bool, bool, Action);
        let rows: &[Row<'_>] = &[
            (None, None, false, false, Action::Keep),
            (None, Some(&once), false, false, Action::Create),
            (None, Some(&once), true, false, Action::Keep),
            (None, Some(&always), true, false, Action::Create),
            (Some(&foreign), Some(&always), false, true, Action::Keep),
            (Some(&foreign), None, false, true, Action::Keep),
            (Some(&on_start), Some(&once), false, false, Action::Keep),
            (Some(&on_start), Some(&once), false, true, Action::Update),
            (Some(&on_start), Some(&once), true, true, Action::Keep),
            (Some(&on_start), None, false, true, Action::Delete),
            (Some(&on_start), None, true, true, Action::Keep),
            (Some(&on_start), Some(&yielding), false, true, Action::Update),
            (Some(&replaced), Some(&yielding), false, true, Action::Keep),
            (Some(&replaced), Some(&once), false, true, Action::Update),
            (Some(&kept), None, true, false, Action::Delete),
            (Some(&kept), Some(&always), true, false, Action::Update),
            (Some(&good), Some(&always), true, false, Action::Keep),
        ];
        for (index, (stored, desired, synced, at_start, action)) in rows.iter().enumerate() {
            assert_eq!(decide(*stored, *desired, *synced, *at_start), *action, "row {index}");
        }
    }

    #[test]
    fn every_group_but_their_own_has_one() {
        let all = desired(&ResourceMap::new(ferrite_api::kinds::built_in()), &[]);
        assert!(all.contains_key("v1."), "the core group");
        assert!(all.contains_key("v2.autoscaling"));
        assert!(!all.keys().any(|name| name.ends_with(OWN_GROUP)));
        assert_eq!(all["v1.apps"].spec["groupPriorityMinimum"], 17800);
    }
}
