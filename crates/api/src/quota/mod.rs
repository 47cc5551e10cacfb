//! Quotas: the usage of an object, the quotas that it counts in, and the rest of a quota.
//!
//! One row per resource with rules of its own in `evaluators.rs`; everything else is counted.

pub mod amounts;
mod evaluators;
mod limited;
mod scopes;
#[cfg(test)]
mod tests;

pub use evaluators::{Evaluator, evaluator};
pub use limited::Limited;

use amounts::{Amounts, amounts};
use ferrite_json::{Text, Value};
use scopes::Scope;
use std::collections::BTreeSet;

/// Why a request does not fit a quota.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    #[error("failed quota: {quota}: must specify {missing}")]
    Unspecified { quota: String, missing: String },
    #[error("status unknown for quota: {quota}, resources: {resources}")]
    NotCounted { quota: String, resources: String },
    #[error("quota usage is negative for resource(s): {0}")]
    Negative(String),
    #[error("exceeded quota: {quota}, requested: {requested}, used: {used}, limited: {limited}")]
    Exceeded { quota: String, requested: String, used: String, limited: String },
    #[error("insufficient quota to consume: {0}")]
    Uncovered(String),
    #[error("insufficient quota to match these scopes: [{0}]")]
    UncoveredScopes(String),
}

/// A quota that a written object counts in.
struct Interesting {
    /// Its place in the list of quotas.
    index: usize,
    name: String,
    hard: Amounts,
    used: Amounts,
    /// True if the object already counted in it before an update.
    counted_before: bool,
}

/// Counts an object that is written against the quotas of its namespace, which have to cover `limited`
/// resources. Returns the new usage of the quotas that change, by their place in `quotas`.
pub fn charge(
    evaluator: &Evaluator,
    limited: &[Limited],
    quotas: &[Value],
    object: &Value,
    old: Option<&Value>,
) -> Result<Vec<(usize, Amounts)>, QuotaError> {
    let mut interesting = Vec::new();
    let mut covered = BTreeSet::new();
    for (index, quota) in quotas.iter().enumerate() {
        let hard = amounts(&quota["status"]["hard"]);
        if !evaluator.matches(quota, &hard, object) {
            continue;
        }
        let name = crate::meta::name(quota).to_owned();
        let tracked: Vec<&str> = hard.keys().map(Text::as_str).filter(|n| evaluator.tracks(n)).collect();
        if let Some(missing) = evaluator.missing(&tracked, object) {
            return Err(QuotaError::Unspecified { quota: name, missing });
        }
        let used = amounts(&quota["status"]["used"]);
        if tracked.iter().any(|resource| !used.contains_key(*resource)) {
            return Err(QuotaError::NotCounted { quota: name, resources: tracked.join(",") });
        }
        covered.extend(tracked.into_iter().map(str::to_owned));
        let counted_before = old.is_some_and(|old| evaluator.matches(quota, &hard, old));
        interesting.push(Interesting { index, name, hard, used, counted_before });
    }
    let whole = evaluator.usage(object);
    let mut delta = whole.clone();
    let own = limited.iter().filter(|limited| evaluator.is_limited_by(limited));
    let uncovered: BTreeSet<String> = own
        .flat_map(|limited| limited.names(&delta))
        .filter(|name| !covered.contains(*name))
        .map(str::to_owned)
        .collect();
    let negative: Vec<&str> =
        delta.iter().filter(|(_, amount)| amount.is_negative()).map(|(name, _)| name.as_str()).collect();
    if !negative.is_empty() {
        return Err(QuotaError::Negative(negative.join(",")));
    }
    if let Some(old) = old {
        for (name, amount) in evaluator.usage(old) {
            let entry = delta.entry(name).or_insert(crate::quantity::Quantity::ZERO);
            *entry = *entry - amount;
        }
    }
    delta.retain(|_, amount| !amount.is_zero());
    let comes_into_scope = old.is_some() && interesting.iter().any(|quota| !quota.counted_before);
    if delta.is_empty() && !comes_into_scope {
        return Ok(Vec::new());
    }
    if !uncovered.is_empty() {
        return Err(QuotaError::Uncovered(uncovered.into_iter().collect::<Vec<_>>().join(",")));
    }
    let scopes = uncovered_scopes(evaluator, limited, quotas, object);
    if !scopes.is_empty() {
        return Err(QuotaError::UncoveredScopes(scopes.join(" ")));
    }
    let mut changed = Vec::new();
    for Interesting { index, name: quota, hard, used, counted_before } in interesting {
        // An object that an update brings into a quota's scope counts whole, as one that is created.
        let mut requested = if counted_before || old.is_none() { delta.clone() } else { whole.clone() };
        requested.retain(|name, amount| hard.contains_key(name) && !amount.is_zero());
        if requested.is_empty() {
            continue;
        }
        let mut sum = used.clone();
        amounts::add(&mut sum, &requested);
        // To use less is allowed even where too much is used.
        let grows = |name: &Text| requested.get(name).is_some_and(|amount| !amount.is_negative());
        let exceeded = |name: &Text| grows(name) && sum.get(name) > hard.get(name);
        if requested.keys().any(exceeded) {
            let print = |list: &Amounts| {
                let shown = requested.keys().filter(|name| exceeded(name));
                let pairs: Vec<String> =
                    shown.filter_map(|name| Some(format!("{name}={}", list.get(name)?))).collect();
                pairs.join(",")
            };
            let (requested, used, limited) = (print(&requested), print(&used), print(&hard));
            return Err(QuotaError::Exceeded { quota, requested, used, limited });
        }
        changed.push((index, sum));
    }
    Ok(changed)
}

/// The scopes of `limited` that the object is in, and that no quota asks for which it is in.
fn uncovered_scopes(
    evaluator: &Evaluator,
    limited: &[Limited],
    quotas: &[Value],
    object: &Value,
) -> Vec<String> {
    let is_in = |scope: &&Scope| evaluator.is_in(scope, object);
    let wanted: Vec<&Scope> = limited.iter().flat_map(Limited::scopes).filter(is_in).collect();
    if wanted.is_empty() {
        return Vec::new();
    }
    let asked: Vec<Scope> = quotas.iter().flat_map(scopes::of).filter(|scope| is_in(&scope)).collect();
    let uncovered = wanted.into_iter().filter(|scope| !asked.iter().any(|other| scope.is_like(other)));
    uncovered.map(ToString::to_string).collect()
}

/// The objects' usage of a quota, counted anew: zero for resources that none of them uses.
pub fn recount<'a>(
    quota: &Value,
    hard: &Amounts,
    objects: impl IntoIterator<Item = (&'a Evaluator, &'a Value)>,
) -> Amounts {
    let mut used: Amounts = hard.keys().map(|name| (name.clone(), crate::quantity::Quantity::ZERO)).collect();
    for (evaluator, object) in objects {
        if evaluator.matches(quota, hard, object) {
            let mut own = evaluator.usage(object);
            own.retain(|name, _| hard.contains_key(name));
            amounts::add(&mut used, &own);
        }
    }
    used
}
