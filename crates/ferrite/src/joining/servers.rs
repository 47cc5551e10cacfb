//! Further servers of a cluster: they get its keys from a server that has them.
//!
//! The keys lie sealed in a Secret that only the bearer of one token may read, and only the token opens the seal:
//! neither a reader of the store nor the API server alone can use it. Both are gone when the token ends.

use super::token::{BadToken, JoinToken};
use super::{DISCOVERY_TIME, ensure};
use crate::agent::bootstrap::{Credential, Target, client, discover};
use crate::apiserver::BoxError;
use crate::authority;
use crate::paths::Paths;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferrite_client::{Api, Backoff, is_not_found, message_of};
use ferrite_json::{Value, json};
use ferrite_pki::{ClusterPki, SealKey, SharedKeys};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const NAMESPACE: &str = "kube-system";
const ENTRY: &str = "keys";

fn object_name(id: &str) -> String {
    format!("ferrite-server-keys-{id}")
}

/// A token that lets a server join: that of a node, and the key of the seal.
#[derive(Clone, PartialEq, Eq)]
pub struct ServerToken {
    token: JoinToken,
    key: SealKey,
}

impl fmt::Debug for ServerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.token.fmt(f)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadServerToken {
    #[error("that token is for agents: `ferrite token create --server` makes one for servers")]
    ForAgents,
    #[error(transparent)]
    Bad(#[from] BadToken),
}

impl FromStr for ServerToken {
    type Err = BadServerToken;

    fn from_str(text: &str) -> Result<Self, BadServerToken> {
        if text.parse::<JoinToken>().is_ok() {
            return Err(BadServerToken::ForAgents);
        }
        let (token, key) = text.trim().rsplit_once('.').ok_or(BadToken)?;
        Ok(Self { token: token.parse()?, key: SealKey::parse(key).ok_or(BadToken)? })
    }
}

/// Why a server cannot join; trying again would not help.
#[derive(Debug, thiserror::Error)]
pub enum ServerJoinError {
    #[error("give --token too, which `ferrite token create --server` prints where the cluster has a server")]
    NoToken,
    #[error("servers of one cluster share an etcd: give --etcd-servers as its other servers have it")]
    NoEtcd,
    #[error("{server} is not the cluster of the token: its authority has another key")]
    OtherAuthority { server: String },
    #[error(
        "this server has keys of another cluster in {dir}: remove that directory to join, or leave --server out"
    )]
    HasOthers { dir: String },
    #[error("{server} refuses the token: {why}")]
    Refused { server: String, why: String },
    #[error("{server} has no usable keys for this token: make another with `ferrite token create --server`")]
    NoKeys { server: String },
}

impl ServerToken {
    /// Makes a token and leaves the keys for its bearer.
    pub async fn create(
        client: &kube::Client,
        pki: &ClusterPki,
        lifetime: Option<Duration>,
        description: &str,
    ) -> Result<Self, BoxError> {
        let (token, secret) = JoinToken::create_plain(client, pki.ca(), lifetime, description).await?;
        let key = SealKey::generate()?;
        let sealed = key.seal(json!(pki.shared_keys()?).to_string().as_bytes())?;
        let name = object_name(&token.id);
        // The garbage collector removes all of it with the token.
        let owner = json!([{
            "apiVersion": "v1", "kind": "Secret",
            "name": secret.metadata.name, "uid": secret.metadata.uid,
        }]);
        let metadata = json!({"name": name, "namespace": NAMESPACE, "ownerReferences": owner});
        let keys = json!({"metadata": metadata, "data": {ENTRY: STANDARD.encode(sealed)}});
        let role = json!({
            "metadata": metadata,
            "rules": [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name], "verbs": ["get"]}],
        });
        let group = "rbac.authorization.k8s.io";
        let user =
            json!({"apiGroup": group, "kind": "User", "name": format!("system:bootstrap:{}", token.id)});
        let binding = json!({
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [user],
        });
        ensure(&Api::<Secret>::namespaced(client.clone(), NAMESPACE), keys).await?;
        ensure(&Api::<Role>::namespaced(client.clone(), NAMESPACE), role).await?;
        ensure(&Api::<RoleBinding>::namespaced(client.clone(), NAMESPACE), binding).await?;
        Ok(Self { token, key })
    }

    /// The whole token, for the person or the process that starts the server.
    pub fn reveal(&self) -> String {
        format!("{}.{}", self.token.reveal(), self.key.reveal())
    }
}

/// The cluster that a further server joins.
#[derive(Debug, Clone, clap::Args)]
pub struct JoinCluster {
    /// Another server of the cluster that this one joins, like https://192.0.2.1:6443. Only needed at the first start.
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// Token of `ferrite token create --server`.
    #[arg(long, env = "FERRITE_TOKEN", hide_env_values = true, requires = "server", value_name = "TOKEN")]
    token: Option<ServerToken>,
    /// File with the token, so that it is not seen in the list of processes.
    #[arg(long, conflicts_with = "token", requires = "server", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl JoinCluster {
    fn token(&self) -> Result<ServerToken, BoxError> {
        match (&self.token, &self.token_file) {
            (Some(token), _) => Ok(token.clone()),
            (None, Some(file)) => {
                let text = std::fs::read_to_string(file);
                let text = text.map_err(|e| format!("cannot read the token in {}: {e}", file.display()))?;
                Ok(text.parse::<ServerToken>()?)
            }
            (None, None) => Err(ServerJoinError::NoToken.into()),
        }
    }

    /// Brings the cluster's keys into the directory of this server, unless they are there.
    pub async fn obtain_keys(&self, paths: &Paths, has_etcd: bool) -> Result<(), BoxError> {
        let Some(server) = &self.server else { return Ok(()) };
        if !has_etcd {
            return Err(ServerJoinError::NoEtcd.into());
        }
        let kept = authority::kept(&paths.pki())?;
        // A server that has joined starts without a token.
        if kept.is_some()
            && self.token.is_none()
            && self.token_file.as_ref().is_none_or(|file| !file.exists())
        {
            return Ok(());
        }
        let token = self.token()?;
        let is_ours =
            |ca: &str| ferrite_pki::public_key_hash(ca).is_ok_and(|hash| hash == token.token.ca_hash);
        match kept {
            Some(ca) if is_ours(&ca) => return Ok(()),
            Some(_) => {
                return Err(ServerJoinError::HasOthers { dir: paths.pki().display().to_string() }.into());
            }
            None => {}
        }
        let target = Target::parse(server)?;
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5), 0.2);
        loop {
            match tokio::time::timeout(DISCOVERY_TIME, token.fetch(server, &target)).await {
                Ok(Ok(Fetched::Keys(keys))) => return Ok(ClusterPki::install(&paths.pki(), &keys)?),
                Ok(Ok(Fetched::Never(error))) => return Err(error.into()),
                Ok(Err(error)) => tracing::warn!(%error, server, "no answer; will try again"),
                Err(_) => tracing::warn!(server, "no answer in time; will try again"),
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }
}

/// The result of one attempt. An error may be temporary.
enum Fetched {
    Keys(SharedKeys),
    Never(ServerJoinError),
}

impl ServerToken {
    async fn fetch(&self, server: &str, target: &Target) -> Result<Fetched, BoxError> {
        let ca = discover(target).await?;
        let server = server.to_owned();
        let Some(ca) = ferrite_pki::pinned_authority(&ca, &self.token.ca_hash) else {
            return Ok(Fetched::Never(ServerJoinError::OtherAuthority { server }));
        };
        let client = client(&server, &ca, &Credential::Token(self.token.bearer())).await?;
        let secrets = Api::<Secret>::namespaced(client, NAMESPACE);
        match secrets.get(&object_name(&self.token.id)).await {
            Ok(secret) => Ok(match self.unseal(&secret) {
                Some(keys) => Fetched::Keys(keys),
                None => Fetched::Never(ServerJoinError::NoKeys { server }),
            }),
            Err(error) if is_not_found(&error) => Ok(Fetched::Never(ServerJoinError::NoKeys { server })),
            Err(kube::Error::Api(status)) if status.code == 401 || status.code == 403 => {
                Ok(Fetched::Never(ServerJoinError::Refused { server, why: status.message.clone() }))
            }
            Err(error) => Err(message_of(&error).into()),
        }
    }

    /// The keys, if they are sealed for this token and of its authority.
    fn unseal(&self, secret: &Secret) -> Option<SharedKeys> {
        let sealed = secret.data.as_ref()?.get(ENTRY)?;
        let keys: Value = ferrite_json::from_slice(&self.key.open(&sealed.0).ok()?).ok()?;
        let keys: SharedKeys = ferrite_json::from_value(keys).ok()?;
        let hash = ferrite_pki::public_key_hash(keys.get("ca.crt")?).ok()?;
        (hash == self.token.ca_hash).then_some(keys)
    }
}

/// The lifetime of tokens for servers: they open more than those of nodes, and are used at once.
pub const LIFETIME: Duration = Duration::from_secs(2 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    fn token(pki: &ClusterPki) -> ServerToken {
        ServerToken { token: JoinToken::new(pki.ca()).unwrap(), key: SealKey::generate().unwrap() }
    }

    #[test]
    fn tokens_are_read_as_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let token = token(&ClusterPki::open(dir.path()).unwrap());
        assert_eq!(token.reveal().parse(), Ok(token.clone()));
        assert!(!format!("{token:?}").contains(&token.key.reveal()));
        assert_eq!(token.token.reveal().parse::<ServerToken>(), Err(BadServerToken::ForAgents));
        for bad in ["", "a.b", &token.reveal()[1..], &format!("{}.x", token.reveal())] {
            assert_eq!(bad.parse::<ServerToken>(), Err(BadServerToken::Bad(BadToken)), "{bad}");
        }
        assert!(token.reveal().parse::<JoinToken>().is_err(), "no agent takes it");
    }

    #[test]
    fn keys_are_for_their_token_and_of_its_authority() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (one, two) = (ClusterPki::open(one.path()).unwrap(), ClusterPki::open(two.path()).unwrap());
        let (ours, other) = (token(&one), token(&one));
        let secret = |token: &ServerToken, pki: &ClusterPki| -> Secret {
            let sealed = token.key.seal(json!(pki.shared_keys().unwrap()).to_string().as_bytes()).unwrap();
            ferrite_json::from_value(json!({"metadata": {}, "data": {ENTRY: STANDARD.encode(sealed)}}))
                .unwrap()
        };
        assert_eq!(ours.unseal(&secret(&ours, &one)), Some(one.shared_keys().unwrap()));
        assert_eq!(ours.unseal(&secret(&other, &one)), None, "sealed for another token");
        assert_eq!(ours.unseal(&secret(&ours, &two)), None, "another authority");
        assert_eq!(ours.unseal(&Secret::default()), None);
    }
}
