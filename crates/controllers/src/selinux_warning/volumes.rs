//! Remembers which pod uses which volume with which label, and finds conflicts.

use std::collections::{BTreeMap, BTreeSet};

use ferrite_client::ObjectKey;

/// The way in which a volume gets its label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Policy {
    Recursive,
    MountOption,
}

impl Policy {
    fn as_str(self) -> &'static str {
        match self {
            Self::Recursive => "Recursive",
            Self::MountOption => "MountOption",
        }
    }
}

/// A property that two pods have differently although they share a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Property {
    Label,
    ChangePolicy,
}

impl Property {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Label => "SELinuxLabel",
            Self::ChangePolicy => "SELinuxChangePolicy",
        }
    }

    /// The reason of the event.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Label => "SELinuxLabelConflict",
            Self::ChangePolicy => "SELinuxChangePolicyConflict",
        }
    }
}

/// A conflict to report for `pod`. There is another for the other pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Conflict {
    pub(super) property: Property,
    pub(super) pod: ObjectKey,
    pub(super) value: String,
    pub(super) other: ObjectKey,
    pub(super) other_value: String,
}

impl Conflict {
    /// A pod of another namespace is not named: its owner may be nobody's business.
    pub(super) fn message(&self) -> String {
        let Self { pod, value, other, other_value, .. } = self;
        let property = self.property.as_str();
        let end = "If both pods land on the same node, only one of them may access the volume.";
        if pod.namespace == other.namespace {
            let name = &other.name;
            return format!(
                "{property} \"{value}\" conflicts with pod {name} that uses the same volume as this pod with {property} \"{other_value}\". {end}"
            );
        }
        // The missing space is upstream's.
        format!(
            "{property}\"{value}\" conflicts with another pod that uses the same volume as this pod with a different {property}. {end}"
        )
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Use {
    label: String,
    policy: Policy,
}

#[derive(Debug, Default)]
struct Users {
    driver: Option<String>,
    pods: BTreeMap<ObjectKey, Use>,
    /// In both directions.
    conflicts: BTreeSet<Conflict>,
}

/// All volumes of all pods that have not ended.
#[derive(Debug, Default)]
pub(super) struct Volumes {
    volumes: BTreeMap<String, Users>,
    of_pods: BTreeMap<ObjectKey, BTreeSet<String>>,
}

/// The conflicts that came and went with a change.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub(super) new: Vec<Conflict>,
    pub(super) gone: Vec<Conflict>,
}

impl Volumes {
    /// Notes that a pod has a volume with this label.
    pub(super) fn add(
        &mut self,
        volume: &str,
        driver: Option<&str>,
        pod: &ObjectKey,
        label: &str,
        policy: Policy,
    ) -> Changes {
        let users = self.volumes.entry(volume.to_owned()).or_default();
        users.driver = driver.map(str::to_owned);
        let used = Use { label: label.to_owned(), policy };
        if users.pods.get(pod) == Some(&used) {
            // All its conflicts were reported when it entered this state.
            return Changes::default();
        }
        users.pods.insert(pod.clone(), used.clone());
        self.of_pods.entry(pod.clone()).or_default().insert(volume.to_owned());
        let mut changes = Changes { gone: users.forget(pod), new: Vec::new() };
        for (other, theirs) in users.pods.iter().filter(|(other, _)| *other != pod) {
            if theirs.policy != policy {
                let (ours, theirs) = (policy.as_str(), theirs.policy.as_str());
                changes.new.extend(both(Property::ChangePolicy, (pod, ours), (other, theirs)));
            }
            if differ(&used.label, &theirs.label) {
                changes.new.extend(both(Property::Label, (pod, label), (other, &theirs.label)));
            }
        }
        users.conflicts.extend(changes.new.iter().cloned());
        changes
    }

    /// Forgets a pod that has ended.
    pub(super) fn remove(&mut self, pod: &ObjectKey) -> Changes {
        let mut changes = Changes::default();
        for volume in self.of_pods.remove(pod).unwrap_or_default() {
            let Some(users) = self.volumes.get_mut(&volume) else { continue };
            changes.gone.extend(users.forget(pod));
            users.pods.remove(pod);
            if users.pods.is_empty() {
                self.volumes.remove(&volume);
            }
        }
        changes
    }

    /// The pods that have volumes of a CSI driver.
    pub(super) fn users_of(&self, driver: &str) -> BTreeSet<ObjectKey> {
        let volumes = self.volumes.values().filter(|users| users.driver.as_deref() == Some(driver));
        volumes.flat_map(|users| users.pods.keys().cloned()).collect()
    }
}

impl Users {
    /// Takes out the conflicts of a pod.
    fn forget(&mut self, pod: &ObjectKey) -> Vec<Conflict> {
        let is_its = |conflict: &Conflict| conflict.pod == *pod || conflict.other == *pod;
        let (gone, kept) = std::mem::take(&mut self.conflicts).into_iter().partition(is_its);
        self.conflicts = kept;
        let gone: BTreeSet<Conflict> = gone;
        gone.into_iter().collect()
    }
}

fn both(property: Property, one: (&ObjectKey, &str), other: (&ObjectKey, &str)) -> [Conflict; 2] {
    let conflict = |(pod, value): (&ObjectKey, &str), (other, other_value): (&ObjectKey, &str)| Conflict {
        property,
        pod: pod.clone(),
        value: value.to_owned(),
        other: other.clone(),
        other_value: other_value.to_owned(),
    };
    [conflict(one, other), conflict(other, one)]
}

/// True if two labels cannot be those of one volume. A node fills in a user, role or type that is left out, and never a
/// level.
fn differ(one: &str, other: &str) -> bool {
    let parts = |label: &str| -> [String; 4] {
        let mut parts = label.splitn(4, ':').map(str::to_owned);
        std::array::from_fn(|_| parts.next().unwrap_or_default())
    };
    let (one, other) = (parts(one), parts(other));
    let named = one.iter().zip(&other).take(3).any(|(a, b)| a != b && !a.is_empty() && !b.is_empty());
    named || one[3] != other[3]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_differ_where_nobody_fills_them_in() {
        for (one, other, expected) in [
            ("", "", false),
            ("u:r:t:s0:c1,c2", ":::s0:c1,c2", false),
            ("u:r:t:s0:c1,c2", ":::s0:c98,c99", true),
            (":::s0:c1", "", true),
            ("u:r:t:s0", "v:r:t:s0", true),
            ("u::t:s0", ":r:t:s0", false),
        ] {
            assert_eq!(differ(one, other), expected, "{one} and {other}");
            assert_eq!(differ(other, one), expected, "{other} and {one}");
        }
    }

    #[test]
    fn conflicts_come_and_go_with_pods() {
        let mut volumes = Volumes::default();
        let (a, b, c) = (ObjectKey::new("x", "a"), ObjectKey::new("x", "b"), ObjectKey::new("y", "c"));
        let add = |volumes: &mut Volumes, pod: &ObjectKey, label: &str| {
            let policy = if label.is_empty() { Policy::Recursive } else { Policy::MountOption };
            volumes.add("v", Some("d"), pod, label, policy)
        };
        assert_eq!(add(&mut volumes, &a, ":::s0:c1"), Changes::default());
        assert_eq!(add(&mut volumes, &b, ":::s0:c1"), Changes::default(), "the same label");
        let changes = add(&mut volumes, &c, ":::s0:c2");
        assert_eq!(changes.new.len(), 4, "with two pods, told to both sides");
        let told = changes.new.iter().find(|conflict| conflict.pod == a).unwrap().message();
        assert!(
            told.starts_with("SELinuxLabel\":::s0:c1\" conflicts with another pod") && !told.contains(" c "),
            "{told}"
        );
        assert_eq!(add(&mut volumes, &c, ":::s0:c2"), Changes::default(), "told already");
        let changes = add(&mut volumes, &b, "");
        let reasons: BTreeSet<&str> = changes.new.iter().map(|conflict| conflict.property.reason()).collect();
        assert_eq!(
            reasons.into_iter().collect::<Vec<_>>(),
            ["SELinuxChangePolicyConflict", "SELinuxLabelConflict"]
        );
        let told =
            changes.new.iter().find(|conflict| conflict.pod == a && conflict.property == Property::Label);
        assert_eq!(
            told.unwrap().message(),
            "SELinuxLabel \":::s0:c1\" conflicts with pod b that uses the same volume as this pod with SELinuxLabel \"\". \
             If both pods land on the same node, only one of them may access the volume."
        );
        assert_eq!(volumes.users_of("d").len(), 3);
        assert!(!volumes.remove(&c).gone.is_empty());
        volumes.remove(&a);
        volumes.remove(&b);
        assert!(volumes.volumes.is_empty() && volumes.of_pods.is_empty());
    }
}
