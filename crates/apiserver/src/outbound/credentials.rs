//! The server's credentials for webhooks: users of a kubeconfig, by the names of the servers.

use super::token_file::TokenFile;
use ::http::HeaderValue;
use base64::Engine;
use ferrite_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A token for one server.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Token {
    Given(String),
    File(TokenFile),
}

/// Credentials for one server; empty ones are none.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Credential {
    token: Option<Token>,
    basic: Option<(String, String)>,
    /// Certificate and key, as PEM.
    pub identity: Option<(String, String)>,
}

impl Credential {
    pub async fn authorization(&self) -> Option<HeaderValue> {
        let text = match (&self.token, &self.basic) {
            (Some(Token::Given(token)), _) => format!("Bearer {token}"),
            (Some(Token::File(file)), _) => format!("Bearer {}", file.token().await),
            (None, Some((user, password))) => {
                let both = format!("{user}:{password}");
                format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(both))
            }
            (None, None) => return None,
        };
        let mut value = HeaderValue::from_str(&text).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

/// All credentials of a kubeconfig.
#[derive(Clone, Default)]
pub(crate) struct Credentials {
    users: BTreeMap<String, Credential>,
    /// The user of the current context.
    current: Option<String>,
}

/// A reason why credentials are not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CredentialsError {
    #[error("the configuration must be a WebhookAdmissionConfiguration of apiserver.config.k8s.io/v1")]
    Kind,
    #[error("kubeConfigFile: Invalid value: {0:?}: must be an absolute file path")]
    Relative(String),
    #[error("staticManifestsDir is not supported")]
    StaticManifests,
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is no kubeconfig: {why}")]
    Kubeconfig { path: PathBuf, why: String },
    #[error("user {user:?}: {why}")]
    User { user: String, why: &'static str },
}

/// A kubeconfig is a few pages; a larger file is something else.
const MAX_BYTES: u64 = 1 << 20;

pub(super) fn read(path: &Path) -> Result<String, CredentialsError> {
    let failed = |source| CredentialsError::Read { path: path.to_owned(), source };
    if std::fs::metadata(path).map_err(failed)?.len() > MAX_BYTES {
        return Err(failed(std::io::Error::other("it is too large")));
    }
    std::fs::read_to_string(path).map_err(failed)
}

impl Credentials {
    /// Of a `WebhookAdmissionConfiguration`; none has no credentials.
    pub fn of_configuration(configuration: Option<&Value>) -> Result<Self, CredentialsError> {
        let Some(configuration) = configuration else { return Ok(Self::default()) };
        let version = configuration["apiVersion"].as_str().unwrap_or_default();
        let known = matches!(
            (version, configuration["kind"].as_str()),
            ("apiserver.config.k8s.io/v1", Some("WebhookAdmissionConfiguration"))
                | ("apiserver.config.k8s.io/v1alpha1", Some("WebhookAdmission"))
        );
        if !known {
            return Err(CredentialsError::Kind);
        }
        if configuration["staticManifestsDir"].as_str().is_some_and(|dir| !dir.is_empty()) {
            return Err(CredentialsError::StaticManifests);
        }
        match configuration["kubeConfigFile"].as_str().unwrap_or_default() {
            "" => Ok(Self::default()),
            path if !path.starts_with('/') => Err(CredentialsError::Relative(path.to_owned())),
            path => Self::read(Path::new(path)),
        }
    }

    fn read(path: &Path) -> Result<Self, CredentialsError> {
        let bad = |why: String| CredentialsError::Kubeconfig { path: path.to_owned(), why };
        let text = read(path)?;
        let decoded = ferrite_api::codec::yaml::decode_any(text.as_bytes());
        let config = decoded.map_err(|error| bad(error.to_string()))?.value;
        // As upstream: paths are taken from the file's own directory.
        let base = path.parent().unwrap_or(Path::new("/"));
        let mut users = BTreeMap::new();
        for user in config["users"].as_array().into_iter().flatten() {
            let name = user["name"].as_str().unwrap_or_default();
            users.insert(name.to_owned(), credential(name, &user["user"], base)?);
        }
        let wanted = config["current-context"].as_str().unwrap_or_default();
        let mut contexts = config["contexts"].as_array().into_iter().flatten();
        let current = contexts
            .find(|context| context["name"] == wanted)
            .and_then(|context| context.pointer("/context/user").and_then(Value::as_str).map(str::to_owned));
        Ok(Self { users, current })
    }

    /// The credentials for a server: those of its name, of the narrowest `*.` that it is under, without the usual port,
    /// of `*`, or of the current context.
    pub(super) fn of(&self, host: &str, port: u16) -> Credential {
        let with_port = format!("{host}:{port}");
        let names = [Some(with_port.as_str()), (port == 443).then_some(host)];
        let found = names.into_iter().flatten().find_map(|name| self.named(name));
        let found = found.or_else(|| self.users.get("*"));
        found.or_else(|| self.users.get(self.current.as_ref()?)).cloned().unwrap_or_default()
    }

    fn named(&self, name: &str) -> Option<&Credential> {
        let under = name.match_indices('.').map(|(at, _)| format!("*{}", &name[at..]));
        let mut names = std::iter::once(name.to_owned()).chain(under);
        names.find_map(|name| self.users.get(&name))
    }
}

fn credential(name: &str, user: &Value, base: &Path) -> Result<Credential, CredentialsError> {
    let refuse = |why| CredentialsError::User { user: name.to_owned(), why };
    let text = |key: &str| user[key].as_str().filter(|text| !text.is_empty());
    if !user["exec"].is_null() {
        return Err(refuse("exec is not supported"));
    }
    if !user["auth-provider"].is_null() {
        return Err(refuse("auth provider not supported"));
    }
    let file = |key: &str| text(key).map(|path| read(&base.join(path))).transpose();
    let data = |key: &str, data_key: &str| match text(data_key) {
        Some(encoded) => {
            let decoded = base64::engine::general_purpose::STANDARD.decode(encoded).ok();
            let decoded = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
            decoded.map(Some).ok_or_else(|| refuse("its data is not base64"))
        }
        None => file(key),
    };
    let token = match text("token") {
        Some(token) => Some(Token::Given(token.to_owned())),
        None => {
            text("tokenFile").map(|path| TokenFile::open(base.join(path)).map(Token::File)).transpose()?
        }
    };
    let certificate = data("client-certificate", "client-certificate-data")?;
    let key = data("client-key", "client-key-data")?;
    Ok(Credential {
        token,
        basic: text("username")
            .map(|user_name| (user_name.to_owned(), text("password").unwrap_or_default().to_owned())),
        identity: match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err(refuse("a certificate needs a key, and a key a certificate")),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[tokio::test]
    async fn users_are_found_by_the_name_of_the_server() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("kubeconfig");
        std::fs::write(dir.path().join("token"), "from-file\n").expect("a file");
        std::fs::write(
            &path,
            "users:\n- {name: a.n.svc, user: {token: exact}}\n- {name: '*.n.svc', user: {tokenFile: token}}\n\
             - {name: 'b.n.svc:8443', user: {token: port}}\n- {name: '*.example', user: {username: u, password: p}}\n\
             - {name: '*', user: {token: any}}\n",
        )
        .expect("a file");
        let configuration = json!({
            "apiVersion": "apiserver.config.k8s.io/v1", "kind": "WebhookAdmissionConfiguration",
            "kubeConfigFile": path.to_str().expect("text"),
        });
        let credentials = Credentials::of_configuration(Some(&configuration)).expect("credentials");
        for (host, port, expected) in [
            ("a.n.svc", 443, "Bearer exact"),
            ("c.n.svc", 443, "Bearer from-file"),
            ("b.n.svc", 8443, "Bearer port"),
            ("c.n.svc", 8443, "Bearer any"),
            ("x.y.example", 443, "Basic dTpw"),
            ("elsewhere", 443, "Bearer any"),
        ] {
            let value = credentials.of(host, port).authorization().await.expect("a header");
            assert_eq!(value.to_str().expect("text"), expected, "{host}:{port}");
        }
        assert!(Credentials::default().of("a", 443).authorization().await.is_none());
    }

    #[test]
    fn configurations_that_cannot_be_followed_are_refused() {
        let of = |rest: Value| {
            let mut configuration = json!({
                "apiVersion": "apiserver.config.k8s.io/v1", "kind": "WebhookAdmissionConfiguration",
            });
            configuration.as_object_mut().expect("a map").extend(rest.as_object().expect("a map").clone());
            Credentials::of_configuration(Some(&configuration)).err().map(|error| error.to_string())
        };
        assert_eq!(of(json!({})), None);
        for (rest, why) in [
            (json!({"kubeConfigFile": "a"}), "must be an absolute file path"),
            (json!({"kubeConfigFile": "/nonexistent/file"}), "cannot read /nonexistent/file"),
            (json!({"staticManifestsDir": "/a"}), "staticManifestsDir is not supported"),
            (json!({"kind": "Other"}), "must be a WebhookAdmissionConfiguration"),
        ] {
            assert!(of(rest.clone()).is_some_and(|text| text.contains(why)), "{rest}");
        }
    }
}
