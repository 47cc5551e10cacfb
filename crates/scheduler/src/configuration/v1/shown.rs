//! The configuration in use as an object of `kubescheduler.config.k8s.io/v1`, for `/configz`.

use ferrite_component::GoDuration;
use ferrite_json::{Map, Value, json};

use super::{KubeSchedulerConfiguration, KubeSchedulerProfile, VERSION};
use crate::configuration::Configuration;
use crate::extender::ExtenderSettings;
use crate::profile::{ExtensionPoint, PluginSet, Profile};

/// Extension points as the file names them. Nothing is enabled at the last two: there are no such plugins.
const POINTS: [(&str, Option<ExtensionPoint>); 14] = [
    ("preEnqueue", Some(ExtensionPoint::PreEnqueue)),
    ("queueSort", Some(ExtensionPoint::QueueSort)),
    ("preFilter", Some(ExtensionPoint::PreFilter)),
    ("filter", Some(ExtensionPoint::Filter)),
    ("postFilter", Some(ExtensionPoint::PostFilter)),
    ("preScore", Some(ExtensionPoint::PreScore)),
    ("score", Some(ExtensionPoint::Score)),
    ("reserve", Some(ExtensionPoint::Reserve)),
    ("permit", Some(ExtensionPoint::Permit)),
    ("preBind", Some(ExtensionPoint::PreBind)),
    ("bind", Some(ExtensionPoint::Bind)),
    ("postBind", Some(ExtensionPoint::PostBind)),
    ("placementGenerate", None),
    ("placementScore", None),
];

/// The arguments that a plugin has when none are given; none for a plugin without arguments.
fn default_args(plugin: &str) -> Option<Value> {
    let both = json!([{"name": "cpu", "weight": 1}, {"name": "memory", "weight": 1}]);
    Some(match plugin {
        "DefaultPreemption" => json!({"minCandidateNodesPercentage": 10, "minCandidateNodesAbsolute": 100}),
        "DynamicResources" => json!({"filterTimeout": "10s", "bindingTimeout": "10m0s"}),
        "InterPodAffinity" => {
            json!({"hardPodAffinityWeight": 1, "ignorePreferredTermsOfExistingPods": false})
        }
        "NodeAffinity" => json!({}),
        "NodeResourcesBalancedAllocation" => json!({"resources": both}),
        "NodeResourcesFit" => json!({"scoringStrategy": {"type": "LeastAllocated", "resources": both}}),
        "PodTopologySpread" => json!({"defaultingType": "System"}),
        "VolumeBinding" => json!({"bindTimeoutSeconds": 600}),
        _ => return None,
    })
}

fn shown_set(set: &PluginSet) -> Value {
    let mut shown = json!({});
    if !set.enabled.is_empty() {
        let enabled = set.enabled.iter().map(|(name, weight)| json!({"name": *name, "weight": *weight}));
        shown["enabled"] = enabled.collect::<Vec<_>>().into();
    }
    if !set.disabled.is_empty() {
        let disabled = set.disabled.iter().map(|name| json!({"name": *name}));
        shown["disabled"] = disabled.collect::<Vec<_>>().into();
    }
    shown
}

/// A plugin's arguments: those that are given, over the defaults.
fn shown_args(plugin: &str, given: Option<&Value>) -> Option<Value> {
    let defaults = default_args(plugin);
    let mut args = defaults.clone().or_else(|| given.map(|_| json!({})))?;
    for (key, value) in given.and_then(Value::as_object).into_iter().flatten() {
        args[key.as_str()] = value.clone();
    }
    // The resources of a strategy that names none.
    let has_resources = args["scoringStrategy"]["resources"].as_array().is_some_and(|all| !all.is_empty());
    if plugin == "NodeResourcesFit" && !has_resources {
        args["scoringStrategy"]["resources"] =
            defaults.map(|defaults| defaults["scoringStrategy"]["resources"].clone()).unwrap_or_default();
    }
    args["apiVersion"] = VERSION.into();
    args["kind"] = format!("{plugin}Args").into();
    Some(args)
}

fn shown_profile(file: Option<&KubeSchedulerProfile>, profile: &Profile) -> Value {
    let mut plugins = json!({"multiPoint": shown_set(&profile.plugins.multi_point)});
    for (name, point) in POINTS {
        let set = point.and_then(|point| profile.plugins.points.get(&point));
        plugins[name] = set.map_or_else(|| json!({}), shown_set);
    }
    let given = file.map(|file| file.plugin_config.as_slice()).unwrap_or_default();
    let is_given = |plugin: &&str| given.iter().any(|config| config.name == *plugin);
    let others = profile.plugins.names().into_iter().filter(|plugin| !is_given(plugin));
    let configs = given.iter().map(|config| (config.name.as_str(), config.args.as_ref()));
    let configs = configs.chain(others.map(|plugin| (plugin, None)));
    let configs = configs
        .filter_map(|(plugin, given)| Some(json!({"name": plugin, "args": shown_args(plugin, given)?})));
    let mut shown = json!({"schedulerName": profile.scheduler_name, "plugins": plugins,
        "pluginConfig": configs.collect::<Vec<_>>()});
    if let Some(percentage) = file.and_then(|file| file.percentage_of_nodes_to_score) {
        shown["percentageOfNodesToScore"] = percentage.into();
    }
    shown
}

/// Members that are set. Keys are not shown: whoever may read this page need not have them.
fn shown_extender(extender: &ExtenderSettings) -> Value {
    let mut shown = Map::new();
    let mut add = |name: &str, value: Value| drop(shown.insert(name, value));
    add("urlPrefix", extender.url_prefix.as_str().into());
    for (name, verb) in [
        ("filterVerb", &extender.filter_verb),
        ("preemptVerb", &extender.preempt_verb),
        ("prioritizeVerb", &extender.prioritize_verb),
        ("bindVerb", &extender.bind_verb),
    ] {
        if !verb.is_empty() {
            add(name, verb.as_str().into());
        }
    }
    if extender.weight != 0 {
        add("weight", extender.weight.into());
    }
    for (name, is_set) in [
        ("enableHTTPS", extender.enable_https),
        ("nodeCacheCapable", extender.node_cache_capable),
        ("ignorable", extender.ignorable),
    ] {
        if is_set {
            add(name, true.into());
        }
    }
    let timeout = extender.http_timeout.map(|timeout| timeout.to_string());
    add("httpTimeout", timeout.unwrap_or_else(|| "0s".to_owned()).into());
    if let Some(tls) = &extender.tls_config {
        let file = |path: &Option<std::path::PathBuf>| {
            path.as_ref().map(|path| path.display().to_string()).unwrap_or_default()
        };
        let config = json!({"insecure": tls.insecure, "serverName": tls.server_name, "certFile": file(&tls.cert_file),
            "keyFile": file(&tls.key_file), "caFile": file(&tls.ca_file)});
        add("tlsConfig", config);
    }
    let managed = extender
        .managed_resources
        .iter()
        .map(|resource| json!({"name": resource.name, "ignoredByScheduler": resource.ignored_by_scheduler}));
    let managed: Vec<Value> = managed.collect();
    if !managed.is_empty() {
        add("managedResources", managed.into());
    }
    Value::Object(shown)
}

/// The settings that flags may have changed.
#[derive(Debug, Clone)]
pub struct InUse {
    pub kubeconfig: String,
    pub leader_elect: bool,
    pub lease_duration: GoDuration,
    pub renew_deadline: GoDuration,
    pub retry_period: GoDuration,
    pub resource_name: String,
    pub resource_namespace: String,
}

impl KubeSchedulerConfiguration {
    /// The whole object, with the defaults in. `resolved` is what [`resolve`](Self::resolve) made of it.
    pub fn shown(&self, resolved: &Configuration, in_use: &InUse) -> Value {
        let connection = &self.client_connection;
        let profiles = resolved.profiles.iter().enumerate();
        let profiles = profiles.map(|(index, profile)| shown_profile(self.profiles.get(index), profile));
        let mut shown = json!({
            "apiVersion": VERSION,
            "kind": "KubeSchedulerConfiguration",
            "parallelism": self.parallelism.unwrap_or(16),
            "leaderElection": {
                "leaderElect": in_use.leader_elect,
                "leaseDuration": in_use.lease_duration.to_string(),
                "renewDeadline": in_use.renew_deadline.to_string(),
                "retryPeriod": in_use.retry_period.to_string(),
                "resourceLock": "leases",
                "resourceName": in_use.resource_name,
                "resourceNamespace": in_use.resource_namespace,
            },
            "clientConnection": {
                "kubeconfig": in_use.kubeconfig,
                "acceptContentTypes": connection.accept_content_types,
                "contentType": connection.content_type,
                "qps": connection.qps,
                "burst": connection.burst,
            },
            "enableProfiling": self.enable_profiling.unwrap_or(true),
            "enableContentionProfiling": self.enable_contention_profiling.unwrap_or(true),
            "percentageOfNodesToScore": self.percentage_of_nodes_to_score.unwrap_or(0),
            "podInitialBackoffSeconds": resolved.backoff.initial.as_secs(),
            "podMaxBackoffSeconds": resolved.backoff.max.as_secs(),
            "profiles": profiles.collect::<Vec<_>>(),
        });
        if !self.extenders.is_empty() {
            shown["extenders"] = self.extenders.iter().map(shown_extender).collect::<Vec<_>>().into();
        }
        if self.delay_cache_until_active {
            shown["delayCacheUntilActive"] = true.into();
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(file: Value) -> Value {
        let file: KubeSchedulerConfiguration = ferrite_json::from_value(file).unwrap();
        let seconds = |seconds| GoDuration(std::time::Duration::from_secs(seconds));
        let in_use = InUse {
            kubeconfig: "/k".to_owned(),
            leader_elect: true,
            lease_duration: seconds(15),
            renew_deadline: seconds(10),
            retry_period: seconds(2),
            resource_name: "kube-scheduler".to_owned(),
            resource_namespace: "kube-system".to_owned(),
        };
        file.shown(&file.resolve().unwrap(), &in_use)
    }

    #[test]
    fn defaults_are_shown() {
        let shown = shown(json!({}));
        assert_eq!(shown["leaderElection"]["leaseDuration"], json!("15s"));
        assert_eq!((&shown["parallelism"], &shown["podMaxBackoffSeconds"]), (&json!(16), &json!(10)));
        let profile = &shown["profiles"][0];
        assert_eq!(profile["schedulerName"], json!("default-scheduler"));
        assert_eq!(
            profile["plugins"]["multiPoint"]["enabled"][4],
            json!({"name": "TaintToleration", "weight": 3})
        );
        assert_eq!(profile["plugins"]["filter"], json!({}));
        let args = |name: &str| {
            let configs = profile["pluginConfig"].as_array().unwrap();
            configs.iter().find(|config| config["name"] == json!(name)).map(|config| config["args"].clone())
        };
        assert_eq!(
            args("VolumeBinding"),
            Some(json!({"bindTimeoutSeconds": 600, "apiVersion": VERSION, "kind": "VolumeBindingArgs"}))
        );
        assert_eq!(args("NodeName"), None, "a plugin without arguments");
        assert!(shown.get("extenders").is_none());
    }

    #[test]
    fn settings_are_shown_over_the_defaults() {
        let shown = shown(json!({
            "profiles": [{"schedulerName": "a", "percentageOfNodesToScore": 30,
                "plugins": {"multiPoint": {"disabled": [{"name": "ImageLocality"}]},
                            "score": {"enabled": [{"name": "NodeAffinity", "weight": 9}]}},
                "pluginConfig": [{"name": "NodeResourcesFit", "args": {"scoringStrategy": {"type": "MostAllocated"}}}]}],
            "extenders": [{"urlPrefix": "https://x", "filterVerb": "f", "httpTimeout": "3s",
                "tlsConfig": {"keyData": "c2VjcmV0"}}]}));
        let profile = &shown["profiles"][0];
        assert_eq!(profile["percentageOfNodesToScore"], json!(30));
        assert_eq!(profile["plugins"]["score"]["enabled"], json!([{"name": "NodeAffinity", "weight": 9}]));
        let multi_point = profile["plugins"]["multiPoint"]["enabled"].as_array().unwrap();
        assert!(multi_point.iter().all(|plugin| plugin["name"] != json!("ImageLocality")));
        let strategy = &profile["pluginConfig"][0]["args"]["scoringStrategy"];
        assert_eq!(strategy["type"], json!("MostAllocated"));
        assert_eq!(strategy["resources"][1], json!({"name": "memory", "weight": 1}));
        let extender = &shown["extenders"][0];
        assert_eq!((&extender["filterVerb"], &extender["httpTimeout"]), (&json!("f"), &json!("3s")));
        assert!(!extender.to_string().contains("c2VjcmV0"), "{extender}");
    }
}
