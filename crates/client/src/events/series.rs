//! Events of `events.k8s.io`, as upstream's newer recorder writes them. What happens again within minutes is a series: its
//! second occurrence is written at once, and from then on its count now and then and at its end.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use ferrite_json::{Value, json};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::{Patch, PatchParams, PostParams};
use tokio::sync::mpsc;
use tracing::debug;

use super::correlator::{Digest, Remembered};
use super::{Entry, EventType, event_name};
use crate::{Api, is_not_found};

/// A series ends when nothing was added to it for so long.
const QUIET: Duration = Duration::from_secs(6 * 60);
/// A long series is written so often, so that it does not expire.
const REFRESH: Duration = Duration::from_secs(30 * 60);
/// The API's limit of `reportingInstance`.
const LONGEST_INSTANCE: usize = 128;

/// One occurrence.
#[derive(Debug, Clone)]
pub(super) struct Happening {
    pub(super) controller: Arc<str>,
    pub(super) instance: Arc<str>,
    pub(super) regarding: ObjectReference,
    pub(super) related: Option<ObjectReference>,
    pub(super) kind: EventType,
    pub(super) reason: String,
    pub(super) action: String,
    pub(super) note: String,
    pub(super) at: Timestamp,
}

/// Records events of `events.k8s.io` as one component. Never waits and never fails: an event that cannot be kept is dropped.
#[derive(Debug, Clone)]
pub struct SeriesRecorder {
    sender: mpsc::Sender<Entry>,
    controller: Arc<str>,
    instance: Arc<str>,
}

impl SeriesRecorder {
    pub(super) fn new(sender: mpsc::Sender<Entry>, controller: &str) -> Self {
        let instance = instance(controller, &host());
        Self { sender, controller: controller.into(), instance: instance.into() }
    }

    /// Records that the component took `action` about `regarding`, because of `related` if that is given.
    pub fn event(
        &self,
        regarding: &ObjectReference,
        related: Option<ObjectReference>,
        kind: EventType,
        reason: impl Into<String>,
        action: impl Into<String>,
        note: impl Into<String>,
    ) {
        let happening = Happening {
            controller: self.controller.clone(),
            instance: self.instance.clone(),
            regarding: regarding.clone(),
            related,
            kind,
            reason: reason.into(),
            action: action.into(),
            note: note.into(),
            at: Timestamp::now(),
        };
        if let Err(error) = self.sender.try_send(Entry::Series(happening)) {
            debug!(%error, "event dropped");
        }
    }
}

/// The name of the machine; empty if the kernel does not say it.
fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// `component-host`, cut to the API's limit.
fn instance(controller: &str, host: &str) -> String {
    let mut instance = format!("{controller}-{host}");
    let end = (0..=LONGEST_INSTANCE).rev().find(|end| instance.is_char_boundary(*end)).unwrap_or(0);
    instance.truncate(end);
    instance
}

/// The event to write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Create,
    /// The second occurrence of the event that has this time in its name.
    Begin(Timestamp),
    /// It counts, and is written later.
    Counted,
}

#[derive(Debug)]
struct Seen {
    first: Timestamp,
    last: Timestamp,
    count: i32,
    /// The event to make anew if it has expired; none for one that happened once.
    series: Option<Box<Happening>>,
}

/// A series, as it is to be written.
#[derive(Debug)]
pub(super) struct Count {
    pub(super) happening: Happening,
    pub(super) first: Timestamp,
    pub(super) count: i32,
}

/// Memory of recent events. Notes are no part of an event's identity: a series has its first one.
#[derive(Default)]
pub(super) struct SeriesMemory {
    keys: [RandomState; 2],
    seen: Remembered<Digest, Seen>,
    refreshed: Timestamp,
}

impl SeriesMemory {
    pub(super) fn is_empty(&self) -> bool {
        self.seen.len() == 0
    }

    /// The time between two calls of [`sweep`](Self::sweep).
    pub(super) const INTERVAL: Duration = QUIET;

    pub(super) fn observe(&mut self, happening: &Happening) -> Verdict {
        let key = self.key(happening);
        let Some(seen) = self.seen.get_mut(&key) else {
            let seen = Seen { first: happening.at, last: happening.at, count: 1, series: None };
            self.seen.entry(&key, || seen);
            return Verdict::Create;
        };
        seen.count = seen.count.saturating_add(1);
        seen.last = happening.at;
        if seen.series.is_some() {
            return Verdict::Counted;
        }
        seen.series = Some(Box::new(happening.clone()));
        Verdict::Begin(seen.first)
    }

    /// Forgets events that have ended. Returns the series that are to be written.
    pub(super) fn sweep(&mut self, now: Timestamp) -> Vec<Count> {
        let since = |time: Timestamp| Duration::try_from(now.duration_since(time)).unwrap_or_default();
        let refreshes = since(self.refreshed) >= REFRESH;
        if refreshes {
            self.refreshed = now;
        }
        let mut counts = Vec::new();
        self.seen.retain(|seen| {
            let is_over = since(seen.last) > QUIET;
            if let Some(series) = seen.series.as_ref().filter(|_| is_over || refreshes) {
                let happening = Happening { at: seen.last, ..(**series).clone() };
                counts.push(Count { happening, first: seen.first, count: seen.count });
            }
            !is_over
        });
        counts
    }

    fn key(&self, happening: &Happening) -> Digest {
        fn object(object: &ObjectReference) -> [Option<&str>; 6] {
            let ObjectReference { kind, namespace, name, field_path, uid, api_version, .. } = object;
            [kind, namespace, name, field_path, uid, api_version].map(Option::as_deref)
        }
        let parts = (
            &happening.controller,
            &happening.instance,
            object(&happening.regarding),
            happening.related.as_ref().map(object),
            happening.kind,
            &happening.reason,
            &happening.action,
        );
        Digest(self.keys[0].hash_one(parts), self.keys[1].hash_one(parts))
    }
}

/// Writes an occurrence that is new, or begins a series.
pub(super) async fn write(
    client: &Client,
    happening: Happening,
    verdict: Verdict,
) -> Result<(), kube::Error> {
    match verdict {
        Verdict::Counted => Ok(()),
        Verdict::Create => {
            let event = new_event(&happening, happening.at, None);
            events(client, &happening).create_unread(&PostParams::default(), &event).await
        }
        Verdict::Begin(first) => write_count(client, &Count { happening, first, count: 2 }).await,
    }
}

/// Writes how often and when an event of a series happened.
pub(super) async fn write_count(client: &Client, count: &Count) -> Result<(), kube::Error> {
    let Count { happening, first, count } = count;
    let series = EventSeries { count: *count, last_observed_time: MicroTime(happening.at) };
    let api = events(client, happening);
    let name = event_name(&happening.regarding, *first);
    let patch: Value = json!({"series": series});
    match api.patch_unread(&name, &PatchParams::default(), &Patch::Strategic(patch)).await {
        // It was removed (events live about an hour): start again.
        Err(error) if is_not_found(&error) => {
            let event = new_event(happening, *first, Some(series));
            api.create_unread(&PostParams::default(), &event).await
        }
        result => result,
    }
}

fn namespace(happening: &Happening) -> &str {
    happening.regarding.namespace.as_deref().filter(|name| !name.is_empty()).unwrap_or("default")
}

fn events(client: &Client, happening: &Happening) -> Api<Event> {
    Api::namespaced(client.clone(), namespace(happening))
}

fn new_event(happening: &Happening, first: Timestamp, series: Option<EventSeries>) -> Event {
    Event {
        metadata: ObjectMeta {
            name: Some(event_name(&happening.regarding, first)),
            namespace: Some(namespace(happening).to_owned()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(first)),
        series,
        reporting_controller: Some(happening.controller.to_string()),
        reporting_instance: Some(happening.instance.to_string()),
        action: Some(happening.action.clone()),
        reason: Some(happening.reason.clone()),
        regarding: Some(happening.regarding.clone()),
        related: happening.related.clone(),
        note: Some(happening.note.clone()),
        type_: Some(happening.kind.as_str().to_owned()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::correlator::REMEMBERED;
    use super::*;

    fn happening(object: &str, note: &str, second: i64) -> Happening {
        Happening {
            controller: "default-scheduler".into(),
            instance: "default-scheduler-host".into(),
            regarding: ObjectReference { name: Some(object.into()), ..ObjectReference::default() },
            related: None,
            kind: EventType::Warning,
            reason: "FailedScheduling".into(),
            action: "Scheduling".into(),
            note: note.into(),
            at: Timestamp::from_second(second).unwrap(),
        }
    }

    #[test]
    fn repetitions_are_a_series_whatever_they_say() {
        let mut memory = SeriesMemory::default();
        assert_eq!(memory.observe(&happening("a", "0/1 nodes", 0)), Verdict::Create);
        assert_eq!(memory.observe(&happening("a", "0/2 nodes", 1)), Verdict::Begin(Timestamp::UNIX_EPOCH));
        assert_eq!(memory.observe(&happening("a", "0/3 nodes", 2)), Verdict::Counted);
        assert_eq!(memory.observe(&happening("b", "0/1 nodes", 2)), Verdict::Create, "another object");
        let related = Some(ObjectReference { name: Some("c".into()), ..ObjectReference::default() });
        let other = Happening { related, ..happening("a", "0/1 nodes", 2) };
        assert_eq!(memory.observe(&other), Verdict::Create, "another related object");
        let other = Happening { action: "Binding".into(), ..happening("a", "0/1 nodes", 2) };
        assert_eq!(memory.observe(&other), Verdict::Create, "another action");
    }

    #[test]
    fn a_series_is_written_at_its_end_and_while_it_lasts() {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let mut memory = SeriesMemory { refreshed: at(0), ..SeriesMemory::default() };
        memory.observe(&happening("once", "m", 0));
        for second in 0..5 {
            memory.observe(&happening("often", "m", second));
        }
        assert!(memory.sweep(at(360)).is_empty(), "nothing is over");
        let counts = memory.sweep(at(365));
        let shown: Vec<_> = counts.iter().map(|c| (c.first, c.happening.at, c.count)).collect();
        assert_eq!(shown, [(at(0), at(4), 5)]);
        assert!(memory.is_empty());

        memory.observe(&happening("long", "m", 1700));
        memory.observe(&happening("long", "m", 1750));
        let counts: Vec<_> = [1799, 1800, 1801].map(|second| memory.sweep(at(second)).len()).into();
        assert_eq!(counts, [0, 1, 0], "a series that lasts is written every half hour");
        assert!(!memory.is_empty());
    }

    #[test]
    fn memory_is_bounded() {
        let mut memory = SeriesMemory::default();
        for n in 0..3 * REMEMBERED {
            memory.observe(&happening(&format!("o{n}"), "m", 0));
        }
        assert!(memory.sweep(Timestamp::UNIX_EPOCH).is_empty());
        assert!(memory.seen.len() <= REMEMBERED);
    }

    #[test]
    fn an_event_names_its_reporter() {
        let event = new_event(&happening("a", "no room", 1), Timestamp::from_second(1).unwrap(), None);
        assert_eq!(event.metadata.name.as_deref(), Some("a.3b9aca00"));
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!(event.reporting_controller.as_deref(), Some("default-scheduler"));
        assert_eq!(event.reporting_instance.as_deref(), Some("default-scheduler-host"));
        assert_eq!(event.action.as_deref(), Some("Scheduling"));
        assert!(event.event_time.is_some() && event.deprecated_source.is_none());
        assert_eq!(instance("c", "h"), "c-h");
        assert_eq!(instance(&"é".repeat(64), "h").len(), LONGEST_INSTANCE);
    }
}
