//! Controllers and scheduler beside an API server.
//!
//! On a store of this process nobody else can lead. Elsewhere each of the two works while it holds its
//! lease, and its tasks end with the lease; the server serves on and takes part in the next election.

use crate::apiserver::{ApiServerHandle, BoxError, LocalApi};
use crate::paths::Paths;
use crate::{dns, local_storage};
use ferrite_apiserver::Component;
use ferrite_client::{Backoff, Events, Informers, LeaderConfig, LeaderElector, Scope, Term};
use ferrite_controllers::{Config, Context, Identity, OF_THE_SERVER};
use ferrite_scheduler::{Configuration, Registry, SchedulerContext};
use k8s_openapi::api::core::v1::Node;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

const MANAGER: &str = "kube-controller-manager";
const SCHEDULER: &str = "kube-scheduler";
const NAMESPACE: &str = "kube-system";

/// The work of the controller manager.
#[derive(Clone)]
pub struct ManagerWork {
    /// With the rules of upstream's `--controllers`.
    pub controllers: Vec<String>,
    pub config: Config,
    /// True if there are local volumes.
    pub local_storage: bool,
    /// True if Services of type LoadBalancer get the nodes' addresses.
    pub service_lb: bool,
    /// The address of the DNS Service whose endpoints are all nodes; none where one node has the DNS server.
    pub dns: Option<IpAddr>,
}

#[derive(Debug, thiserror::Error)]
#[error("no controller is called {}: there are {}", .unknown.join(", "), .known.join(", "))]
pub struct UnknownControllers {
    unknown: Vec<String>,
    known: Vec<&'static str>,
}

impl ManagerWork {
    fn check(&self) -> Result<(), UnknownControllers> {
        let known: Vec<&str> = ferrite_controllers::CONTROLLERS.iter().map(|c| c.name).collect();
        let names: Vec<&str> = self.controllers.iter().map(String::as_str).collect();
        let unknown = ferrite_controllers::unknown(&names);
        if unknown.is_empty() { Ok(()) } else { Err(UnknownControllers { unknown, known }) }
    }

    /// True if a leader has something to do. Otherwise it would only keep the lease from a manager that does.
    fn is_some(&self) -> bool {
        let names: Vec<&str> = self.controllers.iter().map(String::as_str).collect();
        let has_others = self.local_storage || self.service_lb || self.dns.is_some();
        has_others || ferrite_controllers::selects_any(&names)
    }

    fn start(&self, api: &LocalApi, informers: Informers, scope: &Scope) -> Context {
        let clients = api.controller_clients();
        let context = Context::with_informers(clients, informers, scope.clone(), self.config.clone());
        // The server's own controllers run on every server.
        let off = OF_THE_SERVER.iter().map(|name| format!("-{name}"));
        let names: Vec<String> = off.chain(self.controllers.iter().cloned()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        ferrite_controllers::start_all(&context, &names);
        if self.service_lb {
            ferrite_controllers::service_lb::start(&context);
        }
        if let Some(service) = self.dns {
            dns::publish(service, context.informers.get::<Node>(), api, scope);
        }
        context
    }
}

/// Starts the server's own controllers, which run on every server.
pub fn start_own(api: &LocalApi, informers: Informers, scope: &Scope) {
    let context =
        Context::with_informers(api.controller_clients(), informers, scope.clone(), Config::default());
    ferrite_controllers::start_all(&context, OF_THE_SERVER);
}

/// Starts the scheduler beside an API server. It reads through `informers`, so that the process has one copy of each
/// kind, and writes as itself.
fn start_scheduler(api: &LocalApi, informers: Informers, scope: &Scope) -> Result<(), BoxError> {
    let client = api.client("system:kube-scheduler", &[]);
    ferrite_scheduler::start(&SchedulerContext {
        informers,
        events: Events::start(client.clone(), scope),
        client,
        scope: scope.clone(),
        configuration: Configuration::default(),
        registry: Registry::default(),
        extenders: Vec::new(),
    })?;
    Ok(())
}

/// Starts both at once: nobody else can hold the leases of a store of this process. Returns the informers that they
/// read through.
pub async fn start_alone(
    api: &ApiServerHandle,
    work: ManagerWork,
    scope: &Scope,
) -> Result<Informers, BoxError> {
    work.check()?;
    let local = api.local();
    let informers = Informers::new((local.controller_clients())(Identity::Manager), scope.clone());
    start_own(&local, informers.clone(), scope);
    let context = work.start(&local, informers.clone(), scope);
    local.hosts(Component::ControllerManager, scope);
    start_scheduler(&local, informers.clone(), scope)?;
    local.hosts(Component::Scheduler, scope);
    if work.local_storage {
        local_storage::start(&local, &context).await?;
    }
    Ok(informers)
}

/// Takes part in the elections of the controller manager and, where asked, of the scheduler.
pub fn start_elected(
    api: &ApiServerHandle,
    paths: &Paths,
    work: ManagerWork,
    with_scheduler: bool,
    scope: &Scope,
) -> Result<(), BoxError> {
    work.check()?;
    let local = api.local();
    let identity = identity(paths)?;
    let shared = SharedInformers::new(&local, scope);
    let own = Informers::new((local.controller_clients())(Identity::Manager), scope.clone());
    start_own(&local, own, scope);
    if work.is_some() {
        let (api, shared) = (local.clone(), shared.clone());
        elect(&local, MANAGER, "system:kube-controller-manager", &identity, scope, move |term| {
            let api = api.fenced(term.fence.clone());
            let context = work.start(&api, shared.join(&term.scope), &term.scope);
            if work.local_storage {
                term.scope.spawn(provide_local_storage(api, context));
            }
        });
        local.hosts(Component::ControllerManager, scope);
    }
    if with_scheduler {
        let api = local.clone();
        elect(&local, SCHEDULER, "system:kube-scheduler", &identity, scope, move |term| {
            let fenced = api.fenced(term.fence.clone());
            if let Err(error) = start_scheduler(&fenced, shared.join(&term.scope), &term.scope) {
                tracing::error!(%error, "the scheduler cannot start");
            }
        });
        local.hosts(Component::Scheduler, scope);
    }
    Ok(())
}

/// Leads whenever it can, until the scope ends.
fn elect(
    api: &LocalApi,
    name: &'static str,
    user: &str,
    identity: &str,
    scope: &Scope,
    work: impl Fn(Term) + Send + Sync + 'static,
) {
    let client = api.client(user, &[]);
    let recorder = Events::start(client.clone(), scope).recorder(name, None);
    let mut elector =
        LeaderElector::new(client, LeaderConfig::new(NAMESPACE, name, identity)).with_recorder(recorder);
    let electing = scope.child();
    // It releases the lease when the scope ends.
    scope.spawn_graceful(async move {
        while !electing.is_ended() {
            elector.run(&electing, &work).await;
        }
    });
}

async fn provide_local_storage(api: LocalApi, context: Context) {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10), 0.2);
    while let Err(error) = local_storage::start(&api, &context).await {
        tracing::warn!(%error, "there are no local volumes yet; will try again");
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

/// Informers that last as long as somebody of this process leads: one copy of each kind for all of them.
#[derive(Clone)]
struct SharedInformers {
    api: LocalApi,
    scope: Scope,
    held: Arc<Mutex<Weak<HeldInformers>>>,
}

struct HeldInformers {
    informers: Informers,
    scope: Scope,
}

impl Drop for HeldInformers {
    fn drop(&mut self) {
        self.scope.cancel();
    }
}

impl SharedInformers {
    fn new(api: &LocalApi, scope: &Scope) -> Self {
        Self { api: api.clone(), scope: scope.clone(), held: Arc::default() }
    }

    /// The informers for a term, whose handlers end with it.
    fn join(&self, term: &Scope) -> Informers {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let current = held.upgrade().unwrap_or_else(|| {
            let scope = self.scope.child();
            let client = (self.api.controller_clients())(Identity::Manager);
            let current = Arc::new(HeldInformers { informers: Informers::new(client, scope.clone()), scope });
            *held = Arc::downgrade(&current);
            current
        });
        let informers = current.informers.session(term);
        term.spawn(async move {
            let _held = current;
            std::future::pending::<()>().await;
        });
        informers
    }
}

/// A name that no other candidate has: the host's, and something random, as upstream's. It is kept: a server that was
/// killed takes its own lease up again at once. The lock on the directory keeps a second process from using it.
fn identity(paths: &Paths) -> Result<String, BoxError> {
    let file = paths.data.join("server-id");
    let host = nix::unistd::gethostname()?.to_string_lossy().into_owned();
    let fail = |e: std::io::Error| format!("cannot use {}: {e}", file.display());
    let kept = match std::fs::read_to_string(&file) {
        Ok(text) => uuid::Uuid::parse_str(text.trim()).ok(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(fail(e).into()),
    };
    let id = match kept {
        Some(id) => id,
        None => {
            let id = uuid::Uuid::new_v4();
            std::fs::write(&file, id.to_string()).map_err(fail)?;
            id
        }
    };
    Ok(format!("{host}_{id}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_keeps_its_identity() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::new(dir.path());
        let one = identity(&paths).unwrap();
        assert_eq!(one, identity(&paths).unwrap());
        std::fs::write(paths.data.join("server-id"), "").unwrap();
        assert_ne!(one, identity(&paths).unwrap(), "a file that was cut off is replaced");
    }

    #[test]
    fn unknown_controllers_are_named() {
        let work = |names: &[&str]| ManagerWork {
            controllers: names.iter().map(|name| (*name).to_owned()).collect(),
            config: Config::default(),
            local_storage: false,
            service_lb: false,
            dns: None,
        };
        assert!(work(&["*", "-deployment-controller"]).check().is_ok());
        let error = work(&["*", "-deploymnt"]).check().unwrap_err().to_string();
        assert!(error.starts_with("no controller is called deploymnt: there are "), "{error}");
    }
}
