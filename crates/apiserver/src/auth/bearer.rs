//! Whose a bearer token is: asked of the server itself, of the issuers that it believes, and of a webhook.

use super::{TokenVerdict, User, bootstrap_token, meant_for};
use crate::server::ApiServer;
use crate::subresource;
use crate::subresource::token::Rejected;

impl ApiServer {
    /// Those of `wanted` that are this server. A token that names no audience is meant for it alone.
    pub(crate) fn own_audiences<'a>(&self, wanted: &[&'a str]) -> Vec<&'a str> {
        let own = self.config.audiences();
        wanted.iter().copied().filter(|audience| own.contains(audience)).collect()
    }

    /// Tells whether a request without credentials is let in.
    pub(crate) fn allows_anonymous(&self, path: &str) -> bool {
        self.jwt.allows_anonymous(path).unwrap_or(self.config.anonymous_auth)
    }

    /// True if there is somebody else to ask about a token.
    pub(crate) fn knows_others(&self) -> bool {
        self.token_webhook.is_some() || self.jwt.has_issuers()
    }

    /// As [`Self::token_user`], and asks others about a token that this server does not know.
    pub(crate) async fn any_token_user<'a>(
        &self,
        token: &str,
        wanted: &[&'a str],
    ) -> Result<(User, Vec<&'a str>), Rejected> {
        let rejected = match self.token_user(token, wanted) {
            Ok(known) => return Ok(known),
            Err(rejected) => rejected,
        };
        match self.foreign_user(token, wanted).await {
            Err(Rejected::Unknown) => Err(rejected),
            answered => answered,
        }
    }

    /// Whose a token is by the word of its issuer or of a webhook. As upstream: the webhook is asked about every token
    /// that nothing else knows.
    pub(crate) async fn foreign_user<'a>(
        &self,
        token: &str,
        wanted: &[&'a str],
    ) -> Result<(User, Vec<&'a str>), Rejected> {
        let rejected = match self.issued_user(token, wanted).await {
            Ok(known) => return Ok(known),
            Err(rejected) => rejected,
        };
        let Some(webhook) = &self.token_webhook else { return Err(rejected) };
        let why = match &*webhook.verdict(token, wanted).await {
            TokenVerdict::Known { user, audiences } => {
                let meant = meant_for(wanted, audiences, &self.config.audiences());
                match meant.is_empty() {
                    false => return Ok(((**user).clone(), meant)),
                    true => None,
                }
            }
            TokenVerdict::Unknown(why) => why.clone(),
        };
        Err(match (rejected, why) {
            (rejected, None) => rejected,
            (Rejected::Unknown, Some(why)) => Rejected::Because(why),
            (Rejected::Because(first), Some(why)) => Rejected::Because(format!("{first}, {why}")),
        })
    }

    /// Whose a token of a foreign issuer is. Such tokens are meant for this server, whatever audience they name.
    async fn issued_user<'a>(
        &self,
        token: &str,
        wanted: &[&'a str],
    ) -> Result<(User, Vec<&'a str>), Rejected> {
        let own = self.own_audiences(wanted);
        if own.is_empty() {
            return Err(Rejected::Unknown);
        }
        match self.jwt.user(self, token).await {
            None => Err(Rejected::Unknown),
            Some(Ok(user)) => Ok((user, own)),
            Some(Err(why)) => {
                tracing::debug!(why, "a token of a foreign issuer is refused");
                Err(Rejected::Because(why))
            }
        }
    }

    /// Whose a bearer token is, and for which of `wanted` it is meant: an account's, or one that lets a node in.
    pub(crate) fn token_user<'a>(
        &self,
        token: &str,
        wanted: &[&'a str],
    ) -> Result<(User, Vec<&'a str>), Rejected> {
        let bootstrap = || {
            let view = self.registry.view();
            let user = bootstrap_token::user_of(&view, token, jiff::Timestamp::now());
            let user = user.filter(|_| self.config.bootstrap_tokens)?;
            Some(self.own_audiences(wanted)).filter(|own| !own.is_empty()).map(|own| (user, own))
        };
        if let Some(user) = self.config.static_tokens.user(token) {
            let own = self.own_audiences(wanted);
            return if own.is_empty() { Err(Rejected::Unknown) } else { Ok((user.clone(), own)) };
        }
        match subresource::token::user_of(self, token, wanted) {
            Err(Rejected::Unknown) => bootstrap().ok_or(Rejected::Unknown),
            known => known,
        }
    }
}
