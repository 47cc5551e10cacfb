//! Contract that every store must fulfil, whatever its backend. Takes a store that nobody else writes to.

use bytes::Bytes;
use ferrite_store::{Compare, Entry, Key, Op, Outcome, Revision, Snapshot, Store, StoreError, Txn, WatchEnd};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Everything the suite writes is below this.
pub const PREFIX: &str = "contract/";

/// One step of a random run. Keys are numbers, revisions count back from the current one.
#[derive(Debug, Clone)]
pub enum Step {
    Txn {
        compares: Vec<(u8, Cond)>,
        ops: Vec<(u8, Option<u8>)>,
        relaxed: bool,
    },
    Compact {
        back: u64,
    },
    /// Close and open again, where the store can.
    Reopen,
}

#[derive(Debug, Clone, Copy)]
pub enum Cond {
    Absent,
    Present,
    Modified { right: bool },
    Created { right: bool },
    Version { right: bool },
    Value(u8),
}

pub fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cond = prop_oneof![
        Just(Cond::Absent),
        Just(Cond::Present),
        any::<bool>().prop_map(|right| Cond::Modified { right }),
        any::<bool>().prop_map(|right| Cond::Created { right }),
        any::<bool>().prop_map(|right| Cond::Version { right }),
        (0..4u8).prop_map(Cond::Value),
    ];
    let compares = proptest::collection::vec((0..6u8, cond), 0..3);
    // A key at most once: a transaction has one answer for each.
    let ops = proptest::collection::btree_map(0..6u8, proptest::option::weighted(0.7, 0..4u8), 0..4)
        .prop_map(|ops| ops.into_iter().collect());
    let txn = (compares, ops, proptest::bool::weighted(0.3)).prop_map(|(compares, ops, relaxed)| Step::Txn {
        compares,
        ops,
        relaxed,
    });
    let step = prop_oneof![20 => txn, 1 => (0..8u64).prop_map(|back| Step::Compact { back }), 1 => Just(Step::Reopen)];
    proptest::collection::vec(step, 1..60)
}

/// A key's entry in the model: value, created, modified, version.
type Row = (u8, u64, u64, u64);

/// The simplest store there could be: a copy of everything for each revision.
#[derive(Debug, Default)]
struct Model {
    base: u64,
    states: Vec<BTreeMap<u8, Row>>,
    changes: Vec<(u64, u8, Option<Row>, Option<Row>)>,
    compacted: u64,
}

impl Model {
    fn new(base: u64) -> Self {
        Self { base, states: vec![BTreeMap::new()], compacted: base, ..Self::default() }
    }

    fn revision(&self) -> u64 {
        self.base + self.states.len() as u64 - 1
    }

    fn now(&self) -> &BTreeMap<u8, Row> {
        self.states.last().expect("a model begins with one state")
    }

    fn holds(&self, key: u8, cond: Cond) -> bool {
        let row = self.now().get(&key);
        match cond {
            Cond::Absent => row.is_none(),
            Cond::Present => row.is_some(),
            // An absent key has zero for all three, so "right" always holds and "wrong" never does.
            Cond::Modified { right } | Cond::Created { right } | Cond::Version { right } => right,
            Cond::Value(value) => row.is_some_and(|r| r.0 == value),
        }
    }

    fn compare(&self, key: u8, cond: Cond) -> Compare {
        let row = self.now().get(&key).copied().unwrap_or_default();
        let off = |value: u64, right: bool| if right { value } else { value + 1 };
        match cond {
            Cond::Absent => Compare::Absent(name(key)),
            Cond::Present => Compare::Present(name(key)),
            Cond::Modified { right } => Compare::ModifiedAt(name(key), Revision(off(row.2, right))),
            Cond::Created { right } => Compare::CreatedAt(name(key), Revision(off(row.1, right))),
            Cond::Version { right } => Compare::VersionIs(name(key), off(row.3, right)),
            Cond::Value(value) => Compare::ValueIs(name(key), Bytes::from(vec![value])),
        }
    }

    fn apply(&mut self, ops: &[(u8, Option<u8>)]) {
        let revision = self.revision() + 1;
        let mut next = self.now().clone();
        let before = self.changes.len();
        for (key, value) in ops {
            let previous = next.get(key).copied();
            let row = value.map(|value| match previous {
                Some((_, created, _, version)) => (value, created, revision, version + 1),
                None => (value, revision, revision, 1),
            });
            match row {
                Some(row) => drop(next.insert(*key, row)),
                None => drop(next.remove(key)),
            }
            if row.is_some() || previous.is_some() {
                self.changes.push((revision, *key, row, previous));
            }
        }
        if self.changes.len() > before {
            self.states.push(next);
        }
    }
}

fn name(key: u8) -> Key {
    Key::from(&format!("{PREFIX}{key}"))
}

fn number(key: &Key) -> u8 {
    let digits = std::str::from_utf8(&key.as_bytes()[PREFIX.len()..]).expect("keys of the suite are text");
    digits.parse().expect("keys of the suite are numbers")
}

fn row(entry: &Arc<Entry>) -> Row {
    (entry.value[0], entry.created.0, entry.modified.0, entry.version)
}

fn rows(snapshot: &Snapshot) -> BTreeMap<u8, Row> {
    snapshot.range(PREFIX.as_bytes(), None).map(|(k, e)| (number(k), row(e))).collect()
}

/// Does the steps on a store and on the model, and compares them at every revision. `reopen` closes and opens.
pub async fn agrees_with_the_model(mut store: Store, steps: &[Step], mut reopen: impl FnMut(Store) -> Store) {
    let mut model = Model::new(store.snapshot().revision().0);
    for step in steps {
        match step {
            Step::Txn { compares, ops, relaxed } => {
                let mut txn = Txn::default();
                for (key, cond) in compares {
                    txn = txn.when(model.compare(*key, *cond));
                }
                for (key, value) in ops {
                    txn = txn.then(match value {
                        Some(value) => Op::put(name(*key), Bytes::from(vec![*value])),
                        None => Op::Delete { key: name(*key) },
                    });
                }
                if *relaxed {
                    txn = txn.relaxed();
                }
                let failed = compares.iter().find(|(key, cond)| !model.holds(*key, *cond));
                let outcome = store.commit(txn).await.expect("nothing is wrong with the store");
                match (failed, outcome) {
                    (None, Outcome::Committed { revision }) => {
                        model.apply(ops);
                        assert_eq!(revision.0, model.revision());
                    }
                    (Some((key, _)), Outcome::Conflict { revision, current }) => {
                        assert_eq!(revision.0, model.revision());
                        assert_eq!(current.as_ref().map(row), model.now().get(key).copied());
                    }
                    (expected, got) => panic!("{expected:?} but {got:?}"),
                }
                assert_eq!(&rows(&store.snapshot()), model.now());
            }
            Step::Compact { back } => {
                let at = model.revision().saturating_sub(*back).max(model.compacted);
                store.compact(Revision(at)).expect("the revision is not in the future");
                model.compacted = at;
            }
            Step::Reopen => store = reopen(store),
        }
    }
    let current = model.revision();
    assert_eq!(store.snapshot().revision().0, current);
    // A store that was opened again may remember more or less than the model: the data that it returns has
    // to be right.
    for revision in model.base..=current {
        match store.snapshot_at(Revision(revision)) {
            Ok(past) => {
                assert_eq!(rows(&past), model.states[(revision - model.base) as usize], "at {revision}");
                let mut watch = store.watch(PREFIX.as_bytes(), Revision(revision)).expect("as the snapshot");
                let seen: Vec<_> = watch.ready().expect("as the snapshot").iter().map(change).collect();
                let expected: Vec<_> = model.changes.iter().filter(|c| c.0 > revision).copied().collect();
                assert_eq!(seen, expected, "after {revision}");
                assert_eq!(watch.position().0, current);
            }
            Err(StoreError::Compacted { .. }) => {
                let end = store.watch(PREFIX.as_bytes(), Revision(revision)).expect_err("as the snapshot");
                assert!(matches!(end, WatchEnd::Compacted { .. }));
            }
            Err(other) => panic!("at {revision}: {other}"),
        }
    }
    assert!(matches!(store.snapshot_at(Revision(current + 1)), Err(StoreError::Future { .. })));
}

fn change(change: &ferrite_store::Change) -> (u64, u8, Option<Row>, Option<Row>) {
    let previous = change.previous.as_ref().map(row);
    (change.revision.0, number(&change.key), change.entry.as_ref().map(row), previous)
}

/// One operation of a client and its result, with the ticks of the request and the response.
#[derive(Debug)]
struct Seen {
    asked: u64,
    answered: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Replaced the value written at one revision by a new one.
    Swapped {
        from: Revision,
        to: Revision,
    },
    /// Expected one revision and was shown another.
    Refused {
        expected: Revision,
        current: Revision,
        at: Revision,
    },
    Read {
        at: Revision,
        modified: Revision,
    },
}

/// Clients swap one key at the same time; their observations have to fit one order that respects real time.
pub async fn concurrent_swaps_are_linearizable(store: Arc<Store>, clients: usize, rounds: usize) {
    let key = Key::from(&format!("{PREFIX}swapped"));
    let first = store.commit(Txn::default().then(Op::put(key.clone(), Bytes::from("0")))).await.unwrap();
    let clock = Arc::new(AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..clients {
        let (store, key, clock) = (Arc::clone(&store), key.clone(), Arc::clone(&clock));
        tasks.spawn(async move {
            let tick = || clock.fetch_add(1, Ordering::SeqCst);
            let mut seen = Vec::new();
            for round in 0..rounds {
                let asked = tick();
                let snapshot = store.latest().await.unwrap();
                let modified = snapshot.get(key.as_bytes()).unwrap().modified;
                let kind = Kind::Read { at: snapshot.revision(), modified };
                seen.push(Seen { asked, answered: tick(), kind });
                let value = Bytes::from(format!("{client}/{round}"));
                let txn = Txn::default()
                    .when(Compare::ModifiedAt(key.clone(), modified))
                    .then(Op::put(key.clone(), value));
                let asked = tick();
                let kind = match store.commit(txn).await.unwrap() {
                    Outcome::Committed { revision } => Kind::Swapped { from: modified, to: revision },
                    Outcome::Conflict { revision, current } => {
                        Kind::Refused { expected: modified, current: current.unwrap().modified, at: revision }
                    }
                };
                seen.push(Seen { asked, answered: tick(), kind });
            }
            seen
        });
    }
    let all: Vec<Seen> = tasks.join_all().await.into_iter().flatten().collect();
    let mut swaps: Vec<(Revision, Revision)> = all
        .iter()
        .filter_map(|s| match s.kind {
            Kind::Swapped { from, to } => Some((to, from)),
            _ => None,
        })
        .collect();
    swaps.sort_unstable();
    let mut last = first.revision();
    for (to, from) in &swaps {
        assert_eq!(*from, last, "a swap replaced what was not there any more");
        last = *to;
    }
    let order: Vec<Revision> = std::iter::once(first.revision()).chain(swaps.iter().map(|s| s.0)).collect();
    let value_at = |at: Revision| order[order.partition_point(|r| *r <= at) - 1];
    for seen in &all {
        match seen.kind {
            Kind::Read { at, modified } => assert_eq!(modified, value_at(at)),
            Kind::Refused { expected, current, at } => {
                assert_eq!(current, value_at(at));
                assert_ne!(current, expected, "a swap was refused although its condition held");
            }
            Kind::Swapped { .. } => {}
        }
    }
    // A request made after a response sees at least the revision of that response.
    let revision = |seen: &Seen| match seen.kind {
        Kind::Swapped { to, .. } => to,
        Kind::Refused { at, .. } | Kind::Read { at, .. } => at,
    };
    let mut by_answer: Vec<&Seen> = all.iter().collect();
    by_answer.sort_by_key(|s| s.answered);
    let mut newest = Vec::with_capacity(by_answer.len());
    for seen in &by_answer {
        newest.push(newest.last().copied().unwrap_or(Revision(0)).max(revision(seen)));
    }
    for seen in &all {
        let before = by_answer.partition_point(|s| s.answered < seen.asked);
        if before > 0 {
            assert!(revision(seen) >= newest[before - 1], "{seen:?} does not see {:?}", newest[before - 1]);
        }
    }
}

/// A watch that waits sees every change of its prefix once, in order, with the entry before it.
pub async fn a_watch_sees_everything_in_order(store: Arc<Store>, writers: usize, each: usize) {
    let start = store.snapshot().revision();
    let mut watch = store.watch(PREFIX.as_bytes(), start).unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..writers {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            for i in 0..each {
                let key = Key::from(&format!("{PREFIX}{writer}"));
                let other = Key::from(&format!("elsewhere/{writer}"));
                let value = Bytes::from(i.to_string());
                store.commit(Txn::default().then(Op::put(key, value.clone()))).await.unwrap();
                store.commit(Txn::default().then(Op::put(other, value))).await.unwrap();
            }
        });
    }
    let mut next = vec![0; writers];
    let mut last = start;
    let mut seen = 0;
    while seen < writers * each {
        for change in watch.next().await.unwrap() {
            let writer = usize::from(number(&change.key));
            let value: usize =
                std::str::from_utf8(&change.entry.as_ref().unwrap().value).unwrap().parse().unwrap();
            assert_eq!(value, next[writer], "a gap or a repetition");
            assert_eq!(change.previous.is_some(), value > 0);
            assert!(change.revision > last);
            last = change.revision;
            next[writer] += 1;
            seen += 1;
        }
    }
    tasks.join_all().await;
    assert_eq!(store.snapshot().count(PREFIX.as_bytes()), writers);
}

/// Keys attached to a lease go with it, at one revision, and not without it.
pub async fn a_lease_takes_its_keys_along(store: Arc<Store>) {
    let missing = ferrite_store::LeaseId(987_654);
    let put = |key: &str, lease| Op::Put {
        key: Key::from(&format!("{PREFIX}{key}")),
        value: Bytes::from("x"),
        lease,
    };
    let refused = store.commit(Txn::default().then(put("1", missing))).await;
    assert_eq!(refused, Err(StoreError::NoSuchLease(missing)));
    let far = 1 << 33;
    let (one, two) = (store.grant(far).await.unwrap(), store.grant(far).await.unwrap());
    for (key, lease) in [("1", one), ("2", one), ("3", two)] {
        store.commit(Txn::default().then(put(key, lease))).await.unwrap();
    }
    // Written again without the lease: it is no longer the lease's.
    store.commit(Txn::default().then(put("2", ferrite_store::LeaseId::NONE))).await.unwrap();
    let before = store.snapshot().revision();
    let after = store.revoke(one).await.unwrap().revision();
    assert_eq!(after, before.next());
    let left: Vec<u8> = store.snapshot().range(PREFIX.as_bytes(), None).map(|(k, _)| number(k)).collect();
    assert_eq!(left, [2, 3]);
    assert_eq!(store.revoke(one).await, Err(StoreError::NoSuchLease(one)));
}
