//! Lets pages of allowed origins read responses: `--cors-allowed-origins`.

use super::{Exchange, Facts, Refusal};
use crate::http::{Response, full};
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use regex::Regex;

/// Upstream's lists.
const HEADERS: [(HeaderName, &str); 4] = [
    (header::ACCESS_CONTROL_ALLOW_METHODS, "POST, GET, OPTIONS, PUT, DELETE, PATCH"),
    (
        header::ACCESS_CONTROL_ALLOW_HEADERS,
        "Content-Type, Content-Length, Accept-Encoding, X-CSRF-Token, Authorization, X-Requested-With, If-Modified-Since",
    ),
    (header::ACCESS_CONTROL_EXPOSE_HEADERS, "Date"),
    (header::ACCESS_CONTROL_ALLOW_CREDENTIALS, "true"),
];

/// Origins whose pages may read responses.
#[derive(Debug, Clone, Default)]
pub struct CorsOrigins(Vec<Regex>);

/// A list of origins that cannot be used, in upstream's words.
#[derive(Debug, thiserror::Error)]
pub enum CorsOriginsError {
    #[error("empty value in --cors-allowed-origins")]
    Empty,
    #[error(
        "--cors-allowed-origins has an invalid regular expression: {why}; one like '//example.com(:|$)' matches a whole host"
    )]
    Invalid { why: String },
}

impl CorsOrigins {
    /// Compiles expressions. As upstream: each must be bound to the beginning and the end of the host.
    pub fn parse<'a>(expressions: impl IntoIterator<Item = &'a str>) -> Result<Self, CorsOriginsError> {
        let compile = |text: &str| {
            if text.is_empty() {
                return Err(CorsOriginsError::Empty);
            }
            let compiled = Regex::new(text);
            let compiled = compiled.map_err(|error| CorsOriginsError::Invalid { why: error.to_string() })?;
            let has = |marks: [&str; 2]| marks.iter().any(|mark| text.contains(mark));
            if !has(["^", "//"]) || !has(["$", ":"]) {
                let why = "regular expression does not pin to start/end of host in the origin header";
                return Err(CorsOriginsError::Invalid { why: why.to_owned() });
            }
            Ok(compiled)
        };
        Ok(Self(expressions.into_iter().map(compile).collect::<Result<_, _>>()?))
    }

    fn allow(&self, origin: &HeaderValue) -> bool {
        origin.to_str().is_ok_and(|origin| self.0.iter().any(|allowed| allowed.is_match(origin)))
    }
}

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let origins = &exchange.facts.server.config.serving.cors_origins;
    let origin = exchange.asked.parts.headers.get(header::ORIGIN);
    let Some(origin) = origin.filter(|origin| !origin.is_empty() && origins.allow(origin)).cloned() else {
        return Ok(());
    };
    if exchange.facts.method == Method::OPTIONS {
        // A browser asks before the request itself, and shows no credentials.
        let mut answer = Response::new(full(""));
        *answer.status_mut() = StatusCode::NO_CONTENT;
        allow(answer.headers_mut(), origin);
        return Err(Refusal::Response(answer));
    }
    exchange.facts.cors_origin = Some(origin);
    Ok(())
}

pub(super) fn after(facts: &Facts, mut answer: Response) -> Response {
    if let Some(origin) = &facts.cors_origin {
        allow(answer.headers_mut(), origin.clone());
    }
    answer
}

fn allow(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_bound_to_the_host() {
        for (expression, why) in [
            ("//example.com(:|$)", None),
            ("^https://example.com$", None),
            (r"^https?://([^.]+\.)*example\.com(:[0-9]+)?$", None),
            ("", Some("empty value in --cors-allowed-origins")),
            ("example.com", Some("does not pin to start/end of host")),
            ("//example.com", Some("does not pin to start/end of host")),
            ("example.com$", Some("does not pin to start/end of host")),
            ("^example(com$", Some("--cors-allowed-origins has an invalid regular expression: ")),
        ] {
            let error = CorsOrigins::parse([expression]).err().map(|error| error.to_string());
            match (error, why) {
                (None, None) => {}
                (Some(error), Some(why)) => assert!(error.contains(why), "{error}"),
                (error, _) => panic!("{expression}: {error:?}"),
            }
        }
        let origins = CorsOrigins::parse(["//example.com(:|$)", "^http://localhost:"]).expect("origins");
        for (origin, allowed) in [
            ("https://example.com", true),
            ("https://example.com:8443", true),
            ("https://example.com.evil.org", false),
            ("http://localhost:3000", true),
            ("null", false),
        ] {
            assert_eq!(origins.allow(&HeaderValue::from_static(origin)), allowed, "{origin}");
        }
        assert!(!origins.allow(&HeaderValue::from_bytes(b"\xff").expect("a value")));
    }
}
