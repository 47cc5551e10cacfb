//! Leader election on a Lease.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::PostParams;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use crate::{Api, Scope, is_not_found};

/// Which Lease, as whom, and how fast.
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

/// Takes part in the election of one Lease.
pub struct LeaderElector {
    api: Api<Lease>,
    config: LeaderConfig,
    /// The lease as last seen to change, and when: clocks of candidates are never compared.
    observed: Option<(LeaseSpec, Instant)>,
}

impl std::fmt::Debug for LeaderElector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeaderElector").field("config", &self.config).finish_non_exhaustive()
    }
}

/// What a candidate does about the lease it read.
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

impl LeaderElector {
    pub fn new(client: Client, config: LeaderConfig) -> Self {
        Self { api: Api::namespaced(client, &config.namespace), config, observed: None }
    }

    /// Waits until it leads, calls `lead` with a scope that lasts as long as the leadership, and returns when the
    /// leadership is lost (the scope is then ended and joined) or when `scope` ends (the lease is then released, so
    /// that a successor need not wait).
    pub async fn run(mut self, scope: &Scope, lead: impl FnOnce(Scope)) {
        let token = scope.token().clone();
        while !self.attempt().await {
            tokio::select! {
                () = token.cancelled() => return,
                () = sleep(self.config.retry_period.mul_f64(1.0 + 1.2 * rand::random::<f64>())) => {}
            }
        }
        info!(lease = self.config.name, identity = self.config.identity, "became leader");
        let leading = scope.child();
        lead(leading.clone());
        let mut renewed = Instant::now();
        loop {
            tokio::select! {
                () = token.cancelled() => {
                    leading.shutdown().await;
                    self.release().await;
                    return;
                }
                () = sleep(self.config.retry_period) => {}
            }
            let left = self.config.renew_deadline.saturating_sub(renewed.elapsed());
            if let Ok(true) = timeout(left, self.attempt()).await {
                renewed = Instant::now();
            } else if renewed.elapsed() >= self.config.renew_deadline {
                info!(lease = self.config.name, "lost the lease");
                leading.shutdown().await;
                return;
            }
        }
    }

    /// Tries once to take or renew; whether this candidate leads now.
    async fn attempt(&mut self) -> bool {
        match self.try_attempt().await {
            Ok(leads) => leads,
            Err(error) => {
                debug!(%error, lease = self.config.name, "lease attempt failed");
                false
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
            self.observed = Some((spec.clone(), Instant::now()));
        }
        let unchanged_for = self.observed.as_ref().map_or(Duration::ZERO, |(_, at)| at.elapsed());
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
}
