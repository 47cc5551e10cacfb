//! A snapshot in the form etcd's tools expect: a bbolt database with etcd's buckets, and a SHA-256 behind it.
//!
//! The file is planned first (which entry goes to which page, by size alone) and then written front to back, so
//! that no more than a page is in memory. A page is 4096 bytes, or a multiple of it where one entry needs more:
//!
//! ```text
//! 0, 1  meta: where the root is     3..   leaves and branches of each bucket
//! 2     no free pages               last  the root: a leaf that names the buckets
//! ```
//! Integers are little-endian as on the machines etcd runs on; revisions inside keys are big-endian.

use crate::proto::mvccpb::KeyValue;
use crate::server::convert::key_value;
use ferrite_store::{Entry, Key, LeaseId, LeaseState, Snapshot};
use prost::Message;
use ring::digest;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

const PAGE: usize = 4096;
const PAGE_HEADER: usize = 16;
const ELEMENT: usize = 16;
const BRANCH: u16 = 0x01;
const LEAF: u16 = 0x02;
const META: u16 = 0x04;
const FREELIST: u16 = 0x10;
const BUCKET: u32 = 0x01;
const MAGIC: u32 = 0xED0C_DAED;
const VERSION: u32 = 2;
/// A page's count has 16 bits.
const MAX_ITEMS: usize = 0xFFF0;

/// Where a value comes from. Entries are encoded when their page is written.
enum Value {
    Entry(Key, Arc<Entry>),
    Raw(Vec<u8>),
    /// A bucket whose tree begins at this page; zero is an empty one, kept in place.
    Bucket(u64),
}

impl Value {
    fn len(&self) -> usize {
        match self {
            Self::Entry(key, entry) => message(key, entry).encoded_len(),
            Self::Raw(bytes) => bytes.len(),
            Self::Bucket(0) => 16 + PAGE_HEADER,
            Self::Bucket(_) => 16,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Entry(key, entry) => out.extend_from_slice(&message(key, entry).encode_to_vec()),
            Self::Raw(bytes) => out.extend_from_slice(bytes),
            Self::Bucket(root) => {
                out.extend_from_slice(&root.to_le_bytes());
                out.extend_from_slice(&0u64.to_le_bytes());
                if *root == 0 {
                    out.extend_from_slice(&page_header(0, LEAF, 0, 0));
                }
            }
        }
    }

    fn flags(&self) -> u32 {
        if matches!(self, Self::Bucket(_)) { BUCKET } else { 0 }
    }
}

fn message(key: &Key, entry: &Entry) -> KeyValue {
    key_value(key, entry)
}

struct Item {
    key: Vec<u8>,
    value: Value,
}

/// One page, or several in a row, as planned.
enum Page {
    Leaf { id: u64, pages: u64, tree: usize, items: Range<usize> },
    Branch { id: u64, children: Vec<(Vec<u8>, u64)> },
}

/// A whole file, planned.
pub(crate) struct Database {
    trees: Vec<Vec<Item>>,
    pages: Vec<Page>,
    root: u64,
    high_water: u64,
    revision: u64,
}

impl Database {
    pub fn plan(snapshot: &Snapshot, leases: &[(LeaseId, LeaseState)]) -> Self {
        let revision = snapshot.revision().0;
        let mut plan = Self { trees: Vec::new(), pages: Vec::new(), root: 0, high_water: 3, revision };
        let compacted =
            Item { key: b"finishedCompactRev".to_vec(), value: Value::Raw(revision_key(revision, 0)) };
        let index =
            Item { key: b"consistent_index".to_vec(), value: Value::Raw(revision.to_be_bytes().to_vec()) };
        let scheduled =
            Item { key: b"scheduledCompactRev".to_vec(), value: Value::Raw(revision_key(revision, 0)) };
        let leases = leases.iter().map(|(id, state)| Item {
            key: id.0.to_be_bytes().to_vec(),
            value: Value::Raw(lease(*id, state)),
        });
        let mut buckets: BTreeMap<&str, u64> =
            ["alarm", "auth", "authRoles", "authUsers", "cluster", "members", "members_removed"]
                .map(|name| (name, 0))
                .into();
        buckets.insert("key", plan.tree(by_revision(snapshot)));
        buckets.insert("lease", plan.tree(leases.collect()));
        buckets.insert("meta", plan.tree(vec![index, compacted, scheduled]));
        let names = buckets
            .into_iter()
            .map(|(name, root)| Item { key: name.as_bytes().to_vec(), value: Value::Bucket(root) });
        plan.root = plan.tree(names.collect());
        plan
    }

    /// The bytes there will be, with the checksum.
    pub fn len(&self) -> u64 {
        self.high_water * PAGE as u64 + digest::SHA256_OUTPUT_LEN as u64
    }

    /// Plans the pages of one tree of sorted items. Returns its root; zero when it is empty.
    fn tree(&mut self, items: Vec<Item>) -> u64 {
        let tree = self.trees.len();
        let mut level: Vec<(Vec<u8>, u64)> = Vec::new();
        let (mut start, mut size) = (0, PAGE_HEADER);
        for at in 0..=items.len() {
            let length = items.get(at).map_or(0, |i| ELEMENT + i.key.len() + i.value.len());
            let full = size + length > PAGE || at - start >= MAX_ITEMS;
            if at > start && (full || at == items.len()) {
                let pages = size.div_ceil(PAGE) as u64;
                let id = self.take(pages);
                level.push((items[start].key.clone(), id));
                self.pages.push(Page::Leaf { id, pages, tree, items: start..at });
                (start, size) = (at, PAGE_HEADER);
            }
            size += length;
        }
        self.trees.push(items);
        while level.len() > 1 {
            let mut above = Vec::new();
            let mut rest = level.into_iter().peekable();
            while let Some(first) = rest.next() {
                let mut size = PAGE_HEADER + ELEMENT + first.0.len();
                let mut children = vec![first];
                while let Some(next) = rest.next_if(|(key, _)| size + ELEMENT + key.len() <= PAGE) {
                    size += ELEMENT + next.0.len();
                    children.push(next);
                }
                let id = self.take(1);
                above.push((children[0].0.clone(), id));
                self.pages.push(Page::Branch { id, children });
            }
            level = above;
        }
        level.first().map_or(0, |(_, id)| *id)
    }

    fn take(&mut self, pages: u64) -> u64 {
        let id = self.high_water;
        self.high_water += pages;
        id
    }

    /// Gives the file to `sink` piece by piece, until that answers no.
    pub fn write(&self, mut sink: impl FnMut(Vec<u8>) -> bool) {
        let mut hash = digest::Context::new(&digest::SHA256);
        let mut give = |bytes: Vec<u8>| {
            hash.update(&bytes);
            sink(bytes)
        };
        let head = [self.meta(0), self.meta(1), padded(page_header(2, FREELIST, 0, 0).to_vec(), 1)];
        for page in head.into_iter().chain(self.pages.iter().map(|p| self.page(p))) {
            if !give(page) {
                return;
            }
        }
        sink(hash.finish().as_ref().to_vec());
    }

    fn meta(&self, id: u64) -> Vec<u8> {
        let mut meta = Vec::with_capacity(64);
        for word in [MAGIC, VERSION, PAGE as u32, 0] {
            meta.extend_from_slice(&word.to_le_bytes());
        }
        // Root page and sequence, free list, high water mark, transaction.
        for word in [self.root, 0, 2, self.high_water, id] {
            meta.extend_from_slice(&word.to_le_bytes());
        }
        let sum = meta
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        meta.extend_from_slice(&sum.to_le_bytes());
        let mut page = page_header(id, META, 0, 0).to_vec();
        page.extend_from_slice(&meta);
        padded(page, 1)
    }

    fn page(&self, page: &Page) -> Vec<u8> {
        match page {
            Page::Leaf { id, pages, tree, items } => {
                let items = &self.trees[*tree][items.clone()];
                let mut out = page_header(*id, LEAF, items.len(), pages - 1).to_vec();
                let mut data = Vec::new();
                for (at, item) in items.iter().enumerate() {
                    // Counted from the element itself to its key.
                    let position = ELEMENT * (items.len() - at) + data.len();
                    data.extend_from_slice(&item.key);
                    let before = data.len();
                    item.value.put(&mut data);
                    let lengths = [position, item.key.len(), data.len() - before];
                    out.extend_from_slice(&item.value.flags().to_le_bytes());
                    lengths.iter().for_each(|n| out.extend_from_slice(&(*n as u32).to_le_bytes()));
                }
                out.extend_from_slice(&data);
                padded(out, *pages)
            }
            Page::Branch { id, children } => {
                let mut out = page_header(*id, BRANCH, children.len(), 0).to_vec();
                let mut data = Vec::new();
                for (at, (key, child)) in children.iter().enumerate() {
                    let position = ELEMENT * (children.len() - at) + data.len();
                    data.extend_from_slice(key);
                    out.extend_from_slice(&(position as u32).to_le_bytes());
                    out.extend_from_slice(&(key.len() as u32).to_le_bytes());
                    out.extend_from_slice(&child.to_le_bytes());
                }
                out.extend_from_slice(&data);
                padded(out, 1)
            }
        }
    }

    #[cfg(test)]
    fn bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        self.write(|piece| {
            all.extend_from_slice(&piece);
            true
        });
        all
    }

    pub fn revision(&self) -> u64 {
        self.revision
    }
}

fn page_header(id: u64, flags: u16, count: usize, overflow: u64) -> [u8; PAGE_HEADER] {
    let mut out = [0; PAGE_HEADER];
    out[..8].copy_from_slice(&id.to_le_bytes());
    out[8..10].copy_from_slice(&flags.to_le_bytes());
    out[10..12].copy_from_slice(&(count as u16).to_le_bytes());
    out[12..].copy_from_slice(&(overflow as u32).to_le_bytes());
    out
}

fn padded(mut page: Vec<u8>, pages: u64) -> Vec<u8> {
    page.resize(pages as usize * PAGE, 0);
    page
}

/// A revision in etcd's format: the transaction, and the number of the change within it.
fn revision_key(main: u64, sub: u64) -> Vec<u8> {
    let mut key = main.to_be_bytes().to_vec();
    key.push(b'_');
    key.extend_from_slice(&sub.to_be_bytes());
    key
}

/// Every key by the revision that last changed it.
fn by_revision(snapshot: &Snapshot) -> Vec<Item> {
    let mut entries: Vec<(Key, Arc<Entry>)> =
        snapshot.range(b"", None).map(|(k, e)| (k.clone(), Arc::clone(e))).collect();
    entries.sort_by_key(|(_, e)| e.modified);
    let (mut last, mut sub) = (0, 0);
    let mut items = Vec::with_capacity(entries.len());
    for (key, entry) in entries {
        let main = entry.modified.0;
        sub = if main == last { sub + 1 } else { 0 };
        last = main;
        items.push(Item { key: revision_key(main, sub), value: Value::Entry(key, entry) });
    }
    items
}

/// A lease as etcd keeps it: its identifier and the seconds it was granted for.
fn lease(id: LeaseId, state: &LeaseState) -> Vec<u8> {
    #[derive(Clone, PartialEq, prost::Message)]
    struct Stored {
        #[prost(int64, tag = "1")]
        id: i64,
        #[prost(int64, tag = "2")]
        ttl: i64,
    }
    let left = state.expires_at.saturating_sub(ferrite_store::now_seconds());
    let ttl = if state.ttl > 0 { state.ttl } else { left.max(1) };
    Stored { id: id.0, ttl: i64::try_from(ttl).unwrap_or(i64::MAX) }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use ferrite_store::{Op, Store, Txn};

    #[tokio::test]
    async fn the_plan_says_how_long_the_file_will_be() {
        let store = Store::memory();
        for (i, size) in [0, 10, 100, 4000, 4096, 5000, 20_000, 1].into_iter().enumerate() {
            let op = Op::put(Key::from(&format!("k{i}")), Bytes::from(vec![7; size]));
            store.commit(Txn::default().then(op)).await.unwrap();
            let plan = Database::plan(&store.snapshot(), &[]);
            assert_eq!(plan.bytes().len() as u64, plan.len());
            assert_eq!(plan.len() % 512, 32, "how etcd's tools know that a checksum follows");
        }
    }
}
