//! Evaluation of a policy's expressions with upstream's budgets and errors.

use super::compiled::{Definition, Expression, Variable};
use crate::admission::times::{conditions_took, evaluation};
use ferrite_api::policy::PER_CALL_LIMIT;
use ferrite_cel::{Activation, EvalError, LazyObject, Limits, Value as Cel, with_stack};
use ferrite_json::Value;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

/// The values that expressions read.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// None for a delete.
    pub object: Option<&'a Value>,
    pub old: Option<&'a Value>,
    pub params: Option<&'a Value>,
    pub request: &'a Value,
    pub namespace: Option<&'a Value>,
    /// The values of `authorizer` and `authorizer.requestResource`; none where they are not available.
    pub authorizer: Option<&'a (Cel<'static>, Cel<'static>)>,
}

impl<'a> Inputs<'a> {
    fn activation(&self) -> Activation<'a> {
        let mut activation = Activation::new();
        let optional = |value: Option<&'a Value>| match value {
            Some(value) => Cel::from_json(value, None),
            None => Ok(Cel::Null),
        };
        activation.set("object", optional(self.object));
        activation.set("oldObject", optional(self.old));
        activation.set("request", optional(Some(self.request)));
        activation.set("namespaceObject", optional(self.namespace));
        activation.set("params", optional(self.params));
        if let Some((authorizer, resource)) = self.authorizer {
            activation.set("authorizer", Ok(authorizer.clone()));
            activation.set("authorizer.requestResource", Ok(resource.clone()));
        }
        activation
    }
}

/// An error that ends the evaluation of all expressions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum Stop {
    #[error("validation failed due to running out of cost budget, no further validation rules will be run")]
    OutOfBudget,
    #[error("no thread is left for deeply nested expressions")]
    NoThread,
}

/// The outcome of one expression: the converted value, or the error.
pub(super) type Outcome<T> = Result<T, String>;

/// The outcome of one expression, and how long it took.
pub(super) struct Evaluated<T> {
    pub outcome: Outcome<T>,
    pub elapsed: Duration,
}

/// The outcomes of expressions in their order, and the part of the budget that is left.
type Outcomes<T> = (Vec<Option<Evaluated<T>>>, u64);

/// Evaluates expressions in order, which share their variables. Places without an expression have no
/// outcome. Returns the outcomes, and the part of the budget that is left.
pub(super) fn evaluate<T: Send>(
    definition: &Definition,
    expressions: &[Option<&Expression>],
    inputs: &Inputs<'_>,
    budget: u64,
    make: impl Fn(&Cel<'_>) -> Outcome<T> + Sync,
) -> Result<Outcomes<T>, Stop> {
    let work = || evaluate_here(definition, expressions, inputs, budget, &make);
    with_stack(definition.levels, work).unwrap_or(Err(Stop::NoThread))
}

fn evaluate_here<T>(
    definition: &Definition,
    expressions: &[Option<&Expression>],
    inputs: &Inputs<'_>,
    budget: u64,
    make: &dyn Fn(&Cel<'_>) -> Outcome<T>,
) -> Result<Outcomes<T>, Stop> {
    let variables = Variables::new(&definition.variables);
    let mut activation = inputs.activation();
    activation.set("variables", Ok(Cel::Lazy(&variables)));
    let activation = variables.activation.get_or_init(|| activation);
    let mut left = budget;
    let mut outcomes = Vec::with_capacity(expressions.len());
    for expression in expressions {
        let Some(expression) = expression else {
            outcomes.push(None);
            continue;
        };
        let program = match &expression.program {
            Ok(program) => program,
            Err(error) => {
                let outcome = Err(format!("compilation error: {error}"));
                outcomes.push(Some(Evaluated { outcome, elapsed: Duration::ZERO }));
                continue;
            }
        };
        let (evaluation, elapsed) = evaluation(|| program.evaluate(activation, Limits::cost(PER_CALL_LIMIT)));
        for cost in [variables.cost.swap(0, Ordering::Relaxed), evaluation.cost] {
            left = left.checked_sub(cost).ok_or(Stop::OutOfBudget)?;
        }
        let outcome = match &evaluation.result {
            Ok(value) => make(value),
            Err(error) => Err(format!("expression '{}' resulted in error: {error}", expression.source)),
        };
        outcomes.push(Some(Evaluated { outcome, elapsed }));
    }
    Ok((outcomes, left))
}

/// The variables of a policy: each is computed when it is first read.
struct Variables<'a> {
    definitions: &'a [Variable],
    values: Vec<OnceLock<Result<Cel<'a>, EvalError>>>,
    /// The values that the variables themselves read.
    activation: OnceLock<Activation<'a>>,
    /// Number of visible variables: a variable sees only those before it.
    visible: AtomicUsize,
    /// The cost of those that were computed since it was last asked for.
    cost: AtomicU64,
}

impl<'a> Variables<'a> {
    fn new(definitions: &'a [Variable]) -> Self {
        Self {
            definitions,
            values: definitions.iter().map(|_| OnceLock::new()).collect(),
            activation: OnceLock::new(),
            visible: AtomicUsize::new(definitions.len()),
            cost: AtomicU64::new(0),
        }
    }

    fn compute(&self, index: usize) -> Result<Cel<'a>, EvalError> {
        let variable = &self.definitions[index];
        let program = variable.expression.program.as_ref().map_err(|error| {
            EvalError::new(format!("composited variable {:?} fails to compile: {error}", variable.name))
        })?;
        let Some(activation) = self.activation.get() else {
            return Err(EvalError::new("the variables have no values to read"));
        };
        let visible = self.visible.swap(index, Ordering::Relaxed);
        let (evaluation, _) = evaluation(|| program.evaluate(activation, Limits::cost(PER_CALL_LIMIT)));
        self.visible.store(visible, Ordering::Relaxed);
        self.cost.fetch_add(evaluation.cost, Ordering::Relaxed);
        evaluation.result.map_err(|error| {
            EvalError::new(format!("composited variable {:?} fails to evaluate: {error}", variable.name))
        })
    }
}

impl LazyObject for Variables<'_> {
    fn get(&self, field: &str) -> Option<Result<Cel<'_>, EvalError>> {
        let visible = self.visible.load(Ordering::Relaxed);
        let index = self.definitions[..visible].iter().rposition(|variable| variable.name == field)?;
        Some(self.values[index].get_or_init(|| self.compute(index)).clone())
    }
}

/// Returns true if the match conditions of a policy are met, or the error of a condition. An unmet
/// condition takes precedence over errors of others.
pub(super) fn meets_conditions(
    definition: &Definition,
    inputs: &Inputs<'_>,
    budget: u64,
    operation: &str,
) -> Result<bool, String> {
    if definition.conditions.is_empty() {
        return Ok(true);
    }
    let started = Instant::now();
    let conditions: Vec<Option<&Expression>> = definition.conditions.iter().map(Some).collect();
    let evaluated =
        evaluate(definition, &conditions, inputs, budget, |value| Ok(value.as_bool() == Some(true)));
    // As upstream: policies that change objects say so, too.
    conditions_took("policy", &definition.name, operation, "validate", started.elapsed());
    let outcomes = match evaluated {
        Ok((outcomes, _)) => outcomes,
        // As upstream: nothing is left undecided where failures are ignored.
        Err(_) if definition.ignores_failures => return Ok(false),
        Err(stop) => return Err(stop.to_string()),
    };
    let mut errors: Vec<String> = Vec::new();
    for evaluated in outcomes.into_iter().flatten() {
        match evaluated.outcome {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) if !errors.contains(&error) => errors.push(error),
            Err(_) => {}
        }
    }
    match errors.as_slice() {
        [] => Ok(true),
        _ if definition.ignores_failures => Ok(false),
        [only] => Err(only.clone()),
        many => Err(format!("[{}]", many.join(", "))),
    }
}
