//! Refuses a request whose user may not make it.

use super::{Asked, Exchange, Refusal, times};
use crate::auth;
use ferrite_api::Status;

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let (server, asked) = (&exchange.facts.server, &exchange.asked);
    let asked_at = std::time::Instant::now();
    let user = asked.user.as_ref().ok_or_else(Status::unauthorized)?;
    let allowed = match user.is_master() {
        // As upstream: nothing is looked up for administrators.
        true => {
            annotate(asked, true, "");
            Ok(())
        }
        false => {
            let action = asked.action();
            let decision = auth::decide(&server.registry.rbac, &server.registry.view(), user, &action);
            annotate(asked, decision.allowed, &decision.reason);
            match decision.allowed {
                true => Ok(()),
                false => Err(auth::denied(user, &action, &decision.reason)),
            }
        }
    };
    let elapsed = asked_at.elapsed();
    server.metrics.access.authorized(allowed.is_ok(), elapsed);
    times::AUTHORIZATION.observe(elapsed);
    Ok(allowed?)
}

/// Annotates the audit with the decision and its reason.
fn annotate(asked: &Asked, allowed: bool, reason: &str) {
    asked.annotate("authorization.k8s.io/decision", if allowed { "allow" } else { "forbid" });
    asked.annotate("authorization.k8s.io/reason", reason);
}
