//! Auditing: a record of the user, the request and the result.
//!
//! [`policy`] decides how much of a request is recorded, [`record`] collects it while the request is
//! handled, [`event`] encodes it, and [`backend`] has the destinations. A server without a policy has no
//! [`Auditor`].

mod backend;
mod body;
mod event;
mod log;
mod metrics;
mod objects;
mod policy;
mod record;
mod webhook;

pub use backend::{AuditBatch, AuditMode, AuditThrottle, AuditTruncate};
pub use log::{AuditFormat, AuditLog};
pub use policy::{AuditPolicy, PolicyError};
pub use webhook::{AuditSender, AuditWebhook};

pub(crate) use body::audited;
pub(crate) use event::Level;
pub(crate) use metrics::{register as register_metrics, rejected};
pub(crate) use record::{Arrival, Record};

use crate::auth::{Action, User};
use backend::Backend;
use event::{Event, Stage};
use futures_util::future::{BoxFuture, join_all};
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use jiff::Timestamp;
use policy::Verdict;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// When the server stops, backends have this long to take the remaining events.
const FLUSH: Duration = Duration::from_secs(10);

/// The audit settings of a server.
#[derive(Debug, Clone)]
pub struct AuditConfig {
    pub policy: AuditPolicy,
    pub log: Option<AuditLog>,
    pub webhook: Option<AuditWebhook>,
}

/// Resolves to true if an event was stored.
pub(crate) type Written = BoxFuture<'static, bool>;

/// The policy and the backends of a server.
pub(crate) struct Auditor {
    policy: AuditPolicy,
    backends: Vec<Backend>,
    workers: Mutex<Vec<JoinHandle<()>>>,
    /// Writes that nobody waits for.
    unattended: TaskTracker,
    runtime: tokio::runtime::Handle,
    stopping: CancellationToken,
}

impl Auditor {
    /// Opens the backends. Must be called within a runtime.
    pub fn start(config: &AuditConfig) -> std::io::Result<Arc<Self>> {
        let stopping = CancellationToken::new();
        let mut started = Vec::new();
        if let Some(log) = &config.log {
            started.push(log::start(log)?);
        }
        if let Some(webhook) = &config.webhook {
            started.push(webhook::start(webhook, &stopping));
        }
        let (backends, workers) = started.into_iter().unzip();
        Ok(Arc::new(Self {
            policy: config.policy.clone(),
            backends,
            workers: Mutex::new(workers),
            unattended: TaskTracker::new(),
            runtime: tokio::runtime::Handle::current(),
            stopping,
        }))
    }

    fn evaluate(&self, user: Option<&User>, action: &Action) -> Verdict {
        let verdict = self.policy.evaluate(user, action);
        metrics::level(verdict.level);
        verdict
    }

    /// Gives an event to all backends. None if no backend has the request wait.
    fn send(&self, event: &Event, stage: Stage, time: Timestamp) -> Option<Written> {
        metrics::event();
        let mut waiting: Vec<Written> = Vec::new();
        for backend in &self.backends {
            waiting.extend(backend.send(event, stage, time));
        }
        match waiting.len() {
            0 | 1 => waiting.pop(),
            _ => Some(join_all(waiting).map(|written| written.into_iter().all(|stored| stored)).boxed()),
        }
    }

    /// Writes an event that nobody waits for.
    fn spawn(&self, written: Written) {
        self.unattended.spawn_on(written.map(drop), &self.runtime);
    }

    /// Stores the remaining events and ends the backends.
    pub async fn stop(&self) {
        self.unattended.close();
        // From here on nothing is tried twice.
        self.stopping.cancel();
        let workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        let finish = async {
            self.unattended.wait().await;
            self.backends.iter().for_each(Backend::close);
            let mut workers: FuturesUnordered<_> = workers.into_iter().collect();
            while workers.next().await.is_some() {}
        };
        if tokio::time::timeout(FLUSH, finish).await.is_err() {
            tracing::error!("audit events are lost: a backend did not take them before the server ended");
        }
    }
}
