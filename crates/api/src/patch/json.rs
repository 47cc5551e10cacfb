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

/// Why an operation cannot be applied.
enum Failed {
    Error(PatchError),
    /// A test found another value.
    Test,
    /// The operation does not fit the document, in the words of the library that upstream uses.
    Refused(String),
}

impl From<PatchError> for Failed {
    fn from(error: PatchError) -> Self {
        Self::Error(error)
    }
}

const MISSING: &str = "missing value";
const INVALID_INDEX: &str = "invalid index referenced";

/// Applies `patch`, a list of operations; on an error the target is unspecified.
pub fn json_patch(target: &mut Value, patch: &Value) -> Result<(), PatchError> {
    run(target, patch).map_err(|failed| match failed {
        Failed::Error(error) => error,
        Failed::Test | Failed::Refused(_) => PatchError::Rejected,
    })
}

/// As [`json_patch`], for a patch that the server itself has made: an error contains the detail. Returns
/// false, and leaves the target unspecified, if a test failed.
pub fn json_patch_explained(target: &mut Value, patch: &Value) -> Result<bool, PatchError> {
    match run(target, patch) {
        Ok(()) => Ok(true),
        Err(Failed::Test) => Ok(false),
        Err(Failed::Refused(why)) => Err(PatchError::Malformed(why)),
        Err(Failed::Error(error)) => Err(error),
    }
}

fn run(target: &mut Value, patch: &Value) -> Result<(), Failed> {
    let operations = patch.as_array().ok_or_else(|| {
        let found = super::json_name(patch);
        PatchError::Malformed(format!("json: cannot unmarshal {found} into Go value of type jsonpatch.Patch"))
    })?;
    if operations.len() > MAX_OPERATIONS {
        return Err(PatchError::TooManyOperations(operations.len()).into());
    }
    let mut spent = Spent::default();
    for operation in operations {
        // Null is an operation without members, which has no known kind.
        if !operation.is_object() && !operation.is_null() {
            let found = super::json_name(operation);
            return Err(PatchError::Malformed(format!(
                "json: cannot unmarshal {found} into Go value of type jsonpatch.Operation"
            ))
            .into());
        }
        apply(target, operation, &mut spent)?;
    }
    Ok(())
}

fn apply(target: &mut Value, operation: &Value, spent: &mut Spent) -> Result<(), Failed> {
    let kind = operation.get("op").and_then(Value::as_str).unwrap_or("unknown");
    let text = |key: &str| {
        let undecoded = || Failed::Refused(format!("{kind} operation failed to decode {key}: {MISSING}"));
        operation.get(key).and_then(Value::as_str).ok_or_else(undecoded)
    };
    let value = || operation.get("value").cloned().unwrap_or(Value::Null);
    match kind {
        "add" => {
            let path = text("path")?;
            let value = value();
            let (pointer, within) = (Pointer::parse(path), format!("error in add for path: '{path}'"));
            let missing = format!("add operation does not apply: doc is missing path: \"{path}\"");
            let pointer = pointer.ok_or_else(|| because(&missing, MISSING))?;
            spent.check_depth(&pointer, &value)?;
            add(target, &pointer, value, spent, &missing, &within)
        }
        "remove" => {
            let path = text("path")?;
            let missing = format!("remove operation does not apply: doc is missing path: \"{path}\"");
            remove(target, path, spent, &missing, &format!("error in remove for path: '{path}'")).map(drop)
        }
        "replace" => {
            let (path, value) = (text("path")?, value());
            if path.is_empty() {
                if !value.is_object() && !value.is_array() {
                    return Err(Failed::Refused(
                        "replace operation value must be object or array: %!w(<nil>)".to_owned(),
                    ));
                }
                *target = value;
                return Ok(());
            }
            let missing = format!("replace operation does not apply: doc is missing path: {path}");
            let pointer = Pointer::parse(path).ok_or_else(|| because(&missing, MISSING))?;
            spent.check_depth(&pointer, &value)?;
            replace(target, &pointer, value, path, &missing)
        }
        "move" => {
            let from = text("from")?;
            let key = from.rsplit('/').next().unwrap_or_default().replace("~1", "/").replace("~0", "~");
            let missing = format!("move operation does not apply: doc is missing from path: {from}");
            let moved = remove(target, from, spent, &missing, &format!("error in move for path: '{key}'"))?;
            let path = text("path")?;
            let missing = format!("move operation does not apply: doc is missing destination path: {path}");
            let pointer = Pointer::parse(path).ok_or_else(|| because(&missing, MISSING))?;
            spent.check_depth(&pointer, &moved)?;
            add(target, &pointer, moved, spent, &missing, &format!("error in move for path: '{path}'"))
        }
        "copy" => {
            let from = text("from")?;
            let missing = format!("copy operation does not apply: doc is missing from path: {from}");
            let within = format!("error in copy for from: '{from}'");
            let pointer = Pointer::parse(from).ok_or_else(|| because(&missing, MISSING))?;
            let copy = member(target, &pointer, &missing, &within)?.cloned().unwrap_or(Value::Null);
            let path = text("path")?;
            let missing = format!("copy operation does not apply: doc is missing destination path: {path}");
            let pointer = Pointer::parse(path).ok_or_else(|| because(&missing, MISSING))?;
            spent.check_depth(&pointer, &copy)?;
            spent.copied += copy.to_string().len();
            if spent.copied > MAX_COPIED {
                return Err(PatchError::CopiesTooMuch(spent.copied).into());
            }
            add(target, &pointer, copy, spent, &missing, "error while adding value during copy")
        }
        "test" => {
            let expected = operation.get("value").unwrap_or(&Value::Null);
            let found = match text("path")? {
                "" => Some(&*target),
                path => {
                    let missing = format!("test operation does not apply: is missing path: {path}");
                    let pointer = Pointer::parse(path).ok_or_else(|| because(&missing, MISSING))?;
                    member(target, &pointer, &missing, &format!("error in test for path: '{path}'"))?
                }
            };
            if equal(found.unwrap_or(&Value::Null), expected) { Ok(()) } else { Err(Failed::Test) }
        }
        kind => Err(Failed::Refused(format!("Unexpected kind: {kind}"))),
    }
}

fn because(what: &str, why: &str) -> Failed {
    Failed::Refused(format!("{what}: {why}"))
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
    fn parse(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once('/')?;
        Some(Self { tokens: rest.split('/').map(|t| t.replace("~1", "/").replace("~0", "~")).collect() })
    }

    /// The last token and those before it.
    fn split(&self) -> (&str, &[String]) {
        self.tokens.split_last().map_or(("", &[]), |(last, parent)| (last.as_str(), parent))
    }
}

/// A position among `length` elements; negative ones count from the end. Or the reason why there is none.
fn position(token: &str, length: usize) -> Result<usize, String> {
    let index: i64 = token.parse().map_err(|_| format!("strconv.Atoi: parsing {token:?}: invalid syntax"))?;
    let at = if index < 0 { i64::try_from(length).unwrap_or(i64::MAX) + index } else { index };
    usize::try_from(at)
        .ok()
        .filter(|at| *at < length)
        .ok_or_else(|| format!("Unable to access invalid index: {index}: {INVALID_INDEX}"))
}

fn find_mut<'a>(target: &'a mut Value, tokens: &[String]) -> Option<&'a mut Value> {
    tokens.iter().try_fold(target, |value, token| match value {
        Value::Object(map) => map.get_mut(token),
        Value::Array(list) => {
            let at = position(token, list.len()).ok()?;
            list.get_mut(at)
        }
        _ => None,
    })
}

/// The member or element that `path` names; none when the object that would hold it has no such member. `missing` is
/// said when nothing holds it, `within` when what holds it has no such place.
fn member<'a>(
    target: &'a mut Value,
    path: &Pointer,
    missing: &str,
    within: &str,
) -> Result<Option<&'a Value>, Failed> {
    let (last, parent) = path.split();
    match find_mut(target, parent) {
        Some(Value::Object(map)) => Ok(map.get(last)),
        Some(Value::Array(list)) => {
            let at = position(last, list.len()).map_err(|why| because(within, &why))?;
            Ok(list.get(at))
        }
        _ => Err(because(missing, MISSING)),
    }
}

fn replace(
    target: &mut Value,
    path: &Pointer,
    value: Value,
    given: &str,
    missing: &str,
) -> Result<(), Failed> {
    let (last, parent) = path.split();
    match find_mut(target, parent) {
        Some(Value::Object(map)) => {
            map.insert(last, value);
            Ok(())
        }
        Some(Value::Array(list)) => {
            let at = position(last, list.len()).ok().and_then(|at| list.get_mut(at));
            let no_key = || {
                because(&format!("replace operation does not apply: doc is missing key: {given}"), MISSING)
            };
            *at.ok_or_else(no_key)? = value;
            Ok(())
        }
        _ => Err(because(missing, MISSING)),
    }
}

fn add(
    target: &mut Value,
    path: &Pointer,
    value: Value,
    spent: &mut Spent,
    missing: &str,
    within: &str,
) -> Result<(), Failed> {
    let (last, parent) = path.split();
    match find_mut(target, parent) {
        Some(Value::Object(map)) => {
            map.insert(last, value);
            Ok(())
        }
        Some(Value::Array(list)) => {
            // Adding goes between elements, of which there is one more place than elements.
            let at = match last {
                "-" => list.len(),
                last => position(last, list.len() + 1).map_err(|why| match why.starts_with("strconv") {
                    true => because(within, &format!("value was not a proper array index: '{last}': {why}")),
                    false => because(within, &why),
                })?,
            };
            spent.moves(list.len() - at)?;
            list.insert(at, value);
            Ok(())
        }
        _ => Err(because(missing, MISSING)),
    }
}

fn remove(
    target: &mut Value,
    path: &str,
    spent: &mut Spent,
    missing: &str,
    within: &str,
) -> Result<Value, Failed> {
    let pointer = Pointer::parse(path).ok_or_else(|| because(missing, MISSING))?;
    let (last, parent) = pointer.split();
    match find_mut(target, parent) {
        Some(Value::Object(map)) => map
            .remove(last)
            .ok_or_else(|| because(within, &format!("Unable to remove nonexistent key: {last}: {MISSING}"))),
        Some(Value::Array(list)) => {
            let at = position(last, list.len()).map_err(|why| because(within, &why))?;
            spent.moves(list.len() - at)?;
            Ok(list.remove(at))
        }
        _ => Err(because(missing, MISSING)),
    }
}
