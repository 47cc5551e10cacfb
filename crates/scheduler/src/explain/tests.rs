use std::sync::Arc;

use ferrite_json::{Value, json};
use futures_util::FutureExt;

use super::*;
use crate::framework::{Handle, Registry};
use crate::profile::Profile;

fn node(name: &str, cpu: i64, unschedulable: bool, pods: &[Arc<PodInfo>]) -> Arc<NodeInfo> {
    let node = json!({"metadata": {"name": name}, "spec": {"unschedulable": unschedulable},
        "status": {"allocatable": {"cpu": cpu.to_string(), "memory": "8Gi", "pods": "10"}}});
    let mut info = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
    pods.iter().for_each(|pod| info.add_pod(pod.clone()));
    Arc::new(info)
}

fn pod(name: &str, cpu: i64, spec: Value) -> Arc<PodInfo> {
    let mut pod = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {"containers": [
        {"name": "c", "resources": {"requests": {"cpu": cpu.to_string(), "memory": "1Gi"}}}]}});
    for (key, field) in spec.as_object().unwrap() {
        pod["spec"][key] = field.clone();
    }
    Arc::new(PodInfo::new(&ferrite_json::from_value(pod).unwrap()))
}

fn explained(nodes: Vec<Arc<NodeInfo>>, pod: &PodInfo) -> String {
    let framework = Framework::new(&Profile::default(), &Registry::default(), &Handle::default()).unwrap();
    let snapshot = Snapshot::new(nodes);
    explain(&framework, &snapshot, &[], pod).now_or_never().expect("nothing waits").to_string()
}

#[test]
fn the_winner_and_its_lead_are_named() {
    let busy = pod("busy", 3, json!({}));
    let text =
        explained(vec![node("a", 4, false, &[busy]), node("b", 4, false, &[])], &pod("p", 1, json!({})));
    assert!(text.starts_with("NODE   FITS   TOTAL   TaintToleration×3   NodeResourcesFit×1"), "{text}");
    assert!(text.contains("ns/p goes to b with "), "{text}");
    assert!(text.contains(" more than a."), "{text}");
}

#[test]
fn every_rejection_is_listed_and_the_smallest_change_named() {
    let high = pod("p", 6, json!({"priority": 5}));
    let low = pod("low", 3, json!({}));
    let text = explained(vec![node("a", 4, true, &[]), node("b", 8, false, &[low])], &high);
    assert!(
        text.contains("NodeUnschedulable: node(s) were unschedulable; NodeResourcesFit: Insufficient cpu"),
        "{text}"
    );
    assert!(text.contains("\n  b: cpu: asks for 6000m, 5000m of 8000m free (NodeResourcesFit)\n"), "{text}");
    assert!(!text.contains("\n  a:"), "{text}");
    assert!(text.contains("preemption: on b, by removing ns/low"), "{text}");
}

#[test]
fn a_pod_that_is_refused_at_once_says_by_whom() {
    let claims = json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]});
    let text = explained(vec![node("a", 4, false, &[])], &pod("p", 1, claims));
    assert!(text.contains("rejects it: persistentvolumeclaim \"c\" not found"), "{text}");
}
