//! Finds the user of a request.

use super::{Exchange, Refusal, times};
use crate::auth::{self, User};
use crate::connections::Slot;
use crate::server::ApiServer;
use ::http::{header, request::Parts};
use ferrite_api::Status;
use std::sync::Arc;

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let (server, asked) = (&exchange.facts.server, &mut exchange.asked);
    let asked_at = std::time::Instant::now();
    let user = authenticate(server, asked.user.take(), &asked.parts);
    let elapsed = asked_at.elapsed();
    server.metrics.access.authenticated(user.as_deref().ok(), elapsed);
    times::AUTHENTICATION.observe(elapsed);
    let user = user?;
    if let Some(connection) = asked.parts.extensions.get::<Arc<Slot>>().filter(|_| !user.is_anonymous()) {
        connection.belongs_to(&user.name);
    }
    auth::forget_front_proxy(&mut asked.parts.headers, server.front_proxies.as_ref());
    asked.user = Some(user);
    Ok(())
}

/// The user of a certificate, else of a token, else the anonymous one. As upstream: a refused certificate leaves only
/// the token.
fn authenticate(server: &ApiServer, user: Option<Arc<User>>, parts: &Parts) -> Result<Arc<User>, Status> {
    if let Some(user) = user {
        return Ok(user);
    }
    let Some(token) = parts.headers.get(header::AUTHORIZATION).and_then(auth::bearer_token) else {
        return match parts.extensions.get::<auth::RefusedCertificate>() {
            Some(auth::RefusedCertificate) => Err(Status::unauthorized()),
            None if !server.config.anonymous_auth => Err(Status::unauthorized()),
            None => Ok(Arc::new(User::anonymous())),
        };
    };
    let audiences = server.config.audiences();
    let known = server.token_user(token, &audiences).ok();
    known.map(|(user, _)| Arc::new(user)).ok_or_else(Status::unauthorized)
}
