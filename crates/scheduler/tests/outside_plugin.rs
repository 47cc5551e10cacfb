//! A plugin from outside the crate, registered as the example shows.

#[path = "../examples/test_plugin.rs"]
mod test_plugin;

use std::sync::Arc;

use ferrite_json::json;
use ferrite_scheduler::cycle::{ScheduleError, Search, schedule};
use ferrite_scheduler::framework::Handle;
use ferrite_scheduler::snapshot::{NodeInfo, PodInfo, Snapshot};
use ferrite_scheduler::{Framework, Registry};
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::Pod;

#[test]
fn a_plugin_from_outside_holds_pods_back() {
    let pod = |name: &str, annotations: ferrite_json::Value| -> Pod {
        ferrite_json::from_value(
            json!({"metadata": {"name": name, "namespace": "ns", "annotations": annotations},
            "spec": {"containers": []}}),
        )
        .unwrap()
    };
    let (held, free) = (pod("held", json!({"test-plugin": ""})), pod("free", json!({})));
    let handle = Handle::default().with_objects([held.clone(), free.clone()]);
    let mut registry = Registry::default();
    registry.register(test_plugin::NAME, test_plugin::new).unwrap();
    assert!(registry.register("NodeName", test_plugin::new).is_err(), "the name is taken");
    let framework = Framework::new(&test_plugin::profile(), &registry, &handle).unwrap();
    let node = json!({"metadata": {"name": "n"}, "status": {"allocatable": {"pods": "9"}}});
    let node = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
    let snapshot = Snapshot::new([Arc::new(node)]);
    let run = |pod: &Pod| {
        let pod = PodInfo::new(pod);
        let mut search = Search::default();
        let result = schedule(&framework, &snapshot, &[], &pod, &mut search, |_| 0).now_or_never();
        result.expect("nothing waits")
    };
    assert_eq!(run(&free).unwrap().node, "n");
    match run(&held) {
        Err(ScheduleError::Unschedulable(error)) => {
            assert!(error.to_string().starts_with("0/1 nodes are available: 1 testPlugin."), "{error}");
            assert_eq!(error.rejected_by, [test_plugin::NAME]);
        }
        other => panic!("{other:?}"),
    }
    // The example's main is a program of its own.
    let _ = test_plugin::main;
}
