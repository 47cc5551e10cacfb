//! Users by the answers of a webhook about tokens: `--authentication-token-webhook-config-file`.

use super::User;
use crate::review_webhook::{ExpiringCache, FIRST_PAUSE, Flights, ReviewClient, ReviewError, WebhookSender};
use ferrite_component::metrics::{Counter, Family, Gauge, Histogram, registry};
use ferrite_json::{Value, json};
use futures_util::FutureExt;
use ring::hmac;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// One review, with all its attempts, may take this long, as upstream.
const PATIENCE: Duration = Duration::from_secs(30);
/// As upstream's cache.
const MAX_ENTRIES: usize = 32 << 10;
const MAX_BYTES: usize = 64 << 20;

/// Settings of the webhook.
#[derive(Debug, Clone)]
pub struct TokenWebhook {
    pub sender: Arc<dyn WebhookSender>,
    /// `v1` or `v1beta1`.
    pub version: String,
    /// Answers are kept this long; zero keeps none.
    pub cache_ttl: Duration,
}

/// The webhook's word about a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TokenVerdict {
    /// Without audiences the token is meant for this server.
    Known { user: Box<User>, audiences: Vec<String> },
    /// The webhook does not know the token, or cannot be asked. With its reason, if it has one.
    Unknown(Option<String>),
}

/// A verdict, and true if it may be kept.
type Answer = (Arc<TokenVerdict>, bool);

/// A hash of a token and of the audiences that it is used for. Neither tokens nor plain hashes of them stay in memory.
type Key = [u8; 32];

struct CacheMetrics {
    requests: Arc<Family<Counter>>,
    durations: Arc<Family<Histogram>>,
    fetches: Arc<Family<Counter>>,
    active: Arc<Family<Gauge>>,
}

static CACHE_METRICS: LazyLock<CacheMetrics> = LazyLock::new(|| {
    const SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
    let labels = &["status"];
    CacheMetrics {
        requests: registry().counter(
            "authentication_token_cache_request_total",
            "Lookups of tokens in the cache of the webhook's answers.",
            labels,
        ),
        durations: registry().histogram(
            "authentication_token_cache_request_duration_seconds",
            "Duration of lookups of tokens, with the webhook's time where it was asked.",
            labels,
            SECONDS,
        ),
        fetches: registry().counter(
            "authentication_token_cache_fetch_total",
            "Questions to the webhook about tokens.",
            labels,
        ),
        active: registry().gauge(
            "authentication_token_cache_active_fetch_count",
            "Requests that wait for the webhook, and questions to it that are under way.",
            labels,
        ),
    }
});

/// Counts something for as long as it lasts.
struct Active(Arc<Gauge>);

impl Active {
    fn begin(status: &str) -> Self {
        let gauge = CACHE_METRICS.active.with(&[status]);
        gauge.add(1);
        Self(gauge)
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

/// Asks the webhook about tokens.
pub(crate) struct TokenWebhookAuthenticator {
    client: ReviewClient,
    cache_ttl: Duration,
    cache: Arc<Mutex<ExpiringCache<Key, Arc<TokenVerdict>>>>,
    flights: Flights<Key, Arc<TokenVerdict>>,
    hash_key: hmac::Key,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TokenWebhookAuthenticator {
    pub fn new(settings: &TokenWebhook) -> Self {
        let client = ReviewClient {
            sender: Arc::clone(&settings.sender),
            group_version: format!("authentication.k8s.io/{}", settings.version),
            kind: "TokenReview",
            timeout: PATIENCE,
            first_pause: FIRST_PAUSE,
        };
        Self {
            client,
            cache_ttl: settings.cache_ttl,
            cache: Arc::new(Mutex::new(ExpiringCache::new(MAX_ENTRIES, MAX_BYTES))),
            flights: Flights::default(),
            hash_key: hmac::Key::new(hmac::HMAC_SHA256, &rand::random::<[u8; 32]>()),
        }
    }

    fn key(&self, token: &str, audiences: &[&str]) -> Key {
        let mut hash = hmac::Context::with_key(&self.hash_key);
        // Lengths keep "xy" and "z" apart from "x" and "yz".
        let mut add = |text: &str| {
            hash.update(&(text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        };
        add(token);
        audiences.iter().for_each(|audience| add(audience));
        let mut key = [0; 32];
        key.copy_from_slice(hash.sign().as_ref());
        key
    }

    /// The webhook's word about a token that is used for some audiences.
    pub async fn verdict(&self, token: &str, audiences: &[&str]) -> Arc<TokenVerdict> {
        let begun = Instant::now();
        let key = self.key(token, audiences);
        let counted = |status: &str| {
            CACHE_METRICS.requests.with(&[status]).increment();
            CACHE_METRICS.durations.with(&[status]).observe(begun.elapsed());
        };
        let cached = lock(&self.cache).get(&key, begun);
        if let Some(verdict) = cached {
            counted("hit");
            return verdict;
        }
        let _blocked = Active::begin("blocked");
        let verdict = self.flights.join(&key, || {
            let (client, cache, ttl) = (self.client.clone(), Arc::clone(&self.cache), self.cache_ttl);
            let spec = json!({"token": token, "audiences": audiences});
            async move {
                let _in_flight = Active::begin("in_flight");
                let (verdict, keep) = ask(&client, &spec).await;
                if keep {
                    let cost = cost_of(&verdict);
                    lock(&cache).insert(key, Arc::clone(&verdict), cost, ttl, Instant::now());
                }
                verdict
            }
            .boxed()
        });
        let verdict = verdict.await;
        counted("miss");
        verdict
    }
}

async fn ask(client: &ReviewClient, spec: &Value) -> Answer {
    let status = client.status(spec, Instant::now() + PATIENCE, &|_, _| {}).await;
    let answer = read(status);
    let failed = matches!(answer.0.as_ref(), TokenVerdict::Unknown(Some(_)));
    CACHE_METRICS.fetches.with(&[if failed { "error" } else { "ok" }]).increment();
    answer
}

/// As upstream: errors are not kept.
fn read(status: Result<Value, ReviewError>) -> Answer {
    let status = match status {
        Ok(status) => status,
        Err(error) => {
            tracing::error!(%error, "Failed to make webhook authenticator request");
            return (Arc::new(TokenVerdict::Unknown(Some(error.to_string()))), false);
        }
    };
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    if status["authenticated"] != true {
        let why = status["error"].as_str().filter(|why| !why.is_empty()).map(str::to_owned);
        let keep = why.is_none();
        return (Arc::new(TokenVerdict::Unknown(why)), keep);
    }
    let given = &status["user"];
    let text = |key: &str| given[key].as_str().unwrap_or_default().to_owned();
    let extra: BTreeMap<String, Vec<String>> = given["extra"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, values)| (key.to_string(), strings(values)))
        .collect();
    let mut user = User::new(text("username"), strings(&given["groups"]));
    if user.is_anonymous() {
        // As upstream: the anonymous user is in no group of authenticated ones.
        user.groups = strings(&given["groups"]);
    }
    let user = User { uid: text("uid"), extra, ..user };
    let audiences = strings(&status["audiences"]);
    (Arc::new(TokenVerdict::Known { user: Box::new(user), audiences }), true)
}

/// The memory that an entry takes, roughly.
fn cost_of(verdict: &TokenVerdict) -> usize {
    const ENTRY: usize = 512;
    const TEXT: usize = 24;
    let of = |texts: &[String]| -> usize { texts.iter().map(|text| text.len() + TEXT).sum() };
    ENTRY
        + match verdict {
            TokenVerdict::Unknown(why) => why.as_ref().map_or(0, String::len),
            TokenVerdict::Known { user, audiences } => {
                let extra: usize = user.extra.iter().map(|(key, values)| key.len() + TEXT + of(values)).sum();
                user.name.len() + user.uid.len() + of(&user.groups) + of(audiences) + extra
            }
        }
}

/// Those of `wanted` that a token is meant for. As upstream: a webhook that names no audience means this server, whose
/// audiences are `own`.
pub(crate) fn meant_for<'a>(wanted: &[&'a str], named: &[String], own: &[&str]) -> Vec<&'a str> {
    let is_meant = |audience: &&'a str| match named.is_empty() {
        true => own.contains(audience),
        false => named.iter().any(|name| name == audience),
    };
    wanted.iter().copied().filter(is_meant).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::review_webhook::fake::FakeWebhook;

    fn authenticator(sender: &Arc<FakeWebhook>) -> TokenWebhookAuthenticator {
        TokenWebhookAuthenticator::new(&TokenWebhook {
            sender: Arc::clone(sender) as _,
            version: "v1".into(),
            cache_ttl: Duration::from_secs(120),
        })
    }

    #[test]
    fn verdicts_are_read_as_upstream_reads_them() {
        let known = |status: Value| match &*read(Ok(status)).0 {
            TokenVerdict::Known { user, audiences } => ((**user).clone(), audiences.clone()),
            other => panic!("{other:?}"),
        };
        let (user, audiences) = known(json!({"authenticated": true, "audiences": ["a"], "user": {
            "username": "jane", "uid": "7", "groups": ["devs"], "extra": {"k": ["v", "w"]}}}));
        assert_eq!(user.groups, ["devs", "system:authenticated"]);
        assert_eq!(
            (user.name.as_str(), user.uid.as_str(), &user.extra["k"][..]),
            ("jane", "7", &["v".to_owned(), "w".to_owned()][..])
        );
        assert_eq!(audiences, ["a"]);
        let (user, _) = known(json!({"authenticated": true, "user": {"username": "system:anonymous"}}));
        assert!(user.groups.is_empty());
        let unknown = |why: Option<&str>| TokenVerdict::Unknown(why.map(str::to_owned));
        for (status, verdict, keep) in [
            (json!({"authenticated": false}), unknown(None), true),
            (Value::Null, unknown(None), true),
            (json!({"authenticated": "true"}), unknown(None), true),
            (json!({"authenticated": false, "error": "expired"}), unknown(Some("expired")), false),
        ] {
            let (found, kept) = read(Ok(status));
            assert_eq!((&*found, kept), (&verdict, keep));
        }
        let (found, kept) = read(Err(ReviewError::Timeout));
        assert_eq!((&*found, kept), (&unknown(Some("context deadline exceeded")), false));
    }

    #[test]
    fn audiences_meet_as_upstream_lets_them() {
        let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        for (wanted, given, own, meant) in [
            (&["a", "b"][..], &["b"][..], &["a"][..], &["b"][..]),
            (&["a", "b"], &[], &["a"], &["a"]),
            (&["b"], &[], &["a"], &[]),
            (&["b"], &["c"], &["b"], &[]),
        ] {
            assert_eq!(meant_for(wanted, &named(given), own), meant);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_kept_for_a_time_and_errors_are_not() {
        let webhook = FakeWebhook::new(Duration::ZERO, |number, question| {
            let token = question["spec"]["token"].as_str().unwrap_or_default();
            match token {
                "good" => Ok((200, json!({"status": {"authenticated": true, "user": {"username": "jane"}}}))),
                "bad" => Ok((200, json!({"status": {"authenticated": false}}))),
                _ => Ok((400, json!({"message": number}))),
            }
        });
        let authenticator = authenticator(&webhook);
        for (token, audience, questions) in [
            ("good", "a", 1),
            ("good", "a", 1),
            ("good", "b", 2),
            ("bad", "a", 3),
            ("bad", "a", 3),
            ("ill", "a", 4),
            ("ill", "a", 5),
        ] {
            authenticator.verdict(token, &[audience]).await;
            assert_eq!(webhook.questions(), questions, "{token} {audience}");
        }
        tokio::time::advance(Duration::from_secs(121)).await;
        authenticator.verdict("good", &["a"]).await;
        assert_eq!(webhook.questions(), 6);
        let question = webhook.asked.lock().unwrap()[0].clone();
        assert_eq!(question["kind"], "TokenReview");
        assert_eq!(question["apiVersion"], "authentication.k8s.io/v1");
        assert_eq!(question["spec"], json!({"token": "good", "audiences": ["a"]}));
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_with_one_token_asks_once() {
        let webhook = FakeWebhook::new(Duration::from_secs(1), |_, _| {
            Ok((200, json!({"status": {"authenticated": true, "user": {"username": "jane"}}})))
        });
        let authenticator = authenticator(&webhook);
        let crowd = (0..100).map(|_| authenticator.verdict("good", &["a"]));
        let verdicts = futures_util::future::join_all(crowd).await;
        assert!(verdicts.iter().all(|verdict| matches!(&**verdict, TokenVerdict::Known { .. })));
        assert_eq!(webhook.questions(), 1);
    }

    #[test]
    fn keys_differ_where_anything_differs() {
        let webhook = FakeWebhook::new(Duration::ZERO, |_, _| Ok((200, json!({}))));
        let (one, other) = (authenticator(&webhook), authenticator(&webhook));
        let keys = [
            one.key("t", &["a"]),
            one.key("t", &["b"]),
            one.key("t", &["a", "b"]),
            one.key("t", &["ab"]),
            one.key("ta", &[]),
            other.key("t", &["a"]),
        ];
        let distinct: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
        assert_eq!(keys[0], one.key("t", &["a"]));
    }
}
