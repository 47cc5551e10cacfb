//! Tells browsers to come back with TLS only: `--strict-transport-security-directives`.

use super::Facts;
use crate::http::Response;
use ::http::{HeaderValue, header};

/// The value of the header `Strict-Transport-Security`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransportSecurity(Option<HeaderValue>);

/// Directives that there are not, in upstream's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TransportSecurityError {
    #[error("empty value in strict-transport-security-directives")]
    Empty,
    #[error(
        "--strict-transport-security-directives invalid, allowed values: max-age=expireTime, includeSubDomains, preload. see https://tools.ietf.org/html/rfc6797#section-6.1 for more information"
    )]
    Invalid,
}

impl TransportSecurity {
    /// Checks directives. Without any there is no header.
    pub fn parse(directives: &[String]) -> Result<Self, TransportSecurityError> {
        for directive in directives {
            if directive.trim().is_empty() {
                return Err(TransportSecurityError::Empty);
            }
            let parts: Vec<&str> = directive.split('=').collect();
            let known = matches!(directive.as_str(), "includeSubDomains" | "preload")
                || matches!(parts.as_slice(), ["max-age", _]);
            if !known {
                return Err(TransportSecurityError::Invalid);
            }
        }
        if directives.is_empty() {
            return Ok(Self::default());
        }
        let value = HeaderValue::from_str(&directives.join("; "));
        value.map(|value| Self(Some(value))).map_err(|_| TransportSecurityError::Invalid)
    }
}

pub(super) fn after(facts: &Facts, mut answer: Response) -> Response {
    if let TransportSecurity(Some(directives)) = &facts.server.config.serving.transport_security {
        answer.headers_mut().entry(header::STRICT_TRANSPORT_SECURITY).or_insert_with(|| directives.clone());
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_are_those_of_the_rfc() {
        let parse = |directives: &[&str]| {
            let directives: Vec<String> = directives.iter().map(|text| (*text).to_owned()).collect();
            TransportSecurity::parse(&directives)
        };
        let value = HeaderValue::from_static("max-age=31536000; includeSubDomains; preload");
        let all = parse(&["max-age=31536000", "includeSubDomains", "preload"]);
        assert_eq!(all, Ok(TransportSecurity(Some(value))));
        assert_eq!(parse(&[]), Ok(TransportSecurity(None)));
        for (directive, error) in [
            (" ", TransportSecurityError::Empty),
            ("max-age", TransportSecurityError::Invalid),
            ("max-age=1=2", TransportSecurityError::Invalid),
            ("includesubdomains", TransportSecurityError::Invalid),
        ] {
            assert_eq!(parse(&[directive]), Err(error), "{directive}");
        }
    }
}
