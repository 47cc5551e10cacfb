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

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::fs;

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
struct Property {
    type_: String,
    required: bool,
    default: String,
    list_type: String,
    map_keys: String,
    map_type: String,
    patch_strategy: String,
    merge_key: String,
}

#[derive(Default)]
struct Definition {
    atomic: bool,
    gvks: Vec<String>,
    properties: BTreeMap<String, Property>,
}

struct ProtoField {
    json: String,
    tag: u32,
    type_: String,
    label: String,
}

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

pub fn run(openapi: &str, proto: &str) -> Result<(), String> {
    let definitions = read_openapi(&read(openapi)?)?;
    let messages = read_proto(&read(proto)?)?;
    let supplement = read_supplement(&read(SUPPLEMENT)?)?;
    let table = join(&definitions, &messages, &supplement)?;
    fs::write(OUTPUT, table).map_err(|e| format!("cannot write {OUTPUT}: {e}"))
}

fn read(path: &str) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("cannot read {path}: {e}"))
}

/// `io.k8s.api.core.v1.Pod` and `k8s.io.api.core.v1.Pod` become `core.v1.Pod`.
fn short(name: &str) -> String {
    let name = name.trim_start_matches('.');
    let name = name.strip_prefix("io.k8s.").or_else(|| name.strip_prefix("k8s.io.")).unwrap_or(name);
    for prefix in [
        "apimachinery.pkg.apis.",
        "apimachinery.pkg.api.",
        "apimachinery.pkg.util.",
        "apimachinery.pkg.",
        "apiextensions-apiserver.pkg.apis.",
        "apiextensions_apiserver.pkg.apis.",
        "kube-aggregator.pkg.apis.",
        "kube_aggregator.pkg.apis.",
        "api.",
    ] {
        if let Some(rest) = name.strip_prefix(prefix) {
            return rest.to_owned();
        }
    }
    name.to_owned()
}

fn read_openapi(text: &str) -> Result<BTreeMap<String, Definition>, String> {
    let mut definitions: BTreeMap<String, Definition> = BTreeMap::new();
    for line in text.lines().skip(1) {
        let columns: Vec<&str> = line.split('\t').collect();
        let [name, property, type_, _format, required, default, _enum, list, keys, map, patch, merge, gvk] =
            columns.as_slice()
        else {
            return Err(format!("openapi: unexpected line {line:?}"));
        };
        let definition = definitions.entry(short(name)).or_default();
        if property.is_empty() {
            definition.atomic = *map == "atomic";
            definition.gvks = gvk.split(',').filter(|s| !s.is_empty()).map(str::to_owned).collect();
            continue;
        }
        definition.properties.insert(
            (*property).to_owned(),
            Property {
                type_: (*type_).to_owned(),
                required: *required == "required",
                default: (*default).to_owned(),
                list_type: (*list).to_owned(),
                map_keys: (*keys).to_owned(),
                map_type: (*map).to_owned(),
                patch_strategy: (*patch).to_owned(),
                merge_key: (*merge).to_owned(),
            },
        );
    }
    Ok(definitions)
}

fn read_proto(text: &str) -> Result<BTreeMap<String, Vec<ProtoField>>, String> {
    let mut messages: BTreeMap<String, Vec<ProtoField>> = BTreeMap::new();
    for line in text.lines().skip(1) {
        let columns: Vec<&str> = line.split('\t').collect();
        let [package, message, field, json, tag, type_, label] = columns.as_slice() else {
            return Err(format!("proto: unexpected line {line:?}"));
        };
        let fields = messages.entry(format!("{}.{message}", short(package))).or_default();
        if field.is_empty() {
            continue;
        }
        let tag = tag.parse().map_err(|e| format!("proto: {message}.{field}: {e}"))?;
        fields.push(ProtoField {
            json: (*json).to_owned(),
            tag,
            type_: (*type_).to_owned(),
            label: (*label).to_owned(),
        });
    }
    Ok(messages)
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
    definitions: &'a BTreeMap<String, Definition>,
    messages: &'a BTreeMap<String, Vec<ProtoField>>,
    supplement: &'a Supplement,
    special: HashMap<&'static str, &'static str>,
}

fn join(
    definitions: &BTreeMap<String, Definition>,
    messages: &BTreeMap<String, Vec<ProtoField>>,
    supplement: &Supplement,
) -> Result<String, String> {
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
            if field.json == "(inline)" {
                let inner = self.resolve(package, &field.type_)?;
                let inner_fields =
                    self.messages.get(&inner).ok_or_else(|| format!("{owner}: no message {inner}"))?;
                self.fields(rows, owner, &inner, &format!("{path}."), inner_fields)?;
                continue;
            }
            rows.push((field.json.clone(), self.row(owner, package, &path, field)?));
        }
        Ok(())
    }

    fn row(&self, owner: &str, package: &str, path: &str, field: &ProtoField) -> Result<String, String> {
        let none = Property::default();
        let definition = self.definitions.get(owner);
        let property = match definition {
            Some(d) => d
                .properties
                .get(&field.json)
                .ok_or_else(|| format!("{owner}.{} is not in the OpenAPI document", field.json))?,
            None => &none,
        };
        let element = |type_: &str| self.element(package, type_);
        let type_ = match field.label.as_str() {
            "repeated" => format!("[]{}", element(&field.type_)?),
            "map" => {
                let inner = field.type_.strip_prefix("map<string,").and_then(|t| t.strip_suffix('>'));
                format!("{{}}{}", element(inner.ok_or_else(|| format!("{owner}: {}", field.type_))?)?)
            }
            _ => element(&field.type_)?,
        };
        let says = |what| self.supplement.says(what, owner, &field.json);
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
                    if property.required || field.json == "items" && owner.ends_with("List") {
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
        if property.type_.starts_with("array") != type_.starts_with("[]")
            && definition.is_some()
            && type_ != "strings"
        {
            return Err(format!("{owner}.{}: {} against {type_}", field.json, property.type_));
        }
        Ok(format!(
            "{}\t{path}\t{type_}\t{presence}{}\t{list}\t{}\t{}\t{}\t{}",
            field.json,
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
