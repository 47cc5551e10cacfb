//! Watches: the changes of a collection's objects, as a client with these selectors sees them.

use super::hub::{Event, EventType, Hub};
use super::list::{Items, too_large};
use super::recent::RecentWrites;
use super::{Registry, Selectors, stored, trigger};
use crate::extensions::Converter;
use crate::options::ListOptions;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_store::{Change, Entry, Revision, Watch, WatchEnd};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An event of a watch.
pub(crate) enum WatchEvent {
    /// An object that existed when the watch began, sent as added.
    Initial(Arc<Entry>),
    Changed {
        type_: EventType,
        event: Arc<Event>,
    },
    /// Everything up to this revision has been sent.
    Bookmark {
        revision: Revision,
        initial_events_end: bool,
    },
    /// The watch is over.
    Error(Status),
}

/// A watch of one collection. Owns no buffer beyond the batch it is handing out.
pub(crate) struct WatchStream {
    resource: Arc<Resource>,
    selectors: Selectors,
    watch: Watch,
    hub: Arc<Hub>,
    recent: Arc<RecentWrites>,
    converter: Arc<Converter>,
    /// Objects and changes that are being converted: the caller may stop waiting for the next event in
    /// between.
    unconverted: (Vec<Arc<Entry>>, Vec<Change>),
    /// Objects from the beginning of the watch that have not been read yet.
    initial: Option<Items>,
    /// The bookmark that follows it.
    initial_end: Option<Revision>,
    ready: VecDeque<WatchEvent>,
    ended: bool,
}

/// About the number of bytes of the initial state read in one go.
const INITIAL: usize = 128 << 10;

impl Registry {
    pub fn watch(
        &self,
        resource: &Arc<Resource>,
        namespace: Option<&str>,
        selectors: Selectors,
        options: &ListOptions,
    ) -> Result<WatchStream, Status> {
        let prefix = stored::prefix_in(resource, namespace);
        let snapshot = self.store.snapshot();
        let initial = options.send_initial_events == Some(true);
        let wanted = options.resource_version.unwrap_or(0);
        let current = snapshot.revision();
        // As upstream: a client that continues from a future version waits for the events after it.
        if initial && wanted > current.0 {
            return Err(too_large(wanted, current));
        }
        // As upstream: without a version a watch begins with the existing objects, unless initial events
        // are refused.
        let from_now = initial || (wanted == 0 && options.send_initial_events != Some(false));
        if from_now {
            self.check_all_readable(&snapshot, &prefix)?;
        }
        let after = if from_now || wanted == 0 { current } else { Revision(wanted) };
        let oldest = Revision(self.oldest_watch.load(Ordering::Relaxed));
        if after < oldest {
            return Err(gone(&WatchEnd::Compacted { wanted: after.next(), oldest: oldest.next() }));
        }
        // Objects of another version can be selected only after they are converted.
        let of_stored = match crate::extensions::converts(resource) {
            true => Selectors::default(),
            false => selectors.clone(),
        };
        let trigger = trigger::of(resource, &selectors);
        let watch = self.store.watch_selected(prefix.as_bytes(), trigger, after).map_err(|end| gone(&end))?;
        Ok(WatchStream {
            initial: from_now.then(|| Items::all(resource, namespace, of_stored, snapshot)),
            initial_end: (initial && options.bookmarks).then_some(current),
            hub: self.hubs.of(resource),
            recent: Arc::clone(&self.recent),
            converter: Arc::clone(&self.converter),
            unconverted: (Vec::new(), Vec::new()),
            resource: Arc::clone(resource),
            selectors,
            watch,
            ready: VecDeque::new(),
            ended: false,
        })
    }
}

fn gone(end: &WatchEnd) -> Status {
    match end {
        WatchEnd::Compacted { wanted, oldest } => {
            Status::expired(format!("too old resource version: {} ({oldest})", wanted.0.saturating_sub(1)))
        }
        WatchEnd::Closed => Status::unavailable("the server is stopping"),
    }
}

impl WatchStream {
    /// The next event; none after the one that said why the watch is over.
    pub async fn next(&mut self) -> Option<WatchEvent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            if let Some(status) = self.convert().await.err() {
                return Some(self.fail(status));
            }
            if !self.ready.is_empty() {
                continue;
            }
            if let Some(items) = &mut self.initial {
                match items.take(INITIAL) {
                    Some(entries) => self.unconverted.0 = entries,
                    None => {
                        self.initial = None;
                        let end = self.initial_end.take();
                        let bookmark =
                            end.map(|revision| WatchEvent::Bookmark { revision, initial_events_end: true });
                        self.ready.extend(bookmark);
                    }
                }
                continue;
            }
            match self.watch.next().await {
                Ok(changes) => self.unconverted.1 = changes,
                Err(end) => return Some(self.end(&end)),
            }
        }
    }

    /// Makes events of the read changes, in the version of the watch.
    async fn convert(&mut self) -> Result<(), Status> {
        let (entries, changes) = match crate::extensions::converts(&self.resource) {
            false => std::mem::take(&mut self.unconverted),
            true => {
                let (entries, changes) = self.unconverted.clone();
                let mut entries = Box::pin(self.converter.entries(&self.resource, entries)).await?;
                let changes = Box::pin(self.converter.changes(&self.resource, changes)).await?;
                self.unconverted = (Vec::new(), Vec::new());
                entries.retain(|entry| self.selectors.select(&self.resource, entry));
                (entries, changes)
            }
        };
        self.hub.initial.add(entries.len() as u64);
        self.ready.extend(entries.into_iter().map(WatchEvent::Initial));
        self.extend(changes);
        Ok(())
    }

    /// A bookmark for the present position, or an event before it.
    pub fn bookmark(&mut self) -> Option<WatchEvent> {
        if !self.ready.is_empty() || self.initial.is_some() || !self.unconverted.1.is_empty() {
            return None;
        }
        match self.watch.ready() {
            // `next` converts them and sends them.
            Ok(changes) if !changes.is_empty() && crate::extensions::converts(&self.resource) => {
                self.unconverted.1 = changes;
                return None;
            }
            Ok(changes) => self.extend(changes),
            Err(end) => return Some(self.end(&end)),
        }
        let bookmark = || WatchEvent::Bookmark { revision: self.watch.position(), initial_events_end: false };
        Some(self.ready.pop_front().unwrap_or_else(bookmark))
    }

    /// Drops memory that is kept for other watchers only, or for writes that are long past.
    pub fn tidy(&self) {
        self.hub.forget_old();
        self.recent.forget_old();
    }

    fn fail(&mut self, status: Status) -> WatchEvent {
        self.ended = true;
        WatchEvent::Error(status)
    }

    fn end(&mut self, end: &WatchEnd) -> WatchEvent {
        self.ended = true;
        WatchEvent::Error(gone(end))
    }

    fn extend(&mut self, changes: Vec<Change>) {
        let unreadable = |change: &Change| {
            let mut both = change.entry.iter().chain(&change.previous);
            both.any(|entry| entry.is_unreadable())
        };
        // As upstream: a change that cannot be decrypted ends the watch.
        if let Some(change) = changes.iter().find(|change| unreadable(change)) {
            let why = format!("unable to transform key {:?}", change.key);
            self.ready.push_back(WatchEvent::Error(Status::internal(why)));
            self.ended = true;
            return;
        }
        for event in self.hub.share(changes) {
            if let Some(type_) = self.seen_as(&event) {
                self.hub.dispatched.increment();
                self.ready.push_back(WatchEvent::Changed { type_, event });
            }
        }
    }

    /// An object that comes into or leaves the selection is added or deleted for this watcher.
    fn seen_as(&self, event: &Event) -> Option<EventType> {
        let (before, now) = match self.selectors.is_everything() {
            true => (event.change.previous.is_some(), event.change.entry.is_some()),
            false => event.selected(&self.selectors, &self.resource),
        };
        match (before, now) {
            (false, true) => Some(EventType::Added),
            (true, true) => Some(EventType::Modified),
            (true, false) => Some(EventType::Deleted),
            (false, false) => None,
        }
    }
}
