//! Graceful node shutdown: while the machine shuts down, pods end in the order of their priority, and the machine waits.
//!
//! `plan` decides who ends when; `logind` says that the machine shuts down, and holds it up.

mod logind;
mod plan;

pub(crate) use logind::LogindSource;
pub use plan::{ShutdownPeriod, shutdown_periods};

use crate::pod::context::Context;
use crate::pod::labels;
use crate::pod::model;
use crate::pod::status::Verdict;
use crate::state_file;
use async_trait::async_trait;
use ferrite_client::EventType;
use ferrite_component::metrics::{Gauge, registry};
use ferrite_cri::v1::{ContainerFilter, ContainerState, ContainerStateValue, ListContainersRequest};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use plan::ShutdownGroup;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::sync::{Notify, watch};

const REASON: &str = "Terminated";
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
pub(crate) const REFUSED_REASON: &str = "NodeShutdown";
pub(crate) const REFUSED_MESSAGE: &str = "Pod was rejected as the node is shutting down.";
/// Until the bus is asked again when it is not there.
const RECONNECT: Duration = Duration::from_secs(1);
/// The interval at which the runtime is asked for containers that still run.
const LOOK: Duration = Duration::from_millis(200);

/// Where the kubelet hears of shutdowns.
#[async_trait]
pub(crate) trait ShutdownSource: Send {
    /// Holds shutdowns up until the value is dropped, for this long at most. Also begins to listen.
    async fn delay(&mut self, most: Duration) -> io::Result<ShutdownDelay>;
    /// Waits until the machine is about to shut down, or no longer is.
    async fn next(&mut self) -> io::Result<bool>;
}

/// Whatever holds up a shutdown while it exists.
pub(crate) type ShutdownDelay = Box<dyn Send>;

/// The last shutdown, in upstream's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ShutdownState {
    start_time: Timestamp,
    end_time: Timestamp,
}

/// Go's time that is none.
fn no_time() -> Timestamp {
    Timestamp::from_second(-62_135_596_800).unwrap_or(Timestamp::MIN)
}

static STARTED: LazyLock<Arc<Gauge>> = LazyLock::new(|| {
    let help = "Start of the last graceful shutdown since the epoch, in seconds";
    registry().gauge("kubelet_graceful_shutdown_start_time_seconds", help, &[]).with(&[])
});

static ENDED: LazyLock<Arc<Gauge>> = LazyLock::new(|| {
    let help = "End of the last graceful shutdown since the epoch, in seconds";
    registry().gauge("kubelet_graceful_shutdown_end_time_seconds", help, &[]).with(&[])
});

pub(crate) struct ShutdownManager {
    pub context: Arc<Context>,
    pub periods: Vec<ShutdownPeriod>,
    pub node: ObjectReference,
    /// The file that remembers the last shutdown.
    pub state: PathBuf,
    /// Admission and the Node's status read it.
    pub shutting_down: watch::Sender<bool>,
    /// Asks for a report of the Node's status.
    pub refresh: Arc<Notify>,
}

impl ShutdownManager {
    pub(crate) async fn run(self, mut source: impl ShutdownSource) {
        self.show_last();
        let mut complained = false;
        loop {
            match self.follow(&mut source).await {
                Ok(never) => match never {},
                Err(error) if complained => tracing::debug!(%error, "cannot follow shutdowns of the machine"),
                Err(error) => {
                    complained = true;
                    tracing::warn!(%error, "cannot follow shutdowns of the machine; will try again");
                }
            }
            tokio::time::sleep(RECONNECT).await;
        }
    }

    async fn follow(&self, source: &mut impl ShutdownSource) -> io::Result<std::convert::Infallible> {
        let most = plan::total(&self.periods);
        let mut delay = Some(source.delay(most).await?);
        loop {
            let shutting_down = source.next().await?;
            let what = if shutting_down { "shutdown event" } else { "shutdown cancellation" };
            tracing::info!("Shutdown manager detected {what}");
            let message = format!("Shutdown manager detected {what}");
            self.context.recorder.event(&self.node, EventType::Normal, "Shutdown", message);
            self.shutting_down.send_replace(shutting_down);
            self.refresh.notify_one();
            match shutting_down {
                true => {
                    self.end_pods().await;
                    delay = None;
                }
                false if delay.is_none() => delay = Some(source.delay(most).await?),
                false => {}
            }
        }
    }

    /// Ends all pods, group by group.
    async fn end_pods(&self) {
        let started = self.context.clock.now();
        self.remember(started, no_time()).await;
        let (local, remote) = (self.context.pods.local().list(), self.context.pods.remote());
        let active: Vec<&Pod> =
            local.iter().chain(&remote).map(|pod| &**pod).filter(|pod| !model::is_finished(pod)).collect();
        for group in plan::plan(&self.periods, &active) {
            for (uid, grace) in &group.pods {
                let verdict = Verdict {
                    reason: REASON.into(),
                    message: MESSAGE.into(),
                    disruption: Some(MESSAGE.into()),
                    grace: Some(*grace),
                };
                self.context.workers.end(uid, verdict);
            }
            if tokio::time::timeout(group.grace, self.ended(&group)).await.is_err() {
                tracing::warn!(grace = ?group.grace, "not all pods of a priority ended in time");
            }
        }
        self.remember(started, self.context.clock.now()).await;
        tracing::info!("Shutdown manager completed processing shutdown event, node will shutdown shortly");
    }

    /// Waits until no container of the group runs and none of its volumes is mounted.
    async fn ended(&self, group: &ShutdownGroup) {
        loop {
            match self.is_running(group).await {
                Ok(false) => return,
                Ok(true) => {}
                Err(error) => tracing::warn!(%error, "cannot see which pods still run"),
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn is_running(&self, group: &ShutdownGroup) -> io::Result<bool> {
        let state = ContainerStateValue { state: ContainerState::ContainerRunning.into() };
        let filter = ContainerFilter { state: Some(state), ..ContainerFilter::default() };
        let request = ListContainersRequest { filter: Some(filter) };
        let listed = self.context.runtime.list_containers(request).await.map_err(io::Error::other)?;
        let is_ours = |uid: &String| group.pods.iter().any(|(known, _)| known == uid);
        if listed.containers.iter().any(|c| {
            c.state() == ContainerState::ContainerRunning
                && c.labels.get(labels::POD_UID).is_some_and(is_ours)
        }) {
            return Ok(true);
        }
        let directories: Vec<PathBuf> =
            group.pods.iter().map(|(uid, _)| self.context.volumes.pod_dir(uid)).collect();
        let mounted = tokio::task::spawn_blocking(move || {
            for directory in directories {
                if !ferrite_hostfs::mounts::below(&directory)?.is_empty() {
                    return Ok(true);
                }
            }
            Ok(false)
        });
        mounted.await.map_err(io::Error::other)?
    }

    async fn remember(&self, start_time: Timestamp, end_time: Timestamp) {
        let state = ShutdownState { start_time, end_time };
        show(&state);
        let path = self.state.clone();
        let written = tokio::task::spawn_blocking(move || {
            let bytes = ferrite_json::to_vec(&state).map_err(io::Error::other)?;
            state_file::write(&path, &bytes)
        });
        if let Err(error) = written.await.map_err(io::Error::other).and_then(|done| done) {
            tracing::error!(%error, "Failed to store graceful shutdown state");
        }
    }

    fn show_last(&self) {
        match state_file::read(&self.state) {
            Ok(None) => {}
            Ok(Some(bytes)) => match ferrite_json::from_slice(&bytes) {
                Ok(state) => show(&state),
                Err(error) => tracing::error!(%error, "Failed to load graceful shutdown state"),
            },
            Err(error) => tracing::error!(%error, "Failed to load graceful shutdown state"),
        }
    }
}

fn show(state: &ShutdownState) {
    for (gauge, time) in [(&STARTED, state.start_time), (&ENDED, state.end_time)] {
        gauge.set(if time == no_time() { 0 } else { time.as_second() });
    }
}

#[cfg(test)]
mod tests;
