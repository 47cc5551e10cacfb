//! Prefers nodes whose resources would be used in more equal shares with the pod than without it.

use std::sync::Arc;

use ferrite_api::field::FieldError;
use serde::Deserialize;

use super::resource_amounts::{Resource, ResourceSpec, Weighed, amounts};
use crate::framework::{CycleState, Handle, Interest, MAX_SCORE, Made, Plugin, PluginArgs, PreScore, Score};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Args {
    resources: Vec<ResourceSpec>,
}

struct BalancedAllocation {
    resources: Vec<Weighed>,
}

/// Resources whose shares need no memory of their own.
const FEW: usize = 4;

pub(super) fn new(args: &PluginArgs, _: &Handle) -> Made {
    let args = args.decode_valid(|args: &Args, path| {
        let mut errors = Vec::new();
        for (index, resource) in args.resources.iter().enumerate() {
            let path = path.child("resources").index(index);
            if args.resources[..index].iter().any(|other| other.name == resource.name) {
                errors.push(FieldError::duplicate(&path.child("name"), resource.name.as_str()));
            }
            // A weight that was not given is one.
            if !matches!(resource.weight, 0 | 1) {
                errors.push(FieldError::invalid(&path.child("weight"), resource.weight, "must be 1"));
            }
        }
        errors
    })?;
    Ok(Arc::new(BalancedAllocation { resources: ResourceSpec::with_defaults(args.resources) }))
}

impl Plugin for BalancedAllocation {
    fn name(&self) -> &'static str {
        "NodeResourcesBalancedAllocation"
    }

    fn pre_score(&self) -> Option<&dyn PreScore> {
        Some(self)
    }

    fn score(&self) -> Option<&dyn Score> {
        Some(self)
    }
}

impl PreScore for BalancedAllocation {
    /// A pod that asks for nothing changes no balance.
    fn pre_score(&self, _: &mut CycleState, pod: &PodInfo, _: &Snapshot, _: &[Arc<NodeInfo>]) -> Interest {
        let asks = self.resources.iter().any(|weighed| match &weighed.resource {
            Resource::Cpu => pod.requests.milli_cpu > 0,
            Resource::Memory => pod.requests.memory > 0,
            Resource::EphemeralStorage => pod.requests.ephemeral_storage > 0,
            Resource::Other(name) => pod.requests.scalar.get(name).is_some_and(|amount| *amount > 0),
        });
        if asks { Interest::Needed } else { Interest::Skip }
    }
}

/// 100 for equal shares, less the further they lie apart.
fn balance(shares: &[f64]) -> i64 {
    let deviation = match shares {
        [] | [_] => 0.0,
        [one, other] => (one - other).abs() / 2.0,
        all => {
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            (all.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / all.len() as f64).sqrt()
        }
    };
    ((1.0 - deviation) * MAX_SCORE as f64) as i64
}

impl Score for BalancedAllocation {
    fn score(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let mut few = [[0.0; FEW]; 2];
        let mut many;
        let [with, without]: [&mut [f64]; 2] = if self.resources.len() <= FEW {
            few.each_mut().map(|shares| &mut shares[..])
        } else {
            many = [vec![0.0; self.resources.len()], vec![0.0; self.resources.len()]];
            many.each_mut().map(|shares| &mut shares[..])
        };
        let mut count = 0;
        let known = self.resources.iter().filter_map(|weighed| amounts(&weighed.resource, pod, node, true));
        for amounts in known {
            let share = |used: i64| (used as f64 / amounts.allocatable as f64).min(1.0);
            with[count] = share(amounts.used.saturating_add(amounts.wanted));
            without[count] = share(amounts.used);
            count += 1;
        }
        // As upstream: above 75 the pod makes the node more balanced, below it less.
        MAX_SCORE / 2 + (MAX_SCORE / 2 + balance(&with[..count]) - balance(&without[..count])) / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_compared() {
        for (shares, expected) in [
            (vec![], 100),
            (vec![0.3], 100),
            (vec![0.5, 0.5], 100),
            (vec![0.0, 1.0], 50),
            (vec![0.0, 0.5, 1.0], 59),
        ] {
            assert_eq!(balance(&shares), expected, "{shares:?}");
        }
    }
}
