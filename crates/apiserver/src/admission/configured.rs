//! Stored configurations of admission, compiled once for each of their versions.

use crate::registry::{View, stored};
use ferrite_json::Value;
use ferrite_store::{Entry, Revision};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// A configuration, with the entry that it was compiled from: it holds for no other.
struct Compiled<T> {
    from: Arc<Entry>,
    value: Arc<T>,
}

/// Makes a configuration of its object.
type Compile<T> = Box<dyn Fn(&Value) -> T + Send + Sync>;

/// The configurations of one kind, in the order of their names.
pub(crate) struct Configured<T> {
    group: &'static str,
    plural: &'static str,
    compile: Compile<T>,
    /// The prefix of their keys.
    prefix: OnceLock<String>,
    /// Those of the newest snapshot that was compared, and the revision of that snapshot.
    known: RwLock<(Revision, Current<T>)>,
}

/// The configurations as one view sees them.
pub(crate) struct Current<T>(Arc<Vec<Compiled<T>>>);

impl<T> Clone for Current<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Current<T> {
    pub fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.0.iter().map(|compiled| &compiled.value)
    }

    /// Returns true if these are the entries of a view.
    fn is_of<'a>(&self, entries: impl Iterator<Item = &'a Arc<Entry>>) -> bool {
        let mut known = self.0.iter();
        for entry in entries {
            if !known.next().is_some_and(|known| Arc::ptr_eq(&known.from, entry)) {
                return false;
            }
        }
        known.next().is_none()
    }
}

impl<T> Configured<T> {
    /// Objects are compiled as the version in which they are stored.
    pub fn new(group: &'static str, plural: &'static str, compile: Compile<T>) -> Self {
        let (prefix, known) = (OnceLock::new(), RwLock::new((Revision(0), Current(Arc::default()))));
        Self { group, plural, compile, prefix, known }
    }

    fn prefix(&self, view: &View) -> Option<&str> {
        if self.prefix.get().is_none() {
            let resource = view.resource(self.group, self.plural)?;
            let _ = self.prefix.set(stored::prefix(resource));
        }
        self.prefix.get().map(String::as_str)
    }

    /// Returns true if there are none: one lookup at most.
    pub fn is_empty(&self, view: &View) -> bool {
        if let Some(known) = self.compared(view) {
            return known.0.is_empty();
        }
        self.prefix(view).is_none_or(|prefix| view.snapshot.range(prefix.as_bytes(), None).next().is_none())
    }

    /// Those that were compared with the snapshot of this view before: a request asks several times.
    fn compared(&self, view: &View) -> Option<Current<T>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        (known.0 == view.snapshot.revision() && self.prefix.get().is_some()).then(|| known.1.clone())
    }

    fn remember(&self, view: &View, current: &Current<T>) {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        *known = (view.snapshot.revision(), current.clone());
    }

    /// Those that a view sees. Only those that have changed are compiled.
    pub fn current(&self, view: &View) -> Current<T> {
        if let Some(known) = self.compared(view) {
            return known;
        }
        let Some(prefix) = self.prefix(view) else { return Current(Arc::default()) };
        let entries = || view.snapshot.range(prefix.as_bytes(), None);
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner).1.clone();
        if known.is_of(entries().map(|(_, entry)| entry)) {
            self.remember(view, &known);
            return known;
        }
        let Some(resource) = view.resource(self.group, self.plural) else { return known };
        let compile = |entry: &Arc<Entry>| {
            let same = known.0.iter().find(|known| Arc::ptr_eq(&known.from, entry));
            let value = match same {
                Some(same) => Arc::clone(&same.value),
                None => Arc::new((self.compile)(&stored::decode(resource, entry)?)),
            };
            Some(Compiled { from: Arc::clone(entry), value })
        };
        let current = Current(Arc::new(entries().filter_map(|(_, entry)| compile(entry)).collect()));
        self.remember(view, &current);
        current
    }
}
