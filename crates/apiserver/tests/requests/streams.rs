//! Lists and watches that are made piece by piece and shared.

use crate::world::*;
use ferrite_apiserver::Serving;
use ferrite_json::{Value, json};
use http_body_util::BodyExt;
use std::io::Read;
use std::time::Duration;

/// Objects that together are far larger than a piece of a list.
async fn with_large_maps(count: usize) -> World {
    let world = World::start().await;
    for number in 0..count {
        let data = json!({"k": format!("{number}").repeat(4000)});
        let mut map = config_map(&format!("m{number:03}"), data);
        map["metadata"]["labels"]["half"] = (number % 2).to_string().into();
        assert_eq!(world.post(MAPS, &map).await.code, 201);
    }
    world
}

fn items(list: &Value) -> usize {
    list["items"].as_array().map_or(0, Vec::len)
}

#[tokio::test]
async fn a_large_list_is_the_same_in_every_representation() {
    let world = with_large_maps(60).await;
    let path = format!("{MAPS}?labelSelector=half%3D1");
    let plain = world.get(&path).await;
    assert!(plain.bytes.len() > 200 << 10);
    assert!(plain.headers.get("content-length").is_none());
    let list = plain.json();
    assert_eq!((items(&list), &list["kind"]), (30, &json!("ConfigMapList")));

    let gzip = world.send("GET", &path, &[("accept-encoding", "gzip")], b"").await;
    assert_eq!(gzip.header("content-encoding"), "gzip");
    let mut unpacked = Vec::new();
    flate2::read::GzDecoder::new(&*gzip.bytes).read_to_end(&mut unpacked).expect("gzip");
    assert_eq!(unpacked, plain.bytes);

    let accept = |accept: &'static str| [("accept", accept)];
    let protobuf = world.send("GET", &path, &accept("application/vnd.kubernetes.protobuf"), b"").await;
    let decoded = ferrite_api::codec::protobuf::decode(&protobuf.bytes).expect("protobuf").expect("a kind");
    assert_eq!(protobuf.bytes, ferrite_api::codec::protobuf::encode(&list).expect("encodes"));
    assert_eq!(items(&decoded), 30);

    let pretty = world.get(&format!("{path}&pretty=1")).await;
    assert_eq!(pretty.json(), list);
    let yaml = world.send("GET", &path, &accept("application/yaml"), b"").await;
    assert!(yaml.bytes.starts_with(b"apiVersion: v1\n"));

    for format in ["application/json", "application/vnd.kubernetes.protobuf"] {
        let accept = format!("{format};as=PartialObjectMetadataList;v=v1;g=meta.k8s.io");
        let partial = world.send("GET", &path, &[("accept", &accept)], b"").await;
        let partial = match format {
            "application/json" => partial.json(),
            _ => ferrite_api::codec::protobuf::decode(&partial.bytes).expect("protobuf").expect("a kind"),
        };
        assert_eq!(
            (items(&partial), &partial["kind"]),
            (30, &json!("PartialObjectMetadataList")),
            "{accept}"
        );
        assert_eq!(partial["items"][7]["metadata"]["name"], list["items"][7]["metadata"]["name"], "{accept}");
        assert_eq!(partial["metadata"]["resourceVersion"], list["metadata"]["resourceVersion"], "{accept}");
    }
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let table = world.send("GET", &format!("{path}&includeObject=Object"), &accept(table), b"").await.json();
    assert_eq!(table["rows"].as_array().map(Vec::len), Some(30));
    assert_eq!(table["rows"][3]["object"]["data"], list["items"][3]["data"]);
    assert_eq!(table["columnDefinitions"][0]["name"], "Name");
}

#[tokio::test]
async fn a_list_that_nobody_reads_is_cut_off() {
    let world = with_large_maps(60).await;
    let mut body = world.open(MAPS).await.into_body();
    assert!(body.frame().await.expect("a frame").is_ok());
    tokio::time::pause();
    tokio::time::sleep(Duration::from_secs(61)).await;
    let rest = body.collect().await;
    assert!(rest.is_err(), "the client must see that something is missing");
}

fn events(bytes: &[u8]) -> Vec<(String, String)> {
    let text =
        |event: &Value, p: &str| event.pointer(p).and_then(Value::as_str).unwrap_or_default().to_owned();
    bytes
        .split(|b| *b == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            let event: Value = ferrite_json::from_slice(line).expect("an event");
            (text(&event, "/type"), text(&event, "/object/metadata/name"))
        })
        .collect()
}

async fn metric(world: &World, name: &str) -> f64 {
    let text = world.get("/metrics").await;
    let text = String::from_utf8_lossy(&text.bytes).into_owned();
    let line = text.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect("a number")
}

#[tokio::test]
async fn watchers_are_told_alike_and_share_the_work() {
    let world = World::start().await;
    let version = world.version().await;
    let mut watchers = Vec::new();
    for number in 0..50 {
        let selector = if number % 2 == 0 { "t%3Dx" } else { "t%3Dy" };
        let path = format!("{MAPS}?watch=1&resourceVersion={version}&labelSelector={selector}");
        watchers.push(world.open(&path).await.into_body());
    }
    assert_eq!(metric(&world, "apiserver_longrunning_requests").await, 50.0);
    let before = metric(&world, "ferrite_watch_encodings_total").await;
    world.post(MAPS, &config_map("a", json!({}))).await;
    // The object moves from one selection to the other.
    world.patch("merge", &format!("{MAPS}/a"), &json!({"metadata": {"labels": {"t": "y"}}})).await;
    world.delete(&format!("{MAPS}/a")).await;
    for (number, mut body) in watchers.into_iter().enumerate() {
        let mut seen = Vec::new();
        while events(&seen).len() < 2 {
            let frame = body.frame().await.expect("a frame").expect("a frame");
            seen.extend_from_slice(&frame.into_data().expect("data"));
        }
        let told: Vec<String> = events(&seen).into_iter().map(|(type_, _)| type_).collect();
        assert_eq!(told, ["ADDED", "DELETED"], "watcher {number}");
    }
    // Added and left for the one half, came in and deleted for the other.
    let encodings = metric(&world, "ferrite_watch_encodings_total").await - before;
    assert_eq!(encodings, 4.0);
    assert_eq!(metric(&world, "apiserver_longrunning_requests").await, 0.0);
}

#[tokio::test]
async fn the_initial_state_ends_with_a_bookmark() {
    let world = with_large_maps(20).await;
    let path = format!(
        "{MAPS}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=1"
    );
    let reply = world.get(&path).await;
    let told = events(&reply.bytes);
    assert_eq!(told.len(), 21);
    assert!(told[..20].iter().all(|(type_, _)| type_ == "ADDED"));
    assert_eq!(told[20].0, "BOOKMARK");
    let last: Value =
        ferrite_json::from_slice(reply.bytes.split(|b| *b == b'\n').nth(20).expect("a line")).expect("JSON");
    assert_eq!(last["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
}

#[tokio::test]
async fn a_watcher_learns_its_position_every_minute_and_before_the_end() {
    let world = World::start().await;
    let version = world.version().await;
    tokio::time::pause();
    let reply = world
        .get(&format!("{MAPS}?watch=1&allowWatchBookmarks=true&timeoutSeconds=100&resourceVersion={version}"))
        .await;
    let told = events(&reply.bytes);
    assert_eq!(told.iter().filter(|(type_, _)| type_ == "BOOKMARK").count(), 2, "{told:?}");
    let silent = world.get(&format!("{MAPS}?watch=1&timeoutSeconds=100&resourceVersion={version}")).await;
    assert_eq!(events(&silent.bytes), []);
}

#[tokio::test]
async fn versions_from_before_the_cluster_are_too_old() {
    let world = World::start().await;
    let reply = world.get(&format!("{MAPS}?watch=1&resourceVersion=1&timeoutSeconds=1")).await;
    let event = reply.json();
    assert_eq!((&event["type"], &event["object"]["code"]), (&json!("ERROR"), &json!(410)));
}

#[tokio::test]
async fn too_many_requests_are_turned_away() {
    let serving = Serving { max_mutating_requests_inflight: 1, flow_control: false, ..Serving::default() };
    let world = World::start_with(serving).await;
    let body = World::endless_body();
    let user = world.as_user(ferrite_apiserver::User::new("somebody", ["everybody"]));
    let waiting = world.begin("POST", MAPS, body);
    let mut waiting = Box::pin(waiting);
    assert!(futures_util::poll!(&mut waiting).is_pending());
    let refused = user.post(MAPS, &config_map("a", json!({}))).await;
    assert_eq!((refused.code, refused.header("retry-after")), (429, "1"));
    assert_eq!(refused.bytes, "Too many requests, please try again later.\n");
    assert_eq!(user.get(MAPS).await.code, 403, "reading has a limit of its own");
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201, "administrators are exempt");
}

#[tokio::test]
async fn a_slow_body_holds_no_place() {
    let serving = Serving { max_mutating_requests_inflight: 1, flow_control: false, ..Serving::default() };
    let world = World::start_with(serving).await;
    let user = world.as_user(ferrite_apiserver::User::new("somebody", ["everybody"]));
    let (asked, is_asked) = tokio::sync::oneshot::channel();
    let (send, rest) = tokio::sync::oneshot::channel::<String>();
    let body = futures_util::stream::once(async move {
        asked.send(()).expect("somebody waits for this");
        let text = rest.await.expect("the rest");
        Ok::<_, ferrite_apiserver::BoxError>(http_body::Frame::data(bytes::Bytes::from(text)))
    });
    let slow = world.begin("POST", MAPS, http_body_util::StreamBody::new(body).boxed_unsync());
    let others = async {
        is_asked.await.expect("the body is read");
        // This user may not, but learns so only with a place.
        assert_eq!(user.post(MAPS, &config_map("a", json!({}))).await.code, 403);
        send.send(config_map("slow", json!({})).to_string()).expect("the body is still read");
    };
    let (slow, ()) = tokio::join!(slow, others);
    assert_eq!(slow.code, 201, "{}", slow.json());
    assert_eq!(user.post(MAPS, &config_map("a", json!({}))).await.code, 403, "the place is free again");
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_ended() {
    let world = World::start().await;
    tokio::time::pause();
    for (query, code, message) in [
        ("", 504, "Timeout: request did not complete within the allotted timeout"),
        ("?timeout=5s", 504, "Timeout: request did not complete within the allotted timeout"),
        ("?timeout=x", 400, "invalid timeout specified in the request URL - time: invalid duration \"x\""),
    ] {
        let reply = world.begin("POST", &format!("{MAPS}{query}"), World::endless_body()).await;
        assert_eq!((reply.code, reply.at("/message")), (code, json!(message)), "{query}");
    }
}

#[tokio::test]
async fn a_server_that_stops_says_so_first() {
    let serving = Serving { shutdown_delay: Duration::from_secs(5), ..Serving::default() };
    let world = World::start_with(serving).await;
    tokio::time::pause();
    let watch = world.open(&format!("{MAPS}?watch=1")).await.into_body();
    let stopping = world.stop();
    tokio::pin!(stopping);
    assert!(futures_util::poll!(&mut stopping).is_pending());
    let ready = world.get("/readyz?verbose").await;
    assert_eq!(ready.code, 500);
    assert!(String::from_utf8_lossy(&ready.bytes).contains("[-]shutdown failed: reason withheld\n"));
    assert_eq!(world.get("/livez").await.code, 200);
    assert_eq!(world.get(MAPS).await.code, 200, "it serves on while others learn of it");
    stopping.await;
    watch.collect().await.expect("the watch ends in an orderly way");
}

#[tokio::test]
async fn a_large_list_is_not_made_as_a_whole() {
    let world = World::start().await;
    for number in 0..10 {
        let data = json!({"k": "x".repeat(500 << 10)});
        assert_eq!(world.post(MAPS, &config_map(&format!("m{number}"), data)).await.code, 201);
    }
    let (pretty, page) = ([("accept", "application/json;pretty=1")], format!("{MAPS}?limit=5"));
    let indented = world.send("GET", MAPS, &pretty, b"").await;
    assert_eq!(indented.bytes, world.get(MAPS).await.bytes, "indented JSON is for people");
    assert!(world.send("GET", &page, &pretty, b"").await.bytes.starts_with(b"{\n"));
    let yaml = [("accept", "application/yaml")];
    let refused = world.send("GET", MAPS, &yaml, b"").await;
    let message = String::from_utf8_lossy(&refused.bytes).into_owned();
    assert!(refused.code == 400 && message.contains("ask for JSON"), "{message}");
    assert_eq!(world.send("GET", &page, &yaml, b"").await.code, 200);
}
