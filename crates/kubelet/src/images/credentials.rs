//! Registry credentials, with what they came from.

use super::pulled::Coordinates;
use super::reference;
use base64::Engine;
use ferrite_cri::v1::AuthConfig;
use k8s_openapi::api::core::v1::Secret;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Debug, Deserialize)]
struct DockerConfigJson {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Entry {
    username: String,
    password: String,
    auth: String,
    email: String,
    #[serde(rename = "identitytoken")]
    identity_token: String,
    #[serde(rename = "registrytoken")]
    registry_token: String,
}

/// Where credentials came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The node has them for every pod.
    Node,
    /// A pull secret of the pod.
    Secret(Coordinates),
    /// A plugin had them for the pod's service account.
    ServiceAccount(Coordinates),
}

/// Credentials for one image.
#[derive(Debug, Clone)]
pub(crate) struct Credential {
    pub auth: AuthConfig,
    pub origin: Origin,
    /// A hash of the content. It is upstream's, so that either kubelet can compare with the other's records.
    pub hash: String,
}

impl Credential {
    pub(crate) fn new(auth: AuthConfig, email: &str, origin: Origin) -> Self {
        let hash = hash(&auth, email);
        Self { auth, origin, hash }
    }
}

/// The members of upstream's AuthConfig, in its order.
#[derive(Serialize)]
struct Hashed<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    username: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    password: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    email: &'a str,
    #[serde(skip_serializing_if = "str::is_empty", rename = "identitytoken")]
    identity_token: &'a str,
    #[serde(skip_serializing_if = "str::is_empty", rename = "registrytoken")]
    registry_token: &'a str,
}

/// The empty hash is equal to none.
fn hash(auth: &AuthConfig, email: &str) -> String {
    let members = Hashed {
        username: &auth.username,
        password: &auth.password,
        email,
        identity_token: &auth.identity_token,
        registry_token: &auth.registry_token,
    };
    let Ok(text) = ferrite_json::to_string(&members) else { return String::new() };
    // Go's encoder escapes these, too.
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                escaped.push_str(&format!("\\u{:04x}", u32::from(character)));
            }
            other => escaped.push(other),
        }
    }
    sha256_hex(escaped.as_bytes())
}

pub(super) fn sha256_hex(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The credentials a pod may use.
#[derive(Debug, Default)]
pub(crate) struct Keyring {
    entries: Vec<(String, Credential)>,
}

impl Keyring {
    /// Adds the credentials of a secret of a docker type. Anything else is left out.
    pub(crate) fn add(&mut self, secret: &Secret) {
        let data = |key: &str| secret.data.as_ref().and_then(|d| d.get(key)).map(|v| v.0.as_slice());
        let auths = match secret.type_.as_deref() {
            Some("kubernetes.io/dockerconfigjson") => data(".dockerconfigjson")
                .and_then(|d| ferrite_json::from_slice::<DockerConfigJson>(d).ok())
                .map(|c| c.auths),
            Some("kubernetes.io/dockercfg") => {
                data(".dockercfg").and_then(|d| ferrite_json::from_slice(d).ok())
            }
            _ => None,
        };
        let of = |text: &Option<String>| text.clone().unwrap_or_default();
        let metadata = &secret.metadata;
        let origin = Origin::Secret(Coordinates {
            namespace: of(&metadata.namespace),
            name: of(&metadata.name),
            uid: of(&metadata.uid),
        });
        for (server, entry) in auths.unwrap_or_default() {
            let (mut username, mut password) = (entry.username, entry.password);
            let decoded = base64::engine::general_purpose::STANDARD.decode(entry.auth.trim());
            if username.is_empty()
                && let Ok(text) = decoded.map_err(|_| ()).and_then(|d| String::from_utf8(d).map_err(|_| ()))
                && let Some((user, secret)) = text.trim_end_matches('\0').split_once(':')
            {
                (username, password) = (user.to_string(), secret.to_string());
            }
            let auth = AuthConfig {
                username,
                password,
                identity_token: entry.identity_token,
                registry_token: entry.registry_token,
                // As upstream, without the address: a runtime would compare it with the registry's, and a
                // pattern is equal to none.
                ..AuthConfig::default()
            };
            self.entries.push((server, Credential::new(auth, &entry.email, origin.clone())));
        }
    }

    /// The credentials for an image, the most specific first.
    pub(crate) fn lookup(&self, image: &str) -> Vec<Credential> {
        let (host, path) = reference::registry_path(image);
        let mut found: Vec<(usize, &Credential)> = self
            .entries
            .iter()
            .filter_map(|(server, auth)| matches(server, &host, &path).map(|length| (length, auth)))
            .collect();
        found.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
        found.into_iter().map(|(_, auth)| auth.clone()).collect()
    }
}

/// Length of the match between `server` and the image's name; `None` if they do not match.
fn matches(server: &str, host: &str, path: &str) -> Option<usize> {
    let server = server.trim_start_matches("https://").trim_start_matches("http://").trim_end_matches('/');
    let server = server.strip_suffix("/v1").or(server.strip_suffix("/v2")).unwrap_or(server);
    let (server_host, server_path) = server.split_once('/').unwrap_or((server, ""));
    let is_default = |h: &str| matches!(h, "docker.io" | "index.docker.io" | "registry-1.docker.io");
    let same_host = (is_default(server_host) && is_default(host)) || glob(server_host, host);
    let under = server_path.is_empty()
        || path == server_path
        || path.strip_prefix(server_path).is_some_and(|rest| rest.starts_with('/'));
    (same_host && under).then_some(server.len())
}

/// `*` stands for any characters within one label of the host name.
fn glob(pattern: &str, host: &str) -> bool {
    let (patterns, labels): (Vec<&str>, Vec<&str>) =
        (pattern.split('.').collect(), host.split('.').collect());
    patterns.len() == labels.len()
        && patterns.iter().zip(labels).all(|(p, l)| match p.split_once('*') {
            Some((before, after)) => {
                l.len() >= before.len() + after.len() && l.starts_with(before) && l.ends_with(after)
            }
            None => *p == l,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn secrets_open_the_registries_they_name() {
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let config = json!({"auths": {
            "https://index.docker.io/v1/": {"auth": encode("hub:pw")},
            "quay.io": {"username": "q", "password": "p"},
            "quay.io/team": {"username": "team", "password": "p"},
            "*.example.com": {"username": "glob", "password": "p"},
        }});
        let secret: Secret = ferrite_json::from_value(json!({
            "metadata": {"namespace": "n", "name": "s", "uid": "u"},
            "type": "kubernetes.io/dockerconfigjson",
            "data": {".dockerconfigjson": encode(&config.to_string())},
        }))
        .unwrap();
        let mut keyring = Keyring::default();
        keyring.add(&secret);
        keyring.add(&Secret { type_: Some("Opaque".into()), ..Secret::default() });
        for (image, users) in [
            ("busybox", vec!["hub"]),
            ("quay.io/x/y:1", vec!["q"]),
            ("quay.io/team/y", vec!["team", "q"]),
            ("quay.io/teammate/y", vec!["q"]),
            ("r.example.com/x", vec!["glob"]),
            ("a.b.example.com/x", vec![]),
            ("ghcr.io/x", vec![]),
        ] {
            let got = keyring.lookup(image);
            assert!(got.iter().all(|c| c.auth.server_address.is_empty()), "{image}");
            let from = Coordinates { namespace: "n".into(), name: "s".into(), uid: "u".into() };
            assert!(got.iter().all(|c| c.origin == Origin::Secret(from.clone())), "{image}");
            let got: Vec<String> = got.into_iter().map(|c| c.auth.username).collect();
            assert_eq!(got, users, "{image}");
        }
    }

    #[test]
    fn hashes_are_of_the_content() {
        let auth = |username: &str, password: &str| AuthConfig {
            username: username.into(),
            password: password.into(),
            ..AuthConfig::default()
        };
        let of = |text: &str| sha256_hex(text.as_bytes());
        assert_eq!(hash(&auth("u", "p"), ""), of(r#"{"username":"u","password":"p"}"#));
        assert_eq!(hash(&auth("u", "p"), "e@x"), of(r#"{"username":"u","password":"p","email":"e@x"}"#));
        assert_eq!(hash(&auth("", "a<b&\"c"), ""), of(r#"{"password":"a\u003cb\u0026\"c"}"#));
        let token = AuthConfig { identity_token: "t".into(), ..AuthConfig::default() };
        assert_eq!(hash(&token, ""), of(r#"{"identitytoken":"t"}"#));
    }
}
