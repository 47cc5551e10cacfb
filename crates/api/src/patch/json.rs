//! JSON Patch (RFC 6902) with the leniencies of the library upstream uses: negative indices count from the
//! end, a test for null succeeds on a missing member of an object that is there, a replace of a missing member
//! adds it, a copy of a missing member copies null, and a pointer's text before its first slash is ignored.

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
    /// Counts elements that an insertion or a removal moves: a long list times many operations is much work.
    fn moves(&mut self, elements: usize) -> Result<(), PatchError> {
        self.walked += elements;
        if self.walked > MAX_WALKED { Err(PatchError::TooMuchWork) } else { Ok(()) }
    }

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
        // Null is an operation without members, which has no known kind.
        if !operation.is_object() && !operation.is_null() {
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
    let value = || operation.get("value").cloned().unwrap_or(Value::Null);
    match text("op")? {
        "add" => {
            let (path, value) = (Pointer::parse(text("path")?)?, value());
            spent.check_depth(&path, &value)?;
            add(target, &path, value, spent)
        }
        "remove" => remove(target, &Pointer::parse(text("path")?)?, spent).map(drop),
        "replace" => {
            let value = value();
            if text("path")?.is_empty() {
                if !value.is_object() && !value.is_array() {
                    return Err(PatchError::Rejected);
                }
                *target = value;
                return Ok(());
            }
            let path = Pointer::parse(text("path")?)?;
            spent.check_depth(&path, &value)?;
            replace(target, &path, value)
        }
        "move" => {
            let from = Pointer::parse(text("from")?)?;
            let moved = remove(target, &from, spent)?;
            let path = Pointer::parse(text("path")?)?;
            spent.check_depth(&path, &moved)?;
            add(target, &path, moved, spent)
        }
        "copy" => {
            let from = Pointer::parse(text("from")?)?;
            let copy = member(target, &from)?.cloned().unwrap_or(Value::Null);
            let path = Pointer::parse(text("path")?)?;
            spent.check_depth(&path, &copy)?;
            spent.copied += copy.to_string().len();
            if spent.copied > MAX_COPIED {
                return Err(PatchError::CopiesTooMuch(spent.copied));
            }
            add(target, &path, copy, spent)
        }
        "test" => {
            let expected = operation.get("value").unwrap_or(&Value::Null);
            let found = match text("path")? {
                "" => Some(&*target),
                path => member(target, &Pointer::parse(path)?)?,
            };
            if equal(found.unwrap_or(&Value::Null), expected) { Ok(()) } else { Err(PatchError::Rejected) }
        }
        _ => Err(PatchError::Rejected),
    }
}

/// As upstream, which compares the text of numbers: 1 and 1.0 are not equal.
fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => left.to_string() == right.to_string(),
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

/// A path below the document. The document itself is no such path: only `replace` and `test` know it.
struct Pointer {
    tokens: Vec<String>,
}

impl Pointer {
    fn parse(text: &str) -> Result<Self, PatchError> {
        let (_, rest) = text.split_once('/').ok_or(PatchError::Rejected)?;
        Ok(Self { tokens: rest.split('/').map(|t| t.replace("~1", "/").replace("~0", "~")).collect() })
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

/// The member or element that `path` names; none when the object that would hold it has no such member.
fn member<'a>(target: &'a mut Value, path: &Pointer) -> Result<Option<&'a Value>, PatchError> {
    let (last, parent) = path.tokens.split_last().ok_or(PatchError::Rejected)?;
    match find_mut(target, parent) {
        Some(Value::Object(map)) => Ok(map.get(last)),
        Some(Value::Array(list)) => {
            let at = position(last, list.len()).and_then(|at| list.get(at));
            at.map(Some).ok_or(PatchError::Rejected)
        }
        _ => Err(PatchError::Rejected),
    }
}

fn replace(target: &mut Value, path: &Pointer, value: Value) -> Result<(), PatchError> {
    let (last, parent) = path.tokens.split_last().ok_or(PatchError::Rejected)?;
    match find_mut(target, parent) {
        Some(Value::Object(map)) => {
            map.insert(last.clone(), value);
            Ok(())
        }
        Some(Value::Array(list)) => {
            let slot = position(last, list.len()).and_then(|at| list.get_mut(at));
            *slot.ok_or(PatchError::Rejected)? = value;
            Ok(())
        }
        _ => Err(PatchError::Rejected),
    }
}

fn add(target: &mut Value, path: &Pointer, value: Value, spent: &mut Spent) -> Result<(), PatchError> {
    let (last, parent) = path.tokens.split_last().ok_or(PatchError::Rejected)?;
    match find_mut(target, parent) {
        Some(Value::Object(map)) => {
            map.insert(last.clone(), value);
            Ok(())
        }
        Some(Value::Array(list)) => {
            // Adding goes between elements, of which there is one more place than elements.
            let at = if last == "-" { Some(list.len()) } else { position(last, list.len() + 1) };
            let at = at.filter(|at| *at <= list.len()).ok_or(PatchError::Rejected)?;
            spent.moves(list.len() - at)?;
            list.insert(at, value);
            Ok(())
        }
        _ => Err(PatchError::Rejected),
    }
}

fn remove(target: &mut Value, path: &Pointer, spent: &mut Spent) -> Result<Value, PatchError> {
    let (last, parent) = path.tokens.split_last().ok_or(PatchError::Rejected)?;
    match find_mut(target, parent) {
        Some(Value::Object(map)) => map.remove(last).ok_or(PatchError::Rejected),
        Some(Value::Array(list)) => {
            let at = position(last, list.len()).filter(|at| *at < list.len());
            let at = at.ok_or(PatchError::Rejected)?;
            spent.moves(list.len() - at)?;
            Ok(list.remove(at))
        }
        _ => Err(PatchError::Rejected),
    }
}
