//! A manifest becomes a static pod, or is refused with the reason.

use super::Source;
use ferrite_api::codec::yaml;
use ferrite_api::meta_validation::{dns1123_label, label_value, qualified_name};
use ferrite_api::resource::Strategy;
use ferrite_json::{Value, json};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Volume};
use std::sync::{Arc, LazyLock};

/// The largest manifest, as upstream.
pub(super) const MAX_BYTES: u64 = 10 << 20;

/// Annotations of static pods and their mirrors.
pub(crate) const HASH: &str = "kubernetes.io/config.hash";
pub(crate) const MIRROR: &str = "kubernetes.io/config.mirror";
const SOURCE: &str = "kubernetes.io/config.source";
const SEEN: &str = "kubernetes.io/config.seen";

/// Why a manifest is no static pod.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ManifestError {
    #[error("it is larger than 10 MiB")]
    TooLarge,
    #[error("couldn't parse as pod: {0}")]
    Form(String),
    #[error("it is a {0}, not a Pod of v1")]
    Kind(String),
    #[error("invalid pod: name is needed for the pod")]
    NoName,
    #[error("invalid pod: {0}")]
    Invalid(String),
    #[error("static pods may not reference {0}")]
    Reference(&'static str),
}

/// Where a manifest was found, and by which node.
pub(super) struct Origin<'a> {
    pub source: Source,
    /// The path or the URL.
    pub place: &'a str,
    pub node: &'a str,
    pub seen: Timestamp,
}

fn strategy() -> &'static Arc<dyn Strategy> {
    static PODS: LazyLock<Arc<dyn Strategy>> = LazyLock::new(|| {
        let all = ferrite_api::kinds::built_in();
        let pods = all.into_iter().find(|r| r.group.is_empty() && r.plural == "pods");
        pods.expect("pods are built in").strategy
    });
    &PODS
}

/// The pods of a document: one, or those of a list where the source may have lists.
pub(super) fn decode(data: &[u8], origin: &Origin<'_>) -> Result<Vec<Pod>, ManifestError> {
    if data.len() as u64 > MAX_BYTES {
        return Err(ManifestError::TooLarge);
    }
    let document = yaml::read(data).map_err(|e| ManifestError::Form(e.to_string()))?;
    let head: Value =
        ferrite_json::from_str(document.json()).map_err(|e| ManifestError::Form(e.to_string()))?;
    let text = |name: &str| head[name].as_str().unwrap_or_default().to_owned();
    match (text("apiVersion").as_str(), text("kind").as_str(), origin.source) {
        ("v1", "Pod", _) => Ok(vec![pod(&head, origin)?]),
        ("v1", "PodList" | "List", Source::Url) => {
            let items = head["items"].as_array().cloned().unwrap_or_default();
            items.iter().map(|item| pod(item, origin)).collect()
        }
        ("", _, _) | (_, "", _) => Err(ManifestError::Form("it has no apiVersion or no kind".into())),
        (version, kind, _) => Err(ManifestError::Kind(format!("{kind} of {version}"))),
    }
}

fn pod(written: &Value, origin: &Origin<'_>) -> Result<Pod, ManifestError> {
    let schema = ferrite_api::schema::kind("", "v1", "Pod").expect("the schema has pods");
    let text = written.to_string();
    let decoded = ferrite_api::codec::json::decode(schema, text.as_bytes())
        .map_err(|e| ManifestError::Form(e.to_string()))?;
    for warning in decoded.warnings() {
        tracing::warn!(place = origin.place, warning, "a manifest has a field that has no effect");
    }
    let mut value = decoded.value;
    let named = |value: &Value, field: &str| value["metadata"][field].as_str().unwrap_or_default().to_owned();
    let name = named(&value, "name");
    if name.is_empty() {
        return Err(ManifestError::NoName);
    }
    let uid = match named(&value, "uid") {
        given if given.is_empty() => hash(&value, origin),
        given => given,
    };
    // It becomes the name of directories.
    if uid.len() > 64 || !uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
        return Err(ManifestError::Invalid(format!("metadata.uid: {uid:?} is no UID")));
    }
    let namespace = Some(named(&value, "namespace")).filter(|n| !n.is_empty()).unwrap_or("default".into());
    value["metadata"]["name"] = json!(format!("{name}-{}", origin.node.to_lowercase()));
    value["metadata"]["namespace"] = json!(namespace);
    value["metadata"]["uid"] = json!(uid);
    // It is no object of the API, whatever it was saved from.
    value["metadata"]["resourceVersion"] = Value::Null;
    if !value["metadata"]["annotations"].is_object() {
        value["metadata"]["annotations"] = json!({});
    }
    let annotations = &mut value["metadata"]["annotations"];
    annotations[HASH] = json!(uid);
    annotations[SOURCE] = json!(origin.source.name());
    annotations[SEEN] = json!(origin.seen.to_string());
    value["spec"]["nodeName"] = json!(origin.node);
    value["status"] = json!({"phase": "Pending"});
    if origin.source == Source::File {
        tolerate_everything(&mut value["spec"]);
    }
    strategy().default(&mut value);
    check(&value)?;
    let pod: Pod = ferrite_json::from_value(value).map_err(|e| ManifestError::Form(e.to_string()))?;
    match reference(pod.spec.as_ref().unwrap_or(&PodSpec::default())) {
        Some(kind) => Err(ManifestError::Reference(kind)),
        None => Ok(pod),
    }
}

/// As upstream: no taint of the node evicts a pod that its directory asks for.
fn tolerate_everything(spec: &mut Value) {
    let all = json!({"operator": "Exists", "effect": "NoExecute"});
    let mut tolerations = spec["tolerations"].as_array().cloned().unwrap_or_default();
    if !tolerations.contains(&all) {
        tolerations.push(all);
    }
    spec["tolerations"] = Value::Array(tolerations);
}

/// The UID of a pod whose manifest has none: another manifest is another pod.
fn hash(value: &Value, origin: &Origin<'_>) -> String {
    let place = match origin.source {
        Source::File => format!("host:{}file:{}", origin.node, origin.place),
        Source::Url => format!("url:{}", origin.place),
    };
    let digest = ring::digest::digest(&ring::digest::SHA256, format!("{value}{place}").as_bytes());
    digest.as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn check(value: &Value) -> Result<(), ManifestError> {
    let metadata = &value["metadata"];
    let mut problems: Vec<String> = Vec::new();
    let text = |field: &str| metadata[field].as_str().unwrap_or_default();
    problems
        .extend(strategy().validate_name(text("name")).into_iter().map(|p| format!("metadata.name: {p}")));
    problems.extend(dns1123_label(text("namespace")).into_iter().map(|p| format!("metadata.namespace: {p}")));
    for (key, value) in metadata["labels"].as_object().into_iter().flatten() {
        let wrong = qualified_name(key).into_iter().chain(label_value(value.as_str().unwrap_or_default()));
        problems.extend(wrong.map(|p| format!("metadata.labels: {p}")));
    }
    problems.extend(strategy().validate(value).iter().map(ToString::to_string));
    match problems.is_empty() {
        true => Ok(()),
        false => Err(ManifestError::Invalid(format!("[{}]", problems.join(", ")))),
    }
}

/// The kind of API object that the pod needs, if any: a static pod runs without the API.
fn reference(spec: &PodSpec) -> Option<&'static str> {
    if spec.service_account_name.as_deref().is_some_and(|name| !name.is_empty()) {
        return Some("serviceaccounts");
    }
    let all: Vec<&Container> = spec.init_containers.iter().flatten().chain(&spec.containers).collect();
    let env_sources =
        || all.iter().flat_map(|c| c.env.iter().flatten()).filter_map(|e| e.value_from.as_ref());
    let env_from = || all.iter().flat_map(|c| c.env_from.iter().flatten());
    let secrets = spec.image_pull_secrets.iter().flatten().next().is_some()
        || env_sources().any(|s| s.secret_key_ref.is_some())
        || env_from().any(|s| s.secret_ref.is_some());
    if secrets {
        return Some("secrets");
    }
    if env_sources().any(|s| s.config_map_key_ref.is_some()) || env_from().any(|s| s.config_map_ref.is_some())
    {
        return Some("configmaps");
    }
    if spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        return Some("resourceclaims");
    }
    spec.volumes.iter().flatten().find_map(volume_reference)
}

fn volume_reference(volume: &Volume) -> Option<&'static str> {
    for (kind, used) in [
        ("configmaps (via configmap volumes)", volume.config_map.is_some()),
        ("secrets (via secret volumes)", volume.secret.is_some()),
        ("csidrivers (via CSI volumes)", volume.csi.is_some()),
        ("endpoints (via glusterFS volumes)", volume.glusterfs.is_some()),
        ("persistentvolumeclaims", volume.persistent_volume_claim.is_some()),
        ("persistentvolumeclaims (via ephemeral volumes)", volume.ephemeral.is_some()),
        ("secrets (via azureFile volumes)", volume.azure_file.is_some()),
    ] {
        if used {
            return Some(kind);
        }
    }
    let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
    sources.into_iter().find_map(|source| {
        [
            ("configmaps (via projected volumes)", source.config_map.is_some()),
            ("secrets (via projected volumes)", source.secret.is_some()),
            ("serviceaccounts (via projected volumes)", source.service_account_token.is_some()),
            ("clustertrustbundles", source.cluster_trust_bundle.is_some()),
            ("podcertificates", source.pod_certificate.is_some()),
        ]
        .into_iter()
        .find_map(|(kind, used)| used.then_some(kind))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(source: Source) -> Origin<'static> {
        Origin { source, place: "/etc/manifests/a.yaml", node: "node-1", seen: Timestamp::UNIX_EPOCH }
    }

    const PLAIN: &str =
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: c, image: i}]}\n";

    #[test]
    fn a_manifest_becomes_a_pod_of_the_node() {
        let pods = decode(PLAIN.as_bytes(), &origin(Source::File)).unwrap();
        let pod = &pods[0];
        let meta = &pod.metadata;
        assert_eq!((meta.name.as_deref(), meta.namespace.as_deref()), (Some("web-node-1"), Some("default")));
        let annotations = meta.annotations.clone().unwrap();
        assert_eq!(annotations[HASH], meta.uid.clone().unwrap());
        assert_eq!(
            (annotations[SOURCE].as_str(), annotations[SEEN].as_str()),
            ("file", "1970-01-01T00:00:00Z")
        );
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.node_name.as_deref(), Some("node-1"));
        assert_eq!(spec.restart_policy.as_deref(), Some("Always"), "defaults are set");
        let toleration = &spec.tolerations.as_ref().unwrap()[0];
        assert_eq!(
            (toleration.operator.as_deref(), toleration.effect.as_deref()),
            (Some("Exists"), Some("NoExecute"))
        );
        let same = decode(PLAIN.as_bytes(), &origin(Source::File)).unwrap();
        assert_eq!(same[0].metadata.uid, meta.uid);
        let other = decode(PLAIN.replace("image: i", "image: j").as_bytes(), &origin(Source::File)).unwrap();
        assert_ne!(other[0].metadata.uid, meta.uid, "another manifest is another pod");
    }

    #[test]
    fn lists_come_from_urls_alone() {
        let item = "{metadata: {name: web}, spec: {containers: [{name: c, image: i}]}}";
        let list = format!("apiVersion: v1\nkind: PodList\nitems: [{item}]\n");
        assert_eq!(decode(list.as_bytes(), &origin(Source::Url)).unwrap().len(), 1);
        let refused = decode(list.as_bytes(), &origin(Source::File));
        assert_eq!(refused.unwrap_err(), ManifestError::Kind("PodList of v1".into()));
    }

    #[test]
    fn bad_manifests_are_refused_with_the_reason() {
        let with = |spec: &str| format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec: {spec}\n");
        let container = "{name: c, image: i}";
        let volume =
            |source: &str| with(&format!("{{containers: [{container}], volumes: [{{name: v, {source}}}]}}"));
        let deep = format!("a: {}", "[".repeat(10_000));
        let bomb = (0..30).fold("a0: &a0 [x]\n".to_owned(), |text, n| {
            format!("{text}a{}: &a{} [*a{n}, *a{n}, *a{n}, *a{n}]\n", n + 1, n + 1)
        });
        for (what, text, part) in [
            ("empty", String::new(), "no apiVersion"),
            ("half a file", PLAIN[..30].to_owned(), "couldn't parse"),
            ("no YAML", "{{{".into(), "couldn't parse"),
            ("deep", deep, "couldn't parse"),
            ("a bomb", bomb, "couldn't parse"),
            ("no text", "\u{0}\u{1}".into(), "couldn't parse"),
            ("another kind", "apiVersion: v1\nkind: Secret\n".into(), "it is a Secret of v1"),
            ("no containers", with("{}"), "spec.containers: Required value"),
            ("no name", PLAIN.replace("name: web", "labels: {}"), "name is needed"),
            ("bad name", PLAIN.replace("name: web", "name: ../web"), "metadata.name"),
            ("bad namespace", PLAIN.replace("name: web", "name: web, namespace: ../x"), "metadata.namespace"),
            ("bad UID", PLAIN.replace("name: web", "name: web, uid: ../../x"), "is no UID"),
            (
                "account",
                with(&format!("{{serviceAccountName: a, containers: [{container}]}}")),
                "reference serviceaccounts",
            ),
            ("secret", volume("secret: {secretName: s}"), "reference secrets (via secret volumes)"),
            ("config map", volume("configMap: {name: s}"), "reference configmaps (via"),
            ("claim", volume("persistentVolumeClaim: {claimName: s}"), "reference persistentvolumeclaims"),
            (
                "token",
                volume("projected: {sources: [{serviceAccountToken: {path: t}}]}"),
                "serviceAccountToken: Forbidden",
            ),
            (
                "environment",
                with("{containers: [{name: c, image: i, envFrom: [{secretRef: {name: s}}]}]}"),
                "reference secrets",
            ),
        ] {
            let refused = decode(text.as_bytes(), &origin(Source::File)).map(|_| ());
            let message = refused.expect_err(what).to_string();
            assert!(message.contains(part), "{what}: {message}");
        }
        let huge = vec![b' '; 11 << 20];
        assert_eq!(decode(&huge, &origin(Source::File)).unwrap_err(), ManifestError::TooLarge);
        assert!(decode(volume("hostPath: {path: /x}").as_bytes(), &origin(Source::File)).is_ok());
    }
}
