use super::*;
use crate::topology::machine::tests::machine;
use proptest::prelude::*;

fn mask(nodes: &str) -> NumaMask {
    NumaMask::of(nodes.chars().filter_map(|c| c.to_digit(10)))
}

/// `01!`: nodes 0 and 1, preferred. `*`: any nodes.
fn hints(text: &str) -> Hints {
    let hint = |word: &str| Hint {
        affinity: (!word.starts_with('*')).then(|| mask(word)),
        preferred: word.ends_with('!'),
    };
    (text != "-").then(|| text.split_whitespace().map(hint).collect())
}

fn merged(policy: TopologyPolicy, lists: &[&str], closest: bool) -> (Hint, bool) {
    let topology = machine(1, 2, 1, 1);
    let numa = NumaInfo { topology: &topology, prefer_closest: closest };
    let providers: Vec<ProviderHints> =
        lists.iter().enumerate().map(|(n, text)| [(n.to_string(), hints(text))].into()).collect();
    merge(policy, &numa, &providers)
}

#[test]
fn what_each_policy_chooses() {
    use TopologyPolicy::{BestEffort, Restricted, SingleNumaNode};
    let any = |preferred| Hint { affinity: None, preferred };
    let at = |nodes: &str, preferred| Hint { affinity: Some(mask(nodes)), preferred };
    for (what, lists, best, restricted, single) in [
        ("nobody cares", vec!["-"], (at("01", true), true), true, (any(true), true)),
        ("one node", vec!["0! 1! 01"], (at("0", true), true), true, (at("0", true), true)),
        ("both agree", vec!["0! 1! 01", "1! 01"], (at("1", true), true), true, (at("1", true), true)),
        ("they differ", vec!["0!", "1!"], (at("01", false), true), false, (any(false), false)),
        ("overlap", vec!["0! 01", "1! 01"], (at("0", false), true), false, (any(false), false)),
        ("two are needed", vec!["01!"], (at("01", true), true), true, (any(false), false)),
        ("it cannot be had", vec!["", "0!"], (at("0", false), true), false, (any(false), false)),
        ("preferred before narrow", vec!["01! 0"], (at("01", true), true), true, (any(false), false)),
    ] {
        assert_eq!(merged(BestEffort, &lists, false), best, "{what}");
        assert_eq!(merged(Restricted, &lists, false), (best.0, restricted), "{what}");
        assert_eq!(merged(SingleNumaNode, &lists, false), single, "{what}");
        assert_eq!(merged(TopologyPolicy::None, &lists, false), (any(true), true), "{what}");
    }
}

#[test]
fn nearer_nodes_are_better_if_asked_for() {
    let mut topology = machine(1, 4, 1, 1);
    topology.distances = [
        (0, vec![10, 30, 30, 12]),
        (1, vec![30, 10, 12, 30]),
        (2, vec![30, 12, 10, 30]),
        (3, vec![12, 30, 30, 10]),
    ]
    .into();
    let providers: [ProviderHints; 1] = [[("x".to_owned(), hints("01! 12! 03!"))].into()];
    for (prefer_closest, expected) in [(false, "01"), (true, "12")] {
        let numa = NumaInfo { topology: &topology, prefer_closest };
        // Nodes 1 and 2 are as near as 0 and 3; the lower mask of equals wins.
        let (best, _) = merge(TopologyPolicy::BestEffort, &numa, &providers);
        assert_eq!(best.affinity, Some(mask(expected)), "{prefer_closest}");
    }
}

/// The definition, word for word and without regard to cost: of all combinations the best by a total order.
fn reference(lists: &[Vec<Hint>], all: NumaMask) -> Hint {
    let mut candidates: Vec<(NumaMask, bool)> = Vec::new();
    let count: usize = lists.iter().map(Vec::len).product();
    for mut index in 0..count {
        let mut choice = Vec::new();
        for list in lists {
            choice.push(list[index % list.len()]);
            index /= list.len();
        }
        let masks: Vec<NumaMask> = choice.iter().filter_map(|h| h.affinity).collect();
        let merged = masks.iter().fold(all, |a, b| a.and(*b));
        let preferred = choice.iter().all(|h| h.preferred) && masks.iter().all(|m| *m == masks[0]);
        if merged.count() > 0 {
            candidates.push((merged, preferred));
        }
    }
    let narrowest = |list: &Vec<Hint>| list.iter().filter_map(|h| h.affinity.map(NumaMask::count)).min();
    let enough = lists.iter().filter_map(narrowest).max().unwrap_or(0);
    // Preferred ones first. Of others: as many nodes as are enough, then fewer (the more the better), then more.
    let rank = |(mask, preferred): &(NumaMask, bool)| {
        let count = mask.count();
        let bits = mask.nodes().fold(0u64, |bits, node| bits | 1 << node);
        match preferred {
            true => (0, 0, count, bits),
            false if count <= enough => (1, 0, enough - count, bits),
            false => (1, 1, count, bits),
        }
    };
    match candidates.iter().min_by_key(|c| rank(c)) {
        Some((mask, preferred)) => Hint { affinity: Some(*mask), preferred: *preferred },
        None => Hint { affinity: Some(all), preferred: false },
    }
}

proptest! {
    #[test]
    fn the_merge_agrees_with_its_definition(
        lists in prop::collection::vec(prop::collection::vec((0u64..16, any::<bool>()), 1..6), 1..4)
    ) {
        let topology = machine(1, 4, 1, 1);
        let numa = NumaInfo { topology: &topology, prefer_closest: false };
        let hint = |(bits, preferred): &(u64, bool)| Hint {
            affinity: (*bits != 0).then(|| NumaMask::of((0..4).filter(|n| bits & (1 << n) != 0))),
            preferred: *preferred,
        };
        let lists: Vec<Vec<Hint>> = lists.iter().map(|list| list.iter().map(hint).collect()).collect();
        prop_assert_eq!(merge_lists(&numa, &lists), reference(&lists, numa.all()));
    }
}
