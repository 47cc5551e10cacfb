//! Asks the kubelets, while somebody wants to know.
//!
//! Without requests there is no task and no sample. The first request starts the task, which takes two samples in quick
//! succession, so that the first answer has figures, and then one in every period. It ends when nobody has asked for a
//! while. A kubelet that answers late, wrongly or with too much loses its own figures only.

use crate::sample::{self, PodKey, Sample};
use crate::usage::{self, Usage};
use ferrite_apiserver::{ApiServer, User};
use ferrite_client::{message_of, read_document};
use ferrite_json::Value;
use futures_util::StreamExt;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// As metrics-server: the time between two samples.
const PERIOD: Duration = Duration::from_secs(15);
/// The time between the first two, which the first request waits for.
const FIRST_WINDOW: Duration = Duration::from_secs(2);
/// The time that a kubelet has for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The same while the first request waits.
const FIRST_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest that the first request waits.
const LONGEST_WAIT: Duration = Duration::from_secs(8);
/// Samples are taken for this long after the last request: longer than any client's period.
const LINGER: Duration = Duration::from_secs(180);
/// Kubelets asked at once.
const AT_ONCE: usize = 10;
/// Largest response. A node with 250 pods of four containers each reports about 600 KiB.
const LARGEST: usize = 8 << 20;
/// The most that a list of nodes may take.
const LARGEST_LIST: usize = 1 << 30;

/// A client that reads as the server itself.
pub(crate) fn client_of(server: &Arc<ApiServer>) -> kube::Client {
    let user = User::new("system:apiserver", ["system:masters"]);
    kube::Client::new(server.in_process_client(user).with_agent("metrics-server"), "default")
}

/// The last two samples of each node.
#[derive(Debug)]
pub(crate) struct Collector {
    state: Mutex<State>,
    /// The number of rounds since the task started.
    rounds: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<String, Samples>,
    /// None while no task runs.
    asked: Option<Instant>,
}

#[derive(Debug)]
struct Samples {
    earlier: Option<Sample>,
    latest: Sample,
}

impl Default for Collector {
    fn default() -> Self {
        Self { state: Mutex::default(), rounds: watch::Sender::new(0) }
    }
}

impl Collector {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that samples are taken, and waits for the first ones.
    pub async fn ready(self: &Arc<Self>, server: &Arc<ApiServer>) {
        let mut rounds = self.rounds.subscribe();
        if self.state().asked.replace(Instant::now()).is_none() {
            let (collector, of) = (Arc::clone(self), Arc::clone(server));
            server.run_until_stopped(async move { collector.run(&of).await });
        }
        // Figures that are not there by then are missing in the answer.
        let _ = tokio::time::timeout(LONGEST_WAIT, rounds.wait_for(|round| *round >= 2)).await;
    }

    /// The usage of a node.
    pub fn node(&self, name: &str) -> Option<Usage> {
        let state = self.state();
        let samples = state.nodes.get(name)?;
        usage::usage(&samples.earlier.as_ref()?.node, &samples.latest.node)
    }

    /// The usage of a pod's containers. The node is the one that the pod is bound to: reports of other
    /// nodes are ignored.
    pub fn pod(&self, node: &str, pod: &PodKey) -> Option<Vec<(String, Usage)>> {
        let state = self.state();
        let samples = state.nodes.get(node)?;
        usage::of_pod(samples.earlier.as_ref()?, &samples.latest, pod)
    }

    async fn run(&self, server: &Arc<ApiServer>) {
        let client = client_of(server);
        loop {
            let first = *self.rounds.borrow() < 2;
            self.round(server, &client, if first { FIRST_TIMEOUT } else { TIMEOUT }).await;
            self.rounds.send_modify(|round| *round += 1);
            let pause = if *self.rounds.borrow() < 2 { FIRST_WINDOW } else { PERIOD };
            tokio::time::sleep(pause).await;
            if self.rest() {
                return;
            }
        }
    }

    /// Forgets everything if nobody has asked for a while.
    fn rest(&self) -> bool {
        let mut state = self.state();
        if state.asked.is_some_and(|asked| asked.elapsed() < LINGER) {
            return false;
        }
        *state = State::default();
        self.rounds.send_replace(0);
        true
    }

    /// Asks every node that is ready.
    async fn round(&self, server: &ApiServer, client: &kube::Client, timeout: Duration) {
        let nodes = match read_document(client, "/api/v1/nodes", "application/json", LARGEST_LIST).await {
            Ok(list) => ready_nodes(&list),
            Err(error) => {
                tracing::warn!(error = message_of(&error), "cannot list nodes for their metrics");
                return;
            }
        };
        self.state().nodes.retain(|name, _| nodes.contains(name));
        let asking = futures_util::stream::iter(nodes).map(|name| async move {
            let asked = server.read_kubelet(&name, "/metrics/resource", LARGEST);
            let answer = tokio::time::timeout(timeout, asked).await;
            let sample = match answer {
                Ok(Ok(body)) => Some(sample::parse(&String::from_utf8_lossy(&body), Timestamp::now())),
                Ok(Err(status)) => {
                    tracing::debug!(node = name, error = status.message, "no metrics of a node");
                    None
                }
                Err(_) => {
                    tracing::debug!(node = name, "no metrics of a node in time");
                    None
                }
            };
            self.keep(name, sample);
        });
        asking.buffer_unordered(AT_ONCE).collect::<()>().await;
    }

    /// As metrics-server: a node that did not answer has no figures.
    fn keep(&self, name: String, sample: Option<Sample>) {
        let mut state = self.state();
        let Some(latest) = sample else {
            state.nodes.remove(&name);
            return;
        };
        let earlier = state.nodes.remove(&name).map(|samples| samples.latest);
        state.nodes.insert(name, Samples { earlier, latest });
    }
}

fn ready_nodes(list: &Value) -> Vec<String> {
    let items = list["items"].as_array().map_or(&[][..], |items| items.as_slice());
    let is_ready = |node: &&Value| {
        let conditions = node["status"]["conditions"].as_array();
        conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
    };
    let name = |node: &Value| node["metadata"]["name"].as_str().map(str::to_owned);
    items.iter().filter(is_ready).filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn sample(cpu: u32, second: i64) -> Option<Sample> {
        let labels = "{container=\"c\",namespace=\"n\",pod=\"p\"}";
        let text = format!(
            "node_cpu_usage_seconds_total {cpu}\nnode_memory_working_set_bytes 1\ncontainer_cpu_usage_seconds_total{labels} {cpu}\ncontainer_memory_working_set_bytes{labels} 1\n"
        );
        Some(sample::parse(&text, Timestamp::from_second(second).expect("in range")))
    }

    #[test]
    fn two_samples_make_a_figure_and_a_failure_ends_it() {
        let collector = Collector::default();
        let node = |name: &str| collector.node(name).map(|usage| usage.nanocores);
        collector.keep("a".into(), sample(1, 0));
        assert_eq!(node("a"), None);
        collector.keep("a".into(), sample(6, 10));
        assert_eq!(node("a"), Some(500_000_000));
        collector.keep("a".into(), sample(16, 20));
        assert_eq!(node("a"), Some(1_000_000_000));
        collector.keep("a".into(), None);
        assert_eq!(node("a"), None);
        collector.keep("a".into(), sample(17, 30));
        assert_eq!(node("a"), None, "the sample before is gone");
    }

    #[test]
    fn only_the_pods_own_node_tells_of_it() {
        let collector = Collector::default();
        for (second, cpu) in [(0, 1), (10, 6)] {
            collector.keep("liar".into(), sample(cpu, second));
        }
        let pod = ("n".to_owned(), "p".to_owned());
        assert!(collector.pod("liar", &pod).is_some());
        assert_eq!(collector.pod("other", &pod), None);
    }

    #[test]
    fn nodes_that_are_not_ready_are_not_asked() {
        let node = |name: &str, status: &str| json!({"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": status}]}});
        let list = json!({"items": [node("a", "True"), node("b", "False"), node("c", "Unknown"), {"metadata": {"name": "d"}}]});
        assert_eq!(ready_nodes(&list), ["a"]);
    }
}
