//! TLS with certificates on both sides: our client with our server, and with a real etcd.
#![allow(clippy::unwrap_used)]

use bytes::Bytes;
use ferrite_etcd::client::{EtcdOptions, Layout, TlsFiles, connect};
use ferrite_etcd::server::Service;
use ferrite_store::{HistoryLimits, Key, Op, Store, Txn};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// A CA with one certificate for a server on loopback and one for a client, as files.
struct Certificates(PathBuf);

impl Certificates {
    fn make(dir: &Path) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        std::fs::write(dir.join("ca.crt"), ca.pem()).unwrap();
        for (name, names) in [("server", vec!["127.0.0.1".to_owned()]), ("client", vec!["client".to_owned()])]
        {
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &ca).unwrap();
            std::fs::write(dir.join(format!("{name}.crt")), certificate.pem()).unwrap();
            std::fs::write(dir.join(format!("{name}.key")), key.serialize_pem()).unwrap();
        }
        Self(dir.to_owned())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn client(&self, with_certificate: bool) -> TlsFiles {
        let client = with_certificate.then(|| (self.path("client.crt"), self.path("client.key")));
        TlsFiles { ca: self.path("ca.crt"), client }
    }

    fn server(&self) -> rustls::ServerConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.path("ca.crt")).unwrap()).unwrap();
        let clients = rustls::server::WebPkiClientVerifier::builder_with_provider(
            Arc::new(roots),
            Arc::clone(&provider),
        )
        .build()
        .unwrap();
        let chain = vec![CertificateDer::from_pem_file(self.path("server.crt")).unwrap()];
        let key = PrivateKeyDer::from_pem_file(self.path("server.key")).unwrap();
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(clients)
            .with_single_cert(chain, key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        config
    }
}

fn options(url: &str, tls: TlsFiles, seconds: u64) -> EtcdOptions {
    EtcdOptions {
        tls: Some(tls),
        layout: Layout { ours: Vec::new(), theirs: b"/tls/".to_vec() },
        timeout: Duration::from_secs(seconds),
        ..EtcdOptions::new(vec![url.to_owned()])
    }
}

/// Writes and reads over TLS; without a certificate of its own a client gets nothing.
async fn certificates_are_needed(url: &str, certificates: &Certificates) {
    let store = connect(options(url, certificates.client(true), 15), HistoryLimits::default()).await.unwrap();
    store.commit(Txn::default().then(Op::put(Key::from("a"), Bytes::from("1")))).await.unwrap();
    assert_eq!(store.latest().await.unwrap().get(b"a").unwrap().value, "1");
    assert!(connect(options(url, certificates.client(false), 1), HistoryLimits::default()).await.is_err());
}

/// Another authority, and certificates of it, in place of the files that were there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewed_files_count_for_new_connections() {
    let (files, others) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let certificates = Certificates::make(files.path());
    let serve = async |certificates: &Certificates, address: &str| {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = Service::new(Arc::new(Store::memory()), None, vec![format!("https://{address}")]);
        let (serving, tls) = (service.clone(), Arc::new(certificates.server()));
        (address, service, tokio::spawn(async move { serving.serve_tcp(listener, Some(tls)).await }))
    };
    let (address, service, task) = serve(&certificates, "127.0.0.1:0").await;
    let url = format!("https://{address}");
    let store =
        connect(options(&url, certificates.client(true), 15), HistoryLimits::default()).await.unwrap();
    service.stop().await;
    task.await.unwrap().unwrap();

    let renewed = Certificates::make(others.path());
    for name in ["ca.crt", "client.crt", "client.key"] {
        std::fs::copy(renewed.path(name), certificates.path(name)).unwrap();
    }
    let (_, service, task) = serve(&renewed, &address.to_string()).await;
    let put = || Txn::default().then(Op::put(Key::from("b"), Bytes::from("2")));
    // A request that found the old connection ended may fail once.
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while let Err(error) = store.commit(put()).await {
        assert!(std::time::Instant::now() < deadline, "{error}");
    }
    service.stop().await;
    task.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_server_and_our_client() {
    let dir = tempfile::tempdir().unwrap();
    let certificates = Certificates::make(dir.path());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let store = Arc::new(Store::memory());
    let service = Service::new(Arc::clone(&store), None, vec![url.clone()]);
    let serving = service.clone();
    let tls = Arc::new(certificates.server());
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move { serving.serve_tcp(listener, Some(tls)).await });
    // More clients than are served at once, that never begin a handshake.
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(tokio::net::TcpStream::connect(address).await.unwrap());
    }
    let begun = std::time::Instant::now();
    certificates_are_needed(&url, &certificates).await;
    assert!(begun.elapsed() < Duration::from_secs(9), "nobody waits for the end of their time");
    assert_eq!(store.snapshot().get(b"/tls/a").unwrap().value, "1", "in the place the layout says");
    service.stop().await;
    task.await.unwrap().unwrap();
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_etcd_and_our_client() {
    let dir = tempfile::tempdir().unwrap();
    let certificates = Certificates::make(dir.path());
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (url, peer) = (format!("https://{}", free()), format!("http://{}", free()));
    let started = Command::new("etcd")
        .arg("--data-dir")
        .arg(dir.path().join("etcd"))
        .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("default={peer}"), "--logger", "zap", "--client-cert-auth"])
        .arg("--trusted-ca-file")
        .arg(certificates.path("ca.crt"))
        .arg("--cert-file")
        .arg(certificates.path("server.crt"))
        .arg("--key-file")
        .arg(certificates.path("server.key"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let child = started.expect("etcd is installed: run `cargo xtask test --install`");
    let _running = Running(child);
    certificates_are_needed(&url, &certificates).await;
}
