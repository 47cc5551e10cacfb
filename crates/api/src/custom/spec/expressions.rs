//! Rules in CEL: they must compile, and their estimated cost must stay within upstream's limits.

use crate::custom::rules::ENVIRONMENT;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, present, text};
use ferrite_cel::{CompiledRule, Schema, ValidationRules};
use ferrite_json::{Value, json};

/// The most that a rule is estimated to cost, and all rules of a schema together.
const RULE_LIMIT: u64 = 10_000_000;
const TOTAL_LIMIT: u64 = 100_000_000;
/// Bytes of a request, from which upstream estimates how often a value can be there.
const REQUEST_SIZE: i64 = 3 * 1024 * 1024;
const DEAREST: usize = 4;

/// Where rules are.
pub(super) struct Place<'a> {
    pub(super) resource: bool,
    pub(super) cardinality: Option<u64>,
    pub(super) uncorrelatable: Option<&'a Path>,
    pub(super) unchanged: bool,
}

/// The cost of all rules of a schema together.
#[derive(Default)]
pub(super) struct TotalCost {
    total: u64,
    dearest: Vec<(Path, u64)>,
}

impl TotalCost {
    fn observe(&mut self, path: &Path, cost: u64) {
        self.total = self.total.saturating_add(cost);
        if cost >= TOTAL_LIMIT / 100 {
            self.dearest.push((path.clone(), cost));
            self.dearest.sort_by_key(|(_, cost)| std::cmp::Reverse(*cost));
            self.dearest.truncate(DEAREST);
        }
    }

    pub(super) fn errors(&self, path: &Path) -> FieldErrors {
        if self.total <= TOTAL_LIMIT {
            return Vec::new();
        }
        let why = "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema";
        let mut errors: FieldErrors =
            self.dearest.iter().map(|(path, _)| FieldError::forbidden(path, why)).collect();
        let what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema";
        errors.push(FieldError::forbidden(path, exceeds(what, self.total, TOTAL_LIMIT)));
        errors
    }
}

fn exceeds(what: &str, cost: u64, limit: u64) -> String {
    let factor = cost as f64 / limit as f64;
    let factor = match factor {
        f if f > 100.0 => "more than 100x".to_owned(),
        f if f < 1.5 => format!("{f:.6}x"),
        f => format!("{f:.1}x"),
    };
    format!(
        "{what} exceeds budget by factor of {factor} (try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are declared)"
    )
}

/// A rule as Go prints it.
fn shown(rule: &Value) -> String {
    let quoted = |value: Value| {
        value.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
    };
    let string = |key: &str| quoted(text(rule, key).into());
    let pointer = |key: &str| quoted(rule.get(key).cloned().unwrap_or_default());
    format!(
        r#"{{"Rule":{},"Message":{},"MessageExpression":{},"Reason":{},"FieldPath":{},"OptionalOldSelf":{}}}"#,
        string("rule"),
        string("message"),
        string("messageExpression"),
        pointer("reason"),
        string("fieldPath"),
        pointer("optionalOldSelf"),
    )
}

/// The errors in the rules at a node whose schema is good.
pub(super) fn validate(schema: &Value, path: &Path, place: &Place<'_>, total: &mut TotalCost) -> FieldErrors {
    let rules_path = path.child("x-kubernetes-validations");
    let internal = |why: String| vec![FieldError::internal(&rules_path, why)];
    let alone = without_rules_below(schema);
    let compiled = match ValidationRules::compile(&alone, place.resource, &ENVIRONMENT) {
        Ok(Some(compiled)) if !compiled.root_rules().is_empty() => compiled,
        Ok(_) => {
            let why = "internal error: failed to construct type information for x-kubernetes-validations rules: unable to convert structural schema to CEL declarations";
            return internal(why.to_owned());
        }
        Err(error) => return internal(error.to_string()),
    };
    let times = place.cardinality.unwrap_or_else(|| {
        let declared = Schema::from_openapi(&alone).ok().and_then(|schema| schema.decl_type(place.resource));
        let size = declared.map_or(0, |declared| declared.min_size());
        u64::try_from(REQUEST_SIZE / (size + 1)).unwrap_or_default()
    });
    let mut errors = Vec::new();
    for (index, (rule, source)) in
        compiled.root_rules().iter().zip(list(schema, "x-kubernetes-validations")).enumerate()
    {
        check(rule, source, &rules_path.index(index), times, place, total, &mut errors);
    }
    errors
}

fn check(
    rule: &CompiledRule,
    source: &Value,
    path: &Path,
    times: u64,
    place: &Place<'_>,
    total: &mut TotalCost,
    errors: &mut FieldErrors,
) {
    let rule_path = path.child("rule");
    let cost = rule.estimated_cost().unwrap_or_default().saturating_mul(times);
    if !place.unchanged && cost > RULE_LIMIT {
        errors.push(FieldError::forbidden(&rule_path, exceeds("estimated rule cost", cost, RULE_LIMIT)));
    }
    total.observe(&rule_path, cost);
    let invalid =
        |path: &Path, why: &str| FieldError::invalid(path, json!({}), why).rendered_as(shown(source));
    if let Some(why) = rule.error() {
        errors.push(invalid(&rule_path, why));
    }
    let message_path = path.child("messageExpression");
    if let Some(why) = rule.message_error() {
        errors.push(invalid(&message_path, why));
    } else if let Some(cost) = rule.estimated_message_cost() {
        if !place.unchanged && cost > RULE_LIMIT {
            let why = exceeds("estimated messageExpression cost", cost, RULE_LIMIT);
            errors.push(FieldError::forbidden(&message_path, why));
        }
        total.observe(&message_path, cost);
    }
    if rule.uses_old_self() {
        if let Some(within) = place.uncorrelatable {
            let why =
                format!("oldSelf cannot be used on the uncorrelatable portion of the schema within {within}");
            errors.push(FieldError::invalid(&rule_path, text(source, "rule"), why));
        }
    } else if present(source, "optionalOldSelf") {
        let why = "may not be set if oldSelf is not used in rule";
        let value = source["optionalOldSelf"].clone();
        errors.push(FieldError::invalid(&path.child("optionalOldSelf"), value, why));
    }
}

/// The schema with the rules of its root only: those below are compiled where they are.
fn without_rules_below(schema: &Value) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.remove("x-kubernetes-validations");
                map.values_mut().for_each(strip);
            }
            Value::Array(list) => list.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut alone = schema.clone();
    if let Some(map) = alone.as_object_mut() {
        for (_, value) in map.iter_mut().filter(|(key, _)| *key != "x-kubernetes-validations") {
            strip(value);
        }
    }
    alone
}
