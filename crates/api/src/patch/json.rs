//! JSON Patch (RFC 6902) with the leniencies of the library upstream uses: negative indices count from the
//! end, and a test for null succeeds on a missing member.

use super::PatchError;
use crate::codec::MAX_DEPTH;
use ferrite_json::Value;

/// Upstream's limit on the number of operations.
pub const MAX_OPERATIONS: usize = 10_000;

/// Copies of one patch may have this many bytes together, as upstream.
pub const MAX_COPIED: usize = 3 << 20;

/// Values that the moves and copies of one patch may walk through together.
const MAX_WALKED: usize = 16 << 20;

/// Work that the operations of one patch have done.
#[derive(Default)]
struct Spent {
    /// Bytes copied.
    copied: usize,
    /// Values walked through.
    walked: usize,
}

impl Spent {
    /// Refuses a value that would make the document too deep at `path`.
    fn check_depth(&mut self, path: &Pointer, value: &Value) -> Result<(), PatchError> {
        let levels = MAX_DEPTH.checked_sub(path.tokens.len()).ok_or(PatchError::TooDeep)?;
        self.walked += value.count_within(levels).ok_or(PatchError::TooDeep)?;
        if self.walked > MAX_WALKED { Err(PatchError::TooMuchWork) } else { Ok(()) }
    }
}

/// Applies `patch`, a list of operations; on an error the target is unspecified.
pub fn json_patch(target: &mut Value, patch: &Value) -> Result<(), PatchError> {
    let operations = patch.as_array().ok_or_else(|| {
        let found = super::json_name(patch);
        PatchError::Malformed(format!("json: cannot unmarshal {found} into Go value of type jsonpatch.Patch"))
    })?;
    if operations.len() > MAX_OPERATIONS {
        return Err(PatchError::TooManyOperations(operations.len()));
    }
    let mut spent = Spent::default();
    for operation in operations {
        if !operation.is_object() {
            let found = super::json_name(operation);
            return Err(PatchError::Malformed(format!(
                "json: cannot unmarshal {found} into Go value of type jsonpatch.Operation"
            )));
        }
        apply(target, operation, &mut spent)?;
    }
    Ok(())
}

fn apply(target: &mut Value, operation: &Value, spent: &mut Spent) -> Result<(), PatchError> {
    let text = |key: &str| operation.get(key).and_then(Value::as_str).ok_or(PatchError::Rejected);
    let value = || operation.get("value").cloned().ok_or(PatchError::Rejected);
    let path = Pointer::parse(text("path")?)?;
    match text("op")? {
        "add" => {
            let value = operation.get("value").cloned().unwrap_or(Value::Null);
            spent.check_depth(&path, &value)?;
            add(target, &path, value)
        }
        "remove" => remove(target, &path).map(drop),
        "replace" => {
            if path.is_root() {
                *target = value()?;
                return Ok(());
            }
            let place = find_mut(target, &path.tokens).ok_or(PatchError::Rejected)?;
            let value = operation.get("value").cloned().unwrap_or(Value::Null);
            spent.check_depth(&path, &value)?;
            *place = value;
            Ok(())
        }
        "move" => {
            let from = Pointer::parse(text("from")?)?;
            let moved = remove(target, &from)?;
            spent.check_depth(&path, &moved)?;
            add(target, &path, moved)
        }
        "copy" => {
            let from = Pointer::parse(text("from")?)?;
            let copy = find_mut(target, &from.tokens).ok_or(PatchError::Rejected)?;
            spent.check_depth(&path, copy)?;
            let copy = copy.clone();
            spent.copied += copy.to_string().len();
            if spent.copied > MAX_COPIED {
                return Err(PatchError::CopiesTooMuch(spent.copied));
            }
            add(target, &path, copy)
        }
        "test" => {
            let expected = operation.get("value").unwrap_or(&Value::Null);
            let same = match find_mut(target, &path.tokens) {
                Some(found) => equal(found, expected),
                None => expected.is_null(),
            };
            if same { Ok(()) } else { Err(PatchError::Rejected) }
        }
        _ => Err(PatchError::Rejected),
    }
}

/// Numbers are equal when they are the same number, however spelt.
fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => {
            left == right || left.as_f64().is_some_and(|l| Some(l) == right.as_f64())
        }
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(l, r)| equal(l, r))
        }
        (Value::Object(left), Value::Object(right)) => {
            left.len() == right.len()
                && left.iter().all(|(key, l)| right.get(key).is_some_and(|r| equal(l, r)))
        }
        _ => left == right,
    }
}

struct Pointer {
    tokens: Vec<String>,
}

impl Pointer {
    fn parse(text: &str) -> Result<Self, PatchError> {
        if text.is_empty() {
            return Ok(Self { tokens: Vec::new() });
        }
        let rest = text.strip_prefix('/').ok_or(PatchError::Rejected)?;
        Ok(Self { tokens: rest.split('/').map(|t| t.replace("~1", "/").replace("~0", "~")).collect() })
    }

    fn is_root(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// A position among `length` elements; negative ones count from the end.
fn position(token: &str, length: usize) -> Option<usize> {
    let index: i64 = token.parse().ok()?;
    let at = if index < 0 { i64::try_from(length).ok()? + index } else { index };
    usize::try_from(at).ok()
}

fn find_mut<'a>(target: &'a mut Value, tokens: &[String]) -> Option<&'a mut Value> {
    tokens.iter().try_fold(target, |value, token| match value {
        Value::Object(map) => map.get_mut(token),
        Value::Array(list) => {
            let at = position(token, list.len())?;
            list.get_mut(at)
        }
        _ => None,
    })
}

fn add(target: &mut Value, path: &Pointer, value: Value) -> Result<(), PatchError> {
    let Some((last, parent)) = path.tokens.split_last() else {
        *target = value;
        return Ok(());
    };
    match find_mut(target, parent) {
        Some(Value::Object(map)) => {
            map.insert(last.clone(), value);
            Ok(())
        }
        Some(Value::Array(list)) => {
            // Adding goes between elements, of which there is one more place than elements.
            let at = if last == "-" { Some(list.len()) } else { position(last, list.len() + 1) };
            let at = at.filter(|at| *at <= list.len()).ok_or(PatchError::Rejected)?;
            list.insert(at, value);
            Ok(())
        }
        _ => Err(PatchError::Rejected),
    }
}

fn remove(target: &mut Value, path: &Pointer) -> Result<Value, PatchError> {
    let (last, parent) = path.tokens.split_last().ok_or(PatchError::Rejected)?;
    match find_mut(target, parent) {
        Some(Value::Object(map)) => map.remove(last).ok_or(PatchError::Rejected),
        Some(Value::Array(list)) => {
            let at = position(last, list.len()).filter(|at| *at < list.len());
            Ok(list.remove(at.ok_or(PatchError::Rejected)?))
        }
        _ => Err(PatchError::Rejected),
    }
}
