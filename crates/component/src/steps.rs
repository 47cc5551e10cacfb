//! Steps in the lives of objects: a bounded record of who did what to which object, when, and how long it took.
//!
//! Components record a step when it has ended, by the object's UID. The life of a pod is the union of the steps of its
//! owner chain. The ring of the process holds the most recent steps; `/debug/steps?uid=…` shows them, and
//! `ferrite timeline` puts those of several processes in order. Decision 0021 has the reasons.

use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

/// The most steps that a process remembers.
const CAPACITY: usize = 8192;
/// Details are for people: longer ones are cut.
const LONGEST_DETAIL: usize = 256;
/// The most objects that one request may ask for.
const MOST_UIDS: usize = 256;

/// A step as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub uid: String,
    /// Microseconds since 1970 at which the step began.
    pub began: u64,
    /// Microseconds that it took.
    pub took: u64,
    pub component: String,
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// The answer of `/debug/steps`.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steps {
    pub steps: Vec<Step>,
}

/// A step as the ring holds it. UIDs are kept as numbers, and details apart from the entries: thousands of small
/// allocations that live long would keep the memory around them from being returned.
#[derive(Debug)]
struct Entry {
    uid: u128,
    began: u64,
    took: u64,
    component: &'static str,
    name: &'static str,
    /// The bytes of its detail.
    length: usize,
}

/// A bounded record of steps; the oldest go first.
#[derive(Debug)]
struct Ring {
    capacity: usize,
    held: Mutex<Held>,
}

/// Entries and, in the same order and without gaps, their details.
#[derive(Debug)]
struct Held {
    entries: VecDeque<Entry>,
    details: VecDeque<u8>,
}

impl Held {
    fn push(&mut self, entry: Entry, detail: &str) {
        debug_assert_eq!(entry.length, detail.len());
        self.entries.push_back(entry);
        self.details.extend(detail.as_bytes());
    }

    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.entries.pop_front() {
            self.details.drain(..oldest.length);
        }
    }

    /// Entries with the place of their details.
    fn iter(&self) -> impl Iterator<Item = (&Entry, Range<usize>)> {
        self.entries.iter().scan(0, |end, entry| {
            let start = *end;
            *end += entry.length;
            Some((entry, start..*end))
        })
    }

    fn detail(&self, place: Range<usize>) -> String {
        let bytes: Vec<u8> = self.details.range(place).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

static RING: Ring = Ring::new(CAPACITY);

/// A step under way.
#[derive(Debug, Clone, Copy)]
pub struct Timer(Instant);

impl Timer {
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }

    /// Records that the step has ended now. An object without a UID has no record.
    pub fn end(self, component: &'static str, name: &'static str, uid: &str, detail: fmt::Arguments<'_>) {
        RING.record(SystemTime::now(), self.elapsed(), (component, name), uid, detail);
    }
}

/// The steps of the objects with these UIDs that this process remembers, in the order in which they ended.
pub fn of<'a>(uids: impl IntoIterator<Item = &'a str>) -> Steps {
    RING.of(uids)
}

impl Ring {
    const fn new(capacity: usize) -> Self {
        let held = Held { entries: VecDeque::new(), details: VecDeque::new() };
        Self { capacity, held: Mutex::new(held) }
    }

    fn record(
        &self,
        ended: SystemTime,
        took: Duration,
        (component, name): (&'static str, &'static str),
        uid: &str,
        detail: fmt::Arguments<'_>,
    ) {
        if uid.is_empty() {
            return;
        }
        let mut detail = fmt::format(detail);
        if detail.len() > LONGEST_DETAIL {
            let end = (0..=LONGEST_DETAIL).rev().find(|end| detail.is_char_boundary(*end)).unwrap_or(0);
            detail.truncate(end);
        }
        let ended = ended.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let entry = Entry {
            uid: number(uid),
            began: micros(ended.saturating_sub(took)),
            took: micros(took),
            component,
            name,
            length: detail.len(),
        };
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.entries.len() >= self.capacity {
            held.drop_oldest();
        }
        held.push(entry, &detail);
    }

    fn of<'a>(&self, uids: impl IntoIterator<Item = &'a str>) -> Steps {
        let uids: Vec<(u128, &str)> =
            uids.into_iter().take(MOST_UIDS).map(|uid| (number(uid), uid)).collect();
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let steps = held.iter().filter_map(|(entry, place)| {
            let (_, uid) = uids.iter().find(|(number, _)| *number == entry.uid)?;
            Some(Step {
                uid: (*uid).to_owned(),
                began: entry.began,
                took: entry.took,
                component: entry.component.to_owned(),
                name: entry.name.to_owned(),
                detail: held.detail(place),
            })
        });
        Steps { steps: steps.collect() }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The number of a UUID; a hash of a UID that is none, such as those of static pods.
fn number(uid: &str) -> u128 {
    let digits = uid.bytes().filter(|byte| *byte != b'-');
    let parsed = digits
        .clone()
        .try_fold(0u128, |number, byte| Some((number << 4) | u128::from(char::from(byte).to_digit(16)?)));
    match parsed {
        Some(number) if digits.count() == 32 => number,
        _ => u128::from(BuildHasherDefault::<DefaultHasher>::default().hash_one(uid)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "0b57bf5d-8a9c-4f0c-9dd1-5a3d7a3e6a10";
    const B: &str = "0b57bf5d-8a9c-4f0c-9dd1-5a3d7a3e6a11";
    /// The UID of a static pod is the hash of its manifest.
    const STATIC: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

    fn record(ring: &Ring, second: u64, uid: &str, detail: &str) {
        let ended = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
        ring.record(ended, Duration::from_millis(250), ("kubelet", "pull"), uid, format_args!("{detail}"));
    }

    #[test]
    fn steps_are_found_by_uid_and_begin_before_they_end() {
        let ring = Ring::new(8);
        record(&ring, 10, A, "first");
        record(&ring, 11, B, "of another");
        record(&ring, 12, STATIC, "no UUID");
        record(&ring, 13, A, "second");
        record(&ring, 14, "", "of nobody");
        let seen = |uids: &[&str]| {
            let steps = ring.of(uids.iter().copied()).steps;
            steps.into_iter().map(|step| (step.began, step.detail)).collect::<Vec<_>>()
        };
        let row = |began: u64, detail: &str| (began, detail.to_owned());
        assert_eq!(seen(&[A]), [row(9_750_000, "first"), row(12_750_000, "second")]);
        assert_eq!(seen(&[STATIC, B]), [row(10_750_000, "of another"), row(11_750_000, "no UUID")]);
        assert_eq!(seen(&[""]), []);
    }

    #[test]
    fn the_oldest_go_first_and_long_details_are_cut_between_characters() {
        let ring = Ring::new(2);
        for second in 1..=5 {
            record(&ring, second, A, &"ü".repeat(200));
        }
        let steps = ring.of([A]).steps;
        assert_eq!(steps.iter().map(|step| step.began / 1_000_000).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(steps[0].detail, "ü".repeat(128));
    }

    /// The details lie in one buffer, which stays as large as those of the entries that are held.
    #[test]
    fn details_stay_with_their_steps_in_one_buffer() {
        let ring = Ring::new(3);
        for second in 1..=100 {
            record(
                &ring,
                second,
                if second % 2 == 0 { A } else { B },
                &format!("{second}").repeat(second as usize % 7),
            );
        }
        let details = |uid| ring.of([uid]).steps.into_iter().map(|step| step.detail).collect::<Vec<_>>();
        assert_eq!((details(A), details(B)), (vec![String::new(), "100100".into()], vec!["99".into()]));
        let held = ring.held.lock().unwrap();
        assert_eq!(held.details.len(), held.entries.iter().map(|entry| entry.length).sum::<usize>());
        assert!(held.details.capacity() < 256, "{}", held.details.capacity());
    }

    #[test]
    fn steps_keep_their_form_on_the_way() {
        let ring = Ring::new(2);
        record(&ring, 1, A, "");
        let text = serde_json::to_string(&ring.of([A])).unwrap();
        let expected = format!(
            r#"{{"steps":[{{"uid":"{A}","began":750000,"took":250000,"component":"kubelet","name":"pull"}}]}}"#
        );
        assert_eq!(text, expected);
    }
}
