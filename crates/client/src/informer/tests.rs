use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Mutex as StdMutex;

use bytes::Bytes;
use ferrite_json::{Value, json};
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body;
use tokio::sync::mpsc;

use super::*;

/// The fake server's response to the next request.
enum Answer {
    List {
        version: &'static str,
        next: Option<&'static str>,
        names: Vec<(&'static str, &'static str)>,
    },
    /// Frames of a watch; with `open` the watch stays open after them.
    Watch {
        frames: Vec<Value>,
        open: bool,
    },
    Status(u16),
}

fn object(name: &str, version: &str) -> Value {
    let uid = name.split('#').nth(1).unwrap_or("1");
    let name = name.split('#').next().unwrap();
    json!({"apiVersion": "v1", "kind": "ConfigMap",
           "metadata": {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": version,
                        "labels": {"odd": format!("{}", version.parse::<u64>().unwrap() % 2)},
                        "managedFields": [{"manager": "x"}]}})
}

fn event(kind: &str, name: &str, version: &str) -> Value {
    json!({"type": kind, "object": object(name, version)})
}

fn bookmark(version: &str) -> Value {
    json!({"type": "BOOKMARK",
           "object": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"resourceVersion": version}}})
}

fn status(code: u16) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "message": "no",
           "reason": if code == 410 { "Expired" } else { "InternalError" }})
}

type ResponseBody = BoxBody<Bytes, Infallible>;

fn lines(frames: Vec<Value>, open: bool) -> ResponseBody {
    let frames = stream::iter(frames.into_iter().map(|frame| {
        let mut line = ferrite_json::to_vec(&frame).unwrap();
        line.push(b'\n');
        Ok(http_body_util::Full::new(Bytes::from(line)))
    }))
    .then(|full: Result<http_body_util::Full<Bytes>, Infallible>| async move {
        Ok(http_body::Frame::data(full.unwrap().collect().await.unwrap().to_bytes()))
    });
    if open {
        BodyExt::boxed(StreamBody::new(frames.chain(stream::pending())))
    } else {
        BodyExt::boxed(StreamBody::new(frames))
    }
}

/// Answers requests in order and records their query strings; further requests wait for ever.
fn server(answers: Vec<Answer>) -> (kube::Client, Arc<StdMutex<Vec<String>>>) {
    let answers = Arc::new(StdMutex::new(VecDeque::from(answers)));
    let requests = Arc::new(StdMutex::new(Vec::new()));
    let log = requests.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let answer = answers.lock().unwrap().pop_front();
        if answer.is_some() {
            log.lock().unwrap().push(request.uri().query().unwrap_or_default().to_owned());
        }
        async move {
            let Some(answer) = answer else { return std::future::pending().await };
            let (code, body) = match answer {
                Answer::List { version, next, names } => {
                    let items: Vec<_> = names.iter().map(|(name, version)| object(name, version)).collect();
                    let list = json!({"apiVersion": "v1", "kind": "ConfigMapList", "items": items,
                                      "metadata": {"resourceVersion": version, "continue": next}});
                    (200, lines(vec![list], false))
                }
                Answer::Watch { frames, open } => (200, lines(frames, open)),
                Answer::Status(code) => (code, lines(vec![status(code)], false)),
            };
            Ok::<_, Infallible>(http::Response::builder().status(code).body(body).unwrap())
        }
    });
    (kube::Client::new(service, "default"), requests)
}

fn list(version: &'static str, names: &[(&'static str, &'static str)]) -> Answer {
    Answer::List { version, next: None, names: names.to_vec() }
}

/// Runs an informer against `answers` and returns the first `count` changes as `+name@version`, `~…`, `-…`.
async fn changes(answers: Vec<Answer>, count: usize) -> (Vec<String>, Vec<String>, Informer<ConfigMap>) {
    let (client, requests) = server(answers);
    let scope = Scope::new();
    let informer = Informer::<ConfigMap>::start(Api::all(client), ListSelector::everything(), &scope);
    let (sender, mut receiver) = mpsc::channel(100);
    informer.subscribe(move |change| {
        let sign = match change {
            Change::Added(_) => '+',
            Change::Updated { .. } => '~',
            Change::Deleted(_) => '-',
        };
        let meta = &change.object().metadata;
        let text =
            format!("{sign}{}@{}", meta.name.as_deref().unwrap(), meta.resource_version.as_deref().unwrap());
        let _ = sender.try_send(text);
    });
    let mut seen = Vec::new();
    for _ in 0..count {
        seen.push(receiver.recv().await.unwrap());
    }
    informer.synced().await;
    scope.shutdown().await;
    let requests = requests.lock().unwrap().clone();
    (seen, requests, informer)
}

#[tokio::test(start_paused = true)]
async fn lists_all_pages_then_watches_from_the_list() {
    let pages = vec![
        Answer::List { version: "5", next: Some("more"), names: vec![("a", "1")] },
        Answer::List { version: "5", next: None, names: vec![("b", "2")] },
        Answer::Watch { frames: vec![event("ADDED", "c", "6"), event("DELETED", "a", "7")], open: true },
    ];
    let (seen, requests, informer) = changes(pages, 4).await;
    assert_eq!(seen, ["+a@1", "+b@2", "+c@6", "-a@7"]);
    assert!(requests[0].contains("limit=500"), "{requests:?}");
    assert!(requests[1].contains("continue=more"), "{requests:?}");
    assert!(requests[2].contains("resourceVersion=5") && requests[2].contains("allowWatchBookmarks=true"));
    assert_eq!(informer.list().len(), 2);
    assert_eq!(informer.list()[0].metadata.managed_fields, None);
}

#[tokio::test(start_paused = true)]
async fn resumes_from_the_last_event_or_bookmark_and_ignores_what_it_holds() {
    let (seen, requests, _) = changes(
        vec![
            list("5", &[("a", "1")]),
            Answer::Watch { frames: vec![event("MODIFIED", "a", "6"), bookmark("9")], open: false },
            Answer::Watch {
                frames: vec![event("MODIFIED", "a", "6"), event("ADDED", "b", "10")],
                open: false,
            },
            Answer::Watch { frames: vec![event("ADDED", "c", "11")], open: true },
        ],
        4,
    )
    .await;
    assert_eq!(seen, ["+a@1", "~a@6", "+b@10", "+c@11"]);
    assert!(requests[2].contains("resourceVersion=9"), "{requests:?}");
    assert!(requests[3].contains("resourceVersion=10"), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn a_compacted_revision_relists_and_tells_the_difference() {
    for gone in [
        Answer::Status(410),
        Answer::Watch { frames: vec![json!({"type": "ERROR", "object": status(410)})], open: true },
    ] {
        let (seen, requests, informer) = changes(
            vec![
                list("5", &[("a", "1"), ("b", "2"), ("c", "3"), ("d#1", "4")]),
                gone,
                list("20", &[("a", "1"), ("b", "12"), ("d#2", "14"), ("e", "15")]),
                Answer::Watch { frames: vec![event("ADDED", "f", "21")], open: true },
            ],
            10,
        )
        .await;
        assert_eq!(
            seen,
            ["+a@1", "+b@2", "+c@3", "+d@4", "-c@3", "~b@12", "-d@4", "+d@14", "+e@15", "+f@21"]
        );
        assert!(requests[3].contains("resourceVersion=20"), "{requests:?}");
        assert_eq!(informer.len(), 5);
    }
}

#[tokio::test(start_paused = true)]
async fn errors_back_off_and_are_survived() {
    let begun = tokio::time::Instant::now();
    let (seen, requests, _) = changes(
        vec![
            Answer::Status(503),
            list("5", &[("a", "1")]),
            Answer::Status(500),
            Answer::Watch { frames: vec![], open: false },
            Answer::Watch { frames: vec![event("ADDED", "b", "6")], open: true },
        ],
        2,
    )
    .await;
    assert_eq!(seen, ["+a@1", "+b@6"]);
    assert!(requests[4].contains("resourceVersion=5"), "the list was still good: {requests:?}");
    // 0.8 s, 1.6 s and 3.2 s, each up to doubled by jitter.
    let waited = begun.elapsed().as_secs_f64();
    assert!((5.6..=11.3).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_compacted_between_pages_is_read_in_one_piece() {
    let (seen, requests, _) = changes(
        vec![
            Answer::List { version: "5", next: Some("more"), names: vec![("a", "1")] },
            Answer::Status(410),
            list("9", &[("a", "1"), ("b", "2")]),
        ],
        2,
    )
    .await;
    assert_eq!(seen, ["+a@1", "+b@2"]);
    assert!(!requests[2].contains("limit="), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn indices_follow_changes_and_late_subscribers_see_everything() {
    let odd = |map: &ConfigMap| map.metadata.labels.iter().flatten().map(|(_, v)| v.clone()).collect();
    let (client, _) = server(vec![
        list("5", &[("a", "1"), ("b", "2")]),
        Answer::Watch { frames: vec![event("MODIFIED", "a", "6"), event("DELETED", "b", "7")], open: true },
    ]);
    let scope = Scope::new();
    let informers = crate::Informers::new(client, scope.clone());
    let informer = informers.get::<ConfigMap>();
    informer.add_index("odd", odd);
    let (sender, mut receiver) = mpsc::channel(9);
    informers.get::<ConfigMap>().subscribe(move |change| {
        let _ = sender.try_send(matches!(change, Change::Deleted(_)));
    });
    while receiver.recv().await != Some(true) {}
    let names = |value| -> Vec<_> {
        informer.by_index("odd", value).iter().map(|map| map.metadata.name.clone().unwrap()).collect()
    };
    assert_eq!(names("0"), ["a"]);
    assert!(names("1").is_empty());
    assert_eq!(informer.list_in("ns").len(), 1);
    assert!(informer.list_in("other").is_empty());
    let late = Arc::new(StdMutex::new(0));
    let count = late.clone();
    informer.subscribe(move |_| *count.lock().unwrap() += 1);
    assert_eq!(*late.lock().unwrap(), 1);
    scope.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn handlers_end_with_their_session() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let (_, _, informer) = changes(vec![list("5", &[("a", "1")])], 1).await;
    let (session, calls) = (Scope::new(), Arc::new(AtomicUsize::new(0)));
    let counted = calls.clone();
    let own = informer.in_session(Some(session.token().clone()));
    own.subscribe(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    let apply = |version: &str| {
        reflector::Sink::apply(
            &*informer.shared,
            RawObject::parse(&object("a", version).to_string()).unwrap(),
        );
    };
    apply("6");
    assert_eq!(calls.load(Ordering::SeqCst), 2, "the object that was there, and its change");
    session.cancel();
    apply("7");
    assert_eq!(calls.load(Ordering::SeqCst), 2, "nothing after the session");
    assert_eq!(Arc::strong_count(&calls), 2);
    informer.subscribe(|_| {});
    assert_eq!(Arc::strong_count(&calls), 1, "the handler is dropped");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_object_is_reported_in_its_final_state() {
    // The label follows the version: even versions differ from the state before by more than the version.
    for (last, odd) in [("7", "1"), ("8", "0")] {
        let (_, _, informer) = changes(vec![list("5", &[("a", "1")])], 1).await;
        let seen = Arc::new(StdMutex::new(Vec::new()));
        let reported = seen.clone();
        informer.subscribe(move |change| {
            if let Change::Deleted(object) = change {
                reported.lock().unwrap().push(object.metadata.clone());
            }
        });
        let (raw, before) = (RawObject::parse(&object("a", last).to_string()).unwrap(), informer.list());
        reflector::Sink::remove(&*informer.shared, raw);
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].resource_version.as_deref(), Some(last));
        assert_eq!(seen[0].labels.as_ref().unwrap()["odd"], odd);
        assert_eq!(before[0].metadata.resource_version.as_deref(), Some("1"), "other readers keep theirs");
        assert!(informer.is_empty());
    }
}
