//! URLs, read as Go reads the target of a request.

use std::any::Any;

use super::{Entry, NO_MATCH};
use crate::error::{EvalError, err};
use crate::value::{Map, Opaque, Value};

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

/// An absolute URL or an absolute path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    text: String,
    scheme: String,
    host: String,
    path: String,
    query: String,
}

pub(super) const TABLE: &[Entry] = &[
    ("url", |_, args| match args {
        [Value::String(text)] => Url::parse(text)
            .map(Value::opaque)
            .map_err(|error| err!("URL parse error during conversion from string: {error}")),
        _ => Err(NO_MATCH),
    }),
    ("isURL", |_, args| match args {
        [Value::String(text)] => Ok(Value::Bool(Url::parse(text).is_ok())),
        _ => Err(NO_MATCH),
    }),
    ("getScheme", |_, args| part(args, |url| url.scheme.clone())),
    ("getHost", |_, args| part(args, |url| url.host.clone())),
    ("getHostname", |_, args| part(args, |url| url.host_and_port().0)),
    ("getPort", |_, args| part(args, |url| url.host_and_port().1)),
    ("getEscapedPath", |_, args| part(args, |url| url.path.clone())),
    ("getQuery", |_, args| query(args)),
];

fn part<'a>(args: &[Value<'a>], of: fn(&Url) -> String) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    Ok(Value::from(of(value.downcast::<Url>().ok_or(NO_MATCH)?)))
}

fn query<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    let url = value.downcast::<Url>().ok_or(NO_MATCH)?;
    let mut keys: Vec<(String, Vec<Value<'a>>)> = Vec::new();
    for pair in url.query.split('&').filter(|pair| !pair.is_empty() && !pair.contains(';')) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let (Some(key), Some(value)) = (unescape(key, true), unescape(value, true)) else { continue };
        let value = Value::from(value);
        match keys.iter_mut().find(|(own, _)| *own == key) {
            Some((_, values)) => values.push(value),
            None => keys.push((key, vec![value])),
        }
    }
    Ok(Value::Map(Map::new(keys.into_iter().map(|(key, values)| (Value::from(key), Value::list(values))))))
}

/// Replaces percent escapes, and pluses in queries. `None` if an escape is invalid.
fn unescape(text: &str, in_query: bool) -> Option<String> {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'%' => {
                let digits = text
                    .get(at + 1..at + 3)
                    .filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))?;
                decoded.push(u8::from_str_radix(digits, 16).ok()?);
                at += 3;
            }
            b'+' if in_query => {
                decoded.push(b' ');
                at += 1;
            }
            byte => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    Some(String::from_utf8_lossy(&decoded).into_owned())
}

/// The first escape of `text` that is invalid.
fn invalid_escape(text: &str) -> Option<&str> {
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        rest = &rest[at..];
        let valid = rest.get(1..3).is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        if !valid {
            let end = rest.char_indices().map(|(at, c)| at + c.len_utf8()).nth(2).unwrap_or(rest.len());
            return Some(&rest[..end]);
        }
        rest = &rest[3..];
    }
    None
}

impl Url {
    pub fn parse(text: &str) -> std::result::Result<Self, EvalError> {
        let failed = |message: String| err!("parse {text:?}: {message}");
        if text.bytes().any(|b| b < 0x20 || b == 0x7f) {
            return Err(failed("net/url: invalid control character in URL".into()));
        }
        if text.is_empty() {
            return Err(failed("empty url".into()));
        }
        let mut url = Self {
            text: text.into(),
            scheme: String::new(),
            host: String::new(),
            path: String::new(),
            query: String::new(),
        };
        if text == "*" {
            url.path = "*".into();
            return Ok(url);
        }
        let (scheme, rest) = split_scheme(text).map_err(failed)?;
        url.scheme = scheme.to_ascii_lowercase();
        // A request has no fragment: it is checked as a part of the preceding component, and then left out.
        if let Some(escape) = rest
            .split_once('?')
            .map_or(rest, |(path, _)| path)
            .split_once('#')
            .and_then(|(_, f)| invalid_escape(f))
        {
            return Err(failed(format!("invalid URL escape {escape:?}")));
        }
        let rest = rest.split_once('#').map_or(rest, |(rest, _)| rest);
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        url.query = query.into();
        if !rest.starts_with('/') {
            if !url.scheme.is_empty() {
                // An opaque URL such as mailto:a@b has neither a host nor a path.
                return Ok(url);
            }
            return Err(failed("invalid URI for request".into()));
        }
        let mut path = rest;
        if let (false, Some(authority)) = (url.scheme.is_empty(), rest.strip_prefix("//")) {
            let end = authority.find('/').unwrap_or(authority.len());
            url.host = parse_authority(&authority[..end]).map_err(failed)?;
            path = &authority[end..];
        }
        if let Some(escape) = invalid_escape(path) {
            return Err(failed(format!("invalid URL escape {escape:?}")));
        }
        url.path = escaped_path(path);
        Ok(url)
    }

    fn host_and_port(&self) -> (String, String) {
        if let Some(address) = self.host.strip_prefix('[') {
            let (address, after) = address.split_once(']').unwrap_or((address, ""));
            return (address.into(), after.strip_prefix(':').unwrap_or_default().into());
        }
        match self.host.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => (host.into(), port.into()),
            _ => (self.host.clone(), String::new()),
        }
    }
}

fn split_scheme(text: &str) -> std::result::Result<(&str, &str), String> {
    for (at, c) in text.char_indices() {
        match c {
            'a'..='z' | 'A'..='Z' => {}
            '0'..='9' | '+' | '-' | '.' if at > 0 => {}
            ':' if at == 0 => return Err("missing protocol scheme".into()),
            ':' => return Ok((&text[..at], &text[at + 1..])),
            _ => return Ok(("", text)),
        }
    }
    Ok(("", text))
}

fn parse_authority(authority: &str) -> std::result::Result<String, String> {
    let (user, host) =
        authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
    let allowed_in_user = |c: char| c.is_ascii_alphanumeric() || "-._:~!$&'()*+,;=%@".contains(c);
    if user.is_some_and(|user| !user.chars().all(allowed_in_user)) {
        return Err("net/url: invalid userinfo".into());
    }
    let port = match host.strip_prefix('[') {
        Some(address) => match address.rfind(']') {
            None => return Err("missing ']' in host".into()),
            Some(end) => &address[end + 1..],
        },
        None => host.rfind(':').map_or("", |at| &host[at..]),
    };
    let valid = port.is_empty()
        || port.strip_prefix(':').is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
    if !valid {
        return Err(format!("invalid port {port:?} after host"));
    }
    if let Some(escape) = invalid_escape(host) {
        return Err(format!("invalid URL escape {escape:?}"));
    }
    let allowed =
        |c: char| c.is_ascii_alphanumeric() || !c.is_ascii() || "-_.~!$&'()*+,;=:[]<>\"%".contains(c);
    if let Some(c) = host.chars().find(|c| !allowed(*c)) {
        return Err(format!("invalid character {:?} in host name", c.to_string()));
    }
    unescape(host, false).ok_or_else(|| "invalid URL escape".into())
}

/// A path as it was written, if that is a valid encoding, or with escapes for all characters that need one.
fn escaped_path(path: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&b);
    if path.bytes().all(|b| plain(b) || b"!'()*[]%".contains(&b)) {
        return path.to_owned();
    }
    let decoded = unescape(path, false).unwrap_or_else(|| path.to_owned());
    let mut escaped = String::with_capacity(decoded.len());
    for byte in decoded.bytes() {
        if plain(byte) {
            escaped.push(byte.into());
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

impl Opaque for Url {
    fn type_name(&self) -> &'static str {
        "kubernetes.URL"
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        other.as_any().downcast_ref::<Self>().is_some_and(|other| self.text == other.text)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.text.clone()
    }
}
