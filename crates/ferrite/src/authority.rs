//! One authority for all servers of a cluster: the store remembers which.
//!
//! Two servers with authorities of their own on one etcd would refuse each other's clients, nodes and tokens. The first
//! server leaves the hash of its authority in the store; a server with another authority does not start.

use crate::apiserver::BoxError;
use ferrite_json::Value;
use ferrite_pki::{ClusterPki, NodePki, PkiError};
use ferrite_store::{Compare, Key, Op, Snapshot, Store, Txn};
use std::path::Path;

/// Where the hash is, beside the objects.
const CLAIM: &str = "/registry/ferrite/authority";
/// Where a server publishes its authority.
const PUBLISHED: &str = "/registry/configmaps/kube-system/extension-apiserver-authentication";

/// Why a server may not use a store.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum AuthorityError {
    #[error(
        "the etcd holds a cluster already, whose keys this server does not have: start it with --server and a --token of `ferrite token create --server`, run where the cluster has a server"
    )]
    Missing,
    #[error(
        "the etcd holds a cluster of another authority than this server's in {0}: use an etcd or an --etcd-prefix of its own, or remove that directory and start with --server and a --token of `ferrite token create --server`"
    )]
    Other(String),
}

/// Checks the authority of a server against that of its store. Both are hashes.
fn decide(claimed: Option<&str>, own: Option<&str>, dir: &Path) -> Result<(), AuthorityError> {
    match (claimed, own) {
        (Some(claimed), Some(own)) if claimed != own => Err(AuthorityError::Other(dir.display().to_string())),
        (Some(_), None) => Err(AuthorityError::Missing),
        _ => Ok(()),
    }
}

/// The hash that the store has, or that of the authority that is published in it.
fn claimed(snapshot: &Snapshot) -> Option<String> {
    let text = |key: &str| snapshot.get(key.as_bytes()).map(|entry| entry.plain().clone());
    if let Some(hash) = text(CLAIM) {
        return String::from_utf8(hash.to_vec()).ok();
    }
    let published: Value = ferrite_json::from_slice(&text(PUBLISHED)?).ok()?;
    ferrite_pki::public_key_hash(published["data"]["client-ca-file"].as_str()?).ok()
}

/// Opens the cluster's certificates, and makes their authority that of the store.
pub async fn open(store: &Store, dir: &Path) -> Result<ClusterPki, BoxError> {
    if !store.is_remote() {
        return Ok(ClusterPki::open(dir)?);
    }
    let hash_of = |ca: String| ferrite_pki::public_key_hash(&ca);
    let own = NodePki::open(dir)?.ca()?.map(hash_of).transpose()?;
    decide(claimed(&store.latest().await?).as_deref(), own.as_deref(), dir)?;
    let pki = ClusterPki::open(dir)?;
    let own = ferrite_pki::public_key_hash(pki.ca())?;
    let key = Key::from(CLAIM);
    let claim = Txn::default().when(Compare::Absent(key.clone())).then(Op::put(key, own.clone().into()));
    store.commit(claim).await?;
    // Of two servers that start together one was first.
    decide(claimed(&store.latest().await?).as_deref(), Some(&own), dir)?;
    Ok(pki)
}

/// The authority's certificate in a directory, if there is one.
pub fn kept(dir: &Path) -> Result<Option<String>, PkiError> {
    NodePki::open(dir)?.ca()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_has_one_authority() {
        let dir = Path::new("/pki");
        let other = || Err(AuthorityError::Other("/pki".into()));
        for (what, claimed, own, want) in [
            ("the first server", None, None, Ok(())),
            ("a server that brings its keys", None, Some("a"), Ok(())),
            ("the same again", Some("a"), Some("a"), Ok(())),
            ("a server of another cluster", Some("a"), Some("b"), other()),
            ("a server without keys", Some("a"), None, Err(AuthorityError::Missing)),
        ] {
            assert_eq!(decide(claimed, own, dir), want, "{what}");
        }
    }
}
