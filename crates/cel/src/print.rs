//! Expressions as text again.
//!
//! The text parses to the same tree, apart from macros: their expansions are written as calls of functions that no text
//! can name, so that two trees are the same if and only if their texts are.

use std::fmt::Write as _;

use crate::ast::{Expr, ExprKind, Literal};

pub(crate) fn print(root: &Expr) -> String {
    let mut out = String::new();
    write(root, &mut out);
    out
}

fn list<'e>(items: impl Iterator<Item = &'e Expr>, out: &mut String) {
    for (at, item) in items.enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        write(item, out);
    }
}

fn write(expr: &Expr, out: &mut String) {
    match &expr.kind {
        ExprKind::Literal(literal) => write_literal(literal, out),
        ExprKind::Ident(name) => out.push_str(name),
        ExprKind::Select { operand, field, test_only } => {
            out.push_str(if *test_only { "has(" } else { "" });
            operand_text(operand, out);
            let _ = write!(out, ".{field}");
            out.push_str(if *test_only { ")" } else { "" });
        }
        ExprKind::Call { target, function, args } => write_call(target.as_deref(), function, args, out),
        ExprKind::List(elements) => {
            out.push('[');
            for (at, element) in elements.iter().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                out.push_str(if element.optional { "?" } else { "" });
                write(&element.value, out);
            }
            out.push(']');
        }
        ExprKind::Map(entries) => {
            out.push('{');
            for (at, entry) in entries.iter().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                out.push_str(if entry.optional { "?" } else { "" });
                write(&entry.key, out);
                out.push_str(": ");
                write(&entry.value, out);
            }
            out.push('}');
        }
        ExprKind::Struct { name, fields } => {
            let _ = write!(out, "{name}{{");
            for (at, field) in fields.iter().enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                let _ = write!(out, "{}{}: ", if field.optional { "?" } else { "" }, field.name);
                write(&field.value, out);
            }
            out.push('}');
        }
        ExprKind::Comprehension(fold) => {
            let second = fold.iter_var2.as_deref().unwrap_or("");
            let _ = write!(out, "#fold({}, {second}, {}, ", fold.iter_var, fold.accu_var);
            list([&fold.range, &fold.accu_init, &fold.condition, &fold.step, &fold.result].into_iter(), out);
            out.push(')');
        }
    }
}

/// The left side of a dot: numbers need parentheses, or the dot would belong to them.
fn operand_text(operand: &Expr, out: &mut String) {
    let bare = match &operand.kind {
        ExprKind::Literal(Literal::String(_) | Literal::Bytes(_)) => true,
        ExprKind::Literal(_) => false,
        // Operators write their own parentheses.
        _ => true,
    };
    out.push_str(if bare { "" } else { "(" });
    write(operand, out);
    out.push_str(if bare { "" } else { ")" });
}

fn write_call(target: Option<&Expr>, function: &str, args: &[Expr], out: &mut String) {
    let infix = match function {
        "_&&_" | "_||_" | "_==_" | "_!=_" | "_<_" | "_<=_" | "_>_" | "_>=_" | "_+_" | "_-_" | "_*_"
        | "_/_" | "_%_" => Some(function.trim_matches('_')),
        "@in" => Some("in"),
        _ => None,
    };
    match (infix, target, function, args) {
        (Some(operator), None, _, [left, right]) => {
            out.push('(');
            write(left, out);
            let _ = write!(out, " {operator} ");
            write(right, out);
            out.push(')');
        }
        (None, None, "!_" | "-_", [operand]) => {
            let _ = write!(out, "({}(", &function[..1]);
            write(operand, out);
            out.push_str("))");
        }
        (None, None, "_?_:_", [condition, yes, no]) => {
            out.push('(');
            write(condition, out);
            out.push_str(" ? ");
            write(yes, out);
            out.push_str(" : ");
            write(no, out);
            out.push(')');
        }
        (None, None, "_[_]" | "_[?_]", [operand, index]) => {
            operand_text(operand, out);
            out.push_str(if function == "_[_]" { "[" } else { "[?" });
            write(index, out);
            out.push(']');
        }
        (None, None, "_?._", [operand, Expr { kind: ExprKind::Literal(Literal::String(field)), .. }]) => {
            operand_text(operand, out);
            let _ = write!(out, ".?{field}");
        }
        _ => {
            if let Some(target) = target {
                operand_text(target, out);
                out.push('.');
            }
            let _ = write!(out, "{function}(");
            list(args.iter(), out);
            out.push(')');
        }
    }
}

fn write_literal(literal: &Literal, out: &mut String) {
    let _ = match literal {
        Literal::Null => write!(out, "null"),
        Literal::Bool(value) => write!(out, "{value}"),
        Literal::Int(value) => write!(out, "{value}"),
        Literal::Uint(value) => write!(out, "{value}u"),
        Literal::Double(value) => write!(out, "{value:?}").map(|()| {
            // A double without a point or an exponent would be an integer.
            if !out.ends_with(|c: char| !c.is_ascii_digit()) && !format!("{value:?}").contains(['.', 'e']) {
                out.push_str(".0");
            }
        }),
        Literal::String(text) => {
            out.push('"');
            for c in text.chars() {
                match c {
                    '"' => out.push_str("\\\""),
                    '\\' => out.push_str("\\\\"),
                    c if c.is_ascii_graphic() || c == ' ' => out.push(c),
                    c => {
                        let _ = write!(out, "\\U{:08x}", c as u32);
                    }
                }
            }
            out.push('"');
            Ok(())
        }
        Literal::Bytes(bytes) => {
            out.push_str("b\"");
            for byte in bytes.iter() {
                let _ = write!(out, "\\x{byte:02x}");
            }
            out.push('"');
            Ok(())
        }
    };
}
