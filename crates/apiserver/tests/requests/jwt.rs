//! Users by tokens of foreign issuers: a real issuer on loopback, good and bad.

use crate::hook::{HookServer, Says, Seen};
use crate::world::World;
use ferrite_apiserver::{AuthenticationConfig, JwtAuthentication};
use ferrite_json::{Value, json};
use ferrite_pki::TokenSigner;
use jiff::Timestamp;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const REVIEW: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";

fn signer(issuer: &str) -> TokenSigner {
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("a key");
    TokenSigner::new(&key.serialize_pem(), issuer).expect("a signer")
}

/// An issuer whose answers can be changed.
struct Issuer {
    hook: HookServer,
    keys: Arc<Mutex<Value>>,
}

impl Issuer {
    async fn start() -> Self {
        let keys = Arc::new(Mutex::new(json!({"keys": []})));
        let served = Arc::clone(&keys);
        let hook = HookServer::start(move |seen: &Seen| {
            let url = format!("https://{}", seen.authority);
            match seen.path.as_str() {
                "/.well-known/openid-configuration" => {
                    Says::Json(json!({"issuer": url, "jwks_uri": format!("{url}/keys")}))
                }
                "/other" => {
                    Says::Json(json!({"issuer": "https://other.example", "jwks_uri": format!("{url}/keys")}))
                }
                "/huge" => Says::Bytes(200, "", vec![b' '; 2 << 20]),
                "/moved" => Says::Bytes(302, "/.well-known/openid-configuration", Vec::new()),
                "/silent" => Says::Nothing,
                "/trickle" => Says::Trickle,
                _ => Says::Json(served.lock().expect("a lock").clone()),
            }
        })
        .await;
        Self { hook, keys }
    }

    fn url(&self) -> String {
        self.hook.url("")
    }

    fn believe(&self, signer: &TokenSigner) {
        *self.keys.lock().expect("a lock") = signer.keys();
    }

    fn configuration(&self, more: &str) -> String {
        let authority = self.hook.authority().replace('\n', "\n      ");
        format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n- issuer:\n    url: {}\n    audiences: [us]\n{more}    certificateAuthority: |\n      {authority}\n  claimMappings:\n    username: {{claim: sub, prefix: 'x:'}}\n    groups: {{claim: groups, prefix: ''}}\n",
            self.url()
        )
    }

    async fn world(&self, more: &str) -> World {
        let config = AuthenticationConfig::parse(self.configuration(more).as_bytes(), &[]).expect("valid");
        World::start_believing(JwtAuthentication::new(config)).await
    }
}

fn claims(issuer: &str) -> Value {
    let now = Timestamp::now().as_second();
    json!({"iss": issuer, "aud": "us", "exp": now + 600, "sub": "jane", "groups": ["devs"]})
}

/// The name of the token's user, or the code of the refusal.
async fn name(world: &World, token: &str) -> Result<String, u16> {
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    let reply = world.with_token(token, REVIEW, &review).await;
    match reply.code {
        201 => Ok(reply.at("/status/userInfo/username").as_str().unwrap_or_default().to_owned()),
        code => Err(code),
    }
}

/// The error of a review of the token.
async fn error(world: &World, token: &str) -> String {
    let review =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
    let reply = world.post("/apis/authentication.k8s.io/v1/tokenreviews", &review).await;
    reply.at("/status/error").as_str().unwrap_or_default().to_owned()
}

/// Asks until the answer is right, within a bound.
async fn eventually(world: &World, token: &str, wanted: Result<&str, u16>) {
    let begun = Instant::now();
    while name(world, token).await != wanted.map(str::to_owned) {
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", error(world, token).await);
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn tokens_of_an_issuer_are_users_and_keys_are_rotated() {
    let issuer = Issuer::start().await;
    let old = signer(&issuer.url());
    issuer.believe(&old);
    let world = issuer.world("").await;
    let token = old.sign(&claims(&issuer.url())).expect("a token");
    eventually(&world, &token, Ok("x:jane")).await;
    let review =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}});
    let reply = world.post("/apis/authentication.k8s.io/v1/tokenreviews", &review).await;
    assert_eq!(reply.at("/status/authenticated"), true);
    assert_eq!(reply.at("/status/user/groups"), json!(["devs", "system:authenticated"]));

    // Known keys are not fetched again.
    let fetched = issuer.hook.seen("/keys").len();
    assert_eq!(name(&world, &token).await.as_deref(), Ok("x:jane"));
    assert_eq!(issuer.hook.seen("/keys").len(), fetched);

    // The server's own tokens are known as before.
    let wrong = name(&world, "wrong").await;
    assert_eq!(wrong, Err(401));

    let new = signer(&issuer.url());
    issuer.believe(&new);
    let token = new.sign(&claims(&issuer.url())).expect("a token");
    eventually(&world, &token, Ok("x:jane")).await;
    world.stop().await;
}

#[tokio::test]
async fn forged_and_expired_tokens_are_refused() {
    let issuer = Issuer::start().await;
    let own = signer(&issuer.url());
    issuer.believe(&own);
    let world = issuer.world("").await;
    let good = own.sign(&claims(&issuer.url())).expect("a token");
    eventually(&world, &good, Ok("x:jane")).await;
    let with = |change: &dyn Fn(&mut Value)| {
        let mut claims = claims(&issuer.url());
        change(&mut claims);
        own.sign(&claims).expect("a token")
    };
    let encode = |value: &Value| {
        use base64::Engine;
        base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(value.to_string())
    };
    let body = encode(&claims(&issuer.url()));
    let mallory = signer(&issuer.url()).sign(&claims(&issuer.url())).expect("a token");
    let parts: Vec<&str> = good.split('.').collect();
    let mut changed = claims(&issuer.url());
    changed["sub"] = "admin".into();
    let rows = [
        (with(&|claims| claims["exp"] = 1.into()), "token is expired"),
        (with(&|claims| claims["aud"] = "them".into()), "expected audience \"us\" got [\"them\"]"),
        (with(&|claims| drop(claims.as_object_mut().expect("a map").remove("sub"))), "claim not present"),
        (mallory, "failed to verify signature"),
        (format!("{}.{}.{}", parts[0], encode(&changed), parts[2]), "failed to verify signature"),
        (format!("{}.{body}.", encode(&json!({"alg": "none"}))), "unsupported algorithm"),
        (format!("{}.{body}.AAAA", encode(&json!({"alg": "HS256"}))), "unsupported algorithm"),
        (
            format!("{}.{body}.AAAA", encode(&json!({"alg": "RS256", "kid": "k".repeat(9000)}))),
            "failed to verify signature",
        ),
    ];
    for (token, expected) in rows {
        let why = error(&world, &token).await;
        assert!(why.contains(expected), "{expected}: {why}");
        assert_eq!(name(&world, &token).await, Err(401), "{expected}");
    }
    // Of another issuer: nobody is asked.
    let other = with(&|claims| claims["iss"] = "https://other.example".into());
    assert_eq!(error(&world, &other).await, "invalid bearer token");

    // Strangers cannot make the server ask its issuer without end.
    let before = issuer.hook.seen("/keys").len();
    let begun = Instant::now();
    for round in 0..50 {
        let token = format!("{}.{body}.AAAA", encode(&json!({"alg": "ES256", "kid": round.to_string()})));
        assert_eq!(name(&world, &token).await, Err(401));
    }
    let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap_or(usize::MAX);
    assert!(issuer.hook.seen("/keys").len() - before <= seconds + 2, "once in a second at most");
    world.stop().await;
}

#[tokio::test]
async fn an_issuer_that_misbehaves_stops_nobody() {
    let issuer = Issuer::start().await;
    let own = signer(&issuer.url());
    issuer.believe(&own);
    let token = own.sign(&claims(&issuer.url())).expect("a token");
    for path in ["/other", "/huge", "/moved", "/silent", "/trickle"] {
        let discovery = format!("    discoveryURL: {}\n", issuer.hook.url(path));
        let world = issuer.world(&discovery).await;
        let begun = Instant::now();
        while issuer.hook.seen(path).is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{path} was not asked for");
            tokio::task::yield_now().await;
        }
        assert_eq!(name(&world, &token).await, Err(401), "{path}");
        assert!(error(&world, &token).await.contains("oidc: authenticator not initialized"), "{path}");
        assert_eq!(world.get("/api/v1/namespaces/default").await.code, 200);
        world.stop().await;
    }
}

#[tokio::test]
async fn a_file_is_followed_and_a_bad_one_leaves_everything_as_it_was() {
    let issuer = Issuer::start().await;
    let own = signer(&issuer.url());
    issuer.believe(&own);
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("authentication.yaml");
    let head = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n";
    std::fs::write(&file, format!("{head}anonymous: {{enabled: true, conditions: [{{path: /livez}}]}}\n"))
        .expect("a file");
    let world = World::start_believing(JwtAuthentication::of_file(&file, &[]).expect("valid")).await;
    assert_eq!(world.without_credentials("/livez").await, 200);
    assert_eq!(world.without_credentials("/version").await, 401);

    let token = own.sign(&claims(&issuer.url())).expect("a token");
    assert_eq!(name(&world, &token).await, Err(401));
    std::fs::write(&file, issuer.configuration("")).expect("a file");
    eventually(&world, &token, Ok("x:jane")).await;
    // The file says nothing of anonymous requests any more.
    assert_eq!(world.without_credentials("/version").await, 200);

    // Half a file, and one whose issuer does not answer.
    std::fs::write(&file, &issuer.configuration("")[..200]).expect("a file");
    assert_eq!(name(&world, &token).await.as_deref(), Ok("x:jane"));
    let silent = issuer.configuration(&format!("    discoveryURL: {}\n", issuer.hook.url("/silent")));
    std::fs::write(&file, silent).expect("a file");
    let begun = Instant::now();
    while issuer.hook.seen("/silent").is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the new issuer was not asked");
        tokio::task::yield_now().await;
    }
    assert_eq!(name(&world, &token).await.as_deref(), Ok("x:jane"));
    world.stop().await;
}
