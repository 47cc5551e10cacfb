//! Tokens of service accounts that are kept in secrets: records their use, and checks if they may still be
//! used.
//!
//! The day of the last use is a label of the secret. A cleaner reads it, marks tokens that nobody used for a year as
//! invalid, and deletes them another year later.

use std::sync::{Mutex, PoisonError};

use ferrite_api::Status;
use ferrite_api::meta;
use ferrite_json::{Value, json};
use jiff::{Timestamp, ToSpan};
use tokio::sync::mpsc;

use crate::bootstrap;
use crate::server::ApiServer;

const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";

/// Uses that wait to be noted. A use that finds no room is noted the next time.
const WAITING: usize = 64;

/// A secret whose token was used.
#[derive(Debug)]
struct Used {
    namespace: String,
    name: String,
    uid: String,
}

/// Notes uses in the background: nobody's request waits for it.
#[derive(Debug)]
pub(crate) struct LegacyTokens {
    sender: mpsc::Sender<Used>,
    receiver: Mutex<Option<mpsc::Receiver<Used>>>,
}

impl Default for LegacyTokens {
    fn default() -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        Self { sender, receiver: Mutex::new(Some(receiver)) }
    }
}

fn label<'a>(secret: &'a Value, key: &str) -> &'a str {
    secret["metadata"]["labels"][key].as_str().unwrap_or_default()
}

fn day(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d").to_string()
}

/// True if the use of today is not noted yet. Another server's clock may be a day ahead.
fn is_news(secret: &Value, now: Timestamp) -> bool {
    let last = label(secret, LAST_USED);
    let tomorrow = now.checked_add(24.hours()).map(day).unwrap_or_default();
    last != day(now) && last != tomorrow
}

impl LegacyTokens {
    /// The token of `secret` was presented for `account`. The error says why it is not accepted.
    pub(crate) fn presented(&self, secret: &Value, account: &str, now: Timestamp) -> Result<(), String> {
        let (namespace, name) = (meta::namespace(secret), meta::name(secret));
        if is_news(secret, now) {
            let uid = meta::uid(secret).to_owned();
            let _ =
                self.sender.try_send(Used { namespace: namespace.to_owned(), name: name.to_owned(), uid });
        }
        if label(secret, INVALID_SINCE).is_empty() {
            return Ok(());
        }
        Err(format!(
            "the token in secret {namespace}/{name} for service account {namespace}/{account} has been marked invalid. Use tokens from the TokenRequest API or manually created secret-based tokens, or remove the '{INVALID_SINCE}' label from the secret to temporarily allow use of this token"
        ))
    }

    /// Notes the uses until the server ends. Only the first caller does.
    pub(crate) async fn run(&self, server: &ApiServer) {
        let receiver = self.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut receiver) = receiver else { return };
        while let Some(used) = receiver.recv().await {
            if let Err(status) = note(server, &used).await {
                let Used { namespace, name, .. } = used;
                tracing::warn!(namespace, name, error = status.message, "cannot note the use of a token");
            }
        }
    }
}

async fn note(server: &ApiServer, used: &Used) -> Result<(), Status> {
    let now = Timestamp::now();
    let change = |old: &Value| {
        let mut new = old.clone();
        if meta::uid(old) == used.uid && is_news(old, now) {
            let labels = &mut new["metadata"]["labels"];
            if labels.is_null() {
                *labels = json!({});
            }
            labels[LAST_USED] = day(now).into();
        }
        Ok(new)
    };
    let resource = server.registry.table.find("", "v1", "secrets").ok_or_else(Status::no_such_path)?;
    match bootstrap::change(server, resource, (&used.namespace, &used.name), None, &change).await {
        Err(status) if status.code == 404 => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_is_noted_once() {
        let now: Timestamp = "2026-03-04T23:00:00Z".parse().unwrap();
        for (last, news) in
            [("", true), ("2026-03-03", true), ("2026-03-04", false), ("2026-03-05", false), ("x", true)]
        {
            let secret = json!({"metadata": {"labels": {(LAST_USED): last}}});
            assert_eq!(is_news(&secret, now), news, "{last}");
        }
        assert!(is_news(&json!({"metadata": {}}), now));
    }
}
