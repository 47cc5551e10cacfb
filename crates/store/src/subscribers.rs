//! Index of subscribers, so that a commit visits only the subscribers that it concerns.
//!
//! Subscribers are found by the prefixes of a changed key, and below a prefix by the value that a field has
//! or had: a change of one node's pod does not visit the watchers of another node's pods.

use crate::entry::{Entry, Key, Revision};
use crate::history::Change;
use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Changes that wait for one subscriber. One that is further behind reads the history instead.
const MAX_WAITING: usize = 256;

/// Reads a field of an entry. None if it is unknown: such a change concerns every watch that selects by the
/// field.
pub type ReadField = for<'a> fn(field: &str, key: &'a Key, entry: &'a Entry) -> Option<&'a [u8]>;

/// Narrows a watch to the changes of objects in which a field has, or had, a value.
#[derive(Debug, Clone)]
pub struct Trigger {
    pub field: &'static str,
    pub value: Vec<u8>,
    pub read: ReadField,
}

impl Trigger {
    /// Does the change concern a watch with this trigger?
    pub fn concerns(&self, change: &Change) -> bool {
        values(self.field, self.read, change)
            .is_none_or(|values| values.into_iter().flatten().any(|value| value == self.value))
    }
}

/// The value that a field has and the one it had, if they differ. None when one of them is unknown.
fn values<'a>(field: &str, read: ReadField, change: &'a Change) -> Option<[Option<&'a [u8]>; 2]> {
    let of = |entry: &'a Option<Arc<Entry>>| match entry {
        None => Some(None),
        Some(entry) => read(field, &change.key, entry).map(Some),
    };
    let (now, before) = (of(&change.entry)?, of(&change.previous)?);
    Some([now, before.filter(|_| before != now)])
}

/// The changes queued for a subscriber, and the bell that wakes it.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    pub bell: Notify,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Each has all changes that concern the subscriber of some revisions: none is split.
    batches: Vec<Arc<[Change]>>,
    changes: usize,
    /// Something was dropped: the history has it.
    lost: bool,
}

impl Mailbox {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, batch: &Arc<[Change]>) {
        let mut waiting = self.waiting();
        if waiting.lost {
            return;
        }
        waiting.changes += batch.len();
        if waiting.changes > MAX_WAITING {
            *waiting = Waiting { lost: true, ..Waiting::default() };
        } else {
            waiting.batches.push(Arc::clone(batch));
        }
    }

    fn lose(&self) {
        *self.waiting() = Waiting { lost: true, ..Waiting::default() };
    }

    /// Takes the waiting changes. None when something is missing, which is so until the mailbox is cleared.
    pub fn take(&self) -> Option<Vec<Arc<[Change]>>> {
        let mut waiting = self.waiting();
        if waiting.lost {
            return None;
        }
        waiting.changes = 0;
        Some(std::mem::take(&mut waiting.batches))
    }

    /// Empties the mailbox for a reader that reads the history up to now or further. Whatever comes from now on waits.
    pub fn clear(&self) {
        *self.waiting() = Waiting::default();
    }
}

/// Where a subscriber is in the index.
#[derive(Debug)]
pub(crate) struct Subscription {
    id: u64,
    pub prefix: Vec<u8>,
    pub trigger: Option<Trigger>,
    pub mailbox: Arc<Mailbox>,
}

impl Subscription {
    /// Does a change concern the subscriber? For changes that are read from the history.
    pub fn wants(&self, change: &Change) -> bool {
        change.key.as_bytes().starts_with(&self.prefix)
            && self.trigger.as_ref().is_none_or(|trigger| trigger.concerns(change))
    }
}

/// Subscribers that hear of the same changes.
#[derive(Debug, Default)]
struct Group {
    id: u64,
    members: HashMap<u64, Arc<Mailbox>>,
}

/// Subscribers below a prefix that select by one field, by its value.
#[derive(Debug)]
struct Field {
    name: &'static str,
    read: ReadField,
    groups: HashMap<Vec<u8>, Group>,
}

#[derive(Debug, Default)]
struct Bucket {
    /// Subscribers of everything below the prefix.
    all: Group,
    fields: Vec<Field>,
}

impl Bucket {
    fn is_empty(&self) -> bool {
        self.all.members.is_empty() && self.fields.is_empty()
    }
}

/// The index.
#[derive(Debug, Default)]
pub(crate) struct Subscribers {
    buckets: BTreeMap<Vec<u8>, Bucket>,
    last_id: u64,
    /// Every change up to here has been put into the mailboxes of the subscribers that it concerns.
    pub dispatched: Revision,
}

impl Subscribers {
    /// Nobody yet, on a store at `dispatched`.
    pub fn new(dispatched: Revision) -> Self {
        Self { dispatched, ..Self::default() }
    }

    /// Adds a subscriber. It gets all changes after [`Subscribers::dispatched`].
    pub fn add(&mut self, prefix: &[u8], trigger: Option<Trigger>) -> Subscription {
        self.last_id += 2;
        let (id, group_id) = (self.last_id, self.last_id + 1);
        let mailbox = Arc::<Mailbox>::default();
        let bucket = self.buckets.entry(prefix.to_vec()).or_default();
        let group = match &trigger {
            None => &mut bucket.all,
            Some(trigger) => {
                let found = bucket.fields.iter().position(|field| field.name == trigger.field);
                let at = found.unwrap_or_else(|| {
                    let groups = HashMap::new();
                    bucket.fields.push(Field { name: trigger.field, read: trigger.read, groups });
                    bucket.fields.len() - 1
                });
                bucket.fields[at].groups.entry(trigger.value.clone()).or_default()
            }
        };
        if group.members.is_empty() {
            group.id = group_id;
        }
        group.members.insert(id, Arc::clone(&mailbox));
        Subscription { id, prefix: prefix.to_vec(), trigger, mailbox }
    }

    pub fn remove(&mut self, subscription: &Subscription) {
        let Subscription { id, prefix, trigger, .. } = subscription;
        let Some(bucket) = self.buckets.get_mut(prefix) else { return };
        match trigger {
            None => drop(bucket.all.members.remove(id)),
            Some(trigger) => {
                for field in bucket.fields.iter_mut().filter(|field| field.name == trigger.field) {
                    if let Some(group) = field.groups.get_mut(&trigger.value) {
                        group.members.remove(id);
                        if group.members.is_empty() {
                            field.groups.remove(&trigger.value);
                        }
                    }
                }
                bucket.fields.retain(|field| !field.groups.is_empty());
            }
        }
        if bucket.is_empty() {
            self.buckets.remove(prefix);
        }
    }

    /// Puts changes into the mailboxes of the subscribers that they concern, and returns these mailboxes:
    /// their bells are rung once the changes are known to be dispatched.
    pub fn dispatch(&mut self, changes: &[Change], revision: Revision) -> Vec<Arc<Mailbox>> {
        let mut concerned: Vec<(&Group, Vec<Change>)> = Vec::new();
        let mut places: HashMap<u64, usize> = HashMap::new();
        for change in changes {
            for bucket in prefixes(&self.buckets, change.key.as_bytes()) {
                bucket.each_concerned(change, &mut |group| {
                    let place = *places.entry(group.id).or_insert_with(|| {
                        concerned.push((group, Vec::new()));
                        concerned.len() - 1
                    });
                    concerned[place].1.push(change.clone());
                });
            }
        }
        let mut woken = Vec::new();
        for (group, changes) in concerned {
            let batch: Arc<[Change]> = changes.into();
            for mailbox in group.members.values() {
                mailbox.push(&batch);
                woken.push(Arc::clone(mailbox));
            }
        }
        self.dispatched = self.dispatched.max(revision);
        woken
    }

    /// Starts anew at `revision`, which no subscriber has seen: all of them read the history, and find its
    /// new state.
    pub fn reset(&mut self, revision: Revision) {
        self.dispatched = revision;
        self.all().iter().for_each(|mailbox| mailbox.lose());
    }

    /// The mailboxes of everybody.
    pub fn all(&self) -> Vec<Arc<Mailbox>> {
        let groups = self.buckets.values().flat_map(|bucket| {
            let of_fields = bucket.fields.iter().flat_map(|field| field.groups.values());
            std::iter::once(&bucket.all).chain(of_fields)
        });
        groups.flat_map(|group| group.members.values().cloned()).collect()
    }
}

impl Bucket {
    /// Calls `found` once for each group that a change concerns.
    fn each_concerned<'b>(&'b self, change: &Change, found: &mut impl FnMut(&'b Group)) {
        if !self.all.members.is_empty() {
            found(&self.all);
        }
        for field in &self.fields {
            match values(field.name, field.read, change) {
                Some(values) => {
                    values
                        .into_iter()
                        .flatten()
                        .filter_map(|value| field.groups.get(value))
                        .for_each(&mut *found);
                }
                None => field.groups.values().for_each(&mut *found),
            }
        }
    }
}

/// The buckets whose prefix a key has. Visits few others: from each place on, the last prefix that is not
/// greater than the key is one of its prefixes, or limits the length of the next one.
fn prefixes<'b, 'k>(
    buckets: &'b BTreeMap<Vec<u8>, Bucket>,
    key: &'k [u8],
) -> impl Iterator<Item = &'b Bucket> + use<'b, 'k> {
    let mut bound = Some((key.len(), true));
    std::iter::from_fn(move || {
        loop {
            let (length, inclusive) = bound?;
            let end = &key[..length];
            let end = if inclusive { Bound::Included(end) } else { Bound::Excluded(end) };
            let (prefix, bucket) = buckets.range::<[u8], _>((Bound::Unbounded, end)).next_back()?;
            let common = prefix.iter().zip(key).take_while(|(a, b)| a == b).count();
            if common == prefix.len() {
                bound = Some((common, false));
                return Some(bucket);
            }
            bound = Some((common, true));
        }
    })
}

#[cfg(test)]
#[path = "subscribers_tests.rs"]
mod tests;
