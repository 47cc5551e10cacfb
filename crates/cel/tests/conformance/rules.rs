//! Validation rules of custom resource definitions.

use ferrite_cel::{Environment, FieldError, FieldErrorKind, RuleEnvironment, RuleInput, ValidationRules};
use ferrite_json::Value as Json;

use crate::{Report, cases};

const RULES: &str = include_str!("../data/validation_rules.jsonl");

fn number(json: &Json) -> Option<i64> {
    json.as_str().and_then(|text| text.parse().ok())
}

/// A type without a name of its own has a made-up one.
fn with_made_up_name(text: &str) -> String {
    text.replace("selfType0", "selfTypeN")
}

fn compiled(case: &Json) -> Result<Option<ValidationRules>, String> {
    let minor = if case["environment"] == "new" { 35 } else { 36 };
    let limit = number(&case["per_call_limit"]).map_or(1_000_000, |limit| limit as u64);
    let environment = RuleEnvironment::new(Environment::kubernetes(minor), limit);
    ValidationRules::compile(&case["schema"], case["resource_root"] == true, &environment)
        .map_err(|error| error.to_string())
}

fn compare<T: PartialEq + std::fmt::Debug>(what: &str, expected: T, actual: T) -> Result<(), String> {
    if expected == actual { Ok(()) } else { Err(format!("{what} is {actual:?}, not {expected:?}")) }
}

fn compare_compiled(case: &Json) -> Result<(), String> {
    let rules = compiled(case)?.ok_or("there are no rules")?;
    let expected = case["expect"]["rules"].as_array().ok_or("no rules are expected")?;
    for (expected, rule) in expected.iter().zip(rules.root_rules()) {
        compare("compiles", expected["compiles"] == true, rule.error().is_none())?;
        compare("error", expected["error"].as_str().map(str::to_owned), rule.error().map(with_made_up_name))?;
        compare(
            "message error",
            expected["message_expression_error"].as_str().map(str::to_owned),
            rule.message_error().map(with_made_up_name),
        )?;
        compare("uses oldSelf", expected["uses_old_self"] == true, rule.uses_old_self())?;
        if let Some(cost) = expected["estimated_cost"].as_str() {
            compare("estimate", Some(cost.to_owned()), rule.estimated_cost().map(|cost| cost.to_string()))?;
        }
    }
    compare("count of rules", expected.len(), rules.root_rules().len())
}

fn compare_estimate(case: &Json) -> Result<(), String> {
    let rules = compiled(case)?.ok_or("there are no rules")?;
    let rule = rules.root_rules().first().ok_or("there is no rule at the root")?;
    let cost = rule.estimated_cost().ok_or_else(|| rule.error().unwrap_or_default().to_owned())?;
    let observed = case["observed"]["estimated_cost"].as_str().map(str::to_owned);
    compare("estimate", observed, Some(cost.to_string()))
}

fn kind(error: &FieldError) -> &'static str {
    match error.kind {
        FieldErrorKind::Invalid => "FieldValueInvalid",
        FieldErrorKind::Forbidden => "FieldValueForbidden",
        FieldErrorKind::Required => "FieldValueRequired",
        FieldErrorKind::Duplicate => "FieldValueDuplicate",
    }
}

fn compare_run(case: &Json) -> Result<(), String> {
    let observed = &case["observed"];
    let budget = number(&case["cost_budget"]).unwrap_or(10_000_000);
    let Some(rules) = compiled(case)? else {
        return compare("valid", observed["valid"] == true, true);
    };
    let mut input = RuleInput::new("root", &case["object"]);
    input.old_object = Some(&case["old_object"]).filter(|old| !old.is_null());
    input.ratcheting = case["ratcheting"] == true;
    let outcome = rules.validate(input, budget);
    let mut errors: Vec<(String, String)> = outcome
        .errors
        .iter()
        .map(|error| (kind(error).to_owned(), with_made_up_name(&error.to_string())))
        .collect();
    errors.sort_by(|a, b| a.1.cmp(&b.1));
    let mut expected: Vec<(String, String)> = observed["errors"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|error| {
            let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
            (text("type"), text("text"))
        })
        .collect();
    expected.sort_by(|a, b| a.1.cmp(&b.1));
    compare("errors", expected, errors)?;
    compare("valid", observed["valid"] == true, outcome.errors.is_empty())?;
    if let Some(remaining) = number(&observed["remaining_budget"]) {
        compare("remaining budget", remaining, outcome.remaining_budget)?;
    }
    if let Some(warnings) = case["expect"]["warnings"].as_array() {
        let found: Vec<String> = outcome.warnings.iter().map(ToString::to_string).collect();
        for warning in warnings.iter().filter_map(Json::as_str) {
            if !found.iter().any(|found| found.contains(warning)) {
                return Err(format!("no warning {warning:?} in {found:?}"));
            }
        }
        compare("count of warnings", warnings.len(), found.len())?;
    }
    if let Some(logged) = case["expect"]["log_contains"].as_array() {
        for text in logged.iter().filter_map(Json::as_str) {
            if !outcome.message_problems.iter().any(|problem| problem.contains(text)) {
                return Err(format!("no problem {text:?} in {:?}", outcome.message_problems));
            }
        }
    }
    Ok(())
}

#[test]
fn validation_rules() {
    let mut report = Report::default();
    for case in cases(RULES) {
        let outcome = if !case["expect"]["rules"].is_null() {
            compare_compiled(&case)
        } else if !case["observed"]["estimated_cost"].is_null() {
            compare_estimate(&case)
        } else {
            compare_run(&case)
        };
        report.case(case["name"].as_str().unwrap_or_default(), outcome);
    }
    report.finish();
}
