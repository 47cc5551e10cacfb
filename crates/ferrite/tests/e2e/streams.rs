//! kube-rs where something goes on: informers, exec, attach, logs that are followed, port-forward.

use crate::archive::web_image;
use crate::clients::{object, with_kube_rs};
use crate::world::*;
use ferrite_json::{Value, json};
use futures_util::{AsyncBufReadExt, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, AttachParams, DeleteParams, LogParams, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Client, ResourceExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const IMAGE: &str = "ferrite.test/web:v1";

#[test]
fn kube_rs_streams() {
    let world = World::start();
    let archive = world.path("web.tar");
    web_image(&archive, IMAGE, "page\n");
    world.import(&archive);
    with_kube_rs(&world, |client| async move {
        for config in [watcher::Config::default(), watcher::Config::default().streaming_lists()] {
            informs(client.clone(), config.labels("made-by=rust")).await;
        }
        let pods: Api<Pod> = Api::default_namespaced(client);
        run(&pods, "web", json!({"image": IMAGE})).await;
        execs(&pods).await;
        attaches(&pods).await;
        forwards(&pods).await;
        follows(&pods).await;
    });
}

/// Makes a pod and waits until it runs.
async fn run(pods: &Api<Pod>, name: &str, mut container: Value) {
    container["name"] = "c".into();
    let pod = object(json!({
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0, "restartPolicy": "Never", "containers": [container],
        },
    }));
    pods.create(&PostParams::default(), &pod).await.unwrap();
    await_condition(pods.clone(), name, conditions::is_pod_running()).await.unwrap();
}

/// A watcher gets the existing objects, the end of that list, and every later change; its store follows.
async fn informs(client: Client, config: watcher::Config) {
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let map = |name: &str| -> ConfigMap {
        object(json!({"metadata": {"name": name, "labels": {"made-by": "rust"}}}))
    };
    let post = PostParams::default();
    maps.create(&post, &map("first")).await.unwrap();
    let (store, writer) = reflector::store();
    let mut events = watcher(maps.clone(), config).reflect(writer).boxed();
    let mut told = Vec::new();
    while told.last().is_none_or(|last| last != "done") {
        told.push(match events.try_next().await.unwrap().expect("the watch goes on") {
            watcher::Event::Init => "init".to_owned(),
            watcher::Event::InitApply(map) => map.name_any(),
            watcher::Event::InitDone => "done".to_owned(),
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(told, ["init", "first", "done"]);
    assert_eq!(store.state().len(), 1);
    maps.create(&post, &map("second")).await.unwrap();
    let applied = events.try_next().await.unwrap();
    assert!(matches!(applied, Some(watcher::Event::Apply(map)) if map.name_any() == "second"));
    assert_eq!(store.state().len(), 2);
    for name in ["first", "second"] {
        maps.delete(name, &DeleteParams::default()).await.unwrap();
        let deleted = events.try_next().await.unwrap();
        assert!(matches!(deleted, Some(watcher::Event::Delete(map)) if map.name_any() == name));
    }
    assert!(store.state().is_empty());
}

async fn execs(pods: &Api<Pod>) {
    let params = AttachParams::default().stdin(true).stderr(true);
    let script = "read line; echo got $line; echo a problem >&2; exit 3";
    let mut process = pods.exec("web", ["sh", "-c", script], &params).await.unwrap();
    process.stdin().unwrap().write_all(b"a line\n").await.unwrap();
    let (mut said, mut complained) = (String::new(), String::new());
    process.stdout().unwrap().read_to_string(&mut said).await.unwrap();
    process.stderr().unwrap().read_to_string(&mut complained).await.unwrap();
    assert_eq!((said.as_str(), complained.as_str()), ("got a line\n", "a problem\n"));
    let status = process.take_status().unwrap().await.expect("a status");
    assert_eq!(
        (status.status.as_deref(), status.reason.as_deref()),
        (Some("Failure"), Some("NonZeroExitCode"))
    );
    let cause = &status.details.unwrap().causes.unwrap()[0];
    assert_eq!((cause.reason.as_deref(), cause.message.as_deref()), (Some("ExitCode"), Some("3")));
    process.join().await.unwrap();

    let mut process = pods.exec("web", ["cat", "/www/index.html"], &AttachParams::default()).await.unwrap();
    let mut page = String::new();
    process.stdout().unwrap().read_to_string(&mut page).await.unwrap();
    assert_eq!(page, "page\n");
    let status = process.take_status().unwrap().await.expect("a status");
    assert_eq!(status.status.as_deref(), Some("Success"));

    let missing = pods.exec("none", ["sh"], &AttachParams::default()).await;
    assert!(missing.is_err(), "there is no such pod");
}

async fn attaches(pods: &Api<Pod>) {
    let echo = "while read line; do echo got $line; done";
    run(pods, "echo", json!({"image": IMAGE, "stdin": true, "command": ["sh", "-c", echo]})).await;
    let mut process = pods.attach("echo", &AttachParams::default().stdin(true).stderr(false)).await.unwrap();
    process.stdin().unwrap().write_all(b"a line\n").await.unwrap();
    let mut said = [0; 11];
    process.stdout().unwrap().read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"got a line\n");
    process.abort();
}

async fn forwards(pods: &Api<Pod>) {
    let mut forwarder = pods.portforward("web", &[8080]).await.unwrap();
    let mut stream = forwarder.take_stream(8080).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1") && answer.ends_with("\r\n\r\npage\n"), "{answer}");

    // Nobody listens there, and the client gets an error.
    let mut forwarder = pods.portforward("web", &[9]).await.unwrap();
    let problem = forwarder.take_error(9).unwrap().await.expect("an error");
    assert!(problem.contains("connection refused") || problem.contains("Connection refused"), "{problem}");
}

async fn follows(pods: &Api<Pod>) {
    run(pods, "ticks", json!({"image": TOOLS, "args": ["tick", "20", "--count=5"]})).await;
    let follow = LogParams { follow: true, ..Default::default() };
    let lines = pods.log_stream("ticks", &follow).await.unwrap().lines();
    let lines: Vec<String> = lines.try_collect().await.unwrap();
    assert_eq!(lines, ["tick 0", "tick 1", "tick 2", "tick 3", "tick 4"]);
}
