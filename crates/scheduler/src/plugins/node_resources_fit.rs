//! Fits requests into the free resources of nodes, and prefers nodes with most left.

use std::collections::BTreeSet;
use std::sync::Arc;

use ferrite_api::field::{FieldError, Path};
use ferrite_api::meta_validation;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::DeviceClass;
use serde::Deserialize;

use super::resource_amounts::{ResourceSpec, Weighed, amounts};
use crate::devices::{Devices, IMPLICIT_PREFIX};
use crate::framework::{
    Action, ClusterEvent, CycleState, Filter, Handle, MAX_SCORE, Made, ObjectEvent, Plugin, PluginArgs,
    Reason, Rejection, Score,
};
use crate::resources::Resources;
use crate::snapshot::{NodeInfo, PodInfo};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Args {
    ignored_resources: Vec<String>,
    ignored_resource_groups: Vec<String>,
    scoring_strategy: StrategyArgs,
}

impl Default for Args {
    fn default() -> Self {
        Self {
            ignored_resources: Vec::new(),
            ignored_resource_groups: Vec::new(),
            scoring_strategy: StrategyArgs { kind: LEAST.to_owned(), ..StrategyArgs::default() },
        }
    }
}

/// As upstream: a strategy that is given must name its type.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct StrategyArgs {
    #[serde(rename = "type")]
    kind: String,
    resources: Vec<ResourceSpec>,
    requested_to_capacity_ratio: Option<Ratio>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Ratio {
    shape: Vec<ShapePoint>,
}

const LEAST: &str = "LeastAllocated";
const MOST: &str = "MostAllocated";
const RATIO: &str = "RequestedToCapacityRatio";

/// A point of a function from utilization in percent to a score from 0 to 10.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShapePoint {
    utilization: i64,
    score: i64,
}

/// The rule that turns free resources into a score.
#[derive(Debug, Clone)]
enum Strategy {
    LeastAllocated,
    MostAllocated,
    /// Points by utilization, with scores up to [`MAX_SCORE`]; lines between them.
    RequestedToCapacityRatio(Vec<ShapePoint>),
}

impl Args {
    fn validate(&self, path: &Path) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let ignored = path.child("ignoredResources");
        for (index, name) in self.ignored_resources.iter().enumerate() {
            let path = ignored.index(index);
            let problems = meta_validation::qualified_name(name);
            errors.extend(
                problems.into_iter().map(|problem| FieldError::invalid(&path, name.as_str(), problem)),
            );
        }
        let groups = path.child("ignoredResourceGroups");
        for (index, name) in self.ignored_resource_groups.iter().enumerate() {
            let path = groups.index(index);
            if name.contains('/') {
                let problem = "resource group name can't contain '/'";
                errors.push(FieldError::invalid(&path, name.as_str(), problem));
            }
            let problems = meta_validation::qualified_name(name);
            errors.extend(
                problems.into_iter().map(|problem| FieldError::invalid(&path, name.as_str(), problem)),
            );
        }
        let (path, strategy) = (path.child("scoringStrategy"), &self.scoring_strategy);
        if !matches!(strategy.kind.as_str(), LEAST | MOST | RATIO) {
            let supported = [LEAST, MOST, RATIO];
            errors.push(FieldError::not_supported(&path.child("type"), strategy.kind.as_str(), &supported));
        }
        for (index, resource) in strategy.resources.iter().enumerate() {
            if !(0..=100).contains(&resource.weight) {
                let path = path.child("resources").index(index).child("weight");
                let problem = format!("resource weight of {} not in valid range (0, 100]", resource.name);
                errors.push(FieldError::invalid(&path, resource.weight, problem));
            }
        }
        let path = path.child("requestedToCapacityRatio");
        match (&strategy.requested_to_capacity_ratio, strategy.kind == RATIO) {
            (Some(ratio), true) => errors.extend(validate_shape(&ratio.shape, &path.child("shape"))),
            (None, true) => {
                let problem = "must be specified when type is RequestedToCapacityRatio";
                errors.push(FieldError::required(&path, problem));
            }
            (Some(_), false) => {
                let problem = "must be nil when type is not RequestedToCapacityRatio";
                errors.push(FieldError::forbidden(&path, problem));
            }
            (None, false) => {}
        }
        errors
    }
}

fn validate_shape(shape: &[ShapePoint], path: &Path) -> Vec<FieldError> {
    if shape.is_empty() {
        return vec![FieldError::required(path, "at least one point must be specified")];
    }
    let mut errors = Vec::new();
    if let Some(index) = (1..shape.len()).find(|i| shape[i - 1].utilization >= shape[*i].utilization) {
        let problem = "values must be sorted in increasing order";
        let path = path.index(index).child("utilization");
        errors.push(FieldError::invalid(&path, shape[index].utilization, problem));
    }
    for (index, point) in shape.iter().enumerate() {
        let path = path.index(index);
        if !(0..=100).contains(&point.utilization) {
            let problem = "not in valid range [0, 100]";
            errors.push(FieldError::invalid(&path.child("utilization"), point.utilization, problem));
        }
        if !(0..=10).contains(&point.score) {
            errors.push(FieldError::invalid(&path.child("score"), point.score, "not in valid range [0, 10]"));
        }
    }
    errors
}

impl Strategy {
    /// The score of one resource.
    fn score(&self, requested: i64, allocatable: i64) -> i64 {
        match self {
            Self::LeastAllocated if requested > allocatable => 0,
            Self::LeastAllocated => (allocatable - requested).saturating_mul(MAX_SCORE) / allocatable,
            // As upstream: requests that were assumed for pods without any may exceed the node.
            Self::MostAllocated => requested.min(allocatable).saturating_mul(MAX_SCORE) / allocatable,
            Self::RequestedToCapacityRatio(shape) => {
                let utilization =
                    if requested > allocatable { 100 } else { requested.saturating_mul(100) / allocatable };
                interpolate(shape, utilization)
            }
        }
    }
}

/// The value of the broken line at `at`.
fn interpolate(shape: &[ShapePoint], at: i64) -> i64 {
    for (index, point) in shape.iter().enumerate() {
        if at <= point.utilization {
            let Some(before) = index.checked_sub(1).map(|before| shape[before]) else { return point.score };
            let (rise, run) = (point.score - before.score, point.utilization - before.utilization);
            return before.score + rise * (at - before.utilization) / run;
        }
    }
    shape.last().map_or(0, |point| point.score)
}

struct NodeResourcesFit {
    ignored_resources: BTreeSet<String>,
    ignored_resource_groups: BTreeSet<String>,
    strategy: Strategy,
    resources: Vec<Weighed>,
    devices: Arc<Devices>,
}

pub(super) fn new(args: &PluginArgs, handle: &Handle) -> Made {
    let args = args.decode_valid(Args::validate)?;
    let strategy =
        match (args.scoring_strategy.kind.as_str(), args.scoring_strategy.requested_to_capacity_ratio) {
            (MOST, _) => Strategy::MostAllocated,
            (RATIO, Some(ratio)) => {
                let scaled = ratio
                    .shape
                    .into_iter()
                    .map(|point| ShapePoint { score: point.score * (MAX_SCORE / 10), ..point });
                Strategy::RequestedToCapacityRatio(scaled.collect())
            }
            _ => Strategy::LeastAllocated,
        };
    Ok(Arc::new(NodeResourcesFit {
        ignored_resources: args.ignored_resources.into_iter().collect(),
        ignored_resource_groups: args.ignored_resource_groups.into_iter().collect(),
        strategy,
        resources: ResourceSpec::with_defaults(args.scoring_strategy.resources),
        devices: handle.devices(),
    }))
}

impl NodeResourcesFit {
    fn ignores(&self, resource: &str) -> bool {
        if self.ignored_resources.is_empty() && self.ignored_resource_groups.is_empty() {
            return false;
        }
        let group = resource.split_once('/').map_or(resource, |(group, _)| group);
        self.ignored_resources.contains(resource) || self.ignored_resource_groups.contains(group)
    }

    /// True if the node gets the resource from claims on devices, which the plugin DynamicResources sees to.
    fn is_dynamic(&self, resource: &str, allocatable: &Resources) -> bool {
        allocatable.scalar.get(resource).copied().unwrap_or(0) == 0
            && self.devices.class_behind(resource).is_some()
    }

    /// True if an empty node of this size would do.
    fn could_fit(&self, pod: &PodInfo, node: &Node) -> bool {
        let allocatable = allocatable(node);
        let requests = &pod.requests;
        allocatable.pods > 0
            && requests.milli_cpu <= allocatable.milli_cpu
            && requests.memory <= allocatable.memory
            && requests.ephemeral_storage <= allocatable.ephemeral_storage
            && requests.scalar.iter().all(|(name, amount)| {
                *amount <= allocatable.scalar.get(name).copied().unwrap_or(0)
                    || self.is_dynamic(name, &allocatable)
            })
    }

    /// True if the class provides a resource that the pod asks for, and did not before.
    fn class_hint(pod: &PodInfo, event: &ObjectEvent, class: &DeviceClass) -> bool {
        let asks = |name: &str| pod.requests.scalar.get(name).is_some_and(|amount| *amount > 0);
        let old = event.old::<DeviceClass>();
        if event.action == Action::Deleted
            || old.is_some_and(|old| old.spec.extended_resource_name == class.spec.extended_resource_name)
        {
            return false;
        }
        let implicit = format!("{IMPLICIT_PREFIX}{}", class.metadata.name.as_deref().unwrap_or_default());
        class.spec.extended_resource_name.as_deref().is_some_and(asks) || old.is_none() && asks(&implicit)
    }
}

fn allocatable(node: &Node) -> Resources {
    Resources::from_list(node.status.as_ref().and_then(|status| status.allocatable.as_ref()))
}

impl Plugin for NodeResourcesFit {
    fn name(&self) -> &'static str {
        "NodeResourcesFit"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::NodeAdded(node) => self.could_fit(pod, node),
            ClusterEvent::NodeUpdated { old, new } => {
                allocatable(old) != allocatable(new) && self.could_fit(pod, new)
            }
            ClusterEvent::AssignedPodDeleted(_) | ClusterEvent::PodUpdated => true,
            ClusterEvent::Object(event) => {
                event.object::<DeviceClass>().is_some_and(|class| Self::class_hint(pod, event, class))
            }
            _ => false,
        }
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }

    fn score(&self) -> Option<&dyn Score> {
        Some(self)
    }
}

impl Filter for NodeResourcesFit {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let mut reasons: Vec<Reason> = Vec::new();
        // More than the whole node has: removing pods would not help.
        let mut hopeless = false;
        let held = i64::try_from(node.pods.len()).unwrap_or(i64::MAX);
        if held + 1 > node.allocatable.pods {
            reasons.push("Too many pods".into());
        }
        let mut check = |name: &'static str, wanted: i64, used: i64, has: i64| {
            if wanted > 0 && wanted > has.saturating_sub(used) {
                reasons.push(name.into());
                hopeless |= wanted > has;
            }
        };
        let (wanted, used, has) = (&pod.requests, &node.requested, &node.allocatable);
        check("Insufficient cpu", wanted.milli_cpu, used.milli_cpu, has.milli_cpu);
        check("Insufficient memory", wanted.memory, used.memory, has.memory);
        check(
            "Insufficient ephemeral-storage",
            wanted.ephemeral_storage,
            used.ephemeral_storage,
            has.ephemeral_storage,
        );
        for (name, wanted) in &wanted.scalar {
            let amount = |resources: &Resources| resources.scalar.get(name).copied().unwrap_or(0);
            let is_short = *wanted > 0 && *wanted > amount(has).saturating_sub(amount(used));
            if is_short && !self.ignores(name) && !self.is_dynamic(name, has) {
                reasons.push(format!("Insufficient {name}").into());
                hopeless |= *wanted > amount(has);
            }
        }
        match (reasons.is_empty(), hopeless) {
            (true, _) => Ok(()),
            (false, true) => Err(Rejection::UnschedulableAndUnresolvable(reasons)),
            (false, false) => Err(Rejection::Unschedulable(reasons)),
        }
    }

    fn is_local(&self, pod: &PodInfo) -> bool {
        // Classes of devices decide who provides other resources.
        pod.requests.scalar.is_empty()
    }
}

impl Score for NodeResourcesFit {
    /// The weighted mean over the resources, with the pod in place.
    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let (mut sum, mut weights) = (0, 0);
        for Weighed { resource, weight } in &self.resources {
            let Some(amounts) = amounts(resource, pod, node, false) else { continue };
            let score = self.strategy.score(amounts.used.saturating_add(amounts.wanted), amounts.allocatable);
            // As upstream: a resource that scores nothing has no weight in a ratio.
            if score > 0 || !matches!(self.strategy, Strategy::RequestedToCapacityRatio(_)) {
                sum += score * weight;
                weights += weight;
            }
        }
        match (&self.strategy, weights) {
            (_, 0) => 0,
            (Strategy::RequestedToCapacityRatio(_), weights) => (sum as f64 / weights as f64).round() as i64,
            (_, weights) => sum / weights,
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn plugin(args: Value) -> Arc<dyn Plugin> {
        new(&PluginArgs::new(args, Path::new("args")), &Handle::default()).unwrap()
    }

    fn node(used: &str) -> NodeInfo {
        let node = json!({"metadata": {"name": "n"}, "status": {"allocatable":
            {"cpu": "10", "memory": "10Gi", "pods": "10", "example.com/a": "4"}}});
        let mut info = NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap()));
        info.add_pod(Arc::new(pod(json!({"cpu": used, "memory": "5Gi"}))));
        info
    }

    fn pod(requests: Value) -> PodInfo {
        let pod = json!({"spec": {"containers": [{"name": "c", "resources": {"requests": requests}}]}});
        PodInfo::new(&ferrite_json::from_value(pod).unwrap())
    }

    #[test]
    fn strategies_score_as_upstream() {
        let strategy = |value: Value| json!({"scoringStrategy": value});
        let ratio = |resources: Value, shape: Value| {
            strategy(
                json!({"type": RATIO, "resources": resources, "requestedToCapacityRatio": {"shape": shape}}),
            )
        };
        let rising = json!([{"utilization": 0, "score": 0}, {"utilization": 100, "score": 10}]);
        let cpu_only = json!([{"name": "cpu"}]);
        for (what, args, used, expected) in [
            ("least: (60 + 50) / 2 with 1 CPU and no memory more", json!({}), "3", 54),
            ("most: (40 + 51) / 2", strategy(json!({"type": MOST})), "3", 45),
            (
                "weights",
                strategy(
                    json!({"type": MOST, "resources": [{"name": "cpu", "weight": 3}, {"name": "memory"}]}),
                ),
                "3",
                42,
            ),
            ("a rising line", ratio(cpu_only.clone(), rising.clone()), "3", 40),
            (
                "a bent line",
                ratio(cpu_only, json!([{"utilization": 30, "score": 2}, {"utilization": 50, "score": 10}])),
                "3",
                60,
            ),
            (
                "a resource that the pod does not ask for does not count",
                ratio(json!([{"name": "cpu"}, {"name": "example.com/a"}]), rising),
                "3",
                40,
            ),
        ] {
            let plugin = plugin(args);
            let score = plugin.score().unwrap();
            let incoming = pod(json!({"cpu": "1"}));
            assert_eq!(score.score(&CycleState::default(), &incoming, &node(used)), expected, "{what}");
        }
    }

    #[test]
    fn a_strategy_names_its_type() {
        for (args, is_accepted) in [
            (json!({}), true),
            (json!({"ignoredResources": ["example.com/a"]}), true),
            (json!({"scoringStrategy": {"type": LEAST}}), true),
            (json!({"scoringStrategy": {}}), false),
            (json!({"scoringStrategy": {"resources": [{"name": "cpu", "weight": 1}]}}), false),
        ] {
            let made = new(&PluginArgs::new(args.clone(), Path::new("args")), &Handle::default());
            assert_eq!(made.is_ok(), is_accepted, "{args}");
        }
    }

    #[test]
    fn ignored_resources_do_not_count() {
        let incoming = pod(json!({"example.com/a": "9"}));
        let filter = |args: Value| {
            let plugin = plugin(args);
            plugin.filter().unwrap().filter(&CycleState::default(), &incoming, &node("1")).is_ok()
        };
        assert!(!filter(json!({})));
        assert!(filter(json!({"ignoredResources": ["example.com/a"]})));
        assert!(filter(json!({"ignoredResourceGroups": ["example.com"]})));
    }
}
