//! Running rules against an object.

use ferrite_json::Value as Json;
use std::collections::HashMap;

use super::compile::CompiledRule;
use super::error::{BadValue, FieldError, FieldErrorKind};
use super::{RuleNode, ValidationRules};
use crate::error::EvalError;
use crate::eval::Limits;
use crate::program::Activation;
use crate::schema::{Kind, ListType, Schema};
use crate::value::Value;

/// Bytes that a message may have.
const MAX_MESSAGE: usize = 5 * 1024;
const OUT_OF_BUDGET: &str =
    "validation failed due to running out of cost budget, no further validation rules will be run";

/// An object to validate.
#[derive(Debug, Clone, Copy)]
pub struct RuleInput<'a> {
    /// The path of the object, with which the fields of errors begin.
    pub path: &'a str,
    pub object: &'a Json,
    /// The object before the change.
    pub old_object: Option<&'a Json>,
    /// Errors at values that did not change become warnings.
    pub ratcheting: bool,
    /// Ends the validation when it is set.
    pub interrupt: Option<&'a std::sync::atomic::AtomicBool>,
}

impl<'a> RuleInput<'a> {
    pub fn new(path: &'a str, object: &'a Json) -> Self {
        Self { path, object, old_object: None, ratcheting: false, interrupt: None }
    }
}

/// The outcome of a validation.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    pub errors: Vec<FieldError>,
    pub warnings: Vec<FieldError>,
    /// The rest of the budget; negative if it did not suffice.
    pub remaining_budget: i64,
    /// Problems of messages, for the log.
    pub message_problems: Vec<String>,
}

/// A value before and after the change, for deciding whether it changed.
#[derive(Debug, Clone, Copy)]
struct Change<'a> {
    new: &'a Json,
    old: Option<&'a Json>,
}

impl Change<'_> {
    fn is_none(&self) -> bool {
        self.old == Some(self.new)
    }
}

/// The change at a node and at the nearest node above it that has one.
#[derive(Debug, Clone, Copy, Default)]
struct Changes<'a> {
    here: Option<Change<'a>>,
    above: Option<Change<'a>>,
}

impl<'a> Changes<'a> {
    fn unchanged(&self) -> bool {
        self.here.or(self.above).is_some_and(|change| change.is_none())
    }

    fn key(self, name: &str) -> Self {
        let Some(here) = self.here else { return self };
        if self.above.is_none() && matches!(name, "apiVersion" | "kind") {
            return Self::default();
        }
        let below = here.new.get(name).map(|new| Change { new, old: here.old.and_then(|old| old.get(name)) });
        Self { here: below, above: Some(here) }
    }

    fn item(self, new: &'a Json, old: Option<&'a Json>, correlated: bool) -> Self {
        let Some(here) = self.here else { return self };
        Self { here: correlated.then_some(Change { new, old }), above: Some(here) }
    }
}

pub(super) fn validate(rules: &ValidationRules, input: RuleInput<'_>, budget: i64) -> Outcome {
    let mut run = Run { input, outcome: Outcome { remaining_budget: budget, ..Outcome::default() } };
    let change = input.old_object.map(|old| Change { new: input.object, old: Some(old) });
    let changes = Changes { here: change.filter(|_| input.ratcheting), above: None };
    let schema = rules.root_schema.as_ref().unwrap_or(&rules.schema);
    let node = Place { node: &rules.root, schema: &rules.schema, self_schema: schema };
    run.node(node, input.path, input.object, input.old_object, changes);
    run.outcome
}

/// A node of the rules and of the schema.
#[derive(Clone, Copy)]
struct Place<'r> {
    node: &'r RuleNode,
    schema: &'r Schema,
    /// The schema of `self`, which at the root of a resource has more fields.
    self_schema: &'r Schema,
}

struct Run<'a> {
    input: RuleInput<'a>,
    outcome: Outcome,
}

/// The items of a list by the values of their keys. A search through the list for each item would take time that no
/// budget counts.
struct ByKey<'a> {
    keys: &'a [String],
    items: HashMap<Vec<Option<String>>, &'a Json>,
}

impl<'a> ByKey<'a> {
    fn new(keys: &'a [String], items: &'a [Json]) -> Self {
        let mut by_key = Self { keys, items: HashMap::with_capacity(items.len()) };
        for item in items {
            let values = by_key.values(item);
            // The first of several items with the same keys counts.
            by_key.items.entry(values).or_insert(item);
        }
        by_key
    }

    fn values(&self, item: &Json) -> Vec<Option<String>> {
        self.keys.iter().map(|key| item.get(key.as_str()).map(text)).collect()
    }

    fn get(&self, item: &Json) -> Option<&'a Json> {
        if self.items.is_empty() {
            return None;
        }
        self.items.get(&self.values(item)).copied()
    }
}

/// A text that is the same for equal values: an integer may be written as a fraction.
fn text(value: &Json) -> String {
    match value.as_f64().filter(|_| value.as_i64().is_none()) {
        Some(number) if number.fract() == 0.0 && number.abs() < 9e15 => (number as i64).to_string(),
        _ => value.to_string(),
    }
}

/// The validation ends: the budget is used up or a limit was hit.
struct Stop;

impl<'a> Run<'a> {
    /// False if the validation ended.
    fn node(
        &mut self,
        place: Place<'a>,
        path: &str,
        object: &'a Json,
        old: Option<&'a Json>,
        changes: Changes<'a>,
    ) -> bool {
        if object.is_null() {
            return true;
        }
        let old = old.filter(|old| !old.is_null());
        if self.expressions(place, path, object, old, changes).is_err() {
            self.outcome.remaining_budget = -1;
            return false;
        }
        for part in &place.node.all_of {
            let changes = Changes { here: None, above: changes.above };
            if !self.node(Place { node: part, ..place }, path, object, old, changes) {
                return false;
            }
        }
        match object {
            Json::Array(items) => self.items(place, path, items, old, changes),
            Json::Object(_) => self.members(place, path, object, old, changes),
            _ => true,
        }
    }

    fn items(
        &mut self,
        place: Place<'a>,
        path: &str,
        items: &'a [Json],
        old: Option<&'a Json>,
        changes: Changes<'a>,
    ) -> bool {
        let (Some(node), Some(schema)) = (&place.node.items, &place.schema.items) else { return true };
        let correlated = place.schema.list_type == ListType::Map;
        let old_items = old.and_then(Json::as_array).filter(|_| correlated).map_or(&[][..], Vec::as_slice);
        let old_by_key = ByKey::new(&place.schema.list_map_keys, old_items);
        items.iter().enumerate().all(|(at, item)| {
            let old = old_by_key.get(item);
            let path = format!("{path}[{at}]");
            let changes = changes.item(item, old, correlated && old.is_some());
            self.node(Place { node, schema, self_schema: schema }, &path, item, old, changes)
        })
    }

    fn members(
        &mut self,
        place: Place<'a>,
        path: &str,
        object: &'a Json,
        old: Option<&'a Json>,
        changes: Changes<'a>,
    ) -> bool {
        let Json::Object(members) = object else { return true };
        let old_member = |name: &str| old.and_then(|old| old.get(name));
        if let (Some(node), Some(schema)) = (&place.node.additional, &place.schema.additional_properties) {
            let place = Place { node, schema, self_schema: schema };
            for (name, member) in members {
                let path = format!("{path}[{name}]");
                if !self.node(place, &path, member, old_member(name), changes.key(name)) {
                    return false;
                }
            }
        }
        for (name, node) in &place.node.properties {
            let schema = place.schema.properties.as_ref().and_then(|properties| properties.get(name));
            if let (Some(member), Some(schema)) = (members.get(name), schema) {
                let path = format!("{path}.{name}");
                let place = Place { node, schema, self_schema: schema };
                if !self.node(place, &path, member, old_member(name), changes.key(name)) {
                    return false;
                }
            }
        }
        true
    }

    fn error(&mut self, place: Place<'_>, path: &str, detail: String) {
        let value = BadValue::Type(type_name(place.schema));
        let kind = FieldErrorKind::Invalid;
        self.outcome.errors.push(FieldError { kind, field: path.to_owned(), value, detail });
    }

    fn expressions(
        &mut self,
        place: Place<'a>,
        path: &str,
        object: &'a Json,
        old: Option<&'a Json>,
        changes: Changes<'a>,
    ) -> Result<(), Stop> {
        if place.node.untyped {
            let detail =
                "rule compiler initialization error: failed to convert to declType for CEL validation rules";
            self.error(place, path, detail.to_owned());
            return Ok(());
        }
        if place.node.rules.is_empty() {
            return Ok(());
        }
        if self.outcome.remaining_budget <= 0 {
            self.error(place, path, OUT_OF_BUDGET.to_owned());
            return Err(Stop);
        }
        let own = Value::from_json(object, Some(place.self_schema));
        let before = old.map(|old| Value::from_json(old, Some(place.self_schema)));
        for rule in &place.node.rules {
            self.rule(place, path, object, &own, before.as_ref(), rule, changes)?;
        }
        Ok(())
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "a rule is evaluated at one place with all that upstream passes"
    )]
    fn rule(
        &mut self,
        place: Place<'a>,
        path: &str,
        object: &'a Json,
        own: &Result<Value<'a>, EvalError>,
        before: Option<&Result<Value<'a>, EvalError>>,
        rule: &'a CompiledRule,
        changes: Changes<'a>,
    ) -> Result<(), Stop> {
        let program = match &rule.program {
            None => return Ok(()),
            Some(Err(error)) => {
                self.error(place, path, format!("rule compile error: {error}"));
                return Ok(());
            }
            Some(Ok(program)) => program,
        };
        let uses_old = rule.uses_old_self();
        if uses_old && before.is_none() && !rule.optional_old_self {
            return Ok(());
        }
        let activation = |optional: bool| {
            let mut activation = Activation::new();
            activation.set("self", own.clone());
            match (optional, before) {
                (false, Some(before)) => activation.set("oldSelf", before.clone()),
                (false, None) => {}
                (true, Some(before)) => activation.set("oldSelf", before.clone().map(Value::some)),
                (true, None) => activation.set("oldSelf", Ok(Value::NONE)),
            }
            activation
        };
        let limits = Limits { cost: Some(rule.per_call_limit), interrupt: self.input.interrupt };
        let evaluation = program.evaluate(&activation(rule.optional_old_self), limits);
        if !self.pay(evaluation.cost) {
            self.error(place, path, OUT_OF_BUDGET.to_owned());
            return Err(Stop);
        }
        match evaluation.result {
            Ok(Value::Bool(true)) => return Ok(()),
            Ok(_) => {}
            Err(error @ EvalError::CostLimitExceeded) => {
                let reason =
                    "no further validation rules will be run due to call cost exceeds limit for rule";
                self.error(place, path, format!("'{error}': {reason}: {}", rule.shown()));
                return Err(Stop);
            }
            Err(error) if error.is_fatal() => {
                self.error(place, path, format!("{error} evaluating rule: {}", rule.shown()));
                return Err(Stop);
            }
            Err(error) => {
                let text = error.to_string();
                let detail = match text.starts_with("no such overload") {
                    true => format!(
                        "'{text}': call arguments did not match a supported operator, function or macro signature \
                         for rule: {}",
                        rule.shown()
                    ),
                    false => format!("{text} evaluating rule: {}", rule.shown()),
                };
                self.error(place, path, detail);
                return Ok(());
            }
        }
        let mut field = path.to_owned();
        if !rule.field_path.is_empty() {
            field.push_str(if rule.field_path.starts_with('[') { "" } else { "." });
            field.push_str(&rule.field_path);
        }
        let ratchet = !uses_old && changes.unchanged();
        let detail = match self.message(rule, &activation(false), limits) {
            Ok(Some(message)) => message,
            Ok(None) if rule.message.is_empty() => format!("failed rule: {}", rule.shown()),
            Ok(None) => rule.shown().to_owned(),
            Err(detail) => {
                let value = BadValue::Type(type_name(place.schema));
                self.add(ratchet, FieldError { kind: FieldErrorKind::Invalid, field, value, detail });
                return Err(Stop);
            }
        };
        let value = match place.schema.kind {
            Kind::Object | Kind::Array => BadValue::Omitted,
            _ => BadValue::Value(object.clone()),
        };
        self.add(ratchet, FieldError { kind: rule.kind, field, value, detail });
        Ok(())
    }

    fn add(&mut self, ratchet: bool, error: FieldError) {
        if ratchet { self.outcome.warnings.push(error) } else { self.outcome.errors.push(error) }
    }

    /// Takes `cost` from the budget; false if it does not suffice.
    fn pay(&mut self, cost: u64) -> bool {
        match i64::try_from(cost) {
            Ok(cost) if cost <= self.outcome.remaining_budget => {
                self.outcome.remaining_budget -= cost;
                true
            }
            _ => false,
        }
    }

    /// The message that the rule's expression makes; `None` if the rule's own text is to be used. An error ends the
    /// validation.
    fn message(
        &mut self,
        rule: &CompiledRule,
        activation: &Activation<'_>,
        limits: Limits<'_>,
    ) -> Result<Option<String>, String> {
        let Some(Ok(program)) = &rule.message_program else { return Ok(None) };
        let evaluation = program.evaluate(activation, limits);
        if !self.pay(evaluation.cost) {
            return Err("messageExpression evaluation failed due to running out of cost budget, no further validation \
                        rules will be run"
                .to_owned());
        }
        let problem = match &evaluation.result {
            Err(error) if error.is_fatal() => {
                let reason = "no further validation rules will be run due to call cost exceeds limit for messageExpression";
                return Err(format!("{reason}: {:?}", rule.message_source));
            }
            Err(error) => format!("messageExpression evaluation failed due to: {error}"),
            Ok(Value::String(text)) => match text.trim() {
                "" => "messageExpression should evaluate to a non-empty string".to_owned(),
                text if text.len() > MAX_MESSAGE => {
                    format!("messageExpression beyond allowable length of {MAX_MESSAGE}")
                }
                text if text.contains('\n') => "messageExpression should not contain line breaks".to_owned(),
                text => return Ok(Some(text.to_owned())),
            },
            Ok(_) => "messageExpression failed to convert to string".to_owned(),
        };
        self.outcome.message_problems.push(problem);
        Ok(None)
    }
}

fn type_name(schema: &Schema) -> &'static str {
    match schema.kind {
        Kind::None => "",
        Kind::Object => "object",
        Kind::Array => "array",
        Kind::String => "string",
        Kind::Number => "number",
        Kind::Integer => "integer",
        Kind::Boolean => "boolean",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn items_are_found_by_the_values_of_their_keys() {
        let keys = ["name".to_owned(), "port".to_owned()];
        let items = [
            json!({"name": "a", "port": 1, "v": 1}),
            json!({"name": "a", "port": 1, "v": 2}),
            json!({"name": "1", "port": null}),
            json!({"port": 2}),
        ];
        let by_key = ByKey::new(&keys, &items);
        for (item, found) in [
            (json!({"name": "a", "port": 1}), Some(0)),
            (json!({"name": "a", "port": 1.0}), Some(0)),
            (json!({"name": "a", "port": "1"}), None),
            (json!({"name": 1, "port": null}), None),
            (json!({"name": "1"}), None),
            (json!({"port": 2}), Some(3)),
        ] {
            assert_eq!(by_key.get(&item), found.map(|at: usize| &items[at]), "{item}");
        }
    }
}
