use ferrite_json::json;

use super::*;
use crate::framework::{Framework, Handle, Registry};

fn parse(value: Value) -> KubeSchedulerConfiguration {
    ferrite_json::from_value(value).unwrap()
}

fn refusal(value: Value) -> String {
    match parse(value).resolve() {
        Err(error) => error.to_string(),
        Ok(configuration) => {
            let made = configuration
                .profiles
                .iter()
                .map(|profile| Framework::new(profile, &Registry::default(), &Handle::default()));
            let error = made.filter_map(Result::err).next().expect("refused");
            std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source())
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(": ")
        }
    }
}

fn profile(value: Value) -> Value {
    json!({"profiles": [value]})
}

#[test]
fn invalid_configurations_are_refused_in_upstreams_words() {
    let args = |plugin: &str, args: Value| profile(json!({"pluginConfig": [{"name": plugin, "args": args}]}));
    for (value, expected) in [
        (
            json!({"parallelism": 0}),
            "parallelism: Invalid value: 0: should be an integer value greater than zero",
        ),
        (
            json!({"percentageOfNodesToScore": 101}),
            "percentageOfNodesToScore: Invalid value: 101: not in valid range [0-100]",
        ),
        (
            json!({"podInitialBackoffSeconds": 0, "podMaxBackoffSeconds": -1}),
            "[podInitialBackoffSeconds: Invalid value: 0: must be greater than 0, podMaxBackoffSeconds: Invalid \
             value: -1: must be greater than or equal to PodInitialBackoffSeconds]",
        ),
        (json!({"profiles": [{"schedulerName": ""}]}), "profiles[0].schedulerName: Required value"),
        (
            json!({"profiles": [{"schedulerName": "a"}, {"schedulerName": "a"}]}),
            "profiles[1].schedulerName: Duplicate value: \"profiles[0].schedulerName\"",
        ),
        (
            json!({"leaderElection": {"leaderElect": true, "resourceLock": "endpoints"}}),
            "leaderElection.resourceLock: Invalid value: \"endpoints\": resourceLock value must be \"leases\"",
        ),
        (
            json!({"extenders": [{"urlPrefix": "http://a", "prioritizeVerb": "p"}]}),
            "extenders[0].weight: Invalid value: 0: must have a positive weight applied to it",
        ),
        (
            json!({"extenders": [{"urlPrefix": "http://a", "bindVerb": "b"}, {"urlPrefix": "http://b", "bindVerb": "b"}]}),
            "extenders: Invalid value: \"found 2 extenders implementing bind\": only one extender can implement bind",
        ),
        (
            json!({"extenders": [{"urlPrefix": "http://a", "managedResources": [{"name": "cpu"}]}]}),
            "extenders[0].managedResources[0].name: Invalid value: \"cpu\": is an invalid extended resource name",
        ),
        (
            profile(json!({"plugins": {"filter": {"enabled": [{"name": "EBSLimits"}]}}})),
            "profiles[0].plugins.filter.enabled[0]: Invalid value: \"EBSLimits\": was invalid in version \
             \"kubescheduler.config.k8s.io/v1\" (KubeSchedulerConfiguration is version \
             \"kubescheduler.config.k8s.io/v1\")",
        ),
        (
            json!({"profiles": [{"schedulerName": "a"},
                {"schedulerName": "b", "plugins": {"queueSort": {"enabled": [{"name": "Other"}]}}}]}),
            "profiles[1].plugins.queueSort: Invalid value: \"Other\": must be the same for all profiles",
        ),
        (
            profile(
                json!({"pluginConfig": [{"name": "NodeAffinity", "args": {"kind": "InterPodAffinityArgs"}}]}),
            ),
            "profiles[0].pluginConfig[0].args: Invalid value: \"InterPodAffinityArgs\": has to match plugin args",
        ),
        (
            profile(json!({"plugins": {"multiPoint": {"enabled": [{"name": "Unknown"}]}}})),
            "profile \"default-scheduler\": plugin \"Unknown\" does not exist",
        ),
        (
            profile(json!({"plugins": {"score": {"enabled": [{"name": "NodeName"}]}}})),
            "profile \"default-scheduler\": plugin \"NodeName\" does not extend Score",
        ),
        (
            profile(json!({"plugins": {"multiPoint": {"disabled": [{"name": "DefaultBinder"}]}}})),
            "profile \"default-scheduler\": at least one bind plugin is needed",
        ),
        (
            args("DefaultPreemption", json!({"minCandidateNodesPercentage": 101})),
            "profile \"default-scheduler\": initializing plugin \"DefaultPreemption\": \
             profiles[0].pluginConfig[0].args.minCandidateNodesPercentage: Invalid value: 101: not in valid range \
             [0, 100]",
        ),
        (
            args("InterPodAffinity", json!({"hardPodAffinityWeight": 101})),
            "profile \"default-scheduler\": initializing plugin \"InterPodAffinity\": \
             profiles[0].pluginConfig[0].args.hardPodAffinityWeight: Invalid value: 101: not in valid range [0, 100]",
        ),
        (
            args("NodeResourcesFit", json!({"scoringStrategy": {"type": "Wrong"}})),
            "profile \"default-scheduler\": initializing plugin \"NodeResourcesFit\": \
             profiles[0].pluginConfig[0].args.scoringStrategy.type: Unsupported value: \"Wrong\": supported values: \
             \"LeastAllocated\", \"MostAllocated\", \"RequestedToCapacityRatio\"",
        ),
        (
            args("NodeResourcesFit", json!({"scoringStrategy": {"type": "RequestedToCapacityRatio"}})),
            "profile \"default-scheduler\": initializing plugin \"NodeResourcesFit\": \
             profiles[0].pluginConfig[0].args.scoringStrategy.requestedToCapacityRatio: Required value: must be \
             specified when type is RequestedToCapacityRatio",
        ),
        (
            args(
                "PodTopologySpread",
                json!({"defaultingType": "System", "defaultConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]}),
            ),
            "profile \"default-scheduler\": initializing plugin \"PodTopologySpread\": \
             profiles[0].pluginConfig[0].args.defaultingType: Invalid value: \"System\": when .defaultConstraints are \
             not empty",
        ),
    ] {
        assert_eq!(refusal(value), expected);
    }
    let unknown: Result<KubeSchedulerConfiguration, _> = ferrite_json::from_value(json!({"profile": []}));
    assert!(unknown.is_err());
}

#[test]
fn a_profile_is_laid_over_the_defaults() {
    let configuration = parse(json!({
        "podInitialBackoffSeconds": 2,
        "percentageOfNodesToScore": 30,
        "profiles": [{
            "schedulerName": "packing",
            "plugins": {
                "multiPoint": {"enabled": [{"name": "NodeAffinity", "weight": 9}], "disabled": [{"name": "NodePorts"}]},
                "score": {"disabled": [{"name": "PodTopologySpread"}]},
            },
            "pluginConfig": [{"name": "NodeResourcesFit", "args": {"apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "NodeResourcesFitArgs", "scoringStrategy": {"type": "MostAllocated"}}}],
        }],
        "extenders": [{"urlPrefix": "http://a/b", "filterVerb": "f",
            "managedResources": [{"name": "example.com/r", "ignoredByScheduler": true}]}],
    }));
    let configuration = configuration.resolve().unwrap();
    assert_eq!(configuration.percentage_of_nodes_to_score, Some(30));
    assert_eq!(configuration.backoff.initial, Duration::from_secs(2));
    let framework =
        Framework::new(&configuration.profiles[0], &Registry::default(), &Handle::default()).unwrap();
    let names = |point| -> Vec<_> { framework.at(point).iter().map(|plugin| plugin.name()).collect() };
    assert!(!names(ExtensionPoint::Filter).contains(&"NodePorts"));
    assert!(names(ExtensionPoint::Filter).contains(&"PodTopologySpread"));
    let scores: BTreeMap<_, _> =
        framework.scores().iter().map(|(plugin, weight)| (plugin.name(), *weight)).collect();
    assert_eq!(scores.get("NodeAffinity"), Some(&9));
    assert_eq!(scores.get("PodTopologySpread"), None);
    assert_eq!(scores.get("TaintToleration"), Some(&3));
}

#[test]
fn an_empty_configuration_is_the_default() {
    let configuration = parse(json!({})).resolve().unwrap();
    assert_eq!(configuration.profiles.len(), 1);
    assert_eq!(configuration.profiles[0].scheduler_name, "default-scheduler");
    assert_eq!(configuration.profiles[0].plugins.multi_point, PluginSets::defaults().multi_point);
    assert_eq!(configuration.backoff, BackoffLimits::default());
}
