//! Which store the API server stands on, and the etcd API over the embedded one.

use crate::apiserver::BoxError;
use crate::paths::Paths;
use ferrite_etcd::client::{EtcdOptions, Layout, TlsFiles, connect};
use ferrite_etcd::server::Service;
use ferrite_store::{HistoryLimits, LogOptions, Store};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Options of the store, named as upstream's API server names them.
#[derive(Debug, Clone, clap::Args)]
pub struct StorageOptions {
    /// Members of an etcd cluster to keep the objects in, instead of the embedded store.
    #[arg(long, value_delimiter = ',', value_name = "URLS")]
    pub etcd_servers: Vec<String>,
    /// Certificate authority of the etcd members.
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
    /// Seconds between two compactions of etcd; 0 for none.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub etcd_compaction_interval: u64,
}

/// The store, and what serves it to etcd's tools.
#[derive(Debug)]
pub struct Storage {
    pub store: Arc<Store>,
    api: Option<(Service, JoinHandle<()>)>,
}

impl Storage {
    pub async fn open(paths: &Paths, options: &StorageOptions) -> Result<Self, BoxError> {
        let limits = HistoryLimits::default();
        if !options.etcd_servers.is_empty() {
            let store = Arc::new(connect(options.etcd(), limits).await?);
            return Ok(Self { store, api: None });
        }
        let store = Arc::new(Store::open(&paths.store(), LogOptions::default(), limits)?);
        let socket = paths.etcd_socket();
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&paths.run)?;
        let service = Service::new(
            Arc::clone(&store),
            Some(paths.store()),
            vec![format!("unix://{}", socket.display())],
        );
        let serving = service.clone();
        let task = tokio::spawn(async move {
            if let Err(error) = serving.serve_unix(&socket).await {
                tracing::warn!(%error, socket = %socket.display(), "the etcd API is not served");
            }
        });
        Ok(Self { store, api: Some((service, task)) })
    }

    /// Ends the etcd API. The store closes with the last who holds it.
    pub async fn stop(self) {
        if let Some((service, task)) = self.api {
            service.stop().await;
            let _ = task.await;
        }
    }
}

impl StorageOptions {
    fn etcd(&self) -> EtcdOptions {
        let client = self.etcd_certfile.clone().zip(self.etcd_keyfile.clone());
        let prefix = self.etcd_prefix.trim_matches('/');
        EtcdOptions {
            tls: self.etcd_cafile.clone().map(|ca| TlsFiles { ca, client }),
            layout: Layout { ours: b"/registry/".to_vec(), theirs: format!("/{prefix}/").into_bytes() },
            compact_every: (self.etcd_compaction_interval > 0)
                .then(|| Duration::from_secs(self.etcd_compaction_interval)),
            ..EtcdOptions::new(self.etcd_servers.clone())
        }
    }
}
