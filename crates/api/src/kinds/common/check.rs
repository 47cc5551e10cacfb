//! Checks many kinds share, in upstream's wording.

pub use crate::cidr::Cidr;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, list, text};
use crate::meta_validation::{label_value, port_name, port_number, qualified_name};
use ferrite_json::Value;
use std::net::IpAddr;

pub const NOT_NEGATIVE: &str = "must be greater than or equal to 0";
pub const IMMUTABLE: &str = "field is immutable";
pub const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];

/// One error per complaint about a value.
pub fn complaints(path: &Path, value: &str, problems: Vec<String>) -> FieldErrors {
    problems.into_iter().map(|p| FieldError::invalid(path, value, p)).collect()
}

/// An error when an integer field is set and negative.
pub fn not_negative(object: &Value, key: &str, path: &Path) -> Option<FieldError> {
    let value = object.get(key)?.as_i64()?;
    (value < 0).then(|| FieldError::invalid(&path.child(key), value, NOT_NEGATIVE))
}

/// An error when a text is not one of those allowed; an empty one is missing.
pub fn one_of(object: &Value, key: &str, path: &Path, allowed: &[&str]) -> Option<FieldError> {
    let value = text(object, key);
    let path = path.child(key);
    if value.is_empty() {
        Some(FieldError::required(&path, ""))
    } else if allowed.contains(&value) {
        None
    } else {
        Some(FieldError::not_supported(&path, value, allowed))
    }
}

/// As [`one_of`], for a field that need not be set.
pub fn one_of_if_set(object: &Value, key: &str, path: &Path, allowed: &[&str]) -> Option<FieldError> {
    object
        .get(key)
        .and_then(Value::as_str)
        .filter(|v| !allowed.contains(v))
        .map(|value| FieldError::not_supported(&path.child(key), value, allowed))
}

/// A port given by number or by name.
pub fn port_number_or_name(port: &Value, path: &Path) -> FieldErrors {
    match port {
        Value::String(name) => complaints(path, name, port_name(name)),
        other => {
            let number = other.as_i64().unwrap_or(0);
            port_number(number).map(|p| FieldError::invalid(path, number, p)).into_iter().collect()
        }
    }
}

/// The errors of a number that should be a port.
pub fn port(number: i64, path: &Path) -> Option<FieldError> {
    port_number(number).map(|p| FieldError::invalid(path, number, p))
}

pub const NOT_AN_IP: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";

/// Reads an address; a complaint when it is none, or is written in a way that some read otherwise.
pub fn ip(value: &str, path: &Path) -> Result<IpAddr, FieldErrors> {
    let wrong = |why: &str| Err(vec![FieldError::invalid(path, value, why)]);
    match value.parse() {
        Ok(address) if is_mapped(address) => wrong("must not be an IPv4-mapped IPv6 address"),
        Ok(address) => Ok(address),
        Err(_) if without_leading_zeros(value).is_some() => wrong("must not have leading 0s"),
        Err(_) => wrong(NOT_AN_IP),
    }
}

/// Reads an address as Go's lenient reader does, which takes leading zeros.
pub fn lenient_ip(value: &str) -> Option<IpAddr> {
    value.parse().ok().or_else(|| without_leading_zeros(value))
}

fn is_mapped(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some())
}

/// An address of four decimal numbers, some with leading zeros, which some take for octal.
fn without_leading_zeros(value: &str) -> Option<IpAddr> {
    let parts: Vec<&str> = value.split('.').collect();
    let octet = |part: &&str| {
        let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| part.parse::<u8>().ok()).flatten()
    };
    let octets: Vec<u8> = parts.iter().map_while(octet).collect();
    let octets: [u8; 4] = octets.try_into().ok().filter(|_| parts.len() == 4)?;
    Some(IpAddr::from(octets))
}

/// The warning for an address that is not in canonical form.
pub fn ip_warning(value: &str, path: &Path) -> Option<String> {
    let address: IpAddr = value.parse().ok()?;
    let canonical = address.to_string();
    (address.is_ipv6() && canonical != value).then(|| {
        format!("{path}: IPv6 address {value:?} should be in RFC 5952 canonical format ({canonical:?})")
    })
}

/// An address that other machines cannot reach, or reach more than one of, is no endpoint.
pub fn endpoint_address(address: IpAddr, value: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut complain = |why: &str| errors.push(FieldError::invalid(path, value, why));
    if address.is_unspecified() {
        complain(&format!("may not be unspecified ({value})"));
    }
    if address.is_loopback() {
        complain("may not be in the loopback range (127.0.0.0/8, ::1/128)");
    }
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.segments()[0] & 0xffc0 == 0xfe80,
    };
    if link_local {
        complain("may not be in the link-local range (169.254.0.0/16, fe80::/10)");
    }
    let multicast = match address {
        IpAddr::V4(v4) => v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.segments()[0] & 0xff0f == 0xff02,
    };
    if multicast {
        complain("may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)");
    }
    errors
}

/// Conditions on labels and fields of nodes. Values that no label has do no harm where they are only preferred.
pub fn node_selector_term(term: &Value, preferred: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (index, requirement) in list(term, "matchExpressions").iter().enumerate() {
        let path = path.child("matchExpressions").index(index);
        let values = list(requirement, "values");
        match text(requirement, "operator") {
            "In" | "NotIn" if values.is_empty() => errors.push(FieldError::required(
                &path.child("values"),
                "must be specified when `operator` is 'In' or 'NotIn'",
            )),
            "Exists" | "DoesNotExist" if !values.is_empty() => errors.push(FieldError::forbidden(
                &path.child("values"),
                "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
            )),
            "Gt" | "Lt" if values.len() != 1 => errors.push(FieldError::required(
                &path.child("values"),
                "must be specified single value when `operator` is 'Lt' or 'Gt'",
            )),
            "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
            other => errors.push(FieldError::invalid(
                &path.child("operator"),
                other,
                "not a valid selector operator",
            )),
        }
        let key = text(requirement, "key");
        errors.extend(complaints(&path.child("key"), key, qualified_name(key)));
        for (index, value) in values.iter().filter_map(Value::as_str).enumerate().filter(|_| !preferred) {
            errors.extend(complaints(&path.child("values").index(index), value, label_value(value)));
        }
    }
    for (index, requirement) in list(term, "matchFields").iter().enumerate() {
        let path = path.child("matchFields").index(index);
        let values = list(requirement, "values");
        match text(requirement, "operator") {
            "In" | "NotIn" if values.len() == 1 => {}
            "In" | "NotIn" => errors.push(FieldError::required(
                &path.child("values"),
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
            )),
            other => errors.push(FieldError::invalid(
                &path.child("operator"),
                other,
                "not a valid selector operator",
            )),
        }
        let key = text(requirement, "key");
        if key != "metadata.name" {
            errors.push(FieldError::invalid(&path.child("key"), key, "not a valid field selector key"));
            continue;
        }
        for (index, value) in values.iter().filter_map(Value::as_str).enumerate() {
            let path = path.child("values").index(index);
            errors.extend(complaints(&path, value, crate::meta_validation::dns1123_subdomain(value)));
        }
    }
    errors
}

/// The number of a percentage; nothing when the text is none.
pub fn percent(text: &str) -> Option<u64> {
    let digits = text.strip_suffix('%')?;
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(digits.parse().unwrap_or(u64::MAX))
}

/// A count, or a share of a whole.
pub fn int_or_percent(value: &Value, path: &Path) -> Option<FieldError> {
    match value {
        Value::String(text) if percent(text).is_none() => Some(FieldError::invalid(
            path,
            text.as_str(),
            "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  or '93%', \
             regex used for validation is '[0-9]+%')",
        )),
        other => {
            let count = other.as_i64().filter(|n| *n < 0)?;
            Some(FieldError::invalid(path, count, NOT_NEGATIVE))
        }
    }
}

/// A share of a whole is at most the whole.
pub fn at_most_whole(value: &Value, path: &Path) -> Option<FieldError> {
    (value.as_str().and_then(percent)? > 100)
        .then(|| FieldError::invalid(path, value.clone(), "must not be greater than 100%"))
}

/// An error when a text is empty.
pub fn required(object: &Value, key: &str, path: &Path) -> Option<FieldError> {
    text(object, key).is_empty().then(|| FieldError::required(&path.child(key), ""))
}

/// An error if a value has changed.
pub fn immutable(new: &Value, old: &Value, path: &Path) -> Option<FieldError> {
    let is = |v: &Value| if v.as_str() == Some("") { Value::Null } else { v.clone() };
    (is(new) != is(old)).then(|| FieldError::invalid(path, new.clone(), IMMUTABLE))
}

/// A name that must be set and pass a check.
pub fn named(object: &Value, key: &str, path: &Path, check: impl Fn(&str) -> Vec<String>) -> FieldErrors {
    match text(object, key) {
        "" => vec![FieldError::required(&path.child(key), "")],
        name => complaints(&path.child(key), name, check(name)),
    }
}

/// A name that, when it is set, must pass a check.
pub fn named_if_set(
    object: &Value,
    key: &str,
    path: &Path,
    check: impl Fn(&str) -> Vec<String>,
) -> FieldErrors {
    match text(object, key) {
        "" => Vec::new(),
        name => complaints(&path.child(key), name, check(name)),
    }
}

pub const NOT_A_CIDR: &str = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";

/// Reads a range; a complaint when it is none, or is written in a way that some read otherwise.
pub fn cidr(value: &str, path: &Path) -> Result<Cidr, FieldErrors> {
    let wrong = |why: &str| Err(vec![FieldError::invalid(path, value, why)]);
    let padded = |bits: &str| bits.len() > 1 && bits.starts_with('0');
    match Cidr::parse(value) {
        None if value.split_once('/').is_some_and(|(address, bits)| {
            without_leading_zeros(address).is_some() && bits.parse::<u8>().is_ok_and(|bits| bits <= 32)
        }) =>
        {
            wrong("must not have leading 0s in IP or prefix length")
        }
        None => wrong(NOT_A_CIDR),
        Some(_) if value.split_once('/').is_some_and(|(_, bits)| padded(bits)) => {
            wrong("must not have leading 0s in IP or prefix length")
        }
        Some(range) if is_mapped(range.address) => wrong("must not have an IPv4-mapped IPv6 address"),
        Some(range) if !range.is_canonical() => wrong("must not have bits set beyond the prefix length"),
        Some(range) => Ok(range),
    }
}

/// Returns true if a count or percentage is zero.
pub fn is_zero_share(value: &Value) -> bool {
    match value {
        Value::String(text) => percent(text) == Some(0),
        other => other.as_i64().unwrap_or(0) == 0,
    }
}

/// Complaints about an address that names an object: its one canonical form.
pub fn strict_ip(value: &str) -> Vec<String> {
    if let Ok(address) = value.parse::<IpAddr>() {
        if is_mapped(address) {
            return vec!["must not be an IPv4-mapped IPv6 address".to_owned()];
        }
        let canonical = address.to_string();
        return if canonical == value {
            Vec::new()
        } else {
            vec![format!("must be in canonical form ({canonical:?})")]
        };
    }
    if without_leading_zeros(value).is_some() {
        return vec!["must not have leading 0s".to_owned()];
    }
    vec![NOT_AN_IP.to_owned()]
}

/// For each element of a list, true if it stood there before. A list may be as long as a request's body.
pub fn repeated<T: std::hash::Hash + Eq>(items: impl IntoIterator<Item = T>) -> Vec<bool> {
    let mut seen = std::collections::HashSet::new();
    items.into_iter().map(|item| !seen.insert(item)).collect()
}

/// Conditions of `meta/v1`.
pub fn conditions(conditions: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let again = repeated(conditions.iter().map(|condition| text(condition, "type")));
    for (index, condition) in conditions.iter().enumerate() {
        let path = path.index(index);
        let kind = text(condition, "type");
        if again[index] {
            errors.push(FieldError::duplicate(&path.child("type"), kind));
        }
        errors.extend(condition_fields(condition, &path));
    }
    errors
}

fn condition_fields(condition: &Value, path: &Path) -> FieldErrors {
    const STATUSES: [&str; 3] = ["False", "True", "Unknown"];
    const REASON_MAX: usize = 1024;
    const MESSAGE_MAX: usize = 32 * 1024;
    const REASON: &str = "a condition reason must start with alphabetic character, optionally followed by a string of alphanumeric characters or '_,:', and must end with an alphanumeric character or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName',  or 'ReasonA,ReasonB',  or 'ReasonA:ReasonB', regex used for validation is '[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?')";
    let (kind, status) = (text(condition, "type"), text(condition, "status"));
    let mut errors = complaints(&path.child("type"), kind, qualified_name(kind));
    if !STATUSES.contains(&status) {
        errors.push(FieldError::not_supported(&path.child("status"), status, &STATUSES));
    }
    let generation = int(condition, "observedGeneration");
    if generation < 0 {
        let why = "must be greater than or equal to zero";
        errors.push(FieldError::invalid(&path.child("observedGeneration"), generation, why));
    }
    if text(condition, "lastTransitionTime").is_empty() {
        errors.push(FieldError::required(&path.child("lastTransitionTime"), ""));
    }
    let (reason, at) = (text(condition, "reason"), path.child("reason"));
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b',' | b':');
    let reads = reason.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic())
        && reason.bytes().all(inner)
        && reason.bytes().last().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if reason.is_empty() {
        errors.push(FieldError::required(&at, ""));
    } else {
        if !reads {
            errors.push(FieldError::invalid(&at, reason, REASON));
        }
        if reason.len() > REASON_MAX {
            errors.push(FieldError::too_long(&at, REASON_MAX));
        }
    }
    if text(condition, "message").len() > MESSAGE_MAX {
        errors.push(FieldError::too_long(&path.child("message"), MESSAGE_MAX));
    }
    errors
}
