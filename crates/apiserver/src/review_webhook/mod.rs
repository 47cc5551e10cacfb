//! Webhooks that a kubeconfig names and that answer reviews: TokenReview, SubjectAccessReview, ImageReview.
//!
//! A [`ReviewClient`] posts a review and reads its status, with upstream's attempts and limits. Whoever makes the server
//! provides the connection ([`WebhookSender`]).

mod cache;
mod flight;

pub(crate) use cache::ExpiringCache;
pub(crate) use flight::Flights;

use crate::http::BoxError;
use bytes::Bytes;
use ferrite_json::{Value, json};
use futures_util::future::BoxFuture;
use rand::RngExt;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Attempts of one review, with upstream's growth and jitter between two attempts.
const ATTEMPTS: u32 = 5;
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(500);
const GROWTH: f64 = 1.5;
const JITTER: f64 = 0.2;
/// The largest reply that is read.
const MAX_REPLY: usize = 1 << 20;
/// Of a reply that is no review, an error shows this much.
const MAX_SHOWN: usize = 512;

/// The connection to a webhook.
pub trait WebhookSender: Debug + Send + Sync {
    /// Posts JSON and reads the whole reply. A body of more than `limit` bytes is an error.
    fn post(&self, body: Bytes, limit: usize) -> BoxFuture<'_, Result<WebhookReply, BoxError>>;
}

/// Makes connections to the webhooks of kubeconfigs.
pub trait WebhookSenders: Debug + Send + Sync {
    fn open<'a>(&'a self, kubeconfig: &'a Path) -> BoxFuture<'a, Result<Arc<dyn WebhookSender>, BoxError>>;
}

/// The reply of a webhook.
#[derive(Debug, Clone)]
pub struct WebhookReply {
    pub code: u16,
    /// True if the reply has the header `Retry-After`.
    pub retry_after: bool,
    pub body: Bytes,
}

/// A review has no status.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum ReviewError {
    #[error("{why}")]
    Send { why: String, reset: bool },
    #[error("context deadline exceeded")]
    Timeout,
    #[error("the server answered {code}: {message}")]
    Code { code: u16, message: String, retry_after: bool },
    #[error("{0}")]
    Decode(String),
}

impl ReviewError {
    /// As upstream: a connection that broke, a server that says it failed or is busy, and any that names a time.
    fn is_transient(&self) -> bool {
        match self {
            Self::Send { reset, .. } => *reset,
            Self::Code { code, retry_after, .. } => *retry_after || matches!(code, 429 | 500 | 504),
            Self::Timeout | Self::Decode(_) => false,
        }
    }

    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout | Self::Code { code: 504, .. })
    }
}

/// Posts reviews of one kind to one webhook.
#[derive(Debug, Clone)]
pub(crate) struct ReviewClient {
    pub sender: Arc<dyn WebhookSender>,
    /// Group and version of the review, such as `authentication.k8s.io/v1`.
    pub group_version: String,
    pub kind: &'static str,
    /// One attempt may take this long.
    pub timeout: Duration,
    /// The pause before the second attempt.
    pub first_pause: Duration,
}

/// Learns the result and the duration of each attempt.
pub(crate) type Observer<'a> = &'a (dyn Fn(Result<(), &ReviewError>, Duration) + Send + Sync);

impl ReviewClient {
    /// Posts a review until the webhook answers, no longer than `deadline`, and returns the status.
    pub async fn status(
        &self,
        spec: &Value,
        deadline: Instant,
        observe: Observer<'_>,
    ) -> Result<Value, ReviewError> {
        let review = json!({
            "kind": self.kind, "apiVersion": self.group_version, "metadata": {}, "spec": spec, "status": {},
        });
        let body = Bytes::from(review.to_string());
        let mut pause = self.first_pause;
        let mut attempt = 1;
        loop {
            let begun = Instant::now();
            let until = deadline.min(begun + self.timeout);
            let answered = match tokio::time::timeout_at(until, self.attempt(body.clone())).await {
                Ok(answered) => answered,
                Err(_) => Err(ReviewError::Timeout),
            };
            observe(answered.as_ref().map(|_| ()), begun.elapsed());
            let error = match answered {
                Err(error) if error.is_transient() && attempt < ATTEMPTS => error,
                other => return other,
            };
            let wait = pause.mul_f64(1.0 + JITTER * rand::rng().random::<f64>());
            if Instant::now() + wait >= deadline {
                return Err(error);
            }
            tokio::time::sleep(wait).await;
            pause = pause.mul_f64(GROWTH);
            attempt += 1;
        }
    }

    async fn attempt(&self, body: Bytes) -> Result<Value, ReviewError> {
        let reply = self
            .sender
            .post(body, MAX_REPLY)
            .await
            .map_err(|error| ReviewError::Send { reset: is_reset(&*error), why: in_full(&*error) })?;
        read_status(&reply, &self.group_version, self.kind)
    }
}

/// The status of the review in a reply. As upstream: a reply may leave its kind and version out, but not have others.
fn read_status(reply: &WebhookReply, group_version: &str, kind: &str) -> Result<Value, ReviewError> {
    if !(200..=206).contains(&reply.code) {
        let parsed: Option<Value> = ferrite_json::from_slice(&reply.body).ok();
        let message = match parsed.as_ref().and_then(|value| value["message"].as_str()) {
            Some(message) => message.chars().take(MAX_SHOWN).collect(),
            None => String::from_utf8_lossy(&reply.body).chars().take(MAX_SHOWN).collect(),
        };
        return Err(ReviewError::Code { code: reply.code, message, retry_after: reply.retry_after });
    }
    let mut value: Value = ferrite_json::from_slice(&reply.body)
        .map_err(|error| ReviewError::Decode(format!("the reply is not JSON: {error}")))?;
    let is = |key: &str, wanted: &str| match value[key].as_str() {
        None => value[key].is_null(),
        Some(given) => given.is_empty() || given == wanted,
    };
    if !value.is_object() || !is("kind", kind) || !is("apiVersion", group_version) {
        let shown =
            |key: &str| value[key].as_str().unwrap_or_default().chars().take(MAX_SHOWN).collect::<String>();
        let (version, found) = (shown("apiVersion"), shown("kind"));
        return Err(ReviewError::Decode(format!(
            "the reply is a {found:?} of {version:?}, not a {kind:?} of {group_version:?}"
        )));
    }
    Ok(value.get_mut("status").map(std::mem::take).unwrap_or_default())
}

/// Returns true if the other side broke the connection.
fn is_reset(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>()
            && matches!(io.kind(), ConnectionReset | BrokenPipe)
        {
            return true;
        }
        if let Some(hyper) = error.downcast_ref::<hyper::Error>()
            && (hyper.is_incomplete_message() || hyper.is_canceled())
        {
            return true;
        }
        next = error.source();
    }
    false
}

/// An error with its causes.
fn in_full(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
pub(crate) mod fake {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Says = dyn Fn(usize, &Value) -> Result<(u16, Value), BoxError> + Send + Sync;

    /// A webhook without a network. Knows the number of earlier questions when it answers one.
    pub struct FakeWebhook {
        says: Box<Says>,
        pub asked: Mutex<Vec<Value>>,
        count: AtomicUsize,
        /// Each reply takes this long.
        pub takes: Duration,
    }

    impl Debug for FakeWebhook {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("FakeWebhook")
        }
    }

    impl FakeWebhook {
        pub fn new(
            takes: Duration,
            says: impl Fn(usize, &Value) -> Result<(u16, Value), BoxError> + Send + Sync + 'static,
        ) -> Arc<Self> {
            Arc::new(Self {
                says: Box::new(says),
                asked: Mutex::default(),
                count: AtomicUsize::new(0),
                takes,
            })
        }

        pub fn questions(&self) -> usize {
            self.count.load(Ordering::Relaxed)
        }
    }

    impl WebhookSender for FakeWebhook {
        fn post(&self, body: Bytes, _: usize) -> BoxFuture<'_, Result<WebhookReply, BoxError>> {
            Box::pin(async move {
                let question: Value = ferrite_json::from_slice(&body)?;
                let number = self.count.fetch_add(1, Ordering::Relaxed);
                let said = (self.says)(number, &question);
                self.asked.lock().expect("a lock").push(question);
                tokio::time::sleep(self.takes).await;
                let (code, reply) = said?;
                Ok(WebhookReply { code, retry_after: false, body: reply.to_string().into() })
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fake::FakeWebhook;
    use super::*;
    use std::sync::Mutex;

    fn client(sender: &Arc<FakeWebhook>) -> ReviewClient {
        ReviewClient {
            sender: Arc::clone(sender) as _,
            group_version: "authentication.k8s.io/v1".into(),
            kind: "TokenReview",
            timeout: Duration::from_secs(30),
            first_pause: FIRST_PAUSE,
        }
    }

    fn until(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn replies_that_are_no_review_are_errors() {
        let reply = |code: u16, body: &str| WebhookReply {
            code,
            retry_after: false,
            body: Bytes::copy_from_slice(body.as_bytes()),
        };
        let read = |code: u16, body: &str| {
            read_status(&reply(code, body), "authentication.k8s.io/v1", "TokenReview")
        };
        for body in [
            r#"{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","status":{"a":1}}"#,
            r#"{"status":{"a":1}}"#,
            r#"{"kind":"","status":{"a":1}}"#,
        ] {
            assert_eq!(read(201, body).expect(body), json!({"a": 1}));
        }
        assert_eq!(read(200, "{}").expect("no status"), Value::Null);
        for (code, body, part) in [
            (200, "", "not JSON"),
            (200, "[]", "not a \"TokenReview\""),
            (200, r#"{"kind":7}"#, "not a \"TokenReview\""),
            (200, r#"{"kind":"Status","apiVersion":"v1"}"#, "is a \"Status\" of \"v1\""),
            (200, r#"{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1beta1"}"#, "v1beta1"),
            (302, "moved", "the server answered 302: moved"),
            (403, r#"{"message":"no"}"#, "the server answered 403: no"),
        ] {
            let error = read(code, body).expect_err(body).to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn transient_errors_are_tried_again_five_times_at_most() {
        let status = |code: u16| move |_: usize, _: &Value| Ok((code, json!({"status": {}})));
        let reset =
            |_: usize, _: &Value| Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into());
        let refused =
            |_: usize, _: &Value| Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into());
        let none = Duration::ZERO;
        for (webhook, attempts) in [
            (FakeWebhook::new(none, status(200)), 1),
            (FakeWebhook::new(none, status(400)), 1),
            (FakeWebhook::new(none, status(403)), 1),
            (FakeWebhook::new(none, status(429)), 5),
            (FakeWebhook::new(none, status(500)), 5),
            (FakeWebhook::new(none, status(502)), 1),
            (FakeWebhook::new(none, status(504)), 5),
            (FakeWebhook::new(none, reset), 5),
            (FakeWebhook::new(none, refused), 1),
        ] {
            let seen = Mutex::new(0);
            let observe = |_: Result<(), &ReviewError>, _: Duration| *seen.lock().unwrap() += 1;
            let _ = client(&webhook).status(&json!({}), until(60), &observe).await;
            assert_eq!((webhook.questions(), *seen.lock().unwrap()), (attempts, attempts));
        }
        let recovers = FakeWebhook::new(none, |number, _| {
            Ok((if number < 2 { 500 } else { 200 }, json!({"status": {"authenticated": true}})))
        });
        let status = client(&recovers).status(&json!({}), until(60), &|_, _| {}).await.expect("a status");
        assert_eq!(status, json!({"authenticated": true}));
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_webhook_holds_nobody_longer_than_allowed() {
        let silent = FakeWebhook::new(Duration::from_secs(3600), |_, _| Ok((200, json!({}))));
        let begun = Instant::now();
        let error = client(&silent).status(&json!({}), until(10), &|_, _| {}).await.expect_err("no reply");
        assert!(matches!(error, ReviewError::Timeout));
        assert_eq!(begun.elapsed().as_secs(), 10);
        // The pauses count, too.
        let busy = FakeWebhook::new(Duration::ZERO, |_, _| Ok((500, json!({}))));
        let begun = Instant::now();
        let error = client(&busy).status(&json!({}), until(1), &|_, _| {}).await.expect_err("no reply");
        assert!(matches!(error, ReviewError::Code { code: 500, .. }));
        assert!(begun.elapsed() <= Duration::from_secs(1));
    }
}
