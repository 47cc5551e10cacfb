//! The headers in which a request names the user to impersonate.

use ferrite_api::Status;
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;

/// All of them begin so.
const PREFIX: &str = "impersonate-";
const USER: &str = "impersonate-user";
const UID: &str = "impersonate-uid";
const GROUP: &str = "impersonate-group";
const EXTRA: &str = "impersonate-extra-";

/// The user that a request wants to be made as, as its headers say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Returns true if a request has impersonation headers.
pub(crate) fn impersonates(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| name.as_str().starts_with(PREFIX))
}

/// Removes the headers: as upstream, no layer behind learns from them, and no proxied server sees them.
pub(crate) fn forget(headers: &mut HeaderMap) {
    let names: Vec<HeaderName> = headers
        .keys()
        .filter(|name| matches!(name.as_str(), USER | UID | GROUP) || name.as_str().starts_with(EXTRA))
        .cloned()
        .collect();
    for name in names {
        headers.remove(name);
    }
}

/// A header's text. A header that cannot be read must not count as absent: the request would run as its sender.
fn text(name: &str, value: &HeaderValue) -> Result<String, Status> {
    let text = std::str::from_utf8(value.as_bytes());
    let text = text.map_err(|_| Status::bad_request(format!("the header {name} is not valid UTF-8")))?;
    Ok(text.to_owned())
}

/// The key in the name of a header. As upstream, an escape that makes no sense leaves the key as it is.
fn extra_key(header: &str) -> Result<String, Status> {
    let key = header.strip_prefix(EXTRA).unwrap_or_default();
    let escapes = key.match_indices('%').map(|(at, _)| key.as_bytes().get(at + 1..at + 3));
    if escapes.clone().any(|hex| !hex.is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))) {
        return Ok(key.to_owned());
    }
    let decoded = percent_decode_str(key).decode_utf8();
    let decoded =
        decoded.map_err(|_| Status::bad_request(format!("the header {header} is not valid UTF-8")))?;
    Ok(decoded.into_owned())
}

impl Wanted {
    /// None if the request wants to be made as its sender.
    pub fn parse(headers: &HeaderMap) -> Result<Option<Self>, Status> {
        let first = |name: &str| headers.get(name).map_or(Ok(String::new()), |value| text(name, value));
        let mut wanted = Self { name: first(USER)?, uid: first(UID)?, ..Self::default() };
        for value in headers.get_all(GROUP) {
            wanted.groups.push(text(GROUP, value)?);
        }
        for (header, value) in headers.iter().filter(|(name, _)| name.as_str().starts_with(EXTRA)) {
            let key = extra_key(header.as_str())?;
            wanted.extra.entry(key).or_default().push(text(header.as_str(), value)?);
        }
        if !wanted.name.is_empty() {
            return Ok(Some(wanted));
        }
        if wanted.is_name_only() {
            return Ok(None);
        }
        Err(Status::bad_request(format!("requested {} without impersonating a user name", wanted.in_go())))
    }

    /// Returns true if only the name is given.
    pub fn is_name_only(&self) -> bool {
        self.uid.is_empty() && self.groups.is_empty() && self.extra.is_empty()
    }

    /// The user as Go prints it.
    fn in_go(&self) -> String {
        let list = |items: &[String]| {
            let quoted: Vec<String> = items.iter().map(|i| format!("{i:?}")).collect();
            format!("[]string{{{}}}", quoted.join(", "))
        };
        let groups = if self.groups.is_empty() { "[]string(nil)".into() } else { list(&self.groups) };
        let extra = match self.extra.is_empty() {
            true => "map[string][]string(nil)".into(),
            false => {
                let pairs: Vec<String> =
                    self.extra.iter().map(|(k, v)| format!("{k:?}:{}", list(v))).collect();
                format!("map[string][]string{{{}}}", pairs.join(", "))
            }
        };
        format!("&user.DefaultInfo{{Name:\"\", UID:{:?}, Groups:{groups}, Extra:{extra}}}", self.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(rows: &[(&str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in rows {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn a_header_that_cannot_be_read_is_an_error() {
        for name in ["impersonate-user", "impersonate-uid", "impersonate-group", "impersonate-extra-a"] {
            let refused = Wanted::parse(&headers(&[("impersonate-user", b"jane"), (name, b"\xff")]));
            // Of two names the first counts, as upstream.
            match name {
                "impersonate-user" => assert!(Wanted::parse(&headers(&[(name, b"\xff")])).is_err()),
                _ => assert_eq!(refused.unwrap_err().code, 400, "{name}"),
            }
        }
        assert!(
            Wanted::parse(&headers(&[("impersonate-user", b"a"), ("impersonate-extra-%ff", b"x")])).is_err()
        );
        assert!(Wanted::parse(&headers(&[("impersonate-group", b"g")])).is_err(), "no name");
    }

    #[test]
    fn names_of_any_script_are_taken_and_keys_unescaped() {
        let wanted = Wanted::parse(&headers(&[
            ("impersonate-user", "björn".as_bytes()),
            ("impersonate-extra-acme.io%2fteam", b"x"),
            ("impersonate-extra-50%", b"y"),
        ]));
        let wanted = wanted.unwrap().unwrap();
        assert_eq!(wanted.name, "björn");
        assert_eq!(wanted.extra.keys().collect::<Vec<_>>(), ["50%", "acme.io/team"]);
        assert_eq!(Wanted::parse(&HeaderMap::new()).unwrap(), None);
    }

    #[test]
    fn nobody_behind_sees_the_headers() {
        let mut headers =
            headers(&[("impersonate-user", b"a"), ("impersonate-extra-b", b"x"), ("accept", b"*/*")]);
        forget(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["accept"]);
    }
}
