//! The index against a plain filter.

use super::*;
use bytes::Bytes;
use proptest::prelude::*;

/// The value is the field; `?` cannot be read.
fn field<'a>(_: &str, _: &'a Key, entry: &'a Entry) -> Option<&'a [u8]> {
    (&entry.value[..] != b"?").then_some(&entry.value[..])
}

/// The last part of the key.
fn name<'a>(_: &str, key: &'a Key, _: &'a Entry) -> Option<&'a [u8]> {
    key.as_bytes().rsplit(|b| *b == b'/').next()
}

fn entry(value: &str) -> Arc<Entry> {
    Arc::new(Entry {
        value: Bytes::copy_from_slice(value.as_bytes()),
        created: Revision(1),
        modified: Revision(1),
        version: 1,
        lease: crate::LeaseId::NONE,
        plain: crate::Plain::default(),
    })
}

fn keys() -> impl Strategy<Value = String> {
    "/(a|b|ab)/(|x|y|xy)(/(n|m|nm))?"
}

fn triggers() -> impl Strategy<Value = Option<Trigger>> {
    let value = "[pq]?".prop_map(String::into_bytes);
    prop_oneof![
        Just(None),
        value.prop_map(|value| Some(Trigger { field: "field", value, read: field })),
        "[nmxy]".prop_map(|value| Some(Trigger { field: "name", value: value.into_bytes(), read: name })),
    ]
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let value = || prop_oneof![Just(None), "[pq?]?".prop_map(|value| Some(entry(&value)))];
    let change = (keys(), value(), value()).prop_map(|(key, entry, previous)| Change {
        revision: Revision(1),
        key: Key::from(&key),
        entry,
        previous,
    });
    proptest::collection::vec(change, 0..12)
}

proptest! {
    #[test]
    fn a_subscriber_gets_what_a_plain_filter_lets_through(
        watchers in proptest::collection::vec(("(/|/a|/a/|/ab/|/a/x|/a/x/|/b/y/n)?", triggers(), any::<bool>()), 0..20),
        batches in proptest::collection::vec(changes(), 1..5),
    ) {
        let mut index = Subscribers::default();
        let mut subscriptions = Vec::new();
        for (prefix, trigger, stays) in watchers {
            let subscription = index.add(prefix.as_bytes(), trigger);
            if stays { subscriptions.push(subscription) } else { index.remove(&subscription) }
        }
        for (number, batch) in batches.iter().enumerate() {
            let woken = index.dispatch(batch, Revision(number as u64 + 1));
            for subscription in &subscriptions {
                let wanted: Vec<&Change> = batch.iter().filter(|change| subscription.wants(change)).collect();
                let taken = subscription.mailbox.take().expect("nothing is lost");
                let got: Vec<&Change> = taken.iter().flat_map(|batch| batch.iter()).collect();
                prop_assert_eq!(&got, &wanted);
                let rung = woken.iter().filter(|mailbox| Arc::ptr_eq(mailbox, &subscription.mailbox)).count();
                prop_assert_eq!(rung, usize::from(!wanted.is_empty()), "only whom it concerns, and once");
            }
        }
        subscriptions.iter().for_each(|subscription| index.remove(subscription));
        prop_assert!(index.buckets.is_empty());
    }
}

#[test]
fn a_mailbox_is_bounded() {
    let mut index = Subscribers::default();
    let subscription = index.add(b"/a", None);
    let change =
        Change { revision: Revision(1), key: Key::from("/a/x"), entry: Some(entry("p")), previous: None };
    for _ in 0..MAX_WAITING + 1 {
        index.dispatch(std::slice::from_ref(&change), Revision(1));
    }
    assert!(subscription.mailbox.take().is_none());
    assert!(subscription.mailbox.waiting().batches.is_empty());
    subscription.mailbox.clear();
    index.dispatch(&[change], Revision(2));
    assert_eq!(subscription.mailbox.take().map(|batches| batches.len()), Some(1));
}

#[test]
fn a_commit_meets_no_strangers() {
    static READS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    fn counted<'a>(_: &str, _: &'a Key, entry: &'a Entry) -> Option<&'a [u8]> {
        READS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Some(&entry.value)
    }
    let mut index = Subscribers::default();
    let nodes: Vec<Subscription> = (0..1000)
        .map(|node| {
            let value = format!("node-{node}").into_bytes();
            index.add(b"/pods/", Some(Trigger { field: "spec.nodeName", value, read: counted }))
        })
        .collect();
    let change = Change {
        revision: Revision(1),
        key: Key::from("/pods/x"),
        entry: Some(entry("node-7")),
        previous: None,
    };
    let woken = index.dispatch(&[change], Revision(1));
    assert_eq!(woken.len(), 1);
    assert!(Arc::ptr_eq(&woken[0], &nodes[7].mailbox));
    assert_eq!(READS.load(std::sync::atomic::Ordering::Relaxed), 1, "the field is read once for all");
}
