//! State shared by the watchers of a resource: each event is decoded and encoded once, however many there
//! are.

use super::{Facts, Selectors};
use bytes::Bytes;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_component::metrics::{Counter, Family, registry};
use ferrite_store::{Change, Entry};
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Events remembered for watchers that have not seen them yet. Those further behind encode for themselves.
const MAX_EVENTS: usize = 1024;
/// Bytes of frames remembered.
const MAX_BYTES: usize = 4 << 20;
/// Frames older than this are dropped; a slower watcher encodes its own.
const MAX_AGE: Duration = Duration::from_secs(10);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Group, version, plural name, and the stamp of a custom kind's definition.
type HubKey = (String, String, String, String);

/// The hubs of resources that are being watched.
#[derive(Default)]
pub(crate) struct Hubs(Mutex<HashMap<HubKey, Weak<Hub>>>);

impl Hubs {
    /// The hub of a resource, for as long as somebody holds it.
    pub fn of(&self, resource: &Resource) -> Arc<Hub> {
        // Frames of a custom kind are made by its schema: another schema has frames of its own.
        let stamp = resource.custom.as_ref().map_or_else(String::new, |custom| custom.kind.stamp.to_string());
        let key =
            (resource.group.to_string(), resource.version.to_string(), resource.plural.to_string(), stamp);
        let mut hubs = lock(&self.0);
        if let Some(hub) = hubs.get(&key).and_then(Weak::upgrade) {
            return hub;
        }
        hubs.retain(|_, hub| hub.strong_count() > 0);
        let hub = Arc::new(Hub::new(&resource.group, &resource.plural));
        hubs.insert(key, Arc::downgrade(&hub));
        hub
    }
}

/// Recent events of one resource in one version. Each watcher holds one reference.
pub(crate) struct Hub {
    recent: Mutex<VecDeque<Arc<Event>>>,
    bytes: Arc<AtomicUsize>,
    received: Arc<Counter>,
    pub dispatched: Arc<Counter>,
    pub initial: Arc<Counter>,
}

/// Events by group and resource.
struct Events {
    received: Arc<Family<Counter>>,
    dispatched: Arc<Family<Counter>>,
    initial: Arc<Family<Counter>>,
}

static EVENTS: LazyLock<Events> = LazyLock::new(|| {
    let counter = |name, help| registry().counter(name, help, &["group", "resource"]);
    Events {
        received: counter(
            "apiserver_watch_cache_events_received_total",
            "Changes that somebody watches, each once.",
        ),
        dispatched: counter(
            "apiserver_watch_cache_events_dispatched_total",
            "Events that watches were given.",
        ),
        initial: counter(
            "apiserver_init_events_total",
            "Objects that were there when a watch began, given as events.",
        ),
    }
});

/// Drops the counters of a resource that is not served any more.
pub(super) fn forget(group: &str, plural: &str) {
    let Events { received, dispatched, initial } = &*EVENTS;
    [received, dispatched, initial].into_iter().for_each(|family| family.remove(&[group, plural]));
}

impl Hub {
    fn new(group: &str, plural: &str) -> Self {
        let labels = &[group, plural];
        Self {
            recent: Mutex::default(),
            bytes: Arc::default(),
            received: EVENTS.received.with(labels),
            dispatched: EVENTS.dispatched.with(labels),
            initial: EVENTS.initial.with(labels),
        }
    }

    /// The events of changes, shared with the other watchers. Changes come in the order of revisions.
    pub fn share(self: &Arc<Self>, changes: Vec<Change>) -> Vec<Arc<Event>> {
        if Arc::strong_count(self) < 2 {
            self.received.add(changes.len() as u64);
            return changes.into_iter().map(|c| Arc::new(Event::new(c, None))).collect();
        }
        let mut recent = lock(&self.recent);
        let shared = changes.into_iter().map(|change| self.shared(&mut recent, change)).collect();
        while recent.len() > MAX_EVENTS || self.bytes.load(Ordering::Relaxed) > MAX_BYTES {
            if recent.pop_front().is_none() {
                break;
            }
        }
        shared
    }

    fn shared(&self, recent: &mut VecDeque<Arc<Event>>, change: Change) -> Arc<Event> {
        let start = recent.partition_point(|e| e.change.revision < change.revision);
        let same = recent
            .range(start..)
            .take_while(|e| e.change.revision == change.revision)
            .find(|e| e.change.key == change.key);
        if let Some(event) = same {
            return Arc::clone(event);
        }
        if start == 0 && !recent.is_empty() {
            // So far behind that nobody else will ask.
            return Arc::new(Event::new(change, None));
        }
        self.received.increment();
        let event = Arc::new(Event::new(change, Some(Arc::clone(&self.bytes))));
        recent.insert(start, Arc::clone(&event));
        event
    }

    /// Forgets events that every watcher has seen.
    pub fn forget_old(&self) {
        let mut recent = lock(&self.recent);
        while recent.front().is_some_and(|e| e.at.elapsed() > MAX_AGE) {
            recent.pop_front();
        }
    }
}

/// A change as watchers see it, with the facts and frames computed so far.
pub(crate) struct Event {
    pub change: Change,
    at: Instant,
    now: Known,
    before: Known,
    frames: Mutex<Vec<(FrameKey, Bytes)>>,
    /// Counts the bytes of frames of all events of the hub.
    counted: Option<Arc<AtomicUsize>>,
}

/// Selectable facts about one state of an object, computed when somebody needs them.
#[derive(Default)]
struct Known {
    metadata: OnceLock<Option<Facts>>,
    all: OnceLock<Option<Facts>>,
}

impl Known {
    fn selected(&self, selectors: &Selectors, resource: &Resource, entry: &Entry) -> bool {
        let metadata = self.metadata.get_or_init(|| Facts::of_metadata(entry)).as_ref();
        let by_text = metadata.and_then(|metadata| selectors.matches_text(resource, entry, metadata));
        by_text.unwrap_or_else(|| {
            let all = self.all.get_or_init(|| Facts::of(resource, entry)).as_ref();
            all.is_some_and(|facts| selectors.matches(facts))
        })
    }
}

/// The properties that distinguish two frames of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameKey {
    pub type_: EventType,
    pub representation: crate::negotiate::Representation,
    pub include: crate::encode::IncludeObject,
    /// Tables contain their columns once per stream.
    pub columns: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventType {
    Added,
    Modified,
    Deleted,
}

impl EventType {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
        }
    }
}

impl Event {
    fn new(change: Change, counted: Option<Arc<AtomicUsize>>) -> Self {
        Self {
            change,
            at: Instant::now(),
            now: Known::default(),
            before: Known::default(),
            frames: Mutex::default(),
            counted,
        }
    }

    /// Returns true for the object before the change, and for the one after it, if the selectors select it.
    pub fn selected(&self, selectors: &Selectors, resource: &Resource) -> (bool, bool) {
        let of = |entry: Option<&Arc<Entry>>, known: &Known| {
            entry.is_some_and(|entry| known.selected(selectors, resource, entry))
        };
        (of(self.change.previous.as_ref(), &self.before), of(self.change.entry.as_ref(), &self.now))
    }

    /// The object an event of this type shows: of a deletion, the last state numbered with the deletion.
    pub fn entry(&self, type_: EventType) -> Option<Cow<'_, Entry>> {
        match type_ {
            EventType::Added | EventType::Modified => self.change.entry.as_deref().map(Cow::Borrowed),
            EventType::Deleted => {
                let mut last = self.change.previous.as_deref()?.clone();
                last.modified = self.change.revision;
                Some(Cow::Owned(last))
            }
        }
    }

    /// The frame of that key. The first caller makes it; others wait for it rather than make it again.
    pub fn frame(
        &self,
        key: FrameKey,
        make: impl FnOnce() -> Result<Bytes, Status>,
    ) -> Result<Bytes, Status> {
        let mut frames = lock(&self.frames);
        if let Some((_, frame)) = frames.iter().find(|(k, _)| *k == key) {
            return Ok(frame.clone());
        }
        let frame = make()?;
        if let Some(counted) = &self.counted {
            counted.fetch_add(frame.len(), Ordering::Relaxed);
            frames.push((key, frame.clone()));
        }
        Ok(frame)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(counted) = &self.counted {
            let frames = self.frames.get_mut().unwrap_or_else(PoisonError::into_inner);
            counted.fetch_sub(frames.iter().map(|(_, f)| f.len()).sum(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode::IncludeObject;
    use crate::negotiate::PLAIN_JSON;
    use ferrite_store::{Key, Revision};

    fn change(revision: u64, key: &str) -> Change {
        Change { revision: Revision(revision), key: Key::from(key), entry: None, previous: None }
    }

    const KEY: FrameKey = FrameKey {
        type_: EventType::Added,
        representation: PLAIN_JSON,
        include: IncludeObject::Metadata,
        columns: false,
    };

    #[test]
    fn watchers_share_events_and_frames() {
        let hub = Arc::new(Hub::new("", "tested"));
        let second = Arc::clone(&hub);
        let made = std::cell::Cell::new(0);
        let make = || {
            made.set(made.get() + 1);
            Ok(Bytes::from_static(b"frame"))
        };
        // The second watcher sees only part of the first one's changes, and the first sees them later.
        let of_second = second.share(vec![change(2, "b"), change(4, "b")]);
        let of_first = hub.share((1..=4).flat_map(|r| [change(r, "a"), change(r, "b")]).collect());
        for event in of_first.iter().chain(&of_second) {
            event.frame(KEY, make).unwrap();
        }
        // An event older than the remembered ones is made for this watcher alone.
        assert_eq!(made.get(), 8);
        assert!(Arc::ptr_eq(&of_second[0], &of_first[3]));
        assert_eq!(hub.bytes.load(Ordering::Relaxed), 5 * 5);
        drop((of_first, of_second));
        lock(&hub.recent).clear();
        assert_eq!(hub.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn little_is_remembered() {
        let hub = Arc::new(Hub::new("", "tested"));
        let _second = Arc::clone(&hub);
        for revision in 1..=3 * MAX_EVENTS as u64 {
            hub.share(vec![change(revision, "a")]);
        }
        assert_eq!(lock(&hub.recent).len(), MAX_EVENTS);
        for event in hub.share((1..=8).map(|r| change(1 << 20 | r, "b")).collect()) {
            event.frame(KEY, || Ok(vec![0; 1 << 20].into())).unwrap();
        }
        hub.share(vec![change(1 << 21, "c")]);
        assert!(hub.bytes.load(Ordering::Relaxed) <= MAX_BYTES);
        assert!(lock(&hub.recent).len() < 8);
    }

    #[test]
    fn counters_of_a_removed_resource_are_gone() {
        let (group, plural) = ("forgotten.example.com", "things");
        let shown = || registry().text().contains(group);
        Hub::new(group, plural).dispatched.increment();
        assert!(shown());
        forget(group, "others");
        assert!(shown());
        forget(group, plural);
        assert!(!shown());
    }

    #[test]
    fn hubs_live_as_long_as_their_watchers() {
        let table = super::super::ResourceMap::new(ferrite_api::kinds::built_in());
        let pods = table.find("", "v1", "pods").unwrap();
        let hubs = Hubs::default();
        let first = hubs.of(pods);
        assert!(Arc::ptr_eq(&first, &hubs.of(pods)));
        drop(first);
        hubs.of(table.find("", "v1", "nodes").unwrap());
        assert_eq!(lock(&hubs.0).len(), 1);
    }
}
