//! Trust anchors of ClusterTrustBundles, for the pods that project them.

use super::payload;
use crate::objects::Wake;
use ferrite_api::pem;
use ferrite_api::selector::{LabelSelector, SelectorError};
use ferrite_client::{Api, Change, Informer, ListSelector, Object, ObjectKey, Scope};
use k8s_openapi::ClusterResourceScope;
use k8s_openapi::api::certificates::{v1alpha1, v1beta1};
use k8s_openapi::api::core::v1::ClusterTrustBundleProjection;
use kube::Client;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time that a pod waits for the first list of bundles before it tries again later.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// Upstream's versions of the API, the one to use first.
const VERSIONS: [&str; 2] = ["certificates.k8s.io/v1beta1", "certificates.k8s.io/v1alpha1"];

#[derive(Debug, thiserror::Error)]
pub(crate) enum TrustBundleError {
    #[error(
        "ClusterTrustBundle projection is not supported: the kubelet's feature gate ClusterTrustBundleProjection is off"
    )]
    Off,
    #[error(
        "the API server serves no ClusterTrustBundles: it needs the feature gate ClusterTrustBundle and --runtime-config=certificates.k8s.io/v1beta1/clustertrustbundles=true"
    )]
    NotServed,
    #[error("failed to determine which informer manager to choose: {0}")]
    Discovery(String),
    #[error("ClusterTrustBundle informer has not yet synced")]
    NotSynced,
    #[error("while getting ClusterTrustBundle: clustertrustbundle.certificates.k8s.io \"{0}\" not found")]
    NotFound(String),
    #[error("combination of signerName and labelSelector matched zero ClusterTrustBundles")]
    NoMatch,
    #[error("while parsing label selector: {0}")]
    Selector(#[from] SelectorError),
    #[error("ClusterTrustBundle projection requires either name or signerName to be set")]
    Unnamed,
    #[error(transparent)]
    Path(#[from] payload::PayloadError),
}

/// A bundle, of either version of the API.
#[derive(Debug, Clone, Default)]
struct Bundle {
    signer: String,
    labels: BTreeMap<String, String>,
    anchors: String,
}

#[derive(Clone)]
enum Bundles {
    Alpha(Informer<v1alpha1::ClusterTrustBundle>),
    Beta(Informer<v1beta1::ClusterTrustBundle>),
}

macro_rules! bundle {
    ($object:expr) => {{
        let object = $object;
        Bundle {
            signer: object.spec.signer_name.clone().unwrap_or_default(),
            labels: object.metadata.labels.clone().unwrap_or_default(),
            anchors: object.spec.trust_bundle.clone(),
        }
    }};
}

impl Bundles {
    async fn synced(&self) {
        match self {
            Self::Alpha(informer) => informer.synced().await,
            Self::Beta(informer) => informer.synced().await,
        }
    }

    fn get(&self, name: &str) -> Option<Bundle> {
        let key = ObjectKey::cluster(name.to_owned());
        match self {
            Self::Alpha(informer) => informer.get(&key).map(|object| bundle!(object)),
            Self::Beta(informer) => informer.get(&key).map(|object| bundle!(object)),
        }
    }

    fn list(&self) -> Vec<Bundle> {
        match self {
            Self::Alpha(informer) => informer.list().iter().map(|object| bundle!(object)).collect(),
            Self::Beta(informer) => informer.list().iter().map(|object| bundle!(object)).collect(),
        }
    }
}

/// The node's copy of all bundles. It is made when the first pod asks.
pub(crate) struct TrustBundles {
    enabled: bool,
    client: Client,
    scope: Scope,
    wake: Wake,
    bundles: tokio::sync::Mutex<Option<Bundles>>,
    /// UIDs of pods that project bundles.
    users: Arc<Mutex<BTreeSet<String>>>,
    /// Gives anchors an order that differs between processes, so that nobody relies on one.
    order: RandomState,
}

impl TrustBundles {
    pub(crate) fn new(enabled: bool, client: Client, scope: &Scope, wake: Wake) -> Self {
        Self {
            enabled,
            client,
            scope: scope.child(),
            wake,
            bundles: tokio::sync::Mutex::default(),
            users: Arc::default(),
            order: RandomState::new(),
        }
    }

    /// The file of a projection. From now on the pod is woken when a bundle changes.
    pub(crate) async fn get(
        &self,
        pod_uid: &str,
        wanted: &ClusterTrustBundleProjection,
    ) -> Result<Vec<u8>, TrustBundleError> {
        if !self.enabled {
            return Err(TrustBundleError::Off);
        }
        self.users.lock().unwrap_or_else(PoisonError::into_inner).insert(pod_uid.to_owned());
        let bundles = self.bundles().await?;
        tokio::time::timeout(FIRST_ANSWER, bundles.synced())
            .await
            .map_err(|_| TrustBundleError::NotSynced)?;
        let chosen = match (&wanted.name, &wanted.signer_name) {
            (Some(name), _) => bundles.get(name).into_iter().collect(),
            (None, Some(signer)) => {
                // As upstream: without a selector, nothing is selected.
                let selector = LabelSelector::from_typed(wanted.label_selector.as_ref())?;
                select(bundles.list(), signer, &selector)
            }
            (None, None) => return Err(TrustBundleError::Unnamed),
        };
        match &wanted.name {
            _ if !chosen.is_empty() || wanted.optional == Some(true) => Ok(self.normalise(&chosen)),
            Some(name) => Err(TrustBundleError::NotFound(name.clone())),
            None => Err(TrustBundleError::NoMatch),
        }
    }

    /// The pod is gone.
    pub(crate) fn forget(&self, pod_uid: &str) {
        self.users.lock().unwrap_or_else(PoisonError::into_inner).remove(pod_uid);
    }

    async fn bundles(&self) -> Result<Bundles, TrustBundleError> {
        let mut bundles = self.bundles.lock().await;
        if let Some(bundles) = &*bundles {
            return Ok(bundles.clone());
        }
        for (index, version) in VERSIONS.into_iter().enumerate() {
            let served = match self.client.list_api_group_resources(version).await {
                Ok(list) => list.resources.iter().any(|resource| resource.name == "clustertrustbundles"),
                Err(error) if ferrite_client::is_not_found(&error) => false,
                Err(error) => return Err(TrustBundleError::Discovery(ferrite_client::message_of(&error))),
            };
            if served {
                let started =
                    if index == 0 { Bundles::Beta(self.start()) } else { Bundles::Alpha(self.start()) };
                return Ok(bundles.insert(started).clone());
            }
        }
        Err(TrustBundleError::NotServed)
    }

    fn start<K>(&self) -> Informer<K>
    where
        K: Object + kube::Resource<Scope = ClusterResourceScope>,
        K::DynamicType: Default,
    {
        let informer =
            Informer::start(Api::<K>::all(self.client.clone()), ListSelector::everything(), &self.scope);
        let (users, wake) = (self.users.clone(), self.wake.clone());
        informer.subscribe(move |_: &Change<K>| {
            let users = users.lock().unwrap_or_else(PoisonError::into_inner).clone();
            users.iter().for_each(|uid| wake(uid));
        });
        informer
    }

    /// The anchors of bundles, each once, as plain PEM.
    fn normalise(&self, bundles: &[Bundle]) -> Vec<u8> {
        let blocks = bundles.iter().flat_map(|bundle| pem::blocks(bundle.anchors.as_bytes()));
        let anchors: BTreeSet<Vec<u8>> = blocks.map(|block| block.content).collect();
        let mut anchors: Vec<Vec<u8>> = anchors.into_iter().collect();
        anchors.sort_by_cached_key(|anchor| self.order.hash_one(anchor));
        anchors.iter().map(|anchor| pem::encode("CERTIFICATE", anchor)).collect::<String>().into_bytes()
    }
}

fn select(bundles: Vec<Bundle>, signer: &str, selector: &LabelSelector) -> Vec<Bundle> {
    let selected = |bundle: &Bundle| bundle.signer == signer && selector.matches(&bundle.labels);
    bundles.into_iter().filter(selected).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;

    fn bundle(signer: &str, label: &str, anchors: &[&[u8]]) -> Bundle {
        Bundle {
            signer: signer.into(),
            labels: BTreeMap::from([("l".into(), label.into())]),
            anchors: anchors
                .iter()
                .map(|anchor| format!("note\n{}", pem::encode("CERTIFICATE", anchor)))
                .collect(),
        }
    }

    #[test]
    fn bundles_are_selected_by_signer_and_labels() {
        let all = vec![bundle("a", "1", &[]), bundle("a", "2", &[]), bundle("b", "1", &[])];
        let labels = |labels: &[&str]| meta::LabelSelector {
            match_labels: (!labels.is_empty())
                .then(|| labels.iter().map(|label| ("l".to_owned(), (*label).to_owned())).collect()),
            ..meta::LabelSelector::default()
        };
        for (signer, selector, expected) in [
            ("a", Some(labels(&[])), 2),
            ("a", Some(labels(&["1"])), 1),
            ("b", Some(labels(&["2"])), 0),
            ("a", None, 0),
        ] {
            let selector = LabelSelector::from_typed(selector.as_ref()).unwrap();
            assert_eq!(select(all.clone(), signer, &selector).len(), expected, "{signer} {selector}");
        }
    }

    #[tokio::test]
    async fn anchors_come_once_and_always_in_the_same_order() {
        let scope = Scope::new();
        let bundles = TrustBundles::new(true, crate::standalone::client(), &scope, Arc::new(|_| {}));
        let first =
            bundles.normalise(&[bundle("a", "", &[b"one", b"two"]), bundle("a", "", &[b"two", b"three"])]);
        let second = bundles.normalise(&[bundle("a", "", &[b"three", b"two"]), bundle("a", "", &[b"one"])]);
        assert_eq!(first, second);
        let found: BTreeSet<Vec<u8>> = pem::blocks(&first).into_iter().map(|block| block.content).collect();
        assert_eq!(found, BTreeSet::from([b"one".to_vec(), b"two".to_vec(), b"three".to_vec()]));
        assert!(!String::from_utf8(first).unwrap().contains("note"));
    }

    #[tokio::test]
    async fn a_kubelet_without_the_gate_refuses() {
        let scope = Scope::new();
        let bundles = TrustBundles::new(false, crate::standalone::client(), &scope, Arc::new(|_| {}));
        let refused = bundles.get("u", &ClusterTrustBundleProjection::default()).await.unwrap_err();
        assert!(refused.to_string().contains("ClusterTrustBundleProjection is off"), "{refused}");
    }
}
