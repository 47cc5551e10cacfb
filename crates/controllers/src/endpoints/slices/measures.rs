//! The metrics of EndpointSlices, with upstream's names.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use ferrite_client::ObjectKey;
use ferrite_component::metrics::{Counter, Family, Gauge, Histogram, registry};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};

use super::decide::Plan;
use super::topology::is_auto;

/// Doubling from two, 15 times.
const COUNTS: &[f64] =
    &[2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0];

struct Families {
    added: Arc<Family<Histogram>>,
    removed: Arc<Family<Histogram>>,
    endpoints: Arc<Family<Gauge>>,
    slices: Arc<Family<Gauge>>,
    desired: Arc<Family<Gauge>>,
    by_distribution: Arc<Family<Gauge>>,
    changes: Arc<Family<Counter>>,
    syncs: Arc<Family<Counter>>,
}

static FAMILIES: LazyLock<Families> = LazyLock::new(|| {
    let gauge = |name, help| registry().gauge(name, help, &[]);
    let histogram = |name, help| registry().histogram(name, help, &[], COUNTS);
    Families {
        added: histogram(
            "endpoint_slice_controller_endpoints_added_per_sync",
            "Endpoints that the sync of a Service added.",
        ),
        removed: histogram(
            "endpoint_slice_controller_endpoints_removed_per_sync",
            "Endpoints that the sync of a Service removed.",
        ),
        endpoints: gauge("endpoint_slice_controller_endpoints_desired", "Endpoints in all slices."),
        slices: gauge("endpoint_slice_controller_num_endpoint_slices", "EndpointSlices."),
        desired: gauge(
            "endpoint_slice_controller_desired_endpoint_slices",
            "EndpointSlices if each of them were full.",
        ),
        by_distribution: registry().gauge(
            "endpoint_slice_controller_services_count_by_traffic_distribution",
            "Services by the distribution of traffic that they ask for.",
            &["traffic_distribution"],
        ),
        changes: registry().counter(
            "endpoint_slice_controller_changes",
            "Changes of EndpointSlices.",
            &["operation"],
        ),
        syncs: registry().counter("endpoint_slice_controller_syncs", "Syncs of Services.", &["result"]),
    }
});

/// The numbers of one Service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    endpoints: usize,
    slices: usize,
    /// Slices if each of them were full.
    desired: usize,
    added: usize,
    removed: usize,
    distribution: Option<String>,
}

fn endpoints(slice: &EndpointSlice) -> &[Endpoint] {
    slice.endpoints.as_deref().unwrap_or_default()
}

/// Endpoints by the family of their slice and the UID of their pod.
fn identities<'a>(slices: &[&'a EndpointSlice]) -> HashSet<(&'a str, Option<&'a str>)> {
    let of = |slice: &'a EndpointSlice| {
        let uid =
            |endpoint: &'a Endpoint| endpoint.target_ref.as_ref().and_then(|target| target.uid.as_deref());
        endpoints(slice).iter().map(move |endpoint| (slice.address_type.as_str(), uid(endpoint)))
    };
    slices.iter().flat_map(|slice| of(slice)).collect()
}

/// The numbers of a Service after its plan is carried out.
pub(super) fn numbers(
    service: &Service,
    existing: &[Arc<EndpointSlice>],
    plan: &Plan,
    capacity: usize,
) -> Numbers {
    let updated: HashSet<_> = plan.update.iter().map(|slice| &slice.metadata.name).collect();
    let deleted: HashSet<&str> = plan.delete.iter().map(String::as_str).collect();
    let stays = |slice: &&Arc<EndpointSlice>| {
        !updated.contains(&slice.metadata.name)
            && !deleted.contains(slice.metadata.name.as_deref().unwrap_or_default())
    };
    let before: Vec<&EndpointSlice> = existing.iter().map(|slice| &**slice).collect();
    let kept = existing.iter().filter(stays).map(|slice| &**slice);
    let after: Vec<&EndpointSlice> = kept.chain(&plan.update).chain(&plan.create).collect();
    let mut groups: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for slice in &after {
        let ports = slice.ports.iter().flatten().map(|port| {
            format!(
                "{}/{}/{}",
                port.name.as_deref().unwrap_or(""),
                port.protocol.as_deref().unwrap_or(""),
                port.port.unwrap_or(0)
            )
        });
        let mut ports: Vec<String> = ports.collect();
        ports.sort();
        *groups.entry((&slice.address_type, ports.join(","))).or_default() += endpoints(slice).len();
    }
    let (had, has) = (identities(&before), identities(&after));
    let spec = service.spec.as_ref();
    Numbers {
        endpoints: groups.values().sum(),
        slices: after.len(),
        // There is always one slice.
        desired: groups.values().map(|count| count.div_ceil(capacity)).sum::<usize>().max(1),
        added: has.difference(&had).count(),
        removed: had.difference(&has).count(),
        distribution: spec.and_then(|spec| spec.traffic_distribution.clone()).filter(|_| !is_auto(service)),
    }
}

fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The numbers of all Services, whose sums are the gauges.
#[derive(Debug, Default)]
pub(super) struct Totals(Mutex<HashMap<ObjectKey, Numbers>>);

impl Totals {
    /// Begins with no Service.
    pub(super) fn new() -> Self {
        for gauge in [&FAMILIES.endpoints, &FAMILIES.slices, &FAMILIES.desired] {
            gauge.with(&[]).set(0);
        }
        Self::default()
    }

    /// Counts a sync and its changes.
    pub(super) fn synced(&self, key: &ObjectKey, plan: &Plan, numbers: Numbers, is_ok: bool) {
        FAMILIES.syncs.with(&[if is_ok { "success" } else { "error" }]).increment();
        for (operation, count) in
            [("create", plan.create.len()), ("update", plan.update.len()), ("delete", plan.delete.len())]
        {
            FAMILIES.changes.with(&[operation]).add(u64::try_from(count).unwrap_or(u64::MAX));
        }
        // The histograms are of seconds, and each endpoint counts as one.
        let seconds = |count: usize| Duration::from_secs(u64::try_from(count).unwrap_or(u64::MAX));
        FAMILIES.added.with(&[]).observe(seconds(numbers.added));
        FAMILIES.removed.with(&[]).observe(seconds(numbers.removed));
        self.replace(key, Some(numbers));
    }

    pub(super) fn forget(&self, key: &ObjectKey) {
        self.replace(key, None);
    }

    fn replace(&self, key: &ObjectKey, new: Option<Numbers>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let old = match &new {
            Some(new) => all.insert(key.clone(), new.clone()),
            None => all.remove(key),
        };
        for (numbers, sign) in [(old, -1), (new, 1)] {
            let Some(numbers) = numbers else { continue };
            FAMILIES.endpoints.with(&[]).add(sign * signed(numbers.endpoints));
            FAMILIES.slices.with(&[]).add(sign * signed(numbers.slices));
            FAMILIES.desired.with(&[]).add(sign * signed(numbers.desired));
            if let Some(distribution) = &numbers.distribution {
                FAMILIES.by_distribution.with(&[distribution]).add(sign);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn slice(name: &str, port: i32, pods: std::ops::Range<usize>) -> EndpointSlice {
        let endpoint = |pod| json!({"addresses": ["192.0.2.1"], "targetRef": {"uid": format!("{pod}")}});
        let endpoints: Vec<Value> = pods.map(endpoint).collect();
        ferrite_json::from_value(json!({"metadata": {"name": name}, "addressType": "IPv4",
            "ports": [{"name": "p", "port": port}], "endpoints": endpoints}))
        .unwrap()
    }

    #[test]
    fn the_numbers_are_those_after_the_plan() {
        let service: Service =
            ferrite_json::from_value(json!({"spec": {"trafficDistribution": "PreferClose"}})).unwrap();
        let existing: Vec<_> = [slice("stays", 1, 0..2), slice("changes", 1, 2..4), slice("goes", 2, 9..10)]
            .map(Arc::new)
            .into();
        let plan = Plan {
            create: vec![slice("comes", 3, 20..21)],
            update: vec![slice("changes", 1, 2..7)],
            delete: vec!["goes".to_owned()],
            ..Plan::default()
        };
        let expected = Numbers {
            endpoints: 8,
            slices: 3,
            desired: 3,
            added: 4,
            removed: 1,
            distribution: Some("PreferClose".to_owned()),
        };
        assert_eq!(numbers(&service, &existing, &plan, 4), expected);
        let nothing = numbers(&Service::default(), &[], &Plan::default(), 4);
        assert_eq!(nothing, Numbers { desired: 1, ..Numbers::default() });
    }

    #[test]
    fn gauges_are_sums_over_services() {
        let numbers = |distribution: &str| Numbers {
            distribution: Some(distribution.to_owned()),
            ..Numbers::default()
        };
        let totals = Totals::default();
        let count = |distribution: &str| FAMILIES.by_distribution.with(&[distribution]).get();
        let (a, b) = (ObjectKey::new("ns", "a"), ObjectKey::new("ns", "b"));
        for key in [&a, &b, &a] {
            totals.synced(key, &Plan::default(), numbers("test"), true);
        }
        assert_eq!(count("test"), 2);
        totals.synced(&a, &Plan::default(), numbers("other test"), true);
        totals.forget(&b);
        assert_eq!((count("test"), count("other test")), (0, 1));
        assert!(FAMILIES.syncs.with(&["success"]).get() >= 4);
    }
}
