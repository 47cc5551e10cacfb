//! Paths that answer documents: versions, groups, keys.

use super::operations::{PathItem, STANDARD, capital, document, group_word, version_word};
use super::path_of;
use super::schemas::Schemas;
use crate::registry::ResourceMap;
use ferrite_json::{Value, json};
use std::collections::BTreeSet;

const JSON: &[&str] = &["application/json"];
const KEYS: &[&str] = &["application/jwk-set+json"];

/// The path of a document outside versions, by the path of the v3 document that describes it.
pub(super) fn plain(path: &str, schemas: &mut Schemas) -> Option<PathItem> {
    let text = json!({"type": "string"});
    let (id, tag, about, types, sent) = match path {
        ".well-known/openid-configuration" => (
            "getServiceAccountIssuerOpenIDConfiguration",
            "WellKnown",
            "The configuration of the issuer of service accounts' tokens.",
            (&[][..], JSON),
            text,
        ),
        "openid/v1/jwks" => (
            "getServiceAccountIssuerOpenIDKeyset",
            "openid",
            "The keys that verify service accounts' tokens.",
            (&[][..], KEYS),
            text,
        ),
        "version" => ("getCodeVersion", "version", "The version of the server.", (JSON, JSON), info(schemas)),
        "api" => (
            "getCoreAPIVersions",
            "core",
            "The versions of the core group.",
            (STANDARD, STANDARD),
            schemas.meta("APIVersions"),
        ),
        "apis" => (
            "getAPIVersions",
            "apis",
            "All groups but the core one.",
            (STANDARD, STANDARD),
            schemas.meta("APIGroupList"),
        ),
        _ => return None,
    };
    Some(document(format!("/{path}/"), id.to_owned(), tag, about, types, sent))
}

pub(super) fn group(name: &str, schemas: &mut Schemas) -> PathItem {
    let word = group_word(name);
    document(
        format!("/apis/{name}/"),
        format!("get{}APIGroup", capital(&word)),
        &word,
        "The versions of a group.",
        (STANDARD, STANDARD),
        schemas.meta("APIGroup"),
    )
}

pub(super) fn version(group: &str, version: &str, schemas: &mut Schemas) -> PathItem {
    document(
        format!("/{}/", path_of(group, version)),
        format!("get{}APIResources", version_word(group, version)),
        &format!("{}_{version}", group_word(group)),
        "The resources of a version.",
        (STANDARD, STANDARD),
        schemas.meta("APIResourceList"),
    )
}

/// All of them, for the document that describes everything.
pub(super) fn all(table: &ResourceMap, schemas: &mut Schemas) -> Vec<PathItem> {
    let own = || table.rows().iter().filter(|row| row.custom.is_none());
    let groups: BTreeSet<&str> = own().map(|row| &*row.group).filter(|group| !group.is_empty()).collect();
    let versions: BTreeSet<(&str, &str)> = own().map(|row| (&*row.group, &*row.version)).collect();
    let mut items: Vec<PathItem> =
        super::PLAIN.iter().chain(&["api", "apis"]).filter_map(|path| plain(path, schemas)).collect();
    items.extend(groups.into_iter().map(|name| group(name, schemas)));
    items.extend(versions.into_iter().map(|(group, name)| version(group, name, schemas)));
    items
}

/// The schema of the server's version.
fn info(schemas: &mut Schemas) -> Value {
    const REQUIRED: [&str; 9] = [
        "major",
        "minor",
        "gitVersion",
        "gitCommit",
        "gitTreeState",
        "buildDate",
        "goVersion",
        "compiler",
        "platform",
    ];
    const ALSO: [&str; 4] =
        ["emulationMajor", "emulationMinor", "minCompatibilityMajor", "minCompatibilityMinor"];
    let mut properties = ferrite_json::Map::new();
    for name in REQUIRED {
        let default = schemas.default_text();
        properties.insert(name, default);
    }
    for name in ALSO {
        properties.insert(name, json!({"type": "string"}));
    }
    let made = json!({
        "type": "object",
        "description": "The versions of the server and of what it was built with.",
        "required": REQUIRED,
        "properties": properties,
    });
    schemas.add("io.k8s.apimachinery.pkg.version.Info", made)
}
