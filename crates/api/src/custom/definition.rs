//! From a CustomResourceDefinition to the resources that it describes.

use super::json_path::JsonPath;
use super::rules::RuleSet;
use super::schema::Schema;
use super::strategy::CustomStrategy;
use super::{default, metadata, prune};
use crate::codec::{DecodeError, Decoded};
use crate::gvk::preference;
use crate::kinds::common::access::{flag, list, strings, text};
use crate::managed_fields::validate_custom;
use crate::resource::{Column, Resource, Scope, Subresource};
use ferrite_json::{Text, Value};
use std::borrow::Cow;
use std::sync::Arc;
use thiserror::Error;

/// Verbs of custom kinds, in the order in which upstream lists them.
const VERBS: &[&str] = &["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"];
/// The verbs that are listed while the definition is being deleted.
const VERBS_TERMINATING: &[&str] = &["delete", "deletecollection", "get", "list", "watch"];
const PART_VERBS: &[&str] = &["get", "patch", "update"];

/// Why a definition cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DefinitionError {
    #[error("conversion strategy {0:?} is not known")]
    Conversion(String),
    #[error("no version is marked as storage version")]
    NoStorage,
}

/// The paths of the fields that `scale` shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScalePaths {
    /// Names on the way to the wanted replicas, as `spec` and `replicas`.
    pub spec_replicas: Vec<String>,
    pub status_replicas: Vec<String>,
    pub label_selector: Option<Vec<String>>,
}

/// A version of a kind.
#[derive(Debug)]
pub struct Version {
    pub name: Text,
    pub served: bool,
    pub schema: Schema,
    pub rules: Option<RuleSet>,
    pub has_status: bool,
    pub scale: Option<ScalePaths>,
    pub columns: Vec<Column>,
    pub(super) cells: Vec<Option<JsonPath>>,
    /// Names of fields that selectors can name, and where they are.
    pub selectable: Vec<(Text, Option<JsonPath>)>,
    pub deprecation: Option<String>,
}

/// A custom kind in all its versions: a reader may find an object stored in another version.
#[derive(Debug)]
pub struct Kind {
    /// The definition's UID and generation with the names that it was given: two kinds with the same stamp are the same.
    pub stamp: Text,
    /// The name of the definition.
    pub definition: Text,
    pub group: Text,
    pub kind: Text,
    pub list_kind: Text,
    pub plural: Text,
    pub singular: Text,
    pub short_names: Vec<Cow<'static, str>>,
    pub categories: Vec<Cow<'static, str>>,
    pub scope: Scope,
    /// The definition is being deleted: its objects can be read and deleted, but not created.
    pub terminating: bool,
    pub versions: Vec<Version>,
    /// The webhook that converts between versions; none where they differ in their names only.
    pub conversion: Option<ConversionWebhook>,
    storage: usize,
}

/// The webhook that converts between the versions of a kind.
#[derive(Debug, Clone)]
pub struct ConversionWebhook {
    pub client_config: Value,
    /// Versions of ConversionReview that it takes.
    pub review_versions: Vec<String>,
}

/// A definition that can be served.
pub struct Definition(pub Arc<Kind>);

impl Definition {
    /// Compiles a stored definition, which has been validated.
    pub fn compile(definition: &Value) -> Result<Self, DefinitionError> {
        let spec = &definition["spec"];
        let webhook = &spec["conversion"]["webhook"];
        let conversion = match text(&spec["conversion"], "strategy") {
            "" | "None" => None,
            "Webhook" => Some(ConversionWebhook {
                client_config: webhook["clientConfig"].clone(),
                review_versions: strings(webhook, "conversionReviewVersions")
                    .into_iter()
                    .map(str::to_owned)
                    .collect(),
            }),
            other => return Err(DefinitionError::Conversion(other.to_owned())),
        };
        let versions = list(spec, "versions");
        let storage = versions.iter().position(|v| flag(v, "storage")).ok_or(DefinitionError::NoStorage)?;
        let names = Self::names(definition);
        let name = |key: &str| Text::from(text(names, key));
        let owned = |key: &str| strings(names, key).into_iter().map(|n| Cow::Owned(n.to_owned())).collect();
        let generation =
            definition.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default();
        let group = Text::from(text(spec, "group"));
        let kind = name("kind");
        let terminating = crate::meta::is_deleting(definition);
        Ok(Self(Arc::new(Kind {
            stamp: format!("{}/{generation}/{terminating}/{names}", crate::meta::uid(definition)).into(),
            definition: crate::meta::name(definition).into(),
            list_kind: name("listKind"),
            plural: name("plural"),
            singular: name("singular"),
            short_names: owned("shortNames"),
            categories: owned("categories"),
            scope: if text(spec, "scope") == "Cluster" { Scope::Cluster } else { Scope::Namespaced },
            terminating,
            versions: versions
                .iter()
                .map(|version| Version::compile(version, versions, &group, &kind))
                .collect(),
            conversion,
            storage,
            group,
            kind,
        })))
    }

    /// The names that a definition goes by: those that it was given, before that those that it wants.
    pub fn names(definition: &Value) -> &Value {
        let accepted = definition.pointer("/status/acceptedNames");
        accepted.filter(|names| !text(names, "plural").is_empty()).unwrap_or(&definition["spec"]["names"])
    }

    /// One resource for each served version.
    pub fn resources(&self) -> Vec<Resource> {
        let kind = &self.0;
        let served = kind.versions.iter().enumerate().filter(|(_, version)| version.served);
        served.map(|(at, version)| resource(kind, at, version)).collect()
    }

    /// The resource of the stored version, served or not.
    pub fn storage_resource(&self) -> Resource {
        resource(&self.0, self.0.storage, &self.0.versions[self.0.storage])
    }
}

fn resource(kind: &Arc<Kind>, at: usize, version: &Version) -> Resource {
    let mut subresources = Vec::new();
    if version.has_status {
        subresources.push(Subresource { name: "status", verbs: PART_VERBS, body: None });
    }
    if version.scale.is_some() {
        let body = Some(("autoscaling", "v1", "Scale"));
        subresources.push(Subresource { name: "scale", verbs: PART_VERBS, body });
    }
    let custom = Custom { kind: Arc::clone(kind), version: at };
    Resource {
        group: Cow::Owned(kind.group.to_string()),
        version: Cow::Owned(version.name.to_string()),
        kind: Cow::Owned(kind.kind.to_string()),
        schema: None,
        plural: Cow::Owned(kind.plural.to_string()),
        singular: Cow::Owned(kind.singular.to_string()),
        short_names: Cow::Owned(kind.short_names.clone()),
        categories: Cow::Owned(kind.categories.clone()),
        scope: kind.scope,
        verbs: Cow::Borrowed(VERBS),
        subresources: Cow::Owned(subresources),
        on_by_default: true,
        storage: None,
        strategy: Arc::new(CustomStrategy(custom.clone())),
        hooks: crate::resource::Hooks::default(),
        custom: Some(custom),
    }
}

impl Version {
    fn compile(version: &Value, all: &[Value], group: &str, kind: &str) -> Self {
        let openapi = &version["schema"]["openAPIV3Schema"];
        let name = text(version, "name");
        let subresources = &version["subresources"];
        let scale = subresources.get("scale").filter(|scale| scale.is_object());
        let path = |scale: &Value, key: &str| -> Vec<String> {
            text(scale, key).trim_start_matches('.').split('.').map(str::to_owned).collect()
        };
        let columns = list(version, "additionalPrinterColumns");
        let given = columns.iter().map(|column| Column {
            name: Cow::Owned(text(column, "name").to_owned()),
            type_: Cow::Owned(text(column, "type").to_owned()),
            format: Cow::Owned(text(column, "format").to_owned()),
            priority: column["priority"].as_i64().and_then(|p| i32::try_from(p).ok()).unwrap_or_default(),
            description: Some(match text(column, "description") {
                "" => {
                    format!(
                        "Custom resource definition column (in JSONPath format): {}",
                        text(column, "jsonPath")
                    )
                }
                given => given.to_owned(),
            }),
        });
        let age = || Column {
            name: "Age".into(),
            type_: "date".into(),
            format: "".into(),
            priority: 0,
            description: Some(crate::resource::CREATED.to_owned()),
        };
        let mut cells: Vec<Option<JsonPath>> =
            columns.iter().map(|column| JsonPath::parse(text(column, "jsonPath"))).collect();
        let mut shown: Vec<Column> = given.collect();
        if shown.is_empty() {
            // Upstream fills this column in for a version without any.
            shown.push(age());
            cells.push(JsonPath::parse(".metadata.creationTimestamp"));
        }
        shown.insert(
            0,
            Column {
                name: "Name".into(),
                type_: "string".into(),
                format: "name".into(),
                priority: 0,
                description: Some(crate::resource::NAMED.to_owned()),
            },
        );
        Self {
            name: name.into(),
            served: flag(version, "served"),
            schema: Schema::compile(openapi),
            rules: RuleSet::compile(openapi, true),
            has_status: subresources.get("status").is_some_and(Value::is_object),
            scale: scale.map(|scale| ScalePaths {
                spec_replicas: path(scale, "specReplicasPath"),
                status_replicas: path(scale, "statusReplicasPath"),
                label_selector: (!text(scale, "labelSelectorPath").is_empty())
                    .then(|| path(scale, "labelSelectorPath")),
            }),
            columns: shown,
            cells,
            selectable: list(version, "selectableFields")
                .iter()
                .map(|field| {
                    let path = text(field, "jsonPath");
                    (path.trim_start_matches('.').into(), JsonPath::parse(path))
                })
                .collect(),
            deprecation: flag(version, "deprecated").then(|| match text(version, "deprecationWarning") {
                "" => deprecation(name, all, group, kind),
                given => given.to_owned(),
            }),
        }
    }
}

/// The warning of a deprecated version that has none of its own. It names the best version that is served and preferred
/// to this one.
fn deprecation(name: &str, all: &[Value], group: &str, kind: &str) -> String {
    let warning = format!("{group}/{name} {kind} is deprecated");
    let others = all.iter().filter(|other| flag(other, "served") && !flag(other, "deprecated"));
    let better = others.map(|other| text(other, "name")).filter(|other| preference(name) < preference(other));
    match better.max_by_key(|other| preference(other)) {
        Some(better) => format!("{warning}; use {group}/{better} {kind}"),
        None => warning,
    }
}

/// One version of a custom kind.
#[derive(Debug, Clone)]
pub struct Custom {
    pub kind: Arc<Kind>,
    version: usize,
}

impl Custom {
    /// The resource of the version in which objects are stored.
    pub fn storage_resource(&self) -> Resource {
        resource(&self.kind, self.kind.storage, self.storage())
    }

    /// The resource of another version of the kind.
    pub fn in_version(&self, api_version: &str) -> Option<Resource> {
        let at = self.kind.versions.iter().position(|version| self.api_version(version) == api_version)?;
        Some(resource(&self.kind, at, &self.kind.versions[at]))
    }

    /// The schema of a version of the kind.
    pub fn schema_of(&self, api_version: &str) -> Option<&Schema> {
        let mut versions = self.kind.versions.iter();
        versions.find(|version| self.api_version(version) == api_version).map(|version| &version.schema)
    }

    /// The webhook that an object of `api_version` goes through on its way to this version; none where there is no
    /// webhook, or nothing to convert.
    pub fn conversion_from(&self, api_version: &str) -> Option<&ConversionWebhook> {
        let webhook = self.kind.conversion.as_ref()?;
        (api_version != self.api_version(self.version())).then_some(webhook)
    }

    pub fn version(&self) -> &Version {
        &self.kind.versions[self.version]
    }

    /// The verbs that discovery lists. As upstream: while the definition is being deleted it lists no verbs that write
    /// objects, although objects can still be changed.
    pub fn listed_verbs(&self) -> &'static [&'static str] {
        if self.kind.terminating { VERBS_TERMINATING } else { VERBS }
    }

    /// The version in which objects are stored.
    pub fn storage(&self) -> &Version {
        &self.kind.versions[self.kind.storage]
    }

    /// Are objects stored in this version?
    pub fn is_storage(&self) -> bool {
        self.version == self.kind.storage
    }

    fn api_version(&self, version: &Version) -> String {
        crate::gvk::api_version(&self.kind.group, &version.name)
    }

    /// Returns true if reading an object that was just written brings back the same object. It does not where the
    /// stored version lacks fields, or has a default for a status that a client cannot write.
    pub fn reads_as_written(&self) -> bool {
        let version = self.version();
        let status = version.schema.property("status");
        let completes_status = version.has_status && status.is_some_and(|status| status.default.is_some());
        // A webhook converts what its readers get.
        self.kind.conversion.is_some() || (self.is_storage() && !completes_status)
    }

    /// Returns true if the schema of another version of this kind has all fields of an object of this version. No
    /// version of that name has none to miss.
    pub fn fits(&self, api_version: &str, object: &Value) -> bool {
        let other = self.schema_of(api_version);
        other.is_none_or(|schema| validate_custom(schema, object, api_version).is_ok())
    }

    /// Brings an object of this version to the stored form. Versions differ in their names only.
    pub fn to_storage(&self, object: &mut Value) {
        if !self.is_storage() {
            object["apiVersion"] = self.api_version(self.storage()).into();
            prune::prune(object, &self.storage().schema);
        }
    }

    /// Brings a stored object to this version: fields that the schema has lost go, and defaults that it has gained
    /// come.
    pub fn from_storage(&self, object: &mut Value) {
        let stored = self.complete_stored(object);
        if !std::ptr::eq(stored, self.version()) {
            object["apiVersion"] = self.api_version(self.version()).into();
            prune::prune(object, &self.version().schema);
        }
    }

    /// Brings a stored object under the schema of the version in which it is stored, and answers that version.
    pub fn complete_stored(&self, object: &mut Value) -> &Version {
        let stored = text(object, "apiVersion").rsplit('/').next().unwrap_or_default();
        let found = self.kind.versions.iter().find(|version| version.name == stored);
        let stored = found.unwrap_or_else(|| self.storage());
        prune::prune(object, &stored.schema);
        default::drop_nulls(object, &stored.schema);
        default::fill(object, &stored.schema);
        stored
    }

    /// Checks an object that a client has sent against its schema. Unknown fields are dropped and reported.
    pub fn conform(&self, mut object: Value) -> Result<Decoded, DecodeError> {
        let schema = &self.version().schema;
        let mut unknown = Vec::new();
        if let Some(map) = object.as_object_mut() {
            unknown = metadata::coerce(map, "")?;
        }
        unknown.extend(prune::prune(&mut object, schema));
        default::drop_nulls(&mut object, schema);
        let mut embedded = Vec::new();
        metadata::coerce_embedded(&mut object, schema, "", &mut embedded)?;
        unknown.extend(embedded);
        let strict = unknown.into_iter().map(|name| format!("unknown field \"{name}\"")).collect();
        Ok(Decoded { value: object, strict })
    }
}
