//! Refuses users who have too many requests and responses on the way, and counts responses until they are sent.

use super::{Exchange, Facts, Refusal};
use crate::http::Response;
use crate::serve::Peer;

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let (facts, asked) = (&mut exchange.facts, &mut exchange.asked);
    // Requests of this process come with their bodies, and their responses are read.
    if asked.parts.extensions.get::<Peer>().is_none() {
        return Ok(());
    }
    let Some(account) = asked.user.as_ref().and_then(|user| facts.server.traffic.account(user)) else {
        return Ok(());
    };
    if !account.is_open() {
        facts.server.metrics.terminated(&facts.kind, 429);
        return Err(Refusal::Response(super::in_flight::too_many()));
    }
    asked.parts.extensions.insert(account.clone());
    facts.account = Some(account);
    Ok(())
}

pub(super) fn after(facts: &Facts, answer: Response) -> Response {
    let Some(account) = &facts.account else { return answer };
    answer.map(|body| account.response(body, facts.kind.is_long_running()))
}
