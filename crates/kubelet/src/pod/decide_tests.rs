use super::*;
use crate::pod::runtime_pod::Sandbox;
use ferrite_json::{Value, json};
use std::collections::BTreeMap;

fn pod(spec: Value) -> Pod {
    ferrite_json::from_value(json!({"metadata": {"name": "p", "namespace": "d", "uid": "u"}, "spec": spec}))
        .unwrap()
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + seconds).unwrap()
}

fn sandbox(attempt: u32, ready: bool) -> Sandbox {
    Sandbox { id: format!("s{attempt}"), attempt, ready, created_at: 0, ips: vec!["10.0.0.1".into()] }
}

fn instance(name: &str, attempt: u32, state: RunState, exit_code: i32) -> Instance {
    Instance {
        id: format!("{name}-{attempt}"),
        sandbox_id: "s0".into(),
        name: name.into(),
        attempt,
        state,
        created_at: Some(at(i64::from(attempt))),
        started_at: Some(at(0)),
        finished_at: Some(at(10)),
        exit_code,
        reason: String::new(),
        message: String::new(),
        image: String::new(),
        image_ref: String::new(),
        image_id: String::new(),
        resources: None,
        of_pod: None,
        hash: None,
        log_path: String::new(),
        annotations: BTreeMap::new(),
        user: None,
        mounts: Vec::new(),
    }
}

fn run(pod: &Pod, sandboxes: Vec<Sandbox>, instances: Vec<Instance>) -> Actions {
    let runtime = RuntimePod::new(sandboxes, instances);
    decide(&Inputs {
        pod,
        runtime: &runtime,
        probes: &ProbeResults::default(),
        backoff: &BackOff::default(),
        now: at(10),
        attempts: &BTreeMap::new(),
    })
}

/// A short form of the decisions, for tables.
fn shown(a: &Actions) -> String {
    let mut words = Vec::new();
    if a.finished {
        words.push("finished".to_string());
    }
    if a.kill_pod {
        words.push("kill-pod".to_string());
    }
    if let Some(n) = a.create_sandbox {
        words.push(format!("sandbox#{n}"));
    }
    words.extend(a.kill.iter().map(|k| format!("kill:{}", k.id)));
    words.extend(a.start.iter().map(|s| format!("start:{}#{}", s.name, s.attempt)));
    words.extend(a.waiting.iter().map(|w| format!("wait:{}", w.name)));
    words.join(" ")
}

#[test]
fn a_pod_of_one_container() {
    use RunState::*;
    let spec = |policy: &str| pod(json!({"restartPolicy": policy, "containers": [{"name": "c"}]}));
    for (what, policy, sandboxes, instances, expected) in [
        ("nothing yet", "Always", vec![], vec![], "sandbox#0 start:c#0"),
        ("sandbox only", "Always", vec![sandbox(0, true)], vec![], "start:c#0"),
        ("running", "Always", vec![sandbox(0, true)], vec![instance("c", 0, Running, 0)], ""),
        (
            "made, not started",
            "Always",
            vec![sandbox(0, true)],
            vec![instance("c", 2, Created, 0)],
            "start:c#2",
        ),
        ("exit 0, Always", "Always", vec![sandbox(0, true)], vec![instance("c", 0, Exited, 0)], "start:c#1"),
        (
            "exit 0, OnFailure",
            "OnFailure",
            vec![sandbox(0, true)],
            vec![instance("c", 0, Exited, 0)],
            "finished kill-pod",
        ),
        (
            "exit 1, OnFailure",
            "OnFailure",
            vec![sandbox(0, true)],
            vec![instance("c", 0, Exited, 1)],
            "start:c#1",
        ),
        (
            "exit 1, Never",
            "Never",
            vec![sandbox(0, true)],
            vec![instance("c", 0, Exited, 1)],
            "finished kill-pod",
        ),
        ("lost sight of", "Always", vec![sandbox(0, true)], vec![instance("c", 0, Unknown, 0)], "kill:c-0"),
        (
            "sandbox died, Always",
            "Always",
            vec![sandbox(0, false)],
            vec![instance("c", 0, Exited, 137)],
            "kill-pod sandbox#1 start:c#1",
        ),
        (
            "sandbox died, Never",
            "Never",
            vec![sandbox(0, false)],
            vec![instance("c", 0, Exited, 137)],
            "finished kill-pod",
        ),
        (
            "sandbox died before any container",
            "Never",
            vec![sandbox(0, false)],
            vec![],
            "kill-pod sandbox#1 start:c#0",
        ),
        (
            "sandbox died after success",
            "OnFailure",
            vec![sandbox(0, false)],
            vec![instance("c", 0, Exited, 0)],
            "finished kill-pod",
        ),
        (
            "two live sandboxes",
            "Always",
            vec![sandbox(0, true), sandbox(1, true)],
            vec![],
            "kill-pod sandbox#2 start:c#0",
        ),
    ] {
        assert_eq!(shown(&run(&spec(policy), sandboxes, instances)), expected, "{what}");
    }
}

#[test]
fn init_containers_run_one_after_another() {
    use RunState::*;
    let spec = |policy: &str| {
        pod(json!({
            "restartPolicy": policy,
            "initContainers": [{"name": "i1"}, {"name": "i2"}],
            "containers": [{"name": "a"}, {"name": "b"}],
        }))
    };
    let s = || vec![sandbox(0, true)];
    for (what, policy, sandboxes, instances, expected) in [
        ("nothing yet", "Always", vec![], vec![], "sandbox#0 start:i1#0"),
        ("first runs", "Always", s(), vec![instance("i1", 0, Running, 0)], ""),
        ("first done", "Always", s(), vec![instance("i1", 0, Exited, 0)], "start:i2#0"),
        ("first failed", "Always", s(), vec![instance("i1", 0, Exited, 1)], "start:i1#1"),
        ("first failed, Never", "Never", s(), vec![instance("i1", 0, Exited, 1)], "finished kill-pod"),
        (
            "both done",
            "Always",
            s(),
            vec![instance("i1", 0, Exited, 0), instance("i2", 0, Exited, 0)],
            "start:a#0 start:b#0",
        ),
        (
            "a regular one ran already: init containers are over even when their records are gone",
            "Always",
            s(),
            vec![instance("a", 0, Exited, 1), instance("b", 0, Running, 0)],
            "start:a#1",
        ),
        (
            "new sandbox runs them again",
            "Always",
            vec![sandbox(0, false)],
            vec![instance("i1", 0, Exited, 0), instance("i2", 0, Exited, 0), instance("a", 0, Exited, 137)],
            "kill-pod sandbox#1 start:i1#1",
        ),
    ] {
        assert_eq!(shown(&run(&spec(policy), sandboxes, instances)), expected, "{what}");
    }
}

#[test]
fn sidecars_start_in_order_and_are_kept_up() {
    use RunState::*;
    let p = pod(json!({
        "restartPolicy": "Never",
        "initContainers": [{"name": "side", "restartPolicy": "Always"}, {"name": "i"}],
        "containers": [{"name": "a"}],
    }));
    let s = || vec![sandbox(0, true)];
    for (what, instances, expected) in [
        ("first the sidecar", vec![], "start:side#0"),
        ("then the next, while it runs", vec![instance("side", 0, Running, 0)], "start:i#0"),
        (
            "then the container",
            vec![instance("side", 0, Running, 0), instance("i", 0, Exited, 0)],
            "start:a#0",
        ),
        (
            "a sidecar that ended starts again although the pod says Never",
            vec![instance("side", 0, Exited, 0), instance("i", 0, Exited, 0), instance("a", 0, Running, 0)],
            "start:side#1",
        ),
        (
            "the pod ends with its containers, not with its sidecars",
            vec![instance("side", 0, Running, 0), instance("i", 0, Exited, 0), instance("a", 0, Exited, 0)],
            "finished kill-pod",
        ),
    ] {
        assert_eq!(shown(&run(&p, s(), instances)), expected, "{what}");
    }
}

#[test]
fn ephemeral_containers_start_once_even_while_init_runs() {
    let p = pod(json!({
        "initContainers": [{"name": "i"}],
        "containers": [{"name": "a"}],
        "ephemeralContainers": [{"name": "e"}],
    }));
    let s = || vec![sandbox(0, true)];
    let init = || instance("i", 0, RunState::Running, 0);
    assert_eq!(shown(&run(&p, s(), vec![init()])), "start:e#0");
    assert_eq!(shown(&run(&p, s(), vec![init(), instance("e", 0, RunState::Exited, 1)])), "");
}

#[test]
fn probes_and_image_changes_kill_and_back_off_delays() {
    let p = pod(json!({"containers": [{"name": "c", "image": "new", "livenessProbe": {"exec": {}}}]}));
    let mut running = instance("c", 0, RunState::Running, 0);
    let runtime = RuntimePod::new(vec![sandbox(0, true)], vec![running.clone()]);
    let mut probes = ProbeResults::default();
    probes.fail_liveness("c-0");
    let backoff = BackOff::default();
    let attempts = BTreeMap::new();
    let inputs = Inputs {
        pod: &p,
        runtime: &runtime,
        probes: &probes,
        backoff: &backoff,
        now: at(20),
        attempts: &attempts,
    };
    let killed = decide(&inputs);
    assert_eq!(killed.kill[0].message, "Container c failed liveness probe, will be restarted");

    running.hash = Some("old".into());
    let actions = run(&p, vec![sandbox(0, true)], vec![running]);
    assert_eq!(actions.kill[0].message, "Container c definition changed, will be restarted");

    let runtime = RuntimePod::new(vec![sandbox(0, true)], vec![instance("c", 1, RunState::Exited, 1)]);
    let mut backoff = BackOff::default();
    backoff.next("c", at(5), at(5));
    let inputs = Inputs {
        pod: &p,
        runtime: &runtime,
        probes: &probes,
        backoff: &backoff,
        now: at(12),
        attempts: &attempts,
    };
    let waiting = decide(&inputs);
    assert_eq!(shown(&waiting), "wait:c");
    assert_eq!(waiting.wake_at(), Some(at(20)));
}

#[test]
fn restart_rules_of_a_container_come_before_the_policy() {
    let p = pod(json!({"restartPolicy": "Never", "containers": [{
        "name": "c", "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}],
    }]}));
    let s = || vec![sandbox(0, true)];
    assert_eq!(shown(&run(&p, s(), vec![instance("c", 0, RunState::Exited, 42)])), "start:c#1");
    assert_eq!(shown(&run(&p, s(), vec![instance("c", 0, RunState::Exited, 1)])), "finished kill-pod");
}

#[test]
fn a_sidecar_that_waits_holds_up_nothing_that_it_let_pass() {
    use RunState::*;
    let p = pod(json!({
        "initContainers": [{"name": "side", "restartPolicy": "Always"}, {"name": "init"}, {"name": "last"}],
        "containers": [{"name": "c"}],
    }));
    for (what, side, rest, expected) in [
        ("its turn is now", 1, vec![], "wait:side"),
        ("the next one runs", 1, vec![instance("init", 0, Running, 0)], "wait:side"),
        ("the next one has ended", 1, vec![instance("init", 0, Exited, 0)], "start:last#0 wait:side"),
        (
            "all have ended",
            1,
            vec![instance("init", 0, Exited, 0), instance("last", 0, Exited, 0)],
            "start:c#0 wait:side",
        ),
        ("an earlier one was removed", 1, vec![instance("last", 0, Exited, 0)], "start:c#0 wait:side"),
    ] {
        let mut backoff = BackOff::default();
        backoff.next("side", at(10), at(10));
        let mut instances = vec![instance("side", side, Exited, 1)];
        instances.extend(rest);
        let runtime = RuntimePod::new(vec![sandbox(0, true)], instances);
        let actions = decide(&Inputs {
            pod: &p,
            runtime: &runtime,
            probes: &ProbeResults::default(),
            backoff: &backoff,
            now: at(10),
            attempts: &BTreeMap::new(),
        });
        assert_eq!(shown(&actions), expected, "{what}");
    }
}

#[test]
fn events_tell_init_containers_apart() {
    let p = pod(json!({
        "initContainers": [{"name": "side", "restartPolicy": "Always", "livenessProbe": {}}],
        "containers": [{"name": "c", "livenessProbe": {}}],
    }));
    let instances = vec![instance("side", 0, RunState::Running, 0), instance("c", 0, RunState::Running, 0)];
    let runtime = RuntimePod::new(vec![sandbox(0, true)], instances);
    let mut probes = ProbeResults::default();
    probes.fail_liveness("side-0");
    probes.fail_liveness("c-0");
    let actions = decide(&Inputs {
        pod: &p,
        runtime: &runtime,
        probes: &probes,
        backoff: &BackOff::default(),
        now: at(10),
        attempts: &BTreeMap::new(),
    });
    let messages: Vec<&str> = actions.kill.iter().map(|kill| kill.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "Init container side failed liveness probe, will be restarted",
            "Container c failed liveness probe, will be restarted"
        ]
    );
}
