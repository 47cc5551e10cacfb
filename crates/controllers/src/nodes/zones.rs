//! How fast silent nodes may lose their pods: slowly, and not at all when it is probably we who are cut off.

use std::collections::BTreeMap;

/// Evicted nodes per second in a zone that is well, or entirely lost among others that are not.
const NORMAL_RATE: f64 = 0.1;
/// The same in a large zone that is partly lost.
const REDUCED_RATE: f64 = 0.01;
/// A zone with more nodes is large.
const LARGE: usize = 50;
/// Share of lost nodes from which a zone counts as partly lost.
const UNHEALTHY_SHARE: f64 = 0.55;

/// A zone's nodes: how many answer and how many do not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Zone {
    pub(super) ready: usize,
    pub(super) lost: usize,
}

impl Zone {
    fn is_lost(self) -> bool {
        self.ready == 0 && self.lost > 0
    }

    fn is_partly_lost(self) -> bool {
        let total = self.ready + self.lost;
        self.lost > 2 && self.lost as f64 / total as f64 >= UNHEALTHY_SHARE
    }
}

/// Evictions per second allowed in the zone named `name`.
pub(super) fn rate(zones: &BTreeMap<String, Zone>, name: &str) -> f64 {
    if zones.values().all(|zone| zone.is_lost()) {
        return 0.0;
    }
    let zone = zones.get(name).copied().unwrap_or_default();
    if zone.is_lost() || !zone.is_partly_lost() {
        NORMAL_RATE
    } else if zone.ready + zone.lost > LARGE {
        REDUCED_RATE
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        let zone = |ready, lost| Zone { ready, lost };
        for (what, a, b, expected) in [
            ("one lost node", zone(3, 1), zone(3, 0), NORMAL_RATE),
            ("a zone lost among others", zone(0, 5), zone(3, 0), NORMAL_RATE),
            ("everything lost", zone(0, 1), zone(0, 3), 0.0),
            ("small zone partly lost", zone(2, 3), zone(3, 0), 0.0),
            ("large zone partly lost", zone(20, 40), zone(3, 0), REDUCED_RATE),
            ("two of three are not many", zone(1, 2), zone(3, 0), NORMAL_RATE),
        ] {
            let zones = BTreeMap::from([("a".to_owned(), a), ("b".to_owned(), b)]);
            assert_eq!(rate(&zones, "a"), expected, "{what}");
        }
        let only = BTreeMap::from([("a".to_owned(), zone(0, 1))]);
        assert_eq!(rate(&only, "a"), 0.0, "the only node of a cluster keeps its pods");
    }
}
