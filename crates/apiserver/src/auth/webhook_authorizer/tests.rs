use super::*;
use crate::review_webhook::fake::FakeWebhook;
use ferrite_cel::Environment;

fn user() -> User {
    let mut user = User::new("jane", ["devs"]);
    user.uid = "7".into();
    user.extra.insert("scopes".into(), vec!["a".into()]);
    user
}

fn action(verb: &str, name: &str) -> Action {
    Action {
        verb: verb.into(),
        group: "apps".into(),
        version: "v1".into(),
        resource: "deployments".into(),
        namespace: "x".into(),
        name: name.into(),
        ..Action::default()
    }
}

fn settings(webhook: &Arc<FakeWebhook>) -> AuthorizerWebhook {
    AuthorizerWebhook {
        name: "hook".into(),
        sender: Arc::clone(webhook) as _,
        version: "v1".into(),
        authorized_ttl: Duration::from_secs(300),
        unauthorized_ttl: Duration::from_secs(30),
        timeout: Duration::from_secs(3),
        denies_on_failure: false,
    }
}

fn conditions(sources: &[&str]) -> Vec<MatchCondition> {
    let environment = Environment::kubernetes(36).with_subject_access_review();
    let compiled = |source: &&str| MatchCondition {
        source: (*source).to_owned(),
        program: environment.compile(source).expect("an expression"),
    };
    sources.iter().map(compiled).collect()
}

#[test]
fn questions_are_written_as_upstream_writes_them() {
    let mut list = action("list", "");
    list.select("spec.nodeName=n,status.phase!=Failed", "a in (b,c),!d,e=f,g>1");
    assert_eq!(
        spec_of(&user(), &list),
        json!({
            "resourceAttributes": {
                "namespace": "x", "verb": "list", "group": "apps", "version": "v1", "resource": "deployments",
                "fieldSelector": {"requirements": [
                    {"key": "spec.nodeName", "operator": "In", "values": ["n"]},
                    {"key": "status.phase", "operator": "NotIn", "values": ["Failed"]},
                ]},
                "labelSelector": {"requirements": [
                    {"key": "a", "operator": "In", "values": ["b", "c"]},
                    {"key": "d", "operator": "DoesNotExist"},
                    {"key": "e", "operator": "In", "values": ["f"]},
                ]},
            },
            "user": "jane", "groups": ["devs", "system:authenticated"], "extra": {"scopes": ["a"]}, "uid": "7",
        })
    );
    let path = Action { verb: "get".into(), path: Some("/healthz".into()), ..Action::default() };
    let spec = spec_of(&User::anonymous(), &path);
    assert_eq!(
        spec,
        json!({"nonResourceAttributes": {"path": "/healthz", "verb": "get"},
            "user": "system:anonymous", "groups": ["system:unauthenticated"]})
    );
    assert_eq!(as_v1beta1(&spec)["group"], json!(["system:unauthenticated"]));
    assert_eq!(as_v1beta1(&spec).get("groups"), None);
}

#[test]
fn a_refusal_counts_more_than_a_grant() {
    let of = |status: Value| {
        let decision = Opinion::read(&status).decision();
        (decision.allowed, decision.denied, decision.error.is_some())
    };
    assert_eq!(of(json!({"allowed": true})), (true, false, false));
    assert_eq!(of(json!({"allowed": false})), (false, false, false));
    assert_eq!(of(json!({"allowed": false, "denied": true})), (false, true, false));
    assert_eq!(of(json!({"allowed": true, "denied": true})), (false, true, true));
    assert_eq!(of(json!({"allowed": "true"})), (false, false, false));
    assert_eq!(of(Value::Null), (false, false, false));
}

#[test]
fn conditions_select_questions() {
    let of = |sources: &[&str], action: &Action| meets(&conditions(sources), &spec_of(&user(), action));
    let get = action("get", "web");
    let path = Action { verb: "get".into(), path: Some("/healthz".into()), ..Action::default() };
    for (source, action, met) in [
        ("has(request.resourceAttributes)", &get, true),
        ("has(request.resourceAttributes)", &path, false),
        ("request.resourceAttributes.namespace == 'x'", &get, true),
        ("request.resourceAttributes.subresource == ''", &get, true),
        ("'devs' in request.groups && request.uid == '7'", &get, true),
        ("request.extra['scopes'] == ['a']", &get, true),
        ("!has(request.resourceAttributes.fieldSelector)", &get, true),
        ("request.?resourceAttributes.namespace.orValue('') == 'y'", &path, false),
    ] {
        assert_eq!(of(&[source], action), Ok(met), "{source}");
    }
    // One that is not met counts more than one that fails.
    let fails = "request.resourceAttributes.name == ''";
    let error = of(&[fails], &path).expect_err("there are no attributes");
    assert!(
        error.starts_with(
            "cel evaluation error: expression 'request.resourceAttributes.name == ''' resulted in error: "
        ),
        "{error}"
    );
    assert_eq!(of(&[fails, "false"], &path), Ok(false));
    assert_eq!(of(&[], &path), Ok(true));
}

#[tokio::test(start_paused = true)]
async fn answers_are_kept_as_long_as_they_may() {
    let webhook = FakeWebhook::new(Duration::ZERO, |_, question| {
        let name =
            question.pointer("/spec/resourceAttributes/name").and_then(Value::as_str).unwrap_or_default();
        match name {
            "ill" => Ok((400, json!({}))),
            name => Ok((200, json!({"status": {"allowed": name == "good", "reason": name}}))),
        }
    });
    let authorizer = Arc::new(WebhookAuthorizer::new(settings(&webhook)));
    let ask = async |name: &str| {
        let question =
            authorizer.question(&user(), &action("get", name)).expect("no condition").expect("a question");
        match authorizer.cached(&question) {
            Some(opinion) => opinion.decision(),
            None => authorizer.ask(&question).await.decision(),
        }
    };
    assert!(ask("good").await.allowed && !ask("bad").await.allowed);
    assert_eq!((ask("good").await.reason.as_str(), webhook.questions()), ("good", 2));
    ask("bad").await;
    assert_eq!(webhook.questions(), 2);
    tokio::time::advance(Duration::from_secs(31)).await;
    ask("good").await;
    ask("bad").await;
    assert_eq!(webhook.questions(), 3);
    let long = "x".repeat(MAX_CACHED_ATTRIBUTES);
    ask(&long).await;
    ask(&long).await;
    assert_eq!(webhook.questions(), 5);
    let failed = ask("ill").await;
    assert!(!failed.allowed && !failed.denied && failed.error.is_some());
    ask("ill").await;
    assert_eq!(webhook.questions(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_no_opinion_or_a_refusal() {
    let webhook =
        FakeWebhook::new(Duration::from_secs(10), |_, _| Ok((200, json!({"status": {"allowed": true}}))));
    for denies_on_failure in [false, true] {
        let authorizer = Arc::new(WebhookAuthorizer::with_conditions(
            AuthorizerWebhook { denies_on_failure, ..settings(&webhook) },
            conditions(&["request.resourceAttributes.name != ''"]),
        ));
        let question = authorizer.question(&user(), &action("get", "web")).expect("met").expect("a question");
        let decision = authorizer.ask(&question).await.decision();
        assert_eq!((decision.allowed, decision.denied), (false, denies_on_failure));
        assert_eq!(decision.error.as_deref(), Some("context deadline exceeded"));
        // A condition that fails is a failure of the webhook.
        let path = Action { verb: "get".into(), path: Some("/".into()), ..Action::default() };
        let decision = authorizer.question(&user(), &path).expect_err("it fails").decision();
        assert_eq!((decision.allowed, decision.denied), (false, denies_on_failure));
        assert!(authorizer.question(&user(), &action("get", "")).expect("a result").is_none());
    }
}
