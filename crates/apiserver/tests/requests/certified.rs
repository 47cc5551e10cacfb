//! Requests for certificates of pods, and trust bundles: the rights that writers need, and the gates.

use crate::world::*;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferrite_apiserver::{Config, User};
use ferrite_component::FeatureGates;
use ferrite_json::{Value, json};

const GROUP: &str = "/apis/certificates.k8s.io/v1beta1";
const PODS: &str = "/api/v1/namespaces/default/pods";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1beta1/namespaces/default/podcertificaterequests";

async fn start(gates: &str) -> World {
    let feature_gates = FeatureGates::parse(gates).expect("gates");
    let runtime_config = [("certificates.k8s.io/v1beta1".to_owned(), true)].into();
    World::start_as_told(|config| {
        let mut admission = config.admission.clone();
        admission.enable = vec!["NodeRestriction".to_owned()];
        Config { feature_gates, runtime_config, admission, ..config }
    })
    .await
}

/// The DER of a request for a new key, in base64.
fn stub() -> String {
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    STANDARD.encode(params.serialize_request(&key).expect("a request").der())
}

fn projecting() -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {
        "nodeName": "n", "automountServiceAccountToken": false, "containers": [{"name": "c", "image": "i"}],
        "volumes": [{"name": "v", "projected": {"sources": [
            {"clusterTrustBundle": {"name": "b", "path": "a"}},
            {"podCertificate": {"signerName": "example.com/s", "keyType": "ED25519", "keyPath": "k"}},
        ]}}],
    }})
}

/// Makes a node, an account and a pod. Returns a request for the pod's certificate.
async fn request_of_a_pod(world: &World) -> Value {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}});
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    let node = world.post("/api/v1/nodes", &node).await.at("/metadata/uid");
    let account =
        world.post("/api/v1/namespaces/default/serviceaccounts", &account).await.at("/metadata/uid");
    let pod = world.post(PODS, &projecting()).await;
    assert_eq!(pod.code, 201, "{}", pod.json());
    json!({"apiVersion": "certificates.k8s.io/v1beta1", "kind": "PodCertificateRequest",
        "metadata": {"name": "r"}, "spec": {"signerName": "example.com/s", "podName": "p",
        "podUID": pod.at("/metadata/uid"), "serviceAccountName": "default", "serviceAccountUID": account,
        "nodeName": "n", "nodeUID": node, "stubPKCS10Request": stub()}})
}

#[tokio::test]
async fn a_node_asks_for_its_own_pods_and_signs_nothing() {
    let world = start("PodCertificateRequest=true").await;
    let request = request_of_a_pod(&world).await;
    let user = |name: &str| world.as_user(User::new(format!("system:node:{name}"), ["system:nodes"]));
    let (own, other) = (user("n"), user("m"));
    assert_eq!(other.post(REQUESTS, &request).await.code, 403);
    let mut changed = request.clone();
    changed["spec"]["podUID"] = "another".into();
    assert_eq!(own.post(REQUESTS, &changed).await.code, 500, "as upstream: nodes try again");
    let made = own.post(REQUESTS, &request).await;
    assert_eq!(made.code, 201, "{}", made.json());
    assert_eq!(made.at("/spec/maxExpirationSeconds"), 86400);
    let one = format!("{REQUESTS}/r");
    for (node, path, code) in [
        (&own, one.clone(), 200),
        (&other, one.clone(), 403),
        (&own, REQUESTS.to_owned(), 403),
        (&own, format!("{REQUESTS}?fieldSelector=spec.nodeName%3Dn"), 200),
        (&other, format!("{REQUESTS}?fieldSelector=spec.nodeName%3Dn"), 403),
    ] {
        assert_eq!(node.get(&path).await.code, code, "{path}");
    }
    let denied = json!({"status": {"conditions": [{"type": "Denied", "status": "True", "reason": "No", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    let status = format!("{one}/status");
    assert_eq!(own.patch("merge", &status, &denied).await.code, 403);
    // The right to write statuses is not the right to sign.
    let role = |rules: Value| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "w"}, "rules": rules});
    let writes = json!({"apiGroups": ["certificates.k8s.io"], "resources": ["podcertificaterequests/status"], "verbs": ["*"]});
    let signs = json!({"apiGroups": ["certificates.k8s.io"], "resources": ["signers"], "resourceNames": ["example.com/*"], "verbs": ["sign"]});
    let roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
    world.post(roles, &role(json!([writes]))).await;
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "w"},
        "subjects": [{"kind": "User", "name": "bob", "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "w"}});
    world.post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await;
    let bob = world.as_user(User::new("bob", [""; 0]));
    let refused = bob.patch("merge", &status, &denied).await;
    assert_eq!(refused.code, 422);
    let message = refused.at("/message");
    let why = r#"User "bob" is not permitted to "sign" for signer "example.com/s""#;
    assert!(message.as_str().is_some_and(|message| message.contains(why)), "{message}");
    world.put(&format!("{roles}/w"), &role(json!([writes, signs]))).await;
    assert_eq!(bob.patch("merge", &status, &denied).await.code, 200);
    let again = json!({"status": {"conditions": []}});
    assert_eq!(world.patch("merge", &status, &again).await.code, 422, "an answer is final");
}

#[tokio::test]
async fn a_signers_bundles_are_written_by_users_who_may_attest_for_it() {
    let world = start("ClusterTrustBundle=true").await;
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let anchor = params.self_signed(&key).expect("an authority").pem();
    let bundle = |name: &str, signer: &str| {
        json!({"apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle", "metadata": {"name": name},
            "spec": {"signerName": signer, "trustBundle": anchor}})
    };
    let bundles = format!("{GROUP}/clustertrustbundles");
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "w"},
        "rules": [{"apiGroups": ["certificates.k8s.io"], "resources": ["clustertrustbundles"], "verbs": ["*"]}]});
    world.post("/apis/rbac.authorization.k8s.io/v1/clusterroles", &role).await;
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "w"},
        "subjects": [{"kind": "User", "name": "bob", "apiGroup": "rbac.authorization.k8s.io"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "w"}});
    world.post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await;
    let bob = world.as_user(User::new("bob", [""; 0]));
    assert_eq!(bob.post(&bundles, &bundle("plain", "")).await.code, 201);
    let refused = bob.post(&bundles, &bundle("example.com:s:a", "example.com/s")).await;
    let message = refused.at("/message");
    let why = r#"user not permitted to attest for signerName "example.com/s""#;
    assert!(message.as_str().is_some_and(|message| message.contains(why)), "{message}");
    assert_eq!(world.post(&bundles, &bundle("example.com:s:a", "example.com/s")).await.code, 201);
    // Owners and finalizers are no matter of the signer.
    let one = format!("{bundles}/example.com:s:a");
    let held = json!({"metadata": {"finalizers": ["example.com/f"]}});
    assert_eq!(bob.patch("merge", &one, &held).await.code, 200);
    let labelled = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(bob.patch("merge", &one, &labelled).await.code, 403);
    // Nodes and pods read bundles.
    for (name, group) in
        [("system:node:n", "system:nodes"), ("system:serviceaccount:a:b", "system:serviceaccounts")]
    {
        assert_eq!(world.as_user(User::new(name, [group])).get(&one).await.code, 200, "{name}");
    }
}

#[tokio::test]
async fn without_a_gate_nothing_is_served_and_fields_are_dropped() {
    for (gates, served, kept) in [
        ("", [404, 404], [false, false]),
        ("ClusterTrustBundle=true", [200, 404], [false, false]),
        ("ClusterTrustBundle=true,ClusterTrustBundleProjection=true", [200, 404], [true, false]),
        ("PodCertificateRequest=true", [404, 200], [false, true]),
    ] {
        let world = start(gates).await;
        let codes = [
            world.get(&format!("{GROUP}/clustertrustbundles")).await.code,
            world.get(&format!("{GROUP}/podcertificaterequests")).await.code,
        ];
        assert_eq!(codes, served, "{gates}");
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        world.post("/api/v1/namespaces/default/serviceaccounts", &account).await;
        let sources = |object: &Value, place: &str| {
            let sources = object.pointer(place).cloned().unwrap_or_default();
            ["clusterTrustBundle", "podCertificate"]
                .map(|key| sources.as_array().into_iter().flatten().any(|source| source[key].is_object()))
        };
        let pod = world.post(PODS, &projecting()).await;
        assert_eq!(pod.code, 201, "{}", pod.json());
        assert_eq!(sources(&pod.json(), "/spec/volumes/0/projected/sources"), kept, "{gates}");
        let mut template = projecting();
        template["metadata"] = json!({"labels": {"a": "b"}});
        let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
            "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template}});
        let made = world.post("/apis/apps/v1/namespaces/default/deployments", &deployment).await;
        let place = "/spec/template/spec/volumes/0/projected/sources";
        assert_eq!(sources(&made.json(), place), kept, "{gates}");
    }
}
