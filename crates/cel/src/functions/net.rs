//! IP addresses and networks.

use std::any::Any;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Entry, NO_MATCH};
use crate::error::{EvalError, NO_SUCH_OVERLOAD, err};
use crate::value::{Opaque, Value};

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

/// An IP address, as `ip()` makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ip(pub IpAddr);

/// An address with the length of a prefix, as `cidr()` makes it. Bits after the prefix are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    pub address: IpAddr,
    pub bits: u8,
}

pub(super) const TABLE: &[Entry] = &[
    ("ip", |_, args| match args {
        [Value::String(text)] => Ip::parse(text).map(Value::opaque),
        [value] => with_cidr(value, |cidr| Ok(Value::opaque(Ip(cidr.address)))),
        _ => Err(NO_MATCH),
    }),
    ("isIP", |_, args| match args {
        [Value::String(text)] => Ok(Value::Bool(Ip::parse(text).is_ok())),
        _ => Err(NO_MATCH),
    }),
    ("ip.isCanonical", |_, args| match args {
        [Value::String(text)] => Ok(Value::Bool(Ip::parse(text)?.0.to_string() == **text)),
        _ => Err(NO_MATCH),
    }),
    ("family", |_, args| with_ip(args, |ip| Value::Int(if ip.is_ipv4() { 4 } else { 6 }))),
    ("isUnspecified", |_, args| with_ip(args, |ip| Value::Bool(ip.is_unspecified()))),
    ("isLoopback", |_, args| with_ip(args, |ip| Value::Bool(ip.is_loopback()))),
    ("isLinkLocalMulticast", |_, args| with_ip(args, |ip| Value::Bool(is_link_local_multicast(ip)))),
    ("isLinkLocalUnicast", |_, args| with_ip(args, |ip| Value::Bool(is_link_local_unicast(ip)))),
    ("isGlobalUnicast", |_, args| with_ip(args, |ip| Value::Bool(is_global_unicast(ip)))),
    ("cidr", |_, args| match args {
        [Value::String(text)] => Cidr::parse(text)
            .map(Value::opaque)
            .map_err(|error| err!("network address parse error during conversion from string: {error}")),
        _ => Err(NO_MATCH),
    }),
    ("isCIDR", |_, args| match args {
        [Value::String(text)] => Ok(Value::Bool(Cidr::parse(text).is_ok())),
        _ => Err(NO_MATCH),
    }),
    ("containsIP", |_, args| {
        let [cidr, other] = &*args else { return Err(NO_MATCH) };
        let ip = match other {
            // As upstream: a text that is no address is an argument of the wrong type.
            Value::String(text) => Ip::parse(text).map_err(|_| NO_SUCH_OVERLOAD)?,
            other => *other.downcast::<Ip>().ok_or(NO_MATCH)?,
        };
        with_cidr(cidr, |cidr| Ok(Value::Bool(cidr.contains(&ip.0))))
    }),
    ("containsCIDR", |_, args| {
        let [cidr, other] = &*args else { return Err(NO_MATCH) };
        let other = match other {
            Value::String(text) => Cidr::parse(text).map_err(|error| {
                err!("network address parse error during conversion from string: {error}")
            })?,
            other => *other.downcast::<Cidr>().ok_or(NO_MATCH)?,
        };
        with_cidr(cidr, |cidr| Ok(Value::Bool(cidr.bits <= other.bits && cidr.contains(&other.address))))
    }),
    ("prefixLength", |_, args| match args {
        [value] => with_cidr(value, |cidr| Ok(Value::Int(cidr.bits.into()))),
        _ => Err(NO_MATCH),
    }),
    ("masked", |_, args| match args {
        [value] => with_cidr(value, |cidr| Ok(Value::opaque(cidr.masked()))),
        _ => Err(NO_MATCH),
    }),
];

fn with_ip<'a>(args: &[Value<'a>], by: fn(&IpAddr) -> Value<'a>) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    value.downcast::<Ip>().map(|ip| by(&ip.0)).ok_or(NO_MATCH)
}

fn with_cidr<'a>(value: &Value<'a>, by: impl FnOnce(&Cidr) -> Result<'a>) -> Result<'a> {
    by(value.downcast::<Cidr>().ok_or(NO_MATCH)?)
}

fn is_link_local_multicast(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.octets()[..3] == [224, 0, 0],
        IpAddr::V6(ip) => ip.segments()[0] & 0xff0f == 0xff02,
    }
}

fn is_link_local_unicast(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.segments()[0] & 0xffc0 == 0xfe80,
    }
}

fn is_global_unicast(ip: &IpAddr) -> bool {
    let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    !broadcast
        && !ip.is_unspecified()
        && !ip.is_loopback()
        && !ip.is_multicast()
        && !is_link_local_unicast(ip)
}

/// A problem with an address, and the text at which it was found.
struct AddressError {
    message: &'static str,
    at: String,
}

fn problem(message: &'static str, at: &str) -> AddressError {
    AddressError { message, at: at.to_owned() }
}

/// An address and its zone, read as Go reads it.
fn parse_address(text: &str) -> std::result::Result<(IpAddr, bool), EvalError> {
    let parsed = match text.find(['.', ':', '%']).map(|at| text.as_bytes()[at]) {
        Some(b'.') => parse_v4(text).map(|octets| (IpAddr::from(octets), false)),
        Some(b':') => parse_v6(text).map(|(octets, zone)| (IpAddr::V6(Ipv6Addr::from(octets)), zone)),
        Some(_) => Err(problem("missing IPv6 address", "")),
        None => Err(problem("unable to parse IP", "")),
    };
    parsed.map_err(|AddressError { message, at }| match at.is_empty() {
        true => err!("ParseAddr({text:?}): {message}"),
        false => err!("ParseAddr({text:?}): {message} (at {at:?})"),
    })
}

fn parse_v4(text: &str) -> std::result::Result<[u8; 4], AddressError> {
    let mut octets = [0; 4];
    let (mut value, mut digits, mut position) = (0_u32, 0, 0);
    let bytes = text.as_bytes();
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            b'0'..=b'9' => {
                if digits == 1 && value == 0 {
                    return Err(problem("IPv4 field has octet with leading zero", ""));
                }
                value = value * 10 + u32::from(byte - b'0');
                digits += 1;
                if value > 255 {
                    return Err(problem("IPv4 field has value >255", ""));
                }
            }
            b'.' => {
                if at == 0 || at + 1 == bytes.len() || bytes[at - 1] == b'.' {
                    return Err(problem("IPv4 field must have at least one digit", &text[at..]));
                }
                if position == 3 {
                    return Err(problem("IPv4 address too long", ""));
                }
                octets[position] = value as u8;
                position += 1;
                (value, digits) = (0, 0);
            }
            _ => return Err(problem("unexpected character", text.get(at..).unwrap_or_default())),
        }
    }
    if position < 3 {
        return Err(problem("IPv4 address too short", ""));
    }
    octets[3] = value as u8;
    Ok(octets)
}

fn parse_v6(text: &str) -> std::result::Result<([u8; 16], bool), AddressError> {
    let (mut rest, zone) = match text.split_once('%') {
        Some((_, "")) => return Err(problem("zone must be a non-empty string", "")),
        Some((address, _)) => (address, true),
        None => (text, false),
    };
    let mut octets = [0_u8; 16];
    let mut ellipsis = None;
    if let Some(after) = rest.strip_prefix("::") {
        ellipsis = Some(0);
        rest = after;
        if rest.is_empty() {
            return Ok((octets, zone));
        }
    }
    let mut at = 0;
    while at < 16 {
        let digits = rest.bytes().take_while(u8::is_ascii_hexdigit).count();
        if digits > 4 {
            return Err(problem("each group must have 4 or fewer digits", rest));
        }
        if digits == 0 {
            return Err(problem("each colon-separated field must have at least one digit", rest));
        }
        if rest.as_bytes().get(digits) == Some(&b'.') {
            if ellipsis.is_none() && at != 12 {
                let message = "embedded IPv4 address must replace the final 2 fields of the address";
                return Err(problem(message, rest));
            }
            if at + 4 > 16 {
                let message = "too many hex fields to fit an embedded IPv4 at the end of the address";
                return Err(problem(message, rest));
            }
            octets[at..at + 4].copy_from_slice(&parse_v4(rest)?);
            rest = "";
            at += 4;
            break;
        }
        let group = u16::from_str_radix(&rest[..digits], 16).unwrap_or(0);
        octets[at..at + 2].copy_from_slice(&group.to_be_bytes());
        at += 2;
        rest = &rest[digits..];
        if rest.is_empty() {
            break;
        }
        if !rest.starts_with(':') {
            return Err(problem("unexpected character, want colon", rest));
        }
        if rest.len() == 1 {
            return Err(problem("colon must be followed by more characters", rest));
        }
        rest = &rest[1..];
        if rest.starts_with(':') {
            if ellipsis.is_some() {
                return Err(problem("multiple :: in address", rest));
            }
            ellipsis = Some(at);
            rest = &rest[1..];
            if rest.is_empty() {
                break;
            }
        }
    }
    if !rest.is_empty() {
        return Err(problem("trailing garbage after address", rest));
    }
    if at < 16 {
        let Some(ellipsis) = ellipsis else { return Err(problem("address string too short", "")) };
        let tail = at - ellipsis;
        octets.copy_within(ellipsis..at, 16 - tail);
        octets[ellipsis..16 - tail].fill(0);
    } else if ellipsis.is_some() {
        return Err(problem("the :: must expand to at least one field of zeros", ""));
    }
    Ok((octets, zone))
}

fn is_mapped(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some())
}

impl Ip {
    pub fn parse(text: &str) -> std::result::Result<Self, EvalError> {
        let (address, zone) = parse_address(text).map_err(|error| {
            err!("IP Address {text:?} parse error during conversion from string: {error}")
        })?;
        if zone {
            return Err(err!("IP address {text:?} with zone value is not allowed"));
        }
        if is_mapped(&address) {
            return Err(err!("IPv4-mapped IPv6 address {text:?} is not allowed"));
        }
        Ok(Self(address))
    }
}

impl Cidr {
    pub fn parse(text: &str) -> std::result::Result<Self, EvalError> {
        let prefix = Self::parse_prefix(text).map_err(|message| {
            err!(
                "network address parse error during conversion from string: netip.ParsePrefix({text:?}): {message}"
            )
        })?;
        if is_mapped(&prefix.address) {
            return Err(err!("IPv4-mapped IPv6 address {text:?} is not allowed"));
        }
        Ok(prefix)
    }

    fn parse_prefix(text: &str) -> std::result::Result<Self, String> {
        let (address, bits) = text.rsplit_once('/').ok_or("no '/'")?;
        let (address, zone) = parse_address(address).map_err(|error| error.to_string())?;
        if zone {
            return Err("IPv6 zones cannot be present in a prefix".into());
        }
        let bad = || format!("bad bits after slash: {bits:?}");
        if bits.len() > 1 && !matches!(bits.as_bytes()[0], b'1'..=b'9') {
            return Err(bad());
        }
        let length: i64 = bits.parse().map_err(|_| bad())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        match u8::try_from(length) {
            Ok(bits) if bits <= most => Ok(Self { address, bits }),
            _ => Err("prefix length out of range".into()),
        }
    }

    fn contains(&self, ip: &IpAddr) -> bool {
        self.address.is_ipv4() == ip.is_ipv4()
            && Self { address: *ip, bits: self.bits }.masked().address == self.masked().address
    }

    fn masked(&self) -> Self {
        let address = match self.address {
            IpAddr::V4(ip) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.bits)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from(u32::from(ip) & mask))
            }
            IpAddr::V6(ip) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.bits)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from(u128::from(ip) & mask))
            }
        };
        Self { address, bits: self.bits }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

impl Opaque for Ip {
    fn type_name(&self) -> &'static str {
        "net.IP"
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        other.as_any().downcast_ref::<Self>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.0.to_string()
    }

    fn size(&self) -> Option<u64> {
        Some(if self.0.is_ipv4() { 4 } else { 16 })
    }
}

impl Opaque for Cidr {
    fn type_name(&self) -> &'static str {
        "net.CIDR"
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        other.as_any().downcast_ref::<Self>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.to_string()
    }

    fn size(&self) -> Option<u64> {
        Some(u64::from(self.bits).div_ceil(8))
    }
}
