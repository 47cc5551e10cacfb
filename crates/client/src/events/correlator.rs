//! Decides whether an event is new, a repetition, one of a crowd, or too much.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::time::Duration;

use ferrite_component::{Rate, TokenBucket};
use k8s_openapi::api::core::v1::ObjectReference;

use super::Occurrence;

/// Keys remembered per table; the ones unused for longest go first.
const REMEMBERED: usize = 4096;
/// Distinct messages of one reason about one object before they are combined.
const SIMILAR: usize = 10;
/// Similar messages further apart than this are not combined.
const SIMILAR_SECONDS: i64 = 600;
/// Events one source may emit about one object at once, and how fast that right returns.
const SPAM: Rate = Rate { per_second: 1.0 / 300.0, burst: 25.0 };

/// The fields that events about the same thing have in common, apart from their message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct GroupKey {
    component: String,
    host: String,
    kind: &'static str,
    reason: String,
    object: String,
}

/// Same group and same message: the same event.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct EventKey {
    group: GroupKey,
    message: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Drop,
    Create { key: EventKey, message: String },
    Repeat { key: EventKey, name: String, count: i32, message: String },
}

#[derive(Default)]
struct Group {
    messages: HashSet<String>,
    last: i64,
}

struct Seen {
    name: String,
    count: i32,
}

/// Memory of recent events, with client-go's rules and limits.
#[derive(Default)]
pub(super) struct Correlator {
    groups: Remembered<GroupKey, Group>,
    events: Remembered<EventKey, Seen>,
    buckets: Remembered<(String, String, String), TokenBucket<Duration>>,
}

impl Correlator {
    pub(super) fn correlate(&mut self, occurrence: &Occurrence) -> Verdict {
        let object = describe(&occurrence.regarding);
        if !self.admit(occurrence, &object) {
            return Verdict::Drop;
        }
        let group = GroupKey {
            component: occurrence.component.clone(),
            host: occurrence.host.clone(),
            kind: occurrence.kind.as_str(),
            reason: occurrence.reason.clone(),
            object,
        };
        let second = occurrence.at.as_second();
        let similar = self.groups.entry(&group, Group::default);
        if second - similar.last > SIMILAR_SECONDS {
            similar.messages.clear();
        }
        similar.last = second;
        if similar.messages.len() < SIMILAR {
            similar.messages.insert(occurrence.message.clone());
        }
        let crowd = similar.messages.len() >= SIMILAR;
        let (key, message) = if crowd {
            let message = format!("(combined from similar events): {}", occurrence.message);
            (EventKey { group, message: String::new() }, message)
        } else {
            (EventKey { group, message: occurrence.message.clone() }, occurrence.message.clone())
        };
        match self.events.get_mut(&key) {
            Some(seen) => {
                seen.count = seen.count.saturating_add(1);
                Verdict::Repeat { name: seen.name.clone(), count: seen.count, key, message }
            }
            None => Verdict::Create { key, message },
        }
    }

    /// Remembers under which name an event was written, so that its repetitions count there.
    pub(super) fn created(&mut self, key: EventKey, name: String) {
        self.events.entry(&key, || Seen { name: String::new(), count: 1 }).name = name;
    }

    fn admit(&mut self, occurrence: &Occurrence, object: &str) -> bool {
        let key = (occurrence.component.clone(), occurrence.host.clone(), object.to_owned());
        let at = occurrence.at.duration_since(jiff::Timestamp::UNIX_EPOCH).unsigned_abs();
        self.buckets.entry(&key, || TokenBucket::full(SPAM, at)).take(SPAM, at)
    }
}

fn describe(reference: &ObjectReference) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    [
        part(&reference.kind),
        part(&reference.namespace),
        part(&reference.name),
        part(&reference.field_path),
        part(&reference.uid),
        part(&reference.api_version),
    ]
    .join("\u{0}")
}

/// A table that holds at most [`REMEMBERED`] entries. When it is full the older half goes at once, which costs
/// less than keeping an order on every use.
struct Remembered<Q, V> {
    entries: HashMap<Q, (u64, V)>,
    clock: u64,
}

impl<Q, V> Default for Remembered<Q, V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), clock: 0 }
    }
}

impl<Q: Clone + Eq + Hash, V> Remembered<Q, V> {
    fn get_mut(&mut self, key: &Q) -> Option<&mut V> {
        self.clock += 1;
        let (used, value) = self.entries.get_mut(key)?;
        *used = self.clock;
        Some(value)
    }

    fn entry(&mut self, key: &Q, make: impl FnOnce() -> V) -> &mut V {
        self.clock += 1;
        if self.entries.len() >= REMEMBERED && !self.entries.contains_key(key) {
            let mut used: Vec<u64> = self.entries.values().map(|(used, _)| *used).collect();
            used.sort_unstable();
            let oldest_kept = used[used.len() / 2];
            self.entries.retain(|_, (used, _)| *used >= oldest_kept);
        }
        let clock = self.clock;
        let (used, value) = self.entries.entry(key.clone()).or_insert_with(|| (clock, make()));
        *used = clock;
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventType;

    fn occurrence(object: &str, message: &str, second: i64) -> Occurrence {
        Occurrence {
            component: "kubelet".into(),
            host: "n1".into(),
            regarding: ObjectReference { name: Some(object.into()), ..ObjectReference::default() },
            kind: EventType::Warning,
            reason: "BackOff".into(),
            message: message.into(),
            at: jiff::Timestamp::from_second(second).unwrap(),
        }
    }

    fn feed(correlator: &mut Correlator, object: &str, message: &str, second: i64) -> Verdict {
        let verdict = correlator.correlate(&occurrence(object, message, second));
        if let Verdict::Create { key, .. } = &verdict {
            correlator.created(key.clone(), format!("{object}.{second}"));
        }
        verdict
    }

    #[test]
    fn the_same_event_counts_up() {
        let mut correlator = Correlator::default();
        assert!(matches!(feed(&mut correlator, "a", "m", 0), Verdict::Create { .. }));
        for count in 2..5 {
            match feed(&mut correlator, "a", "m", i64::from(count)) {
                Verdict::Repeat { name, count: counted, .. } => {
                    assert_eq!((name.as_str(), counted), ("a.0", count))
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(feed(&mut correlator, "b", "m", 9), Verdict::Create { .. }), "another object");
        assert!(matches!(feed(&mut correlator, "a", "n", 9), Verdict::Create { .. }), "another message");
    }

    #[test]
    fn many_similar_messages_are_combined() {
        let mut correlator = Correlator::default();
        let created = (0..20)
            .filter(|n| matches!(feed(&mut correlator, "a", &format!("m{n}"), *n), Verdict::Create { .. }))
            .count();
        assert_eq!(created, SIMILAR);
        match feed(&mut correlator, "a", "m20", 20) {
            Verdict::Repeat { message, count, .. } => {
                assert_eq!((message.as_str(), count), ("(combined from similar events): m20", 12));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_source_that_spams_about_an_object_is_cut_off_until_time_passes() {
        let mut correlator = Correlator::default();
        let admitted = (0..40).filter(|_| feed(&mut correlator, "a", "m", 0) != Verdict::Drop).count();
        assert_eq!(admitted, 25);
        assert_ne!(feed(&mut correlator, "b", "m", 0), Verdict::Drop);
        assert_ne!(feed(&mut correlator, "a", "m", 301), Verdict::Drop);
        assert_eq!(feed(&mut correlator, "a", "m", 301), Verdict::Drop);
    }

    #[test]
    fn memory_is_bounded() {
        let mut correlator = Correlator::default();
        for n in 0..3 * REMEMBERED {
            feed(&mut correlator, &format!("o{n}"), "m", 0);
        }
        assert!(correlator.events.entries.len() <= REMEMBERED);
        assert!(correlator.groups.entries.len() <= REMEMBERED);
        assert!(correlator.buckets.entries.len() <= REMEMBERED);
    }
}
