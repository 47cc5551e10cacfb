//! The Secrets that are read when Ingresses name more of them than there is room for. No I/O.

use ferrite_client::ObjectKey;
use std::collections::{BTreeMap, BTreeSet};

/// Chooses up to `most` of the named Secrets. Namespaces get equal shares, and the room that one does not need goes to the
/// others: Ingresses of one namespace take nothing away from those of another. Of a namespace with more than its share,
/// the Secrets that are `there` come first.
pub(crate) fn chosen<'a>(
    named: &BTreeSet<&'a ObjectKey>,
    most: usize,
    there: impl Fn(&ObjectKey) -> bool,
) -> BTreeSet<&'a ObjectKey> {
    if named.len() <= most {
        return named.clone();
    }
    let mut namespaces: BTreeMap<&str, Vec<&'a ObjectKey>> = BTreeMap::new();
    for key in named {
        namespaces.entry(&key.namespace).or_default().push(key);
    }
    let mut namespaces: Vec<Vec<&ObjectKey>> = namespaces.into_values().collect();
    // Those that need least come first, and leave the rest of their share to the others.
    namespaces.sort_by_key(Vec::len);
    let (mut room, mut left) = (most, namespaces.len());
    let mut chosen = BTreeSet::new();
    for mut keys in namespaces {
        let share = room.div_ceil(left.max(1)).min(room).min(keys.len());
        keys.sort_by_key(|key| !there(key));
        chosen.extend(keys.into_iter().take(share));
        room -= share;
        left -= 1;
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(texts: &[(&str, std::ops::Range<usize>)]) -> BTreeSet<ObjectKey> {
        let of = |(namespace, numbers): &(&str, std::ops::Range<usize>)| {
            let namespace = (*namespace).to_owned();
            numbers.clone().map(move |n| ObjectKey::new(namespace.as_str(), format!("s{n:04}")))
        };
        texts.iter().flat_map(of).collect()
    }

    #[test]
    fn namespaces_share_the_room() {
        type Row<'a> = (&'a str, &'a [(&'a str, std::ops::Range<usize>)], usize, &'a [(&'a str, usize)]);
        let rows: [Row; 5] = [
            ("room for all", &[("a", 0..3), ("b", 0..2)], 10, &[("a", 3), ("b", 2)]),
            (
                "one takes nothing from another",
                &[("aaa", 0..1000), ("zzz", 0..2)],
                1000,
                &[("aaa", 998), ("zzz", 2)],
            ),
            ("whatever its name", &[("aaa", 0..2), ("zzz", 0..1000)], 1000, &[("aaa", 2), ("zzz", 998)]),
            (
                "equal shares",
                &[("a", 0..50), ("b", 0..60), ("c", 0..1)],
                21,
                &[("a", 10), ("b", 10), ("c", 1)],
            ),
            ("more namespaces than room", &[("a", 0..1), ("b", 0..1), ("c", 0..1)], 2, &[("a", 1), ("b", 1)]),
        ];
        for (name, named, most, want) in rows {
            let named = keys(named);
            let named: BTreeSet<&ObjectKey> = named.iter().collect();
            let chosen = chosen(&named, most, |_| false);
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            for key in &chosen {
                *counts.entry(&key.namespace).or_default() += 1;
            }
            assert_eq!(counts, want.iter().copied().collect(), "{name}");
        }
    }

    #[test]
    fn secrets_that_are_there_come_first() {
        let named = keys(&[("a", 0..5)]);
        let named: BTreeSet<&ObjectKey> = named.iter().collect();
        let chosen = chosen(&named, 2, |key| key.name == "s0003");
        let names: Vec<&str> = chosen.iter().map(|key| key.name.as_str()).collect();
        assert_eq!(names, ["s0000", "s0003"]);
    }
}
