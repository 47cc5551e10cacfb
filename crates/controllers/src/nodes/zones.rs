//! Limits the rate at which silent nodes lose their pods: slow, and zero when probably our own network is
//! cut off.

use std::collections::BTreeMap;

/// The rates at which silent nodes lose their pods.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EvictionRates {
    /// Evicted nodes per second in a zone that is well, or entirely lost among others that are not.
    pub normal: f64,
    /// The same in a large zone that is partly lost.
    pub reduced: f64,
    /// A zone with more nodes is large.
    pub large: usize,
    /// Share of lost nodes from which a zone counts as partly lost.
    pub unhealthy_share: f64,
}

impl Default for EvictionRates {
    fn default() -> Self {
        Self { normal: 0.1, reduced: 0.01, large: 50, unhealthy_share: 0.55 }
    }
}

/// The numbers of a zone's nodes that answer and that do not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Zone {
    pub(super) ready: usize,
    pub(super) lost: usize,
}

impl Zone {
    fn is_lost(self) -> bool {
        self.ready == 0 && self.lost > 0
    }

    fn is_partly_lost(self, share: f64) -> bool {
        let total = self.ready + self.lost;
        self.lost > 2 && self.lost as f64 / total as f64 >= share
    }
}

/// Returns true if no zone has a node that answers.
pub(super) fn are_all_lost(zones: &BTreeMap<String, Zone>) -> bool {
    zones.values().all(|zone| zone.is_lost())
}

/// Evictions per second allowed in the zone named `name`.
pub(super) fn rate(zones: &BTreeMap<String, Zone>, name: &str, rates: EvictionRates) -> f64 {
    if are_all_lost(zones) {
        return 0.0;
    }
    let zone = zones.get(name).copied().unwrap_or_default();
    if zone.is_lost() || !zone.is_partly_lost(rates.unhealthy_share) {
        rates.normal
    } else if zone.ready + zone.lost > rates.large {
        rates.reduced
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        let rates = EvictionRates::default();
        let (normal, reduced) = (rates.normal, rates.reduced);
        let zone = |ready, lost| Zone { ready, lost };
        for (what, a, b, expected) in [
            ("one lost node", zone(3, 1), zone(3, 0), normal),
            ("a zone lost among others", zone(0, 5), zone(3, 0), normal),
            ("everything lost", zone(0, 1), zone(0, 3), 0.0),
            ("small zone partly lost", zone(2, 3), zone(3, 0), 0.0),
            ("large zone partly lost", zone(20, 40), zone(3, 0), reduced),
            ("two of three are not many", zone(1, 2), zone(3, 0), normal),
        ] {
            let zones = BTreeMap::from([("a".to_owned(), a), ("b".to_owned(), b)]);
            assert_eq!(rate(&zones, "a", rates), expected, "{what}");
        }
        let only = BTreeMap::from([("a".to_owned(), zone(0, 1))]);
        assert_eq!(rate(&only, "a", rates), 0.0, "the only node of a cluster keeps its pods");
    }
}
