//! Finds the user of a request.

use super::{Exchange, Refusal, Wait, times};
use crate::auth::{self, User};
use crate::connections::Slot;
use crate::server::ApiServer;
use crate::websocket;
use ::http::{header, request::Parts};
use ferrite_api::Status;
use std::sync::Arc;
use std::time::Instant;

pub(super) fn before(exchange: &mut Exchange) -> Result<Option<Wait<'_>>, Refusal> {
    let asked_at = Instant::now();
    let (server, asked) = (&exchange.facts.server, &mut exchange.asked);
    let token = match authenticate(server, asked.user.take(), &asked.parts) {
        Found::User(user) => {
            found(exchange, user, asked_at)?;
            return Ok(None);
        }
        Found::ForeignToken(token) => token,
    };
    Ok(Some(Box::pin(async move {
        let server = Arc::clone(&exchange.facts.server);
        let audiences = server.config.audiences();
        let known = tokio::time::timeout_at(exchange.facts.deadline, server.foreign_user(&token, &audiences));
        let user = match known.await {
            Ok(Ok((user, _))) => Ok(Arc::new(user)),
            _ => Err(Status::unauthorized()),
        };
        Ok(found(exchange, user, asked_at)?)
    })))
}

/// Notes the user of a request, or refuses it.
fn found(exchange: &mut Exchange, user: Result<Arc<User>, Status>, asked_at: Instant) -> Result<(), Status> {
    let (server, asked) = (&exchange.facts.server, &mut exchange.asked);
    let elapsed = asked_at.elapsed();
    server.metrics.access.authenticated(user.as_deref().ok(), elapsed);
    times::AUTHENTICATION.observe(elapsed);
    let user = user?;
    if let Some(connection) = asked.parts.extensions.get::<Arc<Slot>>().filter(|_| !user.is_anonymous()) {
        connection.belongs_to(&user.name);
    }
    let certificates = server.certificates();
    auth::forget_websocket_token(&mut asked.parts.headers);
    auth::forget_front_proxy(&mut asked.parts.headers, certificates.front_proxies.as_deref());
    asked.user = Some(user);
    Ok(())
}

/// The part that the server itself knows of a request's credentials.
enum Found {
    User(Result<Arc<User>, Status>),
    /// A token that somebody else may know.
    ForeignToken(String),
}

/// The user of a certificate, else of a token, else the anonymous one. As upstream: a refused certificate leaves only
/// the token.
fn authenticate(server: &ApiServer, user: Option<Arc<User>>, parts: &Parts) -> Found {
    if let Some(user) = user {
        return Found::User(Ok(user));
    }
    let bearer = parts.headers.get(header::AUTHORIZATION).and_then(auth::bearer_token).map(str::to_owned);
    let of_websocket = || match websocket::is_requested(&parts.headers) {
        true => auth::websocket_token(&parts.headers),
        false => Ok(None),
    };
    let Ok(token) = bearer.map_or_else(of_websocket, |token| Ok(Some(token))) else {
        return Found::User(Err(Status::unauthorized()));
    };
    let Some(token) = token else {
        return Found::User(match parts.extensions.get::<auth::RefusedCertificate>() {
            Some(auth::RefusedCertificate) => Err(Status::unauthorized()),
            None if !server.allows_anonymous(parts.uri.path()) => Err(Status::unauthorized()),
            None => Ok(Arc::new(User::anonymous())),
        });
    };
    match server.token_user(&token, &server.config.audiences()) {
        Ok((user, _)) => Found::User(Ok(Arc::new(user))),
        Err(_) if server.knows_others() => Found::ForeignToken(token),
        Err(_) => Found::User(Err(Status::unauthorized())),
    }
}
