//! Tokens that let nodes join, and `ferrite token`.

use super::client_of;
use super::servers::{self, ServerToken};
use crate::apiserver::BoxError;
use crate::cli::DataDir;
use base64::Engine;
use clap::{Args, Subcommand};
use ferrite_client::{Api, Object, is_not_found};
use ferrite_component::GoDuration;
use ferrite_json::json;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, ListParams, PostParams};
use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

/// The group of bearers of our tokens: they may ask for a node's certificate and do nothing else.
pub const GROUP: &str = "system:bootstrappers:ferrite:default-node-token";
const NAMESPACE: &str = "kube-system";
const TYPE: &str = "bootstrap.kubernetes.io/token";
const PREFIX: &str = "bootstrap-token-";

/// Lifetime of a node's token.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

const HASH: usize = 64;
const ID: usize = 6;
const SECRET: usize = 16;

/// A token with the hash of the cluster's authority: the node knows the server by it, the server the node.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// SHA-256 of the authority's public key.
    pub ca_hash: String,
    pub id: String,
    secret: String,
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret must not reach a log.
        f.debug_struct("JoinToken").field("id", &self.id).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "that is not a token of `ferrite token create`: it has {HASH} digits of a hash, an id of {ID} and a secret of {SECRET} characters, with dots between"
)]
pub struct BadToken;

impl FromStr for JoinToken {
    type Err = BadToken;

    fn from_str(text: &str) -> Result<Self, BadToken> {
        let mut parts = text.trim().split('.');
        let mut part = |length: usize, good: fn(u8) -> bool| {
            let part = parts.next().filter(|part| part.len() == length && part.bytes().all(good));
            part.map(str::to_owned).ok_or(BadToken)
        };
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let token = Self {
            ca_hash: part(HASH, |b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))?,
            id: part(ID, plain)?,
            secret: part(SECRET, plain)?,
        };
        if parts.next().is_some() { Err(BadToken) } else { Ok(token) }
    }
}

impl JoinToken {
    pub(crate) fn new(ca: &str) -> Result<Self, BoxError> {
        Ok(Self { ca_hash: ferrite_pki::public_key_hash(ca)?, id: random(ID), secret: random(SECRET) })
    }

    /// The whole token, for the person or the process that starts the node.
    pub fn reveal(&self) -> String {
        format!("{}.{}", self.ca_hash, self.bearer())
    }

    /// The part that the API server knows.
    pub fn bearer(&self) -> String {
        format!("{}.{}", self.id, self.secret)
    }

    /// Makes a token that the API server accepts until its time is over.
    pub async fn create(
        client: &kube::Client,
        ca: &str,
        lifetime: Option<Duration>,
        description: &str,
    ) -> Result<Self, BoxError> {
        Ok(Self::create_in(client, ca, lifetime, description, Some(GROUP)).await?.0)
    }

    /// Makes a token whose bearer may do nothing yet, and returns its Secret, too.
    pub(super) async fn create_plain(
        client: &kube::Client,
        ca: &str,
        lifetime: Option<Duration>,
        description: &str,
    ) -> Result<(Self, Secret), BoxError> {
        Self::create_in(client, ca, lifetime, description, None).await
    }

    async fn create_in(
        client: &kube::Client,
        ca: &str,
        lifetime: Option<Duration>,
        description: &str,
        group: Option<&str>,
    ) -> Result<(Self, Secret), BoxError> {
        let token = Self::new(ca)?;
        let mut data = json!({
            "token-id": token.id, "token-secret": token.secret, "description": description,
            "usage-bootstrap-authentication": "true",
        });
        if let Some(group) = group {
            data["auth-extra-groups"] = group.into();
        }
        if let Some(lifetime) = lifetime {
            let end = Timestamp::now() + jiff::SignedDuration::try_from(lifetime)?;
            data["expiration"] = json!(end.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
        }
        let secret = json!({
            "metadata": {"name": format!("{PREFIX}{}", token.id), "namespace": NAMESPACE},
            "type": TYPE, "stringData": data,
        });
        let secret = Secret::decode(secret.to_string().as_bytes())?;
        let secrets = Api::<Secret>::namespaced(client.clone(), NAMESPACE);
        Ok((token, secrets.create(&PostParams::default(), &secret).await?))
    }
}

/// A random text of this length that nobody can guess. 122 random bits are more than 16 characters hold.
fn random(length: usize) -> String {
    const ALPHABET: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut number = uuid::Uuid::new_v4().as_u128();
    // The bits that say which kind of identifier it is are the same in all.
    number = (number & ((1 << 62) - 1)) | ((number >> 80) << 62);
    let mut text = String::with_capacity(length);
    for _ in 0..length {
        text.push(char::from(ALPHABET[usize::try_from(number % 36).unwrap_or(0)]));
        number /= 36;
    }
    text
}

/// Tokens with which nodes join.
#[derive(Debug, Args)]
pub struct TokenCommand {
    #[command(flatten)]
    data: DataDir,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a token and print it.
    Create {
        /// Lifetime; 0s is for ever. 24h0m0s without it, 2h0m0s for servers.
        #[arg(long, value_name = "DURATION")]
        ttl: Option<GoDuration>,
        /// Make a token for a further server of the cluster instead of a node. Its bearer gets all keys of the cluster.
        #[arg(long)]
        server: bool,
        /// Purpose of the token.
        #[arg(long, default_value = "", value_name = "TEXT")]
        description: String,
    },
    /// List tokens, without their secrets.
    #[command(visible_alias = "ls")]
    List,
    /// Make a token void. Nodes that have joined with it stay.
    #[command(visible_alias = "rm")]
    Revoke {
        /// The token, or its id.
        #[arg(value_name = "TOKEN")]
        token: String,
    },
}

impl TokenCommand {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let paths = self.data.paths();
        let client = client_of(&paths).await?;
        let secrets = Api::<Secret>::namespaced(client.clone(), NAMESPACE);
        match self.command {
            Command::Create { ttl, server, description } => {
                super::check(&client).await?;
                let ca = std::fs::read_to_string(paths.pki().join("ca.crt"))
                    .map_err(|e| format!("cannot read the cluster's authority: {e}"))?;
                let usual = if server { servers::LIFETIME } else { LIFETIME };
                let lifetime = Some(ttl.map_or(usual, |ttl| ttl.0)).filter(|ttl| !ttl.is_zero());
                if server {
                    let pki = ferrite_pki::ClusterPki::open(&paths.pki())?;
                    let token = ServerToken::create(&client, &pki, lifetime, &description).await?;
                    println!("{}", token.reveal());
                    return Ok(ExitCode::SUCCESS);
                }
                println!("{}", JoinToken::create(&client, &ca, lifetime, &description).await?.reveal());
            }
            Command::List => {
                let selector = ListParams::default().fields(&format!("type={TYPE}"));
                println!("{:<8} {:<22} DESCRIPTION", "ID", "EXPIRES");
                for secret in secrets.list(&selector).await?.items {
                    let data = |key: &str| {
                        let value = secret.data.as_ref().and_then(|data| data.get(key));
                        value.map(|value| printable(&value.0)).unwrap_or_default()
                    };
                    let expires = Some(data("expiration")).filter(|text| !text.is_empty());
                    let expires = expires.unwrap_or_else(|| "never".into());
                    println!("{:<8} {expires:<22} {}", data("token-id"), data("description"));
                }
            }
            Command::Revoke { token } => {
                // A whole token is taken, too: its secret goes nowhere.
                let id = match token.split('.').collect::<Vec<_>>()[..] {
                    [hash, id, ..] if hash.len() == HASH => id.to_owned(),
                    _ => token,
                };
                match secrets.delete(&format!("{PREFIX}{id}"), &DeleteParams::default()).await {
                    Ok(_) => println!("{id}"),
                    Err(error) if is_not_found(&error) => {
                        return Err(format!("there is no token {id}: `ferrite token list` shows them").into());
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Text of the API for a terminal: control characters would be commands to it.
fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Base64 as Secrets have it.
pub(super) fn encode(text: &str) -> String {
    base64::engine::general_purpose::STANDARD.encode(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_as_they_are_written() {
        let ca = ferrite_pki::Authority::create("kubernetes").unwrap();
        let token = JoinToken::new(ca.certificate()).unwrap();
        assert_eq!(token.reveal().parse(), Ok(token.clone()));
        assert_eq!(format!(" {}\n", token.reveal()).parse(), Ok(token.clone()));
        assert!(!format!("{token:?}").contains(&token.secret));
        assert_ne!(JoinToken::new(ca.certificate()).unwrap().secret, token.secret);
        let hash = "0".repeat(64);
        for bad in [
            String::new(),
            "abcdef.0123456789abcdef".into(),
            format!("{hash}.abcdef.0123456789abcde"),
            format!("{hash}.abcdef.0123456789abcdeF"),
            format!("{hash}.abcdef.0123456789abcdef.x"),
            format!("{}.abcdef.0123456789abcdef", "g".repeat(64)),
        ] {
            assert_eq!(bad.parse::<JoinToken>(), Err(BadToken), "{bad}");
        }
    }
}
