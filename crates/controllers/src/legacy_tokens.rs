//! Removes tokens of service accounts that were once made by themselves, are kept in secrets, and that nobody uses.
//!
//! A token that was not used for the clean-up period is marked invalid, so that its user notices and can take the mark
//! away; after another such period its secret is deleted.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, Informer, ListSelector, ObjectKey, is_conflict, is_not_found};
use ferrite_json::json;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, ServiceAccount};
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use tracing::info;

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "legacy-serviceaccount-token-cleaner-controller";
const KIND: &str = "kubernetes.io/service-account-token";
const ACCOUNT: &str = "kubernetes.io/service-account.name";
const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";
/// The ConfigMap in which the API server publishes since when it notes uses.
const TRACKING: &str = "kube-apiserver-legacy-service-account-token-tracking";
/// Interval between checks of each secret: only days count.
const INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);

struct Cleaner {
    client: Client,
    secrets: Informer<Secret>,
    accounts: Informer<ServiceAccount>,
    pods: Informer<Pod>,
    period: SignedDuration,
}

pub(crate) fn start(context: &Context) {
    let cleaner = Arc::new(Cleaner {
        client: context.client.clone(),
        secrets: context.informers.get_selected(ListSelector::fields(format!("type={KIND}"))),
        accounts: context.informers.get(),
        pods: context.informers.get(),
        period: context.config.legacy_token_period,
    });
    context
        .controller(NAME)
        .reconciles(&cleaner.secrets)
        .reads(&cleaner.accounts)
        .reads(&cleaner.pods)
        .run_with(cleaner.clone(), |cleaner, key| async move {
            cleaner.sync(&key).await?;
            Ok::<_, SyncError>(cleaner.secrets.get(&key).map(|_| INTERVAL))
        });
}

impl Cleaner {
    async fn sync(&self, key: &ObjectKey) -> Result<(), SyncError> {
        let Some(secret) = self.secrets.get(key) else { return Ok(()) };
        let now = Timestamp::now();
        // Most tokens are young or in use: nothing is read for them.
        if !is_unused(&secret, now, self.period) || !self.is_generated(&secret) || self.is_mounted(key) {
            return Ok(());
        }
        let tracked = self.tracked_since().await?;
        if tracked.is_none_or(|since| now.duration_since(since) < self.period) {
            return Ok(());
        }
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &key.namespace);
        let result = match decide(&secret, now, self.period) {
            Step::Nothing => return Ok(()),
            Step::Invalidate => {
                info!(secret = %key, "nobody uses this token: it is marked invalid");
                let patch = json!({"metadata": {
                    "uid": secret.metadata.uid, "labels": {(INVALID_SINCE): day(now)}}});
                api.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
            }
            Step::Delete => {
                info!(secret = %key, "deleting a token that was marked invalid long ago");
                let resource_version = secret.metadata.resource_version.clone();
                let preconditions = Preconditions { resource_version, uid: None };
                api.delete(&key.name, &DeleteParams::default().preconditions(preconditions)).await
            }
        };
        match result {
            Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
            result => result.during(|| format!("clean up the token {key}")),
        }
    }

    /// True if the account lists the secret: only tokens that were made by themselves are listed.
    fn is_generated(&self, secret: &Secret) -> bool {
        let annotation = |key: &str| secret.metadata.annotations.as_ref().and_then(|all| all.get(key));
        let Some(name) = annotation(ACCOUNT) else { return false };
        let key = ObjectKey::new(secret.metadata.namespace.clone().unwrap_or_default(), name.clone());
        let Some(account) = self.accounts.get(&key) else { return false };
        let is_same = annotation(ACCOUNT_UID)
            .is_none_or(|uid| uid.is_empty() || account.metadata.uid.as_ref() == Some(uid));
        let mut listed = account.secrets.iter().flatten();
        is_same && listed.any(|reference| reference.name == secret.metadata.name)
    }

    fn is_mounted(&self, key: &ObjectKey) -> bool {
        let pods = self.pods.list_in(&key.namespace);
        pods.iter().any(|pod| secret_names(pod).contains(key.name.as_str()))
    }

    /// The end of the first day on which the API server noted uses.
    async fn tracked_since(&self) -> Result<Option<Timestamp>, SyncError> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), "kube-system");
        let map = maps.get_opt(TRACKING).await.during(|| format!("read {TRACKING}"))?;
        Ok(map.and_then(|map| first_day_end(map.data?.get("since")?)))
    }
}

fn first_day_end(since: &str) -> Option<Timestamp> {
    let date: Date = since.parse().ok()?;
    let next = date.tomorrow().ok()?;
    next.to_zoned(TimeZone::UTC).ok().map(|time| time.timestamp())
}

fn day(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d").to_string()
}

fn label<'a>(secret: &'a Secret, key: &str) -> Option<&'a str> {
    secret.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// True if neither the secret nor the last use of its token is younger than `period`.
fn is_unused(secret: &Secret, now: Timestamp, period: SignedDuration) -> bool {
    let meta = &secret.metadata;
    let oldest = now.saturating_sub(period).unwrap_or(Timestamp::MIN);
    let is_old = meta.creation_timestamp.as_ref().is_some_and(|created| created.0 < oldest);
    let is_unused = match label(secret, LAST_USED).map(|last| (last, last.parse::<Date>())) {
        None => true,
        // A day that cannot be read decides nothing.
        Some((_, Err(_))) => false,
        Some((last, Ok(_))) => last < day(oldest).as_str(),
    };
    meta.deletion_timestamp.is_none() && is_old && is_unused
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Invalidate,
    Delete,
}

fn decide(secret: &Secret, now: Timestamp, period: SignedDuration) -> Step {
    if !is_unused(secret, now, period) {
        return Step::Nothing;
    }
    let oldest = day(now.saturating_sub(period).unwrap_or(Timestamp::MIN));
    match label(secret, INVALID_SINCE).filter(|since| since.parse::<Date>().is_ok()) {
        None => Step::Invalidate,
        Some(since) if since < oldest.as_str() => Step::Delete,
        Some(_) => Step::Nothing,
    }
}

/// The names of all secrets that a pod refers to.
fn secret_names(pod: &Pod) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    let Some(spec) = &pod.spec else { return names };
    names.extend(spec.image_pull_secrets.iter().flatten().map(|reference| reference.name.as_str()));
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let of_containers = containers.map(|container| (&container.env, &container.env_from));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    let of_ephemeral = ephemeral.map(|container| (&container.env, &container.env_from));
    for (env, env_from) in of_containers.chain(of_ephemeral) {
        let variables = env.iter().flatten().filter_map(|variable| variable.value_from.as_ref());
        names.extend(variables.filter_map(|source| Some(source.secret_key_ref.as_ref()?.name.as_str())));
        let sources = env_from.iter().flatten();
        names.extend(sources.filter_map(|source| Some(source.secret_ref.as_ref()?.name.as_str())));
    }
    for volume in spec.volumes.iter().flatten() {
        names.extend(volume.secret.as_ref().and_then(|source| source.secret_name.as_deref()));
        names.extend(volume.azure_file.as_ref().map(|source| source.secret_name.as_str()));
        let references = [
            volume.cephfs.as_ref().and_then(|source| source.secret_ref.as_ref()),
            volume.cinder.as_ref().and_then(|source| source.secret_ref.as_ref()),
            volume.csi.as_ref().and_then(|source| source.node_publish_secret_ref.as_ref()),
            volume.flex_volume.as_ref().and_then(|source| source.secret_ref.as_ref()),
            volume.iscsi.as_ref().and_then(|source| source.secret_ref.as_ref()),
            volume.rbd.as_ref().and_then(|source| source.secret_ref.as_ref()),
            volume.scale_io.as_ref().map(|source| &source.secret_ref),
            volume.storageos.as_ref().and_then(|source| source.secret_ref.as_ref()),
        ];
        names.extend(references.into_iter().flatten().map(|reference| reference.name.as_str()));
        let projected = volume.projected.as_ref().and_then(|source| source.sources.as_ref());
        let projections = projected.into_iter().flatten().filter_map(|source| source.secret.as_ref());
        names.extend(projections.map(|secret| secret.name.as_str()));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR: SignedDuration = SignedDuration::from_hours(365 * 24);

    #[test]
    fn unused_tokens_are_marked_then_deleted() {
        let now: Timestamp = "2026-06-15T12:00:00Z".parse().unwrap();
        for (what, created, last_used, invalid_since, step) in [
            ("young", "2026-01-01T00:00:00Z", None, None, Step::Nothing),
            ("old, never used", "2020-01-01T00:00:00Z", None, None, Step::Invalidate),
            ("old, used lately", "2020-01-01T00:00:00Z", Some("2026-06-01"), None, Step::Nothing),
            ("used a year ago", "2020-01-01T00:00:00Z", Some("2025-06-15"), None, Step::Nothing),
            ("used before that", "2020-01-01T00:00:00Z", Some("2025-06-14"), None, Step::Invalidate),
            ("a day nobody can read", "2020-01-01T00:00:00Z", Some("once"), None, Step::Nothing),
            ("marked lately", "2020-01-01T00:00:00Z", None, Some("2026-06-01"), Step::Nothing),
            ("marked long ago", "2020-01-01T00:00:00Z", None, Some("2025-06-01"), Step::Delete),
            ("a mark nobody can read", "2020-01-01T00:00:00Z", None, Some("x"), Step::Invalidate),
            (
                "marked, used since",
                "2020-01-01T00:00:00Z",
                Some("2026-06-01"),
                Some("2025-01-01"),
                Step::Nothing,
            ),
        ] {
            let metadata = json!({"creationTimestamp": created});
            let mut secret: Secret = ferrite_json::from_value(json!({"metadata": metadata})).unwrap();
            let labels = [(LAST_USED, last_used), (INVALID_SINCE, invalid_since)];
            let given = labels.into_iter().filter_map(|(key, day)| Some((key.to_owned(), day?.to_owned())));
            secret.metadata.labels = Some(given.collect());
            assert_eq!(decide(&secret, now, YEAR), step, "{what}");
        }
    }

    #[test]
    fn the_first_day_does_not_count() {
        assert_eq!(first_day_end("2026-02-28"), "2026-03-01T00:00:00Z".parse().ok());
        assert_eq!(first_day_end("yesterday"), None);
    }

    #[test]
    fn every_reference_to_a_secret_counts() {
        let pod: Pod = ferrite_json::from_value(json!({"spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "containers": [{"name": "c",
                "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "variable", "key": "k"}}}],
                "envFrom": [{"secretRef": {"name": "variables"}}]}],
            "volumes": [
                {"name": "a", "secret": {"secretName": "volume"}},
                {"name": "b", "projected": {"sources": [{"secret": {"name": "projected"}}]}},
                {"name": "c", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "csi"}}},
            ],
        }}))
        .unwrap();
        let expected = ["csi", "projected", "pull", "variable", "variables", "volume"];
        assert_eq!(secret_names(&pod).into_iter().collect::<Vec<_>>(), expected);
    }
}
