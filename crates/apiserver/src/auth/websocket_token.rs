//! Tokens of browsers, which cannot set headers of a WebSocket: the token is the name of a protocol among those that the
//! client offers, as upstream.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::SEC_WEBSOCKET_PROTOCOL;
use http::{HeaderMap, HeaderValue};

const PREFIX: &str = "base64url.bearer.authorization.k8s.io.";

/// The token makes no sense, or is not the only one, or nothing else is offered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InvalidToken;

fn offered(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|protocol| !protocol.is_empty())
}

/// The token of a request for a WebSocket, if it has one.
pub(crate) fn token(headers: &HeaderMap) -> Result<Option<String>, InvalidToken> {
    let mut tokens = offered(headers).filter_map(|protocol| protocol.strip_prefix(PREFIX));
    let Some(encoded) = tokens.next() else { return Ok(None) };
    let others = offered(headers).any(|protocol| !protocol.starts_with(PREFIX));
    if tokens.next().is_some() || !others {
        return Err(InvalidToken);
    }
    let decoded = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| InvalidToken)?;
    String::from_utf8(decoded).map(Some).map_err(|_| InvalidToken)
}

/// Removes tokens from the protocols that are offered: a proxied server must not see them.
pub(crate) fn forget(headers: &mut HeaderMap) {
    if !offered(headers).any(|protocol| protocol.starts_with(PREFIX)) {
        return;
    }
    let rest: Vec<&str> = offered(headers).filter(|protocol| !protocol.starts_with(PREFIX)).collect();
    let rest = HeaderValue::from_str(&rest.join(",")).ok();
    headers.remove(SEC_WEBSOCKET_PROTOCOL);
    if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
        headers.insert(SEC_WEBSOCKET_PROTOCOL, rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        values
            .iter()
            .map(|value| (SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_str(value).expect("a value")))
            .collect()
    }

    /// Headers, the token in them, and the protocols that are left.
    type Row<'a> = (&'a [&'a str], Result<Option<&'a str>, InvalidToken>, &'a str);

    #[test]
    fn a_token_is_found_and_passed_on_to_nobody() {
        let rows: &[Row<'_>] = &[
            (&[], Ok(None), ""),
            (&["v5.channel.k8s.io, v4.channel.k8s.io"], Ok(None), "v5.channel.k8s.io, v4.channel.k8s.io"),
            (
                &["v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.YS5iLmM,v4.channel.k8s.io"],
                Ok(Some("a.b.c")),
                "v5.channel.k8s.io,v4.channel.k8s.io",
            ),
            (&["base64url.bearer.authorization.k8s.io.YS5iLmM", "x"], Ok(Some("a.b.c")), "x"),
            (&["base64url.bearer.authorization.k8s.io.YS5iLmM"], Err(InvalidToken), ""),
            (&["x,base64url.bearer.authorization.k8s.io.%"], Err(InvalidToken), "x"),
            (&["x,base64url.bearer.authorization.k8s.io._w"], Err(InvalidToken), "x"),
            (
                &["x,base64url.bearer.authorization.k8s.io.YQ", "base64url.bearer.authorization.k8s.io.YQ"],
                Err(InvalidToken),
                "x",
            ),
        ];
        for (values, expected, rest) in rows {
            let mut headers = headers(values);
            let found = token(&headers);
            assert_eq!(found.as_ref().map(Option::as_deref), expected.as_ref().copied(), "{values:?}");
            forget(&mut headers);
            let left = headers.get(SEC_WEBSOCKET_PROTOCOL).map_or("", |left| left.to_str().expect("text"));
            assert_eq!(left, *rest, "{values:?}");
        }
    }
}
