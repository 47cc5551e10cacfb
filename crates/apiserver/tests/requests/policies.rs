//! Admission policies: from their writing to the requests that they refuse or change.

use crate::custom::establish;
use crate::world::*;
use ferrite_apiserver::User;
use ferrite_json::{Value, json};

const GROUP: &str = "/apis/admissionregistration.k8s.io/v1";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";

fn rule(group: &str, resource: &str, operations: &[&str]) -> Value {
    json!({"apiGroups": [group], "apiVersions": ["*"], "resources": [resource], "operations": operations})
}

fn on(group: &str, resource: &str) -> Value {
    json!({"resourceRules": [rule(group, resource, &["CREATE", "UPDATE"])]})
}

/// A policy of a kind, `Validating` or `Mutating`.
fn policy(kind: &str, name: &str, spec: &Value) -> Value {
    let mut spec = spec.clone();
    if spec.get("matchConstraints").is_none() {
        spec["matchConstraints"] = on("", "configmaps");
    }
    if kind == "Mutating" && spec.get("reinvocationPolicy").is_none() {
        spec["reinvocationPolicy"] = "Never".into();
    }
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": format!("{kind}AdmissionPolicy"),
        "metadata": {"name": name}, "spec": spec})
}

fn binding(kind: &str, name: &str, policy: &str, spec: &Value) -> Value {
    let mut spec = spec.clone();
    spec["policyName"] = policy.into();
    if kind == "Validating" && spec.get("validationActions").is_none() {
        spec["validationActions"] = json!(["Deny"]);
    }
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": format!("{kind}AdmissionPolicyBinding"),
        "metadata": {"name": name}, "spec": spec})
}

fn path(kind: &str, what: &str) -> String {
    format!("{GROUP}/{}admission{what}", kind.to_lowercase())
}

async fn create(world: &World, path: &str, object: &Value) {
    let created = world.post(path, object).await;
    assert_eq!(created.code, 201, "{}", created.json());
}

/// Stores a policy `p` and its binding `b`.
async fn enforce(world: &World, kind: &str, spec: Value, bound: Value) {
    create(world, &path(kind, "policies"), &policy(kind, "p", &spec)).await;
    create(world, &path(kind, "policybindings"), &binding(kind, "b", "p", &bound)).await;
}

async fn validating(spec: Value, bound: Value) -> World {
    let world = World::start().await;
    enforce(&world, "Validating", spec, bound).await;
    world
}

async fn mutating(spec: Value, bound: Value) -> World {
    let world = World::start().await;
    enforce(&world, "Mutating", spec, bound).await;
    world
}

fn map(name: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})
}

fn deployment(name: &str, replicas: i64) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
        "replicas": replicas, "selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}})
}

/// The message of a refusal, without the part that all have in common.
fn denied(reply: &Reply) -> String {
    let message = reply.at("/message");
    let message = message.as_str().unwrap_or_default();
    message.split_once("denied request: ").map_or(message, |(_, why)| why).to_owned()
}

#[tokio::test]
async fn a_policy_refuses_in_upstreams_words() {
    let spec = json!({
        "matchConstraints": on("apps", "deployments"),
        "validations": [{"expression": "object.spec.replicas > 1", "messageExpression": "'wants replicas > 1, got ' + string(object.spec.replicas)"},
            {"expression": "object.spec.replicas % 2 == 0", "message": "even, please", "reason": "Forbidden"}],
    });
    let world = validating(spec, json!({})).await;
    let refused = world.post(DEPLOYMENTS, &deployment("a", 1)).await;
    assert_eq!(refused.code, 422);
    let why = "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: wants replicas > 1, got 1";
    assert_eq!(refused.at("/message"), json!(format!("deployments.apps \"a\" is forbidden: {why}")));
    assert_eq!(refused.at("/reason"), "Invalid");
    let details = json!({"name": "a", "group": "apps", "kind": "deployments", "causes": [{"message": why}]});
    assert_eq!(refused.at("/details"), details);
    let odd = world.post(DEPLOYMENTS, &deployment("a", 3)).await;
    assert_eq!((odd.code, odd.at("/reason"), denied(&odd)), (403, json!("Forbidden"), "even, please".into()));
    create(&world, DEPLOYMENTS, &deployment("a", 2)).await;
    let scaled = world.patch("merge", &format!("{DEPLOYMENTS}/a"), &json!({"spec": {"replicas": 0}})).await;
    assert_eq!(denied(&scaled), "wants replicas > 1, got 0");
    // The scale is another resource.
    let scale =
        world.patch("merge", &format!("{DEPLOYMENTS}/a/scale"), &json!({"spec": {"replicas": 1}})).await;
    assert_eq!(scale.code, 200, "{}", scale.json());

    // Without its binding a policy does nothing.
    let gone = world.delete(&format!("{}/b", path("Validating", "policybindings"))).await;
    assert_eq!(gone.code, 200);
    create(&world, DEPLOYMENTS, &deployment("b", 1)).await;
}

#[tokio::test]
async fn expressions_refer_to_variables() {
    let spec = json!({
        "matchConstraints": on("apps", "deployments"),
        "variables": [
            {"name": "replicas", "expression": "object.spec.replicas"},
            {"name": "oddReplicas", "expression": "variables.replicas % 2 == 1"},
            {"name": "broken", "expression": "1 / (variables.replicas - variables.replicas) == 1"},
            {"name": "replicas", "expression": "variables.replicas * 10"},
        ],
        "validations": [
            {"expression": "variables.replicas > 10", "messageExpression": "'got ' + string(variables.replicas)"},
            {"expression": "variables.oddReplicas || variables.broken"},
        ],
    });
    let world = validating(spec, json!({})).await;
    // The later of two variables with one name is built on the earlier one.
    assert_eq!(denied(&world.post(DEPLOYMENTS, &deployment("a", 1)).await), "got 10");
    create(&world, DEPLOYMENTS, &deployment("a", 3)).await;
    let error = "expression 'variables.oddReplicas || variables.broken' resulted in error: \
                 composited variable \"broken\" fails to evaluate: division by zero";
    assert_eq!(denied(&world.post(DEPLOYMENTS, &deployment("b", 2)).await), error);
}

#[tokio::test]
async fn expressions_see_the_request_and_who_makes_it() {
    let spec = json!({
        "matchConstraints": {"resourceRules": [rule("", "configmaps", &["*"])]},
        "validations": [
            {"expression": "request.operation != 'UPDATE' || oldObject.metadata.name == object.metadata.name"},
            {"expression": "request.operation != 'DELETE' || (object == null && oldObject.metadata.name != 'kept')", "message": "kept"},
            {"expression": "request.operation != 'CREATE' || oldObject == null"},
            {"expression": "request.userInfo.username != 'eve' && !('evil' in request.userInfo.groups)", "message": "not you"},
            {"expression": "request.namespace == 'default' && namespaceObject.metadata.name == 'default' && request.resource.resource == 'configmaps' && request.kind.kind == 'ConfigMap'"},
            {"expression": "request.operation != 'CREATE' || request.options.kind == 'CreateOptions' && !has(request.options.fieldManager)"},
            {"expression": "object == null || object.metadata.name != 'dry' || request.dryRun", "message": "dry runs only"},
            {"expression": "object == null || object.metadata.name != 'az' || authorizer.group('').resource('secrets').namespace('default').check('get').allowed()", "message": "no secrets"},
            {"expression": "object == null || object.metadata.name != 'rr' || authorizer.requestResource.check('deletecollection').allowed()", "message": "no rr"},
            {"expression": "object == null || object.metadata.name != 'sa' || authorizer.serviceAccount('default', 'other').path('/healthz').check('get').allowed()", "message": "no sa"},
        ],
    });
    let world = validating(spec, json!({})).await;
    for name in ["kept", "a", "az", "rr"] {
        create(&world, MAPS, &map(name, json!({"k": "v"}))).await;
    }
    assert_eq!(world.patch("merge", &format!("{MAPS}/a"), &json!({"data": {"k": "w"}})).await.code, 200);
    assert_eq!(denied(&world.delete(&format!("{MAPS}/kept")).await), "kept");
    assert_eq!(world.delete(&format!("{MAPS}/a")).await.code, 200);
    assert_eq!(denied(&world.post(MAPS, &map("dry", json!({}))).await), "dry runs only");
    assert_eq!(world.post(&format!("{MAPS}?dryRun=All"), &map("dry", json!({}))).await.code, 201);
    assert_eq!(denied(&world.post(MAPS, &map("sa", json!({}))).await), "no sa");
    let eve = world.as_user(User::new("eve", ["system:masters"]));
    assert_eq!(denied(&eve.post(MAPS, &map("e", json!({}))).await), "not you");
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "maps"},
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]}]});
    create(&world, "/apis/rbac.authorization.k8s.io/v1/clusterroles", &role).await;
    let bound = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "maps"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "maps"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "bob"}]});
    create(&world, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &bound).await;
    let bob = world.as_user(User::new("bob", [""; 0]));
    assert_eq!(denied(&bob.post(MAPS, &map("az", json!({}))).await), "no secrets");
    assert_eq!(denied(&bob.post(MAPS, &map("rr", json!({}))).await), "no rr");
    create(&bob, MAPS, &map("bobs", json!({}))).await;
}

#[tokio::test]
async fn conditions_and_selectors_narrow_what_a_policy_is_about() {
    let spec = json!({
        "matchConstraints": {
            "resourceRules": [rule("", "configmaps", &["CREATE"])],
            "excludeResourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"],
                "operations": ["*"], "resourceNames": ["exempt"]}],
        },
        "matchConditions": [{"name": "skip", "expression": "!object.metadata.name.startsWith('skip')"},
            {"name": "error", "expression": "!object.metadata.name.startsWith('wrong') || object.nothing == 1"}],
        "validations": [{"expression": "false"}],
    });
    let selector = json!({"matchResources": {"objectSelector": {"matchLabels": {"sel": "y"}},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}});
    let world = validating(spec, selector).await;
    let labelled = |name: &str, value: &str| {
        let mut object = map(name, json!({}));
        object["metadata"]["labels"] = json!({"sel": value});
        object
    };
    for free in [map("a", json!({})), labelled("b", "n"), labelled("exempt", "y"), labelled("skip-me", "y")] {
        create(&world, MAPS, &free).await;
    }
    create(&world, "/api/v1/namespaces/kube-system/configmaps", &labelled("c", "y")).await;
    assert_eq!(denied(&world.post(MAPS, &labelled("c", "y")).await), "failed expression: false");
    let wrong = world.post(MAPS, &labelled("wrong", "y")).await;
    let error = "expression '!object.metadata.name.startsWith('wrong') || object.nothing == 1' resulted in error: no such key: nothing";
    assert_eq!(denied(&wrong), error);
    // An unmet condition counts more than the error of another.
    create(&world, MAPS, &labelled("skip-wrong", "y")).await;
    let metrics = String::from_utf8_lossy(&world.get("/metrics").await.bytes).into_owned();
    let series = r#"apiserver_admission_match_condition_evaluation_seconds_count{kind="policy",name="p",operation="CREATE",type="validate"}"#;
    assert!(metrics.contains(series), "{series}");
}

#[tokio::test]
async fn failures_are_refusals_or_ignored() {
    let world = World::start().await;
    let broken = |name: &str, failure: &str| {
        policy(
            "Validating",
            name,
            &json!({"failurePolicy": failure,
            "matchConditions": [{"name": "c", "expression": format!("object.metadata.name == '{name}'")}],
            "validations": [{"expression": "object.data.missing == 'x'"}]}),
        )
    };
    for (name, failure) in [("fails", "Fail"), ("ignores", "Ignore")] {
        create(&world, &path("Validating", "policies"), &broken(name, failure)).await;
        create(&world, &path("Validating", "policybindings"), &binding("Validating", name, name, &json!({})))
            .await;
    }
    let error = "expression 'object.data.missing == 'x'' resulted in error: no such key: missing";
    assert_eq!(denied(&world.post(MAPS, &map("fails", json!({"k": "v"}))).await), error);
    create(&world, MAPS, &map("ignores", json!({"k": "v"}))).await;
}

#[tokio::test]
async fn actions_of_a_binding_warn_audit_or_deny() {
    let spec = json!({"validations": [{"expression": "false", "message": "no"}],
        "auditAnnotations": [{"key": "k", "valueExpression": "'v'"}]});
    let world = validating(spec, json!({"validationActions": ["Warn", "Audit"]})).await;
    let warned = world.post(MAPS, &map("a", json!({}))).await;
    assert_eq!(warned.code, 201);
    let warning = "299 - \"Validation failed for ValidatingAdmissionPolicy 'p' with binding 'b': no\"";
    assert_eq!(warned.header("warning"), warning);
    let deny = json!({"spec": {"validationActions": ["Deny"]}});
    let changed = world.patch("merge", &format!("{}/b", path("Validating", "policybindings")), &deny).await;
    assert_eq!(changed.code, 200, "{}", changed.json());
    assert_eq!(denied(&world.post(MAPS, &map("b", json!({}))).await), "no");
    // The error of an annotation is a refusal.
    let annotation = json!({"spec": {"validations": null, "auditAnnotations": [{"key": "k", "valueExpression": "object.data.missing + ''"}]}});
    let changed = world.patch("merge", &format!("{}/p", path("Validating", "policies")), &annotation).await;
    assert_eq!(changed.code, 200, "{}", changed.json());
    let error = "expression 'object.data.missing + ''' resulted in error: no such key: missing";
    assert_eq!(denied(&world.post(MAPS, &map("b", json!({"k": "v"}))).await), error);
}

#[tokio::test]
async fn parameters_come_from_where_the_binding_says() {
    let spec = json!({
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "matchConditions": [{"name": "c", "expression": "!has(object.metadata.labels)"}],
        "validations": [{"expression": "params == null || !(params.data.forbidden in object.data)",
            "messageExpression": "'forbidden by ' + params.metadata.name + ': ' + params.data.forbidden"}],
    });
    let world =
        validating(spec, json!({"paramRef": {"name": "par", "parameterNotFoundAction": "Deny"}})).await;
    let bindings = path("Validating", "policybindings");
    let param = |name: &str, forbidden: &str| {
        let mut param = map(name, json!({"forbidden": forbidden}));
        param["metadata"]["labels"] = json!({"param": "y"});
        param
    };
    let missing =
        "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction";
    let labelled = world.post(MAPS, &param("par", "x")).await;
    assert_eq!(denied(&labelled), missing, "conditions are looked at only with parameters");
    let allow = json!({"spec": {"paramRef": {"parameterNotFoundAction": "Allow"}}});
    assert_eq!(world.patch("merge", &format!("{bindings}/b"), &allow).await.code, 200);
    create(&world, MAPS, &param("par", "x")).await;
    assert_eq!(denied(&world.post(MAPS, &map("a", json!({"x": "1"}))).await), "forbidden by par: x");
    create(&world, MAPS, &map("a", json!({"y": "1"}))).await;
    // A parameter counts from its change on, and no longer than it exists.
    let changed = world.patch("merge", &format!("{MAPS}/par"), &json!({"data": {"forbidden": "z"}})).await;
    assert_eq!(changed.code, 200);
    create(&world, MAPS, &map("b", json!({"x": "1"}))).await;
    assert_eq!(denied(&world.post(MAPS, &map("c", json!({"z": "1"}))).await), "forbidden by par: z");
    // All parameters that a selector finds count.
    let selector = json!({"spec": {"paramRef": {"name": null, "selector": {"matchLabels": {"param": "y"}}}}});
    assert_eq!(world.patch("merge", &format!("{bindings}/b"), &selector).await.code, 200);
    create(&world, MAPS, &param("second", "q")).await;
    assert_eq!(denied(&world.post(MAPS, &map("c", json!({"q": "1"}))).await), "forbidden by second: q");
    assert_eq!(world.delete(&format!("{MAPS}/par")).await.code, 200);
    create(&world, MAPS, &map("c", json!({"z": "1"}))).await;
    // Parameters of another namespace.
    let elsewhere =
        json!({"spec": {"paramRef": {"selector": null, "name": "far", "namespace": "kube-system"}}});
    assert_eq!(world.patch("merge", &format!("{bindings}/b"), &elsewhere).await.code, 200);
    create(&world, "/api/v1/namespaces/kube-system/configmaps", &param("far", "w")).await;
    assert_eq!(denied(&world.post(MAPS, &map("d", json!({"w": "1"}))).await), "forbidden by far: w");
}

#[tokio::test]
async fn parameters_of_custom_and_cluster_kinds() {
    let world = World::start().await;
    let spec = json!({
        "paramKind": {"apiVersion": "stable.example.com/v1", "kind": "Limit"},
        "validations": [{"expression": "object.data.size() <= params.spec.max"}],
    });
    let bound = json!({"paramRef": {"name": "l", "parameterNotFoundAction": "Deny"}});
    enforce(&world, "Validating", spec, bound).await;
    let unknown = "failed to configure policy: failed to find resource referenced by paramKind: 'stable.example.com/v1, Kind=Limit'";
    let refused = world.post(MAPS, &map("a", json!({}))).await;
    assert_eq!(denied(&refused), unknown);
    let message = refused.at("/message");
    assert!(
        message.as_str().unwrap_or_default().contains("ValidatingAdmissionPolicy 'p' denied request"),
        "{message}"
    );
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "limits.stable.example.com"},
        "spec": {"group": "stable.example.com", "scope": "Cluster",
            "names": {"plural": "limits", "singular": "limit", "kind": "Limit", "listKind": "LimitList"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object",
                "properties": {"spec": {"type": "object", "properties": {"max": {"type": "integer", "default": 1}}}}}}}]},
    });
    establish(&world, &definition).await;
    let limit = json!({"apiVersion": "stable.example.com/v1", "kind": "Limit", "metadata": {"name": "l"}, "spec": {}});
    create(&world, "/apis/stable.example.com/v1/limits", &limit).await;
    create(&world, MAPS, &map("a", json!({"x": "1"}))).await;
    let refused = world.post(MAPS, &map("b", json!({"x": "1", "y": "2"}))).await;
    assert_eq!(denied(&refused), "failed expression: object.data.size() <= params.spec.max");
    let place = json!({"spec": {"paramRef": {"namespace": "default"}}});
    let changed = world.patch("merge", &format!("{}/b", path("Validating", "policybindings")), &place).await;
    assert_eq!(changed.code, 200);
    let why = "failed to configure binding: paramRef.namespace must not be provided for a cluster-scoped `paramKind`";
    assert_eq!(denied(&world.post(MAPS, &map("b", json!({}))).await), why);
}

#[tokio::test]
async fn namespaced_parameters_are_not_for_requests_without_a_namespace() {
    let spec = json!({
        "matchConstraints": on("", "nodes"),
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "validations": [{"expression": "true"}],
    });
    let world =
        validating(spec, json!({"paramRef": {"name": "x", "parameterNotFoundAction": "Allow"}})).await;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}});
    let why = "failed to configure binding: cannot use namespaced paramRef in policy binding that matches cluster-scoped resources";
    assert_eq!(denied(&world.post("/api/v1/nodes", &node).await), why);
}

#[tokio::test]
async fn a_policy_over_everything_can_still_be_removed() {
    let all = json!({"resourceRules": [{"apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*/*"], "operations": ["*"]}]});
    let world =
        validating(json!({"matchConstraints": all, "validations": [{"expression": "false"}]}), json!({}))
            .await;
    assert_eq!(world.post(MAPS, &map("a", json!({}))).await.code, 422);
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"nonResourceAttributes": {"path": "/", "verb": "get"}}});
    assert_eq!(world.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", &review).await.code, 201);
    assert_eq!(world.delete(&format!("{}/b", path("Validating", "policybindings"))).await.code, 200);
    assert_eq!(world.delete(&format!("{}/p", path("Validating", "policies"))).await.code, 200);
    create(&world, MAPS, &map("a", json!({}))).await;
}

#[tokio::test]
async fn expensive_expressions_run_out_of_budget() {
    let loops = "[1,2,3,4,5,6,7,8,9,10].all(a, [1,2,3,4,5,6,7,8,9,10].all(b, [1,2,3,4,5,6,7,8,9,10].all(c, \
                 [1,2,3,4,5,6,7,8,9,10].all(d, [1,2,3,4,5,6,7,8,9,10].all(e, [1,2,3,4,5,6,7,8,9,10].all(f, a + b + c + d + e + f > 0))))))";
    let world = validating(json!({"validations": [{"expression": loops}]}), json!({})).await;
    let refused = denied(&world.post(MAPS, &map("a", json!({}))).await);
    assert!(
        refused.ends_with("resulted in error: operation cancelled: actual cost limit exceeded"),
        "{refused}"
    );
    // Cheap enough alone, too expensive together.
    let fewer = "[1,2,3,4,5,6,7,8,9,10].all(a, [1,2,3,4,5,6,7,8,9,10].all(b, [1,2,3,4,5,6,7,8,9,10].all(c, \
                 [1,2,3,4,5,6,7,8,9,10].all(d, a + b + c + d > 0))))";
    let many: Vec<Value> = (0..200).map(|_| json!({"expression": fewer})).collect();
    let world = validating(json!({"validations": many}), json!({})).await;
    let refused = denied(&world.post(MAPS, &map("a", json!({}))).await);
    assert_eq!(
        refused,
        "validation failed due to running out of cost budget, no further validation rules will be run"
    );
}

#[tokio::test]
async fn thousands_of_bindings_are_all_looked_at() {
    let world = World::start().await;
    let spec = json!({"validations": [{"expression": "object.metadata.name != 'x'"}]});
    create(&world, &path("Validating", "policies"), &policy("Validating", "p", &spec)).await;
    for n in 0..1500 {
        let selector = json!({"matchResources": {"objectSelector": {"matchLabels": {"n": n.to_string()}}}});
        let bound = binding("Validating", &format!("b{n}"), "p", &selector);
        create(&world, &path("Validating", "policybindings"), &bound).await;
    }
    let mut object = map("x", json!({}));
    create(&world, MAPS, &object).await;
    object["metadata"]["labels"] = json!({"n": "1499"});
    let refused = world.put(&format!("{MAPS}/x"), &object).await;
    let message = refused.at("/message");
    assert!(message.as_str().unwrap_or_default().contains("with binding 'b1499'"), "{message}");
}

#[tokio::test]
async fn whoever_lets_policies_read_parameters_must_be_able_to_read_them() {
    let world = World::start().await;
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "policies"},
        "rules": [{"apiGroups": ["admissionregistration.k8s.io"], "resources": ["*"], "verbs": ["*"]},
            {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]});
    create(&world, "/apis/rbac.authorization.k8s.io/v1/clusterroles", &role).await;
    let bound = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "policies"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "policies"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "bob"}]});
    create(&world, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &bound).await;
    let bob = world.as_user(User::new("bob", [""; 0]));
    let reads = |kind: &str| json!({"paramKind": {"apiVersion": "v1", "kind": kind}, "validations": [{"expression": "true"}]});
    let policies = path("Validating", "policies");
    let refused = bob.post(&policies, &policy("Validating", "secrets", &reads("Secret"))).await;
    assert_eq!(refused.code, 422);
    let why = "spec.paramKind: Forbidden: user &{bob  [system:authenticated] map[]} must have \"get\" permission on all objects of the referenced paramKind (kind=Secret, apiVersion=v1)";
    let message = refused.at("/message");
    assert!(message.as_str().unwrap_or_default().ends_with(why), "{message}");
    create(&bob, &policies, &policy("Validating", "maps", &reads("ConfigMap"))).await;
    create(&world, &policies, &policy("Validating", "secrets", &reads("Secret"))).await;
    let bindings = path("Validating", "policybindings");
    let reference =
        json!({"paramRef": {"name": "x", "namespace": "default", "parameterNotFoundAction": "Allow"}});
    let refused = bob.post(&bindings, &binding("Validating", "b", "secrets", &reference)).await;
    let why = "spec.paramRef: Forbidden: user &{bob  [system:authenticated] map[]} does not have \"get\" permission on the object referenced by paramRef";
    let message = refused.at("/message");
    assert!(message.as_str().unwrap_or_default().ends_with(why), "{message}");
    create(&bob, &bindings, &binding("Validating", "b", "maps", &reference)).await;
}

#[tokio::test]
async fn mutations_merge_as_an_apply_does() {
    let apply = |expression: &str| json!({"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}});
    let spec = json!({
        "matchConstraints": on("apps", "deployments"),
        "variables": [{"name": "team", "expression": "'team-' + request.userInfo.username"}],
        "mutations": [
            apply("Object{spec: Object.spec{replicas: 1337}}"),
            apply("Object{metadata: Object.metadata{annotations: {'team': variables.team, 'replicas': string(object.spec.replicas)}}}"),
            apply("Object{spec: Object.spec{template: Object.spec.template{spec: Object.spec.template.spec{containers: [
                Object.spec.template.spec.containers{name: 'c', env: [Object.spec.template.spec.containers.env{name: 'E', value: 'v'}]}]}}}}"),
        ],
    });
    let world = mutating(spec, json!({})).await;
    let made = world.post(DEPLOYMENTS, &deployment("a", 1)).await;
    assert_eq!(made.code, 201, "{}", made.json());
    assert_eq!(made.at("/spec/replicas"), 1337);
    assert_eq!(made.at("/metadata/annotations"), json!({"team": "team-admin", "replicas": "1337"}));
    assert_eq!(made.at("/spec/template/spec/containers/0/env"), json!([{"name": "E", "value": "v"}]));
    assert_eq!(made.at("/spec/template/spec/containers/0/image"), "i");
    // Nobody owns fields that a policy sets.
    let owned = made.at("/metadata/managedFields/0/fieldsV1").to_string();
    assert!(!owned.contains("f:annotations"), "{owned}");
    let again = world.patch("merge", &format!("{DEPLOYMENTS}/a"), &json!({"spec": {"replicas": 2}})).await;
    assert_eq!((again.code, again.at("/spec/replicas")), (200, json!(1337)));
}

#[tokio::test]
async fn mutations_patch_in_order_and_fail_in_upstreams_words() {
    let patch = |expression: &str| json!({"patchType": "JSONPatch", "jsonPatch": {"expression": expression}});
    let spec = json!({"mutations": [
        patch("has(object.metadata.labels) ? [JSONPatch{op: 'add', path: '/metadata/labels/' + jsonpatch.escapeKey('a/b'), value: 'c'}] : [JSONPatch{op: 'add', path: '/metadata/labels', value: {'a/b': 'c'}}]"),
        patch("[JSONPatch{op: 'test', path: '/data/x', value: 'never'}, JSONPatch{op: 'remove', path: '/data/x'}]"),
        patch("[JSONPatch{op: 'add', path: '/data/added', value: object.metadata.labels['a/b']}]"),
    ]});
    let world = mutating(spec, json!({})).await;
    let made = world.post(MAPS, &map("a", json!({"x": "1"}))).await;
    assert_eq!(made.code, 201, "{}", made.json());
    assert_eq!(made.at("/metadata/labels"), json!({"a/b": "c"}));
    assert_eq!(made.at("/data"), json!({"x": "1", "added": "c"}));
    let refused =
        world.post(MAPS, &json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "b"}})).await;
    let why = |error: &str| format!("policy 'p' with binding 'b' denied request: JSON Patch: {error}");
    let test = why("test operation does not apply: is missing path: /data/x: missing value");
    let add = why("add operation does not apply: doc is missing path: \"/data/added\": missing value");
    assert_eq!(
        (refused.code, refused.at("/reason"), refused.at("/message")),
        (403, json!("Invalid"), json!(test))
    );
    let causes = json!([{"message": test}, {"message": add}]);
    assert_eq!(refused.at("/details"), json!({"name": "b", "kind": "configmaps", "causes": causes}));
}

#[tokio::test]
async fn mutations_that_do_not_fit_are_refused_or_ignored() {
    let apply = |expression: &str| json!([{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}]);
    let rows = [
        (
            "Object{bogus: 1}",
            "error applying patch: failed to convert patch object to typed object: .bogus: field not declared in schema",
        ),
        (
            "Object{metadata: Object.wrong{}}",
            "type mismatch: unexpected type name \"Object.wrong\", expected \"Object.metadata\", which matches field name path from root Object type",
        ),
        (
            "Object{metadata: Object.metadata{labels: {'a': object.metadata.labels['absent']}}}",
            "expression 'Object{metadata: Object.metadata{labels: {'a': object.metadata.labels['absent']}}}' resulted in error: no such key: labels",
        ),
        (
            "Object{metadata: Object.metadata{ownerReferences: [Object.metadata.ownerReferences{name: 'x'}], finalizers: ['a/b']}, data: {'k': 1}}",
            "error applying patch: failed to convert patch object to typed object: ",
        ),
    ];
    for (expression, error) in rows {
        let world = mutating(json!({"mutations": apply(expression)}), json!({})).await;
        let refused = world.post(MAPS, &map("a", json!({}))).await;
        assert_eq!(refused.code, 403, "{expression}: {}", refused.json());
        assert!(denied(&refused).starts_with(error), "{expression}: {}", denied(&refused));
        let ignore = json!({"spec": {"failurePolicy": "Ignore"}});
        assert_eq!(
            world.patch("merge", &format!("{}/p", path("Mutating", "policies")), &ignore).await.code,
            200
        );
        create(&world, MAPS, &map("a", json!({}))).await;
    }
    let atomic = json!({"matchConstraints": on("apps", "deployments"),
        "mutations": apply("Object{spec: Object.spec{selector: Object.spec.selector{matchLabels: {'a': 'b'}}}}")});
    let world = mutating(atomic, json!({})).await;
    let refused = world.post(DEPLOYMENTS, &deployment("a", 1)).await;
    assert_eq!(
        denied(&refused),
        "error applying patch: invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: .spec.selector"
    );
}

#[tokio::test]
async fn policies_run_again_when_a_later_one_changes_the_object() {
    let world = World::start().await;
    let apply = |expression: &str| json!([{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}]);
    let note = "Object{metadata: Object.metadata{annotations: {'seen-by-NAME': has(object.data) && 'late' in object.data ? 'yes' : 'no'}}}";
    for (name, reinvocation) in [("a-again", "IfNeeded"), ("a-once", "Never")] {
        let spec =
            json!({"reinvocationPolicy": reinvocation, "mutations": apply(&note.replace("NAME", name))});
        create(&world, &path("Mutating", "policies"), &policy("Mutating", name, &spec)).await;
    }
    let spec = json!({"mutations": apply("Object{data: {'late': 'x'}}")});
    create(&world, &path("Mutating", "policies"), &policy("Mutating", "z", &spec)).await;
    for name in ["a-again", "a-once", "z"] {
        create(&world, &path("Mutating", "policybindings"), &binding("Mutating", name, name, &json!({})))
            .await;
    }
    let made = world.post(MAPS, &map("m", json!({"k": "v"}))).await;
    assert_eq!(made.code, 201, "{}", made.json());
    assert_eq!(made.at("/metadata/annotations"), json!({"seen-by-a-again": "yes", "seen-by-a-once": "no"}));
    assert_eq!(made.at("/data"), json!({"k": "v", "late": "x"}));
}

#[tokio::test]
async fn what_a_mutation_makes_is_validated_and_seen_by_validating_policies() {
    let world = World::start().await;
    let mutate = json!({"mutations": [{"patchType": "ApplyConfiguration",
        "applyConfiguration": {"expression": "Object{metadata: Object.metadata{labels: {'mut': params.data.label}}}"}}],
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "matchConditions": [{"name": "c", "expression": "object.metadata.name != 'par'"}]});
    let reference =
        json!({"paramRef": {"name": "par", "namespace": "default", "parameterNotFoundAction": "Allow"}});
    enforce(&world, "Mutating", mutate, reference).await;
    create(&world, MAPS, &map("par", json!({"label": "not valid!"}))).await;
    let invalid = world.post(MAPS, &map("a", json!({}))).await;
    assert_eq!(invalid.code, 422);
    assert_eq!(invalid.at("/details/causes/0/field"), "metadata.labels");
    let fixed = world.patch("merge", &format!("{MAPS}/par"), &json!({"data": {"label": "y"}})).await;
    assert_eq!(fixed.code, 200);
    let validate = json!({"validations": [{"expression": "object.metadata.name == 'par' || object.metadata.labels.mut != 'y'", "message": "mut"}]});
    enforce(&world, "Validating", validate, json!({})).await;
    assert_eq!(denied(&world.post(MAPS, &map("a", json!({}))).await), "mut");
}

#[tokio::test]
async fn custom_kinds_are_matched_checked_and_changed() {
    let world = World::start().await;
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "wids.stable.example.com"},
        "spec": {"group": "stable.example.com", "scope": "Namespaced",
            "names": {"plural": "wids", "singular": "wid", "kind": "Wid", "listKind": "WidList"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object",
                "properties": {"spec": {"type": "object", "properties": {"n": {"type": "integer"},
                    "items": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                        "items": {"type": "object", "required": ["k"], "properties": {"k": {"type": "string"}, "v": {"type": "integer"}}}}}}}}}}]},
    });
    establish(&world, &definition).await;
    let mutate = json!({"matchConstraints": on("stable.example.com", "wids"), "mutations": [{"patchType": "ApplyConfiguration",
        "applyConfiguration": {"expression": "Object{spec: Object.spec{items: [Object.spec.items{k: 'b', v: object.spec.n}]}}"}}]});
    enforce(&world, "Mutating", mutate, json!({})).await;
    let validate = json!({"matchConstraints": on("stable.example.com", "wids"),
        "validations": [{"expression": "object.spec.n < 5", "messageExpression": "'n is ' + string(object.spec.n)"}]});
    enforce(&world, "Validating", validate, json!({})).await;
    let wid = |n: i64| {
        json!({"apiVersion": "stable.example.com/v1", "kind": "Wid", "metadata": {"name": "a"},
        "spec": {"n": n, "items": [{"k": "a", "v": 0}]}})
    };
    let wids = "/apis/stable.example.com/v1/namespaces/default/wids";
    assert_eq!(denied(&world.post(wids, &wid(7)).await), "n is 7");
    let made = world.post(wids, &wid(3)).await;
    assert_eq!(made.code, 201, "{}", made.json());
    assert_eq!(made.at("/spec/items"), json!([{"k": "a", "v": 0}, {"k": "b", "v": 3}]));
}

#[tokio::test]
async fn chains_of_variables_do_not_exhaust_the_stack() {
    let sum = |below: usize| format!("{}variables.v{below}{}", "-(1 + ".repeat(60), ")".repeat(60));
    let mut variables = vec![json!({"name": "v0", "expression": "1"})];
    variables.extend((1..15).map(|n| json!({"name": format!("v{n}"), "expression": sum(n - 1)})));
    let spec = json!({"variables": variables, "validations": [{"expression": "variables.v14 == 1000000", "message": "deep"}]});
    let world = validating(spec, json!({})).await;
    assert_eq!(denied(&world.post(MAPS, &map("a", json!({}))).await), "deep");
}

#[tokio::test]
async fn a_mutation_may_rename_a_new_object_but_not_move_it() {
    let apply = |expression: &str| json!([{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}]);
    let world =
        mutating(json!({"mutations": apply("Object{metadata: Object.metadata{name: 'other'}}")}), json!({}))
            .await;
    let made = world.post(MAPS, &map("a", json!({}))).await;
    assert_eq!((made.code, made.at("/metadata/name")), (201, json!("other")));
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 404);
    assert_eq!(world.get(&format!("{MAPS}/other")).await.code, 200);
    assert_eq!(world.post(MAPS, &map("b", json!({}))).await.code, 409);
    let world = mutating(
        json!({"mutations": apply("Object{metadata: Object.metadata{namespace: 'kube-system'}}")}),
        json!({}),
    )
    .await;
    assert_eq!(world.post(MAPS, &map("a", json!({}))).await.code, 400);
}

#[tokio::test]
async fn deletes_of_a_collection_are_looked_at_one_by_one() {
    let spec = json!({
        "matchConstraints": {"resourceRules": [rule("", "configmaps", &["DELETE"])]},
        "validations": [{"expression": "has(request.name) || oldObject.metadata.name != 'kept'", "message": "kept"}],
    });
    let world = validating(spec, json!({})).await;
    for name in ["a", "kept"] {
        create(&world, MAPS, &map(name, json!({}))).await;
    }
    let refused = world.delete(MAPS).await;
    assert_eq!((refused.code, denied(&refused)), (422, "kept".into()));
    assert_eq!(refused.at("/details/name"), "Unknown");
    assert_eq!(world.delete(&format!("{MAPS}/kept")).await.code, 200);
}
