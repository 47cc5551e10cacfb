//! Certificates of pods. The kubelet makes the keys, asks for certificates with PodCertificateRequests, and renews them.
//!
//! As upstream, keys are kept in memory and in the pods' volumes only: after a restart of the kubelet, every projection
//! gets another key and another certificate.

mod state;

pub(crate) use state::{Credentials, NoCertificate};

use crate::objects::Wake;
use crate::pod::model::{self, PodId};
use ferrite_client::{Api, Change, EventRecorder, EventType, Informer, ListSelector, ObjectKey, Scope};
use ferrite_component::metrics::{Family, Gauge, registry};
use ferrite_pki::{StubRequest, StubRequestError};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1beta1::{PodCertificateRequest, PodCertificateRequestSpec};
use k8s_openapi::api::core::v1::{Node, Pod, PodCertificateProjection, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Client;
use kube::api::PostParams;
use state::{JITTER, Pending, Projection};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

#[derive(Debug, thiserror::Error)]
pub(crate) enum PodCertificateError {
    #[error(
        "PodCertificate projection is not supported: the kubelet's feature gate PodCertificateRequest is off"
    )]
    Off,
    #[error(transparent)]
    None(#[from] NoCertificate),
    #[error("while generating keypair: {0}")]
    Key(#[from] StubRequestError),
    #[error("while fetching service account: {0}")]
    Account(String),
    #[error("while getting node object from local cache: node \"{0}\" not found")]
    Node(String),
    #[error("while creating PodCertificateRequest: {0}")]
    Create(String),
    #[error("the kubelet stops")]
    Stopped,
}

/// One source of one volume of one pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    uid: String,
    volume: String,
    source: usize,
}

struct Record {
    signer: String,
    projection: Projection,
}

/// The settings of a node's certificates of pods.
pub(crate) struct PodCertificatesConfig {
    pub enabled: bool,
    pub node_name: String,
    pub recorder: EventRecorder,
    pub wake: Wake,
}

pub(crate) struct PodCertificates {
    config: PodCertificatesConfig,
    client: Client,
    node: Informer<Node>,
    scope: Scope,
    /// The node's requests. They are followed from the first pod on that needs one.
    requests: OnceLock<Informer<PodCertificateRequest>>,
    records: Mutex<BTreeMap<Key, Record>>,
    /// Signers and states that the metric has now.
    reported: Mutex<BTreeSet<(String, &'static str)>>,
}

impl PodCertificates {
    pub(crate) fn new(
        config: PodCertificatesConfig,
        client: Client,
        node: Informer<Node>,
        scope: &Scope,
    ) -> Self {
        Self {
            config,
            client,
            node,
            scope: scope.child(),
            requests: OnceLock::new(),
            records: Mutex::default(),
            reported: Mutex::default(),
        }
    }

    /// The credentials of one source of a volume, and when to look again. Makes a request if there are none, or if they
    /// are due for renewal. From now on the pod is woken when its request is answered.
    pub(crate) async fn get(
        &self,
        pod: &Pod,
        (volume, source): (&str, usize),
        wanted: &PodCertificateProjection,
        now: Timestamp,
    ) -> Result<(Credentials, Timestamp), PodCertificateError> {
        if !self.config.enabled {
            return Err(PodCertificateError::Off);
        }
        let id = PodId::of(pod);
        let key = Key { uid: id.uid.clone(), volume: volume.to_owned(), source };
        let requests = self.requests();
        if self.advance(pod, &id, &key, wanted, requests, now) {
            let pending = self.request(pod, &id, wanted, now).await?;
            self.with(&key, wanted, |projection| projection.wait_for(pending));
            // The answer may have come while the response was on its way.
            self.advance(pod, &id, &key, wanted, requests, now);
        }
        Ok(self.with(&key, wanted, |projection| projection.credentials(now))?)
    }

    /// The pod is gone, and its keys with it.
    pub(crate) fn forget(&self, uid: &str) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        records.retain(|key, _| key.uid != uid);
        drop(records);
        self.count(Timestamp::now());
    }

    /// Takes notice of the awaited request and of the time. Returns true if a request must be made.
    fn advance(
        &self,
        pod: &Pod,
        id: &PodId,
        key: &Key,
        wanted: &PodCertificateProjection,
        requests: &Informer<PodCertificateRequest>,
        now: Timestamp,
    ) -> bool {
        let (reports, needs_request) = self.with(key, wanted, |projection| {
            let request = projection.awaited().map(|name| ObjectKey::new(id.namespace.clone(), name));
            let request = request.and_then(|key| requests.get(&key));
            let reports = projection.advance(request.as_deref(), now, jitter());
            (reports, projection.needs_request(now))
        });
        for report in reports {
            self.config.recorder.event_for(pod, EventType::Warning, report.reason, report.message);
        }
        self.count(now);
        needs_request
    }

    fn with<T>(
        &self,
        key: &Key,
        wanted: &PodCertificateProjection,
        f: impl FnOnce(&mut Projection) -> T,
    ) -> T {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let record = records.entry(key.clone()).or_insert_with(|| Record {
            signer: wanted.signer_name.clone(),
            projection: Projection::default(),
        });
        f(&mut record.projection)
    }

    fn requests(&self) -> &Informer<PodCertificateRequest> {
        self.requests.get_or_init(|| {
            let selector = ListSelector::fields(format!("spec.nodeName={}", self.config.node_name));
            let informer = Informer::start(Api::all(self.client.clone()), selector, &self.scope);
            let wake = Arc::clone(&self.config.wake);
            informer
                .subscribe(move |change: &Change<PodCertificateRequest>| wake(&change.object().spec.pod_uid));
            informer
        })
    }

    /// Makes a key and asks for its certificate.
    async fn request(
        &self,
        pod: &Pod,
        id: &PodId,
        wanted: &PodCertificateProjection,
        now: Timestamp,
    ) -> Result<Pending, PodCertificateError> {
        let account = model::spec(pod).service_account_name.clone().unwrap_or_default();
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &id.namespace);
        let found = accounts.get(&account).await;
        let found =
            found.map_err(|error| PodCertificateError::Account(ferrite_client::message_of(&error)))?;
        let node = self.node.get(&ObjectKey::cluster(self.config.node_name.clone()));
        let node = node.ok_or_else(|| PodCertificateError::Node(self.config.node_name.clone()))?;
        let key_type = wanted.key_type.clone();
        let made = tokio::task::spawn_blocking(move || StubRequest::new(&key_type)).await;
        let made = made.map_err(|_| PodCertificateError::Stopped)??;
        let request = PodCertificateRequest {
            metadata: ObjectMeta {
                namespace: Some(id.namespace.clone()),
                generate_name: Some("req-".to_owned()),
                owner_references: Some(vec![OwnerReference {
                    api_version: "v1".to_owned(),
                    kind: "Pod".to_owned(),
                    name: id.name.clone(),
                    uid: id.uid.clone(),
                    ..OwnerReference::default()
                }]),
                ..ObjectMeta::default()
            },
            spec: PodCertificateRequestSpec {
                signer_name: wanted.signer_name.clone(),
                pod_name: id.name.clone(),
                pod_uid: id.uid.clone(),
                service_account_name: account,
                service_account_uid: found.metadata.uid.clone().unwrap_or_default(),
                node_name: self.config.node_name.clone(),
                node_uid: node.metadata.uid.clone().unwrap_or_default(),
                max_expiration_seconds: wanted.max_expiration_seconds,
                stub_pkc_s10_request: ByteString(made.request),
                unverified_user_annotations: wanted.user_annotations.clone(),
                ..PodCertificateRequestSpec::default()
            },
            status: None,
        };
        let api: Api<PodCertificateRequest> = Api::namespaced(self.client.clone(), &id.namespace);
        let created = api.create(&PostParams::default(), &request).await;
        let created =
            created.map_err(|error| PodCertificateError::Create(ferrite_client::message_of(&error)))?;
        let time = created.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
        Ok(Pending::new(made.key, created.metadata.name.clone().unwrap_or_default(), time, jitter()))
    }

    /// Reports the states as upstream's metric.
    fn count(&self, now: Timestamp) {
        static FAMILY: LazyLock<Arc<Family<Gauge>>> = LazyLock::new(|| {
            let help = "Gauge vector reporting the number of pod certificate projected volume sources, faceted by signer_name and state.";
            registry().gauge("kubelet_podcertificate_states", help, &["signer_name", "state"])
        });
        let mut states: BTreeMap<(String, &'static str), i64> = BTreeMap::new();
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        for record in records.values() {
            *states.entry((record.signer.clone(), record.projection.state(now))).or_default() += 1;
        }
        drop(records);
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        for (signer, state) in reported.iter().filter(|key| !states.contains_key(*key)) {
            FAMILY.remove(&[signer, state]);
        }
        for ((signer, state), number) in &states {
            FAMILY.with(&[signer, state]).set(*number);
        }
        *reported = states.into_keys().collect();
    }
}

/// Time below [`JITTER`].
fn jitter() -> SignedDuration {
    SignedDuration::from_secs(rand::random_range(0..JITTER.as_secs()))
}
