//! Turns `schema/types.tsv` into static tables, so that the schema costs nothing at start-up.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

#[path = "src/schema/slots.rs"]
mod slots;

/// A slot that holds no field.
const EMPTY: u8 = u8::MAX;

struct Field<'a> {
    name: &'a str,
    path: &'a str,
    type_: &'a str,
    presence: &'a str,
    list: &'a str,
    keys: &'a str,
    patch: &'a str,
    merge_key: &'a str,
    default: &'a str,
    declared: usize,
    go: &'a str,
    embedded: &'a str,
}

struct Type<'a> {
    name: &'a str,
    atomic: bool,
    kinds: Vec<&'a str>,
    fields: Vec<Field<'a>>,
}

fn main() {
    const SOURCE: &str = "schema/types.tsv";
    const GO: &str = "schema/go.tsv";
    println!("cargo:rerun-if-changed={SOURCE}");
    println!("cargo:rerun-if-changed={GO}");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/schema/slots.rs");
    let text = fs::read_to_string(SOURCE).expect("the schema table is part of the crate");
    let go = fs::read_to_string(GO).expect("the table of Go's types is part of the crate");
    let types = parse(&text, &go_types(&go));
    let index: HashMap<&str, usize> = types.iter().enumerate().map(|(i, t)| (t.name, i)).collect();

    let mut out = String::new();
    for (number, type_) in types.iter().enumerate() {
        emit_type(&mut out, number, type_, &index);
    }
    emit_kinds(&mut out, &types);
    let mut listed: Vec<usize> = (0..types.len()).collect();
    listed.sort_by_key(|i| types[*i].name);
    let listed: Vec<String> = listed.iter().map(|i| format!("&T{i}")).collect();
    let _ = writeln!(out, "pub(super) static TYPES: &[&Type] = &[{}];", listed.join(","));

    let target = Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("schema_tables.rs");
    fs::write(target, out).expect("OUT_DIR is writable");
}

/// Parses `schema/go.tsv`: the Go type and the embedded structs of a field, empty if the table has none.
fn go_types(text: &str) -> HashMap<(&str, &str), (&str, &str)> {
    let told = |text| if text == "-" { "" } else { text };
    text.lines()
        .filter(|l| !l.starts_with('#'))
        .map(|line| match line.split('\t').collect::<Vec<_>>().as_slice() {
            [type_, field, go, embedded] => ((*type_, *field), (told(*go), told(*embedded))),
            _ => panic!("schema/go.tsv: unexpected line {line:?}"),
        })
        .collect()
}

fn parse<'a>(text: &'a str, go_types: &HashMap<(&str, &str), (&'a str, &'a str)>) -> Vec<Type<'a>> {
    let mut types: Vec<Type> = Vec::new();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let columns: Vec<&str> = line.split('\t').collect();
        match columns.as_slice() {
            ["=", name, atomic, kinds] => types.push(Type {
                name,
                atomic: !atomic.is_empty(),
                kinds: kinds.split(',').filter(|k| !k.is_empty()).collect(),
                fields: Vec::new(),
            }),
            [name, path, type_, presence, list, keys, patch, merge_key, default] => {
                let owner = types.last_mut().expect("a type line comes first");
                let declared = owner.fields.len();
                let (go, embedded) = go_types.get(&(owner.name, *name)).copied().unwrap_or_default();
                owner.fields.push(Field {
                    name,
                    path,
                    type_,
                    presence,
                    list,
                    keys,
                    patch,
                    merge_key,
                    default,
                    declared,
                    go,
                    embedded,
                });
            }
            _ => panic!("schema/types.tsv: unexpected line {line:?}"),
        }
    }
    for type_ in &mut types {
        type_.fields.sort_by_key(|f| f.name);
    }
    types
}

fn kind(type_: &str, index: &HashMap<&str, usize>) -> String {
    if let Some(inner) = type_.strip_prefix("[]") {
        return format!("Kind::List(&{})", kind(inner, index));
    }
    if let Some(inner) = type_.strip_prefix("{}") {
        return format!("Kind::Map(&{})", kind(inner, index));
    }
    let schema = || format!("&T{}", index["apiextensions.v1.JSONSchemaProps"]);
    match type_ {
        "string" => "Kind::String".into(),
        "bool" => "Kind::Bool".into(),
        "int32" => "Kind::Int32".into(),
        "int64" => "Kind::Int64".into(),
        "double" => "Kind::Double".into(),
        "bytes" => "Kind::Bytes".into(),
        "quantity" => "Kind::Quantity".into(),
        "intorstring" => "Kind::IntOrString".into(),
        "time" => "Kind::Time".into(),
        "microtime" => "Kind::MicroTime".into(),
        "duration" => "Kind::Duration".into(),
        "raw" => "Kind::Raw".into(),
        "strings" => "Kind::Strings".into(),
        "schemaorarray" => format!("Kind::SchemaOrArray({})", schema()),
        "schemaorbool" => format!("Kind::SchemaOrBool({})", schema()),
        "schemaorstrings" => format!("Kind::SchemaOrStrings({})", schema()),
        name => {
            let number = index.get(name).unwrap_or_else(|| panic!("schema/types.tsv: no type {name}"));
            format!("Kind::Struct(&T{number})")
        }
    }
}

fn emit_type(out: &mut String, number: usize, type_: &Type, index: &HashMap<&str, usize>) {
    let _ = writeln!(
        out,
        "static T{number}: Type = Type {{ name: {:?}, atomic: {}, fields: &F{number}, slots: &{:?}, \
         written: &{:?}, wire: &{} }};",
        type_.name,
        type_.atomic,
        slots(&type_.fields),
        written(&type_.fields),
        wire(&type_.fields),
    );
    let _ = writeln!(out, "static F{number}: [Field; {}] = [", type_.fields.len());
    for field in &type_.fields {
        let required = field.presence.ends_with('!');
        let presence = match field.presence.trim_end_matches('!') {
            "ptr" => "Pointer",
            "null" => "Nullable",
            "omit" => "OmitEmpty",
            "keep" => "Always",
            other => panic!("schema/types.tsv: presence {other:?}"),
        };
        let merge = match field.list {
            "" => "Default",
            "granular" => "Granular",
            "atomic" => "Atomic",
            "set" => "Set",
            "map" => "Keyed",
            other => panic!("schema/types.tsv: list type {other:?}"),
        };
        let keys: Vec<&str> = field.keys.split(',').filter(|k| !k.is_empty()).collect();
        let patch: Vec<&str> = field.patch.split(',').filter(|k| !k.is_empty()).collect();
        let _ = writeln!(
            out,
            "Field {{ name: {:?}, key: {:?}, kind: {}, presence: Presence::{presence}, required: {required}, merge: \
             Merge::{merge}, keys: &{keys:?}, patch: Patch {{ merge: {}, replace: {}, retain_keys: {}, \
             merge_key: {:?} }}, default: {:?}, declared: {}, go: {:?}, embedded: {:?} }},",
            field.name,
            format!("f:{}", field.name),
            kind(field.type_, index),
            patch.contains(&"merge"),
            patch.contains(&"replace"),
            patch.contains(&"retainKeys"),
            field.merge_key,
            field.default,
            field.declared,
            field.go,
            field.embedded,
        );
    }
    out.push_str("];\n");
}

/// The places of the fields in a table for lookups by name.
fn slots(fields: &[Field]) -> Vec<u8> {
    let mut slots = vec![EMPTY; (2 * fields.len()).next_power_of_two()];
    for (number, field) in fields.iter().enumerate() {
        let mut at = slots::first(field.name.as_bytes(), slots.len());
        while slots[at] != EMPTY {
            at = (at + 1) & (slots.len() - 1);
        }
        slots[at] = u8::try_from(number).ok().filter(|n| *n != EMPTY).expect("a struct has fewer fields");
    }
    slots
}

/// The places of the fields that are written even when they are absent.
fn written(fields: &[Field]) -> Vec<usize> {
    let always = |field: &Field| matches!(field.presence.trim_end_matches('!'), "null" | "keep");
    (0..fields.len()).filter(|at| always(&fields[*at])).collect()
}

/// The message layout in tag order: own fields by index, inlined structs as nested layouts.
fn wire(fields: &[Field]) -> String {
    let paths: Vec<(Vec<u32>, usize)> = fields
        .iter()
        .enumerate()
        .filter(|(_, f)| f.path != "-")
        .map(|(i, f)| (f.path.split('.').map(|t| t.parse().expect("tags are numbers")).collect(), i))
        .collect();
    layout(&paths, 0)
}

fn layout(paths: &[(Vec<u32>, usize)], depth: usize) -> String {
    let mut by_tag: BTreeMap<u32, Vec<(Vec<u32>, usize)>> = BTreeMap::new();
    for entry in paths {
        by_tag.entry(entry.0[depth]).or_default().push(entry.clone());
    }
    let entries: Vec<String> = by_tag
        .iter()
        .map(|(tag, below)| match below.as_slice() {
            [(path, field)] if path.len() == depth + 1 => {
                format!("Wire {{ tag: {tag}, slot: Slot::Field({field}) }}")
            }
            _ => format!("Wire {{ tag: {tag}, slot: Slot::Inline(&{}) }}", layout(below, depth + 1)),
        })
        .collect();
    format!("[{}]", entries.join(","))
}

fn emit_kinds(out: &mut String, types: &[Type]) {
    let mut kinds: BTreeMap<(String, String, String), usize> = BTreeMap::new();
    for (number, type_) in types.iter().enumerate() {
        for gvk in &type_.kinds {
            let parts: Vec<&str> = gvk.split('/').collect();
            let (group, version, kind) = match parts.as_slice() {
                [version, kind] => ("", *version, *kind),
                [group, version, kind] => (*group, *version, *kind),
                _ => panic!("schema/types.tsv: kind {gvk:?}"),
            };
            kinds.insert((group.into(), version.into(), kind.into()), number);
        }
    }
    out.push_str("pub(super) static KINDS: &[((&str, &str, &str), TypeRef)] = &[\n");
    for ((group, version, kind), number) in kinds {
        let _ = writeln!(out, "(({group:?}, {version:?}, {kind:?}), &T{number}),");
    }
    out.push_str("];\n");
}
