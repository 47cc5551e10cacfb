//! Certificates of pods and trust bundles: projected into pods, with a signer of the tests' own.

use crate::archive;
use crate::world::*;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferrite_json::{Value, json};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, DistinguishedName,
    DnType, IsCa, KeyPair,
};
use time::{Duration, OffsetDateTime};

const SHELL: &str = "example.com/shell:v1";
const SIGNER: &str = "example.com/tests";
const GATES: &str = "ClusterTrustBundle=true,ClusterTrustBundleProjection=true,PodCertificateRequest=true";

/// An authority, which signs requests of pods.
struct Signer(CertifiedIssuer<'static, KeyPair>);

impl Signer {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn anchor(&self) -> String {
        self.0.pem()
    }

    /// The status of a request with its certificate.
    fn issue(&self, request: &Value) -> Value {
        let encoded = request["spec"]["stubPKCS10Request"].as_str().unwrap();
        let der = STANDARD.decode(encoded).unwrap();
        let mut csr = CertificateSigningRequestParams::from_der(&der.into()).unwrap();
        let begin = OffsetDateTime::now_utc().replace_nanosecond(0).unwrap();
        csr.params.not_before = begin;
        csr.params.not_after = begin + Duration::hours(1);
        csr.params.distinguished_name.push(DnType::CommonName, request["spec"]["podName"].as_str().unwrap());
        let time =
            |at: OffsetDateTime| jiff::Timestamp::from_second(at.unix_timestamp()).unwrap().to_string();
        json!({
            "conditions": [condition_of("Issued", "Signed", "")],
            "certificateChain": csr.signed_by(&self.0).unwrap().pem(),
            "notBefore": time(begin),
            "beginRefreshAt": time(begin + Duration::minutes(30)),
            "notAfter": time(begin + Duration::hours(1)),
        })
    }
}

fn condition_of(kind: &str, reason: &str, message: &str) -> Value {
    let now = jiff::Timestamp::from_second(jiff::Timestamp::now().as_second()).unwrap().to_string();
    json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now})
}

fn with_gates() -> World {
    let world = World::start_with(&[
        "--feature-gates",
        GATES,
        "--runtime-config",
        "certificates.k8s.io/v1beta1=true,certificates.k8s.io/v1alpha1=true",
    ]);
    let archive = world.path("shell.tar");
    archive::image(&archive, SHELL, "a page", &["/bin/busybox", "sleep", "100000"]);
    world.import(&archive);
    world
}

fn pod(name: &str, key_type: &str, security: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  securityContext: {security}
  containers:
  - name: c
    image: {SHELL}
    volumeMounts: [{{name: v, mountPath: /v}}]
  volumes:
  - name: v
    projected:
      sources:
      - clusterTrustBundle: {{name: "example.com:tests:a", path: named.pem}}
      - clusterTrustBundle: {{signerName: {SIGNER}, labelSelector: {{}}, path: all.pem}}
      - clusterTrustBundle: {{name: none, optional: true, path: none.pem}}
      - clusterTrustBundle: {{signerName: kubernetes.io/kube-apiserver-serving, labelSelector: {{}}, path: server.pem}}
      - podCertificate:
          signerName: {SIGNER}
          keyType: {key_type}
          maxExpirationSeconds: 7200
          credentialBundlePath: bundle.pem
          keyPath: key.pem
          certificateChainPath: chain.pem
          userAnnotations: {{example.com/team: blue}}
"#
    )
}

fn publish(world: &World, name: &str, anchors: &str) {
    let bundle = json!({"apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
        "metadata": {"name": format!("example.com:tests:{name}")},
        "spec": {"signerName": SIGNER, "trustBundle": anchors}});
    let file = world.write("bundle.json", &bundle.to_string());
    world.kubectl(&["apply", "-f", file.to_str().unwrap()]);
}

/// A request of a pod that nobody has answered.
fn pending(world: &World, pod: &str) -> Value {
    eventually("a request of the pod", || {
        let selector = format!("spec.podName={pod}");
        let list = world.get(&["podcertificaterequests", "--field-selector", &selector]);
        let open = list["items"].as_array().unwrap().iter().find(|r| r["status"]["conditions"].is_null());
        open.cloned()
    })
}

fn answer(world: &World, request: &Value, status: &Value, extra: &[&str]) -> std::process::Output {
    let name = request["metadata"]["name"].as_str().unwrap();
    let patch = json!({ "status": status }).to_string();
    let arguments =
        ["patch", "podcertificaterequest", name, "--subresource", "status", "--type", "merge", "-p", &patch];
    world.try_kubectl(&[&arguments[..], extra].concat())
}

/// A file of the volume of pod `p`.
fn read(world: &World, file: &str) -> String {
    world.kubectl(&["exec", "p", "--", "/bin/busybox", "cat", &format!("/v/{file}")])
}

#[test]
fn a_pod_has_its_certificate_and_its_trust_anchors() {
    let mut world = with_gates();
    let (signer, other) = (Signer::new("one"), Signer::new("two"));
    publish(&world, "a", &signer.anchor());
    publish(&world, "b", &format!("a note\n{}{}", signer.anchor(), other.anchor()));
    world.create(&pod("p", "ED25519", "{}"));
    let request = pending(&world, "p");
    let spec = &request["spec"];
    assert_eq!((&spec["nodeName"], &spec["maxExpirationSeconds"]), (&json!("node"), &json!(7200)), "{spec}");
    assert_eq!(spec["unverifiedUserAnnotations"], json!({"example.com/team": "blue"}));
    assert_eq!(request["metadata"]["ownerReferences"][0]["name"], "p");
    // To write statuses is not to sign.
    world.kubectl(&[
        "create",
        "role",
        "writer",
        "--verb=get,patch",
        "--resource=podcertificaterequests,podcertificaterequests/status",
    ]);
    world.kubectl(&["create", "rolebinding", "writer", "--role=writer", "--user=bob"]);
    let status = signer.issue(&request);
    let refused = answer(&world, &request, &status, &["--as", "bob"]);
    let complaint = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        complaint.contains(r#"User "bob" is not permitted to "sign" for signer "example.com/tests""#),
        "{complaint}"
    );
    assert!(answer(&world, &request, &status, &[]).status.success());
    world.wait_ready("p");
    let anchors = |file: &str| read(&world, file).matches("BEGIN CERTIFICATE").count();
    assert_eq!(read(&world, "named.pem"), signer.anchor().replace("\r\n", "\n"));
    assert_eq!(
        (anchors("all.pem"), anchors("none.pem"), anchors("server.pem")),
        (2, 0, 1),
        "each anchor once"
    );
    let (key, chain) = (read(&world, "key.pem"), read(&world, "chain.pem"));
    assert!(key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert_eq!(read(&world, "bundle.pem"), format!("{key}{chain}"));
    assert_eq!(chain, status["certificateChain"].as_str().unwrap().replace("\r\n", "\n"));
    let (_, leaf) = x509_parser::pem::parse_x509_pem(chain.as_bytes()).unwrap();
    let public = leaf.parse_x509().unwrap().public_key().subject_public_key.data.to_vec();
    assert_eq!(
        rcgen::PublicKeyData::der_bytes(&KeyPair::from_pem(&key).unwrap()),
        public,
        "the certificate is the key's"
    );
    let modes =
        world.kubectl(&["exec", "p", "--", "/bin/busybox", "stat", "-L", "-c", "%a %u", "/v/key.pem"]);
    assert_eq!(modes, "644 0\n");

    // A bundle that changes is written again.
    publish(&world, "a", &other.anchor());
    let changed = other.anchor().replace("\r\n", "\n");
    eventually("the changed bundle", || (read(&world, "named.pem") == changed).then_some(()));

    // As upstream, a kubelet that starts again asks for another certificate, with another key.
    world.kill();
    world.up();
    let again = pending(&world, "p");
    assert!(answer(&world, &again, &signer.issue(&again), &[]).status.success());
    let renewed = eventually("the new key", || Some(read(&world, "key.pem")).filter(|now| *now != key));
    assert_ne!(read(&world, "chain.pem"), chain);
    assert!(renewed.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    world.kubectl(&["delete", "pod", "p"]);
    eventually("the requests to go with the pod", || {
        let left = world.get(&["podcertificaterequests"]);
        left["items"].as_array().unwrap().is_empty().then_some(())
    });
}

#[test]
fn a_refused_request_keeps_the_pod_from_starting() {
    let world = with_gates();
    let signer = Signer::new("one");
    publish(&world, "a", &signer.anchor());
    world.create(&pod("denied", "ECDSAP256", "{}"));
    let request = pending(&world, "denied");
    let status = json!({"conditions": [condition_of("Denied", "Unwanted", "not this pod")]});
    assert!(answer(&world, &request, &status, &[]).status.success());
    let name = request["metadata"]["name"].as_str().unwrap();
    let expected = format!(
        "PodCertificateRequest default/{name} was denied, reason=\"Unwanted\", message=\"not this pod\""
    );
    let mount = "MountVolume.SetUp failed for volume \"v\" : PodCertificateRequest was permanently denied: reason=\"Unwanted\" message=\"not this pod\"";
    for (reason, message) in [("Denied", expected.as_str()), ("FailedMount", mount)] {
        eventually("the event", || {
            let events = world.get(&["events", "--field-selector", "involvedObject.name=denied"]);
            let found = events["items"].as_array().unwrap().iter().any(|event| {
                event["reason"] == reason && event["message"].as_str().unwrap_or_default() == message
            });
            found.then_some(())
        });
    }
    assert_eq!(world.get(&["pod", "denied"])["status"]["phase"], "Pending");
    // The answer is final.
    let refused = answer(&world, &request, &signer.issue(&request), &[]);
    assert!(!refused.status.success());

    // The files of a pod that runs as one user are that user's alone.
    world.create(&pod("user", "ECDSAP384", "{runAsUser: 1234, fsGroup: 4321}"));
    let request = pending(&world, "user");
    assert!(answer(&world, &request, &signer.issue(&request), &[]).status.success());
    world.wait_ready("user");
    let modes =
        world.kubectl(&["exec", "user", "--", "/bin/busybox", "stat", "-L", "-c", "%a %u %g", "/v/key.pem"]);
    assert_eq!(modes, "640 1234 4321\n");

    // A key that this kubelet cannot make is refused clearly.
    world.create(&pod("rsa", "RSA3072", "{}"));
    eventually("the refusal of the key", || {
        let events = world.get(&["events", "--field-selector", "involvedObject.name=rsa"]);
        let items = events["items"].as_array().unwrap();
        let says = |event: &Value| {
            event["message"].as_str().unwrap_or_default().contains("keys of type RSA3072 cannot be generated")
        };
        items.iter().any(says).then_some(())
    });

    // Nodes ask for their own pods alone, and sign nothing.
    let node = ["--as=system:node:other", "--as-group=system:nodes"];
    let file = world.write(
        "request.json",
        &json!({"apiVersion": "certificates.k8s.io/v1beta1", "kind": "PodCertificateRequest",
        "metadata": {"generateName": "x-", "namespace": "default"}, "spec": request["spec"]})
        .to_string(),
    );
    let stolen = world.kubectl_fails(&[&["create", "-f", file.to_str().unwrap()][..], &node].concat());
    assert!(stolen.contains("which is not the requesting node \"other\""), "{stolen}");
    let listed = world.kubectl_fails(&[&["get", "podcertificaterequests"][..], &node].concat());
    assert!(
        listed.contains("can only list/watch podcertificaterequests with nodeName field selector"),
        "{listed}"
    );
}

#[test]
fn without_the_gates_there_is_neither() {
    let world = World::start_with(&["--runtime-config", "certificates.k8s.io/v1beta1=true"]);
    let resources = world.kubectl(&["api-resources", "--api-group", "certificates.k8s.io"]);
    assert!(
        !resources.contains("clustertrustbundles") && !resources.contains("podcertificaterequests"),
        "{resources}"
    );
    world.create(&pod("p", "ED25519", "{}"));
    let sources = world.get(&["pod", "p"])["spec"]["volumes"][0]["projected"]["sources"].clone();
    assert_eq!(sources, json!([{}, {}, {}, {}, {}]));
}
