//! Refuses a request whose user may not make it.

use super::{Asked, Exchange, Refusal, Wait, times};
use crate::auth::{self, Decision};
use crate::http;
use ferrite_api::Status;
use std::time::Instant;

pub(super) fn before(exchange: &mut Exchange) -> Result<Option<Wait<'_>>, Refusal> {
    let (server, asked) = (&exchange.facts.server, &exchange.asked);
    let asked_at = Instant::now();
    let user = asked.user.as_ref().ok_or_else(Status::unauthorized)?;
    if user.is_master() {
        // As upstream: nothing is looked up for administrators.
        finish(exchange, None, asked_at)?;
        return Ok(None);
    }
    let registry = &server.registry;
    if !registry.rbac.asks_webhooks() {
        let decision = auth::decide(&registry.rbac, &registry.view(), user, &asked.action());
        finish(exchange, Some(decision), asked_at)?;
        return Ok(None);
    }
    Ok(Some(Box::pin(async move {
        let (server, asked) = (&exchange.facts.server, &exchange.asked);
        let user = asked.user.as_ref().ok_or_else(Status::unauthorized)?;
        let (registry, action) = (&server.registry, asked.action());
        let decide = || auth::decide(&registry.rbac, &registry.view(), user, &action);
        let deadline = exchange.facts.deadline;
        let decided = tokio::time::timeout_at(deadline, auth::settled(&registry.rbac, decide)).await;
        let decision = decided.unwrap_or_else(|_| Decision {
            error: Some("context deadline exceeded".to_owned()),
            ..Decision::default()
        });
        finish(exchange, Some(decision), asked_at)
    })))
}

/// Notes a decision and refuses the request if it is no grant. None is the grant of an administrator.
fn finish(exchange: &Exchange, decision: Option<Decision>, asked_at: Instant) -> Result<(), Refusal> {
    let (server, asked) = (&exchange.facts.server, &exchange.asked);
    let decision = decision.unwrap_or_else(|| Decision { allowed: true, ..Decision::default() });
    let elapsed = asked_at.elapsed();
    server.metrics.access.authorized(decision.allowed, elapsed);
    times::AUTHORIZATION.observe(elapsed);
    if decision.allowed {
        annotate(asked, "allow", &decision.reason);
        return Ok(());
    }
    // As upstream: an authorizer that failed may have kept somebody out who may.
    if let Some(error) = decision.error {
        asked.annotate("authorization.k8s.io/reason", "internal error");
        let message = format!("Internal Server Error: {:?}: {error}", asked.parts.uri.to_string());
        return Err(Refusal::Response(http::text(500, message)));
    }
    annotate(asked, "forbid", &decision.reason);
    let user = asked.user.as_ref().ok_or_else(Status::unauthorized)?;
    Err(auth::denied(user, &asked.action(), &decision.reason).into())
}

/// Annotates the audit with the decision and its reason.
fn annotate(asked: &Asked, decision: &str, reason: &str) {
    asked.annotate("authorization.k8s.io/decision", decision);
    asked.annotate("authorization.k8s.io/reason", reason);
}
