//! Validation of `metadata` and of names, labels and annotations, in upstream's wording.

use crate::field::{FieldError, FieldErrors, Path};
use ferrite_json::Value;

/// The most bytes all annotations of an object may take together.
pub const ANNOTATIONS_MAX: usize = 256 * 1024;

const LABEL_FORMAT: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', \
    and must start and end with an alphanumeric character";
const LABEL_REGEX: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const SUBDOMAIN_FORMAT: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, \
    '-' or '.', and must start and end with an alphanumeric character";
const SUBDOMAIN_REGEX: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const DNS1035_FORMAT: &str = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start \
    with an alphabetic character, and end with an alphanumeric character";
const DNS1035_REGEX: &str = "[a-z]([-a-z0-9]*[a-z0-9])?";
/// The end of a complaint about a name that is no DNS-1035 label.
pub(crate) const DNS1035_EXAMPLE: &str =
    "(e.g. 'my-name',  or 'abc-123', regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')";
const QUALIFIED_FORMAT: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const QUALIFIED_REGEX: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const VALUE_FORMAT: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or \
    '.', and must start and end with an alphanumeric character";
const VALUE_REGEX: &str = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?";
const CONFIG_KEY_FORMAT: &str = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'";
const CONFIG_KEY_REGEX: &str = "[-._a-zA-Z0-9]+";

/// `<what> (e.g. 'a',  or 'b', regex used for validation is '…')`, with upstream's double spaces.
fn regex_error(what: &str, regex: &str, examples: &[&str]) -> String {
    let examples: String = examples
        .iter()
        .enumerate()
        .map(|(i, e)| format!("{}'{e}', ", if i == 0 { "" } else { " or " }))
        .collect();
    format!("{what} (e.g. {examples}regex used for validation is '{regex}')")
}

fn max_characters(max: usize) -> String {
    format!("must be no more than {max} characters")
}

fn is_lower_alnum(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(f), Some(l)) if is_lower_alnum(*f) && is_lower_alnum(*l))
        && bytes.iter().all(|b| is_lower_alnum(*b) || *b == b'-')
}

fn is_qualified_part(text: &str) -> bool {
    let bytes = text.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(f), Some(l)) if f.is_ascii_alphanumeric() && l.is_ascii_alphanumeric())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// Complaints about a name that should be a DNS-1123 subdomain; empty when it is one.
pub fn dns1123_subdomain(name: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if name.len() > 253 {
        problems.push(max_characters(253));
    }
    if !name.split('.').all(is_label) {
        problems.push(regex_error(SUBDOMAIN_FORMAT, SUBDOMAIN_REGEX, &["example.com"]));
    }
    problems
}

/// As [`dns1123_subdomain`], for names whose labels may begin with an underscore and have more inside.
pub fn subdomain_with_underscores(name: &str) -> Vec<String> {
    const FORMAT: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '_', \
        '-' or '.', and must start and end with an alphanumeric character";
    const REGEX: &str = "_?[a-z0-9]([-_a-z0-9]*[a-z0-9])?(\\._?[a-z0-9]([-_a-z0-9]*[a-z0-9])?)*";
    let mut problems = Vec::new();
    if name.len() > 253 {
        problems.push(max_characters(253));
    }
    let is_label = |label: &str| is_label(&label.strip_prefix('_').unwrap_or(label).replace('_', "-"));
    if !name.split('.').all(is_label) {
        problems.push(regex_error(FORMAT, REGEX, &["example.com"]));
    }
    problems
}

/// As [`dns1123_subdomain`], in the words of kinds whose names upstream checks by declaration.
pub fn long_name(name: &str) -> Vec<String> {
    let mut problems = dns1123_subdomain(name);
    if name.len() > 253 {
        problems[0] = "must be no more than 253 bytes".to_owned();
    }
    problems
}

/// As [`long_name`], for names in which case does not count.
pub fn long_name_caseless(name: &str) -> Vec<String> {
    const FORMAT: &str = "an RFC 1123 subdomain must consist of alphanumeric characters, '-' or '.', and must start and \
        end with an alphanumeric character";
    let mut problems = Vec::new();
    if name.len() > 253 {
        problems.push("must be no more than 253 bytes".to_owned());
    }
    if !name.to_ascii_lowercase().split('.').all(is_label) {
        problems.push(regex_error(FORMAT, SUBDOMAIN_REGEX, &["Example.com"]));
    }
    problems
}

/// As [`dns1123_label`], in the words of kinds whose names upstream checks by declaration.
pub fn short_name(name: &str) -> Vec<String> {
    let mut problems = dns1123_label(name);
    if name.len() > 63 {
        problems[0] = "must be no more than 63 bytes".to_owned();
    }
    problems
}

/// Complaints about a host name whose first label is `*`.
pub fn wildcard_subdomain(name: &str) -> Vec<String> {
    const FORMAT: &str = "a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which \
        must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character";
    let good = name.strip_prefix("*.").is_some_and(|rest| rest.split('.').all(is_label));
    if good {
        return Vec::new();
    }
    vec![regex_error(FORMAT, &format!("\\*\\.{SUBDOMAIN_REGEX}"), &["*.example.com"])]
}

/// Complaints about a name that should be a DNS-1123 label.
pub fn dns1123_label(name: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if name.len() > 63 {
        problems.push(max_characters(63));
    }
    if !is_label(name) {
        // As upstream: a name that would be a subdomain has nothing wrong but its dots.
        match name.split('.').all(is_label) {
            true => problems.push("must not contain dots".to_owned()),
            false => problems.push(regex_error(LABEL_FORMAT, LABEL_REGEX, &["my-name", "123-abc"])),
        }
    }
    problems
}

/// Complaints about a name that should be a DNS-1035 label (begins with a letter).
pub fn dns1035_label(name: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if name.len() > 63 {
        problems.push(max_characters(63));
    }
    if !(is_label(name) && name.starts_with(|c: char| c.is_ascii_lowercase())) {
        problems.push(regex_error(DNS1035_FORMAT, DNS1035_REGEX, &["my-name", "abc-123"]));
    }
    problems
}

/// Complaints about a name that becomes one segment of a request's path.
pub fn path_segment(name: &str) -> Vec<String> {
    if matches!(name, "." | "..") {
        return vec![format!("may not be '{name}'")];
    }
    ["/", "%"].iter().filter(|c| name.contains(**c)).map(|c| format!("may not contain '{c}'")).collect()
}

/// Complaints about a label key or another qualified name (`example.com/name`).
pub fn qualified_name(name: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let mut parts = name.splitn(3, '/');
    let first = parts.next().unwrap_or_default();
    let name_part = match (parts.next(), parts.next()) {
        (None, _) => first,
        (Some(second), None) => {
            if first.is_empty() {
                problems.push("prefix part must be non-empty".to_owned());
            } else {
                problems.extend(dns1123_subdomain(first).into_iter().map(|p| format!("prefix part {p}")));
            }
            second
        }
        (Some(_), Some(_)) => {
            let format = regex_error(QUALIFIED_FORMAT, QUALIFIED_REGEX, &["MyName", "my.name", "123-abc"]);
            problems.push(format!(
                "a valid label key {format} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            ));
            return problems;
        }
    };
    if name_part.is_empty() {
        problems.push("name part must be non-empty".to_owned());
    } else if name_part.len() > 63 {
        problems.push("name part must be no more than 63 bytes".to_owned());
    }
    if !is_qualified_part(name_part) {
        let format = regex_error(QUALIFIED_FORMAT, QUALIFIED_REGEX, &["MyName", "my.name", "123-abc"]);
        problems.push(format!("name part {format}"));
    }
    problems
}

/// Complaints about a label's value.
pub fn label_value(value: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if value.len() > 63 {
        problems.push("must be no more than 63 bytes".to_owned());
    }
    if !value.is_empty() && !is_qualified_part(value) {
        problems.push(regex_error(VALUE_FORMAT, VALUE_REGEX, &["MyValue", "my_value", "12345"]));
    }
    problems
}

/// Complaints about a key of a ConfigMap or Secret.
pub fn config_map_key(key: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if key.len() > 253 {
        problems.push(max_characters(253));
    }
    if key.is_empty() || !key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')) {
        problems.push(regex_error(
            CONFIG_KEY_FORMAT,
            CONFIG_KEY_REGEX,
            &["key.name", "KEY_NAME", "key-name"],
        ));
    }
    match key {
        "." => problems.push("must not be '.'".to_owned()),
        ".." => problems.push("must not be '..'".to_owned()),
        _ if key.starts_with("..") => problems.push("must not start with '..'".to_owned()),
        _ => {}
    }
    problems
}

/// Complaints about the name of a port (`http`, not `80`).
pub fn port_name(name: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if name.len() > 15 {
        problems.push(max_characters(15));
    }
    // An empty name has no character that is alright.
    if name.is_empty() || !name.bytes().all(|b| is_lower_alnum(b) || b == b'-') {
        problems.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned());
    }
    if !name.bytes().any(|b| b.is_ascii_lowercase()) {
        problems.push("must contain at least one letter (a-z)".to_owned());
    }
    if name.contains("--") {
        problems.push("must not contain consecutive hyphens".to_owned());
    }
    if name.starts_with('-') || name.ends_with('-') {
        problems.push("must not begin or end with a hyphen".to_owned());
    }
    problems
}

/// Complaints about a number that should be a port.
pub fn port_number(port: i64) -> Option<&'static str> {
    if (1..=65535).contains(&port) { None } else { Some("must be between 1 and 65535, inclusive") }
}

/// Validates `metadata` of an object that is to be created. `name_problems` is the kind's check of names.
pub fn validate_metadata(
    object: &Value,
    namespaced: bool,
    name_problems: impl Fn(&str) -> Vec<String>,
) -> FieldErrors {
    let path = Path::new("metadata");
    let metadata = &object["metadata"];
    let text = |key: &str| metadata[key].as_str().unwrap_or_default();
    let mut errors = Vec::new();

    let generate = text("generateName");
    if !generate.is_empty() {
        // A trailing dash is fine in a prefix. As upstream: a letter stands for the dash and the byte before it.
        let masked = match generate.as_bytes() {
            [prefix @ .., _, b'-'] => format!("{}a", String::from_utf8_lossy(prefix)),
            _ => generate.to_owned(),
        };
        for problem in name_problems(&masked) {
            errors.push(FieldError::invalid(&path.child("generateName"), generate, problem));
        }
    }
    let name = text("name");
    if name.is_empty() {
        errors.push(FieldError::required(&path.child("name"), "name or generateName is required"));
    } else {
        for problem in name_problems(name) {
            errors.push(FieldError::invalid(&path.child("name"), name, problem));
        }
    }
    let namespace = text("namespace");
    if namespaced {
        if namespace.is_empty() {
            errors.push(FieldError::required(&path.child("namespace"), ""));
        } else {
            for problem in dns1123_label(namespace) {
                errors.push(FieldError::invalid(&path.child("namespace"), namespace, problem));
            }
        }
    } else if !namespace.is_empty() {
        errors.push(FieldError::forbidden(&path.child("namespace"), "not allowed on this type"));
    }
    if let Some(generation) = metadata["generation"].as_i64()
        && generation < 0
    {
        errors.push(FieldError::invalid(
            &path.child("generation"),
            generation,
            "must be greater than or equal to 0",
        ));
    }
    errors.extend(validate_labels(&metadata["labels"], &path.child("labels")));
    errors.extend(validate_annotations(&metadata["annotations"], &path.child("annotations")));
    errors.extend(validate_owner_references(&metadata["ownerReferences"], &path.child("ownerReferences")));
    errors.extend(validate_finalizers(&metadata["finalizers"], &path.child("finalizers")));
    errors
}

/// Takes from `old` the fields that an update leaves out or may not touch: an absent uid, the time of
/// creation, and a deletion once begun. Runs before [`validate_metadata_update`].
pub fn restore_system_metadata(new: &mut Value, old: &Value) {
    let metadata = crate::meta::metadata_mut(new);
    let old = &old["metadata"];
    let mut take = |key: &str, only_if_absent: bool| {
        let absent = metadata.get(key).is_none_or(|v| v.is_null() || v.as_str() == Some(""));
        if !old[key].is_null() && (absent || !only_if_absent) {
            metadata.insert(key.to_owned(), old[key].clone());
        }
    };
    take("uid", true);
    take("creationTimestamp", false);
    take("deletionTimestamp", false);
    take("deletionGracePeriodSeconds", true);
}

/// Validates the change of `metadata`: the identity of an object stays, deletion is not undone.
pub fn validate_metadata_update(new: &Value, old: &Value) -> FieldErrors {
    let path = Path::new("metadata");
    let (new, old) = (&new["metadata"], &old["metadata"]);
    let mut errors = Vec::new();

    if !old["deletionTimestamp"].is_null() {
        let known = strings(&old["finalizers"]);
        let added: Vec<&str> =
            strings(&new["finalizers"]).into_iter().filter(|f| !known.contains(f)).collect();
        if !added.is_empty() {
            let listed: Vec<String> = added.iter().map(|f| format!("{f:?}")).collect();
            errors.push(FieldError::forbidden(
                &path.child("finalizers"),
                format!(
                    "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
                    listed.join(", ")
                ),
            ));
        }
    }
    let resource_version = new["resourceVersion"].as_str().unwrap_or_default();
    if resource_version.is_empty() {
        errors.push(FieldError::invalid(
            &path.child("resourceVersion"),
            resource_version,
            "must be specified for an update",
        ));
    }
    let (was, is) = (old["generation"].as_i64().unwrap_or(0), new["generation"].as_i64().unwrap_or(0));
    if is < was {
        errors.push(FieldError::invalid(&path.child("generation"), is, "must not be decremented"));
    }
    for key in
        ["name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"]
    {
        if new[key] != old[key] {
            errors.push(FieldError::invalid(&path.child(key), new[key].clone(), "field is immutable"));
        }
    }
    errors.extend(validate_labels(&new["labels"], &path.child("labels")));
    errors.extend(validate_annotations(&new["annotations"], &path.child("annotations")));
    errors.extend(validate_owner_references(&new["ownerReferences"], &path.child("ownerReferences")));
    errors
}

/// Validates a map of labels: qualified keys, short values.
pub fn validate_labels(labels: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (key, value) in labels.as_object().into_iter().flatten() {
        for problem in qualified_name(key) {
            errors.push(FieldError::invalid(path, key.as_str(), problem));
        }
        let value = value.as_str().unwrap_or_default();
        for problem in label_value(value) {
            errors.push(FieldError::invalid(path, value, problem));
        }
    }
    errors
}

/// Validates a map of annotations: qualified keys, bounded size together.
pub fn validate_annotations(annotations: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut total = 0;
    for (key, value) in annotations.as_object().into_iter().flatten() {
        // Upper case is tolerated in annotation keys.
        for problem in qualified_name(&key.to_lowercase()) {
            errors.push(FieldError::invalid(path, key.as_str(), problem));
        }
        total += key.len() + value.as_str().map_or(0, str::len);
    }
    if total > ANNOTATIONS_MAX {
        errors.push(FieldError::too_long(path, ANNOTATIONS_MAX));
    }
    errors
}

fn validate_owner_references(references: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let references = references.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut controller: Option<&Value> = None;
    let mut is_told = false;
    for reference in references {
        let text = |key: &str| reference[key].as_str().unwrap_or_default();
        let api_version = text("apiVersion");
        let parsed = crate::gvk::Gvk::from_api_version(api_version, text("kind"));
        let version_missing = parsed.as_ref().is_none_or(|gvk| gvk.version.is_empty());
        if version_missing {
            errors.push(FieldError::invalid(
                &path.child("apiVersion"),
                api_version,
                "version must not be empty",
            ));
        }
        for key in ["kind", "name", "uid"] {
            if text(key).is_empty() {
                errors.push(FieldError::invalid(&path.child(key), text(key), "must not be empty"));
            }
        }
        if api_version == "v1" && text("kind") == "Event" {
            errors.push(
                FieldError::invalid(
                    path,
                    reference.clone(),
                    "/v1, Kind=Event is disallowed from being an owner",
                )
                .rendered_as(render_owner(reference)),
            );
        }
        if reference["controller"].as_bool() == Some(true) {
            match controller {
                // One error shows them all: one for each would show all of them as often.
                Some(_) if is_told => {}
                Some(first) => {
                    is_told = true;
                    let rendered: Vec<String> = references.iter().map(render_owner).collect();
                    errors.push(
                        FieldError::invalid(
                            path,
                            Value::Array(references.to_vec()),
                            format!(
                                "Only one reference can have Controller set to true. Found \"true\" in references for {}/{} and {}/{}",
                                first["kind"].as_str().unwrap_or_default(),
                                first["name"].as_str().unwrap_or_default(),
                                text("kind"),
                                text("name"),
                            ),
                        )
                        .rendered_as(format!("[{}]", rendered.join(","))),
                    );
                }
                None => controller = Some(reference),
            }
        }
    }
    errors
}

/// An owner in the order of its fields' declaration.
fn render_owner(reference: &Value) -> String {
    let fields: Vec<String> = ["apiVersion", "kind", "name", "uid", "controller", "blockOwnerDeletion"]
        .iter()
        .filter(|key| !reference[**key].is_null())
        .map(|key| format!("\"{key}\":{}", reference[*key]))
        .collect();
    format!("{{{}}}", fields.join(","))
}

const STANDARD_FINALIZERS: [&str; 3] = ["kubernetes", "orphan", "foregroundDeletion"];

fn validate_finalizers(finalizers: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let names = strings(finalizers);
    for name in &names {
        errors.extend(qualified_name(name).into_iter().map(|p| FieldError::invalid(path, *name, p)));
    }
    if names.contains(&"orphan") && names.contains(&"foregroundDeletion") {
        errors.push(FieldError::invalid(
            path,
            finalizers.clone(),
            "finalizer orphan and foregroundDeletion cannot be both set",
        ));
    }
    errors
}

/// Complains about finalizers that are neither upstream's own nor have a domain. Most kinds' own validation does so, after
/// that of all metadata.
pub fn unknown_finalizers(object: &Value) -> FieldErrors {
    let (names, path) =
        (strings(&object["metadata"]["finalizers"]), Path::new("metadata").child("finalizers"));
    let complaint = |(index, name): (usize, &&str)| unknown_finalizer(name, &path.index(index));
    names.iter().enumerate().filter_map(complaint).collect()
}

/// A finalizer is one of the standard ones, or has a domain.
pub fn unknown_finalizer(name: &str, path: &Path) -> Option<FieldError> {
    (!name.contains('/') && !STANDARD_FINALIZERS.contains(&name)).then(|| {
        FieldError::invalid(path, name, "name is neither a standard finalizer name nor is it fully qualified")
    })
}

/// Validates one finalizer: a qualified name, with a prefix unless it is one of upstream's own.
pub fn validate_finalizer_name(name: &str, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors =
        qualified_name(name).into_iter().map(|p| FieldError::invalid(path, name, p)).collect();
    errors.extend(unknown_finalizer(name, path));
    errors
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

#[cfg(test)]
mod tests;
