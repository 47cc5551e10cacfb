//! `ferrite kube-scheduler`: the scheduler in a process of its own, with upstream's flags and configuration file.

use crate::alone::{Alone, AloneOptions};
use crate::apiserver::BoxError;
use ferrite_client::{Events, Informers, Scope};
use ferrite_component::{GoDuration, TypeMeta, read_config};
use ferrite_json::json;
use ferrite_scheduler::{Profile, SchedulerContext};
use serde::Deserialize;
use std::path::PathBuf;
use std::process::ExitCode;

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
}

/// The part of KubeSchedulerConfiguration that is acted on. Everything else is refused.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Configuration {
    client_connection: ClientConnection,
    leader_election: LeaderElection,
    profiles: Vec<ProfileConfiguration>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct ClientConnection {
    kubeconfig: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct LeaderElection {
    leader_elect: Option<bool>,
    lease_duration: Option<GoDuration>,
    renew_deadline: Option<GoDuration>,
    retry_period: Option<GoDuration>,
    resource_name: Option<String>,
    resource_namespace: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ProfileConfiguration {
    scheduler_name: String,
}

impl Configuration {
    fn apply(self, options: &mut AloneOptions) -> Result<Vec<Profile>, BoxError> {
        if let Some(kubeconfig) =
            self.client_connection.kubeconfig.filter(|path| !path.as_os_str().is_empty())
        {
            options.kubeconfig = Some(kubeconfig);
        }
        let election = self.leader_election;
        options.leader_elect = election.leader_elect.unwrap_or(options.leader_elect);
        options.leader_elect_lease_duration =
            election.lease_duration.unwrap_or(options.leader_elect_lease_duration);
        options.leader_elect_renew_deadline =
            election.renew_deadline.unwrap_or(options.leader_elect_renew_deadline);
        options.leader_elect_retry_period =
            election.retry_period.unwrap_or(options.leader_elect_retry_period);
        if election.resource_name.is_some() {
            options.leader_elect_resource_name = election.resource_name;
        }
        if let Some(namespace) = election.resource_namespace {
            options.leader_elect_resource_namespace = namespace;
        }
        if self.profiles.is_empty() {
            return Ok(vec![Profile::default()]);
        }
        let mut profiles: Vec<Profile> = Vec::new();
        for profile in self.profiles {
            if profiles.iter().any(|other| other.scheduler_name == profile.scheduler_name) {
                return Err(
                    format!("two profiles have the schedulerName {:?}", profile.scheduler_name).into()
                );
            }
            profiles.push(Profile { scheduler_name: profile.scheduler_name, ..Profile::default() });
        }
        Ok(profiles)
    }
}

impl KubeScheduler {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let mut options = self.alone;
        let configuration = match &self.config {
            Some(path) => read_config::<Configuration>(path, TYPE)?,
            None => Configuration::default(),
        };
        let profiles = configuration.apply(&mut options)?;
        let names: Vec<&str> = profiles.iter().map(|profile| profile.scheduler_name.as_str()).collect();
        let alone = Alone {
            name: NAME,
            secure_port: self.secure_port,
            config: json!({"kubescheduler.config.k8s.io": {
                "LeaderElection": {"leaderElect": options.leader_elect},
                "Profiles": names.iter().map(|name| json!({"schedulerName": *name})).collect::<Vec<_>>(),
            }}),
            options,
        };
        let client = kube::Client::try_from(alone.server().await?)?;
        let acting = client.clone();
        alone
            .run(client, Scope::new(), move |scope| {
                ferrite_scheduler::start(&SchedulerContext {
                    informers: Informers::new(acting.clone(), scope.clone()),
                    events: Events::start(acting.clone(), &scope),
                    client: acting,
                    scope,
                    configuration: ferrite_scheduler::Configuration {
                        profiles,
                        ..ferrite_scheduler::Configuration::default()
                    },
                    registry: ferrite_scheduler::Registry::default(),
                })?;
                Ok(())
            })
            .await?;
        Ok(ExitCode::SUCCESS)
    }
}
