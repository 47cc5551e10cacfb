//! The seats of a request: one, and more for a list of much data.

use crate::options::Query;
use crate::registry::stored;
use crate::request::Verb;
use ferrite_api::resource::Resource;
use ferrite_store::Snapshot;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One seat for each of these bytes, as upstream.
const BYTES_PER_SEAT: u64 = 100_000;
/// A list goes out in pieces, so that no more of it than this is in memory at once.
const MOST_BYTES: u64 = 1_000_000;
/// Sizes of resources are looked up again after this time.
const AGE: Duration = Duration::from_secs(60);

/// The number and the bytes of a resource's objects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Size {
    objects: u64,
    bytes: u64,
}

/// The sizes of resources as they were when last looked up.
#[derive(Default)]
pub(super) struct Sizes(Mutex<HashMap<(String, String), (Instant, Size)>>);

/// A list or watch as far as its cost depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asked {
    one: bool,
    limit: u64,
}

/// The objects that a request reads; None for a request that reads none or one.
fn asked(verb: Verb, name: Option<&str>, query: &Query) -> Option<Asked> {
    let version = query.get("resourceVersion").unwrap_or_default();
    let starts_with_objects = query.flag("sendInitialEvents") || version.is_empty() || version == "0";
    let lists = verb == Verb::List || (verb == Verb::Watch && starts_with_objects);
    let by_name = query.get("fieldSelector").is_some_and(|selector| selector.contains("metadata.name="));
    lists.then(|| Asked {
        one: name.is_some() || by_name,
        limit: query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(0),
    })
}

fn seats(size: Size, asked: Asked, widest: u32) -> u32 {
    let limited = if asked.limit > 0 { asked.limit.min(size.objects) } else { size.objects };
    let objects = if asked.one { 1 } else { limited };
    let average = size.bytes.checked_div(size.objects).unwrap_or(0);
    let bytes = objects.saturating_mul(average).min(MOST_BYTES);
    u32::try_from(bytes.div_ceil(BYTES_PER_SEAT)).unwrap_or(u32::MAX).clamp(1, widest.max(1))
}

impl Sizes {
    fn of(&self, resource: &Resource, snapshot: impl FnOnce() -> Snapshot) -> Size {
        let key = (resource.group.to_string(), resource.plural.to_string());
        let now = Instant::now();
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((then, size)) = lock().get(&key)
            && now.duration_since(*then) < AGE
        {
            return *size;
        }
        // Without the lock: other lists do not wait for the count.
        let (snapshot, prefix) = (snapshot(), stored::prefix(resource));
        let entries = snapshot.range(prefix.as_bytes(), None);
        let size = entries.fold(Size::default(), |size, (_, entry)| Size {
            objects: size.objects + 1,
            bytes: size.bytes + entry.plain().len() as u64,
        });
        let mut known = lock();
        // Resources come and go; those that went are forgotten with the old ones.
        known.retain(|_, (then, _)| now.saturating_duration_since(*then) < AGE);
        known.insert(key, (now, size));
        size
    }

    /// The seats of a request for a resource.
    pub fn seats(
        &self,
        resource: &Resource,
        verb: Verb,
        name: Option<&str>,
        query: &Query,
        widest: impl FnOnce() -> u32,
        snapshot: impl FnOnce() -> Snapshot,
    ) -> u32 {
        match asked(verb, name, query) {
            Some(asked) if !asked.one => seats(self.of(resource, snapshot), asked, widest()),
            Some(_) | None => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_watches_that_begin_with_objects_cost_by_them() {
        let all = Some(Asked { one: false, limit: 0 });
        let one = Some(Asked { one: true, limit: 0 });
        let rows = [
            (Verb::List, None, "", all),
            (Verb::List, None, "limit=500", Some(Asked { one: false, limit: 500 })),
            (Verb::List, None, "fieldSelector=metadata.name%3Da", one),
            (Verb::Watch, None, "", all),
            (Verb::Watch, None, "resourceVersion=0", all),
            (Verb::Watch, None, "resourceVersion=7", None),
            (Verb::Watch, None, "resourceVersion=7&sendInitialEvents=true", all),
            (Verb::Watch, Some("a"), "", one),
            (Verb::Get, Some("a"), "", None),
            (Verb::Create, None, "", None),
        ];
        for (verb, name, query, expected) in rows {
            assert_eq!(asked(verb, name, &Query::parse(Some(query))), expected, "{verb:?} {query}");
        }
    }

    #[test]
    fn seats_follow_the_bytes_within_bounds() {
        let size = Size { objects: 1000, bytes: 1_500_000 };
        let rows = [
            (size, Asked { one: false, limit: 0 }, 100, 10),
            (size, Asked { one: false, limit: 100 }, 100, 2),
            (size, Asked { one: false, limit: 0 }, 4, 4),
            (size, Asked { one: true, limit: 0 }, 100, 1),
            (Size::default(), Asked { one: false, limit: 0 }, 100, 1),
        ];
        for (size, asked, widest, expected) in rows {
            assert_eq!(seats(size, asked, widest), expected, "{size:?} {asked:?} {widest}");
        }
    }
}
