//! Documents that clients ask for again and again are kept, and dropped when nobody has asked for a while.

use super::Document;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A document that nobody has asked for in this time is dropped, and made again for the next client. All documents
/// together have megabytes, and most clients keep their own copies.
const UNUSED: Duration = Duration::from_secs(120);

/// A document as it is remembered.
struct Made {
    /// The definitions that it is made of; empty if there are none.
    stamp: String,
    hash: String,
    /// None of a document of custom kinds, as there can be many and few are asked for twice, and of an unused document.
    bytes: Option<Bytes>,
    used: Instant,
}

/// The v2 document in both of its forms, with the version of the table that it is of.
struct Whole {
    version: u64,
    forms: [Document; 2],
    used: Instant,
}

/// Documents made so far.
#[derive(Default)]
pub(super) struct Kept {
    /// By path.
    made: Mutex<BTreeMap<String, Made>>,
    whole: Mutex<Option<Whole>>,
    filled: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kept {
    /// Forgets documents at other paths.
    pub fn retain(&self, paths: &BTreeSet<String>) {
        lock(&self.made).retain(|path, _| paths.contains(path));
    }

    /// The hash of a document, which is known for longer than its bytes.
    pub fn hash(&self, path: &str, stamp: &str) -> Option<String> {
        lock(&self.made).get(path).filter(|made| made.stamp == stamp).map(|made| made.hash.clone())
    }

    pub fn get(&self, path: &str, stamp: &str) -> Option<Document> {
        let mut all = lock(&self.made);
        let made = all.get_mut(path).filter(|made| made.stamp == stamp)?;
        let bytes = made.bytes.clone()?;
        made.used = Instant::now();
        Some(Document { hash: made.hash.clone(), bytes })
    }

    pub fn put(&self, path: &str, stamp: String, document: &Document) {
        let bytes = stamp.is_empty().then(|| document.bytes.clone());
        let made = Made { stamp, hash: document.hash.clone(), bytes, used: Instant::now() };
        lock(&self.made).insert(path.to_owned(), made);
        self.filled.notify_one();
    }

    pub fn whole(&self, version: u64) -> Option<[Document; 2]> {
        let mut whole = lock(&self.whole);
        let known = whole.as_mut().filter(|known| known.version == version)?;
        known.used = Instant::now();
        Some(known.forms.clone())
    }

    pub fn put_whole(&self, version: u64, forms: [Document; 2]) {
        *lock(&self.whole) = Some(Whole { version, forms, used: Instant::now() });
        self.filled.notify_one();
    }

    /// Drops what is unused, for as long as it is polled.
    pub async fn run(&self) {
        loop {
            while self.holds_bytes() {
                tokio::time::sleep(UNUSED).await;
                self.drop_unused();
            }
            self.filled.notified().await;
        }
    }

    fn holds_bytes(&self) -> bool {
        lock(&self.whole).is_some() || lock(&self.made).values().any(|made| made.bytes.is_some())
    }

    fn drop_unused(&self) {
        let is_unused = |used: Instant| used.elapsed() >= UNUSED;
        lock(&self.whole).take_if(|whole| is_unused(whole.used));
        for made in lock(&self.made).values_mut().filter(|made| is_unused(made.used)) {
            made.bytes = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(text: &'static str) -> Document {
        Document { hash: text.to_uppercase(), bytes: Bytes::from_static(text.as_bytes()) }
    }

    #[tokio::test(start_paused = true)]
    async fn unused_documents_are_dropped_and_their_hashes_stay() {
        let kept = Kept::default();
        kept.put("api/v1", String::new(), &document("core"));
        kept.put("apis/apps/v1", String::new(), &document("apps"));
        kept.put("apis/example.com/v1", "stamp".into(), &document("custom"));
        kept.put_whole(7, [document("json"), document("protobuf")]);
        let bytes = |path: &str| kept.get(path, "").map(|document| document.bytes);
        assert!(kept.get("apis/example.com/v1", "stamp").is_none(), "documents of custom kinds are not kept");
        let half = UNUSED / 2;
        let uses = async {
            for _ in 0..6 {
                tokio::time::sleep(half).await;
                assert_eq!(bytes("api/v1").as_deref(), Some(&b"core"[..]));
            }
        };
        tokio::select! { () = kept.run() => {}, () = uses => {} }
        assert!(bytes("apis/apps/v1").is_none() && kept.whole(7).is_none());
        assert_eq!(kept.hash("apis/apps/v1", "").as_deref(), Some("APPS"));
        assert_eq!(kept.hash("apis/example.com/v1", "stamp").as_deref(), Some("CUSTOM"));
        // Documents that come after everything was dropped are dropped, too.
        let again = async {
            tokio::time::sleep(UNUSED * 3).await;
            assert!(bytes("api/v1").is_none());
            kept.put("api/v1", String::new(), &document("again"));
            tokio::time::sleep(half).await;
            assert!(bytes("api/v1").is_some());
            tokio::time::sleep(UNUSED * 3).await;
            assert!(bytes("api/v1").is_none());
        };
        tokio::select! { () = kept.run() => {}, () = again => {} }
    }

    #[test]
    fn a_document_holds_for_its_definitions_only() {
        let kept = Kept::default();
        kept.put("api/v1", String::new(), &document("core"));
        kept.put_whole(7, [document("json"), document("protobuf")]);
        assert!(kept.get("api/v1", "other").is_none() && kept.hash("api/v1", "other").is_none());
        assert!(kept.whole(7).is_some() && kept.whole(8).is_none());
        kept.retain(&BTreeSet::new());
        assert!(kept.get("api/v1", "").is_none());
    }
}
