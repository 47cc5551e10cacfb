//! `ferrite kube-scheduler`: the scheduler in a process of its own, with upstream's flags and configuration file.

use crate::accepted::AcceptedFlags;
use crate::alone::{Alone, AloneOptions};
use crate::apiserver::BoxError;
use crate::kube_scheduler_flags::SchedulerFlags;
use ferrite_client::{Events, Informer, Informers, Scope, Term};
use ferrite_component::health::Check;
use ferrite_component::{TypeMeta, read_config};
use ferrite_json::json;
use ferrite_scheduler::configuration::v1::KubeSchedulerConfiguration;
use ferrite_scheduler::{Registry, SchedulerContext};
use k8s_openapi::api::core::v1::{Node, Pod};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

const NAME: &str = "kube-scheduler";
const TYPE: TypeMeta =
    TypeMeta { api_version: "kubescheduler.config.k8s.io/v1", kind: "KubeSchedulerConfiguration" };

/// Flags of kube-scheduler.
#[derive(Debug, clap::Args)]
pub struct KubeScheduler {
    #[command(flatten)]
    alone: AloneOptions,
    /// Port for health checks and metrics; 0 for none.
    #[arg(long, default_value_t = 10259, value_name = "PORT")]
    secure_port: u16,
    /// Configuration file: a KubeSchedulerConfiguration of kubescheduler.config.k8s.io/v1. Its settings replace those of
    /// the flags about the kubeconfig and the leader's election.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    accepted: AcceptedFlags<SchedulerFlags>,
}

/// Settings of the file that flags have, too.
fn apply(file: &KubeSchedulerConfiguration, options: &mut AloneOptions) {
    if let Some(kubeconfig) = file.client_connection.kubeconfig.as_ref().filter(|path| !path.is_empty()) {
        options.kubeconfig = Some(kubeconfig.into());
    }
    let election = &file.leader_election;
    options.leader_elect = election.leader_elect.unwrap_or(options.leader_elect);
    options.leader_elect_lease_duration =
        election.lease_duration.unwrap_or(options.leader_elect_lease_duration);
    options.leader_elect_renew_deadline =
        election.renew_deadline.unwrap_or(options.leader_elect_renew_deadline);
    options.leader_elect_retry_period = election.retry_period.unwrap_or(options.leader_elect_retry_period);
    if election.resource_name.is_some() {
        options.leader_elect_resource_name = election.resource_name.clone();
    }
    if let Some(namespace) = &election.resource_namespace {
        options.leader_elect_resource_namespace = namespace.clone();
    }
}

/// The informers that decide about pods, from the begin of the work.
#[derive(Clone, Default)]
struct Handlers(Arc<OnceLock<(Informer<Pod>, Informer<Node>)>>);

impl Handlers {
    fn start(&self, informers: &Informers) {
        // There is one begin in the life of a process.
        let _ = self.0.set((informers.get(), informers.get()));
    }

    /// Upstream's check that a scheduler knows the cluster. One that waits for the lease reads nothing yet, and is ready to lead.
    fn check(&self) -> Check {
        let handlers = self.clone();
        Check::new("sched-handler-sync", move || match handlers.0.get() {
            Some((pods, nodes)) if !(pods.has_synced() && nodes.has_synced()) => {
                Err("handlers are not fully synchronized".to_owned())
            }
            _ => Ok(()),
        })
    }
}

/// Upstream's check that fails once the process is asked to stop.
fn stopping(scope: &Scope) -> Check {
    let token = scope.token().clone();
    Check::new("shutdown", move || match token.is_cancelled() {
        true => Err("process is shutting down".to_owned()),
        false => Ok(()),
    })
}

impl KubeScheduler {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let mut options = self.alone;
        let file = match &self.config {
            Some(path) => read_config::<KubeSchedulerConfiguration>(path, TYPE)?,
            None => KubeSchedulerConfiguration::default(),
        };
        let configuration = file.resolve()?;
        // A profile that cannot be made ends the process now, not when it becomes the leader.
        ferrite_scheduler::check(&configuration, &Registry::default())?;
        apply(&file, &mut options);
        let names: Vec<&str> =
            configuration.profiles.iter().map(|profile| profile.scheduler_name.as_str()).collect();
        let scope = Scope::new();
        let handlers = Handlers::default();
        let alone = Alone {
            name: NAME,
            secure_port: self.secure_port,
            config: json!({"kubescheduler.config.k8s.io": {
                "LeaderElection": {"leaderElect": options.leader_elect},
                "Profiles": names.iter().map(|name| json!({"schedulerName": *name})).collect::<Vec<_>>(),
            }}),
            options,
            pages: ferrite_component::Pages::default(),
            ready: vec![stopping(&scope), handlers.check()],
        };
        let client = kube::Client::try_from(alone.server().await?)?;
        let acting = client.clone();
        let informers = Informers::new(client.clone(), scope.clone());
        let extenders = ferrite_scheduler::connect(&configuration, &informers).await?;
        alone
            .run(client, scope, move |Term { scope, fence }| {
                let acting = fence.guard(acting);
                handlers.start(&informers);
                ferrite_scheduler::start(&SchedulerContext {
                    informers,
                    events: Events::start(acting.clone(), &scope),
                    client: acting,
                    scope,
                    configuration,
                    registry: Registry::default(),
                    extenders,
                })?;
                Ok(())
            })
            .await?;
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_component::health::report;
    use kube::client::Body;
    use std::convert::Infallible;

    #[tokio::test]
    async fn the_scheduler_is_ready_while_it_waits_and_when_it_knows_the_cluster() {
        let silent = tower::service_fn(|_: http::Request<Body>| {
            std::future::pending::<Result<http::Response<Body>, Infallible>>()
        });
        let scope = Scope::new();
        let informers = Informers::new(kube::Client::new(silent, "default"), scope.clone());
        let handlers = Handlers::default();
        let checks = [stopping(&scope), handlers.check()];
        let code = |name: &str| report("readyz", &checks, Some(name), &[], false).code;
        assert_eq!((code("shutdown"), code("sched-handler-sync")), (200, 200));
        handlers.start(&informers);
        assert_eq!((code("shutdown"), code("sched-handler-sync")), (200, 500));
        scope.cancel();
        assert_eq!(code("shutdown"), 500);
    }
}
