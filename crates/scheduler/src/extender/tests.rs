use std::sync::Mutex;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::cycle::{ScheduleError, Search, schedule};
use crate::framework::{Framework, Handle, Nomination, Registry};
use crate::profile::Profile;

/// A web service that answers each path with a fixed body, and remembers its requests.
struct Service {
    url: String,
    asked: Arc<Mutex<Vec<(String, Value)>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(
    mut stream: TcpStream,
    answers: &[(&str, Value)],
    asked: &Mutex<Vec<(String, Value)>>,
) -> Option<()> {
    let mut text = Vec::new();
    loop {
        let mut part = [0; 4096];
        let head = loop {
            if let Some(end) = text.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            let read = stream.read(&mut part).await.ok().filter(|read| *read > 0)?;
            text.extend_from_slice(&part[..read]);
        };
        let request = String::from_utf8_lossy(&text[..head]).to_ascii_lowercase();
        let length = request.split("content-length: ").nth(1)?.split("\r\n").next()?.parse::<usize>().ok()?;
        let path = request.split(' ').nth(1)?.to_owned();
        while text.len() < head + length {
            let read = stream.read(&mut part).await.ok().filter(|read| *read > 0)?;
            text.extend_from_slice(&part[..read]);
        }
        let body = ferrite_json::from_slice(&text[head..head + length]).ok()?;
        text.drain(..head + length);
        asked.lock().unwrap().push((path.clone(), body));
        let found = answers.iter().find(|(known, _)| *known == path);
        let (code, body) = found.map_or((500, json!({})), |(_, body)| (200, body.clone()));
        let body = body.to_string();
        let response = format!("HTTP/1.1 {code} X\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(response.as_bytes()).await.ok()?;
    }
}

async fn service(answers: Vec<(&'static str, Value)>) -> Service {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/prefix", listener.local_addr().unwrap());
    let asked: Arc<Mutex<Vec<(String, Value)>>> = Arc::default();
    let seen = asked.clone();
    let task = tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else { return };
            answer(stream, &answers, &seen).await;
        }
    });
    Service { url, asked, task }
}

fn node(name: &str, cpu: i64, pods: &[Arc<PodInfo>]) -> Arc<NodeInfo> {
    let node = json!({"metadata": {"name": name},
        "status": {"allocatable": {"cpu": cpu.to_string(), "memory": "8Gi", "pods": "10", "example.com/a": "9"}}});
    let mut info = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
    pods.iter().for_each(|pod| info.add_pod(pod.clone()));
    Arc::new(info)
}

fn pod(name: &str, priority: i32, requests: Value) -> Pod {
    ferrite_json::from_value(
        json!({"metadata": {"name": name, "namespace": "ns", "uid": format!("uid-{name}")},
        "spec": {"priority": priority, "containers": [{"name": "c", "resources": {"requests": requests}}]}}),
    )
    .unwrap()
}

async fn extender(url: &str, settings: Value, pods: &[&Pod]) -> Extender {
    let mut settings: ExtenderSettings = ferrite_json::from_value(settings).unwrap();
    settings.url_prefix = url.to_owned();
    let handle = Handle::default().with_objects(pods.iter().map(|pod| (*pod).clone()));
    Extender::new(&settings, handle.lister()).await.unwrap()
}

fn framework() -> Framework {
    Framework::new(&Profile::default(), &Registry::default(), &Handle::default()).unwrap()
}

#[tokio::test]
async fn filters_and_scores_reach_the_cycle() {
    let service = service(vec![
        ("/prefix/filter", json!({"nodenames": ["b", "c"], "FailedNodes": {"a": "not here"}})),
        ("/prefix/score", json!([{"Host": "b", "Score": 1}, {"Host": "c", "Score": 9}])),
    ])
    .await;
    let incoming = pod("p", 0, json!({"cpu": "1"}));
    let settings =
        json!({"filterVerb": "filter", "prioritizeVerb": "score", "weight": 5, "nodeCacheCapable": true});
    let extenders = [extender(&service.url, settings, &[&incoming]).await];
    let snapshot = Snapshot::new(["a", "b", "c"].map(|name| node(name, 4, &[])));
    let info = PodInfo::new(&incoming);
    let placed =
        schedule(&framework(), &snapshot, &extenders, &info, &mut Search::default(), |_| 0).await.unwrap();
    assert_eq!(placed.node, "c");
    let asked = service.asked.lock().unwrap().clone();
    assert_eq!(asked[0].0, "/prefix/filter");
    assert_eq!(asked[0].1["NodeNames"], json!(["a", "b", "c"]));
    assert_eq!(asked[0].1["Pod"]["metadata"]["name"], json!("p"));
    assert_eq!(asked[1].1["NodeNames"], json!(["b", "c"]));
}

#[tokio::test]
async fn whole_nodes_are_sent_to_an_extender_without_a_cache() {
    let service = service(vec![(
        "/prefix/filter",
        json!({"Nodes": {"items": []}, "FailedAndUnresolvableNodes": {"a": "never"}}),
    )])
    .await;
    let incoming = pod("p", 9, json!({"cpu": "1"}));
    let extenders = [extender(&service.url, json!({"filterVerb": "filter"}), &[&incoming]).await];
    let low = Arc::new(PodInfo::new(&pod("low", 0, json!({"cpu": "1"}))));
    let snapshot = Snapshot::new([node("a", 4, &[low])]);
    let info = PodInfo::new(&incoming);
    let result = schedule(&framework(), &snapshot, &extenders, &info, &mut Search::default(), |_| 0).await;
    let Err(ScheduleError::Unschedulable(error)) = result else { panic!("{result:?}") };
    assert_eq!(
        error.to_string(),
        "0/1 nodes are available: 1 never. no new claims to deallocate, preemption: 0/1 nodes are available: \
         1 Preemption is not helpful for scheduling."
    );
    assert_eq!(error.rejected_by, ["Extender"]);
    let asked = service.asked.lock().unwrap().clone();
    assert_eq!(asked[0].1["Nodes"]["items"][0]["metadata"]["name"], json!("a"));
}

#[tokio::test]
async fn an_extender_that_drops_nodes_without_a_reason_has_rejected_the_pod() {
    let service = service(vec![("/prefix/filter", json!({"NodeNames": []}))]).await;
    let incoming = pod("p", 0, json!({"cpu": "1"}));
    let settings = json!({"filterVerb": "filter", "nodeCacheCapable": true});
    let extenders = [extender(&service.url, settings, &[&incoming]).await];
    let snapshot = Snapshot::new([node("a", 4, &[])]);
    let info = PodInfo::new(&incoming);
    let result = schedule(&framework(), &snapshot, &extenders, &info, &mut Search::default(), |_| 0).await;
    let Err(ScheduleError::Unschedulable(error)) = result else { panic!("{result:?}") };
    assert_eq!(error.rejected_by, ["Extender"]);
}

#[tokio::test]
async fn an_extender_that_fails_to_choose_victims_leaves_the_pod_unschedulable() {
    let service =
        service(vec![("/prefix/preempt", json!({"NodeNameToMetaVictims": {"x": {"Pods": []}}}))]).await;
    let (low, incoming) = (pod("low", 0, json!({"cpu": "4"})), pod("p", 9, json!({"cpu": "4"})));
    let settings = json!({"preemptVerb": "preempt", "nodeCacheCapable": true});
    let extenders = [extender(&service.url, settings, &[&incoming, &low]).await];
    let snapshot = Snapshot::new([node("a", 4, &[Arc::new(PodInfo::new(&low))])]);
    let info = PodInfo::new(&incoming);
    let result = schedule(&framework(), &snapshot, &extenders, &info, &mut Search::default(), |_| 0).await;
    let Err(ScheduleError::Unschedulable(error)) = result else { panic!("{result:?}") };
    let text = error.to_string();
    assert!(text.starts_with("0/1 nodes are available: 1 Insufficient cpu. preemption: extender "), "{text}");
    assert_eq!((error.rejected_by, error.nomination), (vec!["NodeResourcesFit"], Nomination::Keep));
}

#[tokio::test]
async fn failures_count_unless_they_may_be_ignored() {
    let service = service(vec![]).await;
    let incoming = pod("p", 0, json!({"cpu": "1"}));
    let snapshot = Snapshot::new([node("a", 4, &[])]);
    let info = PodInfo::new(&incoming);
    for (settings, expected) in [
        (json!({"filterVerb": "filter"}), Err("failed filter with extender at URL")),
        (json!({"filterVerb": "filter", "ignorable": true}), Ok("a")),
        (json!({"filterVerb": "filter", "managedResources": [{"name": "example.com/a"}]}), Ok("a")),
    ] {
        let extenders = [extender(&service.url, settings, &[&incoming]).await];
        let result =
            schedule(&framework(), &snapshot, &extenders, &info, &mut Search::default(), |_| 0).await;
        match (result, expected) {
            (Ok(placement), Ok(node)) => assert_eq!(placement.node, node),
            (Err(ScheduleError::Plugin(error)), Err(text)) => {
                assert!(error.to_string().contains(text), "{error}");
            }
            (result, expected) => panic!("{result:?}, not {expected:?}"),
        }
    }
}

#[tokio::test]
async fn an_extender_chooses_victims_and_binds() {
    let (one, two) = (pod("one", 0, json!({"cpu": "4"})), pod("two", 5, json!({"cpu": "4"})));
    let incoming = pod("p", 9, json!({"cpu": "4"}));
    let service = service(vec![
        ("/prefix/preempt", json!({"NodeNameToMetaVictims": {"b": {"Pods": [{"UID": "uid-two"}]}}})),
        ("/prefix/bind", json!({"Error": "no"})),
    ])
    .await;
    let settings = json!({"preemptVerb": "preempt", "bindVerb": "bind", "nodeCacheCapable": true});
    let extender = extender(&service.url, settings, &[&incoming, &one, &two]).await;
    let info = |pod: &Pod| Arc::new(PodInfo::new(pod));
    let snapshot = Snapshot::new([node("a", 4, &[info(&one)]), node("b", 4, &[info(&two)])]);
    let extenders = [extender];
    let pod = PodInfo::new(&incoming);
    let result = schedule(&framework(), &snapshot, &extenders, &pod, &mut Search::default(), |_| 0).await;
    let Err(ScheduleError::Unschedulable(error)) = result else { panic!("{result:?}") };
    // Without the extender the less important pod on "a" would go.
    assert_eq!(error.nomination, Nomination::Node("b".into()));
    assert_eq!(error.victims.pods[0].key.name.as_str(), "two");
    let refused = extenders[0].bind(&pod, "b").await.unwrap_err();
    assert_eq!(refused.to_string(), "no");
    let asked = service.asked.lock().unwrap().clone();
    assert_eq!(asked[0].1["NodeNameToMetaVictims"]["a"]["Pods"], json!([{"UID": "uid-one"}]));
    assert_eq!(asked[1].1, json!({"PodName": "p", "PodNamespace": "ns", "PodUID": "uid-p", "Node": "b"}));
}

#[test]
fn members_are_found_in_any_case() {
    let value = json!({"nodeNames": [1], "NODES": null});
    assert_eq!(member(&value, "NodeNames"), Some(&json!([1])));
    assert_eq!(member(&value, "Nodes"), None);
}
