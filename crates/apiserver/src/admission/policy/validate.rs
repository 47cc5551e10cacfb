//! `ValidatingAdmissionPolicy`: refuses, warns or notes.

use super::compiled::{Action, Binding, Definition, Expression, Validation};
use super::evaluate::{Evaluated, Inputs, Stop, evaluate, meets_conditions};
use super::{Policies, Session, TURN, binding_matches, metrics, params, unconverted};
use crate::admission::stage::{ValidatingStage, Waiting};
use crate::admission::{Attributes, Parts};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::policy::{BUDGET, MATCH_CONDITIONS_BUDGET};
use ferrite_api::resource::Resource;
use ferrite_cel::Value as Cel;
use ferrite_json::{Value, json};
use std::time::Duration;

/// Bytes of a message that an expression makes. A longer one is not shown.
const MAX_MESSAGE: usize = 5 * 1024;
/// Bytes of an audit annotation.
const MAX_ANNOTATION: usize = 10 * 1024;
const FAILURE_ANNOTATION: &str = "validation.policy.admission.k8s.io/validation_failure";

pub(in crate::admission) struct ValidatingPolicies(Policies);

impl ValidatingPolicies {
    pub const NAME: &str = "ValidatingAdmissionPolicy";

    pub fn make(parts: &Parts<'_>) -> Result<Box<dyn ValidatingStage>, String> {
        if parts.configuration.is_some() {
            return Err("policies from files are not supported".to_owned());
        }
        Ok(Box::new(Self(Policies::new("validatingadmissionpolicies", "validatingadmissionpolicybindings"))))
    }
}

impl ValidatingStage for ValidatingPolicies {
    fn concerns(&self, view: &View, attributes: &Attributes<'_>) -> bool {
        self.0.concern(view, attributes)
    }

    fn validate<'a>(
        &'a self,
        view: &'a View,
        attributes: &'a Attributes<'a>,
        object: Option<&'a Value>,
    ) -> Waiting<'a> {
        Box::pin(dispatch(&self.0, view, attributes, object))
    }
}

/// The result of a validation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Decision {
    /// True if the request is admitted.
    admits: bool,
    /// The reason of a failure. None of a validation that succeeded.
    message: Option<String>,
    /// Empty for the usual one.
    reason: String,
    elapsed: Duration,
}

/// The result of an audit annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Annotated {
    Nothing,
    Value(String),
    Error(String),
}

#[derive(Debug, Default)]
struct Verdict {
    decisions: Vec<Decision>,
    annotations: Vec<(String, Annotated)>,
    /// The cost of the evaluation, roughly.
    cost: u64,
}

impl Verdict {
    fn failed(definition: &Definition, message: String) -> Self {
        let decision = Decision {
            admits: definition.ignores_failures,
            message: Some(message),
            reason: String::new(),
            elapsed: Duration::ZERO,
        };
        Self { decisions: vec![decision], ..Self::default() }
    }
}

/// Evaluates a policy.
fn decide(
    definition: &Definition,
    inputs: &Inputs<'_>,
    namespace: Option<&Value>,
    operation: &str,
) -> Verdict {
    match meets_conditions(definition, inputs, MATCH_CONDITIONS_BUDGET, operation) {
        Ok(true) => {}
        Ok(false) => return Verdict::default(),
        Err(message) => return Verdict::failed(definition, message),
    }
    let inputs = Inputs { namespace, ..*inputs };
    let validations = &definition.validations;
    let expressions: Vec<Option<&Expression>> = validations.iter().map(|v| Some(&v.expression)).collect();
    let is_true = |value: &Cel<'_>| Ok(value.as_bool() == Some(true));
    let (outcomes, left) = match evaluate(definition, &expressions, &inputs, BUDGET, is_true) {
        Ok(evaluated) => evaluated,
        Err(stop) => return Verdict::failed(definition, stop.to_string()),
    };
    let messages: Vec<Option<&Expression>> =
        validations.iter().map(|v| v.message_expression.as_ref()).collect();
    let unauthorized = Inputs { authorizer: None, ..inputs };
    let text = |value: &Cel<'_>| Ok(value.as_str().map(str::to_owned));
    let (mut messages, left, stopped) = match messages.iter().all(Option::is_none) {
        true => (Vec::new(), left, None),
        false => match evaluate(definition, &messages, &unauthorized, left, text) {
            Ok((messages, left)) => (messages, left, None),
            Err(stop) => (Vec::new(), 0, Some(stop)),
        },
    };
    let decisions = validations.iter().zip(outcomes).enumerate().map(|(index, (validation, outcome))| {
        let message = messages.get_mut(index).and_then(Option::take);
        decision(definition, validation, outcome, message, stopped)
    });
    let decisions = decisions.collect();
    let expressions: Vec<Option<&Expression>> =
        definition.annotations.iter().map(|a| Some(&a.expression)).collect();
    let evaluated = match expressions.is_empty() {
        true => Ok((Vec::new(), BUDGET)),
        // As upstream: without an authorizer, and with a budget of their own.
        false => evaluate(definition, &expressions, &unauthorized, BUDGET, text),
    };
    let (values, _) = match evaluated {
        Ok(evaluated) => evaluated,
        Err(stop) => return Verdict::failed(definition, stop.to_string()),
    };
    let annotations = definition.annotations.iter().zip(values).map(|(annotation, value)| {
        let annotated = match value.map(|value| value.outcome) {
            Some(Ok(Some(text))) if !text.trim().is_empty() => Annotated::Value(text.trim().to_owned()),
            None | Some(Ok(_)) => Annotated::Nothing,
            Some(Err(_)) if definition.ignores_failures => Annotated::Nothing,
            Some(Err(error)) => Annotated::Error(error),
        };
        (annotation.key.clone(), annotated)
    });
    Verdict { decisions, annotations: annotations.collect(), cost: BUDGET - left }
}

fn decision(
    definition: &Definition,
    validation: &Validation,
    evaluated: Option<Evaluated<bool>>,
    message: Option<Evaluated<Option<String>>>,
    stopped: Option<Stop>,
) -> Decision {
    let elapsed = evaluated.as_ref().map_or(Duration::ZERO, |evaluated| evaluated.elapsed);
    let error = |message: String| Decision {
        admits: definition.ignores_failures,
        message: Some(message),
        reason: String::new(),
        elapsed,
    };
    match (evaluated.map(|evaluated| evaluated.outcome), stopped) {
        (Some(Err(message)), _) => error(message),
        (_, Some(stop)) => error(format!("failed messageExpression: {stop}")),
        (Some(Ok(true)) | None, None) => {
            Decision { admits: true, message: None, reason: String::new(), elapsed }
        }
        (Some(Ok(false)), None) => {
            let made = message.and_then(|message| message.outcome.ok().flatten());
            let made = made
                .as_deref()
                .map(str::trim)
                .filter(|text| text.len() <= MAX_MESSAGE && !text.contains('\n'));
            let given = validation.message.trim();
            let message = match (made.filter(|text| !text.is_empty()), given) {
                (Some(made), _) => made.to_owned(),
                (None, "") => format!("failed expression: {}", validation.expression.source.trim()),
                (None, given) => given.to_owned(),
            };
            Decision { admits: false, message: Some(message), reason: validation.reason.clone(), elapsed }
        }
    }
}

/// The first refusal: the client sees it alone.
#[derive(Default)]
struct Refusal(Option<(String, String)>);

impl Refusal {
    fn add(&mut self, definition: &Definition, binding: Option<&Binding>, message: &str, reason: &str) {
        if self.0.is_some() {
            return;
        }
        let name = &definition.name;
        let message = match binding {
            Some(binding) => format!(
                "ValidatingAdmissionPolicy '{name}' with binding '{}' denied request: {message}",
                binding.name
            ),
            None => format!("ValidatingAdmissionPolicy '{name}' denied request: {message}"),
        };
        self.0 = Some((message, reason.to_owned()));
    }

    /// Adds a failure that is not an expression's.
    fn misconfigured(&mut self, definition: &Definition, binding: Option<&Binding>, error: &str) {
        if definition.ignores_failures {
            return;
        }
        let what = if binding.is_some() { "binding" } else { "policy" };
        self.add(definition, binding, &format!("failed to configure {what}: {error}"), "");
    }

    fn answer(self, attributes: &Attributes<'_>) -> Result<(), Status> {
        let Some((message, reason)) = self.0 else { return Ok(()) };
        let mut status = attributes.forbid(&message);
        let (code, reason) = match reason.as_str() {
            "Forbidden" => (403, "Forbidden"),
            "Unauthorized" => (401, "Unauthorized"),
            "RequestEntityTooLarge" => (413, "RequestEntityTooLarge"),
            _ => (422, "Invalid"),
        };
        (status.code, status.reason) = (code, reason.into());
        let details = status.details.get_or_insert_default();
        details.insert("causes", json!([{"message": message}]));
        Err(status)
    }
}

async fn dispatch(
    policies: &Policies,
    view: &View,
    attributes: &Attributes<'_>,
    object: Option<&Value>,
) -> Result<(), Status> {
    let session = Session::new(view, attributes);
    let mut refusal = Refusal::default();
    let mut spent = 0;
    for (definition, bindings) in policies.candidates(view, attributes) {
        let matched = match definition.matcher.resource(view, attributes, object) {
            Ok(Some(matched)) => matched,
            Ok(None) => continue,
            Err(status) => {
                refusal.misconfigured(&definition, None, &status.message);
                continue;
            }
        };
        let resource = match params::resource(view, &definition) {
            Ok(resource) => resource,
            Err(error) => {
                refusal.misconfigured(&definition, None, &error.to_string());
                continue;
            }
        };
        let mut policy = None;
        let mut notes = Notes::default();
        for binding in &bindings {
            match binding_matches(binding, view, attributes, object) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(status) => {
                    refusal.misconfigured(&definition, Some(binding), &status.message);
                    continue;
                }
            }
            let found = match params::collect(view, resource, binding, attributes.given_namespace()).await {
                Ok(found) => found,
                Err(error) => {
                    refusal.misconfigured(&definition, Some(binding), &error.to_string());
                    continue;
                }
            };
            if policy.is_none() && !found.is_empty() {
                match Matched::new(&session, &definition, matched, object).await {
                    Ok(made) => policy = Some(made),
                    Err(status) => {
                        refusal.misconfigured(&definition, Some(binding), &unconverted(&status));
                        continue;
                    }
                }
            }
            let Some(policy) = &policy else { continue };
            for params in &found {
                let verdict = session.answers.settle(|| policy.verdict(params.as_deref())).await?;
                spent += verdict.cost;
                act(attributes, &definition, binding, verdict, &mut refusal, &mut notes);
                if spent > TURN {
                    // Expensive policies must not keep others from the thread, nor outlive their request.
                    spent = 0;
                    tokio::task::yield_now().await;
                }
            }
        }
        notes.publish(&definition, attributes);
    }
    refusal.answer(attributes)
}

/// A policy that matches a request, and the values that its expressions read.
struct Matched<'a> {
    session: &'a Session<'a>,
    definition: &'a Definition,
    object: Option<std::borrow::Cow<'a, Value>>,
    old: Option<std::borrow::Cow<'a, Value>>,
    request: Value,
}

impl<'a> Matched<'a> {
    /// Fails if the request's objects cannot be converted to the version that the policy matches.
    async fn new(
        session: &'a Session<'a>,
        definition: &'a Definition,
        matched: &Resource,
        object: Option<&'a Value>,
    ) -> Result<Self, Status> {
        let object = match object {
            Some(object) => Some(session.as_matched(matched, object).await?),
            None => None,
        };
        let old = session.old(matched).await?;
        Ok(Self { session, definition, object, old, request: session.request(definition, matched) })
    }

    fn verdict(&self, params: Option<&Value>) -> Result<Verdict, Status> {
        let namespace = self.session.namespace()?;
        let inputs = self.session.inputs(
            self.definition,
            self.object.as_deref(),
            self.old.as_deref(),
            params,
            &self.request,
        );
        Ok(decide(self.definition, &inputs, namespace, self.session.attributes.operation.name()))
    }
}

/// Takes the binding's action for a verdict.
fn act(
    attributes: &Attributes<'_>,
    definition: &Definition,
    binding: &Binding,
    verdict: Verdict,
    refusal: &mut Refusal,
    notes: &mut Notes,
) {
    let (policy, bound) = (definition.name.as_str(), binding.name.as_str());
    for (index, decision) in verdict.decisions.iter().enumerate() {
        let Some(message) = &decision.message else { continue };
        if decision.admits {
            metrics::validated(policy, bound, message, "allow", decision.elapsed);
            continue;
        }
        for action in &binding.actions {
            match action {
                Action::Deny => refusal.add(definition, Some(binding), message, &decision.reason),
                Action::Warn => attributes.warn(format!(
                    "Validation failed for ValidatingAdmissionPolicy '{policy}' with binding '{bound}': {message}"
                )),
                Action::Audit => annotate_failure(attributes, binding, index, message),
            }
            let action = action.name().to_lowercase();
            metrics::validated(policy, bound, message, &action, decision.elapsed);
        }
    }
    for (key, annotated) in verdict.annotations {
        match annotated {
            Annotated::Nothing => {}
            Annotated::Value(value) => notes.add(key, value),
            Annotated::Error(error) => {
                refusal.add(definition, Some(binding), &error, "");
                metrics::validated(policy, bound, &error, "deny", Duration::ZERO);
            }
        }
    }
}

fn annotate_failure(attributes: &Attributes<'_>, binding: &Binding, index: usize, message: &str) {
    let actions: Vec<&str> = binding.actions.iter().map(|action| action.name()).collect();
    let failures = json!([{
        "message": message,
        "policy": binding.policy,
        "binding": binding.name,
        "expressionIndex": index,
        "validationActions": actions,
    }]);
    attributes.annotate(FAILURE_ANNOTATION, failures.to_string());
}

/// The audit annotations of a policy: each key with the different values that its bindings gave.
#[derive(Default)]
struct Notes(Vec<(String, Vec<String>)>);

impl Notes {
    fn add(&mut self, key: String, mut value: String) {
        if value.len() > MAX_ANNOTATION {
            let end = (0..=MAX_ANNOTATION).rev().find(|end| value.is_char_boundary(*end)).unwrap_or(0);
            value.truncate(end);
        }
        match self.0.iter_mut().find(|(known, _)| *known == key) {
            Some((_, values)) if values.contains(&value) => {}
            Some((_, values)) => values.push(value),
            None => self.0.push((key, vec![value])),
        }
    }

    fn publish(self, definition: &Definition, attributes: &Attributes<'_>) {
        for (key, values) in self.0 {
            attributes.annotate(format!("{}/{key}", definition.name), values.join(", "));
        }
    }
}
