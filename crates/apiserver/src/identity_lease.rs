//! The Lease that says that this server lives, as upstream's kube-apiserver keeps one, and the removal of those of
//! servers that ended without a word.

use crate::bootstrap::{self, change, ensure};
use crate::registry::metadata;
use crate::server::ApiServer;
use ferrite_api::Status;
use ferrite_json::{Value, json};
use jiff::{SignedDuration, Timestamp};
use std::net::SocketAddr;
use std::time::Duration;

const GROUP: &str = "coordination.k8s.io";
const NAMESPACE: &str = "kube-system";
/// The label that marks the Leases of servers.
const LABEL: &str = "apiserver.kubernetes.io/identity";
const COMPONENT: &str = "kube-apiserver";
/// As upstream.
const DURATION_SECONDS: i64 = 3600;
const RENEWAL: Duration = Duration::from_secs(10);
const COLLECTION: Duration = Duration::from_secs(3600);
/// Time that a server that ends tries to remove its Lease.
const REMOVAL: Duration = Duration::from_secs(3);

/// The name of a server's Lease: upstream's form, with the address in the hash, so that servers of one host differ.
pub(crate) fn name(host: &str, address: SocketAddr) -> String {
    let mut hashed = Vec::new();
    for part in [host, COMPONENT, &address.to_string()] {
        hashed.extend(u16::try_from(part.len()).unwrap_or(u16::MAX).to_be_bytes());
        hashed.extend(part.as_bytes());
    }
    let hash = ring::digest::digest(&ring::digest::SHA256, &hashed);
    format!("apiserver-{}", base32(&hash.as_ref()[..16]))
}

/// RFC 4648 in lower case, without padding.
fn base32(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let bits =
        bytes.iter().flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1)).collect::<Vec<u8>>();
    let digit = |bits: &[u8]| {
        let value = (0..5).fold(0, |value, at| value << 1 | usize::from(bits.get(at).copied().unwrap_or(0)));
        char::from(ALPHABET[value])
    };
    bits.chunks(5).map(digit).collect()
}

/// Returns true if a server's Lease has expired. A Lease without times counts as expired.
fn is_expired(lease: &Value, now: Timestamp) -> bool {
    let renewed = lease["spec"]["renewTime"].as_str().and_then(|time| time.parse::<Timestamp>().ok());
    let seconds = lease["spec"]["leaseDurationSeconds"].as_i64();
    match renewed.zip(seconds) {
        Some((renewed, seconds)) => {
            renewed.checked_add(SignedDuration::from_secs(seconds)).is_ok_and(|end| end < now)
        }
        None => true,
    }
}

/// Renews the server's Lease, and removes those of others that are over, until the caller ends it.
pub(crate) async fn run(server: &ApiServer) {
    let host = server.config.host_name.clone();
    let name = name(&host, server.config.advertise);
    let holder = format!("{name}_{}", uuid::Uuid::new_v4());
    let mut renewal = tokio::time::interval(RENEWAL);
    let mut collection = tokio::time::interval(COLLECTION);
    renewal.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let result = tokio::select! {
            _ = renewal.tick() => renew(server, &host, &name, &holder).await,
            _ = collection.tick() => collect(server).await,
        };
        if let Err(error) = result {
            tracing::warn!(error = error.message, "cannot keep the Leases of API servers");
        }
    }
}

async fn renew(server: &ApiServer, host: &str, name: &str, holder: &str) -> Result<(), Status> {
    let now = metadata::micro_time(Timestamp::now());
    let spec = json!({"holderIdentity": holder, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": now});
    let labels = json!({LABEL: COMPONENT, "kubernetes.io/hostname": host});
    let lease = json!({"metadata": {"name": name, "labels": labels}, "spec": spec});
    ensure(server, GROUP, "leases", NAMESPACE, lease.clone()).await?;
    let resource = server.registry.table.find(GROUP, "v1", "leases").ok_or_else(Status::no_such_path)?;
    let bring = |old: &Value| {
        let mut new = old.clone();
        new["spec"] = spec.clone();
        for (key, value) in labels.as_object().into_iter().flatten() {
            new["metadata"]["labels"][key] = value.clone();
        }
        Ok(new)
    };
    change(server, resource, (NAMESPACE, name), None, &bring).await
}

async fn collect(server: &ApiServer) -> Result<(), Status> {
    let now = Timestamp::now();
    let leases = server.registry.view().objects(GROUP, "leases", NAMESPACE);
    let of_server = |lease: &Value| lease["metadata"]["labels"][LABEL] == COMPONENT;
    for lease in leases.filter(|lease| of_server(lease) && is_expired(lease, now)) {
        bootstrap::delete(server, GROUP, "leases", NAMESPACE, ferrite_api::meta::name(&lease)).await?;
    }
    Ok(())
}

/// Removes the server's Lease when it ends.
pub(crate) async fn remove(server: &ApiServer) {
    let name = name(&server.config.host_name, server.config.advertise);
    let removal = bootstrap::delete(server, GROUP, "leases", NAMESPACE, &name);
    if let Ok(Err(error)) = tokio::time::timeout(REMOVAL, removal).await {
        tracing::warn!(error = error.message, "the Lease of this server stays until it ends");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_upstreams_form() {
        assert_eq!(base32(b"foobar"), "mzxw6ytboi");
        let at = |text: &str| text.parse().expect("an address");
        let one = name("host", at("10.0.0.1:6443"));
        assert_eq!(one.len(), "apiserver-".len() + 26);
        assert_eq!(one, name("host", at("10.0.0.1:6443")));
        assert_ne!(one, name("host", at("10.0.0.2:6443")));
        assert_ne!(one, name("other", at("10.0.0.1:6443")));
    }

    #[test]
    fn leases_end_after_their_time() {
        let now: Timestamp = "2026-01-01T01:00:00Z".parse().expect("a time");
        for (spec, want) in [
            (json!({"renewTime": "2026-01-01T00:00:01.000000Z", "leaseDurationSeconds": 3600}), false),
            (json!({"renewTime": "2025-12-31T23:59:59.000000Z", "leaseDurationSeconds": 3600}), true),
            (json!({"renewTime": "2026-01-01T00:59:59.000000Z"}), true),
            (json!({"leaseDurationSeconds": 3600}), true),
        ] {
            assert_eq!(is_expired(&json!({"spec": spec}), now), want, "{spec}");
        }
    }
}
