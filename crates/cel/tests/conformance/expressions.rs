//! Single expressions.

use std::sync::Arc;

use ferrite_cel::{
    Activation, CompileError, Environment, Evaluation, Library, Limits, Program, Range, SizeEstimator, Type,
};
use ferrite_json::Value as Json;

use crate::values::{authorizer, same, value};
use crate::{Report, cases};

const SPECIFICATION: &str = include_str!("../data/specification.jsonl");
const KUBERNETES: &str = include_str!("../data/kubernetes.jsonl");
const LIBRARY_COST: &str = include_str!("../data/library_cost.jsonl");

fn text<'j>(json: &'j Json, key: &str) -> &'j str {
    json[key].as_str().unwrap_or_default()
}

/// `environment` with the declarations of a case.
fn declared(mut environment: Environment, case: &Json) -> Environment {
    environment = environment.with_container(text(case, "container"));
    if case["disable_macros"] == true {
        environment = environment.without_macros();
    }
    for declaration in case["decls"].as_array().into_iter().flatten() {
        let name = text(declaration, "name");
        if let Some(of) = declaration["variable"].as_str() {
            environment = environment.with_variable(name, Type::parse(of).expect("a type"));
        }
        for overload in declaration["function"].as_array().into_iter().flatten() {
            let types = overload["params"].as_array().into_iter().flatten();
            let params = types.map(|of| Type::parse(of.as_str().expect("a type")).expect("a type")).collect();
            let result = Type::parse(text(overload, "result")).expect("a type");
            let receiver = overload["receiver"] == true;
            environment = environment.with_function(name, text(overload, "id"), receiver, params, result);
        }
    }
    environment
}

fn activation(case: &Json) -> Activation<'_> {
    let mut activation = Activation::new();
    for (name, bound) in case["bind"].as_object().into_iter().flatten() {
        activation.set(name.as_str(), value(bound));
    }
    activation
}

fn compile(environment: &Environment, case: &Json) -> Result<Program, CompileError> {
    let expression = text(case, "expr");
    match case["disable_check"] == true {
        true => environment.compile_unchecked(expression),
        false => environment.compile(expression),
    }
}

fn compare<T: PartialEq + std::fmt::Debug>(what: &str, expected: T, actual: T) -> Result<(), String> {
    if expected == actual { Ok(()) } else { Err(format!("{what} is {actual:?}, not {expected:?}")) }
}

fn number(json: &Json) -> u64 {
    json.as_str().and_then(|text| text.parse().ok()).expect("a number")
}

fn compare_cost(expected: &Json, evaluation: &Evaluation<'_>) -> Result<(), String> {
    match expected.as_str() {
        None | Some("varies") => Ok(()),
        Some(_) => compare("cost", number(expected), evaluation.cost),
    }
}

fn compare_estimate(expected: &Json, program: &Program) -> Result<(), String> {
    match (expected.as_array(), program.estimated_cost()) {
        (Some(bounds), Some(estimate)) => {
            compare("estimate", Range { min: number(&bounds[0]), max: number(&bounds[1]) }, estimate)
        }
        _ => Ok(()),
    }
}

fn compare_value(expected: &Json, evaluation: &Evaluation<'_>) -> Result<(), String> {
    match &evaluation.result {
        Ok(actual) if same(expected, actual) => Ok(()),
        Ok(actual) => Err(format!("value is {actual:?}, not {expected}")),
        Err(error) => Err(format!("error {error}, not {expected}")),
    }
}

/// Holds a case against the outcome in Kubernetes.
fn in_kubernetes(environment: &Environment, case: &Json) -> Result<(), String> {
    let expected = &case["k8s"];
    let outcome = text(expected, "outcome");
    if outcome == "checked" {
        let of = environment.check(text(case, "expr")).map_err(|error| error.to_string())?;
        return compare("type", Type::parse(text(expected, "type")), Some(of));
    }
    let program = match (compile(environment, case), outcome) {
        (Ok(program), _) => program,
        (Err(CompileError::Parse(_)), "parse_error")
        | (Err(CompileError::Check(_)), "check_error")
        | (Err(_), "check_error" | "parse_error")
            if !expected["missing"].is_null() =>
        {
            return Ok(());
        }
        (Err(error @ CompileError::Parse(_)), "parse_error") => {
            return match expected["message"].as_str() {
                Some(message) => compare("message", message.to_owned(), error.to_string()),
                None => Ok(()),
            };
        }
        (Err(error @ CompileError::Check(_)), "check_error") => {
            if let Some(message) = expected["message"].as_str() {
                compare("message", message.to_owned(), error.to_string())?;
            }
            let messages: Vec<&str> = error.issues().iter().map(|issue| issue.message.as_str()).collect();
            return match expected["messages"].as_array() {
                Some(wanted) => compare(
                    "messages",
                    wanted.iter().map(|message| message.as_str().unwrap_or_default()).collect(),
                    messages,
                ),
                None => Ok(()),
            };
        }
        (Err(CompileError::Program(error)), "program_error") => {
            return compare("message", text(expected, "message").to_owned(), error.to_string());
        }
        (Err(error), _) => return Err(format!("does not compile ({outcome}): {error}")),
    };
    let activation = activation(case);
    let evaluation = program.evaluate(&activation, Limits::default());
    if let Some(of) = expected["type"].as_str() {
        compare("type", Type::parse(of), Some(program.result_type().clone()))?;
    }
    match outcome {
        "value" => compare_value(&expected["value"], &evaluation)?,
        "eval_error" => match &evaluation.result {
            Err(error) => compare("error", text(expected, "message").to_owned(), error.to_string())?,
            Ok(value) => return Err(format!("value {value:?}, not an error: {}", expected["message"])),
        },
        other => return Err(format!("value {:?}, not {other}: {}", evaluation.result, expected["message"])),
    }
    compare_cost(&expected["cost"], &evaluation)?;
    compare_estimate(&expected["estimated_cost"], &program)
}

/// The environment of the specification with everything that Google's implementation can add.
fn specification() -> Environment {
    [
        Library::Strings,
        Library::Strings2,
        Library::Strings3,
        Library::Optional,
        Library::TwoVariables,
        Library::Bindings,
        Library::Math,
        Library::Encoders,
        Library::Ip,
        Library::Cidr,
    ]
    .into_iter()
    .fold(Environment::standard(), Environment::with_library)
    .with_escaped_identifiers()
}

/// Holds a case against the outcome that the specification demands.
fn in_specification(environment: &Environment, case: &Json) -> Result<(), String> {
    let expected = &case["expect"];
    let typed = &expected["typed_result"];
    if case["check_only"] == true {
        let of = environment.check(text(case, "expr")).map_err(|error| error.to_string())?;
        return compare("type", Type::parse(text(typed, "type")), Some(of));
    }
    let program = match compile(environment, case) {
        Ok(program) => program,
        Err(_) if expected["error"] == true => return Ok(()),
        Err(error) => return Err(format!("does not compile: {error}")),
    };
    let activation = activation(case);
    let evaluation = program.evaluate(&activation, Limits::default());
    if expected["error"] == true {
        return match &evaluation.result {
            Err(_) => Ok(()),
            Ok(value) => Err(format!("value {value:?}, not an error")),
        };
    }
    if !typed["value"].is_null() {
        compare("type", Type::parse(text(typed, "type")), Some(program.result_type().clone()))?;
        return compare_value(&typed["value"], &evaluation);
    }
    compare_value(&expected["value"], &evaluation)
}

#[test]
fn specification_in_kubernetes() {
    let base = Environment::kubernetes(36);
    let mut report = Report::default();
    for case in cases(SPECIFICATION).filter(|case| !case["k8s"].is_null()) {
        report.case(text(&case, "name"), in_kubernetes(&declared(base.clone(), &case), &case));
    }
    report.finish();
}

#[test]
fn specification_in_its_own_environment() {
    let base = specification();
    let mut report = Report::default();
    for case in cases(SPECIFICATION).filter(|case| case["cel_go"] == true) {
        let name = format!("specification/{}", text(&case, "name"));
        report.case(&name, in_specification(&declared(base.clone(), &case), &case));
    }
    report.finish();
}

#[test]
fn kubernetes_expressions() {
    let base = Environment::kubernetes(36);
    let mut report = Report::default();
    for case in cases(KUBERNETES).filter(|case| !case["k8s"].is_null()) {
        report.case(text(&case, "name"), in_kubernetes(&declared(base.clone(), &case), &case));
    }
    report.finish();
}

/// Strings and bytes have up to 12 characters, as in upstream's test.
struct TwelveCharacters;

impl SizeEstimator for TwelveCharacters {
    fn size(&self, _: &[Arc<str>], of: &Type) -> Option<Range> {
        matches!(of, Type::String | Type::Bytes).then_some(Range { min: 0, max: 12 })
    }
}

#[test]
fn costs_of_the_libraries() {
    let base = Environment::kubernetes(36)
        .with_mixed_literals()
        .with_variable("authorizer", Type::object("kubernetes.authorization.Authorizer"))
        .with_library(Library::JsonPatch);
    let mut report = Report::default();
    for case in cases(LIBRARY_COST) {
        let environment = declared(base.clone(), &case);
        let outcome = environment
            .compile_sized(text(&case, "expr"), &TwelveCharacters)
            .map_err(|error| error.to_string())
            .and_then(|program| {
                let activation = activation(&case).with("authorizer", authorizer());
                let evaluation = program.evaluate(&activation, Limits::default());
                if let Err(error) = &evaluation.result {
                    return Err(error.to_string());
                }
                compare_estimate(&case["expect"]["estimated_cost"], &program)?;
                // In Kubernetes, parts that are constant cost nothing.
                match case["k8s"]["cost"].as_str() {
                    Some(_) => compare_cost(&case["k8s"]["cost"], &evaluation),
                    None => Ok(()),
                }
            });
        report.case(text(&case, "name"), outcome);
    }
    report.finish();
}

#[test]
fn property_names() {
    for case in cases(include_str!("../data/escaping.jsonl")) {
        let (property, escaped) = (case[0].as_str().expect("a property"), case[1].as_str());
        assert_eq!(ferrite_cel::escape(property).as_deref(), escaped, "{property}");
        if let Some(escaped) = escaped {
            assert_eq!(ferrite_cel::unescape(escaped).as_deref(), Some(property), "{escaped}");
        }
    }
}
