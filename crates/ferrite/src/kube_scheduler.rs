//! `ferrite kube-scheduler`: the scheduler in a process of its own, with upstream's flags and configuration file.

use crate::accepted::AcceptedFlags;
use crate::alone::{Alone, AloneOptions};
use crate::apiserver::BoxError;
use crate::kube_scheduler_flags::SchedulerFlags;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};
use ferrite_client::{Events, Informer, Informers, Scope, Term};
use ferrite_component::health::Check;
use ferrite_component::metrics::CONTENT_TYPE;
use ferrite_component::{GoDuration, Pages, TypeMeta, read_config};
use ferrite_json::json;
use ferrite_scheduler::configuration::v1::{InUse, KubeSchedulerConfiguration};
use ferrite_scheduler::{Configuration, Registry, SchedulerContext};
use k8s_openapi::api::core::v1::{Node, Pod};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

const NAME: &str = "kube-scheduler";
/// The kind of the configuration file.
pub const CONFIGURATION: TypeMeta =
    TypeMeta { api_version: "kubescheduler.config.k8s.io/v1", kind: "KubeSchedulerConfiguration" };

/// Flags of kube-scheduler.
#[derive(Debug, clap::Args)]
pub struct KubeScheduler {
    // Before the flags themselves: they are taken out of the matches when they are read.
    #[command(flatten)]
    given: Given,
    #[command(flatten)]
    alone: AloneOptions,
    /// Port for health checks and metrics; 0 for none.
    #[arg(long, default_value_t = 10259, value_name = "PORT")]
    secure_port: u16,
    /// Configuration file: a KubeSchedulerConfiguration of kubescheduler.config.k8s.io/v1. Its kubeconfig replaces that of
    /// the flag. Flags about the leader's election that are given replace its settings.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A pod that no node fits and no change helped is tried again after so long; 30 seconds at least.
    #[arg(long, default_value = "5m", value_name = "DURATION")]
    pod_max_in_unschedulable_pods_duration: GoDuration,
    #[command(flatten)]
    accepted: AcceptedFlags<SchedulerFlags>,
}

/// The flags that stand on the command line, by their names in [`AloneOptions`].
#[derive(Debug, Clone, Default)]
struct Given(BTreeSet<String>);

impl FromArgMatches for Given {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given = |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
        Ok(Self(matches.ids().filter(is_given).map(ToString::to_string).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for Given {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

/// Lays the settings of the file over those of flags that are not given.
fn apply(file: &KubeSchedulerConfiguration, given: &Given, options: &mut AloneOptions) {
    fn lay<T: Clone>(given: &Given, name: &str, setting: &Option<T>, option: &mut T) {
        if let Some(setting) = setting.as_ref().filter(|_| !given.0.contains(name)) {
            *option = setting.clone();
        }
    }
    if let Some(kubeconfig) = file.client_connection.kubeconfig.as_ref().filter(|path| !path.is_empty()) {
        options.kubeconfig = Some(kubeconfig.into());
    }
    let election = &file.leader_election;
    let name = election.resource_name.clone().map(Some);
    lay(given, "leader_elect", &election.leader_elect, &mut options.leader_elect);
    let lease = &mut options.leader_elect_lease_duration;
    lay(given, "leader_elect_lease_duration", &election.lease_duration, lease);
    let renew = &mut options.leader_elect_renew_deadline;
    lay(given, "leader_elect_renew_deadline", &election.renew_deadline, renew);
    let retry = &mut options.leader_elect_retry_period;
    lay(given, "leader_elect_retry_period", &election.retry_period, retry);
    lay(given, "leader_elect_resource_name", &name, &mut options.leader_elect_resource_name);
    let namespace = &mut options.leader_elect_resource_namespace;
    lay(given, "leader_elect_resource_namespace", &election.resource_namespace, namespace);
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

/// The settings in use, for `/configz`.
fn in_use(options: &AloneOptions) -> InUse {
    let kubeconfig = options.kubeconfig.as_ref().map(|path| path.display().to_string());
    InUse {
        kubeconfig: kubeconfig.unwrap_or_default(),
        leader_elect: options.leader_elect,
        lease_duration: options.leader_elect_lease_duration,
        renew_deadline: options.leader_elect_renew_deadline,
        retry_period: options.leader_elect_retry_period,
        resource_name: options.leader_elect_resource_name.clone().unwrap_or_else(|| NAME.to_owned()),
        resource_namespace: options.leader_elect_resource_namespace.clone(),
    }
}

impl KubeScheduler {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let mut options = self.alone;
        let file = match &self.config {
            Some(path) => read_config::<KubeSchedulerConfiguration>(path, CONFIGURATION)?,
            None => KubeSchedulerConfiguration::default(),
        };
        let configuration =
            Configuration { longest_wait: self.pod_max_in_unschedulable_pods_duration.0, ..file.resolve()? };
        // A profile that cannot be made ends the process now, not when it becomes the leader.
        ferrite_scheduler::check(&configuration, &Registry::default())?;
        apply(&file, &self.given, &mut options);
        let scope = Scope::new();
        let handlers = Handlers::default();
        let pages = Pages::default();
        let shown = file.shown(&configuration, &in_use(&options));
        let alone = Alone {
            name: NAME,
            secure_port: self.secure_port,
            config: json!({"componentconfig": shown}),
            options,
            pages: pages.clone(),
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
                let pods = informers.get();
                pages.add("/metrics/resources", CONTENT_TYPE, move |_| {
                    ferrite_scheduler::resource_metrics_page(&pods)
                });
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
    use clap::Parser;
    use ferrite_component::health::report;
    use kube::client::Body;
    use std::convert::Infallible;
    use std::time::Duration;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        scheduler: KubeScheduler,
    }

    #[test]
    fn flags_about_the_election_that_are_given_replace_the_file() {
        let file: KubeSchedulerConfiguration = ferrite_json::from_value(json!({
            "clientConnection": {"kubeconfig": "/from/the/file"},
            "leaderElection": {"leaderElect": false, "leaseDuration": "60s", "resourceName": "from-file",
                "resourceNamespace": "elsewhere"}}))
        .unwrap();
        let laid = |flags: &[&str]| {
            let mut scheduler = Cli::parse_from(["kube-scheduler"].iter().chain(flags)).scheduler;
            apply(&file, &scheduler.given, &mut scheduler.alone);
            let options = scheduler.alone;
            (
                options.leader_elect,
                options.leader_elect_lease_duration.0.as_secs(),
                options.leader_elect_renew_deadline.0.as_secs(),
                options.leader_elect_resource_name.unwrap_or_default(),
                options.leader_elect_resource_namespace,
            )
        };
        let text = str::to_owned;
        assert_eq!(laid(&[]), (false, 60, 10, text("from-file"), text("elsewhere")));
        let flags =
            ["--leader-elect", "--leader-elect-lease-duration=15s", "--leader-elect-resource-name=flag"];
        assert_eq!(laid(&flags), (true, 15, 10, text("flag"), text("elsewhere")));
        let mut options = Cli::parse_from(["kube-scheduler", "--kubeconfig=/from/the/flag"]).scheduler.alone;
        apply(&file, &Given::default(), &mut options);
        assert_eq!(options.kubeconfig, Some("/from/the/file".into()));
    }

    #[test]
    fn the_longest_wait_is_a_flag() {
        let parse = |flags: &[&str]| Cli::parse_from(["kube-scheduler"].iter().chain(flags)).scheduler;
        let wait = |flags: &[&str]| parse(flags).pod_max_in_unschedulable_pods_duration.0;
        assert_eq!(wait(&[]), Duration::from_secs(300));
        assert_eq!(wait(&["--pod-max-in-unschedulable-pods-duration=1m30s"]), Duration::from_secs(90));
    }

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
