//! A store out of a real etcd cluster: transactions go there, and a watch feeds the replica that readers use.
//!
//! The watch covers every key of the cluster, ours or not: each revision then has an event, so that the replica
//! knows exactly how far it is, and a read that asks for "now" is one small request plus a wait for that revision.

mod compactor;
mod members;
mod replicate;
mod rounds;
mod translate;

pub use members::TlsFiles;
pub use translate::Layout;

use crate::proto::etcdserverpb::kv_client::KvClient;
use crate::proto::etcdserverpb::lease_client::LeaseClient;
use crate::proto::etcdserverpb::{LeaseGrantRequest, LeaseRevokeRequest};
use ferrite_store::{
    Answer, Feed, HistoryLimits, LeaseId, Outcome, Remote, Revision, Store, StoreError, Txn, now_seconds,
};
use members::Members;
use rounds::Rounds;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// The addresses of the cluster and our part of it.
#[derive(Debug, Clone)]
pub struct EtcdOptions {
    /// URLs of the members, `http://` or `https://`.
    pub servers: Vec<String>,
    pub tls: Option<TlsFiles>,
    pub layout: Layout,
    /// Interval between compactions of the cluster, as upstream's API server does them; `None` for never.
    pub compact_every: Option<Duration>,
    /// Time limit of a request and of the first listing.
    pub timeout: Duration,
}

impl EtcdOptions {
    pub fn new(servers: Vec<String>) -> Self {
        Self {
            servers,
            tls: None,
            layout: Layout::default(),
            compact_every: Some(Duration::from_secs(300)),
            timeout: Duration::from_secs(10),
        }
    }
}

/// Why there is no store.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("{url:?} is not the URL of an etcd member: {problem}")]
    Url { url: String, problem: String },
    #[error("no etcd member is given")]
    NoMembers,
    #[error("cannot read the TLS file {path}: {problem}")]
    Tls { path: String, problem: String },
    #[error("no member of {servers} answered within {seconds} s: {last}")]
    Unreachable { servers: String, seconds: u64, last: String },
}

/// Connects, lists everything there is and answers a store over it.
pub async fn connect(options: EtcdOptions, limits: HistoryLimits) -> Result<Store, ConnectError> {
    let members = Arc::new(Members::new(&options)?);
    let (listed, mut first) = watch::channel(replicate::Progress::default());
    let servers = options.servers.join(",");
    let timeout = options.timeout;
    let store =
        Store::remote(limits, |feed| Box::new(Etcd::start(options, Arc::clone(&members), feed, listed)));
    let listed = matches!(tokio::time::timeout(timeout, first.wait_for(|p| p.listed)).await, Ok(Ok(_)));
    if !listed {
        let last = first.borrow().problem.clone();
        return Err(ConnectError::Unreachable { servers, seconds: timeout.as_secs(), last });
    }
    Ok(store)
}

/// The remote side of a store.
#[derive(Debug)]
struct Etcd {
    members: Arc<Members>,
    layout: Layout,
    rounds: Rounds,
    _tasks: JoinSet<()>,
}

impl Etcd {
    fn start(
        options: EtcdOptions,
        members: Arc<Members>,
        feed: Feed,
        progress: watch::Sender<replicate::Progress>,
    ) -> Self {
        let mut tasks = JoinSet::new();
        tasks.spawn(replicate::run(Arc::clone(&members), options.layout.clone(), feed, progress));
        if let Some(every) = options.compact_every {
            tasks.spawn(compactor::run(Arc::clone(&members), every));
        }
        Self { members, layout: options.layout, rounds: Rounds::default(), _tasks: tasks }
    }
}

impl Remote for Etcd {
    fn commit(&self, txn: Txn) -> Answer<'_, Outcome> {
        Box::pin(async move {
            let request = translate::request(&self.layout, &txn)?;
            let call = |channel: Channel| {
                let request = request.clone();
                async move { kv(channel).txn(request).await }
            };
            let response = self.members.call(members::Repeat::IfNotSent, call).await;
            let response = response.map_err(|status| translate::refused(&status, &txn))?;
            translate::outcome(&self.layout, &txn, response.into_inner())
        })
    }

    fn grant(&self, expires_at: u64) -> Answer<'_, LeaseId> {
        Box::pin(async move {
            let ttl = i64::try_from(expires_at.saturating_sub(now_seconds())).unwrap_or(i64::MAX);
            // A far end is as good as none for a lease.
            let request = LeaseGrantRequest { ttl: ttl.clamp(1, 9_000_000_000), id: 0 };
            let call = |channel| async move { LeaseClient::new(channel).lease_grant(request).await };
            let granted = self.members.call(members::Repeat::IfNotSent, call).await;
            let granted = granted.map_err(|status| translate::refused(&status, &Txn::default()))?;
            Ok(LeaseId(granted.into_inner().id))
        })
    }

    fn revoke(&self, id: LeaseId) -> Answer<'_, Outcome> {
        Box::pin(async move {
            let request = LeaseRevokeRequest { id: id.0 };
            let call = |channel| async move { LeaseClient::new(channel).lease_revoke(request).await };
            let revoked = self.members.call(members::Repeat::IfNotSent, call).await;
            let revoked = revoked.map_err(|status| match status.code() {
                tonic::Code::NotFound => StoreError::NoSuchLease(id),
                _ => translate::refused(&status, &Txn::default()),
            })?;
            Ok(Outcome::Committed { revision: translate::at(revoked.into_inner().header) })
        })
    }

    fn revision(&self) -> Answer<'_, Revision> {
        Box::pin(self.rounds.join(async move || {
            let revision = replicate::revision(&self.members).await;
            revision.map_err(|status| translate::refused(&status, &Txn::default()))
        }))
    }
}

/// Answers may be as large as a listing gets.
fn kv(channel: Channel) -> KvClient<Channel> {
    KvClient::new(channel).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX)
}
