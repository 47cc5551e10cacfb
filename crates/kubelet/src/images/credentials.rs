//! Registry credentials from image pull secrets.

use super::reference;
use base64::Engine;
use ferrite_cri::v1::AuthConfig;
use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;
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
    #[serde(rename = "identitytoken")]
    identity_token: String,
    #[serde(rename = "registrytoken")]
    registry_token: String,
}

/// The credentials a pod may use.
#[derive(Debug, Default)]
pub(crate) struct Keyring {
    entries: Vec<(String, AuthConfig)>,
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
            self.entries.push((server, auth));
        }
    }

    /// The credentials for an image, the most specific first.
    pub(crate) fn lookup(&self, image: &str) -> Vec<AuthConfig> {
        let (host, path) = reference::registry_path(image);
        let mut found: Vec<(usize, &AuthConfig)> = self
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
            assert!(got.iter().all(|auth| auth.server_address.is_empty()), "{image}");
            let got: Vec<String> = got.into_iter().map(|auth| auth.username).collect();
            assert_eq!(got, users, "{image}");
        }
    }
}
