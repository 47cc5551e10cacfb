use super::*;
use crate::pod::runtime_pod::Sandbox;
use ferrite_json::{Value, json};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + seconds).unwrap()
}

fn pod(spec: Value) -> Pod {
    ferrite_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec}))
        .unwrap()
}

fn instance(name: &str, state: RunState, exit_code: i32) -> Instance {
    let status = ferrite_cri::v1::ContainerStatus {
        id: format!("id-{name}"),
        metadata: Some(ferrite_cri::v1::ContainerMetadata { name: name.into(), attempt: 0 }),
        exit_code,
        ..Default::default()
    };
    Instance { state, started_at: Some(at(1)), finished_at: Some(at(2)), ..Instance::from_cri("s", status) }
}

struct Case<'a> {
    spec: Value,
    instances: Vec<Instance>,
    waiting: &'a [(&'a str, &'a str)],
    terminated: bool,
}

fn run(case: Case<'_>) -> PodStatus {
    let sandbox =
        Sandbox { id: "s".into(), attempt: 0, ready: true, created_at: 0, ips: vec!["10.0.0.2".into()] };
    let runtime = RuntimePod::new(vec![sandbox], case.instances);
    let waiting = case
        .waiting
        .iter()
        .map(|(name, reason)| (name.to_string(), WaitingReason::new(reason, "m")))
        .collect();
    pod_status(&StatusInputs {
        devices: &|_| Vec::new(),
        resize: &resize::Progress::default(),
        group: None,
        pod: &pod(case.spec),
        runtime: &runtime,
        removed: &Default::default(),
        probes: &ProbeResults::default(),
        waiting: &waiting,
        verdict: None,
        terminating: case.terminated,
        terminated: case.terminated,
        host_ips: &["192.0.2.1".to_owned()],
        runtime_name: "ferrite",
        now: at(9),
    })
}

#[test]
fn phases() {
    use RunState::*;
    let two = |policy: &str| json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]});
    let with_init = |policy: &str| json!({"restartPolicy": policy, "initContainers": [{"name": "i"}], "containers": [{"name": "a"}]});
    let with_sidecar = json!({"restartPolicy": "Never", "initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]});
    let i = instance;
    for (what, spec, instances, terminated, expected) in [
        ("nothing runs", two("Always"), vec![], false, "Pending"),
        ("one still waits", two("Always"), vec![i("a", Running, 0)], false, "Pending"),
        ("both run", two("Always"), vec![i("a", Running, 0), i("b", Running, 0)], false, "Running"),
        ("one ended", two("Never"), vec![i("a", Running, 0), i("b", Exited, 1)], false, "Running"),
        ("both succeeded", two("Never"), vec![i("a", Exited, 0), i("b", Exited, 0)], false, "Succeeded"),
        ("one failed", two("Never"), vec![i("a", Exited, 0), i("b", Exited, 1)], false, "Failed"),
        ("to be restarted", two("OnFailure"), vec![i("a", Exited, 0), i("b", Exited, 1)], false, "Running"),
        ("always", two("Always"), vec![i("a", Exited, 0), i("b", Exited, 0)], false, "Running"),
        ("stopped for good", two("Always"), vec![i("a", Exited, 0), i("b", Exited, 143)], true, "Failed"),
        ("stopped in peace", two("Always"), vec![i("a", Exited, 0), i("b", Exited, 0)], true, "Succeeded"),
        ("init runs", with_init("Always"), vec![i("i", Running, 0)], false, "Pending"),
        ("init failed", with_init("Never"), vec![i("i", Exited, 1)], false, "Failed"),
        ("init is retried", with_init("Always"), vec![i("i", Exited, 1)], false, "Pending"),
        ("after init", with_init("Always"), vec![i("i", Exited, 0), i("a", Running, 0)], false, "Running"),
        (
            "beside a sidecar",
            with_sidecar.clone(),
            vec![i("s", Running, 0), i("a", Running, 0)],
            false,
            "Running",
        ),
        (
            "a sidecar still runs, so the phase stays",
            with_sidecar.clone(),
            vec![i("s", Running, 0), i("a", Exited, 0)],
            false,
            "Pending",
        ),
        (
            "sidecars do not count",
            with_sidecar,
            vec![i("s", Exited, 1), i("a", Exited, 0)],
            false,
            "Succeeded",
        ),
    ] {
        let status = run(Case { spec, instances, waiting: &[], terminated });
        assert_eq!(status.phase.as_deref(), Some(expected), "{what}");
    }
}

#[test]
fn conditions_say_what_is_missing() {
    let spec = json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]});
    let status = run(Case {
        spec,
        instances: vec![instance("i", RunState::Running, 0)],
        waiting: &[],
        terminated: false,
    });
    let get =
        |name: &str| status.conditions.as_ref().unwrap().iter().find(|c| c.type_ == name).unwrap().clone();
    assert_eq!(get("Initialized").message.as_deref(), Some("containers with incomplete status: [i]"));
    assert_eq!(get("Ready").message.as_deref(), Some("containers with unready status: [a b]"));
    assert_eq!(get("PodReadyToStartContainers").status, "True");
    assert_eq!(get("PodScheduled").status, "True");
}

#[test]
fn a_wait_hides_the_end_behind_it() {
    let mut ended = instance("a", RunState::Exited, 137);
    ended.reason = "OOMKilled".into();
    let spec = json!({"containers": [{"name": "a"}]});
    let case =
        Case { spec, instances: vec![ended], waiting: &[("a", "CrashLoopBackOff")], terminated: false };
    let status = run(case).container_statuses.unwrap().remove(0);
    assert_eq!(status.state.unwrap().waiting.unwrap().reason.as_deref(), Some("CrashLoopBackOff"));
    let last = status.last_state.unwrap().terminated.unwrap();
    assert_eq!((last.exit_code, last.reason.as_deref()), (137, Some("OOMKilled")));
}

#[test]
fn a_final_phase_stays() {
    let mut finished = pod(json!({"containers": [{"name": "a"}]}));
    finished.status = Some(PodStatus { phase: Some("Succeeded".into()), ..PodStatus::default() });
    let status = pod_status(&StatusInputs {
        devices: &|_| Vec::new(),
        resize: &resize::Progress::default(),
        group: None,
        pod: &finished,
        runtime: &RuntimePod::default(),
        removed: &Default::default(),
        probes: &ProbeResults::default(),
        waiting: &HashMap::new(),
        verdict: Some(&Verdict {
            reason: "Evicted".into(),
            message: String::new(),
            disruption: None,
            grace: None,
        }),
        terminating: true,
        terminated: true,
        host_ips: &["192.0.2.1".to_owned()],
        runtime_name: "ferrite",
        now: at(9),
    });
    assert_eq!(status.phase.as_deref(), Some("Succeeded"));
}

#[test]
fn a_pod_is_not_over_while_a_container_runs() {
    let spec = json!({"restartPolicy": "Never", "initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]});
    let ended = Verdict { reason: "Evicted".into(), message: String::new(), disruption: None, grace: None };
    for (sidecar, verdict, terminating, terminated, phase) in [
        (RunState::Running, None, false, false, "Running"),
        (RunState::Running, None, true, false, "Running"),
        (RunState::Running, Some(&ended), false, false, "Running"),
        (RunState::Exited, Some(&ended), true, false, "Running"),
        (RunState::Exited, Some(&ended), false, false, "Failed"),
        (RunState::Exited, None, false, false, "Succeeded"),
        (RunState::Exited, Some(&ended), true, true, "Failed"),
    ] {
        let mut pod = pod(spec.clone());
        pod.status = Some(PodStatus { phase: Some("Running".into()), ..PodStatus::default() });
        let instances = vec![instance("s", sidecar, 0), instance("a", RunState::Exited, 0)];
        let status = pod_status(&StatusInputs {
            devices: &|_| Vec::new(),
            resize: &resize::Progress::default(),
            group: None,
            pod: &pod,
            runtime: &RuntimePod::new(Vec::new(), instances),
            removed: &Default::default(),
            probes: &ProbeResults::default(),
            waiting: &HashMap::new(),
            verdict,
            terminating,
            terminated,
            host_ips: &["192.0.2.1".to_owned()],
            runtime_name: "ferrite",
            now: at(9),
        });
        let found = status.phase.as_deref();
        assert_eq!(found, Some(phase), "{sidecar:?} {} {terminating} {terminated}", verdict.is_some());
    }
}

#[test]
fn a_termination_message_stays_when_its_file_is_gone() {
    let told = |id: &str| {
        let mut pod = pod(json!({"containers": [{"name": "a"}]}));
        let state = json!({"terminated": {"exitCode": 0, "containerID": id, "message": "bye"}});
        let status = json!({"containerStatuses": [{"name": "a", "image": "", "imageID": "", "ready": false,
                            "restartCount": 0, "state": state}]});
        pod.status = Some(ferrite_json::from_value(status).unwrap());
        pod
    };
    for (id, read, expected) in [
        ("ferrite://id-a", "", Some("bye")),
        ("ferrite://id-a", "new", Some("new")),
        ("ferrite://another", "", None),
    ] {
        let instance = Instance { message: read.into(), ..instance("a", RunState::Exited, 0) };
        let status = pod_status(&StatusInputs {
            devices: &|_| Vec::new(),
            resize: &resize::Progress::default(),
            group: None,
            pod: &told(id),
            runtime: &RuntimePod::new(Vec::new(), vec![instance]),
            removed: &Default::default(),
            probes: &ProbeResults::default(),
            waiting: &HashMap::new(),
            verdict: None,
            terminating: true,
            terminated: true,
            host_ips: &["192.0.2.1".to_owned()],
            runtime_name: "ferrite",
            now: at(9),
        });
        let container = status.container_statuses.unwrap().remove(0);
        let ended = container.state.unwrap().terminated.unwrap();
        assert_eq!(ended.message.as_deref(), expected, "{id} {read}");
    }
}

#[test]
fn termination_messages_share_what_a_pod_may_say() {
    for (message, containers, length) in [
        ("x".repeat(4096), 1, 4096),
        ("x".repeat(4096), 4, 3072),
        ("é".repeat(2048), 5, 2456),
        (String::new(), 0, 0),
    ] {
        assert_eq!(share(message, containers).len(), length, "{containers}");
    }
}
