//! Ranges of addresses and ports without overlap: the kernel's sets of ranges want them so.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ferrite_nft::{Cidr, IpFamily, Protocol};

use super::{Peer, Ports};

/// The first and the last address of a range.
pub type AddressRange = (IpAddr, IpAddr);

/// Protocol, first and last port.
pub type PortRange = (Protocol, u16, u16);

type Span = (u128, u128);

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn address(number: u128, family: IpFamily) -> IpAddr {
    match family {
        IpFamily::V4 => Ipv4Addr::from_bits(u32::try_from(number).unwrap_or(u32::MAX)).into(),
        IpFamily::V6 => Ipv6Addr::from_bits(number).into(),
    }
}

fn span(range: Cidr) -> Span {
    (number(range.network()), number(range.last()))
}

/// Takes `hole` out of the spans.
fn without(spans: Vec<Span>, hole: Span) -> Vec<Span> {
    let cut = |(first, last): Span| {
        let before = (hole.0 > first).then(|| (first, last.min(hole.0.saturating_sub(1))));
        let after = (hole.1 < last).then(|| (first.max(hole.1.saturating_add(1)), last));
        before.into_iter().chain(after)
    };
    spans.into_iter().flat_map(cut).collect()
}

/// Joins spans that overlap or touch.
fn union(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut joined: Vec<Span> = Vec::with_capacity(spans.len());
    for (first, last) in spans {
        match joined.last_mut() {
            Some(known) if first <= known.1.saturating_add(1) => known.1 = known.1.max(last),
            _ => joined.push((first, last)),
        }
    }
    joined
}

/// The addresses of one family that the blocks among the peers allow.
pub fn address_ranges(peers: &[Peer], family: IpFamily) -> Vec<AddressRange> {
    let mut spans = Vec::new();
    for peer in peers {
        let Peer::Range { block, except } = peer else { continue };
        if block.family() != family {
            continue;
        }
        let holes = except.iter().filter(|hole| hole.family() == family);
        spans.extend(holes.fold(vec![span(*block)], |spans, hole| without(spans, span(*hole))));
    }
    let range = |(first, last)| (address(first, family), address(last, family));
    union(spans).into_iter().map(range).collect()
}

/// The ports by number.
pub fn port_ranges(ports: &[Ports]) -> Vec<PortRange> {
    let mut all = Vec::new();
    for wanted in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
        let spans = ports.iter().filter_map(|ports| match ports {
            Ports::Numbers { protocol, first, last } if *protocol == wanted && first <= last => {
                Some((u128::from(*first), u128::from(*last)))
            }
            _ => None,
        });
        let port = |number| u16::try_from(number).unwrap_or(u16::MAX);
        all.extend(union(spans.collect()).into_iter().map(|(first, last)| (wanted, port(first), port(last))));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_with_exceptions() {
        let block = |block: &str, except: &[&str]| Peer::Range {
            block: block.parse().unwrap(),
            except: except.iter().map(|text| text.parse().unwrap()).collect(),
        };
        type Row<'a> = (&'a str, Vec<Peer>, &'a [(&'a str, &'a str)]);
        let rows: [Row; 6] = [
            ("plain", vec![block("10.0.0.0/8", &[])], &[("10.0.0.0", "10.255.255.255")]),
            (
                "a hole in the middle",
                vec![block("10.0.0.0/24", &["10.0.0.64/26"])],
                &[("10.0.0.0", "10.0.0.63"), ("10.0.0.128", "10.0.0.255")],
            ),
            (
                "holes at both ends",
                vec![block("0.0.0.0/0", &["0.0.0.0/1", "255.255.255.255/32"])],
                &[("128.0.0.0", "255.255.255.254")],
            ),
            ("nothing is left", vec![block("10.0.0.0/24", &["10.0.0.0/25", "10.0.0.128/25"])], &[]),
            (
                "one block's exception is another's member",
                vec![block("10.0.0.0/24", &["10.0.0.0/25"]), block("10.0.0.0/26", &[])],
                &[("10.0.0.0", "10.0.0.63"), ("10.0.0.128", "10.0.0.255")],
            ),
            (
                "neighbours and another family",
                vec![block("10.0.0.0/25", &[]), block("10.0.0.128/25", &[]), block("fd00::/8", &[])],
                &[("10.0.0.0", "10.0.0.255")],
            ),
        ];
        for (name, peers, want) in rows {
            let want: Vec<AddressRange> =
                want.iter().map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap())).collect();
            assert_eq!(address_ranges(&peers, IpFamily::V4), want, "{name}");
        }
        let six = address_ranges(&[block("fd00::/127", &["fd00::/128"])], IpFamily::V6);
        assert_eq!(six, [("fd00::1".parse().unwrap(), "fd00::1".parse().unwrap())]);
    }

    #[test]
    fn ports_are_joined_by_protocol() {
        let ports = |protocol, first, last| Ports::Numbers { protocol, first, last };
        let all = [
            ports(Protocol::Tcp, 80, 80),
            ports(Protocol::Udp, 80, 90),
            ports(Protocol::Tcp, 81, 85),
            ports(Protocol::Tcp, 84, 100),
            ports(Protocol::Sctp, 0, u16::MAX),
        ];
        assert_eq!(
            port_ranges(&all),
            [(Protocol::Tcp, 80, 100), (Protocol::Udp, 80, 90), (Protocol::Sctp, 0, u16::MAX)]
        );
    }
}
