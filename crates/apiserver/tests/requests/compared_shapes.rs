//! Answers that differed from upstream's in the form of lists, rows and custom objects.

use crate::custom::establish;
use crate::world::*;
use ferrite_apiserver::User;
use ferrite_json::{Value, json};

const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";
const METADATA: &str = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";

/// A definition of the kind Wid with these versions.
fn definition(versions: Value) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "wids.shapes.example.com"},
        "spec": {"group": "shapes.example.com", "scope": "Namespaced", "versions": versions,
            "names": {"plural": "wids", "singular": "wid", "kind": "Wid", "listKind": "WidList"}},
    })
}

fn version(name: &str, stored: bool, properties: Value) -> Value {
    let schema = json!({"type": "object", "properties": properties});
    json!({"name": name, "served": true, "storage": stored, "schema": {"openAPIV3Schema": schema}})
}

fn wids(version: &str) -> String {
    format!("/apis/shapes.example.com/{version}/namespaces/default/wids")
}

fn wid(version: &str, name: &str) -> Value {
    json!({"apiVersion": format!("shapes.example.com/{version}"), "kind": "Wid", "metadata": {"name": name}})
}

#[tokio::test]
async fn rows_of_pods_that_have_ended_have_a_condition() {
    let world = World::start().await;
    for (name, phase, condition) in [
        ("a", "Running", Value::Null),
        (
            "b",
            "Succeeded",
            json!([{"type": "Completed", "status": "True", "reason": "Succeeded",
            "message": "The pod has completed successfully."}]),
        ),
        (
            "c",
            "Failed",
            json!([{"type": "Completed", "status": "True", "reason": "Failed",
            "message": "The pod failed."}]),
        ),
    ] {
        assert_eq!(world.post(PODS, &pod(name)).await.code, 201);
        let status = json!({"status": {"phase": phase}});
        assert_eq!(world.patch("merge", &format!("{PODS}/{name}/status"), &status).await.code, 200);
        for path in [format!("{PODS}/{name}"), format!("{PODS}?fieldSelector=metadata.name%3D{name}")] {
            let table = world.send("GET", &path, &[("accept", TABLE)], b"").await;
            assert_eq!(table.at("/rows/0/conditions"), condition, "{path}");
        }
    }
}

#[tokio::test]
async fn a_list_of_nothing_has_upstreams_form() {
    let world = World::start().await;
    for (path, accept, items, expected) in [
        (MAPS.to_owned(), METADATA, "/items", json!(null)),
        (MAPS.to_owned(), "application/json", "/items", json!([])),
        (MAPS.to_owned(), TABLE, "/rows", json!([])),
        // A kind without columns of its own.
        ("/api/v1/namespaces/default/limitranges".to_owned(), TABLE, "/rows", json!(null)),
        (format!("{RBAC}/clusterroles"), TABLE, "/rows", json!(null)),
    ] {
        for method in ["GET", "DELETE"] {
            let reply =
                world.send(method, &format!("{path}?labelSelector=none"), &[("accept", accept)], b"").await;
            let body = reply.json();
            assert_eq!(body.pointer(items), Some(&expected), "{method} {path} {accept}: {body}");
        }
    }
    // The first of several objects opens the list.
    for name in ["a", "b"] {
        assert_eq!(world.post(MAPS, &config_map(name, json!({}))).await.code, 201);
    }
    let both = world.send("GET", MAPS, &[("accept", METADATA)], b"").await;
    assert_eq!(
        (both.at("/items/0/metadata/name"), both.at("/items/1/metadata/name")),
        (json!("a"), json!("b"))
    );
    let ranges = "/api/v1/namespaces/default/limitranges";
    for name in ["a", "b"] {
        let range = json!({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": name}});
        assert_eq!(world.post(ranges, &range).await.code, 201);
    }
    let both = world.send("GET", ranges, &[("accept", TABLE)], b"").await;
    assert_eq!((both.at("/rows/0/cells/0"), both.at("/rows/1/cells/0")), (json!("a"), json!("b")));
}

#[tokio::test]
async fn a_watch_names_the_types_of_streams() {
    let world = World::start().await;
    let refused = world.send("GET", &format!("{MAPS}?watch=1"), &[("accept", "application/yaml")], b"").await;
    let accepted = "application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch";
    assert_eq!(refused.code, 406);
    let body = String::from_utf8_lossy(&refused.bytes).into_owned();
    assert!(body.contains(&format!("only the following media types are accepted: {accepted}")), "{body}");
}

#[tokio::test]
async fn content_types_have_no_case() {
    let world = World::start().await;
    let body = config_map("a", json!({})).to_string();
    let made = world.send("POST", MAPS, &[("content-type", "Application/JSON")], body.as_bytes()).await;
    assert_eq!(made.code, 201, "{}", made.json());
}

#[tokio::test]
async fn nothing_is_created_below_objects_of_an_absent_namespace() {
    let world = World::start().await;
    let place = "/api/v1/namespaces/absent";
    let eviction =
        |name: &str| json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}});
    let binding =
        json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "x"}, "target": {"name": "n"}});
    let token = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    for (path, body) in [
        ("pods/x/eviction", eviction("x")),
        ("pods/x/eviction", eviction("another")),
        ("pods/x/binding", binding.clone()),
        ("pods/another/binding", binding.clone()),
        ("bindings", binding),
        ("serviceaccounts/x/token", token),
    ] {
        let refused = world.post(&format!("{place}/{path}"), &body).await;
        assert_eq!(refused.code, 404, "{path}");
        assert_eq!(refused.at("/message"), "namespaces \"absent\" not found", "{path}");
    }
}

#[tokio::test]
async fn an_applied_scale_without_replicas_takes_none() {
    let world = World::start().await;
    let path = "/apis/apps/v1/namespaces/default/deployments/d";
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {
        "replicas": 2, "selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    assert_eq!(world.patch("apply", &format!("{path}?fieldManager=one"), &deployment).await.code, 201);
    let scale = |spec: Value| json!({"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "d"}, "spec": spec});
    // Another manager's replicas stay as they are.
    let applied = world.patch("apply", &format!("{path}/scale?fieldManager=two"), &scale(json!({}))).await;
    assert_eq!((applied.code, applied.at("/spec/replicas")), (200, json!(2)));
    let path = format!("{path}/scale?fieldManager=two&force=true");
    assert_eq!(world.patch("apply", &path, &scale(json!({"replicas": 3}))).await.at("/spec/replicas"), 3);
    // Replicas that their only manager applies no more are none.
    assert_eq!(world.patch("apply", &path, &scale(json!({}))).await.at("/spec/replicas"), json!(null));
}

#[tokio::test]
async fn a_review_loses_its_empty_lists() {
    let world = World::start().await;
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {"user": "u", "groups": [], "resourceAttributes": {"verb": "get", "resource": "pods"}}});
    let reply = world.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await;
    assert_eq!((reply.code, reply.at("/spec/groups")), (201, json!(null)));
    assert_eq!(reply.at("/metadata/managedFields/0/fieldsV1/f:spec/f:groups"), json!(null));
}

#[tokio::test]
async fn bindings_of_absent_roles_are_reported() {
    let world = World::start().await;
    let role = |name: &str, rules: Value| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules});
    let binding = |role: &str| {
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
            "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "bob"}]})
    };
    let place = format!("{RBAC}/namespaces/default");
    let writes =
        json!([{"verbs": ["create"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles"]}]);
    assert_eq!(world.post(&format!("{place}/roles"), &role("writer", writes)).await.code, 201);
    for name in ["writer", "absent"] {
        assert_eq!(world.post(&format!("{place}/rolebindings"), &binding(name)).await.code, 201);
    }
    let bob = world.as_user(User::new("bob", ["system:authenticated"]));
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": "default"}});
    let reply = bob.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", &review).await;
    let missing = "role.rbac.authorization.k8s.io \"absent\" not found";
    assert_eq!(
        (reply.at("/status/incomplete"), reply.at("/status/evaluationError")),
        (json!(false), json!(missing))
    );
    let more = json!([{"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"]}]);
    let refused = bob.post(&format!("{place}/roles"), &role("more", more)).await;
    let message = refused.at("/message").as_str().unwrap_or_default().to_owned();
    assert!(message.ends_with(&format!("; resolution errors: [{missing}]")), "{message}");
    // The reason names the role without its namespace.
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {"user": "bob",
        "resourceAttributes": {"namespace": "default", "verb": "create", "group": "rbac.authorization.k8s.io", "resource": "roles"}}});
    let reply = world.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await;
    let reason = "RBAC: allowed by RoleBinding \"writer/default\" of Role \"writer\" to User \"bob\"";
    assert_eq!(reply.at("/status/reason"), reason);
}

#[tokio::test]
async fn approvals_of_a_tracked_request_are_tracked() {
    let world = World::start().await;
    let requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
    for (name, labels, managers) in [("a", json!({"l": "m"}), 2), ("b", json!({}), 0)] {
        let request = json!({"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
            "metadata": {"name": name, "labels": labels},
            "spec": {"request": world.certificate_request(), "signerName": "example.com/s", "usages": ["client auth"]}});
        assert_eq!(world.post(requests, &request).await.code, 201);
        let approval = json!({"status": {"conditions": [{"type": "Approved", "status": "True"}]}});
        let approved = world.patch("merge", &format!("{requests}/{name}/approval"), &approval).await;
        let entries = approved.at("/metadata/managedFields").as_array().map_or(0, Vec::len);
        assert_eq!((approved.code, entries), (200, managers), "{}", approved.json());
    }
}

#[tokio::test]
async fn metadata_of_a_custom_object_have_no_empty_members() {
    let world = World::start().await;
    establish(&world, &definition(json!([version("v1", true, json!({}))]))).await;
    let mut object = wid("v1", "a");
    object["metadata"]["labels"] = json!({});
    object["metadata"]["finalizers"] = json!([]);
    let made = world.post(&wids("v1"), &object).await;
    assert_eq!(made.code, 201);
    for key in ["labels", "finalizers", "managedFields"] {
        assert_eq!(made.at(&format!("/metadata/{key}")), json!(null), "{key}");
    }
    let path = format!("{}/a", wids("v1"));
    let labels = |value: Value| json!({"metadata": {"labels": {"a": value}}});
    assert_eq!(world.patch("merge", &path, &labels(json!("b"))).await.at("/metadata/labels/a"), "b");
    assert_eq!(world.patch("merge", &path, &labels(json!(null))).await.at("/metadata/labels"), json!(null));
    // An applied empty map owns its field all the same.
    let applied = world.patch("apply", &format!("{path}?fieldManager=m"), &object).await;
    assert_eq!(applied.at("/metadata/labels"), json!(null));
    assert!(
        applied.at("/metadata/managedFields/0/fieldsV1/f:metadata/f:labels").is_object(),
        "{}",
        applied.json()
    );
    let whole = json!([{"op": "replace", "path": "", "value": {}}]);
    let refused = world.patch("json", &path, &whole).await;
    assert_eq!(refused.code, 422);
    assert_eq!(
        refused.at("/message"),
        " \"\" is invalid: patch: Invalid value: \"{}\": Object 'Kind' is missing in '{}'"
    );
}

#[tokio::test]
async fn a_custom_object_is_answered_as_its_next_reader_gets_it() {
    let world = World::start().await;
    let text = |default: &str| json!({"type": "string", "default": default});
    let spec =
        |name: &str| json!({"type": "object", "properties": {name: text(name), "both": {"type": "string"}}});
    let mut stored = version(
        "v1",
        true,
        json!({"spec": spec("one"),
        "status": {"type": "object", "default": {}, "properties": {"phase": text("new")}}}),
    );
    stored["subresources"] = json!({"status": {}});
    establish(&world, &definition(json!([stored, version("v2", false, json!({"spec": spec("two")}))]))).await;
    let object = |version: &str, name: &str| {
        let mut object = wid(version, name);
        object["spec"] = json!({"both": "x"});
        object
    };
    for query in ["?dryRun=All", ""] {
        let made = world.post(&format!("{}{query}", wids("v1")), &object("v1", "a")).await;
        assert_eq!(
            (made.at("/spec"), made.at("/status")),
            (json!({"both": "x", "one": "one"}), json!({"phase": "new"}))
        );
        // The stored version has no room for the other's field.
        let made = world.post(&format!("{}{query}", wids("v2")), &object("v2", "b")).await;
        assert_eq!(
            (made.code, made.at("/spec"), made.at("/apiVersion")),
            (201, json!({"both": "x"}), json!("shapes.example.com/v2"))
        );
    }
    assert_eq!(world.get(&format!("{}/b", wids("v2"))).await.at("/spec"), json!({"both": "x"}));
    // A manager of the first version cannot be compared with a field that this version lacks.
    let path = format!("{}/a", wids("v2"));
    let changed = world.patch("merge", &path, &json!({"spec": {"two": "y"}})).await;
    assert_eq!((changed.code, changed.at("/spec")), (200, json!({"both": "x"})));
    assert_eq!(changed.at("/metadata/managedFields"), json!(null));
}

#[tokio::test]
async fn fields_that_select_are_in_the_documents() {
    let world = World::start().await;
    let mut with =
        version("v1", true, json!({"spec": {"type": "object", "properties": {"color": {"type": "string"}}}}));
    with["selectableFields"] = json!([{"jsonPath": ".spec.color"}]);
    establish(&world, &definition(json!([with]))).await;
    let document = world.get("/openapi/v3/apis/shapes.example.com/v1").await.json();
    for kind in ["Wid", "WidList"] {
        let schema = &document["components"]["schemas"][format!("com.example.shapes.v1.{kind}").as_str()];
        assert_eq!(schema["x-kubernetes-selectable-fields"], json!([{"fieldPath": "spec.color"}]), "{kind}");
    }
}

#[tokio::test]
async fn a_part_that_becomes_an_object_brings_its_fields() {
    let world = World::start().await;
    let mut open = version("v1", true, json!({}));
    open["schema"]["openAPIV3Schema"]["x-kubernetes-preserve-unknown-fields"] = json!(true);
    establish(&world, &definition(json!([open]))).await;
    let mut object = wid("v1", "a");
    object["spec"] = json!({"part": 1});
    assert_eq!(world.post(&wids("v1"), &object).await.code, 201);
    let patch = json!([{"op": "replace", "path": "/spec/part", "value": {"x": null}}]);
    let patched = world.patch("json", &format!("{}/a", wids("v1")), &patch).await;
    let owned = patched.at("/metadata/managedFields/0/fieldsV1/f:spec/f:part");
    assert_eq!(owned, json!({".": {}, "f:x": {}}), "{}", patched.json());
}

#[tokio::test]
async fn a_token_for_another_account_of_that_name_is_refused() {
    let world = World::start().await;
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a"}});
    let made = world.post(accounts, &account).await;
    let uid = made.at("/metadata/uid").as_str().unwrap_or_default().to_owned();
    let request = |uid: &str| json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {"uid": uid}, "spec": {}});
    let path = format!("{accounts}/a/token");
    assert_ne!(world.post(&path, &request(&uid)).await.code, 409);
    let refused = world.post(&path, &request("other")).await;
    let message = format!(
        "Operation cannot be fulfilled on TokenRequest.authentication.k8s.io \"a\": the UID in the token request (other) \
         does not match the UID of the service account ({uid})"
    );
    assert_eq!((refused.code, refused.at("/message")), (409, json!(message)));
}

#[tokio::test]
async fn lists_without_omitempty_are_null() {
    let world = World::start().await;
    let schemas = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas";
    let schema = json!({"apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "FlowSchema", "metadata": {"name": "f"},
        "spec": {"priorityLevelConfiguration": {"name": "x"}, "rules": [{"subjects": [{"kind": "User", "user": {"name": "*"}}],
        "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true}]}]}});
    let made = world.post(schemas, &schema).await.json();
    let rule = made.pointer("/spec/rules/0/resourceRules/0").and_then(Value::as_object).expect("a rule");
    assert_eq!(rule.get("namespaces"), Some(&Value::Null));
    let mut projected = pod("p");
    projected["spec"]["volumes"] = json!([{"name": "v", "projected": {}}]);
    let made = world.post(PODS, &projected).await.json();
    assert_eq!(made.pointer("/spec/volumes/0/projected/sources"), Some(&Value::Null), "{made}");
}
