//! Options of a request: the query, and for deletes the body.

use ferrite_api::Status;
use serde_json::Value;

/// The query of a request, decoded.
#[derive(Debug, Clone, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    pub fn parse(query: Option<&str>) -> Self {
        Self(form_urlencoded::parse(query.unwrap_or_default().as_bytes()).into_owned().collect())
    }

    /// The first value, as upstream takes it.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    /// A flag: present without a value, or anything but `false` and `0`, is true, as upstream's conversion.
    pub fn flag(&self, key: &str) -> bool {
        matches!(self.get(key), Some(v) if !matches!(v, "false" | "0"))
    }

    pub fn integer(&self, key: &str) -> Result<Option<i64>, Status> {
        match self.get(key).filter(|v| !v.is_empty()) {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_| {
                Status::bad_request(format!("strconv.ParseInt: parsing {text:?}: invalid syntax"))
            }),
        }
    }
}

/// How unknown and duplicate fields are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum FieldValidation {
    Ignore,
    #[default]
    Warn,
    Strict,
}

/// Options of a write.
#[derive(Debug, Clone, Default)]
pub(crate) struct WriteOptions {
    pub dry_run: bool,
    pub field_manager: String,
    pub field_validation: FieldValidation,
    /// Server-side apply takes over fields that others own.
    pub force: bool,
}

impl WriteOptions {
    /// `user_agent` is the fall-back for the field manager: its part before the first slash, as upstream.
    pub fn parse(query: &Query, user_agent: &str) -> Result<Self, Status> {
        let dry_run = parse_dry_run(query.all("dryRun"))?;
        let field_validation = match query.get("fieldValidation").unwrap_or_default() {
            "" | "Warn" => FieldValidation::Warn,
            "Ignore" => FieldValidation::Ignore,
            "Strict" => FieldValidation::Strict,
            other => {
                return Err(Status::bad_request(format!(
                    "fieldValidation: Unsupported value: {other:?}: supported values: \"Ignore\", \"Strict\", \"Warn\""
                )));
            }
        };
        let manager = query.get("fieldManager").unwrap_or_default();
        if manager.len() > 128 {
            return Err(Status::bad_request("fieldManager: Too long: may not be more than 128 bytes"));
        }
        let field_manager = if manager.is_empty() {
            user_agent.split('/').next().unwrap_or_default().chars().take(128).collect()
        } else {
            manager.to_owned()
        };
        Ok(Self { dry_run, field_manager, field_validation, force: query.flag("force") })
    }
}

fn parse_dry_run<'a>(values: impl Iterator<Item = &'a str>) -> Result<bool, Status> {
    let mut dry_run = false;
    for value in values.filter(|v| !v.is_empty()) {
        if value != "All" {
            return Err(Status::bad_request(format!(
                "dryRun: Unsupported value: {value:?}: supported values: \"All\""
            )));
        }
        dry_run = true;
    }
    Ok(dry_run)
}

/// How old an answer to a list may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VersionMatch {
    Exact,
    NotOlderThan,
}

/// Options of a list or a watch.
#[derive(Debug, Clone, Default)]
pub(crate) struct ListOptions {
    pub label_selector: String,
    pub field_selector: String,
    pub bookmarks: bool,
    pub resource_version: Option<u64>,
    pub version_match: Option<VersionMatch>,
    pub timeout_seconds: Option<u64>,
    pub limit: usize,
    pub continue_token: String,
    pub send_initial_events: Option<bool>,
}

impl ListOptions {
    pub fn parse(query: &Query) -> Result<Self, Status> {
        let text = |key: &str| query.get(key).unwrap_or_default().to_owned();
        let resource_version = match query.get("resourceVersion").unwrap_or_default() {
            "" => None,
            version => Some(version.parse().map_err(|_| {
                Status::bad_request(format!("resourceVersion: Invalid value: {version:?}: strconv.ParseUint: parsing {version:?}: invalid syntax"))
            })?),
        };
        let version_match = match query.get("resourceVersionMatch").unwrap_or_default() {
            "" => None,
            "Exact" => Some(VersionMatch::Exact),
            "NotOlderThan" => Some(VersionMatch::NotOlderThan),
            other => {
                return Err(Status::bad_request(format!(
                    "resourceVersionMatch: Unsupported value: {other:?}: supported values: \"Exact\", \"NotOlderThan\""
                )));
            }
        };
        let limit = query.integer("limit")?.unwrap_or(0);
        Ok(Self {
            label_selector: text("labelSelector"),
            field_selector: text("fieldSelector"),
            bookmarks: query.flag("allowWatchBookmarks"),
            resource_version,
            version_match,
            timeout_seconds: query.integer("timeoutSeconds")?.and_then(|s| u64::try_from(s).ok()),
            limit: usize::try_from(limit).unwrap_or(0),
            continue_token: text("continue"),
            send_initial_events: query.get("sendInitialEvents").map(|_| query.flag("sendInitialEvents")),
        })
    }
}

/// What becomes of dependents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Propagation {
    Orphan,
    Background,
    Foreground,
}

/// Options of a delete, from the body or, where it is silent, from the query.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeleteOptions {
    pub grace_seconds: Option<i64>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub propagation: Option<Propagation>,
    pub dry_run: bool,
}

impl DeleteOptions {
    pub fn parse(query: &Query, body: Option<&Value>) -> Result<Self, Status> {
        let mut options = Self {
            grace_seconds: query.integer("gracePeriodSeconds")?,
            dry_run: parse_dry_run(query.all("dryRun"))?,
            propagation: parse_propagation(query.get("propagationPolicy").unwrap_or_default())?,
            ..Self::default()
        };
        if query.get("orphanDependents").is_some() {
            options.propagation = Some(orphan(query.flag("orphanDependents")));
        }
        let Some(body) = body else { return Ok(options) };
        let text = |pointer: &str| body.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        if let Some(grace) = body.get("gracePeriodSeconds").and_then(Value::as_i64) {
            options.grace_seconds = Some(grace);
        }
        options.uid = text("/preconditions/uid");
        options.resource_version = text("/preconditions/resourceVersion");
        if let Some(policy) = text("/propagationPolicy") {
            options.propagation = parse_propagation(&policy)?;
        }
        if let Some(orphans) = body.get("orphanDependents").and_then(Value::as_bool) {
            options.propagation = Some(orphan(orphans));
        }
        if let Some(dry_run) = body.get("dryRun").and_then(Value::as_array) {
            options.dry_run |= parse_dry_run(dry_run.iter().filter_map(Value::as_str))?;
        }
        Ok(options)
    }
}

fn orphan(orphans: bool) -> Propagation {
    if orphans { Propagation::Orphan } else { Propagation::Background }
}

fn parse_propagation(policy: &str) -> Result<Option<Propagation>, Status> {
    Ok(Some(match policy {
        "" => return Ok(None),
        "Orphan" => Propagation::Orphan,
        "Background" => Propagation::Background,
        "Foreground" => Propagation::Foreground,
        other => {
            return Err(Status::invalid(
                "meta.k8s.io",
                "DeleteOptions",
                "",
                &[ferrite_api::field::FieldError::not_supported(
                    &ferrite_api::field::Path::new("propagationPolicy"),
                    other,
                    &["Background", "Foreground", "Orphan"],
                )],
            ));
        }
    }))
}
