use super::accounts::AccountError;
use super::*;
use async_trait::async_trait;
use ferrite_json::{Value, json};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ServiceAccount;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// An account `robot` with one annotation; a pod's token is its name.
struct Fixed;

#[async_trait]
impl Accounts for Fixed {
    async fn account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, AccountError> {
        let account = json!({"metadata": {"name": name, "namespace": namespace, "uid": "u", "annotations": {"a/role": "puller"}}});
        if name == "robot" {
            Ok(ferrite_json::from_value(account).unwrap())
        } else {
            Err(AccountError::NoTokens)
        }
    }

    async fn token(&self, pod: &Pod, audience: &str, _: Timestamp) -> Result<String, AccountError> {
        Ok(format!("{audience} for {}", PodId::of(pod).name))
    }
}

fn pod(name: &str, account: &str) -> Pod {
    let pod = json!({
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"serviceAccountName": account, "containers": []},
    });
    ferrite_json::from_value(pod).unwrap()
}

/// Plugins in a directory of their own. Each appends its request to `<name>.asked`.
struct Bench {
    directory: tempfile::TempDir,
    providers: Vec<Value>,
}

impl Bench {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), providers: Vec::new() }
    }

    fn plugin(mut self, name: &str, script: &str, change: Value) -> Self {
        let path = self.directory.path().join(name);
        let text = format!(
            "#!/bin/sh\nread -r question\necho \"$question\" >>'{}.asked'\n{script}\n",
            path.display()
        );
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let mut provider = json!({
            "name": name,
            "matchImages": ["*.example.com"],
            "defaultCacheDuration": "1h",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        });
        for (key, value) in change.as_object().unwrap() {
            provider[key] = value.clone();
        }
        self.providers.push(provider);
        self
    }

    fn open(&self) -> Providers {
        let config = self.directory.path().join("config.json");
        let text = json!({"apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig", "providers": self.providers});
        std::fs::write(&config, text.to_string()).unwrap();
        let plugins = Plugins::load(&config, self.directory.path()).unwrap();
        Providers::new(plugins, Arc::new(Fixed), Clock::System)
    }

    fn asked(&self, name: &str) -> Vec<Value> {
        let path = self.directory.path().join(format!("{name}.asked"));
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().map(|line| ferrite_json::from_str(line).unwrap()).collect()
    }
}

/// A script that answers with these credentials.
fn answers(kind: &str, more: &str, auth: &Value) -> String {
    format!(
        r#"echo '{{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"{kind}",{more}"auth":{auth}}}'"#
    )
}

fn everything(user: &str) -> Value {
    json!({"*.example.com": {"username": user, "password": "p"}})
}

async fn users(providers: &Providers, image: &str, pod: &Pod) -> Vec<String> {
    providers.lookup(image, pod).await.into_iter().map(|found| found.auth.username).collect()
}

#[tokio::test]
async fn a_plugin_is_asked_for_images_it_matches() {
    let script = format!(
        "[ \"$1\" = get ] && [ \"$FLAVOUR\" = sweet ] && [ -n \"$PATH\" ] || exit 9\n{}",
        answers("Image", "", &everything("u"))
    );
    let change = json!({"args": ["get"], "env": [{"name": "FLAVOUR", "value": "sweet"}]});
    let bench = Bench::new().plugin("p", &script, change);
    let providers = bench.open();
    let pod = pod("a", "");
    assert_eq!(users(&providers, "elsewhere.org/app", &pod).await, Vec::<String>::new());
    assert!(bench.asked("p").is_empty(), "not its image");
    assert_eq!(users(&providers, "r.example.com/app", &pod).await, ["u"]);
    assert_eq!(
        bench.asked("p"),
        [json!({
            "kind": "CredentialProviderRequest",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "image": "r.example.com/app",
        })]
    );
}

#[tokio::test]
async fn answers_are_kept_for_what_they_are_good_for() {
    for (kind, more, lifetime, runs) in [
        // Asked for: r/app twice, r/other, s/app.
        ("Image", "", "1h", 3),
        ("Registry", "", "1h", 2),
        ("Global", "", "1h", 1),
        ("Global", "", "0s", 4),
        ("Global", r#""cacheDuration":"0s","#, "1h", 4),
        ("Global", r#""cacheDuration":"10m","#, "0s", 1),
    ] {
        let script = answers(kind, more, &everything("u"));
        let bench = Bench::new().plugin("p", &script, json!({"defaultCacheDuration": lifetime}));
        let providers = bench.open();
        for image in ["r.example.com/app", "r.example.com/app", "r.example.com/other", "s.example.com/app"] {
            assert_eq!(users(&providers, image, &pod("a", "")).await, ["u"]);
        }
        assert_eq!(bench.asked("p").len(), runs, "{kind} {more} {lifetime}");
    }
}

#[test]
fn answers_expire() {
    let cache = Cache::default();
    let at = |second| Timestamp::from_second(second).unwrap();
    let credentials = || Credentials::default();
    cache.add("r.io".into(), Scope::Everybody, credentials(), at(100), at(0));
    assert!(cache.get("r.io/app", &Scope::Everybody, at(100)).is_some());
    assert!(cache.get("r.io/app", &Scope::Everybody, at(101)).is_none());
    assert!(cache.get("s.io/app", &Scope::Everybody, at(1)).is_none());
    let scope = |token| Scope::Account {
        namespace: "n".into(),
        name: "a".into(),
        uid: "u".into(),
        annotations: Vec::new(),
        token,
    };
    cache.add("global".into(), scope(None), credentials(), at(100), at(0));
    assert!(cache.get("s.io/app", &scope(None), at(1)).is_some());
    assert!(cache.get("s.io/app", &Scope::Everybody, at(1)).is_none(), "somebody else's");
    assert!(cache.get("s.io/app", &scope(Some([0; 32])), at(1)).is_none());
}

#[tokio::test]
async fn one_run_serves_all_who_ask_at_once() {
    // It ends when somebody opens the other end of the pipe: not before all have asked.
    let bench = Bench::new();
    let pipe = bench.directory.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let script = format!(
        "read -r go <'{}'\n{}",
        pipe.display(),
        answers("Image", "\"cacheDuration\":\"0s\",", &everything("u"))
    );
    let bench = bench.plugin("p", &script, json!({}));
    let providers = bench.open();
    let pod = pod("a", "");
    let asking = futures_util::future::join_all((0..8).map(|_| users(&providers, "r.example.com/app", &pod)));
    let opened = tokio::task::spawn_blocking(move || std::fs::write(pipe, "go\n"));
    for answer in asking.await {
        assert_eq!(answer, ["u"]);
    }
    opened.await.unwrap().unwrap();
    assert_eq!(bench.asked("p").len(), 1);
}

#[tokio::test]
async fn several_plugins() {
    let second = json!({
        "r.example.com/team": {"username": "team", "password": "p"},
        "other.example.com": {"username": "other", "password": "p"},
        "*.example.com": {"username": "second", "password": "p"},
    });
    let bench = Bench::new()
        .plugin("first", &answers("Image", "", &everything("first")), json!({}))
        .plugin("broken", "echo secret; echo complaint >&2; exit 1", json!({}))
        .plugin("second", &answers("Image", "", &second), json!({}));
    let providers = bench.open();
    let pod = pod("a", "");
    assert_eq!(users(&providers, "r.example.com/team/app", &pod).await, ["team", "first", "second"]);
    assert_eq!(users(&providers, "r.example.com/app", &pod).await, ["first", "second"]);
}

async fn complaint(script: &str, token: Option<&str>) -> String {
    let bench = Bench::new().plugin("p", script, json!({}));
    let providers = bench.open();
    let config = &providers.plugins[0].config;
    let account = token.map(|token| AccountData { token: token.into(), annotations: Default::default() });
    let error = exec::run(config, &Request::new(&config.api_version, "r.example.com/x", account)).await;
    error.err().expect("it fails").to_string()
}

#[tokio::test]
async fn failures_say_why_and_keep_secrets() {
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let response = |kind: &str, version: &str, more: &str| {
        format!(r#"echo '{{"kind":"{kind}","apiVersion":"{version}",{more}}}'"#)
    };
    let good = r#""cacheKeyType":"Image""#;
    for (script, expected) in [
        (
            "echo s3cret; echo no luck, s3cret >&2; exit 3".to_owned(),
            "error execing credential provider plugin p for image r.example.com/x: exit status: 3: no luck, <token>",
        ),
        ("echo s3cret".to_owned(), "error decoding credential provider plugin response from stdout"),
        (
            response("CredentialProviderResponse", "credentialprovider.kubelet.k8s.io/v1beta1", good),
            "apiVersion from credential plugin response did not match expected apiVersion:credentialprovider.kubelet.k8s.io/v1, actual apiVersion:credentialprovider.kubelet.k8s.io/v1beta1",
        ),
        (response("Other", version, good), "error decoding credential provider plugin response from stdout"),
        (
            response("CredentialProviderResponse", version, r#""cacheKeyType":"Moon""#),
            "error decoding credential provider plugin response from stdout",
        ),
        (
            response("CredentialProviderResponse", version, r#""cacheKeyType":"Image","x":1"#),
            "error decoding credential provider plugin response from stdout",
        ),
        (
            "yes s3cret | head -c 2000000".to_owned(),
            "credential provider plugin p answered with more than 1048576 bytes",
        ),
    ] {
        assert_eq!(complaint(&script, Some("s3cret")).await, expected, "{script}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_does_not_end_is_ended() {
    // The shell's child holds the pipes, too.
    let error = complaint("sleep 100000 & wait", None).await;
    assert!(error.contains("did not end within 60s"), "{error}");
}

fn token_attributes(cache: &str, required: &[&str]) -> Value {
    json!({"tokenAttributes": {
        "serviceAccountTokenAudience": "registry",
        "cacheType": cache,
        "requireServiceAccount": true,
        "requiredServiceAccountAnnotationKeys": required,
        "optionalServiceAccountAnnotationKeys": ["a/other"],
    }})
}

#[tokio::test]
async fn plugins_that_work_for_a_service_account() {
    for (cache, runs) in [("ServiceAccount", 1), ("Token", 2)] {
        let script = answers("Global", "", &everything("u"));
        let bench = Bench::new().plugin("p", &script, token_attributes(cache, &["a/role"]));
        let providers = bench.open();
        for name in ["one", "two", "two"] {
            assert_eq!(users(&providers, "r.example.com/x", &pod(name, "robot")).await, ["u"]);
        }
        let asked = bench.asked("p");
        assert_eq!(asked.len(), runs, "{cache}");
        assert_eq!(asked[0]["serviceAccountToken"], "registry for one");
        assert_eq!(asked[0]["serviceAccountAnnotations"], json!({"a/role": "puller"}));
        // Not for those without the account, and not for accounts nobody knows.
        for account in ["", "stranger"] {
            assert!(users(&providers, "r.example.com/x", &pod("three", account)).await.is_empty());
        }
    }
    let script = answers("Global", "", &everything("u"));
    let bench = Bench::new().plugin("p", &script, token_attributes("Token", &["a/absent"]));
    let providers = bench.open();
    assert!(users(&providers, "r.example.com/x", &pod("one", "robot")).await.is_empty());
    assert!(bench.asked("p").is_empty(), "the account has not asked for this plugin");
    let mut change = token_attributes("Token", &[]);
    change["tokenAttributes"]["requireServiceAccount"] = false.into();
    let bench = Bench::new().plugin("p", &script, change);
    let providers = bench.open();
    assert_eq!(users(&providers, "r.example.com/x", &pod("static", "")).await, ["u"]);
    assert_eq!(bench.asked("p")[0].get("serviceAccountToken"), None);
}

#[test]
fn plugins_that_are_not_there() {
    let bench = Bench::new().plugin("p", "", json!({}));
    drop(bench.open());
    let directory = bench.directory.path();
    let config = directory.join("config.json");
    let refusal = |config: &Path, bin: &Path| Plugins::load(config, bin).err().unwrap().to_string();
    let nowhere = directory.join("nowhere");
    assert_eq!(
        refusal(&config, &nowhere),
        format!("plugin binary directory {} did not exist", nowhere.display())
    );
    assert!(refusal(&nowhere, directory).starts_with("unable to access path"));
    std::fs::set_permissions(directory.join("p"), PermissionsExt::from_mode(0o644)).unwrap();
    assert!(refusal(&config, directory).contains("permission denied"));
    std::fs::remove_file(directory.join("p")).unwrap();
    assert_eq!(
        refusal(&config, directory),
        format!("plugin binary executable {} did not exist", directory.join("p").display())
    );
}
