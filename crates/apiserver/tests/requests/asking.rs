//! Webhooks that know tokens and rights: every way to a decision asks them.

use crate::world::World;
use bytes::Bytes;
use ferrite_apiserver::{
    Authorization, AuthorizerWebhook, BoxError, Config, Mode, TokenWebhook, User, WebhookAuthorizer,
    WebhookReply, WebhookSender, WebhookSenders,
};
use ferrite_json::{Value, json};
use futures_util::future::BoxFuture;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

type Says = dyn Fn(&Value) -> Result<Value, BoxError> + Send + Sync;

/// A webhook of this process: `says` makes the status of a review. An error is a failure of the webhook.
struct Webhook {
    says: Box<Says>,
    asked: Mutex<Vec<Value>>,
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Webhook")
    }
}

impl Webhook {
    fn new(says: impl Fn(&Value) -> Result<Value, BoxError> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { says: Box::new(says), asked: Mutex::default() })
    }

    /// The questions about a verb.
    fn asked(&self, verb: &str) -> Vec<Value> {
        let asked = self.asked.lock().expect("a lock");
        asked.iter().filter(|spec| spec["resourceAttributes"]["verb"] == verb).cloned().collect()
    }
}

impl WebhookSender for Webhook {
    fn post(&self, body: Bytes, _: usize) -> BoxFuture<'_, Result<WebhookReply, BoxError>> {
        Box::pin(async move {
            let review: Value = ferrite_json::from_slice(&body)?;
            self.asked.lock().expect("a lock").push(review["spec"].clone());
            // The answer comes later, as from a network.
            tokio::task::yield_now().await;
            let status = (self.says)(&review["spec"])?;
            Ok(WebhookReply {
                code: 200,
                retry_after: false,
                body: json!({"status": status}).to_string().into(),
            })
        })
    }
}

fn authorizer(name: &str, webhook: &Arc<Webhook>, denies_on_failure: bool) -> Mode {
    Mode::Webhook(Arc::new(WebhookAuthorizer::new(AuthorizerWebhook {
        name: name.to_owned(),
        sender: Arc::clone(webhook) as _,
        version: "v1".to_owned(),
        authorized_ttl: Duration::ZERO,
        unauthorized_ttl: Duration::ZERO,
        timeout: Duration::from_secs(3),
        denies_on_failure,
    })))
}

async fn world(modes: Vec<Mode>) -> World {
    World::start_as_told(|config| Config { authorization: modes.into(), ..config }).await
}

fn verb(spec: &Value) -> &str {
    spec["resourceAttributes"]["verb"].as_str().unwrap_or_default()
}

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}})
}

#[tokio::test]
async fn a_webhook_has_a_say_wherever_rights_are_asked_for() {
    let webhook = Webhook::new(|spec| {
        let attributes = &spec["resourceAttributes"];
        let refused = matches!(verb(spec), "escalate" | "delete" | "bind") || attributes["name"] == "secret";
        Ok(json!({"allowed": !refused, "reason": "as the webhook says"}))
    });
    let world = world(vec![authorizer("hook", &webhook, false), Mode::Rbac]).await;
    let jane = world.as_user(User::new("jane", ["devs"]));

    // Requests.
    assert_eq!(jane.post(MAPS, &map("a")).await.code, 201);
    let refused = jane.delete(&format!("{MAPS}/a")).await;
    assert_eq!(refused.code, 403);
    assert!(
        refused.at("/message").as_str().is_some_and(|message| message.ends_with(": as the webhook says"))
    );
    assert_eq!(webhook.asked("create").last().map(|spec| spec["user"].clone()), Some(json!("jane")));
    // The administrator needs nobody.
    let before = webhook.asked("get").len();
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 200);
    assert_eq!(webhook.asked("get").len(), before);
    // Lists with what they are narrowed to.
    let query = "?fieldSelector=metadata.name%3Da&labelSelector=x%20in%20(y)";
    assert_eq!(jane.get(&format!("{MAPS}{query}")).await.code, 200);
    let listed = webhook.asked("list").pop().expect("a question");
    let attributes = &listed["resourceAttributes"];
    assert_eq!((attributes["name"].as_str(), attributes["version"].as_str()), (Some("a"), Some("v1")));
    assert_eq!(
        attributes["labelSelector"],
        json!({"requirements": [{"key": "x", "operator": "In", "values": ["y"]}]})
    );

    // Impersonation.
    let other = [("impersonate-user", "joe"), ("impersonate-group", "devs")];
    assert_eq!(jane.send("GET", &format!("{MAPS}/a"), &other, b"").await.code, 200);
    let became = webhook.asked("get").pop().expect("a question");
    assert_eq!((became["user"].as_str(), became["groups"][0].as_str()), (Some("joe"), Some("devs")));
    let secret = [("impersonate-user", "secret")];
    assert_eq!(jane.send("GET", &format!("{MAPS}/a"), &secret, b"").await.code, 403);

    // Roles: the webhook refuses to let jane escalate, and she holds nothing by roles.
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "r"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]});
    let path = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles";
    let refused = jane.post(path, &role).await;
    assert_eq!(refused.code, 403);
    assert!(refused.json().to_string().contains("attempting to grant RBAC permissions not currently held"));
    assert_eq!(webhook.asked("escalate").len(), 1);

    // Reviews.
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {
        "user": "kim", "resourceAttributes": {"verb": "list", "resource": "pods", "version": "v1", "labelSelector": {
            "requirements": [{"key": "a", "operator": "Exists"}]}}}});
    let answer = world.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await;
    assert_eq!(answer.at("/status"), json!({"allowed": true, "reason": "as the webhook says"}));
    let asked = webhook.asked("list").pop().expect("a question");
    assert_eq!(
        asked["resourceAttributes"]["labelSelector"]["requirements"],
        json!([{"key": "a", "operator": "Exists"}])
    );
    let rules = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": "default"}});
    let answer = jane.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", &rules).await;
    assert_eq!(answer.at("/status/incomplete"), true);
    assert_eq!(
        answer.at("/status/evaluationError"),
        "webhook authorizer does not support user rule resolution"
    );
    world.stop().await;
}

#[tokio::test]
async fn expressions_of_policies_wait_for_the_webhook() {
    let webhook = Webhook::new(|spec| {
        let attributes = &spec["resourceAttributes"];
        Ok(json!({"allowed": attributes["verb"] != "paint" || attributes["name"] == "blue"}))
    });
    let world = world(vec![authorizer("hook", &webhook, false), Mode::Rbac]).await;
    let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
    "metadata": {"name": "paint"}, "spec": {
        "matchConstraints": {"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"],
            "operations": ["CREATE"], "resources": ["configmaps"]}]},
        "validations": [
            {"expression": "authorizer.group('').resource('walls').name(object.metadata.name).check('paint').allowed()"},
            {"expression": "authorizer.group('').resource('walls').name('blue').check('paint').allowed()"},
        ]}});
    let binding = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "paint"}, "spec": {"policyName": "paint", "validationActions": ["Deny"]}});
    let group = "/apis/admissionregistration.k8s.io/v1";
    assert_eq!(world.post(&format!("{group}/validatingadmissionpolicies"), &policy).await.code, 201);
    assert_eq!(world.post(&format!("{group}/validatingadmissionpolicybindings"), &binding).await.code, 201);
    let jane = world.as_user(User::new("jane", ["devs"]));
    assert_eq!(jane.post(MAPS, &map("blue")).await.code, 201);
    let refused = jane.post(MAPS, &map("red")).await;
    assert_eq!(refused.code, 422, "{}", refused.json());
    let names: Vec<Value> =
        webhook.asked("paint").iter().map(|spec| spec["resourceAttributes"]["name"].clone()).collect();
    assert_eq!(names, ["blue", "red", "blue"]);
    world.stop().await;
}

#[tokio::test]
async fn failures_are_no_opinion_or_a_refusal() {
    let broken = Webhook::new(|_| Err("the webhook is broken".into()));
    let allows = Webhook::new(|_| Ok(json!({"allowed": true})));
    let jane = User::new("jane", ["devs"]);
    let code = async |modes: Vec<Mode>| {
        let world = world(modes).await;
        let reply = world.as_user(jane.clone()).get(MAPS).await;
        world.stop().await;
        (reply.code, String::from_utf8_lossy(&reply.bytes).into_owned())
    };
    // As upstream: somebody who is not let in because an authorizer failed learns of the failure.
    let (got, body) = code(vec![authorizer("broken", &broken, false), Mode::Rbac]).await;
    assert_eq!(got, 500);
    assert_eq!(body, format!("Internal Server Error: \"{MAPS}\": the webhook is broken"));
    assert_eq!(
        code(vec![authorizer("broken", &broken, false), authorizer("b", &allows, false)]).await.0,
        200
    );
    assert_eq!(code(vec![authorizer("broken", &broken, true), authorizer("b", &allows, false)]).await.0, 500);
    // A refusal ends the chain, no opinion does not.
    let denies = Webhook::new(|_| Ok(json!({"allowed": false, "denied": true, "reason": "never"})));
    let unsure = Webhook::new(|_| Ok(json!({"allowed": false})));
    assert_eq!(code(vec![authorizer("a", &denies, false), authorizer("b", &allows, false)]).await.0, 403);
    assert_eq!(code(vec![authorizer("a", &unsure, false), authorizer("b", &allows, false)]).await.0, 200);
}

/// Opens a webhook by the name of its file.
#[derive(Debug)]
struct Webhooks(Vec<(&'static str, Arc<Webhook>)>);

impl WebhookSenders for Webhooks {
    fn open<'a>(&'a self, kubeconfig: &'a Path) -> BoxFuture<'a, Result<Arc<dyn WebhookSender>, BoxError>> {
        Box::pin(async move {
            let name = kubeconfig.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let found = self.0.iter().find(|(known, _)| *known == name);
            found.map(|(_, webhook)| Arc::clone(webhook) as _).ok_or_else(|| "no such webhook".into())
        })
    }
}

#[tokio::test]
async fn the_configuration_is_followed_and_an_invalid_one_changes_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let names = ["first", "second"];
    names.iter().for_each(|name| std::fs::write(directory.path().join(name), "").expect("a file"));
    let file = directory.path().join("authorization.yaml");
    let write = |authorizers: &str| {
        let text = format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n{authorizers}"
        );
        let new = directory.path().join("new");
        std::fs::write(&new, text).expect("a file");
        std::fs::rename(&new, &file).expect("a file");
    };
    let webhook = |name: &str, condition: &str| {
        let kubeconfig = directory.path().join(name);
        format!(
            "- type: Webhook\n  name: {name}\n  webhook: {{timeout: 3s, subjectAccessReviewVersion: v1, failurePolicy: Deny, \
             matchConditionSubjectAccessReviewVersion: v1, matchConditions: [{{expression: \"{condition}\"}}], \
             connectionInfo: {{type: KubeConfigFile, kubeConfigFile: {}}}}}\n",
            kubeconfig.display()
        )
    };
    let (node, rbac) = ("- {type: Node, name: node}\n", "- {type: RBAC, name: rbac}\n");
    let in_default = "has(request.resourceAttributes) && request.resourceAttributes.namespace == 'default'";
    write(&format!("{node}{}{rbac}", webhook("first", in_default)));
    let first = Webhook::new(|spec| Ok(json!({"allowed": spec["user"] == "jane"})));
    let second = Webhook::new(|spec| Ok(json!({"allowed": spec["user"] == "joe"})));
    let senders = Webhooks(vec![("first", Arc::clone(&first)), ("second", Arc::clone(&second))]);
    let authorization = Authorization::of_file(&file, None, Arc::new(senders)).await.expect("authorizers");
    let world = World::start_as_told(|config| Config { authorization, ..config }).await;
    let code = async |name: &str, path: &str| world.as_user(User::new(name, ["devs"])).get(path).await.code;
    assert_eq!((code("jane", MAPS).await, code("joe", MAPS).await), (200, 403));
    // The condition keeps the webhook out of other namespaces.
    assert_eq!(code("jane", "/api/v1/namespaces/other/configmaps").await, 403);
    assert!(first.asked("list").iter().all(|spec| spec["resourceAttributes"]["namespace"] == "default"));

    let begun = Instant::now();
    let failures = |text: &str| {
        let line = "apiserver_authorization_config_controller_automatic_reloads_total{status=\"failure\"";
        text.lines().filter(|found| found.starts_with(line)).count()
    };
    for invalid in [
        "- {type: Foo, name: foo}\n",
        // As upstream: authorizers of the first configuration stay, and no other is added.
        rbac,
        &format!("{node}{rbac}- {{type: ABAC, name: abac}}\n"),
        "- {type: RBAC, name: rbac",
    ] {
        write(invalid);
    }
    while failures(&String::from_utf8_lossy(&world.get("/metrics").await.bytes)) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(30), "the failure is not counted");
        tokio::task::yield_now().await;
    }
    assert_eq!((code("jane", MAPS).await, code("joe", MAPS).await), (200, 403));

    write(&format!("{}{node}{rbac}", webhook("second", "true")));
    while code("joe", MAPS).await != 200 {
        assert!(begun.elapsed() < Duration::from_secs(30), "the new configuration does not count");
        tokio::task::yield_now().await;
    }
    assert_eq!(code("jane", MAPS).await, 403);
    world.stop().await;
}

#[tokio::test]
async fn tokens_that_nothing_else_knows_are_shown_to_the_webhook() {
    const REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
    let webhook = Webhook::new(|spec| match spec["token"].as_str().unwrap_or_default() {
        "jane" => {
            Ok(json!({"authenticated": true, "user": {"username": "jane", "groups": ["system:masters"]}}))
        }
        "elsewhere" => {
            Ok(json!({"authenticated": true, "audiences": ["elsewhere"], "user": {"username": "eve"}}))
        }
        "expired" => Ok(json!({"authenticated": false, "error": "it has expired"})),
        "broken" => Err("the webhook is broken".into()),
        _ => Ok(json!({"authenticated": false})),
    });
    let token_webhook = Some(TokenWebhook {
        sender: Arc::clone(&webhook) as _,
        version: "v1".into(),
        cache_ttl: Duration::from_secs(60),
    });
    let world = World::start_as_told(|config| Config { token_webhook, ..config }).await;
    for (token, code) in
        [("jane", 201), ("jane", 201), ("elsewhere", 401), ("expired", 401), ("broken", 401), ("x", 401)]
    {
        let reply = world
            .with_token(
                token,
                MAPS,
                &json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"generateName": "a-"}}),
            )
            .await;
        assert_eq!(reply.code, code, "{token}");
    }
    let asked = webhook.asked.lock().expect("a lock").clone();
    let count = |token: &str| asked.iter().filter(|spec| spec["token"] == token).count();
    assert_eq!((count("jane"), count("x")), (1, 1));
    assert_eq!(asked[0]["audiences"], json!(["https://kubernetes.default.svc"]));

    let review = async |token: &str, audiences: Value| {
        let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": {"token": token, "audiences": audiences}});
        world.post(REVIEWS, &review).await.at("/status")
    };
    let known = review("elsewhere", json!(["elsewhere", "other"])).await;
    assert_eq!(
        known,
        json!({"authenticated": true, "audiences": ["elsewhere"],
            "user": {"username": "eve", "groups": ["system:authenticated"]}})
    );
    assert_eq!(review("expired", json!([])).await["error"], "[invalid bearer token, it has expired]");
    assert_eq!(review("x", json!([])).await["error"], "invalid bearer token");
    world.stop().await;
}
