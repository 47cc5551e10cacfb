//! Checks of kinds whose validation upstream generates from declarations in their types. Such checks pass over parts that a
//! change leaves as they were.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, present, text};
use crate::kinds::common::check::{IMMUTABLE, complaints, repeated};
use crate::meta_validation::long_name;
use ferrite_json::Value;

const POOL_NAME_MAX: usize = 253;

/// The error of a part that may not change. Its value is not printed.
pub fn immutable(path: &Path) -> FieldError {
    FieldError::invalid(path, Value::Null, IMMUTABLE)
}

/// Exactly one of the members of a union is set.
pub fn one_member(object: &Value, old: Option<&Value>, members: &[&str], path: &Path) -> Option<FieldError> {
    let is_set = |object: &Value| members.iter().map(|member| present(object, member)).collect::<Vec<_>>();
    if old.is_some_and(|old| is_set(old) == is_set(object)) {
        return None;
    }
    let given: Vec<&str> = members.iter().copied().filter(|member| present(object, member)).collect();
    let all: Vec<String> = members.iter().map(|member| format!("`{member}`")).collect();
    let all = all.join(", ");
    match given.len() {
        1 => None,
        0 => Some(FieldError::invalid(path, "", format!("must specify one of: {all}"))),
        _ => {
            let why = format!("must specify exactly one of: {all}");
            Some(FieldError::invalid(path, format!("{{{}}}", given.join(", ")), why))
        }
    }
}

/// A number that is set is at least this.
pub fn at_least(object: &Value, key: &str, least: i64, path: &Path) -> Option<FieldError> {
    let number = object.get(key)?.as_i64()?;
    let why = || format!("must be greater than or equal to {least}");
    (number < least).then(|| FieldError::invalid(&path.child(key), number, why()))
}

/// A number that is set is at most this.
pub fn at_most(object: &Value, key: &str, most: i64, path: &Path) -> Option<FieldError> {
    let number = object.get(key)?.as_i64()?;
    let why = || format!("must be less than or equal to {most}");
    (number > most).then(|| FieldError::invalid(&path.child(key), number, why()))
}

/// A number that must be set, where zero counts as not set, and is at least this.
pub fn required_at_least(object: &Value, key: &str, least: i64, path: &Path) -> Option<FieldError> {
    match int(object, key) {
        0 => Some(FieldError::required(&path.child(key), "")),
        _ => at_least(object, key, least, path),
    }
}

/// The entries of a list whose key field repeats that of an earlier one. They are printed with these fields, those marked
/// with `!` even when they are not set.
pub fn unique(entries: &[Value], key: &str, fields: &[&str], path: &Path) -> FieldErrors {
    let again = repeated(entries.iter().map(|entry| text(entry, key)));
    let print = |entry: &Value| {
        let members = fields.iter().filter_map(|field| match field.strip_suffix('!') {
            Some(field) => Some((field, entry.get(field).cloned().unwrap_or_default())),
            None => Some((*field, entry.get(*field)?.clone())),
        });
        let members: Vec<String> = members.map(|(field, value)| format!("\"{field}\":{value}")).collect();
        format!("{{{}}}", members.join(","))
    };
    let repeats = entries.iter().enumerate().filter(|(index, _)| again[*index]);
    repeats
        .map(|(index, entry)| {
            FieldError::duplicate(&path.index(index), entry.clone()).rendered_as(print(entry))
        })
        .collect()
}

/// The name of a pool: one or more domains.
pub fn pool_name(name: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if name.len() > POOL_NAME_MAX {
        errors.push(FieldError::too_long(path, POOL_NAME_MAX));
    }
    for (index, part) in name.split('/').enumerate() {
        if part.is_empty() {
            errors.push(FieldError::invalid(path, name, format!("segment {index}: must not be empty")));
            continue;
        }
        let problems = long_name(part).into_iter().map(|problem| format!("segment {index}: {problem}"));
        errors.extend(complaints(path, part, problems.collect()));
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn texts(errors: impl IntoIterator<Item = FieldError>) -> Vec<String> {
        errors.into_iter().map(|error| error.to_string()).collect()
    }

    #[test]
    fn one_member_of_a_union_is_set() {
        let check = |object: Value, old: Option<Value>| {
            texts(one_member(&object, old.as_ref(), &["a", "b"], &Path::new("u")))
        };
        for (object, old, told) in [
            (json!({"a": {}}), None, ""),
            (json!({}), None, "u: Invalid value: \"\": must specify one of: `a`, `b`"),
            (
                json!({"a": {}, "b": 1}),
                None,
                "u: Invalid value: \"{a, b}\": must specify exactly one of: `a`, `b`",
            ),
            (json!({"a": {}, "b": 1}), Some(json!({"a": 1, "b": 1})), ""),
            (json!({}), Some(json!({"a": 1})), "u: Invalid value: \"\": must specify one of: `a`, `b`"),
        ] {
            assert_eq!(check(object, old).concat(), told);
        }
    }

    #[test]
    fn pools_have_names_of_segments() {
        let check = |name: &str| texts(pool_name(name, &Path::new("p")));
        assert_eq!(check("a/b.example"), [""; 0]);
        assert_eq!(check("a//b"), ["p: Invalid value: \"a//b\": segment 1: must not be empty"]);
        assert!(
            check("a/B")[0].starts_with("p: Invalid value: \"B\": segment 1: a lowercase RFC 1123 subdomain")
        );
        assert_eq!(check(&"a".repeat(254)).len(), 2);
    }
}
