//! Upstream's facts, read from a checkout of its repository: `api/openapi-spec/v3/*.json` and every `generated.proto`.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Default)]
pub struct Property {
    pub is_list: bool,
    pub required: bool,
    /// JSON text; empty for none.
    pub default: String,
    pub list_type: String,
    pub map_keys: String,
    pub map_type: String,
    pub patch_strategy: String,
    pub merge_key: String,
}

#[derive(Default)]
pub struct Definition {
    pub atomic: bool,
    /// `group/version/Kind`, or `version/Kind` of the core group.
    pub gvks: Vec<String>,
    pub properties: BTreeMap<String, Property>,
}

pub struct ProtoField {
    pub name: String,
    pub tag: u32,
    pub type_: String,
    pub label: Label,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Label {
    Single,
    Repeated,
    /// Of strings to the field's type.
    Map,
}

pub type Definitions = BTreeMap<String, Definition>;
pub type Messages = BTreeMap<String, Vec<ProtoField>>;

/// `io.k8s.api.core.v1.Pod` and `k8s.io.api.core.v1.Pod` become `core.v1.Pod`.
pub fn short(name: &str) -> String {
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

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

/// The files of a directory, in the order of their names.
fn entries(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |e| format!("cannot read {}: {e}", directory.display());
    let entries: Result<Vec<_>, _> = fs::read_dir(directory).map_err(failed)?.collect();
    let mut paths: Vec<PathBuf> = entries.map_err(failed)?.into_iter().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

/// The definitions of all documents. One that several documents have is the same in each of them.
pub fn definitions(checkout: &Path) -> Result<Definitions, String> {
    let mut definitions = Definitions::new();
    for path in entries(&checkout.join("api/openapi-spec/v3"))? {
        let document: Value =
            serde_json::from_str(&read(&path)?).map_err(|e| format!("{}: {e}", path.display()))?;
        for (name, schema) in document["components"]["schemas"].as_object().into_iter().flatten() {
            definitions.insert(short(name), definition(schema));
        }
    }
    Ok(definitions)
}

fn definition(schema: &Value) -> Definition {
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let texts = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)).collect()
    };
    let required = texts(&schema["required"]);
    let properties = schema["properties"].as_object().into_iter().flatten().map(|(name, property)| {
        let default = property.get("default").map(Value::to_string).unwrap_or_default();
        let property = Property {
            is_list: property["type"] == "array",
            required: required.contains(name),
            default,
            list_type: text(property, "x-kubernetes-list-type"),
            map_keys: texts(&property["x-kubernetes-list-map-keys"]).join(","),
            map_type: text(property, "x-kubernetes-map-type"),
            patch_strategy: text(property, "x-kubernetes-patch-strategy"),
            merge_key: text(property, "x-kubernetes-patch-merge-key"),
        };
        (name.clone(), property)
    });
    let gvks = schema["x-kubernetes-group-version-kind"].as_array().into_iter().flatten().map(|gvk| {
        let (group, version, kind) = (text(gvk, "group"), text(gvk, "version"), text(gvk, "kind"));
        if group.is_empty() { format!("{version}/{kind}") } else { format!("{group}/{version}/{kind}") }
    });
    let mut gvks: Vec<String> = gvks.collect();
    // Options and events are kinds of every group; the core group's stands for all.
    if gvks.len() > 1 {
        gvks.retain(|gvk| gvk.matches('/').count() == 1);
    }
    Definition { atomic: schema["x-kubernetes-map-type"] == "atomic", gvks, properties: properties.collect() }
}

/// The messages of every `generated.proto` below `staging`.
pub fn messages(checkout: &Path) -> Result<Messages, String> {
    let mut messages = Messages::new();
    let mut directories = vec![checkout.join("staging/src/k8s.io")];
    while let Some(directory) = directories.pop() {
        for path in entries(&directory)? {
            if path.is_dir() && !path.is_symlink() {
                directories.push(path);
            } else if path.file_name().is_some_and(|name| name == "generated.proto") {
                proto(&read(&path)?, &mut messages).map_err(|e| format!("{}: {e}", path.display()))?;
            }
        }
    }
    if messages.is_empty() {
        Err("no generated.proto below staging/src/k8s.io".to_owned())
    } else {
        Ok(messages)
    }
}

/// Upstream's generator writes one field a line, and never nests messages.
fn proto(text: &str, messages: &mut Messages) -> Result<(), String> {
    let (mut package, mut message) = (String::new(), None);
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        if let Some(name) = line.strip_prefix("package ") {
            package = short(name.trim_end_matches(';'));
        } else if let Some(name) = line.strip_prefix("message ") {
            let name = format!("{package}.{}", name.trim_end_matches('{').trim());
            messages.entry(name.clone()).or_default();
            message = Some(name);
        } else if line == "}" {
            message = None;
        } else if let Some(fields) = message.as_ref().and_then(|name| messages.get_mut(name))
            && let Some((declared, tag)) = line.trim_end_matches(';').rsplit_once(" = ")
        {
            let unexpected = || format!("unexpected line {line:?}");
            let tag = tag.parse().map_err(|_| unexpected())?;
            let (type_, name) = declared.rsplit_once(' ').ok_or_else(unexpected)?;
            let (label, type_) = match type_.split_once(' ') {
                Some(("optional", type_)) => (Label::Single, type_),
                Some(("repeated", type_)) => (Label::Repeated, type_),
                Some(("map<string,", type_)) => (Label::Map, type_.trim_end_matches('>')),
                _ => return Err(unexpected()),
            };
            fields.push(ProtoField { name: name.to_owned(), tag, type_: type_.to_owned(), label });
        }
    }
    Ok(())
}
