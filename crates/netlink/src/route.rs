//! Routes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::message::{family_of, flag};
use crate::parse::{INET, INET6};
use crate::{Connection, Error, Message, Messages, Scope};

pub(crate) const NEW: u16 = 24;
pub(crate) const DELETE: u16 = 25;
const GET: u16 = 26;
/// The length of `rtmsg`.
const FIXED: usize = 12;

const DESTINATION: u16 = 1;
const LINK: u16 = 4;
const GATEWAY: u16 = 5;
const METRIC: u16 = 6;
const METRICS: u16 = 8;
const TABLE: u16 = 15;
const MTU_METRIC: u16 = 2;
/// The gateway is on the link, whatever addresses the link has.
const ON_LINK: u32 = 4;

/// Routing tables.
pub mod table {
    pub const MAIN: u32 = 254;
}

/// The origin of a route.
pub mod protocol {
    /// Made by hand.
    pub const BOOT: u8 = 3;
}

/// The treatment of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteType {
    Unicast,
    Unreachable,
    /// The kernel's number of another type.
    Other(u8),
}

impl RouteType {
    fn number(self) -> u8 {
        match self {
            Self::Unicast => 1,
            Self::Unreachable => 7,
            Self::Other(number) => number,
        }
    }

    fn of(number: u8) -> Self {
        match number {
            1 => Self::Unicast,
            7 => Self::Unreachable,
            number => Self::Other(number),
        }
    }
}

/// A route, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteEntry {
    /// The unspecified address for everything.
    pub destination: IpAddr,
    pub prefix: u8,
    pub gateway: Option<IpAddr>,
    /// The link's index.
    pub link: Option<u32>,
    pub table: u32,
    pub protocol: u8,
    pub route_type: RouteType,
    pub metric: Option<u32>,
}

impl RouteEntry {
    pub(crate) fn parse(message: &Message<'_>) -> Option<Self> {
        if !matches!(message.kind, NEW | DELETE) {
            return None;
        }
        let attributes = message.attributes(FIXED);
        let everything: IpAddr = match message.byte(0)? {
            INET => Ipv4Addr::UNSPECIFIED.into(),
            INET6 => Ipv6Addr::UNSPECIFIED.into(),
            _ => return None,
        };
        let destination = attributes.ip(DESTINATION).unwrap_or(everything);
        if destination.is_ipv4() != everything.is_ipv4() {
            return None;
        }
        Some(Self {
            destination,
            prefix: message.byte(1)?,
            gateway: attributes.ip(GATEWAY),
            link: attributes.number(LINK),
            table: attributes.number(TABLE).or_else(|| message.byte(4).map(u32::from))?,
            protocol: message.byte(5)?,
            route_type: RouteType::of(message.byte(7)?),
            metric: attributes.number(METRIC),
        })
    }

    pub fn is_default(&self) -> bool {
        self.prefix == 0
    }
}

impl fmt::Display for RouteEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_default() {
            true => f.write_str("default"),
            false => write!(f, "{}/{}", self.destination, self.prefix),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum By<'a> {
    Name(&'a str),
    Index(u32),
}

/// A route to make or to delete.
#[derive(Debug, Clone, Copy)]
pub struct Route<'a> {
    destination: IpAddr,
    prefix: u8,
    gateway: Option<IpAddr>,
    link: Option<By<'a>>,
    table: u32,
    protocol: u8,
    scope: Option<Scope>,
    route_type: RouteType,
    metric: Option<u32>,
    mtu: Option<u32>,
    flags: u32,
}

impl<'a> Route<'a> {
    /// A route to a range, in the main table.
    pub fn new(destination: IpAddr, prefix: u8) -> Self {
        Self {
            destination,
            prefix,
            gateway: None,
            link: None,
            table: table::MAIN,
            protocol: protocol::BOOT,
            scope: None,
            route_type: RouteType::Unicast,
            metric: None,
            mtu: None,
            flags: 0,
        }
    }

    /// The route for everything by a gateway.
    pub fn default_by(gateway: IpAddr) -> Self {
        let everything: IpAddr = match gateway {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self::new(everything, 0).gateway(gateway)
    }

    #[must_use]
    pub fn gateway(self, gateway: IpAddr) -> Self {
        Self { gateway: Some(gateway), ..self }
    }

    /// By a link, by the link's name.
    #[must_use]
    pub fn dev(self, link: &'a str) -> Self {
        Self { link: Some(By::Name(link)), ..self }
    }

    /// By a link, by the link's index.
    #[must_use]
    pub fn dev_index(self, index: u32) -> Self {
        Self { link: Some(By::Index(index)), ..self }
    }

    #[must_use]
    pub fn table(self, table: u32) -> Self {
        Self { table, ..self }
    }

    #[must_use]
    pub fn protocol(self, protocol: u8) -> Self {
        Self { protocol, ..self }
    }

    /// The scope, if it is not the one that follows from the gateway.
    #[must_use]
    pub fn scope(self, scope: Scope) -> Self {
        Self { scope: Some(scope), ..self }
    }

    #[must_use]
    pub fn route_type(self, route_type: RouteType) -> Self {
        Self { route_type, ..self }
    }

    /// Of two routes to a range, the one with the lower metric counts.
    #[must_use]
    pub fn metric(self, metric: u32) -> Self {
        Self { metric: Some(metric), ..self }
    }

    /// The MTU of packets that take the route.
    #[must_use]
    pub fn mtu(self, mtu: u32) -> Self {
        Self { mtu: Some(mtu), ..self }
    }

    /// The gateway is on the link, whatever addresses the link has.
    #[must_use]
    pub fn onlink(self) -> Self {
        Self { flags: self.flags | ON_LINK, ..self }
    }

    pub(crate) fn write(&self, request: &mut Messages, link: Option<u32>) {
        let scope = self.scope.unwrap_or(match (self.route_type, self.gateway) {
            (RouteType::Unicast, None) => Scope::Link,
            _ => Scope::Universe,
        });
        let short_table = u8::try_from(self.table).unwrap_or(0);
        let family = family_of(self.destination);
        let kind = self.route_type.number();
        request.push(&[family, self.prefix, 0, 0, short_table, self.protocol, scope as u8, kind]);
        request.push(&self.flags.to_ne_bytes());
        if self.prefix > 0 {
            request.ip(DESTINATION, self.destination);
        }
        if let Some(gateway) = self.gateway {
            request.ip(GATEWAY, gateway);
        }
        if let Some(link) = link {
            request.number(LINK, link);
        }
        if short_table == 0 {
            request.number(TABLE, self.table);
        }
        if let Some(metric) = self.metric {
            request.number(METRIC, metric);
        }
        if let Some(mtu) = self.mtu {
            request.nest(METRICS, |m| m.number(MTU_METRIC, mtu));
        }
    }
}

impl Connection {
    /// The routes of both families, in all tables.
    pub async fn get_routes(&self) -> Result<Vec<RouteEntry>, Error> {
        self.list("list routes", GET, &[0; FIXED], RouteEntry::parse).await
    }

    /// Fails if there is such a route.
    pub async fn add_route(&self, route: Route<'_>) -> Result<(), Error> {
        self.send_route("add a route", NEW, flag::CREATE | flag::EXCLUSIVE, route).await
    }

    pub async fn replace_route(&self, route: Route<'_>) -> Result<(), Error> {
        self.send_route("set a route", NEW, flag::CREATE | flag::REPLACE, route).await
    }

    pub async fn del_route(&self, route: Route<'_>) -> Result<(), Error> {
        self.send_route("delete a route", DELETE, 0, route).await
    }

    /// Returns false if there was no such route.
    pub async fn del_route_if_exists(&self, route: Route<'_>) -> Result<bool, Error> {
        Error::existed(self.del_route(route).await)
    }

    async fn send_route(
        &self,
        name: &'static str,
        kind: u16,
        flags: u16,
        route: Route<'_>,
    ) -> Result<(), Error> {
        let link = match route.link {
            Some(By::Name(name)) => Some(self.index_of(name).await?),
            Some(By::Index(index)) => Some(index),
            None => None,
        };
        let mut request = Messages::request(kind, flags);
        route.write(&mut request, link);
        self.change(name, request).await
    }
}
