//! The functions themselves.
//!
//! A function is found by its name and looks at the types of its arguments itself. Which of them an expression may call,
//! and with which types, is the checker's business: it knows the libraries of the environment.

mod authz;
mod core;
mod format;
mod lists;
mod math;
mod named;
mod net;
mod number;
mod optional;
mod quantity;
pub(crate) mod regex;
mod semver;
mod strings;
mod time;
mod url;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::OnceLock;

pub use authz::{AuthorizationDecision, Authorizer, AuthorizerValue, Check};
pub(crate) use core::traversal;
pub(crate) use format::{Clause, check as check_format};
pub(crate) use named::NamedFormat;
pub use net::{Cidr, Ip};
pub(crate) use number::go_float;
pub use quantity::Quantity;
pub use semver::Semver;
pub use url::Url;

use crate::error::{EvalError, err};
use crate::value::Value;

/// A function. It may use up its arguments.
pub(crate) type Function = for<'a> fn(&mut Memory, &mut [Value<'a>]) -> Result<Value<'a>, EvalError>;

/// A name and its function.
type Entry = (&'static str, Function);

pub(crate) type Args<'a> = Vec<Value<'a>>;

/// The memory that an evaluation may still take, and the regular expression that it used last.
pub(crate) struct Memory {
    left: usize,
    pattern: Option<(String, ::regex::Regex)>,
}

impl Memory {
    pub fn new(limit: usize) -> Self {
        Self { left: limit, pattern: None }
    }

    /// Takes `bytes`, before they are allocated.
    pub fn take(&mut self, bytes: usize) -> Result<(), EvalError> {
        self.left = self.left.checked_sub(bytes).ok_or(EvalError::MemoryLimitExceeded)?;
        Ok(())
    }

    /// Takes room for `count` values.
    pub fn take_values(&mut self, count: usize) -> Result<(), EvalError> {
        self.take(count.saturating_mul(size_of::<Value<'_>>()))
    }
}

/// Marks that a function has no overload for its arguments.
const NO_MATCH: EvalError = EvalError::text("\u{0}no match");

pub(crate) fn is_no_match(error: &EvalError) -> bool {
    *error == NO_MATCH
}

pub(crate) fn no_such_overload(name: &str, args: &[Value<'_>]) -> EvalError {
    let types: Vec<String> = args.iter().map(Value::type_name).collect();
    err!("no such overload: {name}({})", types.join(", "))
}

pub(crate) fn find(name: &str) -> Option<Function> {
    static BY_NAME: OnceLock<HashMap<&'static str, Function>> = OnceLock::new();
    let by_name = BY_NAME.get_or_init(|| {
        let tables: [&[Entry]; 14] = [
            core::TABLE,
            time::TABLE,
            strings::TABLE,
            lists::TABLE,
            regex::TABLE,
            url::TABLE,
            quantity::TABLE,
            net::TABLE,
            semver::TABLE,
            named::TABLE,
            authz::TABLE,
            optional::TABLE,
            math::TABLE,
            format::TABLE,
        ];
        tables.into_iter().flatten().copied().collect()
    });
    by_name.get(name).copied()
}

/// A value as messages show it.
pub(crate) fn display(value: &Value<'_>) -> String {
    match value {
        Value::String(text) => text.to_string(),
        Value::Uint(value) => value.to_string(),
        Value::Double(value) => go_float(*value),
        Value::Timestamp(time) => time.to_string(),
        Value::Duration(duration) => duration.to_string(),
        other => {
            let mut shown = Bounded(String::new());
            // An error means that the text is long enough.
            let _ = write!(shown, "{other:?}");
            shown.0
        }
    }
}

/// Bytes of a value that a message shows.
const MAX_SHOWN: usize = 1024;

/// A text that takes no more than a message needs: a list can hold one long string many times.
struct Bounded(String);

impl std::fmt::Write for Bounded {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = MAX_SHOWN.saturating_sub(self.0.len());
        let end = (0..=text.len().min(room)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        self.0.push_str(&text[..end]);
        if end == text.len() { Ok(()) } else { Err(std::fmt::Error) }
    }
}
