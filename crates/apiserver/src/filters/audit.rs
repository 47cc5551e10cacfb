//! Audits a request: its arrival once its user is known, and its response.

use super::{Asked, Exchange, Facts, Refusal, Wait};
use crate::audit::{self, Arrival, Level, Record};
use crate::http::{self, Response};
use crate::request::Route;
use crate::serve::Peer;
use ::http::{HeaderMap, HeaderName, HeaderValue, header};
use futures_util::FutureExt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");
/// Addresses that an event names. A client may claim to have come through any number.
const MAX_SOURCES: usize = 64;

/// Begins the record of a request, if the server audits.
pub(super) fn arrived(exchange: &mut Exchange) -> Result<(), Refusal> {
    let (facts, asked) = (&mut exchange.facts, &exchange.asked);
    let Some(auditor) = &facts.server.audit else { return Ok(()) };
    let text =
        |value: Option<&HeaderValue>| value.map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned());
    let arrival = Arrival {
        audit_id: text(facts.audit_id.as_ref()).unwrap_or_default(),
        request_uri: facts.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
        user_agent: &text(asked.parts.headers.get(header::USER_AGENT)).unwrap_or_default(),
        sources: sources(&asked.parts.headers, asked.parts.extensions.get().map(|Peer(peer)| *peer)),
        action: asked.action(),
        target: match &asked.route {
            Route::Resource(target) => Some(target),
            _ => None,
        },
    };
    facts.audit = Some(Arc::new(Record::new(Arc::clone(auditor), arrival)));
    Ok(())
}

/// Audits a response that was made before the user was known.
pub(super) fn refused(facts: &Facts, response: Response) -> Response {
    match &facts.audit {
        Some(record) if record.refuse() => audit::audited(record, response, true, true),
        _ => response,
    }
}

/// Asks the policy, and stores the event of the request's arrival.
pub(super) fn before(exchange: &mut Exchange) -> Result<Option<Wait<'_>>, Refusal> {
    let Exchange { facts, asked } = exchange;
    let Some(record) = &facts.audit else { return Ok(None) };
    if record.evaluate(asked.user.as_ref()) == Level::None {
        facts.audit = None;
        return Ok(None);
    }
    let received = record.received();
    asked.parts.extensions.insert(Arc::clone(record));
    let Some(stored) = received else { return Ok(None) };
    let wait = async move {
        match stored.await {
            true => Ok(()),
            false => Err(not_stored(facts)),
        }
    };
    Ok(Some(wait.boxed()))
}

/// In upstream's words, and as it answers: in plain text.
fn not_stored(facts: &mut Facts) -> Refusal {
    audit::rejected();
    facts.audit = None;
    let uri = facts.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let mut response =
        http::text(500, format!("Internal Server Error: {uri:?}: failed to store audit event\n"));
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Refusal::Response(response)
}

pub(super) fn after(facts: &Facts, response: Response) -> Response {
    match &facts.audit {
        None => response,
        Some(record) => audit::audited(record, response, facts.kind.is_long_running(), has_object(facts)),
    }
}

/// Returns true if upstream has an object for the response: documents that it writes as bytes have none.
fn has_object(facts: &Facts) -> bool {
    let route = crate::request::route(facts.uri.path());
    match route {
        // Another server's objects are known to that server.
        Route::Resource(_) => facts.kind.resource().is_some(),
        Route::CoreVersions | Route::Groups | Route::Group(_) | Route::Resources { .. } => true,
        _ => false,
    }
}

/// Where a request came from: the proxies' words first, and last the address that cannot be made up.
fn sources(headers: &HeaderMap, peer: Option<IpAddr>) -> Vec<IpAddr> {
    let text = |name| headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok()).unwrap_or_default();
    let forwarded = text(FORWARDED_FOR).split(',').filter_map(|part| part.trim().parse().ok());
    let mut sources: Vec<IpAddr> = forwarded.take(MAX_SOURCES).collect();
    if let Ok(real) = text(REAL_IP).parse()
        && !sources.contains(&real)
    {
        sources.push(real);
    }
    // Components of this process are where upstream's own clients come from.
    let peer = peer.unwrap_or(IpAddr::V6(Ipv6Addr::LOCALHOST)).to_canonical();
    if sources.last() != Some(&peer) {
        sources.push(peer);
    }
    sources
}

impl Asked {
    /// Annotates the request's audit, if it is audited.
    pub fn annotate(&self, key: &str, value: &str) {
        if let Some(record) = self.audit() {
            record.annotate(key, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_came_from_where_proxies_say_and_from_its_peer() {
        let rows: &[(&str, &str, &str, &[&str])] = &[
            ("", "", "10.0.0.1", &["10.0.0.1"]),
            ("", "", "::ffff:10.0.0.1", &["10.0.0.1"]),
            ("1.1.1.1, x, 2.2.2.2", "", "10.0.0.1", &["1.1.1.1", "2.2.2.2", "10.0.0.1"]),
            ("1.1.1.1", "3.3.3.3", "10.0.0.1", &["1.1.1.1", "3.3.3.3", "10.0.0.1"]),
            ("1.1.1.1,2.2.2.2", "1.1.1.1", "2.2.2.2", &["1.1.1.1", "2.2.2.2"]),
            ("10.0.0.1,2.2.2.2", "", "10.0.0.1", &["10.0.0.1", "2.2.2.2", "10.0.0.1"]),
            ("", "nonsense", "10.0.0.1", &["10.0.0.1"]),
        ];
        for (forwarded, real, peer, expected) in rows {
            let mut headers = HeaderMap::new();
            for (name, value) in [(FORWARDED_FOR, forwarded), (REAL_IP, real)] {
                if !value.is_empty() {
                    headers.insert(name, value.parse().unwrap());
                }
            }
            let found: Vec<String> =
                sources(&headers, peer.parse().ok()).iter().map(ToString::to_string).collect();
            assert_eq!(found, *expected, "{forwarded} {real} {peer}");
        }
        assert_eq!(sources(&HeaderMap::new(), None), [IpAddr::V6(Ipv6Addr::LOCALHOST)]);
    }
}
