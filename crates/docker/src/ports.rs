//! Published ports: the requests and the results.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    Tcp,
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// One port of `-p`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortBinding {
    pub container: u16,
    pub protocol: Protocol,
    /// All addresses when not given.
    pub host_ip: Option<IpAddr>,
    /// Any free port when not given.
    pub host_port: Option<u16>,
}

/// A port of the host that leads to one of the container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PublishedPort {
    pub container: u16,
    pub protocol: Protocol,
    pub host_ip: IpAddr,
    pub host_port: u16,
}

impl PortBinding {
    pub fn address(&self) -> IpAddr {
        self.host_ip.unwrap_or(Ipv4Addr::UNSPECIFIED.into())
    }
}

/// `80`, `80/udp`: a port a container listens on.
pub fn parse_exposed(text: &str) -> Result<Vec<(u16, Protocol)>, String> {
    let (ports, protocol) = split_protocol(text)?;
    Ok(parse_range(ports, text)?.map(|port| (port, protocol)).collect())
}

fn split_protocol(text: &str) -> Result<(&str, Protocol), String> {
    match text.rsplit_once('/') {
        None => Ok((text, Protocol::Tcp)),
        Some((ports, "tcp")) => Ok((ports, Protocol::Tcp)),
        Some((ports, "udp")) => Ok((ports, Protocol::Udp)),
        Some((_, other)) => Err(format!("Invalid proto: {other}")),
    }
}

fn parse_range(text: &str, whole: &str) -> Result<std::ops::RangeInclusive<u16>, String> {
    let fail = || format!("Invalid containerPort: {whole}");
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last): (u16, u16) = (first.parse().map_err(|_| fail())?, last.parse().map_err(|_| fail())?);
    if first == 0 || first > last { Err(fail()) } else { Ok(first..=last) }
}

/// `[ip:][host:]container[/protocol]`, with ranges of equal length.
pub fn parse_binding(text: &str) -> Result<Vec<PortBinding>, String> {
    let (rest, protocol) = split_protocol(text)?;
    let (rest, container) = match rest.rsplit_once(':') {
        Some((rest, container)) => (Some(rest), container),
        None => (None, rest),
    };
    let container: Vec<u16> = parse_range(container, container)?.collect();
    let (ip, host) = match rest {
        None => (None, ""),
        Some(rest) => match rest.rsplit_once(':') {
            Some((ip, host)) => (Some(ip), host),
            None => (None, rest),
        },
    };
    let host_ip = match ip.map(|ip| ip.trim_start_matches('[').trim_end_matches(']')) {
        None | Some("") => None,
        Some(ip) => Some(ip.parse().map_err(|_| format!("Invalid ip address: {ip}"))?),
    };
    let hosts: Vec<Option<u16>> = if host.is_empty() {
        vec![None; container.len()]
    } else {
        let bad = || format!("Invalid hostPort: {host}");
        let (first, last) = host.split_once('-').unwrap_or((host, host));
        let (first, last): (u16, u16) = (first.parse().map_err(|_| bad())?, last.parse().map_err(|_| bad())?);
        (first..=last).map(|port| (port != 0).then_some(port)).collect()
    };
    if hosts.len() != container.len() {
        return Err(format!("Invalid ranges specified for container and host Ports: {text}"));
    }
    let each = container.into_iter().zip(hosts);
    Ok(each.map(|(container, host_port)| PortBinding { container, protocol, host_ip, host_port }).collect())
}

/// The PORTS column: `0.0.0.0:8080->80/tcp, 443/tcp`.
pub fn describe(published: &[PublishedPort], exposed: &[(u16, Protocol)]) -> String {
    let mut parts: Vec<String> = published
        .iter()
        .map(|port| format!("{}:{}->{}/{}", port.host_ip, port.host_port, port.container, port.protocol))
        .collect();
    let open = exposed
        .iter()
        .filter(|(port, protocol)| {
            !published.iter().any(|known| known.container == *port && known.protocol == *protocol)
        })
        .map(|(port, protocol)| format!("{port}/{protocol}"));
    parts.extend(open);
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings() {
        let binding = |container, protocol, ip: Option<&str>, host_port| PortBinding {
            container,
            protocol,
            host_ip: ip.map(|ip| ip.parse().unwrap()),
            host_port,
        };
        let (tcp, udp) = (Protocol::Tcp, Protocol::Udp);
        let rows: Vec<(&str, Option<Vec<PortBinding>>)> = vec![
            ("80", Some(vec![binding(80, tcp, None, None)])),
            ("8080:80", Some(vec![binding(80, tcp, None, Some(8080))])),
            ("127.0.0.1:8080:80/udp", Some(vec![binding(80, udp, Some("127.0.0.1"), Some(8080))])),
            ("127.0.0.1::80", Some(vec![binding(80, tcp, Some("127.0.0.1"), None)])),
            ("[::1]:8080:80", Some(vec![binding(80, tcp, Some("::1"), Some(8080))])),
            (
                "8000-8001:80-81",
                Some(vec![binding(80, tcp, None, Some(8000)), binding(81, tcp, None, Some(8001))]),
            ),
            ("8000-8001:80", None),
            ("x:80", None),
            ("80/sctp", None),
            ("1.2.3:80:80", None),
            ("0", None),
            ("70000", None),
        ];
        for (text, want) in rows {
            assert_eq!(parse_binding(text).ok(), want, "{text}");
        }
    }

    #[test]
    fn column() {
        let published = [PublishedPort {
            container: 80,
            protocol: Protocol::Tcp,
            host_ip: "0.0.0.0".parse().unwrap(),
            host_port: 8080,
        }];
        let exposed = [(80, Protocol::Tcp), (53, Protocol::Udp)];
        assert_eq!(describe(&published, &exposed), "0.0.0.0:8080->80/tcp, 53/udp");
    }
}
