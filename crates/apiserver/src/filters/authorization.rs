//! Refuses a request whose user may not make it.

use super::{Exchange, Refusal, times};
use crate::auth;
use ferrite_api::Status;

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let (server, asked) = (&exchange.facts.server, &exchange.asked);
    let asked_at = std::time::Instant::now();
    let user = asked.user.as_ref().ok_or_else(Status::unauthorized)?;
    let allowed = match user.is_master() {
        // As upstream: nothing is looked up for administrators.
        true => Ok(()),
        false => auth::authorize(&server.registry.rbac, &server.registry.view(), user, &asked.action()),
    };
    let elapsed = asked_at.elapsed();
    server.metrics.access.authorized(allowed.is_ok(), elapsed);
    times::AUTHORIZATION.observe(elapsed);
    Ok(allowed?)
}
