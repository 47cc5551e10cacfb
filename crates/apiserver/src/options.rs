//! Options of a request: the query, and for deletes the body.

use crate::audit::{Level, Record};
use ferrite_api::Status;
use ferrite_api::field::{FieldError, Path};
use ferrite_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// The query of a request, decoded.
#[derive(Debug, Clone, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    pub fn parse(query: Option<&str>) -> Self {
        // As Go: a pair that cannot be decoded is left out.
        let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.contains(';') && decodes(pair));
        Self(pairs.flat_map(|pair| form_urlencoded::parse(pair.as_bytes()).into_owned()).collect())
    }

    /// The first value, as upstream takes it.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    /// Puts values in place of those of a key.
    pub fn replace(&mut self, key: &str, values: impl IntoIterator<Item = String>) {
        self.0.retain(|(k, _)| k != key);
        self.0.extend(values.into_iter().map(|value| (key.to_owned(), value)));
    }

    /// A flag: present without a value, or anything but `0` and `false` however written, is true, as upstream's
    /// conversion (Python clients write `True` and `False`).
    pub fn flag(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| value != "0" && !value.eq_ignore_ascii_case("false"))
    }

    pub fn integer(&self, key: &str) -> Result<Option<i64>, Status> {
        match self.get(key) {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|e: std::num::ParseIntError| {
                let why = match e.kind() {
                    std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow => {
                        "value out of range"
                    }
                    _ => "invalid syntax",
                };
                Status::bad_request(format!("strconv.ParseInt: parsing {text:?}: {why}"))
            }),
        }
    }
}

/// Why a text is not a duration, in Go's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    #[error("time: invalid duration {0:?}")]
    Invalid(String),
    #[error("time: missing unit in duration {0:?}")]
    MissingUnit(String),
    #[error("time: unknown unit {unit:?} in duration {text:?}")]
    UnknownUnit { unit: String, text: String },
}

/// A duration as Go writes it: `1m30s`, `500ms`. A negative one counts as zero.
pub fn go_duration(text: &str) -> Result<Duration, DurationError> {
    let invalid = || DurationError::Invalid(text.to_owned());
    let negative = text.starts_with('-');
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    if rest.is_empty() {
        return Err(invalid());
    }
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    let in_number = |c: char| c.is_ascii_digit() || c == '.';
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let (number, after) = rest.split_at(rest.find(|c| !in_number(c)).unwrap_or(rest.len()));
        let number: f64 = number.parse().map_err(|_| invalid())?;
        let (unit, after) = after.split_at(after.find(in_number).unwrap_or(after.len()));
        let seconds = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" | "μs" => 1e-6,
            "ns" => 1e-9,
            "" => return Err(DurationError::MissingUnit(text.to_owned())),
            unit => return Err(DurationError::UnknownUnit { unit: unit.to_owned(), text: text.to_owned() }),
        };
        let part = Duration::try_from_secs_f64(number * seconds).map_err(|_| invalid())?;
        total = total.checked_add(part).ok_or_else(invalid)?;
        rest = after;
    }
    Ok(if negative { Duration::ZERO } else { total })
}

/// The treatment of unknown and duplicate fields.
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
    /// Admission puts messages for the client here.
    pub warnings: Warnings,
    /// A step of a request that was admitted as a whole: webhooks and policies are not asked about it.
    pub within: bool,
    /// The client has named its field manager.
    pub names_manager: bool,
    pub names_validation: bool,
    /// Those of a delete.
    pub delete: Option<Box<DeleteOptions>>,
}

/// The most warnings that are gathered. Each has a character, and a response has room for no more.
const WARNINGS_MAX: usize = 4 << 10;

/// Warnings in their order, each once.
#[derive(Debug, Default)]
pub(crate) struct DistinctWarnings {
    list: Vec<String>,
    known: std::collections::HashSet<String>,
}

impl DistinctWarnings {
    pub fn add(&mut self, text: String) {
        if self.list.len() < WARNINGS_MAX && self.known.insert(text.clone()) {
            self.list.push(text);
        }
    }

    pub fn into_list(self) -> Vec<String> {
        self.list
    }
}

/// Warnings gathered while a request is worked on, and the audit of the request. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Warnings {
    warnings: Arc<std::sync::Mutex<DistinctWarnings>>,
    /// None if the request is not audited.
    audit: Option<Arc<Record>>,
}

impl Warnings {
    pub fn new(audit: Option<Arc<Record>>) -> Self {
        Self { warnings: Arc::default(), audit }
    }

    fn all(&self) -> std::sync::MutexGuard<'_, DistinctWarnings> {
        self.warnings.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn add(&self, text: impl Into<String>) {
        // A write that is tried again says the same again.
        self.all().add(text.into());
    }

    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.all()).into_list()
    }

    /// Annotates the audit event of the request. As upstream: the first value of a key stays.
    pub fn annotate(&self, key: impl AsRef<str>, value: impl Into<String>) {
        if let Some(record) = &self.audit {
            record.annotate(key.as_ref(), value);
        }
    }

    /// Returns true if the audit of the request records its objects.
    pub fn audits_objects(&self) -> bool {
        self.audit.as_ref().is_some_and(|record| record.level() >= Level::Request)
    }
}

impl WriteOptions {
    /// `kind` is the options' own kind, for errors. `user_agent` is the fall-back for the field manager: its
    /// part before the first slash, as upstream.
    pub fn parse(query: &Query, user_agent: &str, kind: &str, applies: bool) -> Result<Self, Status> {
        let mut errors = Vec::new();
        let manager = query.get("fieldManager").unwrap_or_default();
        if kind == "PatchOptions" {
            if applies && manager.is_empty() {
                let path = Path::new("fieldManager");
                errors.push(FieldError::required(&path, "is required for apply patch"));
            }
            if !applies && query.get("force").is_some() {
                let path = Path::new("force");
                errors.push(FieldError::forbidden(&path, "may not be specified for non-apply patch"));
            }
        }
        check_manager(manager, &mut errors);
        let dry_run = check_dry_run(&query.all("dryRun").collect::<Vec<_>>(), &mut errors);
        let field_validation = match query.get("fieldValidation").unwrap_or_default() {
            "" | "Warn" => FieldValidation::Warn,
            "Ignore" => FieldValidation::Ignore,
            "Strict" => FieldValidation::Strict,
            other => {
                let path = Path::new("fieldValidation");
                errors.push(FieldError::not_supported(&path, other, &["", "Ignore", "Strict", "Warn"]));
                FieldValidation::Warn
            }
        };
        invalid(kind, &errors)?;
        let field_manager = if manager.is_empty() { manager_of(user_agent) } else { manager.to_owned() };
        Ok(Self {
            dry_run,
            field_manager,
            field_validation,
            force: query.flag("force"),
            warnings: Warnings::default(),
            within: false,
            names_manager: !manager.is_empty(),
            names_validation: query.get("fieldValidation").is_some_and(|v| !v.is_empty()),
            delete: None,
        })
    }
}

/// True if every percent sign begins a byte.
fn decodes(text: &str) -> bool {
    let is_hex = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_hexdigit);
    let bytes = text.as_bytes();
    let signs = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'%');
    signs.into_iter().all(|(at, _)| is_hex(bytes.get(at + 1)) && is_hex(bytes.get(at + 2)))
}

/// The manager of a client that names none: the printable part of its user agent before the version, or `unknown`.
fn manager_of(user_agent: &str) -> String {
    let mut manager = String::new();
    for c in user_agent.split('/').next().unwrap_or_default().chars().filter(|c| !c.is_control()) {
        if manager.len() + c.len_utf8() > MAX_MANAGER {
            break;
        }
        manager.push(c);
    }
    if manager.is_empty() { "unknown".to_owned() } else { manager }
}

impl WriteOptions {
    /// The options as webhooks and policies see them, as an object of `kind`.
    pub fn as_sent(&self, kind: &str) -> Value {
        let mut sent = ferrite_json::json!({"kind": kind, "apiVersion": "meta.k8s.io/v1"});
        if self.dry_run {
            sent["dryRun"] = ferrite_json::json!(["All"]);
        }
        if self.names_manager {
            sent["fieldManager"] = self.field_manager.as_str().into();
        }
        if self.names_validation {
            sent["fieldValidation"] = match self.field_validation {
                FieldValidation::Ignore => "Ignore",
                FieldValidation::Warn => "Warn",
                FieldValidation::Strict => "Strict",
            }
            .into();
        }
        let Some(delete) = &self.delete else { return sent };
        if let Some(seconds) = delete.grace_seconds {
            sent["gracePeriodSeconds"] = seconds.into();
        }
        for (key, value) in [("uid", &delete.uid), ("resourceVersion", &delete.resource_version)] {
            if let Some(value) = value {
                sent["preconditions"][key] = value.as_str().into();
            }
        }
        if let Some(propagation) = delete.propagation {
            let text = match propagation {
                Propagation::Orphan => "Orphan",
                Propagation::Background => "Background",
                Propagation::Foreground => "Foreground",
            };
            sent["propagationPolicy"] = text.into();
        }
        sent
    }
}

const MAX_MANAGER: usize = 128;

fn check_manager(manager: &str, errors: &mut Vec<FieldError>) {
    let path = Path::new("fieldManager");
    if manager.len() > MAX_MANAGER {
        errors.push(FieldError::too_long(&path, MAX_MANAGER));
    }
    // One complaint is enough: the first character that cannot be printed.
    if let Some((position, bad)) = manager.char_indices().find(|(_, c)| c.is_control()) {
        let why = format!("invalid character U+{:04X} (at position {position})", u32::from(bad));
        errors.push(FieldError::invalid(&path, manager, why));
    }
}

fn check_dry_run(values: &[&str], errors: &mut Vec<FieldError>) -> bool {
    if values.iter().any(|v| *v != "All") {
        errors.push(FieldError::not_supported(&Path::new("dryRun"), ferrite_json::json!(values), &["All"]));
    }
    !values.is_empty()
}

fn invalid(kind: &str, errors: &[FieldError]) -> Result<(), Status> {
    match errors {
        [] => Ok(()),
        errors => Err(Status::invalid("meta.k8s.io", kind, "", errors)),
    }
}

/// A text that is no number without a sign, in Go's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("strconv.ParseUint: parsing {text:?}: {why}")]
pub(crate) struct NotUnsigned {
    text: String,
    why: &'static str,
}

/// Reads a number as Go's `ParseUint` does.
pub(crate) fn parse_uint(text: &str) -> Result<u64, NotUnsigned> {
    let refuse = |why| NotUnsigned { text: text.to_owned(), why };
    // Rust takes a sign, which Go does not.
    if text.starts_with('+') {
        return Err(refuse("invalid syntax"));
    }
    text.parse().map_err(|e: std::num::ParseIntError| match e.kind() {
        std::num::IntErrorKind::PosOverflow => refuse("value out of range"),
        _ => refuse("invalid syntax"),
    })
}

/// A text that is no resource version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("resourceVersion: Invalid value: {version:?}: {why}")]
pub(crate) struct BadVersion {
    version: String,
    why: NotUnsigned,
}

pub(crate) fn parse_version(version: &str) -> Result<u64, BadVersion> {
    parse_uint(version).map_err(|why| BadVersion { version: version.to_owned(), why })
}

/// The required age of a list's data.
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
    /// `watch` says which rules hold: those of lists or those of watches.
    pub fn parse(query: &Query, watch: bool) -> Result<Self, Status> {
        let text = |key: &str| query.get(key).unwrap_or_default().to_owned();
        let limit = query.integer("limit")?.unwrap_or(0);
        let timeout_seconds = query.integer("timeoutSeconds")?.and_then(|s| u64::try_from(s).ok());
        let send_initial_events = query.get("sendInitialEvents").map(|_| query.flag("sendInitialEvents"));
        let continue_token = text("continue");
        let version = text("resourceVersion");
        let wanted = text("resourceVersionMatch");
        let errors = if watch {
            watch_errors(&wanted, send_initial_events, &continue_token)
        } else {
            list_errors(&wanted, &version, send_initial_events, &continue_token)
        };
        invalid("ListOptions", &errors)?;
        let resource_version = match version.as_str() {
            "" => None,
            version => Some(parse_version(version).map_err(|why| match watch {
                true => Status::new(500, "", why.to_string()),
                false => Status::bad_request(format!("invalid resource version: {why}")),
            })?),
        };
        let version_match = match wanted.as_str() {
            "Exact" => Some(VersionMatch::Exact),
            "NotOlderThan" => Some(VersionMatch::NotOlderThan),
            _ => None,
        };
        Ok(Self {
            label_selector: text("labelSelector"),
            field_selector: text("fieldSelector"),
            bookmarks: query.flag("allowWatchBookmarks"),
            resource_version,
            version_match,
            timeout_seconds,
            limit: usize::try_from(limit).unwrap_or(0),
            continue_token,
            send_initial_events,
        })
    }
}

fn list_errors(
    wanted: &str,
    version: &str,
    send_initial_events: Option<bool>,
    continue_token: &str,
) -> Vec<FieldError> {
    let path = Path::new("resourceVersionMatch");
    let mut errors = Vec::new();
    if !wanted.is_empty() {
        let mut forbidden = |holds: bool, why: &str| {
            if holds {
                errors.push(FieldError::forbidden(&path, why));
            }
        };
        forbidden(version.is_empty(), "resourceVersionMatch is forbidden unless resourceVersion is provided");
        forbidden(!continue_token.is_empty(), "resourceVersionMatch is forbidden when continue is provided");
        if !matches!(wanted, "Exact" | "NotOlderThan") {
            errors.push(FieldError::not_supported(&path, wanted, &["Exact", "NotOlderThan", ""]));
        }
        if wanted == "Exact" && version == "0" {
            let why = "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"";
            errors.push(FieldError::forbidden(&path, why));
        }
    }
    if send_initial_events.is_some() {
        let path = Path::new("sendInitialEvents");
        errors.push(FieldError::forbidden(&path, "sendInitialEvents is forbidden for list"));
    }
    errors
}

fn watch_errors(wanted: &str, send_initial_events: Option<bool>, continue_token: &str) -> Vec<FieldError> {
    let path = Path::new("resourceVersionMatch");
    let mut errors = Vec::new();
    if send_initial_events.is_some() && wanted != "NotOlderThan" {
        let why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
        errors.push(FieldError::forbidden(&path, why));
    }
    if !wanted.is_empty() {
        if send_initial_events.is_none() {
            let why = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
            errors.push(FieldError::forbidden(&path, why));
        }
        if wanted != "NotOlderThan" {
            errors.push(FieldError::not_supported(&path, wanted, &["NotOlderThan"]));
        }
        if !continue_token.is_empty() {
            let why = "resourceVersionMatch is forbidden when continue is provided";
            errors.push(FieldError::forbidden(&path, why));
        }
    }
    errors
}

/// The treatment of dependents.
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
    /// The old way of asking for dependents to go too. As upstream: only then is a deletion that is under way
    /// answered as accepted.
    pub waits_for_dependents: bool,
    pub dry_run: bool,
}

impl DeleteOptions {
    /// As upstream: a body speaks for itself, and the query counts only without one.
    pub fn parse(query: &Query, body: Option<&Value>) -> Result<Self, Status> {
        let mut errors = Vec::new();
        let mut options = Self::default();
        let (policy, orphans, dry_run): (Option<String>, Option<bool>, Vec<String>);
        match body {
            Some(body) => {
                let text = |pointer: &str| body.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
                options.grace_seconds = body.get("gracePeriodSeconds").and_then(Value::as_i64);
                options.uid = text("/preconditions/uid");
                options.resource_version = text("/preconditions/resourceVersion");
                policy = text("/propagationPolicy");
                orphans = body.get("orphanDependents").and_then(Value::as_bool);
                let listed = body.get("dryRun").and_then(Value::as_array);
                dry_run = listed.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect();
            }
            None => {
                options.grace_seconds = query.integer("gracePeriodSeconds")?;
                let given = |key: &str| query.get(key).filter(|text| !text.is_empty()).map(str::to_owned);
                options.uid = given("uid");
                options.resource_version = given("resourceVersion");
                policy = query.get("propagationPolicy").map(str::to_owned);
                orphans = query.get("orphanDependents").map(|_| query.flag("orphanDependents"));
                dry_run = query.all("dryRun").map(str::to_owned).collect();
            }
        }
        options.waits_for_dependents = orphans == Some(false);
        let path = Path::new("propagationPolicy");
        if let (Some(policy), Some(_)) = (&policy, orphans) {
            let why = "orphanDependents and deletionPropagation cannot be both set";
            errors.push(FieldError::invalid(&path, policy.as_str(), why));
        }
        options.propagation = match policy.as_deref() {
            Some("Orphan") => Some(Propagation::Orphan),
            Some("Background") => Some(Propagation::Background),
            Some("Foreground") => Some(Propagation::Foreground),
            Some(other) => {
                let supported = ["Foreground", "Background", "Orphan", "nil"];
                errors.push(FieldError::not_supported(&path, other, &supported));
                None
            }
            None => orphans.map(|o| if o { Propagation::Orphan } else { Propagation::Background }),
        };
        let dry_run: Vec<&str> = dry_run.iter().map(String::as_str).collect();
        options.dry_run = check_dry_run(&dry_run, &mut errors);
        invalid("DeleteOptions", &errors)?;
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_without_a_manager_is_named_by_its_agent() {
        let long = "a".repeat(200);
        for (agent, manager) in [
            ("kubectl/v1.36 (linux) x", "kubectl"),
            ("plain", "plain"),
            ("", "unknown"),
            ("/v1", "unknown"),
            ("a\u{7}b/1", "ab"),
            ("\u{fffd}n", "\u{fffd}n"),
            (long.as_str(), &long[..128]),
        ] {
            assert_eq!(manager_of(agent), manager, "{agent:?}");
        }
    }

    #[test]
    fn pairs_of_a_query_that_cannot_be_decoded_are_left_out() {
        let query = Query::parse(Some("a=%zz&b=1&c=%2&d=2;e=3&f=%41+x"));
        assert_eq!(query.get("a"), None);
        assert_eq!(query.get("b"), Some("1"));
        assert_eq!(query.get("c"), None);
        assert_eq!(query.get("d"), None);
        assert_eq!(query.get("f"), Some("A x"));
    }

    #[test]
    fn numbers_are_refused_in_gos_words() {
        let said = |text: &str| parse_version(text).map_err(|e| e.to_string());
        assert_eq!(said("7"), Ok(7));
        assert_eq!(said("007"), Ok(7));
        for (text, why) in [
            ("x", "invalid syntax"),
            ("-1", "invalid syntax"),
            ("+1", "invalid syntax"),
            ("0x1", "invalid syntax"),
            ("99999999999999999999999", "value out of range"),
        ] {
            let expected = format!(
                "resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: {why}"
            );
            assert_eq!(said(text), Err(expected));
        }
        let query = |text: &str| Query::parse(Some(text)).integer("limit").map_err(|status| status.message);
        assert_eq!(query(""), Ok(None));
        assert_eq!(query("limit=-1"), Ok(Some(-1)));
        assert_eq!(query("limit="), Err("strconv.ParseInt: parsing \"\": invalid syntax".into()));
    }

    #[test]
    fn a_delete_names_the_object_it_means_in_its_query() {
        let query = Query::parse(Some("uid=u&resourceVersion=7"));
        let options = DeleteOptions::parse(&query, None).unwrap();
        assert_eq!((options.uid.as_deref(), options.resource_version.as_deref()), (Some("u"), Some("7")));
        assert!(DeleteOptions::parse(&Query::parse(Some("propagationPolicy=")), None).is_err());
    }

    #[test]
    fn durations_are_read_as_go_reads_them() {
        let rows = [
            ("1m30s", Ok(90_000)),
            ("1.5s", Ok(1500)),
            ("250ms", Ok(250)),
            ("0", Ok(0)),
            ("0s", Ok(0)),
            ("-5s", Ok(0)),
            ("5", Err("time: missing unit in duration \"5\"")),
            ("5d", Err("time: unknown unit \"d\" in duration \"5d\"")),
            ("s", Err("time: invalid duration \"s\"")),
            ("-", Err("time: invalid duration \"-\"")),
            ("99999999999999999999h", Err("time: invalid duration \"99999999999999999999h\"")),
        ];
        for (text, expected) in rows {
            let got = go_duration(text).map_err(|e| e.to_string());
            assert_eq!(got, expected.map(Duration::from_millis).map_err(str::to_owned), "{text}");
        }
    }
}
