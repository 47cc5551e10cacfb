//! Hints of devices: the NUMA nodes that could provide the requested number of devices.

use super::hint::{Hint, Hints};
use super::mask::NumaMask;
use crate::devices::Device;
use std::collections::{BTreeMap, BTreeSet};

/// Devices of one resource, as a container or a pod that asks for some sees them.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeviceView {
    /// All that the plugin lists.
    pub all: BTreeMap<String, Device>,
    /// Healthy, and nobody's.
    pub free: BTreeSet<String>,
    /// Those that it has already.
    pub has: BTreeSet<String>,
    /// Those of init containers that have ended by then.
    pub reusable: BTreeSet<String>,
    pub request: usize,
}

pub(crate) fn hints(view: &DeviceView, nodes: &BTreeSet<u32>) -> Hints {
    if view.all.values().all(|device| device.nodes.is_empty()) {
        return None;
    }
    if !view.has.is_empty() {
        return Some(match view.has.len() == view.request {
            true => among(view, &view.has, &BTreeSet::new(), nodes),
            false => Vec::new(),
        });
    }
    if view.free.union(&view.reusable).count() < view.request {
        return Some(Vec::new());
    }
    Some(among(view, &view.free, &view.reusable, nodes))
}

fn among(
    view: &DeviceView,
    free: &BTreeSet<String>,
    reusable: &BTreeSet<String>,
    nodes: &BTreeSet<u32>,
) -> Vec<Hint> {
    let near = |device: &Device, mask: NumaMask| {
        device.nodes.iter().any(|node| u32::try_from(*node).is_ok_and(|node| mask.has(node)))
    };
    // A device without nodes is near to none, and in nobody's way.
    let placed = |id: &&String| view.all.get(*id).is_some_and(|device| !device.nodes.is_empty());
    let (mut fewest, mut masks) = (nodes.len(), Vec::new());
    for mask in NumaMask::combinations(nodes) {
        if view.all.values().filter(|device| near(device, mask)).count() >= view.request {
            fewest = fewest.min(mask.count());
        }
        let within = |id: &&String| view.all.get(*id).is_some_and(|device| near(device, mask));
        if !reusable.iter().filter(placed).all(|id| within(&id)) {
            continue;
        }
        let matching =
            reusable.iter().filter(placed).count() + free.difference(reusable).filter(within).count();
        if matching >= view.request {
            masks.push(mask);
        }
    }
    masks.into_iter().map(|mask| Hint { affinity: Some(mask), preferred: mask.count() == fewest }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `a@0 b@0,1 c`: devices with their nodes.
    fn devices(text: &str) -> BTreeMap<String, Device> {
        let device = |word: &str| {
            let (name, nodes) = word.split_once('@').unwrap_or((word, ""));
            let nodes = nodes.split(',').filter_map(|node| node.parse().ok()).collect();
            (name.to_owned(), Device { healthy: true, nodes })
        };
        text.split_whitespace().map(device).collect()
    }

    fn ids(text: &str) -> BTreeSet<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn nodes_with_enough_devices() {
        let all = "a@0 b@0 c@1 d@1";
        for (what, all, free, has, reusable, request, expected) in [
            ("one", all, "a b c d", "", "", 1, Some("0! 1! 01")),
            ("two", all, "a b c d", "", "", 2, Some("0! 1! 01")),
            ("two of which one is in use", all, "a c d", "", "", 2, Some("1! 01")),
            ("one of each is left", all, "a c", "", "", 2, Some("01")),
            ("three", all, "a b c d", "", "", 3, Some("01!")),
            ("too few", all, "a", "", "", 2, Some("")),
            ("it has them", all, "", "a b", "", 2, Some("0! 01")),
            ("it has others", all, "", "a", "", 2, Some("")),
            ("again", all, "b c", "", "a", 1, Some("0! 01")),
            ("again and more", all, "c d", "", "a", 2, Some("01")),
            ("at no node", "a b", "a b", "", "", 1, None),
            ("at two", "a@0,1 b@1", "a b", "", "", 1, Some("0! 1! 01")),
        ] {
            let view = DeviceView {
                all: devices(all),
                free: ids(free),
                has: ids(has),
                reusable: ids(reusable),
                request,
            };
            let mark = |h: &Hint| {
                let nodes: String = h.affinity.unwrap().nodes().map(|n| n.to_string()).collect();
                format!("{nodes}{}", if h.preferred { "!" } else { "" })
            };
            let got = hints(&view, &BTreeSet::from([0, 1]));
            let got = got.map(|hints| hints.iter().map(mark).collect::<Vec<_>>().join(" "));
            assert_eq!(got.as_deref(), expected, "{what}");
        }
    }
}
