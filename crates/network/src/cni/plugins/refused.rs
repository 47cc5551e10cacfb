//! Keys of the reference plugins on which ours do not act. A configuration that asks for something there is refused: a
//! network that lacks it, or is open where it should not be, would look as if it worked.

use serde_json::Value;

use super::{Call, Failure};

/// A key of a configuration, with its path in dots, and the values that ask for nothing besides empty ones.
pub(super) struct Refused {
    path: &'static str,
    harmless: &'static [i64],
    /// True if `false` is what asks for something.
    is_on: bool,
}

/// Asks for something with any value but an empty one.
pub(super) const fn key(path: &'static str) -> Refused {
    Refused { path, harmless: &[], is_on: false }
}

/// The same, but these numbers are the defaults.
pub(super) const fn unless(path: &'static str, harmless: &'static [i64]) -> Refused {
    Refused { path, harmless, is_on: false }
}

/// On by default, and always on here.
pub(super) const fn always_on(path: &'static str) -> Refused {
    Refused { path, harmless: &[], is_on: true }
}

impl Refused {
    fn asks(&self, value: &Value) -> bool {
        match value {
            Value::Null => false,
            Value::Bool(value) => *value != self.is_on,
            Value::Number(number) => {
                let number = number.as_i64().unwrap_or(i64::MIN);
                if self.harmless.is_empty() { number != 0 } else { !self.harmless.contains(&number) }
            }
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(object) => !object.is_empty(),
        }
    }
}

/// Fails with the first key that asks for something.
pub(super) fn check(call: &Call, keys: &[Refused]) -> Result<(), Failure> {
    for refused in keys {
        let mut parts = refused.path.split('.');
        let first = parts.next().and_then(|part| call.config.get(part));
        let value = parts.try_fold(first, |value, part| value.map(|value| value.get(part)));
        if let Some(value) = value.flatten().filter(|value| refused.asks(value)) {
            let path = refused.path;
            return Err(Failure::config(format!("{path} {value} is not supported: leave {path} out")));
        }
    }
    Ok(())
}
