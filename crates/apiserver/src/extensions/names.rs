//! Which names a definition gets, and the conditions that follow.

use super::conditions::{condition, set};
use ferrite_json::{Value, json};
use jiff::Timestamp;
use std::collections::BTreeSet;

/// The status of a definition whose rivals have these names; none if it does not change.
pub(super) fn decide(definition: &Value, rivals: &[&Value], now: Timestamp) -> Option<Value> {
    let before = &definition["status"];
    let taken = Taken::by(rivals);
    let (names, problem) = accept(&definition["spec"]["names"], &before["acceptedNames"], &taken);
    let mut after = before.clone();
    after["acceptedNames"] = names;
    let (accepted, reason, message) = match &problem {
        None => ("True", "NoConflicts", "no conflicts found"),
        Some((reason, message)) => ("False", *reason, message.as_str()),
    };
    set(&mut after, "NamesAccepted", accepted, reason, message, now);
    if condition(definition, "Established") != Some("True") {
        match problem {
            None => {
                let message = "the initial names have been accepted";
                set(&mut after, "Established", "True", "InitialNamesAccepted", message, now);
            }
            Some(_) => {
                set(&mut after, "Established", "False", "NotAccepted", "not all names are accepted", now);
            }
        }
    }
    (after != *before).then_some(after)
}

/// A definition that cannot be served is not established, and says why.
pub(super) fn refuse(status: &mut Value, why: &str, now: Timestamp) {
    set(status, "Established", "False", "NotSupported", why, now);
}

fn text<'a>(names: &'a Value, key: &str) -> &'a str {
    names[key].as_str().unwrap_or_default()
}

fn texts<'a>(names: &'a Value, key: &str) -> Vec<&'a str> {
    names[key].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// The names other definitions of the group have been given.
#[derive(Default)]
struct Taken<'a> {
    resources: BTreeSet<&'a str>,
    kinds: BTreeSet<&'a str>,
}

impl<'a> Taken<'a> {
    fn by(rivals: &[&'a Value]) -> Self {
        let mut taken = Self::default();
        for names in rivals {
            taken.resources.extend([text(names, "plural"), text(names, "singular")]);
            taken.resources.extend(texts(names, "shortNames"));
            taken.kinds.extend([text(names, "kind"), text(names, "listKind")]);
        }
        taken
    }
}

/// The names that a definition has from now on. If a name is taken, the definition keeps its earlier one;
/// the last such conflict is returned.
fn accept(wanted: &Value, before: &Value, taken: &Taken<'_>) -> (Value, Option<(&'static str, String)>) {
    let mut names = json!({"plural": "", "kind": ""});
    if let (Some(names), Some(before)) = (names.as_object_mut(), before.as_object()) {
        names.extend(before.clone());
    }
    let mut problem = None;
    let free = |name: &str, before: &str, taken: &BTreeSet<&str>| {
        let is_free = name.is_empty() || name == before || !taken.contains(name);
        if is_free { Ok(()) } else { Err(format!("{name:?} is already in use")) }
    };
    for (key, reason, of_kinds) in [
        ("plural", "PluralConflict", false),
        ("singular", "SingularConflict", false),
        ("shortNames", "ShortNamesConflict", false),
        ("kind", "KindConflict", true),
        ("listKind", "ListKindConflict", true),
    ] {
        let taken = if of_kinds { &taken.kinds } else { &taken.resources };
        let conflicts: Vec<String> = if key == "shortNames" {
            let had = texts(before, key);
            let new = texts(wanted, key).into_iter().filter(|name| !had.contains(name));
            new.filter_map(|name| free(name, "", taken).err()).collect()
        } else {
            free(text(wanted, key), text(before, key), taken).err().into_iter().collect()
        };
        match conflicts.as_slice() {
            [] => match wanted.get(key).filter(|given| !given.is_null()) {
                Some(given) => names[key] = given.clone(),
                None => {
                    names.as_object_mut().map(|names| names.remove(key));
                }
            },
            [only] => problem = Some((reason, only.clone())),
            many => problem = Some((reason, format!("[{}]", many.join(", ")))),
        }
    }
    match wanted.get("categories").filter(|given| !given.is_null()) {
        Some(given) => names["categories"] = given.clone(),
        None => {
            names.as_object_mut().map(|names| names.remove("categories"));
        }
    }
    (names, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(names: Value) -> Value {
        json!({"metadata": {"name": "x"}, "spec": {"names": names}, "status": {}})
    }

    #[test]
    fn free_names_are_accepted_and_taken_ones_wait() {
        let now = Timestamp::UNIX_EPOCH;
        let mut first = definition(json!({"plural": "wids", "kind": "Wid", "shortNames": ["w"]}));
        first["status"] = decide(&first, &[], now).expect("a status");
        assert_eq!(condition(&first, "NamesAccepted"), Some("True"));
        assert_eq!(condition(&first, "Established"), Some("True"));
        assert_eq!(decide(&first, &[], now), None);

        let second = definition(json!({"plural": "gads", "kind": "Wid", "shortNames": ["w"]}));
        let refused = decide(&second, &[&first["status"]["acceptedNames"]], now).expect("a status");
        assert_eq!(refused["acceptedNames"], json!({"plural": "gads", "kind": ""}));
        let conditions = &refused["conditions"];
        assert_eq!(conditions[0]["reason"], "KindConflict");
        assert_eq!(conditions[0]["message"], "\"Wid\" is already in use");
        assert_eq!(conditions[1]["reason"], "NotAccepted");
    }

    #[test]
    fn an_established_definition_stays_so_while_it_wants_a_name_of_another() {
        let now = Timestamp::UNIX_EPOCH;
        let mut first = definition(json!({"plural": "wids", "kind": "Wid"}));
        first["status"] = decide(&first, &[], now).expect("a status");
        first["spec"]["names"]["shortNames"] = json!(["w"]);
        let rival = json!({"plural": "gads", "kind": "Gad", "shortNames": ["w"]});
        first["status"] = decide(&first, &[&rival], now).expect("a status");
        assert_eq!(condition(&first, "NamesAccepted"), Some("False"));
        assert_eq!(condition(&first, "Established"), Some("True"));
        assert_eq!(first["status"]["acceptedNames"], json!({"plural": "wids", "kind": "Wid"}));
    }
}
