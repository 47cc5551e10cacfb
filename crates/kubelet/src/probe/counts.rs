//! Counts of probe results, for `/metrics/probes`.

use super::{Outcome, ProbeKind};
use k8s_openapi::api::core::v1::ObjectReference;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Series {
    uid: String,
    container: String,
    kind: ProbeKind,
    result: &'static str,
    namespace: String,
    pod: String,
}

/// Counts of the probes of all pods. Those of a pod go with it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProbeCounts(Arc<Mutex<BTreeMap<Series, u64>>>);

impl ProbeCounts {
    pub(crate) fn count(&self, pod: &ObjectReference, container: &str, kind: ProbeKind, outcome: &Outcome) {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let result = match outcome {
            Outcome::Success | Outcome::Warning(_) => "successful",
            Outcome::Failure(_) => "failed",
            Outcome::Error(_) => "unknown",
        };
        let series = Series {
            uid: text(&pod.uid),
            container: container.to_owned(),
            kind,
            result,
            namespace: text(&pod.namespace),
            pod: text(&pod.name),
        };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(series).or_default() += 1;
    }

    pub(crate) fn forget(&self, uid: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|series, _| series.uid != uid);
    }

    /// Labels and count of each series.
    pub(crate) fn lines(&self) -> Vec<(String, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shown = counts.iter().map(|(s, count)| {
            let labels = format!(
                "container=\"{}\",namespace=\"{}\",pod=\"{}\",pod_uid=\"{}\",probe_type=\"{}\",result=\"{}\"",
                s.container,
                s.namespace,
                s.pod,
                s.uid,
                s.kind.as_str(),
                s.result
            );
            (labels, *count)
        });
        shown.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted_until_the_pod_goes() {
        let counts = ProbeCounts::default();
        let pod = |uid: &str| ObjectReference {
            uid: Some(uid.into()),
            name: Some("p".into()),
            namespace: Some("n".into()),
            ..Default::default()
        };
        counts.count(&pod("u"), "c", ProbeKind::Liveness, &Outcome::Success);
        counts.count(&pod("u"), "c", ProbeKind::Liveness, &Outcome::Success);
        counts.count(&pod("u"), "c", ProbeKind::Liveness, &Outcome::Failure(String::new()));
        counts.count(&pod("v"), "c", ProbeKind::Startup, &Outcome::Error(String::new()));
        let of = |kind: &str, uid: &str, result: &str| {
            format!(
                "container=\"c\",namespace=\"n\",pod=\"p\",pod_uid=\"{uid}\",probe_type=\"{kind}\",result=\"{result}\""
            )
        };
        let expected = [
            (of("Liveness", "u", "failed"), 1),
            (of("Liveness", "u", "successful"), 2),
            (of("Startup", "v", "unknown"), 1),
        ];
        assert_eq!(counts.lines(), expected);
        counts.forget("u");
        assert_eq!(counts.lines(), expected[2..]);
    }
}
