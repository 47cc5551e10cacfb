//! Taking a pod off a node, or putting one on it, must lead to the verdicts that a cluster built anew gives.

use std::sync::Arc;

use ferrite_json::{Value, json};
use proptest::prelude::*;

use crate::framework::{CycleState, Framework, Handle, Registry};
use crate::profile::Profile;
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

const APPS: [&str; 3] = ["red", "green", "blue"];

/// A node's zone, and its pods: application, whether it avoids another one, and whether it is being deleted.
type RandomNode = (usize, Vec<(usize, Option<usize>, bool)>);

fn term(app: usize, key: &str) -> Value {
    json!([{"topologyKey": key, "labelSelector": {"matchLabels": {"app": APPS[app]}}}])
}

fn pod(name: &str, app: usize, change: impl FnOnce(&mut Value)) -> Arc<PodInfo> {
    let mut pod = json!({"metadata": {"name": name, "namespace": "ns", "labels": {"app": APPS[app]}},
        "spec": {"containers": [], "affinity": {}}});
    change(&mut pod);
    Arc::new(PodInfo::new(&ferrite_json::from_value(pod).unwrap()))
}

fn node(index: usize, zone: usize, pods: &[Arc<PodInfo>]) -> NodeInfo {
    let node = json!({"metadata": {"name": format!("n{index}"), "labels": {"zone": format!("z{zone}"),
            "host": format!("n{index}")}},
        "status": {"allocatable": {"cpu": "9", "memory": "9Gi", "pods": "99"}}});
    let mut info = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
    pods.iter().for_each(|pod| info.add_pod(pod.clone()));
    info
}

fn snapshot(nodes: &[NodeInfo]) -> Snapshot {
    let mut snapshot = Snapshot::new(nodes.iter().cloned().map(Arc::new));
    snapshot.has_affinity = true;
    snapshot
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn removing_and_adding_pods_is_as_building_the_cluster_anew(
        nodes in prop::collection::vec(
            (0usize..2, prop::collection::vec((0usize..3, prop::option::of(0usize..3), any::<bool>()), 0..4)), 1..4),
        own in 0usize..3,
        wants in prop::option::of(0usize..3),
        avoids in prop::option::of(0usize..3),
        spreads in prop::option::of((0usize..3, 1i32..3, any::<bool>())),
    ) {
        let incoming = pod("incoming", own, |pod| {
            let required = "requiredDuringSchedulingIgnoredDuringExecution";
            if let Some(app) = wants {
                pod["spec"]["affinity"]["podAffinity"] = json!({(required): term(app, "zone")});
            }
            if let Some(app) = avoids {
                pod["spec"]["affinity"]["podAntiAffinity"] = json!({(required): term(app, "host")});
            }
            if let Some((app, skew, by_zone)) = spreads {
                pod["spec"]["topologySpreadConstraints"] = json!([{"maxSkew": skew,
                    "topologyKey": if by_zone { "zone" } else { "host" }, "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app": APPS[app]}}}]);
            }
        });
        let all: Vec<(usize, Vec<Arc<PodInfo>>)> = nodes
            .iter()
            .enumerate()
            .map(|(index, (zone, pods)): (usize, &RandomNode)| {
                let pods = pods.iter().enumerate().map(|(number, (app, avoids, leaves))| {
                    pod(&format!("p{index}-{number}"), *app, |pod| {
                        if let Some(other) = avoids {
                            pod["spec"]["affinity"]["podAntiAffinity"] =
                                json!({"requiredDuringSchedulingIgnoredDuringExecution": term(*other, "zone")});
                        }
                        if *leaves {
                            pod["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z".into();
                        }
                    })
                });
                (*zone, pods.collect())
            })
            .collect();
        let framework = Framework::new(&Profile::default(), &Registry::default(), &Handle::default()).unwrap();
        let build = |without: Option<(usize, usize)>| -> Vec<NodeInfo> {
            let infos = all.iter().enumerate().map(|(index, (zone, pods))| {
                let kept = pods.iter().enumerate().filter(|(number, _)| without != Some((index, *number)));
                node(index, *zone, &kept.map(|(_, pod)| pod.clone()).collect::<Vec<_>>())
            });
            infos.collect()
        };
        for (index, (_, pods)) in all.iter().enumerate() {
            for (number, other) in pods.iter().enumerate() {
                let (with, without) = (build(None), build(Some((index, number))));
                for (from, to, is_removed) in [(&with, &without, true), (&without, &with, false)] {
                    let mut state = CycleState::default();
                    let (filters, failure) = framework.pre_filter(&mut state, &incoming, &snapshot(from));
                    prop_assert!(failure.is_none());
                    let mut changed = from.clone();
                    if is_removed {
                        filters.remove_pod(&mut state, &incoming, other, &mut changed[index]);
                    } else {
                        filters.add_pod(&mut state, &incoming, other, &mut changed[index]);
                    }
                    let mut anew = CycleState::default();
                    let (filters_anew, _) = framework.pre_filter(&mut anew, &incoming, &snapshot(to));
                    // A plugin that took no part at first does not notice its later verdict.
                    if is_removed || format!("{filters:?}") == format!("{filters_anew:?}") {
                        for (incremental, rebuilt) in changed.iter().zip(to) {
                            let verdict = |result: Result<(), crate::framework::RejectedBy>| {
                                result.map_err(|by| by.rejection.to_string())
                            };
                            prop_assert_eq!(
                                verdict(filters.filter(&state, &incoming, incremental)),
                                verdict(filters_anew.filter(&anew, &incoming, rebuilt))
                            );
                        }
                    }
                }
            }
        }
    }
}
