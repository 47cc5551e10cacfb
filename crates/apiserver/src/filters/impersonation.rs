//! Makes the request as the user that its `Impersonate-` headers name, if its own user may.

use super::{Exchange, Refusal, Wait, times};
use crate::auth;
use crate::tunnel::Impersonated;
use ferrite_api::Status;
use std::time::Instant;

pub(super) fn before(exchange: &mut Exchange) -> Result<Option<Wait<'_>>, Refusal> {
    if !auth::impersonates(&exchange.asked.parts.headers) {
        return Ok(None);
    }
    Ok(Some(Box::pin(async move {
        let asked_at = Instant::now();
        let asked = &mut exchange.asked;
        let registry = &exchange.facts.server.registry;
        let user = asked.user.take().ok_or_else(Status::unauthorized)?;
        let (view, action) = (registry.view(), asked.action());
        let became = auth::impersonate(&registry.rbac, &view, user, &asked.parts.headers, &action);
        let became = tokio::time::timeout_at(exchange.facts.deadline, became).await;
        times::IMPERSONATION.observe(asked_at.elapsed());
        let late = |_| Status::timeout("request did not complete within the allotted timeout");
        let (user, mode) = became.map_err(late)??;
        auth::forget_impersonation(&mut asked.parts.headers);
        if let Some(record) = asked.audit() {
            record.impersonates(&user, mode);
        }
        asked.user = Some(user);
        asked.parts.extensions.insert(Impersonated);
        Ok(())
    })))
}
