//! `MutatingAdmissionPolicy`: changes objects.

use super::compiled::{Binding, Definition, Mutation};
use super::evaluate::{evaluate, meets_conditions};
use super::patch::{self, PatchFailure};
use super::{Policies, Session, TURN, binding_matches, is_mutable, metrics, params, unconverted};
use crate::admission::stage::{MutatingStage, Waiting};
use crate::admission::{Attributes, Parts, Reinvocation};
use crate::registry::View;
use ferrite_api::policy::{BUDGET, MATCH_CONDITIONS_BUDGET};
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

pub(in crate::admission) struct MutatingPolicies(Policies);

impl MutatingPolicies {
    pub const NAME: &str = "MutatingAdmissionPolicy";

    pub fn make(parts: &Parts<'_>) -> Result<Box<dyn MutatingStage>, String> {
        if parts.configuration.is_some() {
            return Err("policies from files are not supported".to_owned());
        }
        Ok(Box::new(Self(Policies::new("mutatingadmissionpolicies", "mutatingadmissionpolicybindings"))))
    }
}

impl MutatingStage for MutatingPolicies {
    fn concerns(&self, view: &View, attributes: &Attributes<'_>) -> bool {
        is_mutable(attributes.operation) && self.0.concern(view, attributes)
    }

    fn mutate<'a>(
        &'a self,
        view: &'a View,
        attributes: &'a Attributes<'a>,
        object: Option<&'a mut Value>,
        reinvocation: &'a mut Reinvocation,
    ) -> Waiting<'a> {
        Box::pin(async move {
            match object {
                Some(object) => dispatch(&self.0, view, attributes, object, reinvocation).await,
                None => Ok(()),
            }
        })
    }
}

/// A failure of a policy, worded as upstream words it.
struct Failure {
    message: String,
    /// True if an expression failed, false if the configuration is wrong.
    invalid: bool,
}

#[derive(Default)]
struct Failures(Vec<Failure>);

impl Failures {
    fn add(&mut self, definition: &Definition, binding: Option<&Binding>, error: &str, invalid: bool) {
        if definition.ignores_failures {
            return;
        }
        let name = &definition.name;
        let message = match binding {
            Some(binding) => {
                format!("policy '{name}' with binding '{}' denied request: {error}", binding.name)
            }
            None => format!("policy {name:?} denied request: {error}"),
        };
        self.0.push(Failure { message, invalid });
    }

    fn misconfigured(&mut self, definition: &Definition, binding: Option<&Binding>, error: &str) {
        let what = if binding.is_some() { "binding" } else { "policy" };
        self.add(definition, binding, &format!("failed to configure {what}: {error}"), false);
    }

    fn answer(self, attributes: &Attributes<'_>) -> Result<(), Status> {
        let Some(first) = self.0.first() else { return Ok(()) };
        let mut status = attributes.forbid("admission request denied by policy");
        status.message.clone_from(&first.message);
        if first.invalid {
            status.reason = "Invalid".into();
        }
        let causes: Vec<Value> = self.0.iter().map(|failure| json!({"message": failure.message})).collect();
        status.details.get_or_insert_default().insert("causes", causes.into());
        Err(status)
    }
}

/// A policy to evaluate for a binding and a parameter.
struct Invocation<'v> {
    definition: Arc<Definition>,
    binding: Arc<Binding>,
    matched: &'v Resource,
    params: Option<Arc<Value>>,
}

impl Invocation<'_> {
    /// Tells this invocation from others of the request.
    fn id(&self) -> String {
        let (namespace, name) =
            self.params.as_deref().map_or(("", ""), |params| (meta::namespace(params), meta::name(params)));
        [&self.definition.name, &self.binding.name, namespace, name].join("/")
    }
}

async fn invocations<'v>(
    policies: &Policies,
    view: &'v View,
    attributes: &Attributes<'v>,
    object: &Value,
    failures: &mut Failures,
) -> Vec<Invocation<'v>> {
    let mut found = Vec::new();
    for (definition, bindings) in policies.candidates(view, attributes) {
        let matched = match definition.matcher.resource(view, attributes, Some(object)) {
            Ok(Some(matched)) => matched,
            Ok(None) => continue,
            Err(status) => {
                failures.misconfigured(&definition, None, &status.message);
                continue;
            }
        };
        let resource = match params::resource(view, &definition) {
            Ok(resource) => resource,
            Err(error) => {
                failures.misconfigured(&definition, None, &error.to_string());
                continue;
            }
        };
        for binding in bindings {
            match binding_matches(&binding, view, attributes, Some(object)) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(status) => {
                    failures.misconfigured(&definition, Some(&binding), &status.message);
                    continue;
                }
            }
            match params::collect(view, resource, &binding, attributes.given_namespace()).await {
                Ok(params) => found.extend(params.into_iter().map(|params| Invocation {
                    definition: Arc::clone(&definition),
                    binding: Arc::clone(&binding),
                    matched,
                    params,
                })),
                Err(error) => failures.misconfigured(&definition, Some(&binding), &error.to_string()),
            }
        }
    }
    found
}

async fn dispatch(
    policies: &Policies,
    view: &View,
    attributes: &Attributes<'_>,
    object: &mut Value,
    reinvocation: &mut Reinvocation,
) -> Result<(), Status> {
    const STAGE: &str = MutatingPolicies::NAME;
    let mut failures = Failures::default();
    let invocations = invocations(policies, view, attributes, object, &mut failures).await;
    if !invocations.is_empty() {
        let session = Session::new(view, attributes);
        reinvocation.begin(STAGE, Some(object));
        let mut patched = false;
        let mut spent = 0;
        for invocation in &invocations {
            let id = invocation.id();
            let again = reinvocation.runs(STAGE, &id);
            let matched = invocation.matched;
            let versions = async {
                Ok::<_, Status>((session.as_matched(matched, object).await?, session.old(matched).await?))
            };
            let (current, old) = match versions.await {
                Ok((current, old)) => (current.into_owned(), old),
                Err(status) => {
                    failures.misconfigured(&invocation.definition, None, &unconverted(&status));
                    continue;
                }
            };
            let invoked = session.answers.settle(|| {
                let (mut changed, mut failures) = (current.clone(), Failures::default());
                let outcome =
                    invoke(&session, invocation, &mut changed, old.as_deref(), again, &mut failures);
                (outcome, changed, failures)
            });
            let (outcome, mut changed, failed) = invoked.await;
            failures.0.extend(failed.0);
            let Some(outcome) = outcome? else { continue };
            let mut differs = false;
            if outcome.patched {
                if session.converts(matched) {
                    let back = view.convert(matched, attributes.resource, &changed).await;
                    changed = back.map_err(|status| {
                        Status::internal(format!("failed to convert object: {}", status.message))
                    })?;
                }
                differs = *object != changed;
                *object = changed;
            }
            patched |= outcome.patched;
            spent += outcome.cost;
            if differs {
                reinvocation.changed(STAGE);
            }
            if invocation.definition.reinvocable {
                reinvocation.reinvocable(STAGE, &id);
            }
            if spent > TURN {
                spent = 0;
                tokio::task::yield_now().await;
            }
        }
        if patched {
            // As upstream: a patch counts as a change, whatever it did.
            reinvocation.changed(STAGE);
        }
        reinvocation.end(STAGE, Some(object));
    }
    failures.answer(attributes)
}

#[derive(Default)]
struct Invoked {
    patched: bool,
    cost: u64,
}

/// Runs the mutations of a policy in order on the object in the version that it matches. None if its conditions are not met, or it does not run in this round.
fn invoke(
    session: &Session<'_>,
    invocation: &Invocation<'_>,
    current: &mut Value,
    old: Option<&Value>,
    runs: bool,
    failures: &mut Failures,
) -> Result<Option<Invoked>, Status> {
    let Invocation { definition, binding, matched, params } = invocation;
    let namespace = session.namespace()?;
    let request = session.request(definition, matched);
    let inputs = session.inputs(definition, Some(current), old, params.as_deref(), &request);
    let operation = session.attributes.operation.name();
    match meets_conditions(definition, &inputs, MATCH_CONDITIONS_BUDGET, operation) {
        Ok(true) if runs => {}
        Ok(_) => return Ok(None),
        Err(error) => {
            failures.add(definition, Some(binding), &error, true);
            return Ok(None);
        }
    }
    let mut invoked = Invoked::default();
    for mutation in &definition.mutations {
        let started = Instant::now();
        let mut inputs = session.inputs(definition, Some(current), old, params.as_deref(), &request);
        inputs.namespace = namespace;
        let made = value_of(definition, mutation, &inputs).and_then(|(value, cost)| {
            invoked.cost += cost;
            patch::apply(mutation.patch, session.attributes, matched, current, value)
        });
        let elapsed = started.elapsed();
        let (policy, bound) = (definition.name.as_str(), binding.name.as_str());
        match made {
            Ok(made) => {
                metrics::mutated(policy, bound, None, elapsed);
                invoked.patched = true;
                *current = made;
            }
            Err(PatchFailure::Status(status)) => {
                metrics::mutated(policy, bound, Some(&status.message), elapsed);
                return Err(status);
            }
            Err(PatchFailure::Error(error)) => {
                metrics::mutated(policy, bound, Some(&error), elapsed);
                failures.add(definition, Some(binding), &error, true);
            }
        }
    }
    Ok(Some(invoked))
}

/// The patch that a mutation's expression makes, and its cost.
fn value_of(
    definition: &Definition,
    mutation: &Mutation,
    inputs: &super::evaluate::Inputs<'_>,
) -> Result<(Value, u64), PatchFailure> {
    if let Err(error) = &mutation.expression.program {
        return Err(PatchFailure::Error(error.to_string()));
    }
    let make = |value: &ferrite_cel::Value<'_>| patch::of_value(mutation.patch, value);
    let (outcomes, left) = evaluate(definition, &[Some(&mutation.expression)], inputs, BUDGET, make)
        .map_err(|stop| PatchFailure::Error(stop.to_string()))?;
    match outcomes.into_iter().flatten().next().map(|evaluated| evaluated.outcome) {
        Some(Ok(patch)) => Ok((patch, BUDGET - left)),
        Some(Err(error)) => Err(PatchFailure::Error(error)),
        None => Err(PatchFailure::Error("unexpected internal error compiling expression".to_owned())),
    }
}
