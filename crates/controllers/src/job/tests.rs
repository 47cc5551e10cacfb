//! Decisions about one Job at one moment, as a table.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use ferrite_json::{Value, json};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;

use super::assess::Assessment;
use super::backoff::BackoffRecord;
use super::plan::{Plan, indexed_pod, plan, template_pod};
use super::{FINALIZER, Rules, completion_index};

fn now() -> Timestamp {
    "2024-01-01T12:00:00Z".parse().unwrap()
}

fn ago(seconds: i64) -> Timestamp {
    now() - SignedDuration::from_secs(seconds)
}

/// A Job with upstream's defaults and these changes.
fn job(spec: Value, status: Value) -> Job {
    let mut whole = json!({"parallelism": 1, "completions": 1, "backoffLimit": 6, "template": {"spec": {
        "restartPolicy": "Never", "containers": [{"name": "c"}]}}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    ferrite_json::from_value(json!({"metadata": {"name": "j", "namespace": "ns", "uid": "job"},
        "spec": whole, "status": status}))
    .unwrap()
}

/// A pod in words: its index if it is a number, its phase, `ready`, `gone` if it is being deleted, `exit=N`, `count=N`
/// failures of its index before it, `counted` if it has no finalizer, `restarts=N`, `ended=N` seconds ago.
fn pod(number: usize, words: &str) -> Arc<Pod> {
    let mut pod = json!({
        "metadata": {"name": format!("p{number}"), "namespace": "ns", "uid": format!("u{number}"),
                     "creationTimestamp": ago(3600), "finalizers": [FINALIZER], "annotations": {}},
        "spec": {"nodeName": "n", "containers": []},
        "status": {"phase": "Running", "containerStatuses": [
            {"name": "c", "ready": false, "restartCount": 0, "image": "", "imageID": "", "state": {}}]}});
    for word in words.split_whitespace() {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let number = || value.parse::<i64>().unwrap();
        match key {
            "Pending" | "Running" | "Succeeded" | "Failed" => pod["status"]["phase"] = json!(key),
            "ready" => pod["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]),
            "gone" => pod["metadata"]["deletionTimestamp"] = json!(ago(60)),
            "counted" => pod["metadata"]["finalizers"] = json!([]),
            "unassigned" => pod["spec"]["nodeName"] = Value::Null,
            "count" => pod["metadata"]["annotations"][super::INDEX_FAILURES] = json!(value),
            "restarts" => pod["status"]["containerStatuses"][0]["restartCount"] = json!(number()),
            "exit" => {
                pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] = json!(number())
            }
            "ended" => {
                let state = &mut pod["status"]["containerStatuses"][0]["state"]["terminated"];
                state["finishedAt"] = json!(ago(number()));
                if state.get("exitCode").is_none() {
                    state["exitCode"] = json!(1);
                }
            }
            index => pod["metadata"]["annotations"][super::COMPLETION_INDEX] = json!(index),
        }
    }
    Arc::new(ferrite_json::from_value(pod).unwrap())
}

fn pods(words: &[&str]) -> Vec<Arc<Pod>> {
    words.iter().enumerate().map(|(number, words)| pod(number, words)).collect()
}

/// The plan or verdict in words.
fn decided(job: &Job, words: &[&str]) -> String {
    let removed = HashSet::new();
    let rules = Rules::of(job).unwrap();
    let assessment = Assessment::new(job, rules, pods(words), &removed, &BackoffRecord::default(), now());
    if let Some(verdict) = &assessment.verdict {
        return format!("{:?}: {}", verdict.outcome, verdict.reason);
    }
    match plan(&assessment, now()) {
        Plan::Nothing => "nothing".to_owned(),
        Plan::Wait(delay) => format!("wait {}", delay.as_secs()),
        Plan::Delete(victims) => {
            let mut names: Vec<_> = victims.iter().map(|pod| super::name(pod).to_owned()).collect();
            names.sort();
            format!("delete {}", names.join(" "))
        }
        Plan::Create { indexes, more } => {
            let indexes: Vec<_> = indexes.into_iter().flatten().map(|index| index.to_string()).collect();
            let count = match plan(&assessment, now()) {
                Plan::Create { indexes, .. } => indexes.len(),
                _ => 0,
            };
            let which = if indexes.len() > 5 { String::new() } else { indexes.join(" ") };
            format!(
                "create {count}{}{which}{}",
                if which.is_empty() { "" } else { ": " },
                if more { " and more" } else { "" }
            )
        }
    }
}

#[test]
fn numbers_of_pods() {
    let indexed = |completions: i32, parallelism: i32| json!({"completionMode": "Indexed", "completions": completions, "parallelism": parallelism});
    let none = json!({});
    for (what, spec, status, pods, expected) in [
        ("the first pods", json!({"completions": 4, "parallelism": 2}), &none, &[][..], "create 2"),
        (
            "no more than the parallelism",
            json!({"completions": 4, "parallelism": 2}),
            &none,
            &["Running"],
            "create 1",
        ),
        (
            "no more than what is left to do",
            json!({"completions": 4, "parallelism": 3}),
            &json!({"succeeded": 3}),
            &["Running"],
            "nothing",
        ),
        (
            "a large job in parts",
            json!({"completions": 1200, "parallelism": 1200}),
            &none,
            &[],
            "create 500 and more",
        ),
        ("no parallelism", json!({"parallelism": 0}), &none, &[], "nothing"),
        (
            "unready pods go first",
            json!({"completions": 4, "parallelism": 1}),
            &none,
            &["Running ready", "Running", "Pending", "Pending unassigned"],
            "delete p1 p2 p3",
        ),
        (
            "without completions, the others are left alone after a success",
            json!({"completions": null, "parallelism": 3}),
            &json!({"succeeded": 1}),
            &["Running"],
            "nothing",
        ),
        (
            "without completions",
            json!({"completions": null, "parallelism": 3}),
            &none,
            &["Running"],
            "create 2",
        ),
        (
            "a suspended job",
            json!({"parallelism": 2, "completions": 2, "suspend": true}),
            &none,
            &["Running", "Pending"],
            "delete p0 p1",
        ),
        ("a suspended job without pods", json!({"suspend": true}), &none, &[], "nothing"),
        ("a pod that is being deleted is replaced", json!({}), &none, &["Running gone ended=60"], "create 1"),
        (
            "or not before it has failed",
            json!({"podReplacementPolicy": "Failed"}),
            &none,
            &["Running gone"],
            "nothing",
        ),
        ("the back-off after one failure", json!({}), &none, &["Failed ended=4"], "wait 6"),
        ("the back-off after two", json!({}), &none, &["Failed ended=4", "Failed ended=30"], "wait 16"),
        ("the back-off is over", json!({}), &none, &["Failed ended=11"], "create 1"),
        (
            "a success resets it",
            json!({"completions": 2}),
            &none,
            &["Failed ended=4", "Succeeded ended=3"],
            "create 1",
        ),
        ("the first indexes", indexed(5, 3), &none, &[], "create 3: 0 1 2"),
        (
            "indexes without a pod or success",
            indexed(6, 6),
            &json!({"completedIndexes": "1,2", "succeeded": 2}),
            &["0 Running", "4 Succeeded"],
            "create 2: 3 5",
        ),
        (
            "an index beyond the completions",
            indexed(2, 2),
            &none,
            &["0 Running", "1 Running", "2 Running"],
            "delete p2",
        ),
        ("a pod without an index", indexed(2, 2), &none, &["0 Running", "Running"], "delete p1"),
        ("two pods of one index", indexed(2, 2), &none, &["0 Running ready", "0 Running"], "delete p1"),
        (
            "a terminating index is not replaced",
            json!({"completionMode": "Indexed", "completions": 2, "parallelism": 2, "podReplacementPolicy": "Failed"}),
            &none,
            &["0 Running gone"],
            "create 1: 1",
        ),
    ] {
        assert_eq!(decided(&job(spec, status.clone()), pods), expected, "{what}");
    }
}

#[test]
fn ends() {
    let indexed = |more: Value| {
        let mut spec = json!({"completionMode": "Indexed", "completions": 3, "parallelism": 3});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    let rules = |action: &str| json!({"rules": [{"action": action, "onExitCodes": {"operator": "In", "values": [3]}}]});
    let none = json!({});
    let started = |seconds: i64| json!({"startTime": ago(seconds)});
    let condition =
        |kind: &str| json!({"conditions": [{"type": kind, "status": "True", "reason": "Earlier"}]});
    for (what, spec, status, pods, expected) in [
        (
            "as many failures as allowed",
            json!({"backoffLimit": 1}),
            &none,
            &["Failed ended=90"][..],
            "create 1",
        ),
        (
            "one more",
            json!({"backoffLimit": 1}),
            &none,
            &["Failed", "Failed"],
            "Failure: BackoffLimitExceeded",
        ),
        (
            "with those counted",
            json!({"backoffLimit": 1}),
            &json!({"failed": 1}),
            &["Failed"],
            "Failure: BackoffLimitExceeded",
        ),
        (
            "a pod is not counted twice",
            json!({"backoffLimit": 1}),
            &json!({"failed": 1}),
            &["Failed counted ended=90"],
            "create 1",
        ),
        (
            "nor one that is being counted",
            json!({"backoffLimit": 1}),
            &json!({"uncountedTerminatedPods": {"failed": ["u0"]}}),
            &["Failed ended=90"],
            "create 1",
        ),
        (
            "restarts of containers",
            json!({"backoffLimit": 3, "template": {"spec": {"restartPolicy": "OnFailure", "containers": []}}}),
            &none,
            &["Running restarts=3"],
            "Failure: BackoffLimitExceeded",
        ),
        (
            "fewer restarts",
            json!({"backoffLimit": 3, "template": {"spec": {"restartPolicy": "OnFailure", "containers": []}}}),
            &none,
            &["Running restarts=2"],
            "nothing",
        ),
        (
            "the deadline",
            json!({"activeDeadlineSeconds": 10}),
            &started(10),
            &["Running"],
            "Failure: DeadlineExceeded",
        ),
        ("before the deadline", json!({"activeDeadlineSeconds": 10}), &started(9), &["Running"], "nothing"),
        ("suspended", json!({"activeDeadlineSeconds": 10, "suspend": true}), &started(99), &[], "nothing"),
        (
            "a pod fails the job",
            json!({"podFailurePolicy": rules("FailJob")}),
            &none,
            &["Failed exit=3"],
            "Failure: PodFailurePolicy",
        ),
        (
            "an ignored failure",
            json!({"backoffLimit": 0, "podFailurePolicy": rules("Ignore")}),
            &none,
            &["Failed exit=3 ended=90"],
            "create 1",
        ),
        (
            "a counted failure",
            json!({"backoffLimit": 0, "podFailurePolicy": rules("Count")}),
            &none,
            &["Failed exit=3"],
            "Failure: BackoffLimitExceeded",
        ),
        ("an earlier failure", json!({}), &condition("FailureTarget"), &["Running"], "Failure: Earlier"),
        (
            "an earlier success",
            json!({}),
            &condition("SuccessCriteriaMet"),
            &["Failed", "Running"],
            "Success: Earlier",
        ),
        (
            "a success policy",
            indexed(json!({"successPolicy": {"rules": [{"succeededIndexes": "2"}]}})),
            &none,
            &["0 Running", "2 Succeeded"],
            "Success: SuccessPolicy",
        ),
        (
            "an index that has failed is left alone",
            indexed(json!({"backoffLimitPerIndex": 1})),
            &none,
            &["0 Running", "1 Failed count=1", "2 Running"],
            "nothing",
        ),
        (
            "an index that may fail once more",
            indexed(json!({"backoffLimitPerIndex": 1})),
            &none,
            &["0 Running", "1 Failed count=0 ended=4", "2 Running"],
            "wait 6",
        ),
        (
            "another index does not wait for it",
            indexed(json!({"backoffLimitPerIndex": 1})),
            &none,
            &["0 Running", "1 Failed count=0 ended=4"],
            "create 1: 2",
        ),
        (
            "all indexes are done",
            indexed(json!({"backoffLimitPerIndex": 0})),
            &json!({"completedIndexes": "0,2", "succeeded": 2}),
            &["1 Failed"],
            "Failure: FailedIndexes",
        ),
        (
            "too many failed indexes",
            indexed(json!({"backoffLimitPerIndex": 0, "maxFailedIndexes": 1})),
            &json!({"failedIndexes": "0"}),
            &["1 Failed", "2 Running"],
            "Failure: MaxFailedIndexesExceeded",
        ),
        (
            "a rule fails the index",
            indexed(
                json!({"backoffLimitPerIndex": 5, "maxFailedIndexes": 0, "podFailurePolicy": rules("FailIndex")}),
            ),
            &none,
            &["1 Failed exit=3"],
            "Failure: MaxFailedIndexesExceeded",
        ),
    ] {
        assert_eq!(decided(&job(spec, status.clone()), pods), expected, "{what}");
    }
}

#[test]
fn the_deadline_is_awaited() {
    let job = job(json!({"activeDeadlineSeconds": 10}), json!({"startTime": ago(4)}));
    let removed = HashSet::new();
    let rules = Rules::of(&job).unwrap();
    let assessment = Assessment::new(&job, rules, Vec::new(), &removed, &BackoffRecord::default(), now());
    assert_eq!(assessment.deadline_in, Some(Duration::from_secs(6)));
}

#[test]
fn pods_know_their_index_and_its_failures() {
    let mut job = job(
        json!({"completionMode": "Indexed", "completions": 3, "parallelism": 3, "backoffLimitPerIndex": 3,
               "podFailurePolicy": {"rules": [{"action": "Ignore", "onExitCodes": {"operator": "In", "values": [3]}}]}}),
        json!({}),
    );
    job.spec.as_mut().unwrap().template.metadata =
        Some(ferrite_json::from_value(json!({"finalizers": ["a/b"], "labels": {"x": "y"}})).unwrap());
    let removed = HashSet::new();
    let rules = Rules::of(&job).unwrap();
    let words = ["0 Failed count=1 exit=1 ended=99", "1 Failed count=1 exit=3 ended=99"];
    let assessment = Assessment::new(&job, rules, pods(&words), &removed, &BackoffRecord::default(), now());
    let template = template_pod(&job, &assessment);
    let failures = |index| {
        let pod = indexed_pod(&job, &assessment, &template, index);
        assert_eq!(completion_index(&pod), Some(index));
        assert_eq!(pod.metadata.finalizers.as_deref(), Some(&["a/b".to_owned(), FINALIZER.to_owned()][..]));
        assert_eq!(pod.metadata.labels.as_ref().unwrap()["x"], "y");
        assert_eq!(pod.spec.as_ref().unwrap().hostname, Some(format!("j-{index}")));
        let annotations = pod.metadata.annotations.unwrap();
        let count = |name: &str| annotations.get(name).map(String::as_str).unwrap_or("-").to_owned();
        (count(super::INDEX_FAILURES), count(super::INDEX_IGNORED_FAILURES))
    };
    assert_eq!(failures(0), ("2".to_owned(), "-".to_owned()));
    assert_eq!(failures(1), ("1".to_owned(), "1".to_owned()));
    assert_eq!(failures(2), ("0".to_owned(), "-".to_owned()));
}
