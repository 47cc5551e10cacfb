use std::sync::Arc;

use ferrite_json::{Value, json};
use futures_util::FutureExt;
use proptest::prelude::*;

use super::*;
use crate::cycle::{self, FitError, ScheduleError, Search};
use crate::framework::{CycleState, Diagnosis, Framework, Handle, Nomination, Registry};
use crate::profile::Profile;
use crate::snapshot::Snapshot;

fn node(name: &str, cpu: i64, pods: &[Arc<PodInfo>]) -> Arc<NodeInfo> {
    let node = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"allocatable": {"cpu": cpu.to_string(), "memory": "8Gi", "pods": "10"}},
    });
    let mut info = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
    pods.iter().for_each(|pod| info.add_pod(pod.clone()));
    Arc::new(info)
}

fn pod_with(name: &str, cpu: i64, priority: i32, change: impl FnOnce(&mut Value)) -> Arc<PodInfo> {
    let mut pod = json!({
        "metadata": {"name": name, "namespace": "ns", "uid": name, "labels": {"app": name}},
        "spec": {"priority": priority, "containers": [
            {"name": "c", "resources": {"requests": {"cpu": cpu.to_string()}}}]},
        "status": {},
    });
    change(&mut pod);
    Arc::new(PodInfo::new(&ferrite_json::from_value(pod).unwrap()))
}

fn pod(name: &str, cpu: i64, priority: i32) -> Arc<PodInfo> {
    pod_with(name, cpu, priority, |_| {})
}

/// A pod that started `second` seconds after the beginning.
fn started(name: &str, cpu: i64, priority: i32, second: i64) -> Arc<PodInfo> {
    let time = jiff::Timestamp::from_second(1_000_000_000 + second).unwrap();
    pod_with(name, cpu, priority, |pod| pod["status"]["startTime"] = time.to_string().into())
}

fn pdb(name: &str, labels: &[&str], allowed: i32, disrupted: &[&str]) -> PodDisruptionBudget {
    let disrupted: std::collections::BTreeMap<_, _> =
        disrupted.iter().map(|name| ((*name).to_owned(), json!("2020-01-01T00:00:00Z"))).collect();
    ferrite_json::from_value(json!({
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": labels}]}},
        "status": {"disruptionsAllowed": allowed, "disruptedPods": disrupted, "currentHealthy": 0,
                   "desiredHealthy": 0, "expectedPods": 0},
    }))
    .unwrap()
}

/// Schedules a pod that fits nowhere, and returns the node it is nominated to with the names of its victims.
fn preempt(
    nodes: Vec<Arc<NodeInfo>>,
    pod: &PodInfo,
    pdbs: Vec<PodDisruptionBudget>,
    nominated: &[(Arc<PodInfo>, &str)],
) -> FitError {
    let handle = Handle::default().with_objects(pdbs);
    let framework = Framework::new(&Profile::default(), &Registry::default(), &handle).unwrap();
    let nodes = nodes.into_iter().map(|node| {
        let mut with = NodeInfo::clone(&node);
        let here = nominated.iter().filter(|(_, name)| *name == node.name());
        here.for_each(|(pod, _)| with.nominate(pod.clone()));
        Arc::new(with)
    });
    let mut snapshot = Snapshot::new(nodes);
    snapshot.has_affinity = true;
    snapshot.nominated = nominated.iter().map(|(pod, node)| (pod.key.clone(), (*node).into())).collect();
    let result =
        cycle::schedule(&framework, &snapshot, &[], pod, &mut Search::default(), |_| 0).now_or_never();
    match result.expect("nothing waits without extenders") {
        Err(ScheduleError::Unschedulable(error)) => *error,
        other => panic!("{other:?}"),
    }
}

fn outcome(error: &FitError) -> (&str, Vec<&str>) {
    let node = match &error.nomination {
        Nomination::Node(node) => node.as_str(),
        _ => "",
    };
    (node, error.victims.pods.iter().map(|pod| pod.key.name.as_str()).collect())
}

#[test]
fn nodes_are_chosen_in_upstreams_order() {
    let high = pod("high", 4, 100);
    for (what, nodes, pdbs, expected) in [
        (
            "fewest violated budgets",
            vec![node("a", 4, &[pod("safe", 4, 1)]), node("b", 4, &[pod("free", 4, 50)])],
            vec![pdb("p", &["safe"], 0, &[])],
            ("b", vec!["free"]),
        ),
        (
            "a budget that is not used up is no violation",
            vec![node("a", 4, &[pod("safe", 4, 1)]), node("b", 4, &[pod("free", 4, 50)])],
            vec![pdb("p", &["safe"], 1, &[])],
            ("a", vec!["safe"]),
        ),
        (
            "a disruption that is processed already is no violation",
            vec![node("a", 4, &[pod("safe", 4, 1)]), node("b", 4, &[pod("free", 4, 50)])],
            vec![pdb("p", &["safe"], 0, &["safe"])],
            ("a", vec!["safe"]),
        ),
        (
            "lowest priority of the most important victim",
            vec![
                node("a", 4, &[pod("a1", 2, 50), pod("a2", 2, 1)]),
                node("b", 4, &[pod("b1", 2, 40), pod("b2", 2, 40)]),
            ],
            vec![],
            ("b", vec!["b1", "b2"]),
        ),
        (
            "lowest sum of priorities",
            vec![
                node("a", 4, &[pod("a1", 2, 40), pod("a2", 2, 30)]),
                node("b", 4, &[pod("b1", 2, 40), pod("b2", 2, 20)]),
            ],
            vec![],
            ("b", vec!["b1", "b2"]),
        ),
        (
            "few victims of negative priority cost less than many",
            vec![node("a", 4, &[pod("a1", 2, -10), pod("a2", 2, -10)]), node("b", 4, &[pod("b1", 4, -10)])],
            vec![],
            ("b", vec!["b1"]),
        ),
        (
            "latest start of the most important victims",
            vec![
                node("a", 4, &[started("a1", 2, 10, 5), started("a2", 2, 10, 900)]),
                node("b", 4, &[started("b1", 2, 10, 70), started("b2", 2, 10, 80)]),
                node("c", 4, &[started("c1", 2, 10, 60), started("c2", 2, 10, 999)]),
            ],
            vec![],
            ("b", vec!["b1", "b2"]),
        ),
    ] {
        assert_eq!(outcome(&preempt(nodes, &high, pdbs, &[])), expected, "{what}");
    }
}

#[test]
fn as_many_pods_as_possible_stay() {
    for (what, pods, cpu, pdbs, expected) in [
        (
            "the least important goes",
            vec![pod("a", 1, 1), pod("b", 1, 2), pod("c", 2, 3)],
            1,
            vec![],
            vec!["a"],
        ),
        (
            "of equal priority the youngest goes",
            vec![started("old", 2, 1, 1), started("young", 2, 1, 2)],
            2,
            vec![],
            vec!["young"],
        ),
        (
            "a pod that has not started is the youngest",
            vec![started("old", 2, 1, 1), pod("waiting", 2, 1)],
            2,
            vec![],
            vec!["waiting"],
        ),
        (
            "a protected pod stays although it is less important",
            vec![pod("safe", 2, 1), pod("free", 2, 5)],
            2,
            vec![pdb("p", &["safe"], 0, &[])],
            vec!["free"],
        ),
        (
            "victims are ordered by importance",
            vec![pod("safe", 2, 1), pod("free", 2, 5)],
            4,
            vec![pdb("p", &["safe"], 0, &[])],
            vec!["free", "safe"],
        ),
        ("pods of equal priority stay", vec![pod("equal", 2, 100), pod("low", 2, 1)], 2, vec![], vec!["low"]),
    ] {
        let error = preempt(vec![node("n", 4, &pods)], &pod("high", cpu, 100), pdbs, &[]);
        assert_eq!(outcome(&error), ("n", expected), "{what}");
    }
}

#[test]
fn budgets_are_used_up_from_the_most_important_pod_down() {
    let pods = vec![pod("a", 1, 3), pod("b", 1, 2), pod("c", 1, 1)];
    let budgets = [
        Budget::new(&pdb("p", &["a", "b", "c"], 1, &[])).unwrap(),
        Budget::new(&pdb("q", &["c"], 5, &[])).unwrap(),
    ];
    let (violating, others) = split_by_budget(pods, &budgets);
    let names = |pods: Vec<Arc<PodInfo>>| -> Vec<String> {
        pods.iter().map(|pod| pod.key.name.to_string()).collect()
    };
    assert_eq!((names(violating), names(others)), (vec!["b".into(), "c".into()], vec!["a".into()]));
    let empty = ferrite_json::from_value(json!({"spec": {"selector": {}}})).unwrap();
    assert!(Budget::new(&empty).is_none(), "an empty selector protects nothing");
}

#[test]
fn messages_are_upstreams() {
    let leaving = |name: &str, reason: &str| {
        pod_with(name, 4, 1, |pod| {
            pod["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z".into();
            pod["status"]["conditions"] =
                json!([{"type": "DisruptionTarget", "status": "True", "reason": reason}]);
        })
    };
    let high = pod("high", 4, 100);
    let never = pod_with("never", 4, 100, |pod| pod["spec"]["preemptionPolicy"] = "Never".into());
    let ours = "PreemptionByScheduler";
    for (what, nodes, pod, nominated, post_filter, nomination) in [
        (
            "policy",
            vec![node("n", 4, &[pod("low", 4, 1)])],
            &never,
            None,
            "preemption: not eligible due to preemptionPolicy=Never.",
            Nomination::Keep,
        ),
        (
            "victims are on their way",
            vec![node("n", 4, &[leaving("low", ours)])],
            &high,
            Some("n"),
            "preemption: not eligible due to a terminating pod on the nominated node.",
            Nomination::Keep,
        ),
        (
            "a pod that leaves for another reason does not stop preemption",
            vec![node("n", 4, &[leaving("low", "EvictionByEvictionAPI")])],
            &high,
            Some("n"),
            "",
            Nomination::Node("n".into()),
        ),
        (
            "nothing helps",
            vec![
                node("n", 4, &[pod("equal", 4, 100)]),
                node("small", 2, &[]),
                node("mixed", 4, &[pod("top", 2, 200), pod("low", 2, 1)]),
            ],
            &high,
            Some("n"),
            "preemption: 0/3 nodes are available: 1 Insufficient cpu, \
             1 No preemption victims found for incoming pod, 1 Preemption is not helpful for scheduling.",
            Nomination::Clear,
        ),
    ] {
        let nominated: Vec<_> = nominated.into_iter().map(|node| (pod.clone(), node)).collect();
        let error = preempt(nodes, pod, vec![], &nominated);
        let dynamic = "no new claims to deallocate, ";
        let told = error.post_filter.strip_prefix(dynamic).unwrap_or(&error.post_filter);
        assert_eq!((told, &error.nomination), (post_filter, &nomination), "{what}");
    }
    let error = preempt(vec![node("n", 4, &[pod("low", 4, 1)])], &high, vec![], &[]);
    assert_eq!(error.to_string(), "0/1 nodes are available: 1 Insufficient cpu.");
}

#[test]
fn room_kept_for_nominated_pods_is_respected() {
    let first = pod("first", 2, 100);
    let nodes = || vec![node("n", 4, &[pod("low", 2, 1)])];
    let high = pod("high", 2, 100);
    let error = preempt(nodes(), &high, vec![], &[(first.clone(), "n")]);
    assert_eq!(
        outcome(&error),
        ("n", vec!["low"]),
        "half of the node is kept for the first, the rest is taken"
    );

    let error = preempt(nodes(), &pod("equal", 3, 100), vec![], &[(first.clone(), "n")]);
    assert_eq!(error.nomination, Nomination::Clear, "{error}");

    // A pod of lower priority that is nominated counts for nothing.
    let error = preempt(nodes(), &pod("higher", 4, 200), vec![], &[(first, "n")]);
    assert_eq!(outcome(&error), ("n", vec!["low"]));
}

#[test]
fn affinity_follows_the_victims() {
    let apart = |name: &str, priority: i32, other: &str| {
        pod_with(name, 1, priority, |pod| {
            pod["spec"]["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": other}}}]}});
        })
    };
    for (what, present, incoming) in [
        ("the new pod avoids the victim", pod("low", 1, 1), apart("high", 100, "low")),
        ("the victim avoids the new pod", apart("low", 1, "high"), pod("high", 1, 100)),
    ] {
        let nodes = vec![node("n", 4, &[present, pod("other", 1, 1)])];
        assert_eq!(outcome(&preempt(nodes, &incoming, vec![], &[])), ("n", vec!["low"]), "{what}");
    }
    let spread = pod_with("high", 1, 100, |pod| {
        pod["metadata"]["labels"]["app"] = "low".into();
        pod["spec"]["topologySpreadConstraints"] = json!([{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "low"}}}]);
    });
    let labelled = |name: &str, priority: i32| {
        pod_with(name, 1, priority, |pod| pod["metadata"]["labels"]["app"] = "low".into())
    };
    let nodes =
        vec![node("a", 4, &[labelled("x", 1), labelled("y", 2)]), node("b", 4, &[pod("full", 4, 200)])];
    assert_eq!(outcome(&preempt(nodes, &spread, vec![], &[])), ("a", vec!["y", "x"]));
}

#[test]
fn the_number_of_candidates_is_limited() {
    for (nodes, percentage, absolute, expected) in
        [(5000, 10, 100, 500), (500, 10, 100, 100), (50, 10, 100, 50), (5000, 0, 7, 7), (10, 100, 0, 10)]
    {
        assert_eq!(candidates_wanted(nodes, percentage, absolute), expected);
    }
    let snapshot = Snapshot::new((0..9).map(|n| node(&format!("n{n}"), 1, &[pod(&format!("p{n}"), 1, n)])));
    let framework = Framework::new(&Profile::default(), &Registry::default(), &Handle::default()).unwrap();
    let high = pod("high", 1, 100);
    let mut state = CycleState::default();
    let (filters, _) = framework.pre_filter(&mut state, &high, &snapshot);
    let diagnosis = Diagnosis::default();
    let search = FailedSearch {
        pod: &high,
        snapshot: &snapshot,
        state: &state,
        filters: &filters,
        diagnosis: &diagnosis,
        extenders: &[],
    };
    let positions: Vec<usize> = (0..9).collect();
    let run = |budgets: &[Budget], offset: usize, enough: usize| -> Vec<String> {
        let run =
            |wanted| dry_run(search, &positions, budgets, offset, enough, wanted, &mut Memory::default()).0;
        let names = |candidates: &[Arc<Candidate>]| -> Vec<String> {
            candidates.iter().map(|candidate| candidate.node.clone()).collect()
        };
        let all = run(Wanted::All);
        let best = select_candidate(all.clone()).expect("there are candidates");
        assert_eq!(names(&run(Wanted::Best)), names(&[best]));
        names(&all)
    };
    assert_eq!(run(&[], 7, 3), ["n7", "n8", "n0"], "the search goes round");
    let budget = Budget::new(&pdb("p", &["p0", "p1", "p2"], 0, &[])).unwrap();
    assert_eq!(run(&[budget], 0, 2), ["n3", "n0", "n1", "n2"], "it goes on until one violates no budget");
}

/// One pod on a node of the random cluster: CPU, priority, start, whether a budget protects it.
type RandomPod = (i64, i32, i64, bool);

/// The victims by plain search: put pods back one by one, protected ones first, most important first, and see whether the
/// sum of CPUs fits.
fn plain_victims(
    free: i64,
    wanted: i64,
    pods: &[(String, RandomPod)],
    priority: i32,
    allowed: i32,
) -> Option<Vec<String>> {
    let mut lower: Vec<_> = pods.iter().filter(|(_, pod)| pod.1 < priority).collect();
    if lower.is_empty() {
        return None;
    }
    lower.sort_by_key(|(_, pod)| (Reverse(pod.1), pod.2));
    let mut room = free + lower.iter().map(|(_, pod)| pod.0).sum::<i64>() - wanted;
    if room < 0 {
        return None;
    }
    let mut left = allowed;
    let mut order: Vec<_> = lower
        .iter()
        .map(|(name, pod)| {
            left -= i32::from(pod.3);
            (!(pod.3 && left < 0), name, pod)
        })
        .collect();
    order.sort_by_key(|(is_free, ..)| *is_free);
    let mut victims = Vec::new();
    for (is_free, name, pod) in order {
        if pod.0 <= room {
            room -= pod.0;
        } else {
            victims.push((!is_free, (*name).clone(), *pod));
        }
    }
    victims.sort_by_key(|(_, _, pod)| (Reverse(pod.1), pod.2));
    Some(victims.into_iter().map(|(_, name, _)| name).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn preemption_agrees_with_a_plain_search(
        nodes in prop::collection::vec(prop::collection::vec((1i64..4, 0i32..5, 0i64..6, any::<bool>()), 0..6), 1..5),
        capacity in 4i64..10,
        wanted in 1i64..8,
        priority in 0i32..6,
        allowed in 0i32..3,
    ) {
        let mut named: Vec<Vec<(String, RandomPod)>> = Vec::new();
        let mut infos = Vec::new();
        for (index, pods) in nodes.iter().enumerate() {
            let mut held = 0;
            let mut list = Vec::new();
            for (number, pod) in pods.iter().enumerate() {
                // Start times differ within a node, so that the order of victims is one.
                let pod = (pod.0, pod.1, pod.2 * 10 + i64::try_from(number).unwrap(), pod.3);
                if held + pod.0 <= capacity {
                    held += pod.0;
                    list.push((format!("p{index}-{number}"), pod));
                }
            }
            let pods: Vec<_> = list
                .iter()
                .map(|(name, (cpu, priority, start, protected))| {
                    let time = jiff::Timestamp::from_second(1_000_000_000 + start).unwrap();
                    pod_with(name, *cpu, *priority, |pod| {
                        pod["status"]["startTime"] = time.to_string().into();
                        pod["metadata"]["labels"]["app"] = if *protected { "safe" } else { "free" }.into();
                    })
                })
                .collect();
            infos.push(node(&format!("n{index}"), capacity, &pods));
            named.push(list);
        }
        let free = |list: &[(String, RandomPod)]| capacity - list.iter().map(|(_, pod)| pod.0).sum::<i64>();
        // A pod that fits somewhere preempts nothing.
        prop_assume!(named.iter().all(|list| free(list) < wanted));
        let incoming = pod("incoming", wanted, priority);
        let error = preempt(infos, &incoming, vec![pdb("p", &["safe"], allowed, &[])], &[]);

        // The cost of each node's victims, compared member by member as documented.
        let mut plain: Vec<_> = Vec::new();
        for (index, list) in named.iter().enumerate() {
            if wanted > capacity {
                continue;
            }
            let Some(victims) = plain_victims(free(list), wanted, list, priority, allowed) else { continue };
            let facts: Vec<RandomPod> =
                victims.iter().map(|name| list.iter().find(|(other, _)| other == name).unwrap().1).collect();
            let mut lower: Vec<_> = list.iter().filter(|(_, pod)| pod.1 < priority).collect();
            lower.sort_by_key(|(_, pod)| (Reverse(pod.1), pod.2));
            let mut left = allowed;
            let mut violations = 0;
            for (name, pod) in lower {
                left -= i32::from(pod.3);
                violations += usize::from(pod.3 && left < 0 && victims.contains(name));
            }
            let highest = facts.iter().map(|pod| pod.1).max().unwrap();
            let sum: i64 = facts.iter().map(|pod| i64::from(pod.1) + (1 << 31)).sum();
            let start = facts.iter().filter(|pod| pod.1 == highest).map(|pod| pod.2).min().unwrap();
            plain.push(((violations, highest, sum, victims.len(), Reverse(start)), format!("n{index}"), victims));
        }
        let (chosen, victims) = outcome(&error);
        match plain.iter().map(|(cost, ..)| *cost).min() {
            None => prop_assert_eq!(chosen, "", "{}", error),
            Some(least) => {
                let found = plain.iter().find(|(_, name, _)| name == chosen);
                prop_assert!(found.is_some(), "{chosen:?} is no candidate: {plain:?}");
                let (cost, _, expected) = found.unwrap();
                prop_assert_eq!(*cost, least);
                prop_assert_eq!(victims, expected.iter().map(String::as_str).collect::<Vec<_>>());
            }
        }
    }
}
