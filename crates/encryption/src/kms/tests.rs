use super::*;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use proto::{DecryptResponse, EncryptRequest, EncryptResponse};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::net::UnixListener;
use tokio::task::JoinSet;

const CONTEXT: &[u8] = b"/registry/secrets/default/a";

/// The state of a service of the tests: it "encrypts" by turning bits over.
#[derive(Debug)]
struct Service {
    status: Mutex<StatusResponse>,
    decrypts: AtomicUsize,
}

/// Serves until it is dropped.
struct Served {
    service: Arc<Service>,
    path: PathBuf,
    _tasks: JoinSet<()>,
}

fn status(key_id: &str) -> StatusResponse {
    StatusResponse { version: "v2".into(), healthz: "ok".into(), key_id: key_id.into() }
}

fn turned(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| !byte).collect()
}

fn serve(path: &Path, key_id: &str) -> Served {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    let service = Arc::new(Service { status: Mutex::new(status(key_id)), decrypts: AtomicUsize::new(0) });
    let mut tasks = JoinSet::new();
    let answers = Arc::clone(&service);
    tasks.spawn(async move {
        // Belongs to the listener's task: all connections end with it.
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let service = Arc::clone(&answers);
            let handler = hyper::service::service_fn(move |request| answer(Arc::clone(&service), request));
            connections.spawn(async move {
                let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(stream), handler).await;
            });
        }
    });
    Served { service, path: path.to_owned(), _tasks: tasks }
}

async fn answer(
    service: Arc<Service>,
    request: http::Request<hyper::body::Incoming>,
) -> Result<http::Response<impl http_body::Body<Data = Bytes, Error = Infallible>>, Infallible> {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    // Behind the frame's head of five bytes.
    let message = &body[5..];
    let answer = match path.as_str() {
        "/v2.KeyManagementService/Status" => lock(&service.status).encode_to_vec(),
        "/v2.KeyManagementService/Encrypt" => {
            let request = EncryptRequest::decode(message).unwrap();
            let key_id = lock(&service.status).key_id.clone();
            let annotations = [("a.example".to_owned(), b"1".to_vec())].into();
            EncryptResponse { ciphertext: turned(&request.plaintext), key_id, annotations }.encode_to_vec()
        }
        _ => {
            service.decrypts.fetch_add(1, Ordering::Relaxed);
            let request = DecryptRequest::decode(message).unwrap();
            assert!(request.annotations.contains_key("a.example") && !request.uid.is_empty());
            DecryptResponse { plaintext: turned(&request.ciphertext) }.encode_to_vec()
        }
    };
    let length = u32::try_from(answer.len()).unwrap().to_be_bytes();
    let framed = [&[0][..], &length, &answer].concat();
    let trailers = http::HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        http::HeaderValue::from_static("0"),
    )]);
    let body = Full::new(Bytes::from(framed)).with_trailers(async move { Some(Ok(trailers)) });
    Ok(http::Response::builder().header("content-type", "application/grpc").body(body).unwrap())
}

fn client(path: &Path) -> Kms {
    Kms::new(&KmsSettings {
        api_version: "v2".into(),
        name: "far".into(),
        endpoint: format!("unix://{}", path.display()),
        ..KmsSettings::default()
    })
    .unwrap()
}

fn rest<'a>(kms: &Kms, stored: &'a [u8]) -> &'a [u8] {
    stored.strip_prefix(kms.prefix()).expect("a prefix of the provider")
}

#[tokio::test]
async fn a_seed_of_the_service_encrypts_and_is_asked_for_once() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(&dir.path().join("kms.sock"), "key-1");
    let writer = client(&served.path);
    assert!(writer.seal(b"{}", CONTEXT).is_err(), "nothing is written before the service has answered");
    writer.check().await.unwrap();
    let stored = writer.seal(b"{}", CONTEXT).unwrap();
    assert!(stored.starts_with(b"k8s:enc:kms:v2:far:"));
    assert_eq!(writer.open(rest(&writer, &stored), CONTEXT), Ok((b"{}".to_vec(), false)));
    assert!(writer.open(rest(&writer, &stored), b"/elsewhere").is_err());
    assert_eq!(served.service.decrypts.load(Ordering::Relaxed), 0);

    // Another server, which does not know the seed.
    let reader = client(&served.path);
    let error = reader.open(rest(&reader, &stored), CONTEXT).unwrap_err().0;
    assert!(error.starts_with("failed to decrypt DEK"), "{error}");
    let more = writer.seal(b"[]", CONTEXT).unwrap();
    reader.prepare(&[&stored, &more, b"{}"]).await;
    reader.prepare(&[&stored]).await;
    assert_eq!(served.service.decrypts.load(Ordering::Relaxed), 1, "one call for one seed");
    // Nobody knows yet which key it would write with: the value counts as stale.
    assert_eq!(reader.open(rest(&reader, &more), CONTEXT), Ok((b"[]".to_vec(), true)));
}

#[tokio::test]
async fn another_key_makes_another_seed_and_old_values_stale() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(&dir.path().join("kms.sock"), "key-1");
    let kms = client(&served.path);
    kms.check().await.unwrap();
    let old = kms.seal(b"{}", CONTEXT).unwrap();
    lock(&served.service.status).key_id = "key-2".into();
    kms.probe().await.unwrap();
    assert_eq!(kms.open(rest(&kms, &old), CONTEXT), Ok((b"{}".to_vec(), true)));
    let new = kms.seal(b"{}", CONTEXT).unwrap();
    assert_eq!(kms.open(rest(&kms, &new), CONTEXT), Ok((b"{}".to_vec(), false)));
}

#[tokio::test]
async fn a_service_that_is_not_well_is_reported_and_reads_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(&dir.path().join("kms.sock"), "key-1");
    let kms = client(&served.path);
    kms.check().await.unwrap();
    let stored = kms.seal(b"{}", CONTEXT).unwrap();
    let rows: [(StatusResponse, &str); 4] = [
        (StatusResponse { healthz: "ill".into(), ..status("key-1") }, "got unexpected healthz status: ill"),
        (StatusResponse { version: "v1".into(), ..status("key-1") }, "expected KMSv2 API version v2, got v1"),
        (StatusResponse { version: "v2beta1".into(), ..status("key-1") }, "should not change"),
        (status(""), "keyID is empty"),
    ];
    for (answer, expected) in rows {
        *lock(&served.service.status) = answer;
        let error = kms.probe().await.unwrap_err();
        assert!(error.contains("kmsv2 Provider far is not healthy") && error.contains(expected), "{error}");
    }
    let path = served.path.clone();
    drop(served);
    let error = kms.probe().await.unwrap_err();
    assert!(error.contains("failed to perform status section"), "{error}");
    // The health endpoint does not ask again at once.
    assert_eq!(kms.check().await, Ok(()));
    assert!(kms.open(rest(&kms, &stored), CONTEXT).is_ok() && kms.seal(b"{}", CONTEXT).is_ok());
    // Writes stop some minutes later.
    kms.writing.write().unwrap().as_mut().unwrap().until = Instant::now() - Duration::from_secs(1);
    assert!(kms.seal(b"{}", CONTEXT).unwrap_err().0.contains("expired"));
    assert!(kms.open(rest(&kms, &stored), CONTEXT).is_ok());
    // A service that comes back is used again, with the same seed.
    let _served = serve(&path, "key-1");
    kms.probe().await.unwrap();
    let new = kms.seal(b"{}", CONTEXT).unwrap();
    assert_eq!(
        Kms::decoded(rest(&kms, &new)).unwrap().encrypted_dek_source,
        Kms::decoded(rest(&kms, &stored)).unwrap().encrypted_dek_source
    );
}

#[tokio::test]
async fn a_service_that_hangs_delays_readers_once() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(&dir.path().join("kms.sock"), "key-1");
    let writer = client(&served.path);
    writer.check().await.unwrap();
    let stored = writer.seal(b"{}", CONTEXT).unwrap();
    // Accepts and never answers.
    let silent = dir.path().join("silent.sock");
    let _listener = UnixListener::bind(&silent).unwrap();
    let reader = Kms::new(&KmsSettings {
        timeout: Some(ferrite_json::from_value("100ms".into()).unwrap()),
        endpoint: format!("unix://{}", silent.display()),
        ..client(&silent).settings
    })
    .unwrap();
    reader.prepare(&[&stored]).await;
    let again = Instant::now();
    reader.prepare(&[&stored]).await;
    assert!(again.elapsed() < Duration::from_millis(100), "it is left alone after a failure");
    assert!(reader.open(rest(&reader, &stored), CONTEXT).is_err());
}

#[test]
fn identifiers_of_keys_are_hashed() {
    assert_eq!(hash(""), "");
    assert_eq!(hash("1"), "sha256:6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b");
}
