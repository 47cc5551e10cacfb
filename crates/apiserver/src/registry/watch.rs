//! Watches: what happens to the objects of a collection, as a client with these selectors sees it.

use super::list::too_large;
use super::{Registry, Selectors, stored};
use crate::options::ListOptions;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_store::{Entry, Revision, Watch, WatchEnd};
use std::collections::VecDeque;
use std::sync::Arc;

/// What a watcher is told.
#[derive(Debug)]
pub(crate) enum WatchEvent {
    Added(Arc<Entry>),
    Modified(Arc<Entry>),
    /// The last state, numbered with the revision of the deletion.
    Deleted(Arc<Entry>),
    /// Everything up to this revision has been told.
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
    ready: VecDeque<WatchEvent>,
    ended: bool,
}

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
        if wanted > snapshot.revision().0 {
            return Err(too_large(wanted, snapshot.revision()));
        }
        let mut ready = VecDeque::new();
        // As upstream: without a version a watch begins with what is there, unless initial events are refused.
        let from_now = initial || (wanted == 0 && options.send_initial_events != Some(false));
        if from_now {
            for (_, entry) in snapshot.range(prefix.as_bytes(), None) {
                if selects(&selectors, resource, entry) {
                    ready.push_back(WatchEvent::Added(Arc::clone(entry)));
                }
            }
            if initial && options.bookmarks {
                ready.push_back(WatchEvent::Bookmark {
                    revision: snapshot.revision(),
                    initial_events_end: true,
                });
            }
        }
        let after = if from_now || wanted == 0 { snapshot.revision() } else { Revision(wanted) };
        let watch = self.store.watch(prefix.as_bytes(), after).map_err(|end| gone(&end))?;
        Ok(WatchStream { resource: Arc::clone(resource), selectors, watch, ready, ended: false })
    }
}

fn selects(selectors: &Selectors, resource: &Resource, entry: &Entry) -> bool {
    selectors.is_everything()
        || stored::decode(resource, entry).is_some_and(|object| selectors.matches(resource, &object))
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
            match self.watch.next().await {
                Ok(changes) => {
                    for change in changes {
                        self.ready.extend(self.event(&change));
                    }
                }
                Err(end) => {
                    self.ended = true;
                    return Some(WatchEvent::Error(gone(&end)));
                }
            }
        }
    }

    /// A bookmark for the present position.
    pub fn bookmark(&mut self) -> Option<WatchEvent> {
        if !self.ready.is_empty() {
            return None;
        }
        match self.watch.ready() {
            Ok(changes) => {
                for change in changes {
                    self.ready.extend(self.event(&change));
                }
                match self.ready.pop_front() {
                    Some(event) => Some(event),
                    None => Some(WatchEvent::Bookmark {
                        revision: self.watch.position(),
                        initial_events_end: false,
                    }),
                }
            }
            Err(end) => {
                self.ended = true;
                Some(WatchEvent::Error(gone(&end)))
            }
        }
    }

    /// An object that comes into or leaves the selection is added or deleted for this watcher.
    fn event(&self, change: &ferrite_store::Change) -> Option<WatchEvent> {
        let now = change.entry.as_ref().filter(|e| selects(&self.selectors, &self.resource, e));
        let before = change.previous.as_ref().filter(|e| selects(&self.selectors, &self.resource, e));
        match (before, now) {
            (None, Some(entry)) => Some(WatchEvent::Added(Arc::clone(entry))),
            (Some(_), Some(entry)) => Some(WatchEvent::Modified(Arc::clone(entry))),
            (Some(previous), None) => {
                let mut last = (**previous).clone();
                last.modified = change.revision;
                Some(WatchEvent::Deleted(Arc::new(last)))
            }
            (None, None) => None,
        }
    }
}
