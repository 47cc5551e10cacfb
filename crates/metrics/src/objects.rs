//! The objects of the API: PodMetrics and NodeMetrics.

use crate::usage::Usage;
use ferrite_api::quantity::{Format, Quantity};
use ferrite_json::{Value, json};
use jiff::Timestamp;
use std::time::Duration;

pub(crate) const API_VERSION: &str = "metrics.k8s.io/v1beta1";

fn amounts(usage: &Usage) -> Value {
    // The canonical form has the suffix that needs the fewest digits.
    let cpu = Quantity::parse(&format!("{}n", usage.nanocores)).map(|cpu| cpu.to_string());
    let memory = Quantity::from_value(i64::try_from(usage.memory).unwrap_or(i64::MAX), Format::BinarySi);
    json!({"cpu": cpu.unwrap_or_else(|_| "0".to_owned()), "memory": memory.to_string()})
}

/// A duration as Go writes it, to the millisecond.
fn duration(window: Duration) -> String {
    let (seconds, milliseconds) = (window.as_secs(), window.subsec_millis());
    let (minutes, seconds) = (seconds / 60, seconds % 60);
    let fraction = format!("{milliseconds:03}");
    let fraction = match fraction.trim_end_matches('0') {
        "" => String::new(),
        digits => format!(".{digits}"),
    };
    match (minutes / 60, minutes % 60) {
        (0, 0) => format!("{seconds}{fraction}s"),
        (0, minutes) => format!("{minutes}m{seconds}{fraction}s"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}{fraction}s"),
    }
}

fn second(time: Timestamp) -> String {
    Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}

fn metadata(object: &Value, now: Timestamp) -> Value {
    let from = &object["metadata"];
    let mut metadata = json!({"name": from["name"], "creationTimestamp": second(now)});
    for key in ["namespace", "labels"] {
        if let Some(value) = from.get(key).filter(|value| !value.is_null()) {
            metadata[key] = value.clone();
        }
    }
    metadata
}

/// The metrics of a node.
pub(crate) fn node_metrics(node: &Value, usage: &Usage, now: Timestamp) -> Value {
    json!({
        "kind": "NodeMetrics",
        "apiVersion": API_VERSION,
        "metadata": metadata(node, now),
        "timestamp": second(usage.at),
        "window": duration(usage.window),
        "usage": amounts(usage),
    })
}

/// The metrics of a pod; none if it has no containers. The time is that of the container measured first.
pub(crate) fn pod_metrics(pod: &Value, containers: &[(String, Usage)], now: Timestamp) -> Option<Value> {
    let first = containers.iter().map(|(_, usage)| usage).min_by_key(|usage| usage.at)?;
    let containers: Vec<Value> =
        containers.iter().map(|(name, usage)| json!({"name": name, "usage": amounts(usage)})).collect();
    Some(json!({
        "kind": "PodMetrics",
        "apiVersion": API_VERSION,
        "metadata": metadata(pod, now),
        "timestamp": second(first.at),
        "window": duration(first.window),
        "containers": containers,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_upstreams_form() {
        let at = |second| Timestamp::from_second(second).expect("in range");
        let usage = Usage {
            nanocores: 1_500_000,
            memory: 12 << 20,
            at: at(1_700_000_000),
            window: Duration::from_millis(15_250),
        };
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": "b"}}});
        let found = pod_metrics(&pod, &[("c".into(), usage)], at(1_700_000_001)).expect("a container");
        assert_eq!(
            found,
            json!({
                "kind": "PodMetrics", "apiVersion": "metrics.k8s.io/v1beta1",
                "metadata": {"name": "p", "namespace": "n", "labels": {"a": "b"}, "creationTimestamp": "2023-11-14T22:13:21Z"},
                "timestamp": "2023-11-14T22:13:20Z", "window": "15.25s",
                "containers": [{"name": "c", "usage": {"cpu": "1500u", "memory": "12Mi"}}],
            })
        );
        assert_eq!(pod_metrics(&pod, &[], at(0)), None);
        let node = node_metrics(&json!({"metadata": {"name": "m"}}), &usage, at(1_700_000_001));
        assert_eq!((&node["kind"], &node["usage"]["cpu"]), (&json!("NodeMetrics"), &json!("1500u")));
        assert!(node["metadata"].get("namespace").is_none());
    }

    #[test]
    fn windows_are_written_as_go_writes_them() {
        for (milliseconds, text) in [(2000, "2s"), (15_100, "15.1s"), (60_000, "1m0s"), (3_601_000, "1h0m1s")]
        {
            assert_eq!(duration(Duration::from_millis(milliseconds)), text);
        }
    }
}
