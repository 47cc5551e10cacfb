//! Clients that act as service accounts, with tokens that the manager asks for (`--use-service-account-credentials`).

use std::time::Duration;

use http::{HeaderValue, Request, header};
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::PostParams;
use kube::client::Body;
use kube::core::ObjectMeta;
use kube::{Client, Config};
use tokio::sync::watch;
use tracing::warn;

use crate::{Api, Backoff, Object, Scope, is_already_exists, is_not_found, message_of};

/// The lifetime that is asked for, as upstream.
const SECONDS: i64 = 3600;

/// A client for the server of `config` that acts as a service account. `manager` may create service accounts and
/// their tokens; a task of `scope` renews the token when four fifths of its time are over.
pub fn service_account_client(
    config: &Config,
    manager: Client,
    namespace: &str,
    name: &str,
    scope: &Scope,
) -> Result<Client, kube::Error> {
    let mut config = config.clone();
    // The connection is the manager's; the token alone names the user.
    config.auth_info = Default::default();
    let (sender, receiver) = watch::channel(None);
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    scope.spawn(async move {
        let accounts: Api<ServiceAccount> = Api::namespaced(manager, &namespace);
        let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30), 0.5);
        loop {
            let wait = match token(&accounts, &name).await {
                Ok((token, lifetime)) => {
                    backoff.reset();
                    sender.send_replace(Some(token));
                    lifetime.mul_f64(0.8).max(Duration::from_secs(10))
                }
                Err(error) => {
                    warn!(account = name, error = message_of(&error), "cannot get a token, will keep trying");
                    backoff.next_delay()
                }
            };
            tokio::time::sleep(wait).await;
        }
    });
    let server = Client::try_from(config)?;
    // Adds the current token to each request, and waits for the first one.
    let service = tower::service_fn(move |mut request: Request<Body>| {
        let (server, mut tokens) = (server.clone(), receiver.clone());
        async move {
            let token = tokens.wait_for(Option::is_some).await.map(|token| token.clone());
            let Ok(Some(token)) = token else {
                return Err(kube::Error::Service("the process is stopping".into()));
            };
            request.headers_mut().insert(header::AUTHORIZATION, token);
            server.send(request).await
        }
    });
    Ok(Client::new(service, "default"))
}

/// A new token and its lifetime. An account that does not exist is made first, as upstream does.
async fn token(accounts: &Api<ServiceAccount>, name: &str) -> Result<(HeaderValue, Duration), kube::Error> {
    let request = TokenRequest {
        spec: Some(TokenRequestSpec { expiration_seconds: Some(SECONDS), ..TokenRequestSpec::default() }),
        ..TokenRequest::default()
    };
    let params = PostParams::default();
    let answer = match accounts.create_subresource("token", name, &params, &request).await {
        Err(error) if is_not_found(&error) => {
            let account = ServiceAccount {
                metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
                ..ServiceAccount::default()
            };
            match accounts.create(&params, &account).await {
                Err(error) if !is_already_exists(&error) => return Err(error),
                _ => accounts.create_subresource("token", name, &params, &request).await?,
            }
        }
        answer => answer?,
    };
    let status = TokenRequest::decode(&answer)?.status.unwrap_or_default();
    let mut value = HeaderValue::try_from(format!("Bearer {}", status.token.unwrap_or_default()))
        .map_err(|_| kube::Error::Service("the server sent a token that is no header value".into()))?;
    value.set_sensitive(true);
    let left = status.expiration_timestamp.map(|at| at.0.duration_since(Timestamp::now()));
    let left = left.and_then(|left| Duration::try_from(left).ok());
    Ok((value, left.unwrap_or(Duration::from_secs(SECONDS.unsigned_abs()))))
}
