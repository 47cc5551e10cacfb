//! `matchConditions` of webhooks.

use crate::admission::times::{compilation, evaluation};
use crate::admission::{Attributes, authorizer, expressions};
use crate::auth::Answers;
use crate::registry::View;
use ferrite_api::policy::{Compiler, ExpressionError, MATCH_CONDITIONS_BUDGET, PER_CALL_LIMIT, Use};
use ferrite_api::resource::Resource;
use ferrite_cel::{Activation, Limits, Program, Value as Cel};
use ferrite_json::Value;
use std::sync::Arc;

/// One condition, compiled once.
struct Condition {
    source: String,
    program: Result<Program, ExpressionError>,
}

/// All conditions of a webhook.
#[derive(Default)]
pub(super) struct Conditions(Vec<Condition>);

/// Tells if the webhook is called.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Met {
    Yes,
    No,
    /// The reasons why nobody knows.
    Failed(String),
}

impl Conditions {
    pub fn compile(conditions: &Value) -> Self {
        let mut compiler = Compiler::plain(false);
        let list = conditions.as_array().into_iter().flatten();
        let mut compile = |condition: &Value| {
            let source = condition["expression"].as_str().unwrap_or_default().to_owned();
            let program = compilation(|| compiler.compile(Use::MatchCondition, &source));
            Condition { program, source }
        };
        Self(list.map(&mut compile).collect())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A condition that is not met counts more than errors of others.
    pub fn check(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        matched: &Resource,
        object: Option<&Value>,
        old: Option<&Value>,
        answers: &Arc<Answers>,
    ) -> Met {
        let request = Value::Object(expressions::request(attributes, matched));
        let (authorizer, resource) = authorizer::authorizer(view, attributes, answers);
        let mut activation = Activation::new();
        let json = |value: Option<&'_ Value>| match value {
            Some(value) => Cel::from_json(value, None).map(Cel::into_owned),
            None => Ok(Cel::Null),
        };
        let uses = |name: &str| {
            self.0.iter().any(|condition| condition.program.as_ref().is_ok_and(|p| p.uses_variable(name)))
        };
        // Copied only where it is read.
        for (name, value) in [("object", object), ("oldObject", old), ("request", Some(&request))] {
            if uses(name) {
                activation.set(name, json(value));
            }
        }
        activation.set("authorizer", Ok(authorizer));
        activation.set("authorizer.requestResource", Ok(resource));
        let mut left = MATCH_CONDITIONS_BUDGET;
        let mut errors: Vec<String> = Vec::new();
        for condition in &self.0 {
            let program = match &condition.program {
                Ok(program) => program,
                Err(error) => {
                    errors.push(format!("compilation error: {error}"));
                    continue;
                }
            };
            let (evaluation, _) = evaluation(|| program.evaluate(&activation, Limits::cost(PER_CALL_LIMIT)));
            let Some(rest) = left.checked_sub(evaluation.cost) else {
                let why = "validation failed due to running out of cost budget, no further validation rules will be run";
                return Met::Failed(why.to_owned());
            };
            left = rest;
            match evaluation.result {
                Ok(value) if value.as_bool() == Some(true) => {}
                Ok(_) => return Met::No,
                Err(error) => {
                    errors.push(format!("expression '{}' resulted in error: {error}", condition.source));
                }
            }
        }
        errors.dedup();
        match errors.as_slice() {
            [] => Met::Yes,
            [only] => Met::Failed(only.clone()),
            many => Met::Failed(format!("[{}]", many.join(", "))),
        }
    }
}
