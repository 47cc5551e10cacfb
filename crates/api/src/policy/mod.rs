//! Expressions of admission policies and of match conditions: the environments in which they are compiled, and their
//! faults in upstream's words.
//!
//! A policy is compiled twice: when it is written, to refuse an invalid one, and by the server that
//! evaluates it.

pub mod type_check;

use ferrite_cel::{CompileError, Environment, Program, Type};
use ferrite_json::Value;
use std::collections::HashMap;
use std::sync::OnceLock;
use thiserror::Error;

/// The most that one evaluation of an expression may cost.
pub const PER_CALL_LIMIT: u64 = 1_000_000;
/// The most that the expressions of a policy may cost together, for one binding and one parameter.
pub const BUDGET: u64 = 10_000_000;
/// The most that the match conditions of a policy or a webhook may cost together.
pub const MATCH_CONDITIONS_BUDGET: u64 = 2_500_000;

/// The levels that the variables of a policy may have together, where each reads the one before. Each level takes
/// stack.
pub const MAX_VARIABLE_LEVELS: usize = 4_000;

/// The level of the API whose libraries expressions can use.
const MINOR: u32 = 36;

/// The purpose of an expression. It determines the variables that the expression may use, and its possible
/// types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    MatchCondition,
    Variable,
    Validation,
    Message,
    AuditAnnotation,
    ApplyConfiguration,
    JsonPatch,
}

/// The fault of an expression.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ExpressionError {
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Internal(String),
}

impl Use {
    /// Index of the environment among those with and without parameters.
    fn environment(self) -> usize {
        match self {
            Self::Message => 1,
            Self::ApplyConfiguration | Self::JsonPatch => 2,
            _ => 0,
        }
    }

    /// Refuses an expression of another type than this use takes.
    fn check(self, of: &Type) -> Result<(), ExpressionError> {
        let one = |wanted: Type| match *of == wanted {
            true => Ok(()),
            false => Err(format!("must evaluate to {} but got {}", wanted.declared(), of.declared())),
        };
        match self {
            Self::Variable => Ok(()),
            Self::MatchCondition | Self::Validation => one(Type::Bool),
            Self::Message => one(Type::String),
            Self::ApplyConfiguration => one(Type::object("Object")),
            Self::JsonPatch => one(Type::list(Type::object("JSONPatch"))),
            Self::AuditAnnotation => match of {
                Type::String | Type::Null => Ok(()),
                of => Err(format!("must evaluate to one of [string null_type] but got {}", of.declared())),
            },
        }
        .map_err(ExpressionError::Invalid)
    }
}

/// An environment of a policy, without its variables.
fn environment(params: bool, index: usize) -> &'static Environment {
    static MADE: [OnceLock<Environment>; 6] = [const { OnceLock::new() }; 6];
    MADE[usize::from(params) * 3 + index].get_or_init(|| {
        let environment = Environment::kubernetes(MINOR).with_admission_variables(params, index != 1);
        if index == 2 { environment.with_mutations() } else { environment }
    })
}

/// Compiles the expressions of one policy. Its variables are added in their order, before the expressions that read
/// them.
pub struct Compiler {
    params: bool,
    /// Made when an expression first needs them. None of a compiler without variables.
    own: Option<[Option<Environment>; 3]>,
    variables: Vec<(String, Type)>,
}

impl Compiler {
    /// For expressions that do not know `variables`.
    pub fn plain(params: bool) -> Self {
        Self { params, own: None, variables: Vec::new() }
    }

    /// For expressions that may read variables.
    pub fn composed(params: bool) -> Self {
        Self { params, own: Some([const { None }; 3]), variables: Vec::new() }
    }

    /// Compiles an expression.
    pub fn compile(&mut self, of: Use, expression: &str) -> Result<Program, ExpressionError> {
        let index = of.environment();
        let environment = match &mut self.own {
            None => environment(self.params, index),
            Some(own) => own[index].get_or_insert_with(|| {
                let variables = self.variables.iter().map(|(name, of)| (name.as_str(), of.clone()));
                environment(self.params, index).clone().with_policy_variables(variables)
            }),
        };
        let program = environment.compile(expression).map_err(|error| match error {
            CompileError::Program(error) => {
                ExpressionError::Internal(format!("program instantiation failed: {error}"))
            }
            error => ExpressionError::Invalid(format!("compilation failed: {error}")),
        })?;
        of.check(program.result_type())?;
        Ok(program)
    }

    /// Compiles a variable, and lets the expressions after it read it. One that does not compile is of any type.
    pub fn add_variable(&mut self, name: &str, expression: &str) -> Result<Program, ExpressionError> {
        let compiled = self.compile(Use::Variable, expression);
        let of = compiled.as_ref().map_or(Type::Dyn, |program| program.result_type().of_policy_variable());
        for environment in self.own.iter_mut().flatten().flatten() {
            environment.add_policy_variable(name, of.clone());
        }
        self.variables.push((name.to_owned(), of));
        compiled
    }
}

/// The depth to which evaluations of a policy's variables may nest, in levels of expressions. `variables`
/// are the names and programs in their order.
pub fn nesting<'p>(variables: impl IntoIterator<Item = (&'p str, Option<&'p Program>)>) -> usize {
    let mut levels: HashMap<&str, usize> = HashMap::new();
    let mut deepest = 0;
    for (name, program) in variables {
        let own = program.map_or(0, |program| {
            let (read, any) = program.policy_variables();
            let read = read.filter_map(|name| levels.get(name).copied()).max().unwrap_or(0);
            program.depth() + if any { deepest } else { read }
        });
        deepest = deepest.max(own);
        levels.insert(name, own);
    }
    deepest
}

/// The group, version and kind that a policy's `paramKind` names. None if there is no `paramKind`.
pub fn param_kind(spec: &Value) -> Option<(&str, &str, &str)> {
    let kind = spec.get("paramKind").filter(|kind| kind.is_object())?;
    let text = |key: &str| kind.get(key).and_then(Value::as_str).unwrap_or_default();
    let (group, version) = text("apiVersion").split_once('/').unwrap_or(("", text("apiVersion")));
    Some((group, version, text("kind")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_refused_in_upstreams_words() {
        let table = [
            (Use::Validation, "1", "must evaluate to bool but got int"),
            (Use::Validation, "object.x", "must evaluate to bool but got dyn"),
            (Use::Message, "[1u]", "must evaluate to string but got list(uint)"),
            (
                Use::Message,
                "[timestamp('2020-01-01T00:00:00Z')]",
                "must evaluate to string but got list(google.protobuf.Timestamp)",
            ),
            (Use::AuditAnnotation, "true", "must evaluate to one of [string null_type] but got bool"),
            (Use::ApplyConfiguration, "1", "must evaluate to Object but got int"),
            (Use::JsonPatch, "[1]", "must evaluate to list(JSONPatch) but got list(int)"),
            (
                Use::Message,
                "authorizer.path('/').check('get').reason()",
                "compilation failed: ERROR: <input>:1:1: undeclared reference to 'authorizer' (in container '')\n | authorizer.path('/').check('get').reason()\n | ^",
            ),
            (
                Use::Validation,
                "variables.x",
                "compilation failed: ERROR: <input>:1:1: undeclared reference to 'variables' (in container '')\n | variables.x\n | ^",
            ),
            (
                Use::Validation,
                "params.x == 1",
                "compilation failed: ERROR: <input>:1:1: undeclared reference to 'params' (in container '')\n | params.x == 1\n | ^",
            ),
        ];
        for (of, expression, expected) in table {
            let found = Compiler::plain(false).compile(of, expression).unwrap_err();
            assert_eq!(found, ExpressionError::Invalid(expected.into()), "{expression}");
        }
        assert!(Compiler::plain(true).compile(Use::Validation, "params.x == 1").is_ok());
        assert!(Compiler::plain(false).compile(Use::AuditAnnotation, "null").is_ok());
    }

    #[test]
    fn variables_have_types_and_see_those_before_them() {
        let mut compiler = Compiler::composed(false);
        compiler.add_variable("a", "[1, 2]").unwrap();
        compiler.add_variable("b", "variables.a.size()").unwrap();
        assert!(compiler.compile(Use::Validation, "variables.b == 2").is_ok());
        let wrong = compiler.compile(Use::Validation, "variables.b == 'x'").unwrap_err();
        assert!(
            wrong.to_string().contains("found no matching overload for '_==_' applied to '(int, string)'"),
            "{wrong}"
        );
        let unknown = compiler.compile(Use::Message, "variables.c").unwrap_err();
        assert!(unknown.to_string().contains("undefined field 'c'"), "{unknown}");
        compiler.add_variable("c", "string(variables.b)").unwrap();
        assert!(compiler.compile(Use::Message, "variables.c").is_ok());
        // Objects lose their type, as upstream's.
        compiler.add_variable("user", "request.userInfo").unwrap();
        assert!(compiler.compile(Use::Message, "variables.user.nothing + ''").is_ok());
    }

    #[test]
    fn chains_of_variables_count_their_levels() {
        let mut compiler = Compiler::composed(false);
        let mut programs = Vec::new();
        for (name, expression) in
            [("a", "1 + 1"), ("b", "variables.a + 1"), ("c", "2"), ("d", "variables.b + variables.c")]
        {
            programs.push((name, compiler.add_variable(name, expression).unwrap()));
        }
        let all = nesting(programs.iter().map(|(name, program)| (*name, Some(program))));
        let alone: usize = programs.iter().map(|(_, program)| program.depth()).max().unwrap();
        assert!(all > alone && all < 4 * alone, "{all} {alone}");
    }
}
