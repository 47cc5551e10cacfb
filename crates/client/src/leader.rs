//! Leader election on a Lease.
//!
//! A leader may work for a time after its last renewal that is shorter than the lease duration, and others may lead no
//! sooner than the lease duration after it. [`Fence`] shows if that time is over, also to a process that
//! was stopped in between and has not noticed yet.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ferrite_component::metrics::{Counter, Family, Gauge, registry};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Client, Resource};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::fence::{Fence, uptime};
use crate::{Api, EventRecorder, EventType, Scope, is_not_found};

/// The metrics of elections, by the name of the lease.
struct Families {
    leads: Arc<Family<Gauge>>,
    slow: Arc<Family<Counter>>,
}

static FAMILIES: LazyLock<Families> = LazyLock::new(|| Families {
    leads: registry().gauge(
        "leader_election_master_status",
        "1 while this process holds the lease, else 0.",
        &["name"],
    ),
    slow: registry().counter(
        "leader_election_slowpath_total",
        "Renewals for which the lease had to be read first.",
        &["name"],
    ),
});

/// The Lease, the identity, and the times of an election.
#[derive(Debug, Clone)]
pub struct LeaderConfig {
    pub namespace: String,
    pub name: String,
    /// Unique among candidates.
    pub identity: String,
    /// Others may take over when the lease was not renewed for this long.
    pub lease_duration: Duration,
    /// The leader gives up when it could not renew for this long; shorter than `lease_duration`.
    pub renew_deadline: Duration,
    /// Time between attempts.
    pub retry_period: Duration,
}

impl LeaderConfig {
    /// Time after the begin of a renewal for which the leader may go on without another one. As upstream,
    /// the next renewal begins a retry period later and has the renew deadline. Others may lead no sooner
    /// than the lease duration after it.
    fn allowed(&self) -> Duration {
        let spare = self.lease_duration.saturating_sub(self.renew_deadline) / 2;
        self.renew_deadline + self.retry_period.min(spare)
    }

    /// Upstream's times: 15 s, 10 s, 2 s.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>, identity: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            identity: identity.into(),
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

/// One time of leading.
#[derive(Debug, Clone)]
pub struct Term {
    /// Ends with the leadership.
    pub scope: Scope,
    pub fence: Fence,
}

/// The health of a candidate, for its health check. Clones share it.
#[derive(Debug, Clone)]
pub struct LeaderHealth {
    name: String,
    lease_duration: Duration,
    /// The time of the last renewal after the machine's start, in nanoseconds; zero while another one leads.
    renewed: Arc<AtomicU64>,
}

impl LeaderHealth {
    /// Fails if the leader did not notice for `tolerance` that its lease has expired. A candidate that does not lead is well.
    pub fn check(&self, tolerance: Duration) -> Result<(), LeaderStuck> {
        self.check_at(uptime(), tolerance)
    }

    fn check_at(&self, now: Duration, tolerance: Duration) -> Result<(), LeaderStuck> {
        let renewed = Duration::from_nanos(self.renewed.load(Ordering::Acquire));
        match renewed.is_zero() || now.saturating_sub(renewed) <= self.lease_duration + tolerance {
            true => Ok(()),
            false => Err(LeaderStuck { name: self.name.clone() }),
        }
    }

    /// Notes when the lease was renewed; zero for the end of the leadership.
    fn renewed_at(&self, at: Duration) {
        self.renewed.store(u64::try_from(at.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
    }
}

/// A leader that neither renewed its lease nor gave up.
#[derive(Debug, thiserror::Error)]
#[error("failed election to renew leadership on lease {name}")]
pub struct LeaderStuck {
    name: String,
}

/// Takes part in the election of one Lease.
pub struct LeaderElector {
    api: Api<Lease>,
    config: LeaderConfig,
    /// The lease as last seen to change, and when: clocks of candidates are never compared.
    observed: Option<(LeaseSpec, Duration)>,
    /// The lease as this candidate wrote it last, while it leads.
    held: Option<Lease>,
    recorder: Option<EventRecorder>,
    health: LeaderHealth,
}

impl std::fmt::Debug for LeaderElector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaderElector").field("config", &self.config).finish_non_exhaustive()
    }
}

/// A candidate's decision about the lease that it read.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Somebody else holds it.
    Wait,
    Renew,
    /// Free, released or expired; counts as a transition.
    Take,
}

fn decide(spec: &LeaseSpec, unchanged_for: Duration, identity: &str) -> Step {
    let holder = spec.holder_identity.as_deref().unwrap_or_default();
    let duration = Duration::from_secs(spec.lease_duration_seconds.unwrap_or(0).max(0).unsigned_abs().into());
    if holder == identity {
        Step::Renew
    } else if holder.is_empty() || unchanged_for >= duration {
        Step::Take
    } else {
        Step::Wait
    }
}

/// The result of an attempt to take or renew the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    Leads,
    /// Somebody else holds the lease.
    HeldByOther,
    /// The server refused or did not answer. The lease may still be ours.
    Failed,
}

/// A leader's decision after an attempt to renew.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Leads for the time that a renewal allows, from the begin of the attempt.
    LeadOn,
    TryAgain,
    GiveUp,
}

/// `since` is the time from the begin of the last attempt that succeeded until now.
fn after_renewal(attempt: Attempt, since: Duration, allowed: Duration) -> Next {
    match attempt {
        Attempt::Leads => Next::LeadOn,
        Attempt::HeldByOther => Next::GiveUp,
        Attempt::Failed if since >= allowed => Next::GiveUp,
        Attempt::Failed => Next::TryAgain,
    }
}

impl LeaderElector {
    pub fn new(client: Client, config: LeaderConfig) -> Self {
        FAMILIES.leads.with(&[&config.name]).set(0);
        let health = LeaderHealth {
            name: config.name.clone(),
            lease_duration: config.lease_duration,
            renewed: Arc::default(),
        };
        let api = Api::namespaced(client, &config.namespace);
        Self { api, config, observed: None, held: None, recorder: None, health }
    }

    /// Records the begin and the end of each leadership as events about the lease.
    #[must_use]
    pub fn with_recorder(self, recorder: EventRecorder) -> Self {
        Self { recorder: Some(recorder), ..self }
    }

    pub fn health(&self) -> LeaderHealth {
        self.health.clone()
    }

    /// Upstream's event about a change of leadership.
    fn event(&self, change: &str) {
        if let (Some(recorder), Some(lease)) = (&self.recorder, &self.held) {
            let message = format!("{} {change}", self.config.identity);
            recorder.event(&lease.object_ref(&()), EventType::Normal, "LeaderElection", message);
        }
    }

    fn begins(&self, at: Duration) {
        self.health.renewed_at(at);
        FAMILIES.leads.with(&[&self.config.name]).set(1);
        self.event("became leader");
    }

    fn ends(&mut self) {
        self.health.renewed_at(Duration::ZERO);
        FAMILIES.leads.with(&[&self.config.name]).set(0);
        self.event("stopped leading");
        self.held = None;
    }

    /// Waits until it leads, calls `lead` with a term whose scope lasts as long as the leadership, and returns when
    /// the leadership is lost (the scope is then ended and joined) or when `scope` ends (the lease is then released,
    /// so that a successor need not wait). It can be called again to take part once more.
    pub async fn run(&mut self, scope: &Scope, lead: impl FnOnce(Term)) {
        let token = scope.token().clone();
        let mut began = loop {
            let began = uptime();
            let limit = self.config.renew_deadline;
            // A server that does not answer must not keep this one from asking again, nor from ending.
            let attempt = tokio::select! {
                () = token.cancelled() => return,
                attempt = timeout(limit, self.attempt()) => attempt.unwrap_or(Attempt::Failed),
            };
            if attempt == Attempt::Leads {
                break began;
            }
            tokio::select! {
                () = token.cancelled() => return,
                () = sleep(self.config.retry_period.mul_f64(1.0 + 1.2 * rand::random::<f64>())) => {}
            }
        };
        info!(lease = self.config.name, identity = self.config.identity, "became leader");
        self.begins(began);
        let term = Term { scope: scope.child(), fence: Fence::default() };
        let allowed = self.config.allowed();
        term.fence.open_until(began + allowed);
        lead(term.clone());
        loop {
            tokio::select! {
                () = token.cancelled() => {
                    term.scope.shutdown().await;
                    self.ends();
                    self.release().await;
                    return;
                }
                () = sleep(self.config.retry_period) => {}
            }
            let now = uptime();
            let left = (began + allowed).saturating_sub(now);
            let attempt = timeout(left, self.attempt()).await.unwrap_or(Attempt::Failed);
            match after_renewal(attempt, uptime().saturating_sub(began), allowed) {
                Next::LeadOn => {
                    began = now;
                    self.health.renewed_at(began);
                    term.fence.open_until(began + allowed);
                }
                Next::TryAgain => {}
                Next::GiveUp => {
                    term.fence.close();
                    warn!(lease = self.config.name, "lost the lease");
                    term.scope.shutdown().await;
                    self.ends();
                    return;
                }
            }
        }
    }

    /// Tries once to take or renew.
    async fn attempt(&mut self) -> Attempt {
        match self.try_attempt().await {
            Ok(true) => Attempt::Leads,
            Ok(false) => Attempt::HeldByOther,
            Err(error) => {
                debug!(%error, lease = self.config.name, "lease attempt failed");
                Attempt::Failed
            }
        }
    }

    async fn try_attempt(&mut self) -> Result<bool, kube::Error> {
        let now = MicroTime(Timestamp::now());
        let seconds = i32::try_from(self.config.lease_duration.as_secs()).unwrap_or(i32::MAX);
        // As upstream: a leader expects the lease as it wrote it. If it changed since, the write is a conflict.
        if let Some(mut lease) = self.held.clone() {
            lease.spec.get_or_insert_default().renew_time = Some(now.clone());
            match self.api.replace(&self.config.name, &PostParams::default(), &lease).await {
                Ok(lease) => {
                    self.held = Some(lease);
                    return Ok(true);
                }
                Err(error) => debug!(%error, lease = self.config.name, "the lease is read again"),
            }
        }
        let mut lease = match self.api.get(&self.config.name).await {
            Ok(lease) => lease,
            Err(error) if is_not_found(&error) => {
                let lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(self.config.name.clone()),
                        namespace: Some(self.config.namespace.clone()),
                        ..ObjectMeta::default()
                    },
                    spec: Some(LeaseSpec {
                        holder_identity: Some(self.config.identity.clone()),
                        lease_duration_seconds: Some(seconds),
                        acquire_time: Some(now.clone()),
                        renew_time: Some(now),
                        lease_transitions: Some(0),
                        ..LeaseSpec::default()
                    }),
                };
                self.held = Some(self.api.create(&PostParams::default(), &lease).await?);
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        let spec = lease.spec.get_or_insert_default();
        if self.observed.as_ref().is_none_or(|(seen, _)| seen != spec) {
            self.observed = Some((spec.clone(), uptime()));
        }
        let seen = self.observed.as_ref().map(|(_, at)| *at);
        let unchanged_for = seen.map_or(Duration::ZERO, |at| uptime().saturating_sub(at));
        match decide(spec, unchanged_for, &self.config.identity) {
            Step::Wait => return Ok(false),
            Step::Renew => FAMILIES.slow.with(&[&self.config.name]).increment(),
            Step::Take => {
                spec.holder_identity = Some(self.config.identity.clone());
                spec.acquire_time = Some(now.clone());
                spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0).saturating_add(1));
            }
        }
        spec.renew_time = Some(now);
        spec.lease_duration_seconds = Some(seconds);
        // The resourceVersion that was read guards the write: of two candidates one gets a conflict.
        self.held = Some(self.api.replace(&self.config.name, &PostParams::default(), &lease).await?);
        Ok(true)
    }

    async fn release(&self) {
        let release = async {
            let mut lease = self.api.get(&self.config.name).await?;
            if let Some(spec) = &mut lease.spec
                && spec.holder_identity.as_deref() == Some(&self.config.identity)
            {
                spec.holder_identity = Some(String::new());
                spec.lease_duration_seconds = Some(1);
                self.api.replace(&self.config.name, &PostParams::default(), &lease).await?;
            }
            Ok::<_, kube::Error>(())
        };
        if let Ok(Err(error)) = timeout(self.config.retry_period, release).await {
            debug!(%error, lease = self.config.name, "cannot release the lease");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions() {
        let lease = |holder: &str, seconds| LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(seconds),
            ..LeaseSpec::default()
        };
        for (what, spec, unchanged, step) in [
            ("mine", lease("me", 15), 100, Step::Renew),
            ("held by another and fresh", lease("you", 15), 14, Step::Wait),
            ("held by another and expired", lease("you", 15), 15, Step::Take),
            ("released", lease("", 1), 0, Step::Take),
            ("never held", LeaseSpec::default(), 0, Step::Take),
        ] {
            assert_eq!(decide(&spec, Duration::from_secs(unchanged), "me"), step, "{what}");
        }
    }

    #[test]
    fn a_leader_gives_up_in_time() {
        for (what, attempt, since, next) in [
            ("renewed", Attempt::Leads, 3, Next::LeadOn),
            ("renewed at the last moment", Attempt::Leads, 10, Next::LeadOn),
            ("no answer, time left", Attempt::Failed, 9, Next::TryAgain),
            ("no answer, no time left", Attempt::Failed, 10, Next::GiveUp),
            ("another one leads", Attempt::HeldByOther, 1, Next::GiveUp),
        ] {
            let allowed = Duration::from_secs(10);
            assert_eq!(after_renewal(attempt, Duration::from_secs(since), allowed), next, "{what}");
        }
    }

    #[tokio::test]
    async fn a_leader_that_does_not_notice_its_end_is_unwell() {
        let elector = LeaderElector::new(slow_server(), LeaderConfig::new("n", "unwell", "i"));
        let (health, seconds) = (elector.health(), Duration::from_secs);
        assert!(health.check(Duration::ZERO).is_ok(), "nobody leads");
        health.renewed_at(seconds(100));
        for (now, is_well) in [(100, true), (135, true), (136, false)] {
            assert_eq!(health.check_at(seconds(now), seconds(20)).is_ok(), is_well, "{now}");
        }
        let why = health.check_at(seconds(136), seconds(20)).unwrap_err().to_string();
        assert_eq!(why, "failed election to renew leadership on lease unwell");
        health.renewed_at(Duration::ZERO);
        assert!(health.check_at(seconds(136), seconds(20)).is_ok());
    }

    /// A server of one lease; each request is noted.
    fn lease_server(requests: Arc<std::sync::Mutex<Vec<String>>>) -> kube::Client {
        let stored: Arc<std::sync::Mutex<bytes::Bytes>> = Arc::default();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (stored, requests) = (stored.clone(), requests.clone());
            async move {
                let (method, path) = (request.method().clone(), request.uri().path().to_owned());
                let body = http_body_util::BodyExt::collect(request.into_body()).await?.to_bytes();
                let is_lease = path.contains("/leases");
                let text = match is_lease {
                    true => method.to_string(),
                    false => {
                        let event: ferrite_json::Value = ferrite_json::from_slice(&body).expect("an event");
                        let of = &event["involvedObject"];
                        format!(
                            "{} {}: {}",
                            of["kind"].as_str().unwrap_or(""),
                            event["reason"].as_str().unwrap_or(""),
                            event["message"].as_str().unwrap_or("")
                        )
                    }
                };
                requests.lock().unwrap().push(text);
                let mut stored = stored.lock().unwrap();
                let (code, body) = match (is_lease && method == http::Method::GET, stored.is_empty()) {
                    (true, true) => (
                        404,
                        bytes::Bytes::from_static(br#"{"kind":"Status","code":404,"reason":"NotFound"}"#),
                    ),
                    (true, false) => (200, stored.clone()),
                    (false, _) => {
                        if is_lease {
                            *stored = body.clone();
                        }
                        (200, body)
                    }
                };
                let body = http_body_util::Full::new(body);
                Ok::<_, kube::Error>(http::Response::builder().status(code).body(body).expect("a response"))
            }
        });
        kube::Client::new(service, "default")
    }

    #[tokio::test(start_paused = true)]
    async fn a_leadership_is_told_and_renewed_without_reading() {
        let requests: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
        let client = lease_server(requests.clone());
        let (scope, events) = (Scope::new(), Scope::new());
        let recorder = crate::Events::start(client.clone(), &events).recorder("x", None);
        let mut elector =
            LeaderElector::new(client, LeaderConfig::new("n", "told", "me")).with_recorder(recorder);
        let leads = || FAMILIES.leads.with(&["told"]).get();
        assert_eq!(leads(), 0);
        let (ends, own) = (scope.clone(), scope.clone());
        elector
            .run(&scope, move |_| {
                assert_eq!(leads(), 1);
                own.spawn(async move {
                    sleep(Duration::from_secs(5)).await;
                    ends.cancel();
                });
            })
            .await;
        assert_eq!(FAMILIES.leads.with(&["told"]).get(), 0);
        assert_eq!(FAMILIES.slow.with(&["told"]).get(), 0);
        let requests = requests.lock().unwrap().clone();
        let leases: Vec<&str> = requests.iter().map(String::as_str).filter(|r| !r.contains(':')).collect();
        assert_eq!(leases, ["GET", "POST", "PUT", "PUT", "GET", "PUT"]);
        assert!(requests.contains(&"Lease LeaderElection: me became leader".to_owned()), "{requests:?}");
        assert!(requests.contains(&"Lease LeaderElection: me stopped leading".to_owned()), "{requests:?}");
        events.cancel();
    }

    #[test]
    fn a_leader_ends_before_another_may_begin() {
        for (lease, renew, retry, allowed) in [(15, 10, 2, 12_000), (3, 2, 1, 2_500), (60, 50, 1, 51_000)] {
            let seconds = Duration::from_secs;
            let config = LeaderConfig {
                lease_duration: seconds(lease),
                renew_deadline: seconds(renew),
                retry_period: seconds(retry),
                ..LeaderConfig::new("n", "l", "i")
            };
            assert_eq!(config.allowed(), Duration::from_millis(allowed));
            assert!(config.allowed() < config.lease_duration);
        }
    }

    /// The first request is never answered; from the second on there is no lease, and one can be made.
    fn slow_server() -> kube::Client {
        let requests = Arc::new(AtomicU64::new(0));
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let number = requests.fetch_add(1, Ordering::Relaxed);
            async move {
                if number == 0 {
                    std::future::pending::<()>().await;
                }
                let (code, body) = match request.method() == http::Method::POST {
                    true => (201, http_body_util::BodyExt::collect(request.into_body()).await?.to_bytes()),
                    false => (
                        404,
                        bytes::Bytes::from_static(br#"{"kind":"Status","code":404,"reason":"NotFound"}"#),
                    ),
                };
                let body = http_body_util::Full::new(body);
                Ok::<_, kube::Error>(http::Response::builder().status(code).body(body).expect("a response"))
            }
        });
        kube::Client::new(service, "default")
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_without_an_answer_is_given_up() {
        let scope = Scope::new();
        let (leads, led) = tokio::sync::oneshot::channel();
        let mut elector = LeaderElector::new(slow_server(), LeaderConfig::new("n", "l", "i"));
        let ends = scope.clone();
        let run = elector.run(&scope, |_| {
            let _ = leads.send(());
        });
        let check = async {
            let limit = Duration::from_secs(60);
            assert!(timeout(limit, led).await.is_ok_and(|led| led.is_ok()), "it asks again");
            ends.cancel();
        };
        tokio::join!(run, check);
    }
}
