//! Health of the proxy: `/healthz` and `/livez`.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use super::Answer;
use crate::model::IpFamily;

/// Tells if load balancers should send traffic to the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeEligibility {
    /// The node is unknown, is being deleted, or the cluster autoscaler will delete it.
    #[default]
    Ineligible,
    Eligible,
}

#[derive(Debug, Clone, Copy)]
struct FamilyState {
    updated: Timestamp,
    /// The oldest change that is not in the table yet.
    pending: Option<Timestamp>,
}

#[derive(Debug, Default)]
struct State {
    families: BTreeMap<IpFamily, FamilyState>,
    node: NodeEligibility,
}

/// Notes changes and their completion. The proxy is healthy as long as no change waits for too long.
#[derive(Debug)]
pub struct ProxyHealth {
    patience: Duration,
    state: Mutex<State>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyReport {
    last_updated: String,
    healthy: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    status: BTreeMap<&'static str, FamilyReport>,
}

/// The zero value of a time, as Go writes it.
const NEVER: &str = "0001-01-01T00:00:00Z";

impl ProxyHealth {
    /// A change must be in the table within `patience`.
    pub fn new(patience: Duration) -> Self {
        Self { patience, state: Mutex::default() }
    }

    pub fn queued(&self, family: IpFamily, now: Timestamp) {
        let state = &mut *self.lock();
        if let Some(family) = state.families.get_mut(&family) {
            family.pending.get_or_insert(now);
        }
    }

    pub fn updated(&self, family: IpFamily, now: Timestamp) {
        self.lock().families.insert(family, FamilyState { updated: now, pending: None });
    }

    pub fn set_node(&self, node: NodeEligibility) {
        self.lock().node = node;
    }

    /// Returns true if all families keep up.
    pub fn is_healthy(&self, now: Timestamp) -> bool {
        self.lock().families.values().all(|family| self.keeps_up(family, now))
    }

    /// The answer to `/healthz`: the proxy is healthy and the node should get traffic.
    pub fn healthz(&self, now: Timestamp) -> Answer {
        let eligible = self.lock().node == NodeEligibility::Eligible;
        self.answer(now, Some(eligible))
    }

    /// The answer to `/livez`: the proxy is healthy.
    pub fn livez(&self, now: Timestamp) -> Answer {
        self.answer(now, None)
    }

    fn answer(&self, now: Timestamp, node_eligible: Option<bool>) -> Answer {
        let state = self.lock();
        let status: BTreeMap<_, _> = state
            .families
            .iter()
            .map(|(name, family)| {
                let healthy = self.keeps_up(family, now);
                (name.api_name(), FamilyReport { last_updated: family.updated.to_string(), healthy })
            })
            .collect();
        let healthy = status.values().all(|family| family.healthy);
        let fine = healthy && node_eligible.unwrap_or(true);
        let newest = state.families.values().map(|family| family.updated).max();
        let last_updated = match newest {
            // As upstream: a healthy proxy is up to date now, although nothing changed for a while.
            _ if fine => now.to_string(),
            Some(newest) => newest.to_string(),
            None => NEVER.to_owned(),
        };
        let report = Report { last_updated, current_time: now.to_string(), node_eligible, healthy, status };
        Answer {
            status: if fine { 200 } else { 503 },
            content_type: "application/json",
            headers: Vec::new(),
            body: serde_json::to_string(&report).unwrap_or_default(),
        }
    }

    fn keeps_up(&self, family: &FamilyState, now: Timestamp) -> bool {
        family.pending.is_none_or(|since| now.duration_since(since).unsigned_abs() < self.patience)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn healthy_while_changes_do_not_wait_too_long() {
        let health = ProxyHealth::new(Duration::from_secs(60));
        assert_eq!(health.livez(at(0)).status, 200, "starting is healthy");
        assert_eq!(health.healthz(at(0)).status, 503, "but the node is not known yet");
        health.set_node(NodeEligibility::Eligible);
        health.updated(IpFamily::V4, at(10));
        assert_eq!(health.healthz(at(1000)).status, 200, "nothing waits");
        health.queued(IpFamily::V4, at(1000));
        health.queued(IpFamily::V4, at(1050));
        assert_eq!(health.healthz(at(1059)).status, 200);
        let late = health.healthz(at(1060));
        assert_eq!(late.status, 503);
        assert_eq!(
            late.body,
            r#"{"lastUpdated":"1970-01-01T00:00:10Z","currentTime":"1970-01-01T00:17:40Z","nodeEligible":true,"healthy":false,"status":{"IPv4":{"lastUpdated":"1970-01-01T00:00:10Z","healthy":false}}}"#
        );
        assert_eq!(health.livez(at(1060)).status, 503);
        health.updated(IpFamily::V4, at(1070));
        assert!(health.is_healthy(at(2000)));
        health.set_node(NodeEligibility::Ineligible);
        assert_eq!((health.healthz(at(2000)).status, health.livez(at(2000)).status), (503, 200));
    }
}
