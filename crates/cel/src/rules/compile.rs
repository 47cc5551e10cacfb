//! From the text of a rule to a program.

use ferrite_json::Value as Json;

use super::error::FieldErrorKind;
use super::path;
use crate::error::CompileError;
use crate::program::{DeclaredSizes, Environment, Program};
use crate::schema::{DeclType, Schema};
use crate::types::Type;

/// The name of an object type that has none of its own.
const SELF_TYPE: &str = "selfType0";

/// The environment and the limit that rules are compiled with.
#[derive(Debug, Clone)]
pub struct RuleEnvironment {
    base: Environment,
    /// The most that one evaluation may cost.
    pub(super) per_call_limit: u64,
}

impl RuleEnvironment {
    /// Rules see the variables `self` and `oldSelf` beside those of `base`.
    pub fn new(base: Environment, per_call_limit: u64) -> Self {
        Self { base, per_call_limit }
    }
}

/// A rule with its programs.
#[derive(Debug)]
pub struct CompiledRule {
    pub(super) rule: String,
    pub(super) message: String,
    pub(super) kind: FieldErrorKind,
    /// The field that the rule is about, below the node that it is at.
    pub(super) field_path: String,
    pub(super) optional_old_self: bool,
    pub(super) per_call_limit: u64,
    pub(super) message_source: String,
    /// `None` for a rule without text, which is not run.
    pub(super) program: Option<Result<Program, String>>,
    pub(super) message_program: Option<Result<Program, String>>,
}

impl CompiledRule {
    /// The largest estimated cost; `None` if the rule does not compile.
    pub fn estimated_cost(&self) -> Option<u64> {
        match &self.program {
            Some(Ok(program)) => program.estimated_cost().map(|cost| cost.max),
            Some(Err(_)) => None,
            // A rule without text is not run.
            None => Some(0),
        }
    }

    /// The largest estimated cost of the expression that makes the message.
    pub fn estimated_message_cost(&self) -> Option<u64> {
        match &self.message_program {
            Some(Ok(program)) => program.estimated_cost().map(|cost| cost.max),
            _ => None,
        }
    }

    /// Why the rule does not compile.
    pub fn error(&self) -> Option<&str> {
        self.program.as_ref().and_then(|program| program.as_ref().err()).map(String::as_str)
    }

    /// Why the expression that makes the message does not compile.
    pub fn message_error(&self) -> Option<&str> {
        self.message_program.as_ref().and_then(|program| program.as_ref().err()).map(String::as_str)
    }

    /// Does the rule compare with the object before the change?
    pub fn uses_old_self(&self) -> bool {
        matches!(&self.program, Some(Ok(program)) if program.uses_variable("oldSelf"))
    }

    /// The rule as messages show it.
    pub(super) fn shown(&self) -> &str {
        if self.message.is_empty() { self.rule.trim() } else { self.message.trim() }
    }
}

pub(super) fn rule(
    json: &Json,
    node: &Schema,
    decl: &DeclType,
    environment: &RuleEnvironment,
) -> CompiledRule {
    let text = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
    let optional_old_self = json["optionalOldSelf"].as_bool().unwrap_or_default();
    let named = decl.clone().with_name(SELF_TYPE);
    let old = match optional_old_self {
        true => Type::optional(named.cel.clone()),
        false => named.cel.clone(),
    };
    let base = environment.base.clone().with_typed_variable("self", &named).with_variable("oldSelf", old);
    let sizes = DeclaredSizes::of_any(decl.clone());
    let compile = |source: &str, prefix: &str, wanted: &Type, not_wanted: &str| {
        let program = base.compile_sized(source, &sizes).map_err(|error| match error {
            CompileError::Program(error) => format!("{prefix}instantiation failed: {error}"),
            error => format!("{prefix}compilation failed: {error}"),
        })?;
        if program.result_type() == wanted { Ok(program) } else { Err(not_wanted.to_owned()) }
    };
    let source = text("rule");
    let program = (!source.trim().is_empty()).then(|| {
        let compiled = compile(&source, "", &Type::Bool, "cel expression must evaluate to a bool");
        compiled.map_err(|error| match error.strip_prefix("instantiation") {
            Some(rest) => format!("program instantiation{rest}"),
            None => error,
        })
    });
    let message_source = text("messageExpression");
    let compiles = matches!(program, Some(Ok(_)));
    let message_program = (compiles && !message_source.is_empty()).then(|| {
        compile(
            &message_source,
            "messageExpression ",
            &Type::String,
            "messageExpression must evaluate to a string",
        )
    });
    CompiledRule {
        message: text("message"),
        kind: match json["reason"].as_str() {
            Some("FieldValueForbidden") => FieldErrorKind::Forbidden,
            Some("FieldValueRequired") => FieldErrorKind::Required,
            Some("FieldValueDuplicate") => FieldErrorKind::Duplicate,
            _ => FieldErrorKind::Invalid,
        },
        field_path: path::normalize(&text("fieldPath"), node).unwrap_or_default(),
        optional_old_self,
        per_call_limit: environment.per_call_limit,
        rule: source,
        message_source,
        program,
        message_program,
    }
}
