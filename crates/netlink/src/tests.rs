//! The bytes of requests, and what is read from answers.

use std::net::IpAddr;

use crate::message::flag;
use crate::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// An attribute, written without the encoder.
fn attribute(kind: u16, data: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + data.len()).unwrap();
    let mut bytes = [len.to_le_bytes(), kind.to_le_bytes()].concat();
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// The body that a request has, behind its header.
fn body(write: impl FnOnce(&mut Messages)) -> Vec<u8> {
    let mut request = Messages::request(0, 0);
    write(&mut request);
    request.numbered(1)[16..].to_vec()
}

fn message(kind: u16, body: &[u8]) -> Message<'_> {
    Message { kind, flags: 2, sequence: 1, body }
}

#[test]
fn links_to_make() {
    let netns = Netns::current().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&netns)).to_le_bytes();
    let far_end = [
        vec![0; 16],
        attribute(3, b"eth0\0"),
        attribute(4, &[0xdc, 5, 0, 0]),
        attribute(1, &[1, 2, 3, 4, 5, 6]),
        attribute(28, &fd),
    ]
    .concat();
    let pair = attribute(2, &attribute(1, &far_end));
    let veth = [
        attribute(3, b"veth1\0"),
        attribute(4, &[0xdc, 5, 0, 0]),
        attribute(18, &[attribute(1, b"veth\0"), pair].concat()),
    ]
    .concat();
    let made = VethLink::new("veth1", "eth0").mtu(1500).peer_address([1, 2, 3, 4, 5, 6]).peer_netns(&netns);
    assert_eq!(body(|m| made.write(m)), veth);

    let bridge = [
        attribute(3, b"br0\0"),
        attribute(1, &[10, 88, 10, 0, 0, 1]),
        attribute(18, &attribute(1, b"bridge\0")),
    ]
    .concat();
    assert_eq!(body(|m| BridgeLink::new("br0").address([10, 88, 10, 0, 0, 1]).write(m)), bridge);

    for (local, kind) in [("192.0.2.1", 4), ("2001:db8::1", 17)] {
        let octets = match ip(local) {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let data = [
            attribute(1, &[7, 0, 0, 0]),
            attribute(kind, &octets),
            attribute(15, &[0x21, 0x18]),
            attribute(7, &[0]),
        ]
        .concat();
        let tunnel = [
            attribute(3, b"v0\0"),
            attribute(4, &[0xaa, 5, 0, 0]),
            attribute(1, &[1, 2, 3, 4, 5, 6]),
            attribute(18, &[attribute(1, b"vxlan\0"), attribute(2, &data)].concat()),
        ]
        .concat();
        let address = [1, 2, 3, 4, 5, 6];
        let made = VxlanLink { name: "v0", id: 7, local: ip(local), port: 8472, address, mtu: 1450 };
        assert_eq!(body(|m| made.write(m)), tunnel, "{local}");
    }
}

#[test]
fn flags_of_ports() {
    for (hairpin, isolated, inner) in [
        (Some(true), None, attribute(4, &[1])),
        (None, Some(false), attribute(33, &[0])),
        (Some(false), Some(true), [attribute(4, &[0]), attribute(33, &[1])].concat()),
    ] {
        let flags = PortFlags { hairpin, isolated };
        assert_eq!(body(|m| flags.write(m)), attribute(12 | NESTED, &inner), "{flags:?}");
    }
}

#[test]
fn links_that_are_there() {
    let slave =
        [attribute(4, b"bridge\0"), attribute(5, &[attribute(4, &[1]), attribute(33, &[0])].concat())];
    let info = [attribute(1, b"veth\0"), slave.concat()].concat();
    let fixed = [[0; 4], 9_u32.to_le_bytes(), 0x1_0001_u32.to_le_bytes(), [0; 4]].concat();
    let bytes = [
        fixed.clone(),
        attribute(1, &[2, 0, 0, 0, 0, 9]),
        attribute(3, b"veth1\0"),
        attribute(20, b"sandbox"),
        attribute(4, &[0xdc, 5, 0, 0]),
        attribute(10, &[3, 0, 0, 0]),
        attribute(5, &[8, 0, 0, 0]),
        attribute(18, &info),
    ]
    .concat();
    let want = Link {
        index: 9,
        name: "veth1".into(),
        kind: Some("veth".into()),
        alias: Some("sandbox".into()),
        mtu: Some(1500),
        master: Some(3),
        peer: Some(8),
        is_up: true,
        has_carrier: true,
        port: PortFlags { hairpin: Some(true), isolated: Some(false) },
        hardware: Some([2, 0, 0, 0, 0, 9]),
    };
    assert_eq!(Link::parse(&message(16, &bytes)), Some(want.clone()));
    assert_eq!(NetworkEvent::parse(&message(17, &bytes)), Some(NetworkEvent::DelLink(want)));
    assert_eq!(Link::parse(&message(18, &bytes)), None, "not about a link");
    assert_eq!(NetworkEvent::parse(&message(32, &[])), Some(NetworkEvent::Rule));
    assert_eq!(NetworkEvent::parse(&message(33, &[])), Some(NetworkEvent::Rule));
    assert_eq!(Link::parse(&message(16, &fixed)), None, "without a name");
    assert_eq!(Link::parse(&message(16, &bytes[..10])), None, "cut off");
}

#[test]
fn addresses() {
    let v4 = Address::new("eth0", ip("10.0.0.5"), 24).broadcast(ip("10.0.0.255"));
    let v6 = Address::new("eth0", ip("fd00::5"), 128).without_duplicate_detection().deprecated();
    let octets = [&[0xfd][..], &[0; 14], &[5]].concat();
    let lifetimes = [[0; 4], [0xff; 4], [0; 4], [0; 4]].concat();
    for (address, want) in [
        (
            v4,
            [
                vec![2, 24, 0, 0, 3, 0, 0, 0],
                attribute(2, &[10, 0, 0, 5]),
                attribute(1, &[10, 0, 0, 5]),
                attribute(4, &[10, 0, 0, 255]),
            ]
            .concat(),
        ),
        (
            v4.scope(Scope::Host),
            [
                vec![2, 24, 0, 254, 3, 0, 0, 0],
                attribute(2, &[10, 0, 0, 5]),
                attribute(1, &[10, 0, 0, 5]),
                attribute(4, &[10, 0, 0, 255]),
            ]
            .concat(),
        ),
        (
            v6,
            [
                vec![10, 128, 0, 0, 3, 0, 0, 0],
                attribute(2, &octets),
                attribute(1, &octets),
                attribute(8, &[2, 0, 0, 0]),
                attribute(6, &lifetimes),
            ]
            .concat(),
        ),
    ] {
        assert_eq!(body(|m| address.write(m, 3)), want, "{address:?}");
    }
    let entry = |address: &str, prefix, scope, is_deprecated| AddressEntry {
        link: 3,
        address: ip(address),
        prefix,
        scope,
        is_deprecated,
    };
    let far = [vec![2, 32, 0, 253, 3, 0, 0, 0], attribute(1, &[9; 4]), attribute(2, &[10, 0, 0, 5])].concat();
    let own = [vec![10, 64, 0x20, 0, 3, 0, 0, 0], attribute(1, &octets)].concat();
    let flags = [vec![10, 64, 0x20, 0, 3, 0, 0, 0], attribute(1, &octets), attribute(8, &[0; 4])].concat();
    for (bytes, want) in [
        (&far, Some(entry("10.0.0.5", 32, 253, false))),
        (&own, Some(entry("fd00::5", 64, 0, true))),
        (&flags, Some(entry("fd00::5", 64, 0, false))),
        (&far[..8].to_vec(), None),
        (&far[..5].to_vec(), None),
    ] {
        assert_eq!(AddressEntry::parse(&message(20, bytes)), want);
    }
}

#[test]
fn routes() {
    let via = Route::default_by(ip("10.0.0.1")).dev_index(4);
    let tunnel = Route::new(ip("10.1.0.0"), 16).protocol(0xfe).gateway(ip("10.1.0.0")).dev_index(4);
    let closed = Route::new(ip("fd00::"), 8).route_type(RouteType::Unreachable).metric(7);
    for (route, link, want) in [
        (
            via,
            Some(4),
            [
                vec![2, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0],
                attribute(5, &[10, 0, 0, 1]),
                attribute(4, &[4, 0, 0, 0]),
            ]
            .concat(),
        ),
        (
            tunnel.onlink().mtu(1450),
            Some(4),
            [
                vec![2, 16, 0, 0, 254, 0xfe, 0, 1, 4, 0, 0, 0],
                attribute(1, &[10, 1, 0, 0]),
                attribute(5, &[10, 1, 0, 0]),
                attribute(4, &[4, 0, 0, 0]),
                attribute(8, &attribute(2, &[0xaa, 5, 0, 0])),
            ]
            .concat(),
        ),
        (
            Route::new(ip("10.1.0.0"), 16).dev_index(4).table(26_213),
            Some(4),
            [
                vec![2, 16, 0, 0, 0, 3, 253, 1, 0, 0, 0, 0],
                attribute(1, &[10, 1, 0, 0]),
                attribute(4, &[4, 0, 0, 0]),
                attribute(15, &[0x65, 0x66, 0, 0]),
            ]
            .concat(),
        ),
        (
            closed,
            None,
            [
                vec![10, 8, 0, 0, 254, 3, 0, 7, 0, 0, 0, 0],
                attribute(1, &[&[0xfd][..], &[0; 15]].concat()),
                attribute(6, &[7, 0, 0, 0]),
            ]
            .concat(),
        ),
    ] {
        assert_eq!(body(|m| route.write(m, link)), want, "{route:?}");
    }
    let bytes = [
        vec![2, 16, 0, 0, 0, 0xfe, 0, 1, 0, 0, 0, 0],
        attribute(1, &[10, 1, 0, 0]),
        attribute(15, &[0x65, 0x66, 0, 0]),
        attribute(5, &[10, 0, 0, 1]),
        attribute(4, &[4, 0, 0, 0]),
        attribute(6, &[7, 0, 0, 0]),
    ]
    .concat();
    let want = RouteEntry {
        destination: ip("10.1.0.0"),
        prefix: 16,
        gateway: Some(ip("10.0.0.1")),
        link: Some(4),
        table: 26_213,
        protocol: 0xfe,
        route_type: RouteType::Unicast,
        metric: Some(7),
    };
    assert_eq!(want.to_string(), "10.1.0.0/16");
    assert_eq!(RouteEntry::parse(&message(24, &bytes)), Some(want.clone()));
    assert_eq!(NetworkEvent::parse(&message(25, &bytes)), Some(NetworkEvent::DelRoute(want)));
    let default = RouteEntry::parse(&message(24, &[10, 0, 0, 0, 254, 2, 0, 1, 0, 0, 0, 0])).unwrap();
    assert_eq!((default.destination, default.to_string()), (ip("::"), "default".to_owned()));
    let mixed = [vec![10, 16, 0, 0, 254, 2, 0, 1, 0, 0, 0, 0], attribute(1, &[10, 1, 0, 0])].concat();
    for (what, bytes) in [
        ("an address of another family", &mixed[..]),
        ("another family", &[28, 0, 0, 0, 254, 2, 0, 1, 0, 0, 0, 0]),
        ("cut off", &bytes[..6]),
    ] {
        assert_eq!(RouteEntry::parse(&message(24, bytes)), None, "{what}");
    }
}

#[test]
fn rules_that_choose_a_table() {
    let rule = Rule {
        priority: 32_000,
        table: 26_213,
        to: Some((ip("10.96.0.0"), 12)),
        input_link: Some("lo".into()),
    };
    let want = [
        vec![2, 12, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0],
        attribute(6, &[0, 0x7d, 0, 0]),
        attribute(1, &[10, 96, 0, 0]),
        attribute(3, b"lo\0"),
        attribute(15, &[0x65, 0x66, 0, 0]),
    ]
    .concat();
    assert_eq!(body(|m| rule.write(m)), want);
    assert_eq!(Rule::parse(&message(32, &want)), Some(rule));
    let all = Rule { priority: 0, table: 255, to: None, input_link: None };
    assert_eq!(Rule::parse(&message(32, &[2, 0, 0, 0, 255, 0, 0, 1, 0, 0, 0, 0])), Some(all));
}

#[test]
fn neighbours() {
    let bytes = [
        vec![2, 0, 0, 0, 7, 0, 0, 0, 0x80, 0, 0, 0],
        attribute(1, &[10, 0, 0, 5]),
        attribute(2, &[1, 2, 3, 4, 5, 6]),
    ]
    .concat();
    let want = NeighbourEntry { link: 7, address: ip("10.0.0.5"), hardware: Some(vec![1, 2, 3, 4, 5, 6]) };
    assert_eq!(NeighbourEntry::parse(&message(28, &bytes)), Some(want));
    assert_eq!(NeighbourEntry::parse(&message(28, &bytes[..14])), None);
}

#[test]
fn queues() {
    let parameters = |rate: [u8; 4], ticks: [u8; 4]| {
        [&[0, 1, 0, 0, 0, 0, 0, 0][..], &rate, &[0; 12], &[0x40, 0x9c, 0, 0], &ticks].concat()
    };
    for (rate, first, ticks, wide) in [
        (1_000_000, [0x40, 0x42, 0x0f, 0], 512_000_u32.to_le_bytes(), None),
        (125_000_000_000, [0xff; 4], 4_u32.to_le_bytes(), Some(125_000_000_000_u64)),
        (0, [0; 4], u32::MAX.to_le_bytes(), None),
    ] {
        let mut fixed = parameters(first, ticks);
        fixed.resize(36, 0);
        let options = [
            attribute(1, &fixed),
            wide.map(|rate| attribute(4, &rate.to_le_bytes())).unwrap_or_default(),
            attribute(6, &32_768_u32.to_le_bytes()),
        ]
        .concat();
        let want = [attribute(1, b"tbf\0"), attribute(2, &options)].concat();
        let queue = TokenBucket { bytes_per_second: rate, burst: 32_768, limit: 40_000 };
        assert_eq!(body(|m| queue.write(m)), want, "{rate}");
    }
    let bytes = [[0; 4], [6, 0, 0, 0], [0; 4], [0xff; 4], [0; 4]].concat();
    let bytes = [bytes, attribute(1, b"noqueue\0")].concat();
    assert_eq!(Queue::parse(&message(36, &bytes)), Some(Queue { link: 6, kind: "noqueue".into() }));
    assert_eq!(Queue::parse(&message(36, &bytes[..20])), None);
}

#[test]
fn tracked_flows() {
    let tuple = |source: [u8; 4], destination: [u8; 4], protocol: u8| {
        let ips = [attribute(1, &source), attribute(2, &destination)].concat();
        let ports = [attribute(1, &[protocol]), attribute(2, &[0x30, 0x39]), attribute(3, &[0, 53])].concat();
        [attribute(1, &ips), attribute(2, &ports)].concat()
    };
    let flow = |protocol| {
        let original = tuple([10, 0, 0, 1], [10, 0, 0, 2], protocol);
        let reply = tuple([10, 0, 0, 3], [10, 0, 0, 1], protocol);
        [
            vec![2, 0, 0, 0],
            attribute(1 | NESTED, &original),
            attribute(2 | NESTED, &reply),
            attribute(12, &[1, 2, 3, 4]),
        ]
        .concat()
    };
    let udp = flow(17);
    let found = Flow::parse(&message(0x100, &udp)).unwrap();
    let ends = |source: &str, destination: &str| Tuple {
        source: (ip(source), 12_345),
        destination: (ip(destination), 53),
    };
    assert_eq!(found.original, ends("10.0.0.1", "10.0.0.2"));
    assert_eq!(found.reply, ends("10.0.0.3", "10.0.0.1"));
    assert_eq!(Flow::parse(&message(0x100, &flow(6))), None, "TCP, from a kernel that does not filter");
    assert_eq!(Flow::parse(&message(0x102, &udp)), None);
    for end in 0..udp.len() - 8 {
        assert_eq!(Flow::parse(&message(0x100, &udp[..end])), None, "cut off at {end}");
    }
}

#[test]
fn requests_ask_for_an_answer() {
    let mut request = Messages::request(24, flag::CREATE | flag::REPLACE);
    assert_eq!(request.numbered(1)[4..8], [24, 0, 5, 5]);
}
