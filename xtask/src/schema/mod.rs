//! Joins upstream's OpenAPI properties with its protobuf fields into the one table the project commits.
//!
//! The OpenAPI document knows which fields are required, their list types, merge keys and defaults; the
//! `.proto` files know tags and which structs are inlined. Neither knows which optional scalars are pointers
//! in Go: that is in `supplement.tsv`. The rules, where nothing in the supplement says otherwise:
//!
//! - a struct is a value exactly when OpenAPI gives it the default `{}`;
//! - a scalar with a zero default has no `omitempty`; any other optional scalar is a value with `omitempty`;
//! - a required list or map has no `omitempty`, an optional one has;
//! - a required time, quantity or int-or-string is a value, an optional one a pointer.

mod facts;

use facts::{Definitions, Label, Messages, Property, ProtoField, short};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const SUPPLEMENT: &str = "crates/api/schema/supplement.tsv";
const OUTPUT: &str = "crates/api/schema/types.tsv";

/// Packages that no OpenAPI definition mentions and that are spoken on the wire all the same.
const EXTRA_PACKAGES: &[&str] =
    &["admission.v1", "apidiscovery.v2", "apidiscovery.v2beta1", "meta.v1", "meta.v1beta1"];

/// Messages with a representation of their own, and the name of the type in the table.
const SPECIAL: &[(&str, &str)] = &[
    ("resource.Quantity", "quantity"),
    ("intstr.IntOrString", "intorstring"),
    ("meta.v1.Time", "time"),
    ("meta.v1.MicroTime", "microtime"),
    ("meta.v1.Duration", "duration"),
    ("meta.v1.FieldsV1", "raw"),
    ("runtime.RawExtension", "raw"),
    ("apiextensions.v1.JSON", "raw"),
    ("apiextensions.v1.JSONSchemaPropsOrArray", "schemaorarray"),
    ("apiextensions.v1.JSONSchemaPropsOrBool", "schemaorbool"),
    ("apiextensions.v1.JSONSchemaPropsOrStringArray", "schemaorstrings"),
    ("meta.v1.Verbs", "strings"),
    ("authentication.v1.ExtraValue", "strings"),
    ("authorization.v1.ExtraValue", "strings"),
    ("certificates.v1.ExtraValue", "strings"),
];

/// Messages that never appear as a type of their own.
const HIDDEN: &[&str] = &["meta.v1.Timestamp", "meta.v1.Patch", "meta.v1.TypeMeta"];

#[derive(Default)]
struct Supplement {
    statements: BTreeMap<(String, String), BTreeSet<&'static str>>,
    kinds: BTreeMap<String, Vec<String>>,
}

impl Supplement {
    fn says(&self, what: &'static str, type_: &str, field: &str) -> bool {
        let any_version = match type_.split('.').collect::<Vec<_>>().as_slice() {
            [group, _, name] => format!("{group}.*.{name}"),
            _ => type_.to_owned(),
        };
        [type_.to_owned(), any_version].into_iter().any(|name| {
            self.statements.get(&(name, field.to_owned())).is_some_and(|facts| facts.contains(what))
        })
    }
}

/// Writes the table anew from a checkout of upstream's repository.
pub fn run(checkout: &str) -> Result<(), String> {
    let definitions = facts::definitions(Path::new(checkout))?;
    let messages = facts::messages(Path::new(checkout))?;
    let supplement = fs::read_to_string(SUPPLEMENT).map_err(|e| format!("cannot read {SUPPLEMENT}: {e}"))?;
    let table = join(&definitions, &messages, &read_supplement(&supplement)?)?;
    fs::write(OUTPUT, table).map_err(|e| format!("cannot write {OUTPUT}: {e}"))
}

fn read_supplement(text: &str) -> Result<Supplement, String> {
    let mut supplement = Supplement::default();
    for line in text.lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let columns: Vec<&str> = line.split('\t').collect();
        let [what, type_, words] = columns.as_slice() else {
            return Err(format!("supplement: unexpected line {line:?}"));
        };
        let fact = match *what {
            "ptr" => "ptr",
            "value" => "value",
            "keep" => "keep",
            "omit" => "omit",
            "null" => "null",
            "kind" => {
                let kinds = supplement.kinds.entry((*type_).to_owned()).or_default();
                kinds.extend(words.split(' ').map(str::to_owned));
                continue;
            }
            other => return Err(format!("supplement: unknown statement {other:?}")),
        };
        for field in words.split(' ') {
            supplement.statements.entry(((*type_).to_owned(), field.to_owned())).or_default().insert(fact);
        }
    }
    Ok(supplement)
}

struct Join<'a> {
    definitions: &'a Definitions,
    messages: &'a Messages,
    supplement: &'a Supplement,
    special: HashMap<&'static str, &'static str>,
}

fn join(definitions: &Definitions, messages: &Messages, supplement: &Supplement) -> Result<String, String> {
    let join = Join { definitions, messages, supplement, special: SPECIAL.iter().copied().collect() };
    let mut packages: BTreeSet<&str> =
        definitions.keys().filter_map(|name| name.rsplit_once('.')).map(|(package, _)| package).collect();
    packages.extend(EXTRA_PACKAGES);

    let mut out = String::from(
        "# Made by `cargo run -p xtask -- schema`; do not edit. A line `= type atomic? kinds` opens a type, the\n\
         # lines below it are its fields as they are declared: JSON name, protobuf path (tags of inlined structs before the own tag),\n\
         # type, presence (ptr, null, omit, keep; `!` required), list type or `atomic`, map keys, patch strategy,\n\
         # merge key, default.\n",
    );
    for (name, fields) in messages {
        let Some((package, _)) = name.rsplit_once('.') else { continue };
        if !packages.contains(package)
            || join.special.contains_key(name.as_str())
            || HIDDEN.contains(&name.as_str())
            || package == "runtime"
        {
            continue;
        }
        join.type_(&mut out, name, fields)?;
    }
    Ok(out)
}

impl Join<'_> {
    fn type_(&self, out: &mut String, name: &str, fields: &[ProtoField]) -> Result<(), String> {
        let definition = self.definitions.get(name);
        let mut gvks: Vec<String> = definition.map(|d| d.gvks.clone()).unwrap_or_default();
        gvks.extend(self.supplement.kinds.get(name).into_iter().flatten().cloned());
        let atomic = definition.is_some_and(|d| d.atomic);
        let _ = writeln!(out, "=\t{name}\t{}\t{}", if atomic { "atomic" } else { "" }, gvks.join(","));

        let mut rows: Vec<(String, String)> = Vec::new();
        self.fields(&mut rows, name, name, "", fields)?;
        let has = |rows: &[(String, String)], field: &str| rows.iter().any(|(name, _)| name == field);
        // TypeMeta has no tag: the envelope carries it. It is declared before all else, kind first.
        let has_type_meta = definition.map_or(!gvks.is_empty(), |d| {
            ["apiVersion", "kind"].iter().all(|field| d.properties.contains_key(*field))
        });
        if has_type_meta {
            for field in ["apiVersion", "kind"] {
                if !has(&rows, field) {
                    rows.insert(0, (field.into(), format!("{field}\t-\tstring\tomit\t\t\t\t\t")));
                }
            }
        }
        if let Some(definition) = definition {
            for property in definition.properties.keys() {
                if !has(&rows, property) {
                    return Err(format!("{name}.{property} has no protobuf field"));
                }
            }
        }
        for (_, row) in rows {
            out.push_str(&row);
            out.push('\n');
        }
        Ok(())
    }

    fn fields(
        &self,
        rows: &mut Vec<(String, String)>,
        owner: &str,
        message: &str,
        path: &str,
        fields: &[ProtoField],
    ) -> Result<(), String> {
        let package = message.rsplit_once('.').map_or("", |(package, _)| package);
        for field in fields {
            let path = format!("{path}{}", field.tag);
            let Some(json) = self.json_name(owner, field) else {
                let inner = self.resolve(package, &field.type_)?;
                let inner_fields =
                    self.messages.get(&inner).ok_or_else(|| format!("{owner}: no message {inner}"))?;
                self.fields(rows, owner, &inner, &format!("{path}."), inner_fields)?;
                continue;
            };
            let row = self.row(owner, package, &path, &json, field)?;
            rows.push((json, row));
        }
        Ok(())
    }

    /// The name of a field in JSON: the same, but for characters that protobuf does not have (`$ref`). `None` for an
    /// inlined struct: OpenAPI has its fields and not itself.
    fn json_name(&self, owner: &str, field: &ProtoField) -> Option<String> {
        let Some(definition) = self.definitions.get(owner) else { return json_name_alone(field) };
        if definition.properties.contains_key(&field.name) {
            return Some(field.name.clone());
        }
        let plain = |name: &str| name.replace(['-', '$', '_'], "").to_lowercase();
        definition.properties.keys().find(|name| plain(name) == plain(&field.name)).cloned()
    }

    fn row(
        &self,
        owner: &str,
        package: &str,
        path: &str,
        json: &str,
        field: &ProtoField,
    ) -> Result<String, String> {
        let none = Property::default();
        let definition = self.definitions.get(owner);
        let property = match definition {
            Some(d) => d
                .properties
                .get(json)
                .ok_or_else(|| format!("{owner}.{json} is not in the OpenAPI document"))?,
            None => &none,
        };
        let element = |type_: &str| self.element(package, type_);
        let element = element(&field.type_)?;
        let type_ = match field.label {
            Label::Repeated => format!("[]{element}"),
            Label::Map => format!("{{}}{element}"),
            Label::Single => element,
        };
        let says = |what| self.supplement.says(what, owner, json);
        let presence = if says("ptr") {
            "ptr"
        } else if says("null") {
            "null"
        } else if says("omit") {
            "omit"
        } else if says("keep") || says("value") {
            "keep"
        } else {
            match type_.as_str() {
                "string" | "bool" | "int32" | "int64" | "double" => match property.default.as_str() {
                    "\"\"" | "0" | "false" => "keep",
                    _ => "omit",
                },
                "bytes" | "strings" if property.required => "keep",
                "bytes" | "strings" => "omit",
                t if t.starts_with("[]") || t.starts_with("{}") => {
                    if property.required || json == "items" && owner.ends_with("List") {
                        "keep"
                    } else {
                        "omit"
                    }
                }
                "time" | "microtime" | "quantity" | "intorstring" | "raw" if property.required => "keep",
                "meta.v1.ObjectMeta" | "meta.v1.ListMeta" => "keep",
                _ if property.default == "{}" => "keep",
                _ => "ptr",
            }
        };
        let list = match property.map_type.as_str() {
            kind @ ("atomic" | "granular") => kind,
            _ => &property.list_type,
        };
        if property.is_list != type_.starts_with("[]") && definition.is_some() && type_ != "strings" {
            return Err(format!("{owner}.{json}: OpenAPI and protobuf disagree about {type_}"));
        }
        Ok(format!(
            "{json}\t{path}\t{type_}\t{presence}{}\t{list}\t{}\t{}\t{}\t{}",
            if property.required { "!" } else { "" },
            property.map_keys,
            property.patch_strategy,
            property.merge_key,
            if property.default == "{}" { "" } else { &property.default },
        ))
    }

    fn element(&self, package: &str, type_: &str) -> Result<String, String> {
        if matches!(type_, "string" | "bool" | "int32" | "int64" | "double" | "bytes") {
            return Ok(type_.to_owned());
        }
        let name = self.resolve(package, type_)?;
        Ok(self.special.get(name.as_str()).map_or(name.clone(), |s| (*s).to_owned()))
    }

    fn resolve(&self, package: &str, type_: &str) -> Result<String, String> {
        let local = format!("{package}.{type_}");
        if self.messages.contains_key(&local) {
            return Ok(local);
        }
        let full = short(type_);
        if self.messages.contains_key(&full) {
            return Ok(full);
        }
        Err(format!("{package}: no message {type_}"))
    }
}

/// As [`Join::json_name`], for a type of a version that is no longer served, which OpenAPI does not have: the first
/// word is in small letters, and a struct that has only its type for a name is inlined.
fn json_name_alone(field: &ProtoField) -> Option<String> {
    if field.name.eq_ignore_ascii_case(&field.type_) && field.type_.ends_with("Value") {
        return None;
    }
    let capitals = field.name.chars().skip(1).take_while(char::is_ascii_uppercase).count();
    let first_word = if capitals > 1 { capitals } else { 1 };
    Some(field.name[..first_word].to_lowercase() + &field.name[first_word..])
}
