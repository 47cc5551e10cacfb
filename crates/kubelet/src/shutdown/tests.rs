use super::*;
use crate::testing::Harness;
use ferrite_json::{Value, json};
use std::sync::Mutex;
use tokio::sync::mpsc;

/// A machine whose shutdowns a test begins. The first word of `held` is told by the delay that exists.
struct Scripted {
    events: mpsc::UnboundedReceiver<bool>,
    held: Arc<Mutex<Vec<&'static str>>>,
}

struct Held(Arc<Mutex<Vec<&'static str>>>, mpsc::UnboundedSender<()>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.lock().unwrap().push("released");
        let _ = self.1.send(());
    }
}

struct ScriptedSource {
    script: Scripted,
    released: mpsc::UnboundedSender<()>,
}

#[async_trait]
impl ShutdownSource for ScriptedSource {
    async fn delay(&mut self, most: Duration) -> io::Result<ShutdownDelay> {
        assert_eq!(most, Duration::from_secs(30));
        self.script.held.lock().unwrap().push("held");
        Ok(Box::new(Held(self.script.held.clone(), self.released.clone())))
    }

    async fn next(&mut self) -> io::Result<bool> {
        match self.script.events.recv().await {
            Some(event) => Ok(event),
            None => std::future::pending().await,
        }
    }
}

fn pod(priority: i32, grace: u64) -> Value {
    json!({"priority": priority, "terminationGracePeriodSeconds": grace, "containers": [
        {"name": format!("c{priority}"), "image": "busybox:1", "imagePullPolicy": "IfNotPresent"}]})
}

#[tokio::test(start_paused = true)]
async fn pods_end_in_order_and_the_machine_waits() {
    let h = Harness::start().await;
    h.runtime.add_image("busybox:1");
    h.runtime.ignore_term();
    h.create("web", pod(0, 5));
    h.create("critical", pod(2_000_000_000, 60));
    h.until_phase("web", "Running").await;
    h.until_phase("critical", "Running").await;
    let (events, receiver) = mpsc::unbounded_channel();
    let (released, mut releases) = mpsc::unbounded_channel();
    let held: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let source = ScriptedSource { script: Scripted { events: receiver, held: held.clone() }, released };
    let state = h.dir.path().join("graceful_node_shutdown_state");
    let manager = ShutdownManager {
        context: h.context.clone(),
        periods: shutdown_periods(Duration::from_secs(30), Duration::from_secs(10)),
        node: crate::node::reference("node"),
        state: state.clone(),
        shutting_down: h.shutting_down.clone(),
        refresh: Arc::default(),
    };
    let running = tokio::spawn(manager.run(source));
    h.runtime.forget_calls();
    events.send(true).unwrap();
    for name in ["web", "critical"] {
        let ended = h.until_phase(name, "Failed").await;
        assert_eq!(ended["status"]["reason"], "Terminated");
        assert_eq!(ended["status"]["message"], MESSAGE);
        let conditions = ended["status"]["conditions"].as_array().unwrap();
        let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget").unwrap();
        assert_eq!((&target["status"], &target["reason"]), (&json!("True"), &json!("TerminationByKubelet")));
    }
    releases.recv().await.unwrap();
    // Each has the shorter of its own time and its group's.
    let stops: Vec<String> = h.runtime.calls().into_iter().filter(|call| call.starts_with("stop:")).collect();
    assert_eq!(stops, ["stop:c0:5", "stop:c2000000000:10"]);
    h.until_event("Shutdown", "Shutdown manager detected shutdown event").await;
    let stored: ShutdownState = ferrite_json::from_slice(&std::fs::read(&state).unwrap()).unwrap();
    assert!(clock_seconds(&stored) >= 15, "{stored:?}");

    // Nothing new starts.
    h.create("late", pod(0, 5));
    let late = h.until_phase("late", "Failed").await;
    assert_eq!(late["status"]["reason"], REFUSED_REASON);
    assert_eq!(late["status"]["message"], format!("Pod was rejected: {REFUSED_MESSAGE}"));
    assert_eq!(h.until_event(REFUSED_REASON, "").await, REFUSED_MESSAGE);

    // It is called off: the next one is held up again, and pods are taken.
    h.delete("late", 0);
    h.until_gone("late").await;
    events.send(false).unwrap();
    h.until_event("Shutdown", "Shutdown manager detected shutdown cancellation").await;
    h.create("later", pod(0, 5));
    h.until_phase("later", "Running").await;
    assert_eq!(*held.lock().unwrap(), ["held", "released", "held"]);
    running.abort();
}

fn clock_seconds(state: &ShutdownState) -> u64 {
    crate::clock::since(state.start_time, state.end_time).as_secs()
}

#[test]
fn the_last_shutdown_has_upstreams_form() {
    let state = ShutdownState { start_time: Timestamp::UNIX_EPOCH, end_time: no_time() };
    let text = r#"{"startTime":"1970-01-01T00:00:00Z","endTime":"0001-01-01T00:00:00Z"}"#;
    assert_eq!(ferrite_json::to_string(&state).unwrap(), text);
    assert_eq!(ferrite_json::from_str::<ShutdownState>(text).unwrap(), state);
}
