//! Tunnels of agents, good ones and hostile ones.

use crate::network::Network;
use crate::world::*;
use bytes::Bytes;
use ferrite_api::Cidr;
use ferrite_apiserver::tunnel::{PATH, POD_STREAMS, PROTOCOL, STREAMS};
use ferrite_apiserver::{Config, User};
use ferrite_json::json;
use ferrite_pki::{Authority, Identity, Purpose, Subject};
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::BoxBody};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The address of all nodes. Nobody has it: what arrives came through a tunnel.
const ADDRESS: &str = "192.0.2.50";
/// Addresses of pods. Nobody has them, either.
const PODS_RANGE: &str = "198.51.100.0/24";

/// Nodes, and the ranges that they say they have. The first two have theirs by right; the others came later.
const NODES: [(&str, &str); 5] = [
    ("n1", "198.51.100.0/26"),
    ("n2", "198.51.100.64/26"),
    ("greedy", "198.51.100.0/24"),
    ("thief", "198.51.100.0/27"),
    ("stranger", "203.0.113.0/24"),
];

struct Fleet {
    network: Network,
    kubelets: Authority,
}

impl Fleet {
    async fn start() -> Self {
        let kubelets = Authority::create("kubelets").expect("an authority");
        let client = ferrite_pki::client_config(kubelets.certificate(), None).expect("a configuration");
        let world = World::start_as_told(|config| {
            let pod_ranges = vec![Cidr::parse(PODS_RANGE).expect("a range")];
            Config { kubelet_client: Some(Arc::new(client)), pod_ranges, ..config }
        })
        .await;
        for (node, range) in NODES {
            let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node},
                "spec": {"podCIDR": range, "podCIDRs": [range]}});
            assert_eq!(world.post("/api/v1/nodes", &object).await.code, 201);
            let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": ADDRESS}]}});
            let path = format!("/api/v1/nodes/{node}/status");
            assert_eq!(world.patch("merge", &path, &status).await.code, 200);
        }
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        world.post("/api/v1/namespaces/default/serviceaccounts", &account).await;
        let group = "rbac.authorization.k8s.io";
        let role = json!({
            "apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": {"name": "tunnel"},
            "rules": [{"nonResourceURLs": [PATH], "verbs": ["get"]}],
        });
        // Everybody may ask, so that the refusals below are the tunnel's own.
        let binding = json!({
            "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "tunnel"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "tunnel"},
            "subjects": [{"apiGroup": group, "kind": "Group", "name": "system:authenticated"}],
        });
        for (plural, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
            assert_eq!(world.post(&format!("/apis/{group}/v1/{plural}"), &object).await.code, 201);
        }
        Self { network: Network::serve(world).await, kubelets }
    }

    fn identity(&self, user: &str, group: Option<&str>) -> Identity {
        let subject = Subject::client(user, group);
        self.network.authority.issue(&subject, Purpose::Client).expect("a certificate")
    }

    /// Asks for a tunnel, and returns the upgraded connection or the code of the refusal.
    async fn ask(&self, identity: Option<&Identity>, headers: &[(&str, &str)]) -> Result<Upgraded, u16> {
        let ca = self.network.authority.certificate();
        let mut tls = ferrite_pki::client_config(ca, identity).expect("a configuration");
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        let stream = TcpStream::connect(self.network.address).await.expect("a connection");
        let name = "localhost".try_into().expect("a name");
        let stream = TlsConnector::from(Arc::new(tls)).connect(name, stream).await.expect("a handshake");
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("a handshake");
        tokio::spawn(connection.with_upgrades());
        let mut request = Request::get(PATH).header("host", "localhost");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = sender
            .send_request(request.body(Empty::<Bytes>::new()).expect("a request"))
            .await
            .expect("an answer");
        match answer.status() {
            StatusCode::SWITCHING_PROTOCOLS => Ok(hyper::upgrade::on(answer).await.expect("an upgrade")),
            other => Err(other.as_u16()),
        }
    }

    /// The connection of a user.
    async fn user(&self, name: &str, group: &str) -> SendRequest<Empty<Bytes>> {
        let (ca, identity) = (self.network.authority.certificate(), self.identity(name, Some(group)));
        let mut tls = ferrite_pki::client_config(ca, Some(&identity)).expect("a configuration");
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let stream = TcpStream::connect(self.network.address).await.expect("a connection");
        let server = "localhost".try_into().expect("a name");
        let stream = TlsConnector::from(Arc::new(tls)).connect(server, stream).await.expect("a handshake");
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                .await
                .expect("a handshake");
        // Ends with the test.
        tokio::spawn(connection);
        sender
    }

    /// A tunnel of a node whose agent answers as `agent` does. Ends when the server ends it.
    async fn tunnel(&self, node: &str, agent: Agent) -> JoinHandle<()> {
        let identity = self.identity(&format!("system:node:{node}"), Some("system:nodes"));
        let upgrade = [("connection", "upgrade"), ("upgrade", PROTOCOL)];
        let connection = self.ask(Some(&identity), &upgrade).await.expect("a tunnel");
        let subject = Subject {
            common_name: format!("system:node:{node}"),
            organization: None,
            names: vec![ADDRESS.into()],
        };
        let serving = self.kubelets.issue(&subject, Purpose::Server).expect("a certificate");
        let tls = ferrite_pki::anonymous_server_config(&serving, &["http/1.1"]).expect("a configuration");
        let (tls, node) = (TlsAcceptor::from(Arc::new(tls)), node.to_owned());
        tokio::spawn(async move {
            let service =
                service_fn(move |request| answer(request, agent.clone(), tls.clone(), node.clone()));
            let mut serve = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            // It would take more than the server asks for.
            serve
                .max_pending_accept_reset_streams(Some(2 * STREAMS as usize))
                .max_concurrent_streams(2 * STREAMS);
            // The server may end it at any time.
            let _ = serve.serve_connection(connection, service).await;
        })
    }

    /// The tunnels that the server has.
    async fn open(&self) -> usize {
        let metrics = self.network.world.get("/metrics").await;
        let text = String::from_utf8(metrics.bytes.to_vec()).expect("text");
        let line = text.lines().find_map(|line| line.strip_prefix("ferrite_apiserver_agent_tunnels "));
        line.map_or(0, |count| count.parse().expect("a number"))
    }

    async fn wait_for_open(&self, count: usize) {
        let reached = async {
            while self.open().await != count {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached).await.expect("the tunnels are there");
    }

    /// A pod that is said to be at an address.
    async fn pod(&self, name: &str, node: &str, address: &str) {
        let world = &self.network.world;
        let mut pod = pod(name);
        pod["spec"]["nodeName"] = json!(node);
        let made = world.post(PODS, &pod).await;
        assert_eq!(made.code, 201, "{}", made.json());
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
        assert_eq!(world.patch("merge", &format!("{PODS}/{name}/status"), &status).await.code, 200);
    }

    /// The answer of a pod through the server's proxy.
    async fn proxied(&self, path: &str) -> (u16, String) {
        let answer = self.network.world.get(path).await;
        (answer.code, String::from_utf8(answer.bytes.to_vec()).expect("text"))
    }

    async fn read(&self, node: &str, path: &str) -> Result<String, String> {
        let read = self.network.world.server();
        let read = read.read_kubelet(node, path, 1 << 20).await;
        read.map(|bytes| String::from_utf8(bytes.to_vec()).expect("text")).map_err(|status| status.message)
    }
}

/// The behaviour of an agent.
#[derive(Clone)]
enum Agent {
    Good,
    /// Refuses every stream.
    Refuses,
    /// Never answers, and counts.
    Silent(Arc<AtomicUsize>),
    /// Takes streams and leads them nowhere.
    Deaf,
    /// Answers for pods as they would, whatever it is asked for, and as its kubelet. Notes the addresses.
    Pods(Arc<Mutex<Vec<String>>>),
    /// Its kubelet answers; streams to pods are never answered. Counts them.
    SilentPods(Arc<AtomicUsize>),
    /// Cannot connect to pods.
    NoPods,
    /// Its pods answer; streams to its kubelet are never answered. Counts them.
    SilentKubelet(Arc<AtomicUsize>),
}

async fn answer(
    request: Request<Incoming>,
    agent: Agent,
    tls: TlsAcceptor,
    node: String,
) -> Result<Response<Empty<Bytes>>, Infallible> {
    assert_eq!(request.method().as_str(), "CONNECT");
    let asked = request.uri().to_string();
    let for_kubelet = asked == format!("{ADDRESS}:10250");
    match agent {
        Agent::Pods(_) | Agent::SilentKubelet(_) if !for_kubelet => {
            if let Agent::Pods(noted) = agent {
                noted.lock().expect("no panic").push(asked.clone());
            }
            tokio::spawn(async move {
                let stream = hyper::upgrade::on(request).await.expect("a stream");
                let service = service_fn(move |request| kubelet(request, format!("{node} {asked}")));
                let http = hyper::server::conn::http1::Builder::new();
                let _ = http.serve_connection(stream, service).await;
            });
        }
        Agent::SilentPods(asked) if !for_kubelet => {
            asked.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
        Agent::NoPods if !for_kubelet => {
            let mut failure = Response::new(Empty::new());
            *failure.status_mut() = StatusCode::BAD_GATEWAY;
            return Ok(failure);
        }
        _ if !for_kubelet => panic!("asked for {asked}"),
        Agent::Refuses => {
            let mut refusal = Response::new(Empty::new());
            *refusal.status_mut() = StatusCode::FORBIDDEN;
            return Ok(refusal);
        }
        Agent::Silent(asked) | Agent::SilentKubelet(asked) => {
            asked.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
        Agent::Deaf => {
            tokio::spawn(async move {
                let _stream = hyper::upgrade::on(request).await;
                std::future::pending::<()>().await;
            });
        }
        Agent::Good | Agent::Pods(_) | Agent::SilentPods(_) | Agent::NoPods => {
            tokio::spawn(async move {
                let stream = hyper::upgrade::on(request).await.expect("a stream");
                let Ok(stream) = tls.accept(TokioIo::new(stream)).await else { return };
                let service = service_fn(move |request| kubelet(request, node.clone()));
                let http = hyper::server::conn::http1::Builder::new();
                let _ = http.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    }
    Ok(Response::new(Empty::new()))
}

/// Says its node, or talks without end.
async fn kubelet(
    request: Request<Incoming>,
    node: String,
) -> Result<Response<BoxBody<Bytes, Infallible>>, Infallible> {
    Ok(Response::new(match request.uri().path() {
        "/endless" => {
            let piece = Bytes::from(vec![b'x'; 64 << 10]);
            let pieces = futures_util::stream::repeat_with(move || Ok(http_body::Frame::data(piece.clone())));
            BodyExt::boxed(StreamBody::new(pieces))
        }
        path => Full::new(Bytes::from(format!("{node} {path}"))).boxed(),
    }))
}

#[tokio::test]
async fn tunnels_are_for_nodes_and_each_is_its_own_nodes() {
    let fleet = Fleet::start().await;
    let nodes = Some("system:nodes");
    let upgrade = [("connection", "upgrade"), ("upgrade", PROTOCOL)];
    let as_node = [("impersonate-user", "system:node:n1"), ("impersonate-group", "system:nodes")];
    let node = fleet.identity("system:node:n1", nodes);
    let admin = fleet.identity("admin", Some("system:masters"));
    for (row, identity, headers, code) in [
        ("an administrator", &admin, &upgrade[..], 403),
        ("an administrator as a node", &admin, &[&upgrade[..], &as_node].concat(), 403),
        ("a user with a node's name", &fleet.identity("system:node:n1", None), &upgrade, 403),
        ("a user among nodes", &fleet.identity("jane", nodes), &upgrade, 403),
        ("a node without a name", &fleet.identity("system:node:", nodes), &upgrade, 403),
        ("a node that asks for nothing", &node, &[], 400),
        ("a node that asks for something else", &node, &[("connection", "upgrade"), ("upgrade", "h2c")], 400),
    ] {
        assert_eq!(fleet.ask(Some(identity), headers).await.err(), Some(code), "{row}");
    }
    assert_eq!(fleet.ask(None, &upgrade).await.err(), Some(403), "a stranger");
    let user =
        fleet.network.world.as_user(User::new("system:node:n1", ["system:nodes", "system:authenticated"]));
    assert_eq!(user.send("GET", PATH, &upgrade, b"").await.code, 400, "no connection to upgrade");
    assert_eq!(user.send("POST", PATH, &upgrade, b"").await.code, 403);

    let _one = fleet.tunnel("n1", Agent::Good).await;
    let _two = fleet.tunnel("n2", Agent::Good).await;
    fleet.wait_for_open(2).await;
    assert_eq!(fleet.read("n1", "/a").await, Ok("n1 /a".into()));
    assert_eq!(fleet.read("n2", "/b").await, Ok("n2 /b".into()));
    let proxied = fleet.network.world.get("/api/v1/nodes/n2/proxy/c").await;
    assert_eq!((proxied.code, &proxied.bytes[..]), (200, &b"n2 /c"[..]));
}

#[tokio::test]
async fn the_newest_tunnel_is_used_and_old_ones_end() {
    let fleet = Fleet::start().await;
    let mut tunnels = vec![fleet.tunnel("n1", Agent::Good).await];
    fleet.wait_for_open(1).await;
    // The newest one counts, whatever it does.
    tunnels.push(fleet.tunnel("n1", Agent::Refuses).await);
    fleet.wait_for_open(2).await;
    let refused = fleet.read("n1", "/").await.expect_err("a refusal");
    assert!(refused.contains("the agent of the node answers with 403"), "{refused}");
    // It ends, and the one before it is there.
    tunnels.pop().expect("two").abort();
    fleet.wait_for_open(1).await;
    assert_eq!(fleet.read("n1", "/").await, Ok("n1 /".into()));
    // Of too many the oldest ends.
    let first = tunnels.remove(0);
    for count in 2..=5 {
        tunnels.push(fleet.tunnel("n1", Agent::Good).await);
        fleet.wait_for_open(count.min(4)).await;
    }
    tokio::time::timeout(Duration::from_secs(20), first).await.expect("the oldest ends").expect("in order");
    assert_eq!(fleet.read("n1", "/").await, Ok("n1 /".into()));
    tunnels.iter().for_each(JoinHandle::abort);
    fleet.wait_for_open(0).await;
}

#[tokio::test]
async fn a_stream_that_nobody_reads_blocks_no_other() {
    let fleet = Fleet::start().await;
    let _tunnel = fleet.tunnel("n1", Agent::Good).await;
    fleet.wait_for_open(1).await;
    let mut unread = Vec::new();
    for _ in 0..20 {
        let answer = fleet.network.world.open("/api/v1/nodes/n1/proxy/endless").await;
        assert_eq!(answer.status(), StatusCode::OK);
        unread.push(answer);
    }
    let quick = tokio::time::timeout(Duration::from_secs(20), fleet.read("n1", "/quick")).await;
    assert_eq!(quick.expect("in time"), Ok("n1 /quick".into()));
}

#[tokio::test]
async fn a_silent_agent_holds_nothing_for_long() {
    let fleet = Fleet::start().await;
    let asked = Arc::new(AtomicUsize::new(0));
    let _silent = fleet.tunnel("n1", Agent::Silent(Arc::clone(&asked))).await;
    let _deaf = fleet.tunnel("n2", Agent::Deaf).await;
    fleet.wait_for_open(2).await;
    let most = usize::try_from(STREAMS).expect("a number");
    let reads = join_all((0..most + 50).map(|_| fleet.read("n1", "/")));
    let others = async {
        let deaf = fleet.read("n2", "/").await;
        let _good = fleet.tunnel("n2", Agent::Good).await;
        fleet.wait_for_open(3).await;
        (deaf, fleet.read("n2", "/").await)
    };
    let bounded = async {
        while asked.load(Ordering::SeqCst) < most {
            tokio::task::yield_now().await;
        }
        // Another request comes and goes: nothing of those that wait has arrived meanwhile.
        assert_eq!(fleet.network.world.get("/version").await.code, 200);
        assert_eq!(asked.load(Ordering::SeqCst), most, "streams are bounded");
    };
    let (results, (deaf, good), ()) = tokio::join!(reads, others, bounded);
    for result in results.into_iter().chain([deaf]) {
        let error = result.expect_err("nobody answers");
        assert!(error.contains("timed out"), "{error}");
    }
    assert_eq!(good, Ok("n2 /".into()));
}

#[tokio::test]
async fn pods_are_reached_through_their_own_node_whatever_others_say() {
    let fleet = Fleet::start().await;
    let mut noted = Vec::new();
    let mut tunnels = Vec::new();
    for (node, _) in NODES {
        let notes = Arc::new(Mutex::new(Vec::new()));
        tunnels.push(fleet.tunnel(node, Agent::Pods(Arc::clone(&notes))).await);
        noted.push(notes);
    }
    fleet.wait_for_open(NODES.len()).await;
    fleet.pod("one", "n1", "198.51.100.5").await;
    fleet.pod("two", "n2", "198.51.100.70").await;
    // A node may say that a pod of its own is at any address. It is still another node that has the address.
    fleet.pod("false", "thief", "198.51.100.6").await;
    for (path, said) in [
        ("one:8080/proxy/a", "n1 198.51.100.5:8080 /a"),
        ("two:81/proxy/b?q", "n2 198.51.100.70:81 /b"),
        ("false:82/proxy/c", "n1 198.51.100.6:82 /c"),
    ] {
        let answer = fleet.proxied(&format!("{PODS}/{path}")).await;
        assert_eq!(answer, (200, said.to_owned()), "{path}");
    }
    // A Service goes where its endpoints are.
    let world = &fleet.network.world;
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"},
        "spec": {"ports": [{"port": 80, "targetPort": 8080}]}});
    assert_eq!(world.post("/api/v1/namespaces/default/services", &service).await.code, 201);
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "s", "labels": {"kubernetes.io/service-name": "s"}},
        "endpoints": [{"addresses": ["198.51.100.70"]}], "ports": [{"name": "", "port": 8080}]});
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    assert_eq!(world.post(slices, &slice).await.code, 201);
    let answer = fleet.proxied("/api/v1/namespaces/default/services/s:80/proxy/d").await;
    assert_eq!(answer, (200, "n2 198.51.100.70:8080 /d".to_owned()));
    let asked: Vec<Vec<String>> = noted.iter().map(|notes| notes.lock().expect("no panic").clone()).collect();
    let expected: [&[&str]; 5] = [
        &["198.51.100.5:8080", "198.51.100.6:82"],
        &["198.51.100.70:81", "198.51.100.70:8080"],
        &[],
        &[],
        &[],
    ];
    assert_eq!(asked, expected);
    // Kubelets are reached as ever.
    assert_eq!(fleet.read("thief", "/x").await, Ok("thief /x".into()));
}

#[tokio::test]
async fn pods_leave_room_for_the_kubelet() {
    let fleet = Fleet::start().await;
    let asked = Arc::new(AtomicUsize::new(0));
    let _silent = fleet.tunnel("n1", Agent::SilentPods(Arc::clone(&asked))).await;
    let _without = fleet.tunnel("n2", Agent::NoPods).await;
    fleet.wait_for_open(2).await;
    fleet.pod("one", "n1", "198.51.100.5").await;
    fleet.pod("two", "n2", "198.51.100.70").await;
    let (code, text) = fleet.proxied(&format!("{PODS}/two:80/proxy/")).await;
    assert_eq!(code, 503);
    let why = "the agent of node n2 cannot connect to the pod at 198.51.100.70:80: 502 Bad Gateway";
    assert!(text.contains(why), "{text}");
    let most = usize::try_from(POD_STREAMS).expect("a number");
    let path = format!("{PODS}/one:80/proxy/");
    let flood = join_all((0..most + 50).map(|_| fleet.proxied(&path)));
    let meanwhile = async {
        while asked.load(Ordering::SeqCst) < most {
            tokio::task::yield_now().await;
        }
        assert_eq!(fleet.read("n1", "/k").await, Ok("n1 /k".into()));
        assert_eq!(asked.load(Ordering::SeqCst), most, "streams to pods are bounded");
    };
    let (answers, ()) = tokio::join!(flood, meanwhile);
    for (code, text) in answers {
        assert!(code == 503 && text.contains("i/o timeout"), "{code} {text}");
    }
}

#[tokio::test]
async fn users_leave_room_for_one_another_and_for_the_server() {
    const EACH: usize = 64;
    const ALL: usize = 192;
    let fleet = Fleet::start().await;
    let asked = Arc::new(AtomicUsize::new(0));
    let _agent = fleet.tunnel("n1", Agent::SilentKubelet(Arc::clone(&asked))).await;
    fleet.wait_for_open(1).await;
    fleet.pod("one", "n1", "198.51.100.5").await;
    let world = &fleet.network.world;
    let group = "rbac.authorization.k8s.io";
    let role = json!({"metadata": {"name": "logs"},
        "rules": [{"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]}]});
    let binding = json!({"metadata": {"name": "logs"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "logs"},
        "subjects": [{"apiGroup": group, "kind": "Group", "name": "staff"}]});
    for (plural, object) in [("roles", role), ("rolebindings", binding)] {
        let path = format!("/apis/{group}/v1/namespaces/default/{plural}");
        assert_eq!(world.post(&path, &object).await.code, 201);
    }
    // Users come over the network: parts of this process have no limits.
    let users = join_all(["a", "b", "c", "d"].map(|name| fleet.user(name, "staff"))).await;
    let url = format!("https://localhost{PODS}/one/log");
    let read = |user: &SendRequest<Empty<Bytes>>| {
        let mut user = user.clone();
        let request = Request::get(&url).body(Empty::new()).expect("a request");
        async move { user.send_request(request).await.expect("an answer").status() }
    };
    let flood = join_all(users.iter().flat_map(|user| std::iter::repeat_n(user, EACH + 5)).map(read));
    let meanwhile = async {
        while asked.load(Ordering::SeqCst) < ALL {
            tokio::task::yield_now().await;
        }
        // The server's own calls, such as those to webhooks, and an administrator's have room left.
        let answer = fleet.proxied(&format!("{PODS}/one:80/proxy/a")).await;
        assert_eq!(answer, (200, "n1 198.51.100.5:80 /a".to_owned()));
        assert_eq!(asked.load(Ordering::SeqCst), ALL, "streams of users are bounded");
    };
    let (answers, ()) = tokio::join!(flood, meanwhile);
    let refused = answers.iter().filter(|status| **status == StatusCode::TOO_MANY_REQUESTS).count();
    assert_eq!(refused, 4 * 5, "no user has more than its share");
}
