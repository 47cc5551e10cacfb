//! A component in a process of its own: its connection to the API server, its leader election, and its
//! port.

use crate::apiserver::BoxError;
use ferrite_client::{DelegatedAccess, Events, Fence, LeaderConfig, LeaderElector, Lifetimes, Scope, Term};
use ferrite_component::health::Check;
use ferrite_component::{Endpoint, EndpointOptions, FeatureGates, GoDuration, Pages};
use ferrite_json::Value;
use ferrite_pki::{Authority, Identity, Purpose, Subject};
use kube::config::{KubeConfigOptions, Kubeconfig};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// As upstream: a leader that has not noticed the end of its lease for so long is unwell.
const TOLERATED_EXPIRY: Duration = Duration::from_secs(20);

/// Flags that kube-controller-manager and kube-scheduler have in common, with upstream's names.
#[derive(Debug, Clone, clap::Args)]
pub struct AloneOptions {
    /// Kubeconfig file with the address of the API server and the credentials; in a pod, its service account without it.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Address of the API server, instead of the one in the kubeconfig.
    #[arg(long, value_name = "URL")]
    pub master: Option<http::Uri>,
    /// Kubeconfig file with which callers are authenticated; the one of --kubeconfig without it.
    #[arg(long, value_name = "FILE")]
    pub authentication_kubeconfig: Option<PathBuf>,
    /// Kubeconfig file with which callers are authorized; the one of --kubeconfig without it.
    #[arg(long, value_name = "FILE")]
    pub authorization_kubeconfig: Option<PathBuf>,
    /// Paths that everybody may read.
    #[arg(long, value_delimiter = ',', default_value = "/healthz,/readyz,/livez", value_name = "PATHS")]
    pub authorization_always_allow_paths: Vec<String>,
    /// Lifetime of a cached answer to the question whose token it is.
    #[arg(long, default_value = "10s", value_name = "DURATION")]
    pub authentication_token_webhook_cache_ttl: GoDuration,
    /// Lifetime of a cached permission.
    #[arg(long, default_value = "10s", value_name = "DURATION")]
    pub authorization_webhook_cache_authorized_ttl: GoDuration,
    /// Lifetime of a cached refusal.
    #[arg(long, default_value = "10s", value_name = "DURATION")]
    pub authorization_webhook_cache_unauthorized_ttl: GoDuration,
    /// Address of the component's own port.
    #[arg(long, default_value = "0.0.0.0", value_name = "IP")]
    pub bind_address: IpAddr,
    /// Certificate of the component's own port; made anew at each start without it.
    #[arg(long, requires = "tls_private_key_file", value_name = "FILE")]
    pub tls_cert_file: Option<PathBuf>,
    /// Key of that certificate.
    #[arg(long, requires = "tls_cert_file", value_name = "FILE")]
    pub tls_private_key_file: Option<PathBuf>,
    /// Work only while holding the lease.
    #[arg(long, default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// Others may take over when the lease was not renewed for so long.
    #[arg(long, default_value = "15s", value_name = "DURATION")]
    pub leader_elect_lease_duration: GoDuration,
    /// The leader gives up when it could not renew for so long.
    #[arg(long, default_value = "10s", value_name = "DURATION")]
    pub leader_elect_renew_deadline: GoDuration,
    /// Time between two attempts.
    #[arg(long, default_value = "2s", value_name = "DURATION")]
    pub leader_elect_retry_period: GoDuration,
    /// Kind of object to lock; there is one.
    #[arg(long, default_value = "leases", value_parser = ["leases"], value_name = "KIND")]
    pub leader_elect_resource_lock: String,
    /// Name of the lease; the component's own without it.
    #[arg(long, value_name = "NAME")]
    pub leader_elect_resource_name: Option<String>,
    /// Namespace of the lease.
    #[arg(long, default_value = "kube-system", value_name = "NAMESPACE")]
    pub leader_elect_resource_namespace: String,
    /// Features to turn on or off: `A=true,B=false`.
    #[arg(long, value_name = "GATES")]
    pub feature_gates: Option<FeatureGates>,
}

/// A component that is being started.
pub struct Alone {
    pub name: &'static str,
    pub options: AloneOptions,
    pub secure_port: u16,
    /// The configuration in use, for `/configz`.
    pub config: Value,
    /// Pages of the component beside health and metrics.
    pub pages: Pages,
    /// Checks of the component for `/readyz`.
    pub ready: Vec<Check>,
}

impl Alone {
    /// The connection to the API server.
    pub async fn server(&self) -> Result<kube::Config, BoxError> {
        let Some(master) = &self.options.master else {
            return server_of(self.options.kubeconfig.as_ref()).await;
        };
        if self.options.kubeconfig.is_none() {
            return Ok(kube::Config::new(master.clone()));
        }
        let mut config = server_of(self.options.kubeconfig.as_ref()).await?;
        config.cluster_url = master.clone();
        Ok(config)
    }

    /// Answers on the component's own port and works, as the leader if leader election is on, until a
    /// signal stops the process or the lease is lost. The work's clients ask the fence of the term before they write.
    pub async fn run(
        self,
        client: kube::Client,
        scope: Scope,
        work: impl FnOnce(Term) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        self.check_times()?;
        self.options.feature_gates.clone().unwrap_or_default().report();
        // Ends last: the end of the leadership is an event, too.
        let reporting = Scope::new();
        let mut elector = self.options.leader_elect.then(|| self.elector(client, &reporting));
        if self.secure_port != 0 {
            self.serve(&scope, elector.as_ref()).await?;
        }
        let mut failed = None;
        let working = async {
            let Some(elector) = &mut elector else {
                return work(Term { scope: scope.clone(), fence: Fence::unlimited() }).map(|()| false);
            };
            elector
                .run(&scope, |term| {
                    failed = work(term).err();
                    if failed.is_some() {
                        // A leader without work would only keep others from it.
                        scope.cancel();
                    }
                })
                .await;
            Ok(true)
        };
        let lost = {
            let mut working = std::pin::pin!(working);
            tokio::select! {
                result = &mut working => {
                    if !result? {
                        crate::cli::interrupted().await?;
                        false
                    } else {
                        !scope.is_ended()
                    }
                }
                interrupted = crate::cli::interrupted() => {
                    interrupted?;
                    scope.cancel();
                    // The lease is released on the way out.
                    let _ = tokio::time::timeout(Duration::from_secs(5), working).await;
                    false
                }
            }
        };
        scope.shutdown().await;
        reporting.shutdown().await;
        match failed {
            Some(error) => Err(error),
            // As upstream: a process that lost its lease starts anew, with none of its state left.
            None if lost => Err("leader election lost".into()),
            None => Ok(()),
        }
    }

    fn elector(&self, client: kube::Client, reporting: &Scope) -> LeaderElector {
        let options = &self.options;
        let config = LeaderConfig {
            lease_duration: options.leader_elect_lease_duration.0,
            renew_deadline: options.leader_elect_renew_deadline.0,
            retry_period: options.leader_elect_retry_period.0,
            ..LeaderConfig::new(
                &options.leader_elect_resource_namespace,
                options.leader_elect_resource_name.as_deref().unwrap_or(self.name),
                identity(),
            )
        };
        let recorder = Events::start(client.clone(), reporting).recorder(self.name, None);
        LeaderElector::new(client, config).with_recorder(recorder)
    }

    fn check_times(&self) -> Result<(), BoxError> {
        let options = &self.options;
        let (lease, renew, retry) = (
            options.leader_elect_lease_duration.0,
            options.leader_elect_renew_deadline.0,
            options.leader_elect_retry_period.0,
        );
        if lease <= renew {
            return Err(
                "--leader-elect-lease-duration must be greater than --leader-elect-renew-deadline".into()
            );
        }
        if renew.as_secs_f64() <= retry.as_secs_f64() * 1.2 {
            return Err(
                "--leader-elect-renew-deadline must be greater than 1.2 times --leader-elect-retry-period"
                    .into(),
            );
        }
        Ok(())
    }

    async fn serve(&self, scope: &Scope, elector: Option<&LeaderElector>) -> Result<(), BoxError> {
        let options = &self.options;
        let authentication = options.authentication_kubeconfig.as_ref().or(options.kubeconfig.as_ref());
        let authorization = options.authorization_kubeconfig.as_ref().or(options.kubeconfig.as_ref());
        if authentication != authorization {
            return Err(
                "--authentication-kubeconfig and --authorization-kubeconfig must name the same file".into()
            );
        }
        let reviewer = kube::Client::try_from(server_of(authentication).await?)?;
        let mut live = vec![Check::ping()];
        live.extend(elector.map(leader_check));
        let endpoint = Endpoint::new(
            EndpointOptions {
                live,
                ready: self.ready.clone(),
                config: Some(self.config.clone()),
                pages: self.pages.clone(),
                always_allow_paths: options.authorization_always_allow_paths.clone(),
            },
            Arc::new(DelegatedAccess::new(reviewer, true).with_lifetimes(Lifetimes {
                token: options.authentication_token_webhook_cache_ttl.0,
                allowed: options.authorization_webhook_cache_authorized_ttl.0,
                denied: options.authorization_webhook_cache_unauthorized_ttl.0,
            })),
        );
        let address = SocketAddr::new(options.bind_address, self.secure_port);
        let listener = TcpListener::bind(address)
            .await
            .map_err(|error| format!("cannot listen on {address}: {error}; choose another --secure-port"))?;
        let serving = self.certificate()?;
        let tls = ferrite_pki::anonymous_server_config(&serving, &["h2", "http/1.1"])?;
        scope.spawn_graceful(endpoint.serve(listener, Arc::new(tls), scope.token().clone()));
        Ok(())
    }

    fn certificate(&self) -> Result<Identity, BoxError> {
        if let (Some(certificate), Some(key)) =
            (&self.options.tls_cert_file, &self.options.tls_private_key_file)
        {
            let read = |path: &PathBuf| {
                std::fs::read_to_string(path)
                    .map_err(|error| format!("cannot read {}: {error}", path.display()))
            };
            return Ok(Identity { certificate: read(certificate)?, key: read(key)? });
        }
        let authority = Authority::create(&format!("{}-ca", self.name))?;
        let names = vec!["localhost".to_owned(), Ipv4Addr::LOCALHOST.to_string()];
        let subject = Subject { common_name: self.name.to_owned(), organization: None, names };
        Ok(authority.issue(&subject, Purpose::Server)?)
    }
}

/// Upstream's check of a leader.
fn leader_check(elector: &LeaderElector) -> Check {
    let health = elector.health();
    Check::new("leaderElection", move || health.check(TOLERATED_EXPIRY).map_err(|error| error.to_string()))
}

/// A name that no other candidate has: the host's, and something random, as upstream's.
fn identity() -> String {
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
    format!("{host}_{}", uuid::Uuid::new_v4())
}

pub async fn server_of(kubeconfig: Option<&PathBuf>) -> Result<kube::Config, BoxError> {
    let Some(path) = kubeconfig else {
        return kube::Config::incluster().map_err(|error| {
            format!("no API server: give --kubeconfig, or run in a pod with a service account ({error})")
                .into()
        });
    };
    let file = Kubeconfig::read_from(path)
        .map_err(|error| format!("cannot read the kubeconfig {}: {error}", path.display()))?;
    Ok(kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use kube::client::Body;
    use std::convert::Infallible;
    use std::sync::Mutex;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        options: AloneOptions,
    }

    /// A server that keeps what was written last, which is the lease.
    fn server() -> kube::Client {
        let stored: Arc<Mutex<Option<Vec<u8>>>> = Arc::default();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let stored = Arc::clone(&stored);
            async move {
                let (method, is_lease) = (request.method().clone(), request.uri().path().contains("/leases"));
                let body = request.into_body().collect_bytes().await.expect("a body").to_vec();
                let missing = br#"{"kind":"Status","status":"Failure","reason":"NotFound","code":404}"#;
                let mut stored = stored.lock().expect("nobody panics with it");
                let (code, body) = match (method == http::Method::GET, is_lease) {
                    (true, _) => stored.clone().map_or((404, missing.to_vec()), |lease| (200, lease)),
                    (false, true) => {
                        *stored = Some(body.clone());
                        (200, body)
                    }
                    (false, false) => (200, body),
                };
                let response = http::Response::builder().status(code).body(Body::from(body));
                Ok::<_, Infallible>(response.expect("a response"))
            }
        });
        kube::Client::new(service, "default")
    }

    #[tokio::test]
    async fn a_leader_that_cannot_work_ends() {
        let alone = Alone {
            name: "test",
            options: Flags::parse_from(["test"]).options,
            secure_port: 0,
            config: Value::Null,
            pages: Pages::default(),
            ready: Vec::new(),
        };
        let mut led = false;
        let running = alone.run(server(), Scope::new(), |term| {
            led = term.fence.is_open();
            Err("no work".into())
        });
        let ended = tokio::time::timeout(Duration::from_secs(60), Box::pin(running)).await.expect("it ends");
        assert_eq!(ended.unwrap_err().to_string(), "no work");
        assert!(led);
    }
}
