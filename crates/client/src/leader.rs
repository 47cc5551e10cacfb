//! Leader election on a Lease.
//!
//! A leader may work for a time after its last renewal that is shorter than the lease duration, and others may lead no
//! sooner than the lease duration after it. [`Fence`] shows if that time is over, also to a process that
//! was stopped in between and has not noticed yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::PostParams;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::{Api, Scope, is_not_found};

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

/// The time up to which a leader may act. Clones share it.
///
/// The clock goes on while the process is stopped or the machine sleeps.
#[derive(Debug, Clone, Default)]
pub struct Fence(Arc<AtomicU64>);

impl Fence {
    /// Returns true if the leadership lasts. A leader checks this before each write.
    pub fn is_open(&self) -> bool {
        uptime() < Duration::from_nanos(self.0.load(Ordering::Acquire))
    }

    /// Lets the leader act until this time after the machine's start.
    fn open_until(&self, end: Duration) {
        self.0.store(u64::try_from(end.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
    }

    fn close(&self) {
        self.open_until(Duration::ZERO);
    }
}

/// Time since the machine's start, with the time that it slept.
fn uptime() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of this function. The clock exists since Linux 2.6.39; without it the time
    // stays zero and no lease expires.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
        + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// One time of leading.
#[derive(Debug, Clone)]
pub struct Term {
    /// Ends with the leadership.
    pub scope: Scope,
    pub fence: Fence,
}

/// Takes part in the election of one Lease.
pub struct LeaderElector {
    api: Api<Lease>,
    config: LeaderConfig,
    /// The lease as last seen to change, and when: clocks of candidates are never compared.
    observed: Option<(LeaseSpec, Duration)>,
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
        Self { api: Api::namespaced(client, &config.namespace), config, observed: None }
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
        let term = Term { scope: scope.child(), fence: Fence::default() };
        let allowed = self.config.allowed();
        term.fence.open_until(began + allowed);
        lead(term.clone());
        loop {
            tokio::select! {
                () = token.cancelled() => {
                    term.scope.shutdown().await;
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
                    term.fence.open_until(began + allowed);
                }
                Next::TryAgain => {}
                Next::GiveUp => {
                    term.fence.close();
                    warn!(lease = self.config.name, "lost the lease");
                    term.scope.shutdown().await;
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
                self.api.create(&PostParams::default(), &lease).await?;
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
            Step::Renew => {}
            Step::Take => {
                spec.holder_identity = Some(self.config.identity.clone());
                spec.acquire_time = Some(now.clone());
                spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0).saturating_add(1));
            }
        }
        spec.renew_time = Some(now);
        spec.lease_duration_seconds = Some(seconds);
        // The resourceVersion that was read guards the write: of two candidates one gets a conflict.
        self.api.replace(&self.config.name, &PostParams::default(), &lease).await?;
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

    #[test]
    fn a_fence_opens_for_a_time() {
        let fence = Fence::default();
        assert!(!fence.is_open(), "nobody leads yet");
        fence.open_until(uptime() + Duration::from_secs(3600));
        assert!(fence.is_open() && fence.clone().is_open());
        fence.open_until(uptime());
        assert!(!fence.is_open(), "the time is over");
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
