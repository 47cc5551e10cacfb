//! Tables of the arithmetic, of the limits, and of metrics together.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ferrite_json::{Value, json};
use jiff::Timestamp;

use super::controller::{combine, tolerances};
use super::limits::{Behavior, Bounds, History};
use super::pods::{PodGroups, PodMetric, PodMetrics};
use super::proposal::{Failure, Proposal, ProposalError};
use super::replicas::{self, CalculationError, PodFigures, Tolerances};

const TENTH: Tolerances = Tolerances { down: 0.1, up: 0.1 };

fn metrics(values: &[(&str, i64)]) -> PodMetrics {
    let metric = |value: i64| PodMetric { timestamp: Timestamp::UNIX_EPOCH, window: Duration::ZERO, value };
    values.iter().map(|(pod, value)| ((*pod).to_owned(), metric(*value))).collect()
}

fn names(pods: &[&str]) -> BTreeSet<String> {
    pods.iter().map(|pod| (*pod).to_owned()).collect()
}

/// Figures, pods without a figure, unready pods and ignored pods.
fn figures(
    current: i32,
    values: &[(&str, i64)],
    missing: &[&str],
    unready: &[&str],
    ignored: &[&str],
) -> Result<PodFigures, CalculationError> {
    let apart = |pod: &&(&str, i64)| !unready.contains(&pod.0) && !ignored.contains(&pod.0);
    let groups = PodGroups {
        ready: values.iter().filter(apart).count(),
        unready: names(unready),
        missing: names(missing),
        ignored: names(ignored),
    };
    PodFigures::new(current, TENTH, groups, metrics(values))
}

#[test]
fn averages_of_pods() {
    type Row<'a> = (&'a str, i32, &'a [(&'a str, i64)], &'a [&'a str], &'a [&'a str], i64, i32, i64);
    // Name; current; figures; missing; unready; target; replicas; average.
    let rows: &[Row<'_>] = &[
        ("50 and 100 of 60", 2, &[("a", 50_000), ("b", 100_000)], &[], &[], 60_000, 3, 75_000),
        ("2 and a missing one of 60", 2, &[("a", 2_000)], &["b"], &[], 60_000, 2, 2_000),
        ("65 of 60 is tolerated", 1, &[("a", 65_000)], &[], &[], 60_000, 1, 65_000),
        ("67 of 60 is not", 1, &[("a", 67_000)], &[], &[], 60_000, 2, 67_000),
        ("10 of 60", 3, &[("a", 10_000), ("b", 10_000), ("c", 10_000)], &[], &[], 60_000, 1, 10_000),
        ("600 of 60", 1, &[("a", 600_000)], &[], &[], 60_000, 10, 600_000),
        ("a missing one uses nothing on the way up", 2, &[("a", 300_000)], &["b"], &[], 60_000, 5, 300_000),
        ("the missing ones turn the direction", 3, &[("a", 80_000)], &["b", "c"], &[], 60_000, 3, 80_000),
        (
            "unready ones do not count on the way down",
            2,
            &[("a", 10_000), ("b", 90_000)],
            &[],
            &["b"],
            60_000,
            1,
            10_000,
        ),
        (
            "unready ones use nothing on the way up",
            2,
            &[("a", 300_000), ("b", 900_000)],
            &[],
            &["b"],
            60_000,
            5,
            300_000,
        ),
        (
            "fewer figures than replicas do not turn the direction",
            9,
            &[("a", 90_000)],
            &[],
            &["b"],
            20_000,
            9,
            90_000,
        ),
        ("no overflow", 1, &[("a", i64::MAX), ("b", i64::MAX)], &[], &[], 1, i32::MAX, i64::MAX),
    ];
    for (name, current, values, missing, unready, target, replicas, usage) in rows {
        let figures = figures(*current, values, missing, unready, &[]).expect(name);
        let found = figures.average(*target).expect(name);
        assert_eq!((found.replicas, found.usage), (*replicas, *usage), "{name}");
    }
    let none = figures(1, &[("a", 1), ("b", 1)], &[], &["a"], &["b"]).expect_err("nothing counts");
    assert_eq!(none, CalculationError::NoMetrics);
}

#[test]
fn utilizations_of_pods() {
    type Row<'a> = (&'a str, i32, &'a [(&'a str, i64)], &'a [&'a str], &'a [&'a str], i32, i32, i32);
    let requests: BTreeMap<String, i64> = ["a", "b", "c", "d"].map(|pod| (pod.to_owned(), 1000)).into();
    // Name; current; figures; missing; unready; target; replicas; percentage.
    let rows: &[Row<'_>] = &[
        ("up", 3, &[("a", 300), ("b", 500), ("c", 700)], &[], &[], 30, 5, 50),
        ("down", 4, &[("a", 100), ("b", 300), ("c", 500), ("d", 200)], &[], &[], 50, 3, 27),
        ("tolerated", 3, &[("a", 1000), ("b", 1050), ("c", 1000)], &[], &[], 100, 3, 101),
        ("unready on the way up", 3, &[("a", 100), ("b", 500), ("c", 700)], &[], &["a"], 30, 4, 60),
        (
            "missing on the way down uses its request",
            4,
            &[("a", 100), ("b", 100), ("c", 100)],
            &["d"],
            &[],
            80,
            2,
            10,
        ),
        (
            "missing on the way down uses a target above its request",
            2,
            &[("a", 1000)],
            &["b"],
            &[],
            200,
            2,
            100,
        ),
        ("missing on the way up uses nothing", 2, &[("a", 900)], &["b"], &[], 30, 3, 90),
        ("missing turns the direction", 3, &[("a", 400)], &["b", "c"], &[], 30, 3, 40),
        ("a stranger's figure is not used", 1, &[("a", 300), ("z", 900)], &[], &[], 30, 1, 30),
        ("no overflow", 1, &[("a", i64::MAX)], &[], &[], 1, i32::MAX, i32::MAX),
    ];
    for (name, current, values, missing, unready, target, replicas, percentage) in rows {
        let figures = figures(*current, values, missing, unready, &[]).expect(name);
        let found = figures.utilization(&requests, *target).expect(name);
        assert_eq!((found.replicas, found.utilization), (*replicas, Some(*percentage)), "{name}");
    }
    let strangers = figures(1, &[("z", 1)], &[], &[], &[]).expect("a figure");
    assert_eq!(strangers.utilization(&requests, 50), Err(CalculationError::NoMatch));
}

#[test]
fn values_of_objects_and_external_metrics() {
    // Current; usage; target; ready pods; replicas.
    for (current, usage, target, ready, expected) in [
        (2, 20_000, 10_000, 2, 4),
        (2, 10_500, 10_000, 2, 2),
        (4, 5_000, 10_000, 4, 2),
        (4, 20_000, 10_000, 1, 2),
        (0, 25_000, 10_000, 7, 3),
        (1, i64::MAX, 1, 10, i32::MAX),
        (3, 0, 10_000, 3, 0),
    ] {
        let found = replicas::value(current, TENTH, usage, target, || Ok(ready)).expect("ready pods");
        assert_eq!((found.replicas, found.usage), (expected, usage), "{current} {usage}/{target}");
    }
    let error = replicas::value(1, TENTH, 9, 1, || Err(CalculationError::NoPods)).expect_err("no pods");
    assert_eq!(
        error.to_string(),
        "unable to calculate ready pods: no pods returned by selector while calculating replica count"
    );
    // Replicas; usage; target; replicas wanted; average.
    for (current, usage, target, expected, average) in [
        (2, 40_000, 10_000, 4, 20_000),
        (4, 41_000, 10_000, 4, 10_250),
        (3, 10_000, 10_000, 1, 3_334),
        (0, 10_000, 10_000, 1, 10_000),
        (1, i64::MAX, 1, i32::MAX, i64::MAX),
    ] {
        let found = replicas::average_value(current, TENTH, usage, target);
        assert_eq!((found.replicas, found.usage), (expected, average), "{current} {usage}/{target}");
    }
    assert_eq!(replicas::sum(&[1, 2, -5]), -2);
    assert_eq!(replicas::sum(&[i64::MAX, i64::MAX]), i64::MAX);
}

#[test]
fn tolerances_are_those_of_the_autoscaler() {
    let behavior = |value: Value| ferrite_json::from_value(value).expect("a behavior");
    let of = |value: Value| tolerances(0.1, Some(&behavior(value)));
    assert_eq!(tolerances(0.1, None), TENTH);
    assert_eq!(of(json!({})), TENTH);
    assert_eq!(of(json!({"scaleUp": {"tolerance": "0"}})), Tolerances { down: 0.1, up: 0.0 });
    assert_eq!(of(json!({"scaleDown": {"tolerance": "250m"}})), Tolerances { down: 0.25, up: 0.1 });
}

fn second(number: u64) -> Duration {
    Duration::from_secs(number)
}

#[test]
fn growth_is_at_most_doubled() {
    let mut history = History::default();
    let mut current = 1;
    history.begin(current, second(0));
    let mut steps = Vec::new();
    for step in 1..=6 {
        let bounds = Bounds { min: 1, max: 50, current };
        let found = history.normalize(bounds, 500, second(300), second(15 * step));
        steps.push((found.replicas, found.limited, found.limit.0));
        current = found.replicas;
    }
    let (rate, most) = ("ScaleUpLimit", "TooManyReplicas");
    let expected = [
        (4, true, rate),
        (8, true, rate),
        (16, true, rate),
        (32, true, rate),
        (50, true, most),
        (50, true, most),
    ];
    assert_eq!(steps, expected);
}

#[test]
fn nothing_shrinks_before_its_window_is_over() {
    let mut history = History::default();
    history.begin(3, second(0));
    let bounds = Bounds { min: 1, max: 3, current: 3 };
    // Time; recommendation; replicas; reasons of AbleToScale and ScalingLimited.
    for (at, desired, replicas, able, limit) in [
        (0, 1, 3, "ScaleDownStabilized", "DesiredWithinRange"),
        (299, 1, 3, "ScaleDownStabilized", "DesiredWithinRange"),
        (300, 1, 3, "ScaleDownStabilized", "DesiredWithinRange"),
        (301, 0, 1, "ScaleDownStabilized", "DesiredWithinRange"),
        (700, 0, 1, "ReadyForNewScale", "TooFewReplicas"),
    ] {
        let found = history.normalize(bounds, desired, second(300), second(at));
        assert_eq!((found.replicas, found.able.0, found.limit.0), (replicas, able, limit), "at {at}");
    }
}

#[test]
fn policies_limit_the_rate() {
    let policy =
        |kind: &str, value: i32, period: i32| json!({"type": kind, "value": value, "periodSeconds": period});
    let up = |select: &str, policies: Value| json!({"scaleUp": {"selectPolicy": select, "stabilizationWindowSeconds": 0, "policies": policies}});
    let down = |select: &str, policies: Value| json!({"scaleDown": {"selectPolicy": select, "stabilizationWindowSeconds": 0, "policies": policies}});
    let both = || json!([policy("Pods", 2, 60), policy("Percent", 50, 60)]);
    // Name; behavior; current; change before in the period; desired; replicas; reason.
    type Row = (&'static str, Value, i32, (i32, i32), i32, i32, &'static str);
    let rows: Vec<Row> = vec![
        ("defaults: four pods", json!({}), 1, (1, 1), 100, 5, "ScaleUpLimit"),
        ("defaults: twice as many", json!({}), 30, (30, 30), 100, 60, "ScaleUpLimit"),
        ("max of both, up", up("Max", both()), 10, (10, 10), 100, 15, "ScaleUpLimit"),
        ("min of both, up", up("Min", both()), 10, (10, 10), 100, 12, "ScaleUpLimit"),
        ("rounded up", up("Max", json!([policy("Percent", 10, 60)])), 1, (1, 1), 100, 2, "ScaleUpLimit"),
        ("disabled, up", up("Disabled", both()), 10, (10, 10), 100, 10, "ScaleUpLimit"),
        ("the period's growth counts", up("Min", both()), 10, (9, 10), 100, 11, "ScaleUpLimit"),
        ("no more in this period", up("Min", both()), 10, (5, 10), 100, 10, "ScaleUpLimit"),
        (
            "up to the maximum",
            up("Max", json!([policy("Pods", 500, 60)])),
            10,
            (10, 10),
            600,
            200,
            "TooManyReplicas",
        ),
        ("within", up("Max", both()), 10, (10, 10), 14, 14, "DesiredWithinRange"),
        ("max of both, down", down("Max", both()), 10, (10, 10), 1, 5, "ScaleDownLimit"),
        ("min of both, down", down("Min", both()), 10, (10, 10), 1, 8, "ScaleDownLimit"),
        ("disabled, down", down("Disabled", both()), 10, (10, 10), 1, 10, "ScaleDownLimit"),
        ("the period's shrinking counts", down("Min", both()), 10, (11, 10), 1, 9, "ScaleDownLimit"),
        (
            "down to the minimum",
            down("Max", json!([policy("Percent", 100, 60)])),
            10,
            (10, 10),
            0,
            1,
            "TooFewReplicas",
        ),
        ("no change", json!({}), 10, (10, 10), 10, 10, "DesiredWithinRange"),
    ];
    for (name, behavior, current, (from, to), desired, replicas, reason) in rows {
        let behavior = Behavior::of(&ferrite_json::from_value(behavior).expect(name), second(0));
        let mut history = History::default();
        history.scaled(Some(&behavior), from, to, second(100));
        let bounds = Bounds { min: 1, max: 200, current };
        let found = history.normalize_with(&behavior, bounds, desired, second(110));
        assert_eq!((found.replicas, found.limit.0), (replicas, reason), "{name}");
    }
    // Once the period is over, the next step is allowed.
    let behavior = Behavior::of(&ferrite_json::from_value(up("Min", both())).expect("a behavior"), second(0));
    let mut history = History::default();
    history.scaled(Some(&behavior), 5, 10, second(100));
    let bounds = Bounds { min: 1, max: 200, current: 10 };
    assert_eq!(history.normalize_with(&behavior, bounds, 100, second(159)).replicas, 10);
    assert_eq!(history.normalize_with(&behavior, bounds, 100, second(160)).replicas, 12);
}

#[test]
fn windows_hold_both_directions() {
    let behavior = json!({
        "scaleUp": {"stabilizationWindowSeconds": 60, "policies": [{"type": "Pods", "value": 100, "periodSeconds": 15}]},
        "scaleDown": {"policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}]}});
    let behavior = Behavior::of(&ferrite_json::from_value(behavior).expect("a behavior"), second(120));
    let mut history = History::default();
    history.begin(5, second(0));
    let bounds = Bounds { min: 1, max: 100, current: 5 };
    // Time; recommendation; replicas; reason of AbleToScale.
    for (at, desired, replicas, able) in [
        (10, 20, 5, "ScaleUpStabilized"),
        (59, 10, 5, "ScaleUpStabilized"),
        (60, 20, 10, "ScaleUpStabilized"),
        (61, 2, 5, "ScaleDownStabilized"),
        (179, 2, 5, "ScaleDownStabilized"),
        (180, 2, 2, "ReadyForNewScale"),
    ] {
        let found = history.normalize_with(&behavior, bounds, desired, second(at));
        assert_eq!((found.replicas, found.able.0), (replicas, able), "at {at}");
    }
}

#[test]
fn the_highest_proposal_decides() {
    let good = |replicas: i32, metric: &str| {
        Ok(Proposal { replicas, metric: metric.to_owned(), status: Default::default() })
    };
    let bad = || Err(Failure::new("FailedGetPodsMetric", ProposalError::UnknownType("x".into()), "failed: "));
    // Outcomes; current; number and metric.
    type Row = (Vec<Result<Proposal, Failure>>, i32, Option<(i32, &'static str)>);
    let rows: Vec<Row> = vec![
        (vec![good(4, "a"), good(5, "b")], 3, Some((5, "b"))),
        (vec![good(5, "a"), good(5, "b")], 3, Some((5, "a"))),
        (vec![bad(), good(5, "b")], 3, Some((5, "b"))),
        (vec![bad(), good(3, "b")], 3, Some((3, "b"))),
        (vec![bad(), good(2, "b")], 3, None),
        (vec![bad(), bad()], 3, None),
        (vec![good(0, "a"), good(0, "b")], 3, Some((0, "b"))),
    ];
    for (index, (outcomes, current, expected)) in rows.into_iter().enumerate() {
        let (invalid, total) = (outcomes.iter().filter(|o| o.is_err()).count(), outcomes.len());
        let told = format!(
            "invalid metrics ({invalid} invalid out of {total}), first error is: failed: unknown metric source type \"x\""
        );
        let found = combine(outcomes, current);
        assert_eq!(found.statuses.len(), total, "row {index}");
        match (found.result, expected) {
            (Ok(found), Some((replicas, metric))) => {
                assert_eq!((found.replicas, &*found.metric), (replicas, metric), "row {index}");
                assert_eq!(found.problem, (invalid > 0).then_some(told), "row {index}");
            }
            (Err(failed), None) => {
                assert_eq!((failed.reason, failed.error), ("FailedGetPodsMetric", told), "row {index}");
                let message =
                    "the HPA was unable to compute the replica count: unknown metric source type \"x\"";
                assert_eq!(failed.message, message, "row {index}");
            }
            (found, _) => panic!("row {index}: {found:?}"),
        }
    }
}
