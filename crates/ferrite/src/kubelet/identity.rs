//! The kubelet's identity: its client certificate towards the API server and the certificate of its own
//! port, the first ones and those that replace them while it runs.

use super::settings::{Settings, SettingsError};
use crate::apiserver::BoxError;
use crate::certificates::{
    CertificateError, KUBELET_CLIENT, KUBELET_SERVING, WantedCertificate, until_rotation,
};
use ferrite_client::{Backoff, RateLimit, RateLimiter, Scope};
use ferrite_component::FollowedFiles;
use ferrite_json::{Value, json};
use ferrite_network::Addresses;
use ferrite_pki::{Authority, Handshake, Identity, Purpose, ServerTls, Subject};
use kube::config::{KubeConfigOptions, Kubeconfig};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Between two certificates, however short their lives are: the cluster must not be flooded with requests.
const LEAST_WAIT: Duration = Duration::from_secs(10);

/// The names of files in `--cert-dir` are upstream's.
const CLIENT_PAIR: &str = "kubelet-client";
const SERVER_PAIR: &str = "kubelet-server";

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Certificates with their keys in one file each, and a link to the newest.
pub struct CertificateStore {
    directory: PathBuf,
}

impl CertificateStore {
    pub fn open(directory: &Path) -> Result<Self, BoxError> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|e| format!("cannot make {}: {e}", directory.display()))?;
        Ok(Self { directory: directory.to_owned() })
    }

    fn current(&self, pair: &str) -> PathBuf {
        self.directory.join(format!("{pair}-current.pem"))
    }

    /// The newest certificate, unless it has expired.
    fn load(&self, pair: &str) -> Option<Identity> {
        let text = std::fs::read_to_string(self.current(pair)).ok()?;
        let key_at = text.find("-----BEGIN").and_then(|_| {
            let keys = ["-----BEGIN PRIVATE KEY", "-----BEGIN EC PRIVATE KEY", "-----BEGIN RSA PRIVATE KEY"];
            keys.iter().filter_map(|key| text.find(key)).min()
        })?;
        let end = text[key_at..]
            .find("-----END")
            .and_then(|at| text[key_at + at..].find('\n').map(|n| key_at + at + n + 1));
        let key_end = end.unwrap_or(text.len());
        let key = text[key_at..key_end].to_owned();
        let certificate = format!("{}{}", &text[..key_at], &text[key_end..]);
        is_valid(&certificate).then_some(Identity { certificate, key })
    }

    /// Keeps a new certificate and makes it the current one.
    fn save(&self, pair: &str, identity: &Identity) -> std::io::Result<()> {
        let stamp = jiff::Timestamp::now().strftime("%Y-%m-%d-%H-%M-%S");
        let path = self.directory.join(format!("{pair}-{stamp}.pem"));
        write_private(&path, &format!("{}{}", identity.certificate, identity.key))?;
        let link = self.directory.join(format!(".{pair}-current.tmp"));
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&path, &link)?;
        std::fs::rename(&link, self.current(pair))?;
        self.prune(pair, &path);
        Ok(())
    }

    /// Certificates that were replaced are of no use.
    fn prune(&self, pair: &str, newest: &Path) {
        let prefix = format!("{pair}-");
        for entry in std::fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let dated =
                name.strip_prefix(&prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
            if dated && entry.path() != newest {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

fn is_valid(certificate: &str) -> bool {
    let Ok((_, pem)) = x509_parser::pem::parse_x509_pem(certificate.as_bytes()) else { return false };
    pem.parse_x509().is_ok_and(|parsed| parsed.validity().not_after.timestamp() > now())
}

/// Replaces a file as a whole, readable by nobody else.
fn write_private(path: &Path, text: &str) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = std::fs::OpenOptions::new();
    let mut file = file.create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)
}

/// The kubelet's access to its API server.
pub struct ClientIdentity<'a> {
    pub node: &'a str,
    pub kubeconfig: &'a Path,
    pub bootstrap: Option<&'a Path>,
    pub rotate: bool,
}

impl ClientIdentity<'_> {
    fn wanted(&self) -> WantedCertificate {
        WantedCertificate {
            name: CLIENT_PAIR,
            subject: Subject::client(&format!("system:node:{}", self.node), Some("system:nodes")),
            signer: KUBELET_CLIENT,
            usage: "client auth",
        }
    }

    /// The client, made with the kubeconfig or, where there is none yet, with a certificate that is asked for first. It
    /// stays the same client when its certificate is replaced.
    pub async fn connect(
        &self,
        store: Arc<CertificateStore>,
        limit: RateLimit,
        scope: &Scope,
    ) -> Result<kube::Client, BoxError> {
        if !self.kubeconfig.exists() || self.must_bootstrap(&store) {
            let Some(bootstrap) = self.bootstrap else {
                return Err(format!(
                    "there is no kubeconfig {}: give --bootstrap-kubeconfig, or write the file",
                    self.kubeconfig.display()
                )
                .into());
            };
            self.bootstrap_with(bootstrap, &store, scope).await?;
        }
        let kubeconfig = read_kubeconfig(self.kubeconfig)?;
        let first = client_of(&kubeconfig, store.load(CLIENT_PAIR).as_ref()).await?;
        let (swap, current) = watch::channel(first);
        if self.rotate {
            let wanted = self.wanted();
            let (store, owned) = (store.clone(), scope.clone());
            scope.spawn(async move { rotate_client(wanted, kubeconfig, store, swap, owned).await });
        }
        let limiter = Arc::new(RateLimiter::new(limit));
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (client, limiter) = (current.borrow().clone(), limiter.clone());
            async move {
                if is_limited(request.uri().path()) {
                    limiter.turn().await;
                }
                client.send(request).await
            }
        });
        Ok(kube::Client::new(service, "default"))
    }

    /// A certificate of ours that has expired proves nothing; with a bootstrap kubeconfig the node starts over.
    fn must_bootstrap(&self, store: &CertificateStore) -> bool {
        self.bootstrap.is_some() && store.current(CLIENT_PAIR).exists() && store.load(CLIENT_PAIR).is_none()
    }

    async fn bootstrap_with(
        &self,
        bootstrap: &Path,
        store: &CertificateStore,
        scope: &Scope,
    ) -> Result<(), BoxError> {
        let config = read_kubeconfig(bootstrap)?;
        let asking = client_of(&config, None).await?;
        tracing::info!(node = self.node, "asking for the first client certificate");
        let identity = self.wanted().obtain(&asking, scope).await?;
        store.save(CLIENT_PAIR, &identity)?;
        let written = own_kubeconfig(&config, &store.current(CLIENT_PAIR))?;
        if let Some(parent) = self.kubeconfig.parent() {
            std::fs::create_dir_all(parent)?;
        }
        write_private(self.kubeconfig, &written.to_string())
            .map_err(|e| format!("cannot write {}: {e}", self.kubeconfig.display()))?;
        Ok(())
    }
}

/// As upstream: heartbeats and events do not count among the requests that are limited.
fn is_limited(path: &str) -> bool {
    let heartbeat = path.starts_with("/apis/coordination.k8s.io/")
        || (path.starts_with("/api/v1/nodes/") && path.ends_with("/status"));
    let mut parts = path.trim_start_matches("/api/v1/").split('/');
    let event = matches!(
        (parts.next(), parts.next(), parts.next()),
        (Some("events"), _, _) | (Some("namespaces"), Some(_), Some("events"))
    );
    !heartbeat && !event
}

fn read_kubeconfig(path: &Path) -> Result<Kubeconfig, BoxError> {
    Kubeconfig::read_from(path)
        .map_err(|error| format!("cannot read the kubeconfig {}: {error}", path.display()).into())
}

/// A client of the kubeconfig's cluster; with an identity, in place of the kubeconfig's user.
async fn client_of(kubeconfig: &Kubeconfig, identity: Option<&Identity>) -> Result<kube::Client, BoxError> {
    let mut config =
        kube::Config::from_custom_kubeconfig(kubeconfig.clone(), &KubeConfigOptions::default()).await?;
    if let Some(identity) = identity {
        use base64::Engine;
        let encode = |pem: &str| base64::engine::general_purpose::STANDARD.encode(pem);
        config.auth_info = kube::config::AuthInfo {
            client_certificate_data: Some(encode(&identity.certificate)),
            client_key_data: Some(encode(&identity.key).into()),
            ..kube::config::AuthInfo::default()
        };
    }
    Ok(kube::Client::try_from(config)?)
}

/// The bootstrap kubeconfig's cluster, with the certificate in place of the token.
fn own_kubeconfig(bootstrap: &Kubeconfig, pair: &Path) -> Result<Value, BoxError> {
    let context = bootstrap.current_context.as_ref();
    let context = bootstrap.contexts.iter().find(|c| Some(&c.name) == context).or(bootstrap.contexts.first());
    let cluster = context.and_then(|c| c.context.as_ref()).map(|c| c.cluster.clone());
    let cluster =
        bootstrap.clusters.iter().find(|c| cluster.as_ref() == Some(&c.name)).or(bootstrap.clusters.first());
    let cluster =
        cluster.and_then(|c| c.cluster.as_ref()).ok_or("the bootstrap kubeconfig has no cluster")?;
    let cluster: Value = ferrite_json::to_value(cluster)?;
    let pair = pair.to_string_lossy();
    Ok(json!({
        "apiVersion": "v1", "kind": "Config",
        "clusters": [{"name": "default-cluster", "cluster": cluster}],
        "users": [{"name": "default-auth", "user": {"client-certificate": *pair, "client-key": *pair}}],
        "contexts": [{"name": "default-context", "context": {
            "cluster": "default-cluster", "user": "default-auth", "namespace": "default"}}],
        "current-context": "default-context",
    }))
}

/// Asks for the next certificate in time, again and again.
async fn rotate_client(
    wanted: WantedCertificate,
    kubeconfig: Kubeconfig,
    store: Arc<CertificateStore>,
    swap: watch::Sender<kube::Client>,
    scope: Scope,
) {
    let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(300), 0.2);
    loop {
        let wait = match store.load(CLIENT_PAIR) {
            Some(identity) => until_rotation(&identity.certificate, now(), rand::random()),
            // The kubeconfig has a certificate of its own, or a token: that is the first to be replaced.
            None => Some(Duration::ZERO),
        };
        tokio::time::sleep(wait.unwrap_or_default().max(LEAST_WAIT)).await;
        let client = swap.borrow().clone();
        let rotated: Result<(), BoxError> = async {
            let identity = wanted.obtain(&client, &scope).await?;
            store.save(CLIENT_PAIR, &identity)?;
            swap.send_replace(client_of(&kubeconfig, Some(&identity)).await?);
            Ok(())
        }
        .await;
        match rotated {
            Ok(()) => {
                tracing::info!("the client certificate was replaced");
                backoff.reset();
            }
            Err(error) => {
                tracing::warn!(%error, "cannot replace the client certificate; will try again");
                tokio::time::sleep(backoff.next_delay()).await;
            }
        }
    }
}

/// The certificate of the kubelet's own port.
pub struct ServingIdentity<'a> {
    pub node: &'a str,
    pub addresses: Addresses,
    /// Certificate and key of somebody else.
    pub files: Option<(PathBuf, PathBuf)>,
    /// The cluster signs it.
    pub from_cluster: bool,
    /// Verifies callers' certificates; without it nobody is known by one.
    pub client_ca: Option<PathBuf>,
    pub handshake: TlsChoices,
}

/// The choices of an administrator for the handshake.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsChoices {
    newest_only: bool,
    cipher_suites: Vec<String>,
    key_exchanges: Vec<u16>,
}

impl TlsChoices {
    pub fn read(settings: &Settings) -> Result<Self, SettingsError> {
        let bad = |field, problem: &str| SettingsError::Value { field, problem: problem.to_owned() };
        let newest_only = match settings.text("tlsMinVersion").as_str() {
            // Older versions are not offered to anybody.
            "" | "VersionTLS10" | "VersionTLS11" | "VersionTLS12" => false,
            "VersionTLS13" => true,
            _ => {
                return Err(bad(
                    "tlsMinVersion",
                    "it is none of VersionTLS10, VersionTLS11, VersionTLS12 and VersionTLS13",
                ));
            }
        };
        const CURVES: &str = "tlsCurvePreferences";
        let curves = settings.value(CURVES);
        let number = |value: &Value| value.as_i64().and_then(|number| u16::try_from(number).ok());
        let key_exchanges: Option<Vec<u16>> = curves.as_array().into_iter().flatten().map(number).collect();
        let key_exchanges =
            key_exchanges.ok_or_else(|| bad(CURVES, "it is no list of numbers of key exchanges"))?;
        Ok(Self { newest_only, cipher_suites: settings.texts("tlsCipherSuites"), key_exchanges })
    }
}

/// Makes the settings of the port from a certificate and the files of the moment.
#[derive(Debug, Clone)]
struct PortSettings {
    client_ca: Option<PathBuf>,
    /// Nobody has a certificate of an authority that exists for this moment only.
    nobody: String,
    handshake: TlsChoices,
}

impl PortSettings {
    fn of(&self, identity: &Identity) -> Result<ServerTls, BoxError> {
        let client_ca = match &self.client_ca {
            Some(path) => std::fs::read_to_string(path)
                .map_err(|e| format!("cannot read clientCAFile {}: {e}", path.display()))?,
            None => self.nobody.clone(),
        };
        let handshake = Handshake {
            protocols: &["h2", "http/1.1"],
            newest_only: self.handshake.newest_only,
            cipher_suites: self.handshake.cipher_suites.clone(),
            key_exchanges: self.handshake.key_exchanges.clone(),
            ..Handshake::default()
        };
        Ok(ferrite_pki::server_config_with(identity, &client_ca, &handshake)?)
    }
}

/// A certificate and its key of somebody else, as their files are now.
fn read_pair((certificate, key): &(PathBuf, PathBuf)) -> Result<Identity, BoxError> {
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
    };
    Ok(Identity { certificate: read(certificate)?, key: read(key)? })
}

/// Follows the certificate and the files, and makes the port's settings anew. Files that cannot be used change nothing.
async fn follow(
    settings: PortSettings,
    pair: Option<(PathBuf, PathBuf)>,
    mut files: FollowedFiles,
    mut identity: watch::Receiver<Option<Identity>>,
    port: watch::Sender<Option<ServerTls>>,
) {
    loop {
        tokio::select! {
            () = files.changed() => {}
            // Without a sender the certificate stays the same.
            Ok(()) = identity.changed() => {}
        }
        let known = match &pair {
            Some(pair) => read_pair(pair).map(Some),
            None => Ok(identity.borrow_and_update().clone()),
        };
        let made = known.and_then(|identity| identity.map(|identity| settings.of(&identity)).transpose());
        match made {
            Ok(made) => drop(port.send_replace(made)),
            Err(error) => {
                tracing::warn!(%error, "the files of the kubelet's port cannot be used; the old ones stay")
            }
        }
    }
}

impl ServingIdentity<'_> {
    fn subject(&self) -> Subject {
        Subject {
            common_name: format!("system:node:{}", self.node),
            organization: Some("system:nodes".into()),
            names: std::iter::once(self.node.to_owned())
                .chain(self.addresses.iter().map(ToString::to_string))
                .collect(),
        }
    }

    /// The settings of the port, now and as they change. There are none until the cluster has signed.
    pub fn serve(
        &self,
        store: Arc<CertificateStore>,
        client: Option<&kube::Client>,
        scope: &Scope,
    ) -> Result<watch::Receiver<Option<ServerTls>>, BoxError> {
        let settings = PortSettings {
            client_ca: self.client_ca.clone(),
            nobody: Authority::create("nobody")?.certificate().to_owned(),
            handshake: self.handshake.clone(),
        };
        // Before the files are read: a change in between is noticed.
        let mut paths: Vec<PathBuf> = self.client_ca.iter().cloned().collect();
        paths.extend(self.files.iter().flat_map(|(certificate, key)| [certificate.clone(), key.clone()]));
        let followed = FollowedFiles::new(paths);
        let identity = match &self.files {
            Some(pair) => Some(read_pair(pair)?),
            None if client.is_some() && self.from_cluster => store.load(SERVER_PAIR),
            None => Some(self.self_signed(&store)?),
        };
        // Choices that cannot be used are refused before there is a certificate.
        settings.of(&self.self_signed_for_check()?)?;
        let (port, current) = watch::channel(identity.as_ref().map(|i| settings.of(i)).transpose()?);
        let (swap, known) = watch::channel(identity);
        scope.spawn(follow(settings, self.files.clone(), followed, known, port));
        let (None, Some(client), true) = (&self.files, client, self.from_cluster) else { return Ok(current) };
        let wanted = WantedCertificate {
            name: SERVER_PAIR,
            subject: self.subject(),
            signer: KUBELET_SERVING,
            usage: "server auth",
        };
        let (client, owned) = (client.clone(), scope.clone());
        scope.spawn(async move {
            let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(300), 0.2);
            loop {
                if let Some(identity) = store.load(SERVER_PAIR) {
                    let wait = until_rotation(&identity.certificate, now(), rand::random());
                    tokio::time::sleep(wait.unwrap_or_default().max(LEAST_WAIT)).await;
                }
                let rotated: Result<(), BoxError> = async {
                    let identity = wanted.obtain(&client, &owned).await?;
                    store.save(SERVER_PAIR, &identity)?;
                    swap.send_replace(Some(identity));
                    Ok(())
                }
                .await;
                match rotated {
                    Ok(()) => {
                        tracing::info!("the serving certificate was replaced");
                        backoff.reset();
                    }
                    Err(error) => {
                        let refused = error.downcast_ref::<CertificateError>().is_some();
                        tracing::warn!(%error, refused, "there is no new serving certificate; will try again");
                        tokio::time::sleep(backoff.next_delay()).await;
                    }
                }
            }
        });
        Ok(current)
    }

    fn self_signed_for_check(&self) -> Result<Identity, BoxError> {
        Ok(Authority::create("check")?.issue(&self.subject(), Purpose::Server)?)
    }

    /// Kept as `kubelet.crt` and `kubelet.key`, as upstream.
    fn self_signed(&self, store: &CertificateStore) -> Result<Identity, BoxError> {
        let (certificate, key) = (store.directory.join("kubelet.crt"), store.directory.join("kubelet.key"));
        if let (Ok(certificate), Ok(key)) =
            (std::fs::read_to_string(&certificate), std::fs::read_to_string(&key))
            && is_valid(&certificate)
        {
            return Ok(Identity { certificate, key });
        }
        let authority = Authority::create(&format!("{}-ca@{}", self.node, now()))?;
        let identity = authority.issue(&self.subject(), Purpose::Server)?;
        write_private(&key, &identity.key)?;
        write_private(&certificate, &identity.certificate)?;
        Ok(identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_kept_in_upstreams_files() {
        let dir = tempfile::tempdir().unwrap();
        let store = CertificateStore::open(&dir.path().join("pki")).unwrap();
        assert!(store.load(CLIENT_PAIR).is_none());
        let authority = Authority::create("test").unwrap();
        let issue = |name: &str| authority.issue(&Subject::client(name, None), Purpose::Client).unwrap();
        let first = issue("first");
        store.save(CLIENT_PAIR, &first).unwrap();
        let loaded = store.load(CLIENT_PAIR).unwrap();
        assert_eq!(
            (loaded.certificate.trim(), loaded.key.trim()),
            (first.certificate.trim(), first.key.trim())
        );
        let other = store.directory.join("kubelet-client-2001-01-01-00-00-00.pem");
        std::fs::write(&other, "old").unwrap();
        store.save(CLIENT_PAIR, &issue("second")).unwrap();
        assert!(!other.exists() && store.load(CLIENT_PAIR).is_some());
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(store.current(CLIENT_PAIR)).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
    }

    #[tokio::test]
    async fn files_of_the_port_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(CertificateStore::open(&dir.path().join("pki")).unwrap());
        let authority = Authority::create("test").unwrap();
        let (certificate, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
        let write = |name: &str| {
            let subject = Subject { common_name: name.into(), organization: None, names: vec![name.into()] };
            let identity = authority.issue(&subject, Purpose::Server).unwrap();
            write_private(&key, &identity.key).unwrap();
            write_private(&certificate, &identity.certificate).unwrap();
        };
        write("first");
        let serving = |handshake| ServingIdentity {
            node: "n",
            addresses: Addresses::single("192.0.2.1".parse().unwrap()),
            files: Some((certificate.clone(), key.clone())),
            from_cluster: false,
            client_ca: None,
            handshake,
        };
        let scope = Scope::new();
        let mut port = serving(TlsChoices::default()).serve(store.clone(), None, &scope).unwrap();
        let first = port.borrow_and_update().clone().unwrap();
        // Half of a pair changes nothing; the whole pair does.
        write("second");
        tokio::time::timeout(Duration::from_secs(30), port.changed()).await.unwrap().unwrap();
        assert!(!Arc::ptr_eq(&first.config, &port.borrow().as_ref().unwrap().config));
        let wrong = TlsChoices { cipher_suites: vec!["TLS_NONE".into()], ..TlsChoices::default() };
        assert!(serving(wrong).serve(store, None, &scope).is_err());
        scope.shutdown().await;
    }

    #[test]
    fn choices_of_the_handshake() {
        use crate::kubelet::settings::testing::settings;
        let text = "tlsMinVersion: VersionTLS13\ntlsCipherSuites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]\ntlsCurvePreferences: [29, 23]\n";
        let read = TlsChoices::read(&settings(text)).unwrap();
        assert!(read.newest_only && read.key_exchanges == [29, 23] && read.cipher_suites.len() == 1);
        assert_eq!(TlsChoices::read(&settings("")).unwrap(), TlsChoices::default());
        for text in ["tlsMinVersion: '1.3'\n", "tlsCurvePreferences: [x]\n", "tlsCurvePreferences: [-1]\n"] {
            assert!(TlsChoices::read(&settings(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn heartbeats_and_events_are_not_limited() {
        for (path, limited) in [
            ("/api/v1/nodes/n", true),
            ("/api/v1/nodes/n/status", false),
            ("/api/v1/namespaces/d/pods/events", true),
            ("/api/v1/namespaces/d/pods/p/status", true),
            ("/api/v1/namespaces/d/events", false),
            ("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n", false),
        ] {
            assert_eq!(is_limited(path), limited, "{path}");
        }
    }

    #[test]
    fn the_kubelets_kubeconfig_names_its_certificate() {
        let bootstrap: Kubeconfig = ferrite_json::from_value(json!({
            "clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.1:6443", "certificate-authority-data": "QQ=="}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }))
        .unwrap();
        let own = own_kubeconfig(&bootstrap, Path::new("/pki/kubelet-client-current.pem")).unwrap();
        assert_eq!(own["clusters"][0]["cluster"]["server"], "https://192.0.2.1:6443");
        assert_eq!(own["users"][0]["user"]["client-key"], "/pki/kubelet-client-current.pem");
        assert!(!own.to_string().contains("secret"));
    }
}
