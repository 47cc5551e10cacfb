//! Makes the request as the user that its `Impersonate-` headers name, if its own user may.

use super::{Exchange, Refusal, times};
use crate::auth;
use ferrite_api::Status;

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let asked = &mut exchange.asked;
    if !auth::impersonates(&asked.parts.headers) {
        return Ok(());
    }
    let asked_at = std::time::Instant::now();
    let registry = &exchange.facts.server.registry;
    let user = asked.user.take().ok_or_else(Status::unauthorized)?;
    let action = asked.action();
    let user = auth::impersonate(&registry.rbac, &registry.view(), user, &asked.parts.headers, &action);
    times::IMPERSONATION.observe(asked_at.elapsed());
    let (user, mode) = user?;
    auth::forget_impersonation(&mut asked.parts.headers);
    if let Some(record) = asked.audit() {
        record.impersonates(&user, mode);
    }
    asked.user = Some(user);
    Ok(())
}
