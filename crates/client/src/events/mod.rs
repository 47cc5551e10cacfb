//! Events: a component's messages to people about an object.

mod correlator;
mod series;

use ferrite_json::json;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use self::correlator::{Correlator, Verdict};
pub use self::series::SeriesRecorder;
use self::series::{Happening, SeriesMemory};
use crate::rate_limit::{RateLimit, RateLimiter};
use crate::{Api, Scope, is_already_exists, is_namespace_terminating, is_not_found};

/// Events wait here while the server is slow; more are dropped, because telling must never hold back doing.
const QUEUE: usize = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventType {
    Normal,
    Warning,
}

impl EventType {
    pub fn as_str(self) -> &'static str {
        match self {
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        }
    }
}

/// One occurrence, before it is correlated with earlier ones.
#[derive(Debug, Clone)]
struct Occurrence {
    component: String,
    host: String,
    regarding: ObjectReference,
    kind: EventType,
    reason: String,
    message: String,
    at: jiff::Timestamp,
}

/// An event on its way to the writer.
#[derive(Debug)]
enum Entry {
    /// For an event of the core group, which counts its repetitions.
    Counted(Occurrence),
    /// For an event of `events.k8s.io`.
    Series(Happening),
}

/// Writes the events of a process: one queue and one memory of recent events, however many recorders.
#[derive(Debug, Clone)]
pub struct Events {
    sender: mpsc::Sender<Entry>,
}

impl Events {
    /// Starts the task that writes; it belongs to `scope`.
    pub fn start(client: Client, scope: &Scope) -> Self {
        Self::start_limited(client, None, scope)
    }

    /// The same, with a limit of written events per second.
    pub fn start_limited(client: Client, limit: Option<RateLimit>, scope: &Scope) -> Self {
        let (sender, receiver) = mpsc::channel(QUEUE);
        scope.spawn(write_all(client, limit.map(RateLimiter::new), receiver));
        Self { sender }
    }

    /// A recorder that signs as `component`, on `host` if that is a node.
    pub fn recorder(&self, component: impl Into<String>, host: Option<&str>) -> EventRecorder {
        EventRecorder {
            sender: self.sender.clone(),
            component: component.into(),
            host: host.unwrap_or_default().to_owned(),
        }
    }

    /// A recorder of events of `events.k8s.io` that signs as `controller`.
    pub fn series_recorder(&self, controller: &str) -> SeriesRecorder {
        SeriesRecorder::new(self.sender.clone(), controller)
    }
}

/// Records events as one component. Never waits and never fails: an event that cannot be kept is dropped.
#[derive(Debug, Clone)]
pub struct EventRecorder {
    sender: mpsc::Sender<Entry>,
    component: String,
    host: String,
}

impl EventRecorder {
    /// Records that `reason` happened to the object `regarding`.
    pub fn event(
        &self,
        regarding: &ObjectReference,
        kind: EventType,
        reason: impl Into<String>,
        message: impl Into<String>,
    ) {
        let occurrence = Occurrence {
            component: self.component.clone(),
            host: self.host.clone(),
            regarding: regarding.clone(),
            kind,
            reason: reason.into(),
            message: message.into(),
            at: jiff::Timestamp::now(),
        };
        if let Err(error) = self.sender.try_send(Entry::Counted(occurrence)) {
            debug!(%error, "event dropped");
        }
    }

    /// [`event`](EventRecorder::event) about `object` as a whole.
    pub fn event_for<K>(
        &self,
        object: &K,
        kind: EventType,
        reason: impl Into<String>,
        message: impl Into<String>,
    ) where
        K: Resource<DynamicType = ()>,
    {
        self.event(&object.object_ref(&()), kind, reason, message);
    }
}

async fn write_all(client: Client, limiter: Option<RateLimiter>, mut entries: mpsc::Receiver<Entry>) {
    let mut correlator = Correlator::default();
    let mut series = SeriesMemory::default();
    let mut next_sweep = Instant::now() + SeriesMemory::INTERVAL;
    let turn = async || {
        if let Some(limiter) = &limiter {
            limiter.turn().await;
        }
    };
    loop {
        let entry = tokio::select! {
            entry = entries.recv() => entry,
            () = sleep_until(next_sweep), if !series.is_empty() => {
                next_sweep = Instant::now() + SeriesMemory::INTERVAL;
                for count in series.sweep(jiff::Timestamp::now()) {
                    turn().await;
                    report(series::write_count(&client, &count).await, &count.happening.reason);
                }
                continue;
            }
        };
        match entry {
            None => return,
            Some(Entry::Counted(occurrence)) => {
                let verdict = correlator.correlate(&occurrence);
                if verdict == Verdict::Drop {
                    continue;
                }
                turn().await;
                let written = write(&client, &mut correlator, &occurrence, verdict).await;
                report(written, &occurrence.reason);
            }
            Some(Entry::Series(happening)) => {
                let verdict = series.observe(&happening);
                if verdict == series::Verdict::Counted {
                    continue;
                }
                turn().await;
                let reason = happening.reason.clone();
                report(series::write(&client, happening, verdict).await, &reason);
            }
        }
    }
}

fn report(written: Result<(), kube::Error>, reason: &str) {
    match written {
        Ok(()) => {}
        Err(error) if is_expected(&error) => debug!(%error, reason, "event not kept"),
        Err(error) => warn!(%error, reason, "cannot write event"),
    }
}

/// Returns true if the refusal of an event needs no warning: for example, its namespace is being deleted or
/// is gone.
fn is_expected(error: &kube::Error) -> bool {
    is_namespace_terminating(error) || is_not_found(error) || is_already_exists(error)
}

async fn write(
    client: &Client,
    correlator: &mut Correlator,
    occurrence: &Occurrence,
    verdict: Verdict,
) -> Result<(), kube::Error> {
    let namespace = occurrence.regarding.namespace.as_deref().filter(|n| !n.is_empty()).unwrap_or("default");
    let api: Api<Event> = Api::namespaced(client.clone(), namespace);
    match verdict {
        Verdict::Drop => Ok(()),
        Verdict::Create { key, message } => {
            let event = new_event(namespace, occurrence, message);
            api.create_unread(&PostParams::default(), &event).await?;
            correlator.created(key, occurrence.at);
            Ok(())
        }
        Verdict::Repeat { key, first, count, message } => {
            let name = event_name(&occurrence.regarding, first);
            let patch = json!({
                "count": count,
                "lastTimestamp": Time(occurrence.at),
                "message": message,
            });
            match api.patch_unread(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
                // It was removed (events live about an hour): start again.
                Err(error) if is_not_found(&error) => {
                    let mut event = new_event(namespace, occurrence, message);
                    event.count = Some(count);
                    api.create_unread(&PostParams::default(), &event).await?;
                    correlator.created(key, occurrence.at);
                    Ok(())
                }
                result => result,
            }
        }
    }
}

/// The name of an event about an object that was first seen at a time.
fn event_name(regarding: &ObjectReference, first: jiff::Timestamp) -> String {
    let object = regarding.name.as_deref().unwrap_or_default();
    format!("{object}.{:x}", first.as_nanosecond())
}

fn new_event(namespace: &str, occurrence: &Occurrence, message: String) -> Event {
    let host = Some(occurrence.host.clone()).filter(|host| !host.is_empty());
    Event {
        metadata: ObjectMeta {
            name: Some(event_name(&occurrence.regarding, occurrence.at)),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: occurrence.regarding.clone(),
        reason: Some(occurrence.reason.clone()),
        message: Some(message),
        source: Some(EventSource { component: Some(occurrence.component.clone()), host: host.clone() }),
        first_timestamp: Some(Time(occurrence.at)),
        last_timestamp: Some(Time(occurrence.at)),
        count: Some(1),
        type_: Some(occurrence.kind.as_str().to_owned()),
        reporting_component: Some(occurrence.component.clone()),
        reporting_instance: Some(host.unwrap_or_default()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_that_are_nobodys_fault() {
        let terminating =
            json!({"causes": [{"reason": "NamespaceTerminating", "message": "m", "field": "f"}]});
        for (code, reason, details, expected) in [
            (403, "Forbidden", terminating.clone(), true),
            (404, "NotFound", json!({}), true),
            (409, "AlreadyExists", json!({}), true),
            (409, "Conflict", json!({}), false),
            (403, "Forbidden", json!({}), false),
            (500, "InternalError", terminating, false),
        ] {
            let status = json!({"status": "Failure", "code": code, "reason": reason, "message": "m", "details": details});
            let error = kube::Error::Api(ferrite_json::from_value(status).unwrap());
            assert_eq!(is_expected(&error), expected, "{code} {reason}");
        }
    }
}
