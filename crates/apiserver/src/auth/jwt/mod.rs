//! Users by JSON web tokens of foreign issuers: AuthenticationConfiguration, or the `--oidc-*` flags.

mod claims;
mod compile;
mod config;
mod issuer;
mod token;

pub(crate) use config::Anonymous;
pub use config::{AuthenticationConfig, AuthenticationConfigError, OidcFlags};

use super::User;
use crate::server::ApiServer;
use ferrite_component::FollowedFiles;
use issuer::{AGAIN, IssuerState};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use token::Token;

/// A new configuration has so long until its issuers answer, as upstream.
const NEW: Duration = Duration::from_secs(60);

/// Settings for reading foreign tokens.
#[derive(Debug, Clone, Default)]
pub struct JwtAuthentication {
    pub config: Arc<AuthenticationConfig>,
    /// None where flags say everything.
    file: Option<PathBuf>,
    /// Issuers of the server's own tokens.
    reserved: Vec<String>,
    /// Follows the file from before it was first read, so that no change is missed. Taken by the task that reloads.
    followed: Arc<Mutex<Option<FollowedFiles>>>,
}

impl JwtAuthentication {
    /// A configuration that does not change.
    pub fn new(config: AuthenticationConfig) -> Self {
        Self { config: Arc::new(config), ..Self::default() }
    }

    /// Reads a file, which is followed from now on. `reserved` are the issuers of the server's own tokens.
    pub fn of_file(file: &Path, reserved: &[String]) -> Result<Self, AuthenticationConfigError> {
        let followed = FollowedFiles::new(vec![file.to_owned()]);
        Ok(Self {
            config: Arc::new(AuthenticationConfig::read(file, reserved)?),
            file: Some(file.to_owned()),
            reserved: reserved.to_vec(),
            followed: Arc::new(Mutex::new(Some(followed))),
        })
    }
}

/// The issuers as they are now.
#[derive(Default)]
struct Active {
    issuers: Vec<Arc<IssuerState>>,
    anonymous: Option<Anonymous>,
}

impl Active {
    fn new(config: &AuthenticationConfig) -> Self {
        let issuers = config.jwt.iter().map(|settings| Arc::new(IssuerState::new(Arc::clone(settings))));
        Self { issuers: issuers.collect(), anonymous: config.anonymous.clone() }
    }
}

/// Reads tokens of foreign issuers.
#[derive(Default)]
pub(crate) struct JwtAuthenticator(RwLock<Arc<Active>>);

impl JwtAuthenticator {
    pub fn new(authentication: &JwtAuthentication) -> Self {
        Self(RwLock::new(Arc::new(Active::new(&authentication.config))))
    }

    fn active(&self) -> Arc<Active> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Tells whether a request without credentials is let in. None where the configuration does not say.
    pub fn allows_anonymous(&self, path: &str) -> Option<bool> {
        self.active().anonymous.as_ref().map(|anonymous| anonymous.allows(path))
    }

    /// True if there is somebody to ask about a token.
    pub fn has_issuers(&self) -> bool {
        !self.active().issuers.is_empty()
    }

    /// The user of a token. None if it is of no known issuer.
    pub async fn user(&self, server: &ApiServer, text: &str) -> Option<Result<User, String>> {
        let active = self.active();
        if active.issuers.is_empty() {
            return None;
        }
        let token = Token::parse(text)?;
        let issuer = active.issuers.iter().find(|issuer| issuer.url() == token.issuer())?;
        #[allow(clippy::cast_precision_loss, reason = "seconds are far below the limit")]
        let now = jiff::Timestamp::now().as_millisecond() as f64 / 1000.0;
        Some(issuer.authenticate(&server.outbound, &server.registry.view(), &token, now).await)
    }

    /// Finds the issuers' keys and follows the file. Runs until it is dropped.
    pub async fn run(&self, server: &ApiServer) {
        let authentication = &server.config().jwt;
        let first = self.active();
        let initial = discover_all(server, &first);
        let follow = async {
            let followed = authentication.followed.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (Some(file), Some(mut followed)) = (&authentication.file, followed) else { return };
            loop {
                followed.changed().await;
                let config = match AuthenticationConfig::read(file, &authentication.reserved) {
                    Ok(config) => config,
                    Err(error) => {
                        tracing::error!(%error, "the authentication configuration stays as it was");
                        continue;
                    }
                };
                let new = Active::new(&config);
                // As upstream: issuers that do not answer leave everything as it was.
                match tokio::time::timeout(NEW, discover_all(server, &new)).await {
                    Ok(()) => {
                        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
                        tracing::info!(file = %file.display(), "loaded a new authentication configuration");
                    }
                    Err(_) => {
                        let ill = new.issuers.iter().find_map(|issuer| issuer.health().err());
                        tracing::error!(
                            error = ill.unwrap_or_default(),
                            "an issuer of the new authentication configuration does not answer: it stays as it was"
                        );
                    }
                }
            }
        };
        tokio::join!(initial, follow);
    }
}

/// Ends when every issuer has answered.
async fn discover_all(server: &ApiServer, active: &Active) {
    let all = active.issuers.iter().map(|issuer| async move {
        while let Err(error) = issuer.discover(&server.outbound, &server.registry.view()).await {
            tracing::error!(%error, issuer = issuer.url(), "oidc authenticator: initializing plugin");
            tokio::time::sleep(AGAIN).await;
        }
    });
    futures_util::future::join_all(all).await;
}
