//! Definitions and the APIServices of their groups: names, conditions, removal, and writes that admission refuses.

use crate::custom::{establish, has_condition, wait_for};
use crate::world::*;
use ferrite_json::{Value, json};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const SERVICES: &str = "/apis/apiregistration.k8s.io/v1/apiservices";
const POLICIES: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";

fn definition(group: &str, plural: &str, kind: &str) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {
            "group": group, "scope": "Namespaced", "names": {"plural": plural, "kind": kind},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}],
        },
    })
}

/// Refuses writes of a resource that do not satisfy an expression.
async fn refuse_unless(world: &World, group: &str, resource: &str, expression: &str) {
    let rule = json!({
        "apiGroups": [group], "apiVersions": ["*"], "resources": [resource], "operations": ["CREATE", "UPDATE"],
    });
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "p"},
        "spec": {"matchConstraints": {"resourceRules": [rule]}, "validations": [{"expression": expression}]},
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "p"}, "spec": {"policyName": "p", "validationActions": ["Deny"]},
    });
    assert_eq!(world.post(POLICIES, &policy).await.code, 201);
    let bindings = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings";
    assert_eq!(world.post(bindings, &binding).await.code, 201);
}

async fn until_gone(world: &World, path: &str) {
    let gone = async {
        while world.get(path).await.code != 404 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), gone).await.expect("it goes");
}

fn named(object: &Value, name: &str) -> bool {
    object["metadata"]["name"] == *name
}

#[tokio::test]
async fn a_definition_whose_status_is_refused_delays_no_other() {
    let world = World::start().await;
    let spared = "object.metadata.name != 'bads.example.com'";
    refuse_unless(&world, "apiextensions.k8s.io", "customresourcedefinitions/status", spared).await;
    assert_eq!(world.post(DEFINITIONS, &definition("example.com", "bads", "Bad")).await.code, 201);
    establish(&world, &definition("example.com", "goods", "Good")).await;
    let bad = world.get(&format!("{DEFINITIONS}/bads.example.com")).await;
    assert!(!has_condition(&bad.json(), "Established", "True"));
    // It is tried again when nothing refuses it any more.
    assert_eq!(world.delete(&format!("{POLICIES}/p")).await.code, 200);
    wait_for(&world, DEFINITIONS, |_, object| {
        named(object, "bads.example.com") && has_condition(object, "Established", "True")
    })
    .await;
}

#[tokio::test]
async fn an_api_service_that_is_refused_delays_no_other() {
    let world = World::start().await;
    let spared = "object.metadata.name != 'v1.a.example.com'";
    refuse_unless(&world, "apiregistration.k8s.io", "apiservices", spared).await;
    establish(&world, &definition("a.example.com", "as", "Ay")).await;
    establish(&world, &definition("b.example.com", "bs", "Be")).await;
    wait_for(&world, SERVICES, |_, object| {
        named(object, "v1.b.example.com") && has_condition(object, "Available", "True")
    })
    .await;
    assert_eq!(world.get(&format!("{SERVICES}/v1.a.example.com")).await.code, 404);
    assert_eq!(world.delete(&format!("{POLICIES}/p")).await.code, 200);
    wait_for(&world, SERVICES, |_, object| {
        named(object, "v1.a.example.com") && has_condition(object, "Available", "True")
    })
    .await;
}

#[tokio::test]
async fn discovery_of_a_kind_that_goes_lists_no_verbs_that_write() {
    let world = World::start().await;
    establish(&world, &definition("example.com", "wids", "Wid")).await;
    let wids = "/apis/example.com/v1/namespaces/default/wids";
    let held = json!({"apiVersion": "example.com/v1", "kind": "Wid",
        "metadata": {"name": "held", "finalizers": ["example.com/hold"]}});
    assert_eq!(world.post(wids, &held).await.code, 201);
    assert_eq!(world.delete(&format!("{DEFINITIONS}/wids.example.com")).await.code, 200);
    wait_for(&world, wids, |_, object| !object["metadata"]["deletionTimestamp"].is_null()).await;
    let listed = world.get("/apis/example.com/v1").await;
    assert_eq!(
        listed.at("/resources/0/verbs"),
        json!(["delete", "deletecollection", "get", "list", "watch"])
    );
    let removing = world.get(&format!("{DEFINITIONS}/wids.example.com")).await.json();
    let conditions = removing["status"]["conditions"].as_array().expect("conditions");
    let terminating = conditions.iter().find(|c| c["type"] == "Terminating").expect("the condition");
    assert_eq!(terminating["reason"], "InstanceDeletionInProgress");
    let released = json!({"metadata": {"finalizers": null}});
    assert_eq!(world.patch("merge", &format!("{wids}/held"), &released).await.code, 200);
    until_gone(&world, &format!("{DEFINITIONS}/wids.example.com")).await;
}

#[tokio::test]
async fn approvals_of_protected_groups_are_conditions() {
    let world = World::start().await;
    let mut wids = definition("wids.k8s.io", "wids", "Wid");
    wids["metadata"]["annotations"] = json!({"api-approved.kubernetes.io": "https://k8s.io/1"});
    establish(&world, &wids).await;
    const CONFORMANT: &str = "KubernetesAPIApprovalPolicyConformant";
    let path = format!("{DEFINITIONS}/wids.wids.k8s.io");
    assert!(has_condition(&world.get(&path).await.json(), CONFORMANT, "True"));
    let change = json!({"metadata": {"annotations": {"api-approved.kubernetes.io": "unapproved"}}});
    assert_eq!(world.patch("merge", &path, &change).await.code, 200);
    wait_for(&world, DEFINITIONS, |_, object| has_condition(object, CONFORMANT, "False")).await;
}

#[tokio::test]
async fn names_that_become_free_are_served() {
    let world = World::start().await;
    let mut first = definition("example.com", "firsts", "First");
    first["spec"]["names"]["shortNames"] = json!(["x"]);
    establish(&world, &first).await;
    let second = definition("example.com", "seconds", "Second");
    establish(&world, &second).await;
    // The second wants a name that the first has.
    let wants = json!({"spec": {"names": {"shortNames": ["x"]}}});
    let path = format!("{DEFINITIONS}/seconds.example.com");
    assert_eq!(world.patch("merge", &path, &wants).await.code, 200);
    let of = |status: &'static str| {
        move |_: &str, object: &Value| {
            named(object, "seconds.example.com") && has_condition(object, "NamesAccepted", status)
        }
    };
    wait_for(&world, DEFINITIONS, of("False")).await;
    assert_eq!(world.delete(&format!("{DEFINITIONS}/firsts.example.com")).await.code, 200);
    wait_for(&world, DEFINITIONS, of("True")).await;
    let listed = world.get("/apis/example.com/v1").await.json();
    let resources = listed["resources"].as_array().expect("resources");
    let seconds = resources.iter().find(|r| r["name"] == "seconds").expect("it is served");
    assert_eq!(seconds["shortNames"], json!(["x"]));
}

#[tokio::test]
async fn a_definition_named_as_a_built_in_kind_takes_none_of_its_objects() {
    let world = World::start().await;
    establish(&world, &definition("example.com", "wids", "Wid")).await;
    let mut overlapping = definition("apiextensions.k8s.io", "customresourcedefinitions", "Overlap");
    overlapping["metadata"]["annotations"] = json!({"api-approved.kubernetes.io": "unapproved, a test"});
    overlapping["spec"]["scope"] = "Cluster".into();
    overlapping["spec"]["versions"][0]["name"] = "v9".into();
    establish(&world, &overlapping).await;
    let path = format!("{DEFINITIONS}/customresourcedefinitions.apiextensions.k8s.io");
    assert_eq!(world.delete(&path).await.code, 200);
    until_gone(&world, &path).await;
    let left = world.get(&format!("{DEFINITIONS}/wids.example.com")).await;
    assert_eq!(left.code, 200);
    assert_eq!(left.at("/metadata/deletionTimestamp"), Value::Null);
}
