//! Every request but a stream ends by its own `timeout` parameter, and by the server's limit at the latest.

use super::{Exchange, Refusal};
use crate::negotiate::PLAIN_JSON;
use crate::options::{Query, go_duration};
use crate::server::error;
use ferrite_api::Status;
use std::time::Duration;
use tokio::time::Instant;

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let facts = &mut exchange.facts;
    let longest = facts.server.config.serving.request_timeout;
    let query = &exchange.asked.query;
    match deadline(facts.started, longest, query, facts.kind.is_long_running()) {
        Ok(deadline) => {
            facts.deadline = deadline;
            Ok(())
        }
        // As upstream: this filter encodes no errors but in JSON.
        Err(status) => Err(Refusal::Response(error(&status, PLAIN_JSON))),
    }
}

/// The time by which a request must end. The `timeout` parameter of a stream has no meaning here.
fn deadline(
    started: Instant,
    longest: Duration,
    query: &Query,
    long_running: bool,
) -> Result<Instant, Status> {
    let asked = match query.get("timeout").filter(|t| !t.is_empty() && !long_running) {
        None => None,
        Some(text) => Some(go_duration(text).map_err(|why| {
            Status::bad_request(format!("invalid timeout specified in the request URL - {why}"))
        })?),
    };
    // Zero asks for nothing in particular, as upstream.
    let asked = asked.filter(|asked| !asked.is_zero());
    Ok(started + asked.map_or(longest, |asked| asked.min(longest)))
}
