//! The server on real sockets of the loopback interface, with resolvers that misbehave.

#![allow(clippy::unwrap_used, reason = "a test that fails should stop at once")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ferrite_api::Cidr;
use ferrite_client::Scope;
use ferrite_dns::{Config, Dns, Listen, Patience, StubDomain, domain_name};
use ferrite_json::json;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::mpsc;

const LOCAL: &str = "web.ns.svc.cluster.local.";
/// Everything a test waits for comes much sooner.
const BOUND: Duration = Duration::from_secs(20);

fn any_port() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

struct World {
    dns: Dns,
    scope: Scope,
    address: SocketAddr,
}

impl World {
    fn start(resolver: Option<SocketAddr>, change: impl FnOnce(&mut Config)) -> Self {
        let stub = |server| StubDomain { domain: domain_name("test").unwrap(), servers: vec![server] };
        let mut config = Config {
            domain: "cluster.local".into(),
            listen: vec![Listen { address: any_port(), device: None, clients: Vec::new() }],
            listen_if_free: Vec::new(),
            resolv_conf: "/nonexistent".into(),
            stub_domains: resolver.into_iter().map(stub).collect(),
            patience: Patience { attempt: Duration::from_millis(300), total: Duration::from_secs(2) },
        };
        change(&mut config);
        let scope = Scope::new();
        let dns = Dns::start(config, &scope).unwrap();
        let service = json!({"metadata": {"namespace": "ns", "name": "web"},
            "spec": {"clusterIP": "10.96.0.20", "ports": [{"name": "http", "port": 80}]}});
        let out = json!({"metadata": {"namespace": "ns", "name": "out"},
            "spec": {"type": "ExternalName", "externalName": "alias.test"}});
        dns.server().update(7, |index| {
            index.apply_namespace("ns");
            index.apply_service(&ferrite_json::from_value(service).unwrap());
            index.apply_service(&ferrite_json::from_value(out).unwrap());
        });
        dns.server().set_synced();
        let address = dns.addresses()[0];
        Self { dns, scope, address }
    }

    async fn socket(&self) -> UdpSocket {
        let socket = UdpSocket::bind(any_port()).await.unwrap();
        socket.connect(self.address).await.unwrap();
        socket
    }

    async fn ask(&self, name: &str, kind: RecordType) -> Message {
        let socket = self.socket().await;
        socket.send(&query(1, name, kind).to_vec().unwrap()).await.unwrap();
        receive(&socket).await
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

fn query(id: u16, name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message
}

async fn receive(socket: &UdpSocket) -> Message {
    let mut buffer = [0; 4096];
    let size = tokio::time::timeout(BOUND, socket.recv(&mut buffer)).await.expect("a reply").unwrap();
    Message::from_vec(&buffer[..size]).unwrap()
}

fn addresses(message: &Message) -> Vec<String> {
    message.answers.iter().map(|record| record.data.to_string()).collect()
}

#[tokio::test]
async fn udp_and_pipelined_tcp() {
    let world = World::start(None, |_| {});
    assert_eq!(addresses(&world.ask(LOCAL, RecordType::A).await), ["10.96.0.20"]);
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let mut bytes = Vec::new();
    for (id, name) in [(1, LOCAL), (2, "no.ns.svc.cluster.local."), (3, LOCAL)] {
        let packet = query(id, name, RecordType::A).to_vec().unwrap();
        bytes.extend((packet.len() as u16).to_be_bytes());
        bytes.extend(packet);
    }
    // Queries arrive in pieces that are not packets.
    let (first, rest) = bytes.split_at(17);
    stream.write_all(first).await.unwrap();
    stream.flush().await.unwrap();
    stream.write_all(rest).await.unwrap();
    for (id, code) in [(1, ResponseCode::NoError), (2, ResponseCode::NXDomain), (3, ResponseCode::NoError)] {
        let mut packet = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut packet).await.unwrap();
        let message = Message::from_vec(&packet).unwrap();
        assert_eq!((message.metadata.id, message.metadata.response_code), (id, code));
    }
    let metrics = world.dns.server().render_metrics();
    assert!(
        metrics.contains("proto=\"tcp\",server=\"dns://:53\",type=\"A\",view=\"\",zone=\".\"} 3"),
        "{metrics}"
    );
    assert!(metrics.contains("rcode=\"NXDOMAIN\""), "{metrics}");
}

#[tokio::test]
async fn hostile_packets() {
    let world = World::start(None, |_| {});
    let plain = || query(9, LOCAL, RecordType::A);
    let bytes = |message: Message| message.to_vec().unwrap();
    let mut update = plain();
    update.metadata.op_code = OpCode::Update;
    let mut two = plain();
    two.add_query(Query::query(Name::root(), RecordType::A));
    let mut chaos = plain();
    chaos.queries[0].query_class = DNSClass::CH;
    let mut version = plain();
    let mut edns = Edns::new();
    edns.set_version(1);
    version.set_edns(edns);
    let mut looped = bytes(plain());
    looped.truncate(12);
    looped.extend([0xc0, 12, 0, 1, 0, 1]);
    let mut huge_counts = bytes(plain());
    huge_counts[6..12].fill(0xff);
    let mut cut = bytes(plain());
    cut.truncate(20);
    let mut response = plain();
    response.metadata.message_type = MessageType::Response;
    let socket = world.socket().await;
    for (what, packet, code) in [
        ("another opcode", bytes(update), ResponseCode::NotImp),
        ("two questions", bytes(two), ResponseCode::FormErr),
        ("class CH", bytes(chaos), ResponseCode::Refused),
        ("EDNS version 1", bytes(version), ResponseCode::BADVERS),
        ("a name that points to itself", looped, ResponseCode::FormErr),
        ("counts without records", huge_counts, ResponseCode::FormErr),
        ("a packet that is cut", cut, ResponseCode::FormErr),
        ("AXFR", bytes(query(9, "cluster.local.", RecordType::AXFR)), ResponseCode::Refused),
        ("AXFR of others", bytes(query(9, "example.", RecordType::AXFR)), ResponseCode::Refused),
        ("IXFR", bytes(query(9, "cluster.local.", RecordType::IXFR)), ResponseCode::Refused),
    ] {
        // A response and a packet without a header get no reply: the next one is that of the row.
        socket.send(&bytes(response.clone())).await.unwrap();
        socket.send(&[0; 11]).await.unwrap();
        socket.send(&packet).await.unwrap();
        let reply = receive(&socket).await;
        let got = u16::from(reply.metadata.response_code);
        assert_eq!((reply.metadata.id, got), (9, u16::from(code)), "{what}");
        assert!(reply.answers.is_empty(), "{what}");
    }
    socket.send(&bytes(plain())).await.unwrap();
    assert_eq!(addresses(&receive(&socket).await), ["10.96.0.20"]);
}

#[tokio::test]
async fn strangers_get_no_reply() {
    let world = World::start(None, |config| {
        config.listen[0].clients = vec![Cidr { address: IpAddr::from([127, 0, 0, 2]), bits: 32 }];
    });
    let friend = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 2), 0)).await.unwrap();
    friend.connect(world.address).await.unwrap();
    let stranger = world.socket().await;
    let packet = query(1, LOCAL, RecordType::A).to_vec().unwrap();
    stranger.send(&packet).await.unwrap();
    friend.send(&packet).await.unwrap();
    // Packets of one socket are read in order: the stranger's was read before.
    assert_eq!(addresses(&receive(&friend).await), ["10.96.0.20"]);
    let mut buffer = [0; 512];
    assert!(stranger.try_recv(&mut buffer).is_err());
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    assert_eq!(stream.read(&mut buffer).await.unwrap_or(0), 0, "the connection is closed");
}

#[tokio::test]
async fn connections_of_one_client_are_limited() {
    let world = World::start(None, |_| {});
    let packet = query(1, LOCAL, RecordType::A).to_vec().unwrap();
    let framed = [&(packet.len() as u16).to_be_bytes(), packet.as_slice()].concat();
    let mut open = Vec::new();
    for number in 1.. {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        let sent = stream.write_all(&framed).await;
        // A connection that is one too many is closed without a reply.
        if sent.is_err() || stream.read_u16().await.is_err() {
            assert_eq!(number, 65);
            break;
        }
        open.push(stream);
    }
    // Datagrams are answered nevertheless.
    assert_eq!(addresses(&world.ask(LOCAL, RecordType::A).await), ["10.96.0.20"]);
}

#[tokio::test]
async fn clients_of_ipv6() {
    let loopback = SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, 0));
    let Ok(socket) = UdpSocket::bind(loopback).await else {
        eprintln!("this machine has no IPv6");
        return;
    };
    let world = World::start(None, |config| config.listen[0].address = loopback);
    socket.connect(world.address).await.unwrap();
    socket.send(&query(1, LOCAL, RecordType::A).to_vec().unwrap()).await.unwrap();
    assert_eq!(addresses(&receive(&socket).await), ["10.96.0.20"]);
    let metrics = world.dns.server().render_metrics();
    assert!(metrics.contains("family=\"2\",proto=\"udp\""), "{metrics}");
}

#[tokio::test]
async fn dig_understands_the_replies() {
    let world = World::start(None, |_| {});
    let dig = |arguments: &[&str]| {
        let mut command = Command::new("dig");
        let port = world.address.port().to_string();
        command.args(["@127.0.0.1", "-p", &port, "+tries=1", "+time=10"]).args(arguments);
        async move {
            let output = tokio::task::spawn_blocking(move || command.output().expect("dig is installed"));
            String::from_utf8(output.await.unwrap().stdout).unwrap()
        }
    };
    assert_eq!(dig(&["+short", LOCAL]).await, "10.96.0.20\n");
    assert_eq!(dig(&["+short", "+tcp", "-x", "10.96.0.20"]).await, format!("{LOCAL}\n"));
    let srv = dig(&["_http._tcp.web.ns.svc.cluster.local", "SRV"]).await;
    assert!(srv.contains("SRV\t0 100 80 web.ns.svc.cluster.local."), "{srv}");
    assert!(srv.contains("flags: qr aa rd;") && srv.contains(";; ADDITIONAL SECTION:"), "{srv}");
    let denied = dig(&["+dnssec", "+bufsize=1400", "No.ns.svc.cluster.local"]).await;
    for part in [
        "status: NXDOMAIN",
        "EDNS: version: 0, flags: do; udp: 1400",
        "SOA\tns.dns.cluster.local. hostmaster",
        "No.ns.svc.cluster.local.",
    ] {
        assert!(denied.contains(part), "{part}: {denied}");
    }
    let transfer = dig(&["cluster.local", "AXFR"]).await;
    assert!(transfer.contains("Transfer failed"), "{transfer}");
    let txt = dig(&["+short", "dns-version.cluster.local", "TXT"]).await;
    assert_eq!(txt, "\"1.1.0\"\n");
}

/// A resolver's behaviour for a question.
#[derive(Debug, Clone, Copy)]
enum Manner {
    Good,
    /// Replies with another id first.
    WrongIdFirst,
    /// Always another id over UDP.
    Spoofed,
    /// Lower-case names in replies.
    LowerCase,
    /// Cuts UDP replies.
    Truncates,
    Silent,
    Fails,
    /// Sends only a header for questions with EDNS.
    Ancient,
}

struct Resolver {
    address: SocketAddr,
    udp: Arc<AtomicUsize>,
    tcp: Arc<AtomicUsize>,
    questions: mpsc::Receiver<String>,
}

/// A resolver that knows one address for every name, 192.0.2.1 over UDP and 192.0.2.2 over TCP.
async fn resolver(manner: Manner, scope: &Scope) -> Resolver {
    let (udp, tcp) = loop {
        let udp = UdpSocket::bind(any_port()).await.unwrap();
        // Another test may have taken the port for TCP.
        if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
            break (udp, tcp);
        }
    };
    let address = udp.local_addr().unwrap();
    let (over_udp, over_tcp) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (seen, questions) = mpsc::channel(100);
    let count = Arc::clone(&over_udp);
    scope.spawn(async move {
        let mut buffer = [0; 4096];
        while let Ok((size, client)) = udp.recv_from(&mut buffer).await {
            let question = Message::from_vec(&buffer[..size]).unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            let _ = seen.try_send(question.queries[0].name.to_string());
            let mut reply = reply_to(&question, Ipv4Addr::new(192, 0, 2, 1));
            match manner {
                Manner::Silent => continue,
                Manner::WrongIdFirst | Manner::Spoofed => {
                    let mut wrong = reply_to(&question, Ipv4Addr::new(203, 0, 113, 66));
                    wrong.metadata.id = wrong.metadata.id.wrapping_add(1);
                    let times = if matches!(manner, Manner::Spoofed) { 5 } else { 1 };
                    for _ in 0..times {
                        let _ = udp.send_to(&wrong.to_vec().unwrap(), client).await;
                    }
                    if matches!(manner, Manner::Spoofed) {
                        continue;
                    }
                }
                Manner::LowerCase => {
                    reply.queries[0].name = reply.queries[0].name.to_lowercase();
                }
                Manner::Truncates => {
                    reply.metadata.truncation = true;
                    reply.answers.clear();
                }
                Manner::Fails => {
                    reply.metadata.response_code = ResponseCode::ServFail;
                    reply.answers.clear();
                }
                Manner::Ancient if question.edns.is_some() => {
                    let _ = udp.send_to(&unread(&question), client).await;
                    continue;
                }
                Manner::Good | Manner::Ancient => {}
            }
            let _ = udp.send_to(&reply.to_vec().unwrap(), client).await;
        }
    });
    let count = Arc::clone(&over_tcp);
    scope.spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            let mut packet = vec![0; usize::from(stream.read_u16().await.unwrap())];
            stream.read_exact(&mut packet).await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            let question = Message::from_vec(&packet).unwrap();
            let reply = match manner {
                Manner::Ancient if question.edns.is_some() => unread(&question),
                _ => reply_to(&question, Ipv4Addr::new(192, 0, 2, 2)).to_vec().unwrap(),
            };
            stream.write_u16(reply.len() as u16).await.unwrap();
            stream.write_all(&reply).await.unwrap();
        }
    });
    Resolver { address, udp: over_udp, tcp: over_tcp, questions }
}

/// The reply of a resolver that did not get beyond the header.
fn unread(question: &Message) -> Vec<u8> {
    Message::error_msg(question.metadata.id, OpCode::Query, ResponseCode::FormErr).to_vec().unwrap()
}

fn reply_to(question: &Message, address: Ipv4Addr) -> Message {
    let mut reply = Message::new(question.metadata.id, MessageType::Response, OpCode::Query);
    reply.metadata.recursion_available = true;
    reply.add_query(question.queries[0].clone());
    let name = question.queries[0].name.clone();
    reply.add_answer(Record::from_rdata(name, 3600, RData::A(A(address))));
    reply
}

#[tokio::test]
async fn names_of_others_are_forwarded_and_cached() {
    let scope = Scope::new();
    let mut good = resolver(Manner::Good, &scope).await;
    let world = World::start(Some(good.address), |_| {});
    let name = "A-Name-Long-Enough-To-Be-Guessed.test.";
    let first = world.ask(name, RecordType::A).await;
    assert_eq!(addresses(&first), ["192.0.2.1"]);
    assert!(first.metadata.recursion_available && !first.metadata.authoritative);
    assert_eq!((first.answers[0].name.to_string().as_str(), first.answers[0].ttl), (name, 30));
    let sent = good.questions.recv().await.unwrap();
    assert!(sent.eq_ignore_ascii_case(name));
    assert!(sent != name && sent != name.to_lowercase(), "the case is random: {sent}");
    // The second comes from the cache, with the case of its own query.
    let second = world.ask("a-name-long-enough-to-be-guessed.TEST.", RecordType::A).await;
    assert_eq!(second.answers[0].name.to_string(), "a-name-long-enough-to-be-guessed.TEST.");
    assert_eq!(good.udp.load(Ordering::SeqCst), 1);
    // An alias of the cluster is followed.
    let alias = world.ask("out.ns.svc.cluster.local.", RecordType::A).await;
    assert_eq!(addresses(&alias), ["alias.test.", "192.0.2.1"]);
    scope.cancel();
}

#[tokio::test]
async fn resolvers_that_misbehave() {
    for (manner, want, udp, tcp) in [
        (Manner::WrongIdFirst, Some("192.0.2.1"), 1, 0),
        (Manner::Spoofed, Some("192.0.2.2"), 1, 1),
        (Manner::LowerCase, Some("192.0.2.2"), 1, 1),
        (Manner::Truncates, Some("192.0.2.2"), 1, 1),
        (Manner::Fails, None, 1, 0),
        (Manner::Ancient, Some("192.0.2.1"), 2, 1),
        (Manner::Silent, None, 2, 0),
    ] {
        let scope = Scope::new();
        let bad = resolver(manner, &scope).await;
        let world = World::start(Some(bad.address), |_| {});
        let reply = world.ask("Some-Name-With-Letters.test.", RecordType::A).await;
        match want {
            Some(address) => assert_eq!(addresses(&reply), [address], "{manner:?}"),
            None => assert_eq!(reply.metadata.response_code, ResponseCode::ServFail, "{manner:?}"),
        }
        // A resolver that does not answer is suspected of a loop, which is one more packet.
        let (asked, connected) = (bad.udp.load(Ordering::SeqCst), bad.tcp.load(Ordering::SeqCst));
        assert!(asked >= udp && connected == tcp, "{manner:?}: {asked} {connected}");
        scope.cancel();
    }
}

#[tokio::test]
async fn a_slow_resolver_delays_nobody_else_and_is_asked_once() {
    let scope = Scope::new();
    let mut silent = resolver(Manner::Silent, &scope).await;
    let world = World::start(Some(silent.address), |config| {
        config.patience = Patience { attempt: BOUND, total: BOUND };
    });
    let socket = world.socket().await;
    for id in 1..=20 {
        socket.send(&query(id, "slow-name.test.", RecordType::A).to_vec().unwrap()).await.unwrap();
    }
    silent.questions.recv().await.unwrap();
    // The reply of this one is the first: all those before it wait.
    socket.send(&query(99, LOCAL, RecordType::A).to_vec().unwrap()).await.unwrap();
    assert_eq!(receive(&socket).await.metadata.id, 99);
    assert_eq!(silent.udp.load(Ordering::SeqCst), 1);
    scope.cancel();
}

#[tokio::test]
async fn one_client_cannot_take_all_the_room() {
    let scope = Scope::new();
    let silent = resolver(Manner::Silent, &scope).await;
    let world = World::start(Some(silent.address), |config| {
        config.patience = Patience { attempt: BOUND, total: BOUND };
    });
    let greedy = world.socket().await;
    let mut refused = None;
    for id in 1..=300 {
        greedy.send(&query(id, &format!("n{id}.test."), RecordType::A).to_vec().unwrap()).await.unwrap();
        // Nothing but refusals comes back.
        let mut buffer = [0; 512];
        if let Ok(size) = greedy.try_recv(&mut buffer) {
            refused = Some(Message::from_vec(&buffer[..size]).unwrap());
            break;
        }
        tokio::task::yield_now().await;
    }
    let refused = match refused {
        Some(refused) => refused,
        None => receive(&greedy).await,
    };
    assert_eq!(refused.metadata.response_code, ResponseCode::Refused);
    let metrics = world.dns.server().render_metrics();
    assert!(metrics.contains("rejects_total"), "{metrics}");
    scope.cancel();
}

#[tokio::test]
async fn a_resolver_that_asks_us_is_found_out() {
    let scope = Scope::new();
    let relay = UdpSocket::bind(any_port()).await.unwrap();
    let address = relay.local_addr().unwrap();
    let world = World::start(None, |config| {
        config.stub_domains = vec![StubDomain { domain: Name::root(), servers: vec![address] }];
    });
    let (server, mut buffer) = (world.address, [0; 4096]);
    let (relayed, mut count) = mpsc::channel(1000);
    scope.spawn(async move {
        while let Ok((size, _)) = relay.recv_from(&mut buffer).await {
            // Our own replies come to the relay as well.
            if buffer[2] & 0x80 != 0 {
                continue;
            }
            let _ = relayed.try_send(());
            let _ = relay.send_to(&buffer[..size], server).await;
        }
    });
    let reply = world.ask("circle.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    // The relay is not asked any more: this fails without a packet to it.
    while count.try_recv().is_ok() {}
    let reply = world.ask("another.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    assert!(count.try_recv().is_err(), "the relay was asked again");
    scope.cancel();
}
