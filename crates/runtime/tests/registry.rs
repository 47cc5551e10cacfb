//! Pulling: from Debian's `docker-registry` on a loopback port, and from a server of the test's own that
//! misbehaves on demand.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod docker_registry;
mod image_fixtures;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use docker_registry::Registry;
use ferrite_cri::Code;
use ferrite_cri::v1::{
    AuthConfig, ImageSpec, ImageStatusRequest, ListImagesRequest, PullImageRequest, RemoveImageRequest,
};
use ferrite_runtime::image::cri::Images;
use ferrite_runtime::image::{
    Auth, Digest, ImageError, ImageRecord, ImageStore, Platform, Progress, ProgressEvent, RegistryConfig,
};
use image_fixtures::{TestImage, architecture, count, gzip, quiet, read, store, tar};
use serde_json::json;

async fn pull(store: &Arc<ImageStore>, name: &str, auth: Auth) -> Result<ImageRecord, ImageError> {
    pull_with(store, name, auth, quiet()).await
}

async fn pull_with(
    store: &Arc<ImageStore>,
    name: &str,
    auth: Auth,
    progress: Progress,
) -> Result<ImageRecord, ImageError> {
    store.pull(&name.parse()?, auth, &Platform::host(), &RegistryConfig::default(), progress).await
}

fn sample() -> TestImage {
    let busybox = std::fs::read("/bin/busybox").expect("busybox-static is installed");
    TestImage::new(vec![tar(&[("bin/busybox", &busybox)]), tar(&[("etc/motd", b"hello")])], gzip)
}

#[tokio::test]
async fn pull_by_tag_and_digest() {
    let registry = Registry::start(false);
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let image = sample();
    let manifest = registry.push("test/app", &image, "v1");
    let name = format!("{}/test/app:v1", registry.address);

    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&events);
    let record = pull_with(&store, &name, Auth::Anonymous, Arc::new(move |e| seen.lock().unwrap().push(e)))
        .await
        .unwrap();
    assert_eq!(record.id, image.id());
    assert_eq!(record.repo_tags, std::slice::from_ref(&name));
    let by_digest = format!("{}/test/app@{manifest}", registry.address);
    assert_eq!(record.repo_digests, std::slice::from_ref(&by_digest));
    let dirs = store.lower_dirs(&name);
    assert_eq!(read(&dirs[0], "etc/motd"), "hello");
    let said = Command::new(dirs[1].join("bin/busybox")).args(["echo", "runs"]).output().unwrap();
    assert_eq!(said.stdout, b"runs\n");
    let events = std::mem::take(&mut *events.lock().unwrap());
    assert!(events.contains(&ProgressEvent::Resolved { digest: manifest.clone() }));
    let unpacked = events.iter().filter(|e| matches!(e, ProgressEvent::Unpacked { .. })).count();
    assert_eq!(unpacked, 2);
    assert_eq!(count(root.path().join("images/blobs/sha256")), 2, "manifest and configuration");

    // Again: nothing is downloaded.
    let seen = Arc::new(Mutex::new(Vec::new()));
    let events = Arc::clone(&seen);
    pull_with(&store, &name, Auth::Anonymous, Arc::new(move |e| events.lock().unwrap().push(e)))
        .await
        .unwrap();
    assert!(!seen.lock().unwrap().iter().any(|e| matches!(e, ProgressEvent::Downloading { .. })));
    // By digest a local image is right by definition; the registry is not even asked.
    drop(registry);
    assert_eq!(pull(&store, &by_digest, Auth::Anonymous).await.unwrap().id, image.id());
    let gone = pull(&store, &name, Auth::Anonymous).await.unwrap_err();
    assert!(matches!(gone, ImageError::Unreachable { .. }), "{gone}");
}

#[tokio::test]
async fn many_pulls_at_once_share_the_work() {
    let registry = Registry::start(false);
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let image = sample();
    registry.push("test/app", &image, "v1");
    let name = format!("{}/test/app:v1", registry.address);
    let pulls = (0..8).map(|_| {
        let (store, name) = (Arc::clone(&store), name.clone());
        async move { pull(&store, &name, Auth::Anonymous).await.unwrap().id }
    });
    for id in futures_util::future::join_all(pulls).await {
        assert_eq!(id, image.id());
    }
    assert_eq!(count(root.path().join("images/layers")), 2);
    assert_eq!(count(root.path().join("images/blobs/sha256")), 2);
    assert_eq!(count(root.path().join("images/ingest")), 0);
}

#[tokio::test]
async fn an_index_gives_this_platforms_image() {
    let registry = Registry::start(false);
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let (ours, other) = (sample(), TestImage::plain(vec![tar(&[("other", b"")])]));
    let digests = [registry.push("multi", &other, "other"), registry.push("multi", &ours, "ours")];
    let manifest = |digest: &Digest, arch: &str, size: usize| {
        json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": size,
            "platform": {"os": "linux", "architecture": arch},
        })
    };
    let kind = "application/vnd.oci.image.index.v1+json";
    let index = json!({
        "schemaVersion": 2, "mediaType": kind,
        "manifests": [
            manifest(&digests[0], "s390x", other.manifest().len()),
            manifest(&digests[1], architecture(), ours.manifest().len()),
        ],
    })
    .to_string();
    registry.push_manifest("multi", "latest", kind, index.as_bytes());
    let record = pull(&store, &format!("{}/multi", registry.address), Auth::Anonymous).await.unwrap();
    assert_eq!(record.id, ours.id());
    let expected = format!("{}/multi@{}", registry.address, Digest::of(index.as_bytes()));
    assert_eq!(record.repo_digests, [expected], "the name means the index");

    let foreign = Platform { os: "linux".into(), architecture: "riscv64".into(), variant: None };
    let reference = format!("{}/multi", registry.address).parse().unwrap();
    let none = store
        .pull(&reference, Auth::Anonymous, &foreign, &RegistryConfig::default(), quiet())
        .await
        .unwrap_err();
    assert!(none.to_string().contains("no variant for linux/riscv64; it offers linux/s390x"), "{none}");
}

#[tokio::test]
async fn credentials_and_the_kubelets_distinctions() {
    let registry = Registry::start(true);
    let root = tempfile::tempdir().unwrap();
    let images = Images::new(store(root.path()), RegistryConfig::default());
    let image = sample();
    registry.push("private/app", &image, "v1");
    let spec = |name: &str| Some(ImageSpec { image: name.into(), ..Default::default() });
    let name = format!("{}/private/app:v1", registry.address);
    let with = |username: &str, password: &str| {
        Some(AuthConfig { username: username.into(), password: password.into(), ..Default::default() })
    };
    let pull = async |name: &str, auth: Option<AuthConfig>| {
        images.pull_image(PullImageRequest { image: spec(name), auth, sandbox_config: None }).await
    };
    let rows = [
        (name.clone(), None, Code::PermissionDenied),
        (name.clone(), with("user", "wrong"), Code::PermissionDenied),
        (format!("{}/private/app:none", registry.address), with("user", "secret"), Code::NotFound),
        (format!("{}/no/such", registry.address), with("user", "secret"), Code::NotFound),
        ("127.0.0.1:1/app".into(), None, Code::Unavailable),
        ("ferrite.local/none".into(), None, Code::NotFound),
        ("NOT A NAME".into(), None, Code::InvalidArgument),
        (String::new(), None, Code::InvalidArgument),
    ];
    for (name, auth, want) in rows {
        let error = pull(&name, auth).await.expect_err(&name);
        assert_eq!(error.code, want, "{name}: {error}");
    }
    let answer = pull(&name, with("user", "secret")).await.unwrap();
    assert_eq!(answer.image_ref, image.id().to_string());

    let listed = images.list_images(ListImagesRequest::default()).await.unwrap().images;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].uid.as_ref().unwrap().value, 1000);
    assert_eq!(listed[0].repo_tags, std::slice::from_ref(&name));
    let status = |name: &str| images.image_status(ImageStatusRequest { image: spec(name), verbose: true });
    assert_eq!(status(&answer.image_ref).await.unwrap().image.unwrap(), listed[0]);
    assert!(status("absent").await.unwrap().image.is_none());
    let usage = images.image_fs_info(7).await.unwrap().image_filesystems.remove(0);
    assert!(usage.used_bytes.unwrap().value > 0 && usage.inodes_used.unwrap().value > 0);

    let used = [image.id()].into();
    let request = RemoveImageRequest { image: spec(&answer.image_ref) };
    assert_eq!(images.remove_image(request.clone(), used).await.unwrap_err().code, Code::FailedPrecondition);
    images.remove_image(request.clone(), Default::default()).await.unwrap();
    images.remove_image(request, Default::default()).await.unwrap();
    assert!(images.list_images(ListImagesRequest::default()).await.unwrap().images.is_empty());
}

/// The test server's response to a path and the start of a range.
type Handler = dyn Fn(&str, Option<u64>) -> Vec<u8> + Send + Sync;

/// The test server's response to a request.
type Answer = dyn Fn(&Asked) -> Vec<u8> + Send + Sync;

/// A request that the test server received.
#[derive(Default)]
struct Asked {
    path: String,
    range: Option<u64>,
    authorization: String,
    /// The fields of a form.
    body: String,
}

/// A registry that answers as the test says. It ends with the value.
struct Fake {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
    stop: Option<thread::JoinHandle<()>>,
}

impl Fake {
    /// `handler` gets the path and where a range starts, and returns the whole response.
    fn start(handler: Arc<Handler>) -> Self {
        Self::answering(Arc::new(move |asked: &Asked| handler(&asked.path, asked.range)))
    }

    fn answering(handler: Arc<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&requests);
        let stop = thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let mut first = String::new();
                if reader.read_line(&mut first).unwrap_or(0) == 0 {
                    continue;
                }
                if first.starts_with("STOP") {
                    return;
                }
                let path = first.split(' ').nth(1).unwrap().to_owned();
                let mut asked = Asked { path: path.clone(), ..Default::default() };
                let mut length = 0;
                for line in reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty())
                {
                    let (name, value) = line.split_once(": ").unwrap_or((&line, ""));
                    match name.to_ascii_lowercase().as_str() {
                        "range" => {
                            asked.range =
                                value.trim_start_matches("bytes=").trim_end_matches('-').parse().ok();
                        }
                        "authorization" => asked.authorization = value.to_owned(),
                        "content-length" => length = value.parse().unwrap(),
                        _ => {}
                    }
                }
                reader.take(length).read_to_string(&mut asked.body).unwrap();
                log.lock().unwrap().push(match asked.range {
                    Some(start) => format!("{path} from {start}"),
                    None => path.clone(),
                });
                let _ = stream.write_all(&handler(&asked));
            }
        });
        Self { address, requests, stop: Some(stop) }
    }

    fn serving(
        image: TestImage,
        layer: impl Fn(&[u8], Option<u64>) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        Self::start(Arc::new(move |path, range| {
            let last = path.rsplit('/').next().unwrap();
            if path == "/v2/" {
                respond("200 OK", b"{}")
            } else if path.contains("/manifests/") {
                respond("200 OK", &image.manifest())
            } else if last == image.id().to_string() {
                respond("200 OK", &image.config)
            } else {
                match image.packed.iter().find(|blob| Digest::of(blob).to_string() == last) {
                    Some(blob) => layer(blob, range),
                    None => respond("404 Not Found", b"{\"errors\":[{\"code\":\"BLOB_UNKNOWN\"}]}"),
                }
            }
        }))
    }

    fn name(&self) -> String {
        format!("{}/fake:1", self.address)
    }

    fn blob_requests(&self, digest: &Digest) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        let wanted = format!("/v2/fake/blobs/{digest}");
        requests.iter().filter_map(|r| r.strip_prefix(&wanted)).map(str::to_owned).collect()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Ok(mut stream) = TcpStream::connect(self.address) {
            let _ = stream.write_all(b"STOP\r\n\r\n");
        }
        if let Some(stop) = self.stop.take() {
            let _ = stop.join();
        }
    }
}

fn respond(status: &str, body: &[u8]) -> Vec<u8> {
    let mut response =
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len())
            .into_bytes();
    response.extend_from_slice(body);
    response
}

/// A response that ends before its announced length.
fn cut(blob: &[u8], after: usize) -> Vec<u8> {
    let mut response = respond("200 OK", blob);
    response.truncate(response.len() - blob.len() + after);
    response
}

fn incompressible(size: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let content: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(size)
    .collect();
    tar(&[("data", &content)])
}

#[tokio::test]
async fn a_cut_download_goes_on_where_it_ended() {
    let root = tempfile::tempdir().unwrap();
    let image = TestImage::plain(vec![incompressible(300_000)]);
    let (digest, id) = (Digest::of(&image.packed[0]), image.id());
    let fake = Fake::serving(image, |blob, range| match range {
        None => cut(blob, 100_000),
        Some(start) => respond("206 Partial Content", &blob[start as usize..]),
    });
    {
        let store = store(root.path());
        let error = pull(&store, &fake.name(), Auth::Anonymous).await.unwrap_err();
        assert!(matches!(error, ImageError::Unreachable { .. }), "{error}");
        assert!(store.list().unwrap().is_empty());
    }
    // Another process, after a crash.
    let store = store(root.path());
    assert_eq!(pull(&store, &fake.name(), Auth::Anonymous).await.unwrap().id, id);
    let requests = fake.blob_requests(&digest);
    assert_eq!(requests.len(), 2, "{requests:?}");
    let start: u64 = requests[1].strip_prefix(" from ").unwrap().parse().unwrap();
    assert!(start > 0 && start <= 100_000, "{start}");
    assert_eq!(fake.blob_requests(&id).len(), 1, "the configuration was complete already");
}

#[tokio::test]
async fn a_registry_without_ranges_starts_over() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let image = TestImage::plain(vec![incompressible(200_000)]);
    let id = image.id();
    let fake = Fake::serving(image, |blob, range| match range {
        None => cut(blob, 50_000),
        Some(_) => respond("200 OK", blob),
    });
    pull(&store, &fake.name(), Auth::Anonymous).await.unwrap_err();
    assert_eq!(pull(&store, &fake.name(), Auth::Anonymous).await.unwrap().id, id);
}

#[tokio::test]
async fn lying_registries() {
    type Layer = fn(&[u8], Option<u64>) -> Vec<u8>;
    type Expected = fn(&ImageError) -> bool;
    let rows: Vec<(&str, Layer, Expected)> = vec![
        (
            "other content",
            |blob, _| {
                let mut blob = blob.to_vec();
                blob[600] ^= 1;
                respond("200 OK", &blob)
            },
            |e| matches!(e, ImageError::Corrupt { .. }),
        ),
        (
            "more than announced",
            |blob, _| respond("200 OK", &[blob, blob].concat()),
            |e| matches!(e, ImageError::Limit { .. }),
        ),
        ("no such blob", |_, _| respond("404 Not Found", b""), |e| matches!(e, ImageError::NotFound(_))),
        (
            "trouble",
            |_, _| respond("503 Service Unavailable", b"busy"),
            |e| matches!(e, ImageError::Unreachable { .. }),
        ),
        (
            "forbidden",
            |_, _| respond("403 Forbidden", b"no"),
            |e| matches!(e, ImageError::Unauthorized { .. }),
        ),
    ];
    for (name, layer, expected) in rows {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        let fake = Fake::serving(TestImage::plain(vec![incompressible(10_000)]), layer);
        let error = pull(&store, &fake.name(), Auth::Anonymous).await.expect_err(name);
        assert!(expected(&error), "{name}: {error:?}");
        assert!(store.list().unwrap().is_empty(), "{name}");
        assert_eq!(count(root.path().join("images/layers")), 0, "{name}");
        // A failed attempt does not block the next one.
        store.collect(&Default::default()).unwrap();
        assert_eq!(count(root.path().join("images/blobs/sha256")), 0, "{name}");
    }
}

#[tokio::test]
async fn answers_that_are_no_manifests() {
    let rows: [(&str, &str); 6] = [
        ("hello", "manifest"),
        ("{}", "manifest"),
        ("{\"schemaVersion\":1,\"fsLayers\":[]}", "unsupported: manifest schema 1"),
        ("{\"schemaVersion\":2}", "manifest"),
        ("{\"schemaVersion\":2,\"manifests\":[]}", "no variant"),
        (
            "{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\",\"config\":{\"mediaType\":\"a/b\",\
             \"digest\":\"sha256:../../../../etc/passwd\",\"size\":1},\"layers\":[]}",
            "",
        ),
    ];
    for (answer, want) in rows {
        let root = tempfile::tempdir().unwrap();
        let fake = Fake::start(Arc::new(move |path, _| match path {
            "/v2/" => respond("200 OK", b"{}"),
            _ => respond("200 OK", answer.as_bytes()),
        }));
        let error = pull(&store(root.path()), &fake.name(), Auth::Anonymous).await.expect_err(answer);
        assert!(error.to_string().contains(want), "{answer}: {error}");
    }
}

#[tokio::test]
async fn garbage_collection_leaves_a_running_pull_alone() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let image = TestImage::plain(vec![incompressible(300_000), incompressible(200_000)]);
    let id = image.id();
    let fake = Fake::serving(image, |blob, _| respond("200 OK", blob));
    let collector = Arc::clone(&store);
    let progress: Progress = Arc::new(move |_| {
        collector.collect(&Default::default()).unwrap();
    });
    assert_eq!(pull_with(&store, &fake.name(), Auth::Anonymous, progress).await.unwrap().id, id);
    assert_eq!(
        store.lower_dirs(&id.to_string()).iter().filter(|dir| Path::new(dir).join("data").exists()).count(),
        2
    );
}

/// A token with a line break fits in no header.
#[tokio::test]
async fn a_token_that_is_none() {
    let root = tempfile::tempdir().unwrap();
    let own = Arc::new(Mutex::new(None::<SocketAddr>));
    let address = Arc::clone(&own);
    let fake = Fake::start(Arc::new(move |path, _| match path {
        path if path.starts_with("/token") => respond("200 OK", b"{\"token\":\"a\\nb\"}"),
        _ => {
            let realm = format!("http://{}/token", address.lock().unwrap().unwrap());
            format!(
                "HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\
                 WWW-Authenticate: Bearer realm=\"{realm}\",service=\"s\"\r\n\r\n"
            )
            .into_bytes()
        }
    }));
    *own.lock().unwrap() = Some(fake.address);
    let error = pull(&store(root.path()), &fake.name(), Auth::Anonymous).await.unwrap_err();
    assert!(matches!(error, ImageError::Registry { .. } | ImageError::Unauthorized { .. }), "{error}");
}

/// A registry that wants the token `good` from a token server of its own.
fn with_tokens(image: TestImage, token: impl Fn(&Asked) -> Vec<u8> + Send + Sync + 'static) -> Fake {
    let own = Arc::new(Mutex::new(None::<SocketAddr>));
    let address = Arc::clone(&own);
    let fake = Fake::answering(Arc::new(move |asked| {
        if asked.path.starts_with("/token") {
            return token(asked);
        }
        if asked.authorization != "Bearer good" {
            let realm = format!("http://{}/token", address.lock().unwrap().unwrap());
            return format!(
                "HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\
                 WWW-Authenticate: Basic realm=\"x\"\r\nWWW-Authenticate: Bearer realm=\"{realm}\",service=\"s\"\r\n\r\n"
            )
            .into_bytes();
        }
        let last = asked.path.rsplit('/').next().unwrap();
        let blobs = image.packed.iter().chain([&image.config]);
        match blobs.into_iter().find(|blob| Digest::of(blob).to_string() == last) {
            _ if asked.path.contains("/manifests/") => respond("200 OK", &image.manifest()),
            Some(blob) => respond("200 OK", blob),
            None => respond("404 Not Found", b""),
        }
    }));
    *own.lock().unwrap() = Some(fake.address);
    fake
}

#[tokio::test]
async fn tokens_from_a_token_server() {
    let image = || TestImage::plain(vec![tar(&[("etc/motd", b"hello")])]);
    let identity = |asked: &Asked| {
        let mut fields: Vec<&str> = asked.body.split('&').collect();
        fields.sort_unstable();
        let want = [
            "client_id=ferrite",
            "grant_type=refresh_token",
            "refresh_token=secret%3D",
            "scope=repository%3Afake%3Apull",
            "service=s",
        ];
        match fields == want {
            true => respond("200 OK", b"{\"access_token\":\"good\",\"expires_in\":300}"),
            false => respond("401 Unauthorized", b"{\"details\":\"incorrect\"}"),
        }
    };
    let basic = |asked: &Asked| match asked.authorization == "Basic dXNlcjpzZWNyZXQ="
        && asked.path == "/token?scope=repository%3Afake%3Apull&service=s"
    {
        true => respond("200 OK", b"{\"token\":\"good\"}"),
        false => respond("401 Unauthorized", b"no"),
    };
    let named = Auth::Basic { username: "user".into(), password: "secret".into() };
    type Server = fn(&Asked) -> Vec<u8>;
    let rows: [(&str, Auth, Server, bool); 6] = [
        ("an identity token", Auth::Identity("secret=".into()), identity, true),
        ("another one", Auth::Identity("other".into()), identity, false),
        ("a name and a password", named.clone(), basic, true),
        ("nobody", Auth::Anonymous, basic, false),
        ("a registry's own token", Auth::Bearer("good".into()), basic, true),
        ("a wrong one", Auth::Bearer("bad".into()), basic, false),
    ];
    for (name, auth, server, good) in rows {
        let root = tempfile::tempdir().unwrap();
        let fake = with_tokens(image(), server);
        let pulled = pull(&store(root.path()), &fake.name(), auth).await;
        match pulled {
            Ok(_) => assert!(good, "{name}"),
            Err(error) => {
                assert!(!good, "{name}: {error}");
                assert!(matches!(error, ImageError::Unauthorized { .. }), "{name}: {error}");
                assert!(!error.to_string().contains("secret"), "{error}");
            }
        }
        let asked = fake.requests.lock().unwrap().iter().filter(|path| path.starts_with("/token")).count();
        assert!(asked <= 1, "{name}: one token is enough for a pull");
    }
}

/// The client does not read an endless response to its end.
#[tokio::test(flavor = "multi_thread")]
async fn answers_without_bounds() {
    let endless = |head: &str| {
        let mut answer = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{head}\r\n").into_bytes();
        answer.resize(answer.len() + (6 << 20), b' ');
        answer
    };
    for head in ["", "Content-Length: 99999999999\r\n"] {
        let root = tempfile::tempdir().unwrap();
        let fake = Fake::start(Arc::new(move |_, _| endless(head)));
        let error = pull(&store(root.path()), &fake.name(), Auth::Anonymous).await.unwrap_err();
        assert!(matches!(error, ImageError::Limit { what: "size of a manifest", .. }), "{head}: {error}");
    }
    let root = tempfile::tempdir().unwrap();
    let fake = with_tokens(TestImage::plain(vec![tar(&[("a", b"")])]), move |_| endless(""));
    let error = pull(&store(root.path()), &fake.name(), Auth::Anonymous).await.unwrap_err();
    assert!(matches!(error, ImageError::Limit { .. }), "{error}");
}

#[tokio::test]
async fn a_cancelled_pull_leaves_the_store_usable() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    let image = TestImage::plain(vec![incompressible(300_000)]);
    let id = image.id();
    let fake = Fake::serving(image, |blob, _| respond("200 OK", blob));
    let name = fake.name();
    let (started, waiting) = tokio::sync::oneshot::channel();
    let started = Mutex::new(Some(started));
    let progress: Progress = Arc::new(move |event| {
        if let (ProgressEvent::Downloading { .. }, Some(started)) = (event, started.lock().unwrap().take()) {
            let _ = started.send(());
        }
    });
    tokio::select! {
        _ = waiting => {}
        done = pull_with(&store, &name, Auth::Anonymous, progress) => panic!("{done:?}"),
    }
    assert!(store.list().unwrap().is_empty());
    assert_eq!(pull(&store, &name, Auth::Anonymous).await.unwrap().id, id);
}

#[tokio::test]
async fn mirrors_come_first_and_the_registry_is_the_last_resort() {
    let (mirror, origin) = (Registry::start(false), Registry::start(true));
    let (first, second) = (sample(), TestImage::plain(vec![tar(&[("etc/other", b"x")])]));
    mirror.push("test/app", &first, "v1");
    origin.push("test/app", &second, "v1");
    origin.push("test/only", &second, "v1");
    let directory = tempfile::tempdir().unwrap();
    let settings = directory.path().join("registries.yaml");
    let text = format!(
        "mirrors:\n  \"{0}\":\n    endpoint: [\"http://127.0.0.1:1\", \"http://{1}\"]\n\
         configs:\n  \"{0}\":\n    auth: {{ username: user, password: secret }}\n",
        origin.address, mirror.address
    );
    std::fs::write(&settings, text).unwrap();
    let mut config = RegistryConfig::default();
    config.load(&settings, &directory.path().join("certs.d")).unwrap();
    let store = store(directory.path());
    let pull = async |name: &str| {
        let name = format!("{}/{name}", origin.address);
        let reference = name.parse().unwrap();
        store.pull(&reference, Auth::Anonymous, &Platform::host(), &config, quiet()).await
    };
    // A mirror that is down is passed over; the next one has the image, under the registry's name.
    let record = pull("test/app:v1").await.unwrap();
    assert_eq!(record.id, first.id());
    assert_eq!(record.repo_tags, [format!("{}/test/app:v1", origin.address)]);
    // No mirror has it: the registry, with the credentials from the file.
    assert_eq!(pull("test/only:v1").await.unwrap().id, second.id());
    assert!(matches!(pull("test/none:v1").await.unwrap_err(), ImageError::NotFound(_)));
}
