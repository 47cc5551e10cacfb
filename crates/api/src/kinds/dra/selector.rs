//! Selectors of devices: expressions over `device`, compiled when they are written to refuse those that cannot work.

use super::claim::EXPRESSION_MAX;
use crate::field::{FieldError, FieldErrors, Path};
use ferrite_cel::{CompileError, DeclType, DeclaredSizes, Environment, Type};
use std::sync::LazyLock;

/// The level of the API whose libraries expressions can use.
const MINOR: u32 = 36;
/// The most that one evaluation may cost.
const COST_MAX: u64 = 1_000_000;
/// The longest values of a device's fields.
const DOMAIN: i64 = 63;
const ATTRIBUTE: i64 = 64;
/// The most attributes and capacities of a device.
const ENTRIES: i64 = 32;

struct Compiler {
    environment: Environment,
    sizes: DeclaredSizes,
}

static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
    let nested = |value| DeclType::map_of(DeclType::map_of(value, ENTRIES), ENTRIES);
    let fields = [
        ("driver", DeclType::string_of(DOMAIN)),
        // Attributes are of any type; the longest are strings.
        ("attributes", nested(DeclType::string_of(ATTRIBUTE))),
        ("capacity", nested(DeclType::simple(Type::Any))),
        ("allowMultipleAllocations", DeclType::simple(Type::Bool)),
    ];
    let device = DeclType::object("kubernetes.DRADevice", fields.map(|(name, of)| (name.to_owned(), of)));
    Compiler {
        environment: Environment::kubernetes(MINOR).with_device(),
        sizes: DeclaredSizes::of_variables([("device".to_owned(), device)]),
    }
});

/// Checks the expression of a selector, whose field is at `path`.
pub(super) fn validate(expression: &str, path: &Path) -> FieldErrors {
    if expression.len() > EXPRESSION_MAX {
        return vec![FieldError::too_long(path, EXPRESSION_MAX)];
    }
    let compiler = &*COMPILER;
    let invalid = |why: String| vec![FieldError::invalid(path, expression, why)];
    let program = match compiler.environment.compile_sized(expression, &compiler.sizes) {
        Ok(program) => program,
        Err(CompileError::Program(error)) => {
            return vec![FieldError::internal(path, format!("program instantiation failed: {error}"))];
        }
        Err(error) => return invalid(format!("compilation failed: {error}")),
    };
    match program.result_type() {
        Type::Bool | Type::Any => {}
        of => return invalid(format!("must evaluate to bool or the unknown type, not {}", of.declared())),
    }
    match program.estimated_cost() {
        Some(cost) if cost.max > COST_MAX => {
            vec![FieldError::forbidden(path, "too complex, exceeds cost limit")]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_refused_in_upstreams_words() {
        let rows = [
            (r#"device.driver == "d""#, None),
            (r#"device.attributes["dra.example.com"].healthy"#, None),
            (r#"device.capacity["dra.example.com"].memory.isGreaterThan(quantity("1Gi"))"#, None),
            (r#"cel.bind(dra, device.attributes["d.example"], dra.a == "x" && dra.b)"#, None),
            ("device.allowMultipleAllocations", None),
            (
                "device.bogus",
                Some(
                    "compilation failed: ERROR: <input>:1:7: undefined field 'bogus'\n | device.bogus\n | ......^",
                ),
            ),
            (
                "other",
                Some(
                    "compilation failed: ERROR: <input>:1:1: undeclared reference to 'other' (in container '')\n | other\n | ^",
                ),
            ),
            ("-1", Some("must evaluate to bool or the unknown type, not int")),
        ];
        for (expression, expected) in rows {
            let errors = validate(expression, &Path::new("expression"));
            match expected {
                None => assert!(errors.is_empty(), "{expression}: {errors:?}"),
                Some(expected) => {
                    let found = errors[0].to_string();
                    assert!(found.contains(expected), "{expression}: {found}");
                }
            }
        }
        let deep = r#"device.attributes.all(a, device.attributes.all(b, device.attributes.all(c, device.attributes.all(d, device.attributes[a].e == "x"))))"#;
        let errors = validate(deep, &Path::new("expression"));
        assert!(errors[0].to_string().contains("too complex, exceeds cost limit"), "{errors:?}");
    }
}
