//! Checks of literals, which run after the types are known.

use super::Checked;
use crate::ast::{Ast, Expr, ExprKind, Id, Literal};
use crate::functions::{self, check_format};
use crate::source::{Issue, Source};
use crate::time;
use crate::types::Type;

/// Which checks an environment makes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Validators {
    /// Arguments of `duration`, `timestamp` and `matches`.
    pub literals: bool,
    /// Lists and maps of several types.
    pub homogeneous: bool,
    /// Arguments of `format`.
    pub format: bool,
}

pub(crate) fn validate(ast: &Ast, source: &Source, checked: &Checked, validators: Validators) -> Vec<Issue> {
    let mut found = Vec::new();
    let mut open = vec![(&ast.root, false)];
    while let Some((expr, in_format)) = open.pop() {
        if validators.literals {
            literal_argument(expr, &mut found);
        }
        if validators.homogeneous && !in_format {
            homogeneous(expr, checked, &mut found);
        }
        if validators.format {
            format_call(expr, checked, &mut found);
        }
        let exempt =
            in_format || matches!(&expr.kind, ExprKind::Call { function, .. } if &**function == "format");
        expr.children(&mut |child| open.push((child, exempt)));
    }
    let mut issues: Vec<Issue> = found
        .into_iter()
        .map(|(id, message)| source.issue(source.location(ast.positions[id as usize] as usize), message))
        .collect();
    issues.sort_by_key(|issue| issue.location);
    issues
}

fn literal_argument(expr: &Expr, found: &mut Vec<(Id, String)>) {
    let ExprKind::Call { function, args, .. } = &expr.kind else { return };
    let Some(Expr { id, kind: ExprKind::Literal(literal) }) = args.first() else { return };
    let valid = match (&**function, literal) {
        ("duration", Literal::String(text)) => time::parse_duration(text).is_some(),
        ("timestamp", Literal::String(text)) => time::parse_timestamp(text).is_some_and(|time| time.is_ok()),
        ("timestamp", Literal::Int(seconds)) => time::Timestamp::from_unix(*seconds, 0).is_some(),
        ("matches", Literal::String(pattern)) => functions::regex::compile(pattern).is_ok(),
        _ => return,
    };
    if !valid {
        found.push((*id, format!("invalid {function} argument")));
    }
}

/// Lists and maps whose elements have several types, `dyn` among them.
fn homogeneous(expr: &Expr, checked: &Checked, found: &mut Vec<(Id, String)>) {
    let type_of = |value: &Expr, optional: bool| {
        let of = checked.type_of(value.id);
        match of.unwrap_optional() {
            Some(inner) if optional => inner.clone(),
            _ => of.clone(),
        }
    };
    let mut report = |id: Id, expected: &Type, actual: &Type| {
        found.push((id, format!("expected type '{expected}' but found '{actual}'")));
    };
    match &expr.kind {
        ExprKind::List(elements) => {
            let mut types =
                elements.iter().map(|element| (element.value.id, type_of(&element.value, element.optional)));
            let Some((_, first)) = types.next() else { return };
            if let Some((id, other)) = types.find(|(_, other)| *other != first) {
                report(id, &first, &other);
            }
        }
        ExprKind::Map(entries) => {
            let mut types = entries.iter().map(|entry| {
                let key = (entry.key.id, type_of(&entry.key, false));
                (key, (entry.value.id, type_of(&entry.value, entry.optional)))
            });
            let Some(((_, key), (_, value))) = types.next() else { return };
            for ((key_id, other_key), (value_id, other_value)) in types {
                if key != other_key {
                    report(key_id, &key, &other_key);
                }
                if value != other_value {
                    report(value_id, &value, &other_value);
                }
            }
        }
        _ => {}
    }
}

fn format_call(expr: &Expr, checked: &Checked, found: &mut Vec<(Id, String)>) {
    let ExprKind::Call { target: Some(target), function, args } = &expr.kind else { return };
    let (ExprKind::Literal(Literal::String(format)), "format", [Expr { kind: ExprKind::List(elements), .. }]) =
        (&target.kind, &**function, args.as_slice())
    else {
        return;
    };
    let outcome = check_format(format, elements.len(), &mut |clause, index, _| {
        let argument = &elements[index].value;
        match unfit(clause, argument, checked) {
            Some(id) => Err((clause.mismatch(checked.type_of(id).runtime_name()), Some(id))),
            None => Ok(()),
        }
    });
    match outcome {
        Err(error) => found.push((error.argument.unwrap_or(expr.id), error.message)),
        Ok((_, used)) if elements.len() > used => {
            let count = elements.len();
            let message =
                format!("too many arguments supplied to string.format (expected {used}, got {count})");
            found.push((expr.id, message));
        }
        Ok(_) => {}
    }
}

/// The part of an argument whose type its clause does not take.
fn unfit(clause: functions::Clause, argument: &Expr, checked: &Checked) -> Option<Id> {
    use functions::Clause;
    let of = checked.type_of(argument.id);
    let base = if let Type::Wrapper(of) = of { of } else { of };
    let fits = match (clause, base) {
        (_, Type::Dyn) => true,
        (Clause::String, of) => matches!(
            of,
            Type::List(_)
                | Type::Map(_)
                | Type::Int
                | Type::Uint
                | Type::Double
                | Type::Bool
                | Type::String
                | Type::Timestamp
                | Type::Bytes
                | Type::Duration
                | Type::Type(_)
                | Type::Null
        ),
        (Clause::Decimal | Clause::Octal, of) => matches!(of, Type::Int | Type::Uint),
        (Clause::Fixed(_) | Clause::Scientific(_), of) => matches!(of, Type::Double | Type::String),
        (Clause::Binary, of) => matches!(of, Type::Int | Type::Uint | Type::Bool),
        (Clause::Hex { .. }, of) => matches!(of, Type::Int | Type::Uint | Type::String | Type::Bytes),
    };
    if !fits {
        return Some(argument.id);
    }
    match (&argument.kind, clause) {
        (ExprKind::List(elements), Clause::String) => {
            elements.iter().find_map(|element| unfit(clause, &element.value, checked))
        }
        (ExprKind::Map(entries), Clause::String) => entries.iter().find_map(|entry| {
            unfit(clause, &entry.key, checked).or_else(|| unfit(clause, &entry.value, checked))
        }),
        _ => None,
    }
}
