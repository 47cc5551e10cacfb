//! Rolls a Deployment's pod template out through ReplicaSets.

mod controller;
mod revision;
mod rollback;
mod scaling;
mod status;
mod sync;

pub(crate) use controller::start;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::intstr::scaled;

const REVISION: &str = "deployment.kubernetes.io/revision";
const REVISION_HISTORY: &str = "deployment.kubernetes.io/revision-history";
const DESIRED_REPLICAS: &str = "deployment.kubernetes.io/desired-replicas";
const MAX_REPLICAS: &str = "deployment.kubernetes.io/max-replicas";
const TEMPLATE_HASH: &str = "pod-template-hash";

fn replicas(deployment: &Deployment) -> i32 {
    deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

fn is_rolling_update(deployment: &Deployment) -> bool {
    let strategy = deployment.spec.as_ref().and_then(|spec| spec.strategy.as_ref());
    strategy.and_then(|strategy| strategy.type_.as_deref()).unwrap_or("RollingUpdate") == "RollingUpdate"
}

fn spec_replicas(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

fn available_replicas(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
}

fn annotation<'a>(meta: &'a kube::core::ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}

/// Limits of a rolling update around the desired number of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bounds {
    max_surge: i32,
    max_unavailable: i32,
}

/// Percentages of surge round up, of unavailability down. Both zero would never move, so one may be unavailable.
fn bounds(deployment: &Deployment) -> Bounds {
    if !is_rolling_update(deployment) {
        return Bounds { max_surge: 0, max_unavailable: 0 };
    }
    let wanted = replicas(deployment);
    let rolling = deployment
        .spec
        .as_ref()
        .and_then(|spec| spec.strategy.as_ref())
        .and_then(|strategy| strategy.rolling_update.as_ref());
    let default = IntOrString::String("25%".to_owned());
    let surge = rolling.and_then(|rolling| rolling.max_surge.as_ref()).unwrap_or(&default);
    let unavailable = rolling.and_then(|rolling| rolling.max_unavailable.as_ref()).unwrap_or(&default);
    let max_surge = scaled(surge, wanted, true);
    let mut max_unavailable = scaled(unavailable, wanted, false);
    if max_surge == 0 && max_unavailable == 0 {
        max_unavailable = 1;
    }
    Bounds { max_surge, max_unavailable: max_unavailable.min(wanted) }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    #[test]
    fn bounds_follow_upstreams_rounding() {
        for (replicas, surge, unavailable, expected) in [
            (4, Value::Null, Value::Null, (1, 1)),
            (3, Value::Null, Value::Null, (1, 0)),
            (1, Value::Null, Value::Null, (1, 0)),
            (10, json!("30%"), json!("25%"), (3, 2)),
            (10, json!(0), json!(0), (0, 1)),
            (2, json!(0), json!("25%"), (0, 1)),
            (2, json!(1), json!(5), (1, 2)),
            (0, json!("25%"), json!("25%"), (0, 0)),
        ] {
            let deployment: Deployment = ferrite_json::from_value(json!({"spec": {
                "replicas": replicas, "selector": {}, "template": {},
                "strategy": {"type": "RollingUpdate",
                             "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}}}))
            .unwrap();
            let got = bounds(&deployment);
            assert_eq!((got.max_surge, got.max_unavailable), expected, "{replicas} {surge} {unavailable}");
        }
    }
}
