//! Webhooks over TLS that know tokens and rights, and the file that names authorizers.

use crate::server::{Server, fails, kubectl, text};
use crate::standalone::{ForeignPki, curl};
use crate::world::*;
use ferrite_json::Value;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};

const PORT: &str = "9443";

/// The webhook of `review_webhook.py`, ended with this value.
pub struct ReviewWebhook {
    child: Child,
    log: PathBuf,
    pub kubeconfig: PathBuf,
}

impl ReviewWebhook {
    pub fn start(world: &World, pki: &ForeignPki) -> Self {
        let script = world.write("review_webhook.py", include_str!("review_webhook.py"));
        let log = world.path("reviews.log");
        let arguments = [
            script.to_str().unwrap(),
            &pki.file("server.crt"),
            &pki.file("server.key"),
            PORT,
            log.to_str().unwrap(),
        ];
        let mut command = world.command("/usr/bin/python3", &arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "serving");
        let kubeconfig = world.write(
            "webhook.kubeconfig",
            &format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                 clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{PORT}/review', certificate-authority: {}}}}}]\n\
                 users: [{{name: u, user: {{token: the-server}}}}]\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n",
                pki.file("ca.crt")
            ),
        );
        Self { child, log, kubeconfig }
    }

    pub fn reviews(&self, kind: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let all = text.lines().map(|line| ferrite_json::from_str::<Value>(line).unwrap());
        all.filter(|review| review["kind"] == kind).collect()
    }

    pub fn file(&self) -> &str {
        self.kubeconfig.to_str().unwrap()
    }
}

impl Drop for ReviewWebhook {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// kubectl as the bearer of a token.
fn as_bearer(world: &World, token: &str, arguments: &[&str]) -> (bool, String) {
    let ca = world.data().join("pki/ca.crt");
    let more = ["--server=https://127.0.0.1:6443", "--token", token, "--certificate-authority"];
    let mut command = world.command("kubectl", &[arguments, &more].concat());
    let output = command.arg(ca).env("KUBECONFIG", "/dev/null").output().unwrap();
    (output.status.success(), text(&output))
}

#[test]
fn tokens_and_rights_by_webhooks() {
    let world = World::prepare(&[]);
    let pki = ForeignPki::make(&world);
    let webhook = ReviewWebhook::start(&world, &pki);
    let server = Server::start(
        &world,
        &[
            "--authentication-token-webhook-config-file",
            webhook.file(),
            "--authentication-token-webhook-version=v1",
            "--authorization-mode=Node,Webhook,RBAC",
            "--authorization-webhook-config-file",
            webhook.file(),
            "--authorization-webhook-version=v1",
        ],
    );
    let list = ["get", "pods", "-l", "app in (a,b)"];
    let (listed, shown) = as_bearer(&world, "webhook-token", &list);
    assert!(listed && shown.contains("No resources found"), "{shown}");
    let (listed, shown) = as_bearer(&world, "webhook-token", &["delete", "pod", "x"]);
    assert!(
        !listed && shown.contains("cannot delete resource \"pods\"") && shown.contains("the webhook says so"),
        "{shown}"
    );
    let (listed, shown) = as_bearer(&world, "another-token", &list);
    assert!(!listed && shown.contains("Unauthorized") || shown.contains("must be logged in"), "{shown}");
    // Both answers are kept: kubectl has sent the token with several requests.
    let tokens = webhook.reviews("TokenReview");
    let of = |token: &str| tokens.iter().filter(|review| review["spec"]["token"] == token).count();
    assert_eq!((of("webhook-token"), of("another-token")), (1, 1));
    let reviews = webhook.reviews("SubjectAccessReview");
    let asked = reviews
        .iter()
        .find(|review| {
            let verb = review.pointer("/spec/resourceAttributes/verb");
            verb.is_some_and(|verb| verb == "list") && review["spec"]["user"] == "jane"
        })
        .expect("a question");
    assert_eq!(asked["apiVersion"], "authorization.k8s.io/v1");
    assert_eq!(
        asked["spec"]["resourceAttributes"]["labelSelector"]["requirements"][0]["values"],
        ferrite_json::json!(["a", "b"])
    );
    // A token is in no log.
    assert!(!kubectl(&world, &["get", "--raw", "/metrics"]).contains("webhook-token"));
    server.stop();
}

#[test]
fn the_file_of_authorizers_is_followed() {
    let world = World::prepare(&[]);
    let pki = ForeignPki::make(&world);
    let webhook = ReviewWebhook::start(&world, &pki);
    let config = |authorizers: &str| {
        let text = format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n{authorizers}"
        );
        let new = world.write("authorization.new", &text);
        std::fs::rename(new, world.path("authorization.yaml")).unwrap();
    };
    let hook = format!(
        "- type: Webhook\n  name: hook\n  webhook:\n    timeout: 3s\n    subjectAccessReviewVersion: v1beta1\n\
         \x20   failurePolicy: NoOpinion\n    cacheAuthorizedRequests: false\n    matchConditionSubjectAccessReviewVersion: v1\n\
         \x20   matchConditions: [{{expression: \"'devs' in request.groups\"}}]\n\
         \x20   connectionInfo: {{type: KubeConfigFile, kubeConfigFile: {}}}\n",
        webhook.file()
    );
    let own = "- {type: Node, name: node}\n- {type: RBAC, name: rbac}\n";
    config(own);
    let file = world.path("authorization.yaml");
    let flags = [
        "--authorization-config",
        file.to_str().unwrap(),
        "--authentication-token-webhook-config-file",
        webhook.file(),
    ];
    let server = Server::start(&world, &flags);
    let list = || as_bearer(&world, "webhook-token", &["get", "configmaps"]);
    let (listed, shown) = list();
    assert!(!listed && shown.contains("jane"), "{shown}");
    config(&format!("{hook}{own}"));
    eventually("the webhook is asked", || list().0.then_some(()));
    let asked = webhook.reviews("SubjectAccessReview");
    assert!(asked.iter().all(|review| review["apiVersion"] == "authorization.k8s.io/v1beta1"));
    // The old version has another name for groups.
    assert!(asked.iter().all(|review| {
        review["spec"]["group"].as_array().is_some_and(|groups| groups.contains(&"devs".into()))
    }));
    // A file that is no configuration changes nothing.
    config("- {type: RBAC, name: rbac}\n");
    let failed = "automatic_reloads_total{status=\"failure\"";
    eventually("the failure is counted", || {
        kubectl(&world, &["get", "--raw", "/metrics"]).contains(failed).then_some(())
    });
    assert!(list().0);
    drop(webhook);
    // Without an opinion of the webhook there is none: as upstream, the user learns of the failure.
    let token = "Authorization: Bearer webhook-token";
    let ca = world.data().join("pki/ca.crt");
    let url = "https://127.0.0.1:6443/api/v1/namespaces/default/configmaps";
    let reply = curl(&world, &["-i", "--cacert", ca.to_str().unwrap(), "-H", token, url]);
    assert!(reply.contains(" 500") && reply.contains("Internal Server Error:"), "{reply}");
    server.stop();

    for (flags, part) in [
        (
            &["--authorization-config", file.to_str().unwrap(), "--authorization-mode=RBAC"][..],
            "can not be specified when",
        ),
        (&["--authorization-config=/nowhere"], "open /nowhere"),
        (&["--authorization-mode=Webhook"], "--authorization-webhook-config-file"),
        (&["--authentication-token-webhook-config-file=/nowhere"], "/nowhere"),
    ] {
        let message = fails(&world, &[&["kube-apiserver", "--bind-address=127.0.0.1"], flags].concat());
        assert!(message.contains(part), "{flags:?}: {message}");
    }
}

#[test]
fn images_by_a_webhook() {
    let world = World::prepare(&[]);
    let pki = ForeignPki::make(&world);
    let webhook = ReviewWebhook::start(&world, &pki);
    let config = world.write(
        "admission.yaml",
        &format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins:\n- name: ImagePolicyWebhook\n\
             \x20 configuration: {{imagePolicy: {{kubeConfigFile: {}, allowTTL: 50, denyTTL: -1, retryBackoff: 1, defaultAllow: false}}}}\n",
            webhook.file()
        ),
    );
    let flags = [
        "--enable-admission-plugins=ImagePolicyWebhook",
        "--disable-admission-plugins=ServiceAccount",
        "--admission-control-config-file",
        config.to_str().unwrap(),
    ];
    let server = Server::start(&world, &flags);
    let run = |name: &str, image: &str| {
        let annotation = "--annotations=mine.image-policy.k8s.io/ticket=7";
        let kubeconfig = world.data().join("config/admin.kubeconfig");
        let arguments = ["run", name, "--image", image, annotation];
        let output = world.command("kubectl", &arguments).env("KUBECONFIG", kubeconfig).output().unwrap();
        (output.status.success(), text(&output))
    };
    assert!(run("a", "good:1").0 && run("b", "good:1").0);
    let (admitted, shown) = run("c", "bad:1");
    let why =
        "pods \"c\" is forbidden: image policy webhook backend denied one or more images: the image is bad";
    assert!(!admitted && shown.contains(why), "{shown}");
    let asked = webhook.reviews("ImageReview");
    assert_eq!(asked.len(), 2, "a grant is kept");
    assert_eq!(
        asked[0]["spec"],
        ferrite_json::json!({"containers": [{"image": "good:1"}], "namespace": "default",
            "annotations": {"mine.image-policy.k8s.io/ticket": "7"}})
    );
    drop(webhook);
    let (admitted, shown) = run("d", "other:1");
    assert!(!admitted && shown.contains("pods \"d\" is forbidden"), "{shown}");
    server.stop();
    let message = fails(&world, &["kube-apiserver", "--bind-address=127.0.0.1", flags[0]]);
    assert!(message.contains("ImagePolicyWebhook cannot be turned on: no config specified"), "{message}");
}
