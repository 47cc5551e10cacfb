//! The descriptions of types and fields for `kubectl explain`, from the tables in `descriptions/`.

use ferrite_api::schema::{Field, TypeRef};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::LazyLock;

/// The tables; the first says how they are written.
const TABLES: &[&str] = &[
    include_str!("descriptions/meta.txt"),
    include_str!("descriptions/pods.txt"),
    include_str!("descriptions/volumes.txt"),
    include_str!("descriptions/core.txt"),
    include_str!("descriptions/workloads.txt"),
    include_str!("descriptions/network.txt"),
    include_str!("descriptions/access.txt"),
    include_str!("descriptions/extensions.txt"),
    include_str!("descriptions/devices.txt"),
];

/// The type whose fields mean the same wherever they stand.
const EVERYWHERE: &str = "*";

#[derive(Default)]
struct Entry {
    text: &'static str,
    /// The type that fields are taken over from.
    parent: Option<&'static str>,
    fields: HashMap<&'static str, &'static str>,
}

static ENTRIES: LazyLock<HashMap<&'static str, Entry>> = LazyLock::new(|| {
    let mut entries: HashMap<&str, Entry> = HashMap::new();
    for table in TABLES {
        let mut open = EVERYWHERE;
        for line in table.lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
            let (name, text) = line.trim_start().split_once(' ').unwrap_or((line, ""));
            if line.starts_with(' ') {
                entries.entry(open).or_default().fields.insert(name, text);
                continue;
            }
            open = name;
            let entry = entries.entry(name).or_default();
            (entry.parent, entry.text) = match text.strip_prefix("< ") {
                Some(rest) => rest.split_once(' ').map_or((Some(rest), ""), |(p, t)| (Some(p), t)),
                None => (None, text),
            };
        }
    }
    entries
});

/// Types are described for all versions at once: `core.v1.PodSpec` by `core.PodSpec`.
pub(super) fn unversioned(name: &str) -> String {
    match name.split('.').collect::<Vec<_>>().as_slice() {
        [group, _, name] => format!("{group}.{name}"),
        _ => name.to_owned(),
    }
}

/// The description of a type.
pub(super) fn of_type(type_: TypeRef) -> Option<Cow<'static, str>> {
    let known = ENTRIES.get(&*unversioned(type_.name)).map(|e| e.text).filter(|text| !text.is_empty());
    let list = || {
        let item = type_.go_name().strip_suffix("List")?;
        type_.field("items").map(|_| format!("A list of {item} objects.").into())
    };
    known.map(Cow::from).or_else(list)
}

/// The description of a simple named type: `Quantity`.
pub(super) fn of_simple(name: &str) -> Option<&'static str> {
    let name = name.rsplit('.').next().unwrap_or(name);
    ENTRIES.get(&*format!("*{name}")).map(|entry| entry.text)
}

/// The description of a field.
pub(super) fn of_field(type_: TypeRef, field: &Field) -> Option<&'static str> {
    let mut next = ENTRIES.get(&*unversioned(type_.name));
    // A type takes over from one that may take over in turn, and no further.
    for _ in 0..4 {
        let Some(entry) = next else { break };
        if let Some(text) = entry.fields.get(field.name) {
            return Some(text);
        }
        next = entry.parent.and_then(|parent| ENTRIES.get(parent));
    }
    ENTRIES.get(EVERYWHERE)?.fields.get(field.name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_api::schema::{self, Kind};
    use std::collections::BTreeSet;

    /// Every type that a document of a built-in resource can hold.
    fn documented() -> Vec<TypeRef> {
        let mut found: BTreeSet<&str> = BTreeSet::new();
        let mut wanted: Vec<TypeRef> = Vec::new();
        for resource in ferrite_api::kinds::built_in() {
            let list = format!("{}List", resource.kind);
            wanted.extend(resource.schema);
            wanted.extend(schema::kind(&resource.group, &resource.version, &list));
        }
        let kinds = ["APIGroup", "APIGroupList", "APIResourceList", "APIVersions", "DeleteOptions", "Status"];
        wanted.extend(kinds.iter().filter_map(|kind| schema::named(&format!("meta.v1.{kind}"))));
        let mut all = Vec::new();
        while let Some(type_) = wanted.pop() {
            if found.insert(type_.name) {
                all.push(type_);
                wanted.extend(type_.fields.iter().filter_map(|field| struct_of(&field.kind)));
            }
        }
        assert!(all.len() > 600, "only {} types", all.len());
        all
    }

    fn struct_of(kind: &Kind) -> Option<TypeRef> {
        match kind {
            Kind::Struct(type_) => Some(type_),
            Kind::List(item) | Kind::Map(item) => struct_of(item),
            _ => None,
        }
    }

    #[test]
    fn everything_is_described() {
        let mut missing = Vec::new();
        for type_ in documented() {
            if of_type(type_).is_none() {
                missing.push(type_.name.to_owned());
            }
            let fields = type_.fields.iter().filter(|field| of_field(type_, field).is_none());
            missing.extend(fields.map(|field| format!("{}.{}", type_.name, field.name)));
        }
        assert!(missing.is_empty(), "{} without a description:\n{}", missing.len(), missing.join("\n"));
    }

    /// Every line must describe an existing type or field.
    #[test]
    fn every_line_is_about_something() {
        let known: BTreeSet<String> = schema::types().map(|t| unversioned(t.name)).collect();
        let mut fields: BTreeSet<(String, &str)> = BTreeSet::new();
        for type_ in schema::types() {
            fields.extend(type_.fields.iter().map(|f| (unversioned(type_.name), f.name)));
        }
        let mut idle = Vec::new();
        for (name, entry) in ENTRIES.iter() {
            if let Some(parent) = entry.parent
                && !ENTRIES.contains_key(parent)
            {
                idle.push(format!("{name} < {parent}"));
            }
            if name.starts_with('*') {
                continue;
            }
            if !known.contains(*name) {
                idle.push((*name).to_owned());
            }
            // A type that others take over from may name their fields too.
            let heirs = ENTRIES.iter().filter(|(_, e)| e.parent == Some(name)).map(|(heir, _)| *heir);
            let owners: Vec<&str> = std::iter::once(*name).chain(heirs).collect();
            let absent = entry
                .fields
                .keys()
                .filter(|f| !owners.iter().any(|o| fields.contains(&((*o).to_owned(), f))));
            idle.extend(absent.map(|field| format!("{name}.{field}")));
        }
        assert!(idle.is_empty(), "{}", idle.join("\n"));
    }

    #[test]
    fn descriptions_are_sentences() {
        for (name, entry) in ENTRIES.iter() {
            let texts = entry.fields.values().chain(std::iter::once(&entry.text));
            for text in texts.filter(|text| !text.is_empty()) {
                assert!(text.ends_with('.') && text.len() < 200, "{name}: {text}");
            }
        }
    }
}
