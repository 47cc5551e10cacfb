//! KubeSchedulerConfiguration of `kubescheduler.config.k8s.io/v1`, as a file has it.

mod shown;

pub use shown::InUse;

use ferrite_api::field::{FieldError, Path};
use ferrite_api::meta_validation;
use ferrite_component::GoDuration;
use ferrite_json::Value;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Configuration;
use crate::extender::ExtenderSettings;
use crate::framework::PluginArgs;
use crate::profile::{ExtensionPoint, PluginSet, PluginSets, Profile};
use crate::queue::{BackoffLimits, LONGEST_WAIT};
use crate::snapshot::DEFAULT_SCHEDULER;

const VERSION: &str = "kubescheduler.config.k8s.io/v1";
/// Plugins that v1 knows no longer.
const REMOVED_PLUGINS: &[&str] = &["AzureDiskLimits", "CinderLimits", "EBSLimits", "GCEPDLimits"];

/// The file without `apiVersion` and `kind`. Unknown members are refused.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct KubeSchedulerConfiguration {
    pub parallelism: Option<i32>,
    pub leader_election: LeaderElection,
    pub client_connection: ClientConnection,
    pub enable_profiling: Option<bool>,
    pub enable_contention_profiling: Option<bool>,
    pub percentage_of_nodes_to_score: Option<i32>,
    pub pod_initial_backoff_seconds: Option<i64>,
    pub pod_max_backoff_seconds: Option<i64>,
    pub profiles: Vec<KubeSchedulerProfile>,
    pub extenders: Vec<ExtenderSettings>,
    pub delay_cache_until_active: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct ClientConnection {
    pub kubeconfig: Option<String>,
    pub accept_content_types: String,
    pub content_type: String,
    pub qps: f64,
    pub burst: i32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct LeaderElection {
    pub leader_elect: Option<bool>,
    pub lease_duration: Option<GoDuration>,
    pub renew_deadline: Option<GoDuration>,
    pub retry_period: Option<GoDuration>,
    pub resource_lock: Option<String>,
    pub resource_name: Option<String>,
    pub resource_namespace: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct KubeSchedulerProfile {
    pub scheduler_name: Option<String>,
    pub percentage_of_nodes_to_score: Option<i32>,
    pub plugins: Plugins,
    pub plugin_config: Vec<PluginConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Plugins {
    pub pre_enqueue: EnabledAndDisabled,
    pub queue_sort: EnabledAndDisabled,
    pub pre_filter: EnabledAndDisabled,
    pub filter: EnabledAndDisabled,
    pub post_filter: EnabledAndDisabled,
    pub pre_score: EnabledAndDisabled,
    pub score: EnabledAndDisabled,
    pub reserve: EnabledAndDisabled,
    pub permit: EnabledAndDisabled,
    pub pre_bind: EnabledAndDisabled,
    pub bind: EnabledAndDisabled,
    pub post_bind: EnabledAndDisabled,
    pub multi_point: EnabledAndDisabled,
}

impl Plugins {
    fn points(&self) -> [(ExtensionPoint, &'static str, &EnabledAndDisabled); 12] {
        use ExtensionPoint as P;
        [
            (P::PreEnqueue, "preEnqueue", &self.pre_enqueue),
            (P::QueueSort, "queueSort", &self.queue_sort),
            (P::PreFilter, "preFilter", &self.pre_filter),
            (P::Filter, "filter", &self.filter),
            (P::PostFilter, "postFilter", &self.post_filter),
            (P::PreScore, "preScore", &self.pre_score),
            (P::Score, "score", &self.score),
            (P::Reserve, "reserve", &self.reserve),
            (P::Permit, "permit", &self.permit),
            (P::PreBind, "preBind", &self.pre_bind),
            (P::Bind, "bind", &self.bind),
            (P::PostBind, "postBind", &self.post_bind),
        ]
    }
}

#[derive(Debug, Default, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EnabledAndDisabled {
    pub enabled: Vec<PluginReference>,
    pub disabled: Vec<PluginReference>,
}

impl EnabledAndDisabled {
    fn set(&self) -> PluginSet {
        let weight = |plugin: &PluginReference| i64::from(plugin.weight.unwrap_or(0));
        PluginSet {
            enabled: self.enabled.iter().map(|plugin| (plugin.name.clone(), weight(plugin))).collect(),
            disabled: self.disabled.iter().map(|plugin| plugin.name.clone()).collect(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginReference {
    pub name: String,
    pub weight: Option<i32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginConfig {
    pub name: String,
    #[serde(default)]
    pub args: Option<Value>,
}

/// A configuration that is refused, with everything that is wrong with it.
#[derive(Debug)]
pub struct InvalidConfigurationError(pub Vec<FieldError>);

impl std::error::Error for InvalidConfigurationError {}

impl std::fmt::Display for InvalidConfigurationError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        match texts.as_slice() {
            [only] => f.write_str(only),
            all => write!(f, "[{}]", all.join(", ")),
        }
    }
}

fn percentage(value: Option<i32>, path: &Path, errors: &mut Vec<FieldError>) -> Option<usize> {
    let value = value?;
    match usize::try_from(value) {
        Ok(percentage) if percentage <= 100 => Some(percentage),
        _ => {
            errors.push(FieldError::invalid(path, value, "not in valid range [0-100]"));
            None
        }
    }
}

impl KubeSchedulerConfiguration {
    /// Checks the file as upstream does, and lays it over the defaults.
    pub fn resolve(&self) -> Result<Configuration, InvalidConfigurationError> {
        let mut errors = Vec::new();
        self.check_leader_election(&mut errors);
        if self.client_connection.burst < 0 {
            let path = Path::new("clientConnection").child("burst");
            errors.push(FieldError::invalid(&path, self.client_connection.burst, "must be non-negative"));
        }
        let parallelism = self.parallelism.unwrap_or(16);
        if parallelism <= 0 {
            let problem = "should be an integer value greater than zero";
            errors.push(FieldError::invalid(&Path::new("parallelism"), parallelism, problem));
        }
        let profiles = self.profiles(&mut errors);
        let percentage_of_nodes_to_score = percentage(
            self.percentage_of_nodes_to_score,
            &Path::new("percentageOfNodesToScore"),
            &mut errors,
        );
        let backoff = self.backoff(&mut errors);
        self.check_extenders(&mut errors);
        if !errors.is_empty() {
            return Err(InvalidConfigurationError(errors));
        }
        let ignored: Vec<&str> = self.ignored_resources().collect();
        let profiles = profiles.into_iter().map(|profile| ignore_resources(profile, &ignored)).collect();
        Ok(Configuration {
            profiles,
            percentage_of_nodes_to_score,
            backoff,
            extenders: self.extenders.clone(),
            longest_wait: LONGEST_WAIT,
        })
    }

    /// Resources that only an extender counts.
    fn ignored_resources(&self) -> impl Iterator<Item = &str> {
        let resources = self.extenders.iter().flat_map(|extender| &extender.managed_resources);
        resources.filter(|resource| resource.ignored_by_scheduler).map(|resource| resource.name.as_str())
    }

    fn check_leader_election(&self, errors: &mut Vec<FieldError>) {
        let election = &self.leader_election;
        let path = Path::new("leaderElection");
        if election.leader_elect == Some(false) {
            return;
        }
        if let Some(lock) = election.resource_lock.as_deref().filter(|lock| !matches!(*lock, "" | "leases")) {
            let problem = "resourceLock value must be \"leases\"";
            errors.push(FieldError::invalid(&path.child("resourceLock"), lock, problem));
        }
        let seconds =
            |value: Option<GoDuration>, default: u64| value.map_or(Duration::from_secs(default), |v| v.0);
        let lease = seconds(election.lease_duration, 15);
        let renew = seconds(election.renew_deadline, 10);
        let retry = seconds(election.retry_period, 2);
        for (name, value) in [("leaseDuration", lease), ("renewDeadline", renew), ("retryPeriod", retry)] {
            if value.is_zero() {
                errors.push(FieldError::invalid(&path.child(name), "0s", "must be greater than zero"));
            }
        }
        if lease < renew {
            let problem = "LeaseDuration must be greater than RenewDeadline";
            errors.push(FieldError::invalid(&path.child("leaseDuration"), format!("{renew:?}"), problem));
        }
    }

    fn profiles(&self, errors: &mut Vec<FieldError>) -> Vec<Profile> {
        let single = [KubeSchedulerProfile::default()];
        let given = if self.profiles.is_empty() { &single[..] } else { &self.profiles };
        let root = Path::new("profiles");
        let mut names: BTreeMap<&str, usize> = BTreeMap::new();
        let mut profiles = Vec::new();
        for (index, profile) in given.iter().enumerate() {
            let path = root.index(index);
            // As upstream: only a profile that is alone may leave its name out.
            let default = (given.len() == 1).then_some(DEFAULT_SCHEDULER);
            let name = profile.scheduler_name.as_deref().or(default).unwrap_or_default();
            if name.is_empty() {
                errors.push(FieldError::required(&path.child("schedulerName"), ""));
            }
            profiles.push(profile.resolve(name, &path, errors));
            if let Some(first) = names.get(name) {
                let first = root.index(*first).child("schedulerName");
                errors.push(FieldError::duplicate(&path.child("schedulerName"), first.as_str()));
            }
            names.insert(name, index);
        }
        self.check_queue_sort(&root, errors);
        profiles
    }

    /// One queue serves all profiles, so that they share its order.
    fn check_queue_sort(&self, root: &Path, errors: &mut Vec<FieldError>) {
        let Some((first, others)) = self.profiles.split_first() else { return };
        let sort = &first.plugins.queue_sort;
        if sort.enabled.len() > 1 {
            let path = root.index(0).child("plugins").child("queueSort").child("Enabled");
            let count = sort.enabled.len() as i64;
            errors.push(FieldError::invalid(&path, count, "only one queue sort plugin can be enabled"));
        }
        for (index, other) in others.iter().enumerate() {
            if other.plugins.queue_sort != *sort {
                let path = root.index(index + 1).child("plugins").child("queueSort");
                let names: Vec<_> =
                    other.plugins.queue_sort.enabled.iter().map(|p| p.name.as_str()).collect();
                errors.push(FieldError::invalid(&path, names.join(","), "must be the same for all profiles"));
            }
        }
    }

    fn backoff(&self, errors: &mut Vec<FieldError>) -> BackoffLimits {
        let initial = self.pod_initial_backoff_seconds.unwrap_or(1);
        let max = self.pod_max_backoff_seconds.unwrap_or(10);
        if initial <= 0 {
            let path = Path::new("podInitialBackoffSeconds");
            errors.push(FieldError::invalid(&path, initial, "must be greater than 0"));
        }
        if max < initial {
            let problem = "must be greater than or equal to PodInitialBackoffSeconds";
            errors.push(FieldError::invalid(&Path::new("podMaxBackoffSeconds"), max, problem));
        }
        let seconds = |value: i64| Duration::from_secs(u64::try_from(value).unwrap_or(0));
        BackoffLimits { initial: seconds(initial), max: seconds(max) }
    }

    fn check_extenders(&self, errors: &mut Vec<FieldError>) {
        let root = Path::new("extenders");
        let mut managed = BTreeSet::new();
        for (index, extender) in self.extenders.iter().enumerate() {
            let path = root.index(index);
            if !extender.prioritize_verb.is_empty() && extender.weight <= 0 {
                let problem = "must have a positive weight applied to it";
                errors.push(FieldError::invalid(&path.child("weight"), extender.weight, problem));
            }
            for (index, resource) in extender.managed_resources.iter().enumerate() {
                let path = path.child("managedResources").index(index).child("name");
                let name = resource.name.as_str();
                let problems = meta_validation::qualified_name(name);
                if problems.is_empty() && !is_extended_resource(name) {
                    errors.push(FieldError::invalid(&path, name, "is an invalid extended resource name"));
                }
                errors.extend(problems.into_iter().map(|problem| FieldError::invalid(&path, name, problem)));
                if !managed.insert(name) {
                    errors.push(FieldError::invalid(&path, name, "duplicate extender managed resource name"));
                }
            }
        }
        let binders = self.extenders.iter().filter(|extender| !extender.bind_verb.is_empty()).count();
        if binders > 1 {
            let value = format!("found {binders} extenders implementing bind");
            errors.push(FieldError::invalid(&root, value, "only one extender can implement bind"));
        }
    }
}

/// Adds the resources to those that NodeResourcesFit does not count.
fn ignore_resources(mut profile: Profile, ignored: &[&str]) -> Profile {
    if !ignored.is_empty() {
        profile.args.entry("NodeResourcesFit".to_owned()).or_default().extend("ignoredResources", ignored);
    }
    profile
}

/// A name outside Kubernetes' own domain that is no request for one.
fn is_extended_resource(name: &str) -> bool {
    let is_native = !name.contains('/') || name.contains("kubernetes.io/");
    !is_native && !name.starts_with("requests.")
}

impl KubeSchedulerProfile {
    fn resolve(&self, name: &str, path: &Path, errors: &mut Vec<FieldError>) -> Profile {
        let percentage_of_nodes_to_score =
            percentage(self.percentage_of_nodes_to_score, &path.child("percentageOfNodesToScore"), errors);
        let removed = |name: &str, path: &Path| {
            REMOVED_PLUGINS.contains(&name).then(|| {
                let problem = format!(
                    "was invalid in version {VERSION:?} (KubeSchedulerConfiguration is version {VERSION:?})"
                );
                FieldError::invalid(path, name, problem)
            })
        };
        for (_, point, set) in self.plugins.points() {
            for (index, plugin) in set.enabled.iter().enumerate() {
                let path = path.child("plugins").child(point).child("enabled").index(index);
                errors.extend(removed(&plugin.name, &path));
            }
        }
        let mut args = BTreeMap::new();
        for (index, config) in self.plugin_config.iter().enumerate() {
            let path = path.child("pluginConfig").index(index);
            if args.contains_key(&config.name) {
                errors.push(FieldError::duplicate(&path, config.name.as_str()));
            }
            errors.extend(removed(&config.name, &path));
            if let Some(value) = &config.args {
                let kind = value["kind"].as_str().unwrap_or_default();
                if !kind.is_empty() && kind != format!("{}Args", config.name) {
                    let path = path.child("args");
                    errors.push(FieldError::invalid(&path, kind, "has to match plugin args"));
                }
                args.insert(config.name.clone(), PluginArgs::new(value.clone(), path.child("args")));
            }
        }
        let points = self.plugins.points();
        let points = points.iter().map(|(point, _, set)| (*point, set.set()));
        let plugins = PluginSets { multi_point: self.plugins.multi_point.set(), points: points.collect() };
        Profile {
            scheduler_name: name.to_owned(),
            plugins: plugins.over_defaults(),
            args,
            percentage_of_nodes_to_score,
        }
    }
}

#[cfg(test)]
mod tests;
