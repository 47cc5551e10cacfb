//! Which store the API server stands on, and the etcd API over the embedded one.

use crate::apiserver::BoxError;
use crate::paths::Paths;
use ferrite_apiserver::StorageMedia;
use ferrite_encryption::{Encryption, EncryptionOptions, GroupResource, StoredAt};
use ferrite_etcd::client::{EtcdOptions, Layout, TlsFiles, connect};
use ferrite_etcd::server::Service;
use ferrite_pki::{ClusterPki, Purpose, Subject};
use ferrite_store::{HistoryLimits, LogOptions, Store};
use futures_util::future::BoxFuture;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const JSON: &str = "application/json";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// Options of the store, named as upstream's API server names them.
#[derive(Debug, Clone, clap::Args)]
pub struct StorageOptions {
    /// Members of an etcd cluster to keep the objects in, instead of the embedded store.
    #[arg(long, value_delimiter = ',', value_name = "URLS")]
    pub etcd_servers: Vec<String>,
    /// Certificate authority of the etcd members. Without it those count that the system trusts.
    #[arg(long, value_name = "FILE")]
    pub etcd_cafile: Option<PathBuf>,
    /// Certificate to show to etcd.
    #[arg(long, value_name = "FILE", requires = "etcd_keyfile")]
    pub etcd_certfile: Option<PathBuf>,
    /// Key of that certificate.
    #[arg(long, value_name = "FILE", requires = "etcd_certfile")]
    pub etcd_keyfile: Option<PathBuf>,
    /// Where in etcd the objects are.
    #[arg(long, default_value = "/registry", value_name = "PREFIX")]
    pub etcd_prefix: String,
    /// Time between two compactions of etcd; 0 for none.
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = ferrite_apiserver::go_duration)]
    pub etcd_compaction_interval: Duration,
    /// Media type of stored objects: application/json, or application/vnd.kubernetes.protobuf, as upstream's. Both are
    /// read. Custom resources are JSON.
    #[arg(long, value_name = "TYPE", default_value = JSON, value_parser = [JSON, PROTOBUF])]
    pub storage_media_type: String,
    /// File with the keys and services that encrypt objects where they are stored: an EncryptionConfiguration of
    /// apiserver.config.k8s.io/v1.
    #[arg(long, value_name = "FILE")]
    pub encryption_provider_config: Option<PathBuf>,
    /// Follow changes of --encryption-provider-config.
    #[arg(long, default_value_t = false, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set, requires = "encryption_provider_config")]
    pub encryption_provider_config_automatic_reload: bool,
    /// Serve the embedded store by the etcd v3 API here too, beside the socket. Clients need a certificate of the
    /// authority in `pki/etcd`, where there is one: `client.crt`.
    #[arg(long, value_name = "IP:PORT", conflicts_with = "etcd_servers")]
    pub etcd_listen: Option<SocketAddr>,
}

/// The store, and its service for etcd's tools.
#[derive(Debug)]
pub struct Storage {
    pub store: Arc<Store>,
    pub encryption: Arc<Encryption>,
    /// Follows the configuration of encryption.
    following: JoinSet<()>,
    api: Option<(Service, JoinSet<()>)>,
}

impl Storage {
    /// `node_address` is where other machines reach us.
    pub async fn open(
        paths: &Paths,
        options: &StorageOptions,
        node_address: IpAddr,
    ) -> Result<Self, BoxError> {
        let limits = HistoryLimits::default();
        if !options.etcd_servers.is_empty() {
            let store = Arc::new(connect(options.etcd()?, limits).await?);
            let (encryption, following) = options.encrypt(&store).await?;
            return Ok(Self { store, encryption, following, api: None });
        }
        let store = Arc::new(Store::open(&paths.store(), LogOptions::default(), limits)?);
        let (encryption, following) = options.encrypt(&store).await?;
        let socket = paths.etcd_socket();
        ferrite_hostfs::private_dir(&paths.run)?;
        let mut urls = vec![format!("unix://{}", socket.display())];
        let secured = match options.etcd_listen {
            None => None,
            Some(address) => {
                let listener = TcpListener::bind(address)
                    .await
                    .map_err(|e| format!("cannot serve the etcd API on {address} (--etcd-listen): {e}"))?;
                urls.push(format!("https://{}", listener.local_addr()?));
                Some((listener, Arc::new(tls(paths, address.ip(), node_address)?)))
            }
        };
        let service = Service::new(Arc::clone(&store), Some(paths.store()), urls);
        let mut tasks = JoinSet::new();
        let local = service.clone();
        tasks.spawn(async move {
            if let Err(error) = local.serve_unix(&socket).await {
                tracing::warn!(%error, socket = %socket.display(), "the etcd API is not served");
            }
        });
        if let Some((listener, tls)) = secured {
            let remote = service.clone();
            tasks.spawn(async move {
                if let Err(error) = remote.serve_tcp(listener, Some(tls)).await {
                    tracing::warn!(%error, "the etcd API is no longer served on TCP");
                }
            });
        }
        Ok(Self { store, encryption, following, api: Some((service, tasks)) })
    }

    /// Checks of what the store depends on, for `/healthz`.
    pub fn health_checks(&self) -> Vec<ferrite_apiserver::HealthCheck> {
        if !self.encryption.has_services() {
            return Vec::new();
        }
        let encryption = Arc::clone(&self.encryption);
        let check = move || -> BoxFuture<'static, Result<(), String>> {
            let encryption = Arc::clone(&encryption);
            Box::pin(async move { encryption.check().await })
        };
        vec![ferrite_apiserver::HealthCheck { name: "kms-providers", check: Arc::new(check) }]
    }

    /// Ends the etcd API. The store closes with the last who holds it.
    pub async fn stop(mut self) {
        self.following.shutdown().await;
        if let Some((service, tasks)) = self.api {
            service.stop().await;
            tasks.join_all().await;
        }
    }
}

/// Certificates of an authority of their own, as upstream: a client of the store reads and writes
/// everything, which no certificate of the API server's clients may allow.
fn tls(paths: &Paths, listen: IpAddr, node_address: IpAddr) -> Result<rustls::ServerConfig, BoxError> {
    let pki = ClusterPki::open(&paths.etcd_pki())?;
    let mut names = vec!["localhost".to_owned(), Ipv4Addr::LOCALHOST.to_string()];
    names.extend([listen, node_address].iter().filter(|ip| !ip.is_unspecified()).map(IpAddr::to_string));
    names.dedup();
    let subject = Subject { common_name: "etcd".into(), organization: None, names };
    let server = pki.ensure("server", &subject, Purpose::Server)?;
    pki.ensure("client", &Subject::client("etcd-client", None), Purpose::Client)?;
    Ok(ferrite_pki::mutual_server_config(&server, pki.ca(), &["h2"])?)
}

impl StorageOptions {
    /// Puts encryption at rest between the store and its readers and writers.
    async fn encrypt(&self, store: &Arc<Store>) -> Result<(Arc<Encryption>, JoinSet<()>), BoxError> {
        let options = EncryptionOptions {
            file: self.encryption_provider_config.clone(),
            reload: self.encryption_provider_config_automatic_reload,
            // Keys of the embedded store are named as everybody names them.
            etcd_prefix: if self.etcd_servers.is_empty() { "/registry" } else { &self.etcd_prefix }
                .to_owned(),
        };
        let place = |(path, group, resource): (String, String, String)| StoredAt {
            path,
            resource: GroupResource::new(&group, &resource),
        };
        let built_in = ferrite_apiserver::storage_places().into_iter().map(place);
        let encryption = Encryption::open(options, built_in)
            .await
            .map_err(|error| format!("cannot use --encryption-provider-config: {error}"))?;
        let media = StorageMedia::new(Arc::clone(&encryption) as _, self.storage_media_type == PROTOBUF);
        store.set_transformer(Arc::new(media));
        store.reveal_all().await;
        if store.has_unreadable() {
            tracing::error!(
                "the store has objects that cannot be read: check --encryption-provider-config and its services"
            );
        }
        let mut following = JoinSet::new();
        let (store, follows) = (Arc::clone(store), Arc::clone(&encryption));
        following.spawn(async move { follows.run(&store).await });
        Ok((encryption, following))
    }

    /// The files for TLS; none if no member is reached by it.
    fn etcd_tls(&self, system: Option<PathBuf>) -> Result<Option<TlsFiles>, BoxError> {
        if !self.etcd_servers.iter().any(|url| url.starts_with("https:")) {
            return Ok(None);
        }
        let ca = self.etcd_cafile.clone().or(system);
        let ca = ca.ok_or("this system trusts no authority: give that of etcd with --etcd-cafile")?;
        let client = self.etcd_certfile.clone().zip(self.etcd_keyfile.clone());
        Ok(Some(TlsFiles { ca, client }))
    }

    fn etcd(&self) -> Result<EtcdOptions, BoxError> {
        let prefix = self.etcd_prefix.trim_matches('/');
        Ok(EtcdOptions {
            tls: self.etcd_tls(ferrite_pki::system_authorities())?,
            layout: Layout { ours: b"/registry/".to_vec(), theirs: format!("/{prefix}/").into_bytes() },
            compact_every: Some(self.etcd_compaction_interval).filter(|interval| !interval.is_zero()),
            ..EtcdOptions::new(self.etcd_servers.clone())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        storage: StorageOptions,
    }

    fn options(arguments: &[&str]) -> StorageOptions {
        Line::try_parse_from([&["x"], arguments].concat()).map(|line| line.storage).unwrap()
    }

    #[test]
    fn compaction_is_a_duration_of_go() {
        let every = |arguments: &[&str]| options(arguments).etcd().unwrap().compact_every;
        assert_eq!(every(&[]), Some(Duration::from_secs(300)));
        assert_eq!(every(&["--etcd-compaction-interval=1h30m"]), Some(Duration::from_secs(5400)));
        assert_eq!(every(&["--etcd-compaction-interval=0"]), None);
        assert!(Line::try_parse_from(["x", "--etcd-compaction-interval=300"]).is_err(), "a unit is needed");
    }

    #[test]
    fn a_client_certificate_counts_without_an_authority() {
        let files =
            |arguments: &[&str], system: Option<&str>| options(arguments).etcd_tls(system.map(PathBuf::from));
        let tls = ["--etcd-servers=https://e:2379", "--etcd-certfile=c", "--etcd-keyfile=k"];
        let found = files(&tls, Some("system")).unwrap().unwrap();
        assert_eq!((found.ca, found.client), ("system".into(), Some(("c".into(), "k".into()))));
        assert!(files(&tls, None).is_err());
        let own = files(&[&tls[..], &["--etcd-cafile=own"]].concat(), Some("system")).unwrap().unwrap();
        assert_eq!(own.ca, PathBuf::from("own"));
        assert!(files(&["--etcd-servers=http://e:2379"], None).unwrap().is_none());
    }
}
