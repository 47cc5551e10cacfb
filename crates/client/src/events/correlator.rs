//! Decides whether an event is new, a repetition, one of a crowd, or too much.
//!
//! Thousands of events are remembered for hours. Hashes stand for their texts, so that each takes a few words of one
//! table: small strings that live so long would keep the memory around them from being returned.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::time::Duration;

use ferrite_component::{Rate, TokenBucket};
use jiff::Timestamp;

use super::Occurrence;

/// Keys remembered per table; the ones unused for longest go first.
pub(super) const REMEMBERED: usize = 4096;
/// Distinct messages of one reason about one object before they are combined.
const SIMILAR: usize = 10;
/// Similar messages further apart than this are not combined.
const SIMILAR_SECONDS: i64 = 600;
/// Events one source may emit about one object at once, and how fast that right returns.
const SPAM: Rate = Rate { per_second: 1.0 / 300.0, burst: 25.0 };

/// A hash with secret keys that stands for the value: no two values of a process have the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Digest(pub(super) u64, pub(super) u64);

/// The hash of a group and a message. Same group and same message: the same event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct EventKey(Digest);

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Drop,
    Create {
        key: EventKey,
        message: String,
    },
    Repeat {
        key: EventKey,
        /// The time in the name of the event that counts the repetitions.
        first: Timestamp,
        count: i32,
        message: String,
    },
}

/// Recent events about the same thing.
#[derive(Default)]
struct Group {
    /// Hashes of their distinct messages; zeros follow the last one.
    messages: [u32; SIMILAR],
    last: i64,
}

impl Group {
    /// Notes a message. Returns true if there have been so many that they are combined.
    fn is_crowd_with(&mut self, message: u32) -> bool {
        let free = self.messages.iter_mut().find(|known| **known == 0 || **known == message);
        if let Some(free) = free {
            *free = message;
        }
        self.messages[SIMILAR - 1] != 0
    }
}

struct Seen {
    first: Timestamp,
    count: i32,
}

/// Memory of recent events, with client-go's rules and limits.
#[derive(Default)]
pub(super) struct Correlator {
    keys: [RandomState; 2],
    groups: Remembered<Digest, Group>,
    events: Remembered<EventKey, Seen>,
    buckets: Remembered<Digest, TokenBucket<Duration>>,
}

impl Correlator {
    pub(super) fn correlate(&mut self, occurrence: &Occurrence) -> Verdict {
        let source = self.source(occurrence);
        if !self.admit(occurrence, source) {
            return Verdict::Drop;
        }
        // The fields that events about the same thing have in common, apart from their message.
        let group = self.digest(&(source, occurrence.kind, &occurrence.reason));
        let distinct = self.keys[0].hash_one(&occurrence.message) as u32 | 1;
        let second = occurrence.at.as_second();
        let similar = self.groups.entry(&group, Group::default);
        if second - similar.last > SIMILAR_SECONDS {
            similar.messages = Default::default();
        }
        similar.last = second;
        let (key, message) = if similar.is_crowd_with(distinct) {
            let message = format!("(combined from similar events): {}", occurrence.message);
            (self.digest(&(group, "")), message)
        } else {
            (self.digest(&(group, &occurrence.message)), occurrence.message.clone())
        };
        let key = EventKey(key);
        match self.events.get_mut(&key) {
            Some(seen) => {
                seen.count = seen.count.saturating_add(1);
                Verdict::Repeat { first: seen.first, count: seen.count, key, message }
            }
            None => Verdict::Create { key, message },
        }
    }

    /// Remembers that an event was written, with the time in its name, so that its repetitions count there.
    pub(super) fn created(&mut self, key: EventKey, at: Timestamp) {
        self.events.entry(&key, || Seen { first: at, count: 1 }).first = at;
    }

    fn admit(&mut self, occurrence: &Occurrence, source: Digest) -> bool {
        let at = occurrence.at.duration_since(Timestamp::UNIX_EPOCH).unsigned_abs();
        self.buckets.entry(&source, || TokenBucket::full(SPAM, at)).take(SPAM, at)
    }

    /// One component's events about one object.
    fn source(&self, occurrence: &Occurrence) -> Digest {
        let object = &occurrence.regarding;
        let parts = [
            &object.kind,
            &object.namespace,
            &object.name,
            &object.field_path,
            &object.uid,
            &object.api_version,
        ]
        .map(|part| part.as_deref().unwrap_or_default());
        self.digest(&(&occurrence.component, &occurrence.host, parts))
    }

    fn digest(&self, value: &impl Hash) -> Digest {
        Digest(self.keys[0].hash_one(value), self.keys[1].hash_one(value))
    }
}

/// A table that holds at most [`REMEMBERED`] entries. When it is full the older half goes at once, which costs
/// less than keeping an order on every use.
pub(super) struct Remembered<Q, V> {
    entries: HashMap<Q, (u64, V)>,
    clock: u64,
}

impl<Q, V> Default for Remembered<Q, V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), clock: 0 }
    }
}

impl<Q: Clone + Eq + Hash, V> Remembered<Q, V> {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Forgets the values for which `keep` returns false.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&V) -> bool) {
        self.entries.retain(|_, (_, value)| keep(value));
    }

    pub(super) fn get_mut(&mut self, key: &Q) -> Option<&mut V> {
        self.clock += 1;
        let (used, value) = self.entries.get_mut(key)?;
        *used = self.clock;
        Some(value)
    }

    pub(super) fn entry(&mut self, key: &Q, make: impl FnOnce() -> V) -> &mut V {
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
    use k8s_openapi::api::core::v1::ObjectReference;

    fn occurrence(object: &str, message: &str, second: i64) -> Occurrence {
        Occurrence {
            component: "kubelet".into(),
            host: "n1".into(),
            regarding: ObjectReference { name: Some(object.into()), ..ObjectReference::default() },
            kind: EventType::Warning,
            reason: "BackOff".into(),
            message: message.into(),
            at: Timestamp::from_second(second).unwrap(),
        }
    }

    fn feed(correlator: &mut Correlator, object: &str, message: &str, second: i64) -> Verdict {
        let verdict = correlator.correlate(&occurrence(object, message, second));
        if let Verdict::Create { key, .. } = &verdict {
            correlator.created(*key, Timestamp::from_second(second).unwrap());
        }
        verdict
    }

    #[test]
    fn the_same_event_counts_up() {
        let mut correlator = Correlator::default();
        assert!(matches!(feed(&mut correlator, "a", "m", 0), Verdict::Create { .. }));
        for count in 2..5 {
            match feed(&mut correlator, "a", "m", i64::from(count)) {
                Verdict::Repeat { first, count: counted, .. } => {
                    assert_eq!((first, counted), (Timestamp::UNIX_EPOCH, count));
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
    fn messages_are_combined_for_as_long_as_they_are_close() {
        let mut correlator = Correlator::default();
        for n in 0..SIMILAR as i64 {
            feed(&mut correlator, "a", &format!("m{n}"), n);
        }
        assert!(matches!(feed(&mut correlator, "a", "new", 10), Verdict::Repeat { .. }), "combined");
        let later = 10 + SIMILAR_SECONDS + 1;
        match feed(&mut correlator, "a", "later", later) {
            Verdict::Create { message, .. } => assert_eq!(message, "later"),
            other => panic!("{other:?}"),
        }
        // A message that comes again is not another one.
        for n in 0..SIMILAR as i64 {
            assert!(matches!(feed(&mut correlator, "b", "m", later + n), Verdict::Create { .. }) == (n == 0));
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
