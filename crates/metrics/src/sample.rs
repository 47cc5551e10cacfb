//! One sample of a node: the parsed text of its kubelet's `/metrics/resource`.
//!
//! A kubelet is not trusted. Lines that make no sense are left out, and nothing here fails.

use jiff::Timestamp;
use std::collections::BTreeMap;

/// Namespace and name of a pod.
pub(crate) type PodKey = (String, String);

/// The counters of a node and of the containers on it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Sample {
    pub node: Counters,
    /// By pod and container.
    pub pods: BTreeMap<PodKey, BTreeMap<String, Counters>>,
}

/// The counters of one container, or of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Counters {
    pub cpu: Option<Cpu>,
    /// Bytes of the working set.
    pub memory: Option<u64>,
    /// When it started, in seconds since 1970.
    pub started: Option<f64>,
}

/// Processor time used until a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cpu {
    pub nanoseconds: u64,
    pub at: Timestamp,
}

/// Reads a text that arrived at `received`.
pub(crate) fn parse(text: &str, received: Timestamp) -> Sample {
    let mut sample = Sample::default();
    for line in text.lines() {
        read_line(&mut sample, line, received);
    }
    sample
}

fn read_line(sample: &mut Sample, line: &str, received: Timestamp) -> Option<()> {
    let line = line.trim_start();
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(end);
    let (scope, counter) = name.split_once('_')?;
    let is_known =
        matches!(counter, "cpu_usage_seconds_total" | "memory_working_set_bytes" | "start_time_seconds");
    if !is_known || !matches!(scope, "node" | "container") {
        return None;
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Labels::default(), rest),
    };
    let mut words = rest.split_ascii_whitespace();
    let value: f64 = words.next()?.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0)?;
    let at = match words.next() {
        Some(word) => Timestamp::from_millisecond(word.parse().ok()?).ok()?,
        None => received,
    };
    let counters = match scope {
        "node" => &mut sample.node,
        _ => {
            let Labels { container, namespace, pod } = labels;
            let (key, container) = ((namespace?, pod?), container?);
            sample.pods.entry(key).or_default().entry(container).or_default()
        }
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive, and the cast saturates"
    )]
    let whole = |number: f64| number as u64;
    match counter {
        "cpu_usage_seconds_total" => counters.cpu = Some(Cpu { nanoseconds: whole(value * 1e9), at }),
        "memory_working_set_bytes" => counters.memory = Some(whole(value)),
        _ => counters.started = Some(value),
    }
    Some(())
}

#[derive(Debug, Default)]
struct Labels {
    container: Option<String>,
    namespace: Option<String>,
    pod: Option<String>,
}

/// Reads `a="b",c="d"}` and returns the text behind it.
fn labels(mut rest: &str) -> Option<(Labels, &str)> {
    let mut labels = Labels::default();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(behind) = rest.strip_prefix('}') {
            return Some((labels, behind));
        }
        let (name, value) = rest.split_once("=\"")?;
        let (text, behind) = quoted(value)?;
        rest = behind;
        match name.trim() {
            "container" => labels.container = Some(text),
            "namespace" => labels.namespace = Some(text),
            "pod" => labels.pod = Some(text),
            _ => {}
        }
    }
}

/// Reads to the closing quotation mark.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match letters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    #[test]
    fn kubelets_are_understood_with_and_without_times() {
        let text = "\
# HELP container_cpu_usage_seconds_total Cumulative cpu time consumed by the container in core-seconds
# TYPE container_cpu_usage_seconds_total counter
container_cpu_usage_seconds_total{container=\"a\",namespace=\"default\",pod=\"p\"} 4.710169 1633253812125
container_memory_working_set_bytes{container=\"a\",namespace=\"default\",pod=\"p\"} 1.253376e+07 1633253812125
container_start_time_seconds{container=\"a\",namespace=\"default\",pod=\"p\"} 1.63325e+09 1633253812125
container_cpu_usage_seconds_total{pod=\"q\\\"\\\\}\",namespace=\"default\",container=\"a\", extra=\"x\"} 1
container_memory_working_set_bytes{namespace=\"default\",pod=\"q\"} 7
container_memory_working_set_bytes{container=\"a\",namespace=\"default\",pod=\"r\"} NaN
container_memory_working_set_bytes{container=\"a\",namespace=\"default\",pod=\"r\"} -1
container_memory_working_set_bytes{container=\"a\",namespace=\"default\",pod=\"r} 1
container_swap_usage_bytes{container=\"a\",namespace=\"default\",pod=\"p\"} 9
node_cpu_usage_seconds_total 357.35
node_memory_working_set_bytes 1e9 nonsense
scrape_error 0
";
        let sample = parse(text, at(1700));
        let node =
            Counters { cpu: Some(Cpu { nanoseconds: 357_350_000_000, at: at(1700) }), ..Counters::default() };
        assert_eq!(sample.node, node);
        let pods: Vec<&str> = sample.pods.keys().map(|(_, pod)| pod.as_str()).collect();
        assert_eq!(pods, ["p", "q\"\\}"]);
        let first = sample.pods[&("default".into(), "p".into())]["a"];
        let time = Timestamp::from_millisecond(1_633_253_812_125).expect("in range");
        let cpu = Some(Cpu { nanoseconds: 4_710_169_000, at: time });
        assert_eq!(first, Counters { cpu, memory: Some(12_533_760), started: Some(1.63325e9) });
    }

    proptest! {
        #[test]
        fn any_text_can_be_read(text in "(container_cpu_usage_seconds_total|node_memory_working_set_bytes)?[{}=\",\\\\a-z0-9 .é\n]{0,80}") {
            let _ = parse(&text, at(0));
        }
    }
}
