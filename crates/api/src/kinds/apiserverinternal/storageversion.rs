//! StorageVersions: the versions in which the servers of a cluster store a resource.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list, strings, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, repeated};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{DNS1035_EXAMPLE, dns1035_label, dns1123_subdomain, qualified_name};
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashMap;

const UNSET: &str = "<unset>";
/// A table names so many servers.
const SHOWN: usize = 3;

pub(in crate::kinds) struct StorageVersions;

impl Strategy for StorageVersions {
    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::New
    }

    fn status_metadata_use(&self) -> MetadataUse {
        MetadataUse::Nothing
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        let Some((group, resource)) = name.rsplit_once('.') else {
            return vec!["name must be in the form of <group>.<resource>".to_owned()];
        };
        let group = dns1123_subdomain(group).into_iter().map(|why| format!("the group segment {why}"));
        let resource = dns1035_label(resource).into_iter().map(|why| format!("the resource segment {why}"));
        group.chain(resource).collect()
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let (status, path) = (&new["status"], Path::new("status"));
        let servers = list(status, "storageVersions");
        let again = repeated(servers.iter().map(|server| text(server, "apiServerID")));
        let mut errors = Vec::new();
        for (index, server) in servers.iter().enumerate() {
            let path = path.child("storageVersions").index(index);
            if again[index] {
                errors.push(FieldError::duplicate(&path.child("apiServerID"), text(server, "apiServerID")));
            }
            errors.extend(validate_server(server, &path));
        }
        errors.extend(validate_common_version(status, &path));
        errors.extend(validate_conditions(list(status, "conditions"), &path));
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("CommonEncodingVersion"), shown("StorageVersions"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let status = &object["status"];
        let servers = list(status, "storageVersions");
        let named = servers.iter().take(SHOWN);
        let named: Vec<String> = named
            .map(|server| format!("{}={}", text(server, "apiServerID"), text(server, "encodingVersion")))
            .collect();
        let named = match (named.join(","), servers.len()) {
            (named, count) if count > SHOWN => format!("{named} + {} more...", count - SHOWN),
            (named, _) if named.is_empty() => UNSET.to_owned(),
            (named, _) => named,
        };
        let common = status["commonEncodingVersion"].as_str().unwrap_or(UNSET);
        vec![cell::name(object), common.into(), named.into(), cell::age(object, now)]
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

fn validate_server(server: &Value, path: &Path) -> FieldErrors {
    let id = text(server, "apiServerID");
    let mut errors = complaints(&path.child("apiServerID"), id, dns1123_subdomain(id));
    let encoding = text(server, "encodingVersion");
    errors.extend(validate_version(encoding, &path.child("encodingVersion")));
    let (decodable, decodable_path) = (strings(server, "decodableVersions"), path.child("decodableVersions"));
    for (index, version) in decodable.iter().enumerate() {
        errors.extend(validate_version(version, &decodable_path.index(index)));
    }
    if !decodable.contains(&encoding) {
        let why = format!("decodableVersions must include encodingVersion {encoding}");
        errors.push(FieldError::invalid(&decodable_path, server["decodableVersions"].clone(), why));
    }
    for (index, version) in strings(server, "servedVersions").into_iter().enumerate() {
        let path = path.child("servedVersions").index(index);
        errors.extend(validate_version(version, &path));
        if !decodable.contains(&version) {
            let why = format!(
                "individual served version : {version} must be included in decodableVersions : [{}]",
                decodable.join(" ")
            );
            errors.push(FieldError::invalid(&path, version, why));
        }
    }
    errors
}

/// The version that all servers encode in; none if they differ.
fn common_version(servers: &[Value]) -> Option<&str> {
    let (first, rest) = servers.split_first()?;
    let version = text(first, "encodingVersion");
    rest.iter().all(|server| text(server, "encodingVersion") == version).then_some(version)
}

fn validate_common_version(status: &Value, path: &Path) -> Option<FieldError> {
    const DIFFERENT: &str = "should be nil if servers do not agree on the same encoding version, or if there is no server reporting the supported versions yet";
    let path = path.child("commonEncodingVersion");
    let given = status["commonEncodingVersion"].as_str();
    match (common_version(list(status, "storageVersions")), given) {
        (None, Some(given)) => Some(FieldError::invalid(&path, given, DIFFERENT)),
        (Some(common), None) => {
            Some(FieldError::invalid(&path, Value::Null, format!("the common encoding version is {common}")))
        }
        (Some(common), Some(given)) if common != given => {
            Some(FieldError::invalid(&path, given, format!("the actual common encoding version is {common}")))
        }
        _ => None,
    }
}

/// As upstream: the paths leave the name of the list out.
fn validate_conditions(conditions: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut seen = HashMap::new();
    for (index, condition) in conditions.iter().enumerate() {
        let path = path.index(index);
        let (kind, status) = (text(condition, "type"), text(condition, "status"));
        if let Some(earlier) = seen.insert(kind, index) {
            let why =
                format!("the type of the condition is not unique, it also appears in conditions[{earlier}]");
            errors.push(FieldError::invalid(&path.child("type"), kind, why));
        }
        errors.extend(complaints(&path.child("type"), kind, qualified_name(kind)));
        errors.extend(complaints(&path.child("status"), status, qualified_name(status)));
        for key in ["reason", "message"] {
            if text(condition, key).is_empty() {
                errors.push(FieldError::required(&path.child(key), ""));
            }
        }
    }
    errors
}

fn validate_version(version: &str, path: &Path) -> Option<FieldError> {
    let problems = version_problems(version);
    (!problems.is_empty()).then(|| FieldError::invalid(path, version, problems.join(",")))
}

/// Complaints about an `apiVersion`.
fn version_problems(api_version: &str) -> Vec<String> {
    const EMPTY: &str = "must be non-empty";
    let part = |name: &str, text: &str, form: fn(&str) -> Vec<String>| -> Vec<String> {
        let problems = if text.is_empty() { vec![EMPTY.to_owned()] } else { form(text) };
        problems.into_iter().map(|problem| format!("{name} part: {problem}")).collect()
    };
    match api_version.split('/').collect::<Vec<_>>()[..] {
        [version] => part("version", version, dns1035_label),
        [group, version] => {
            let mut problems = part("group", group, dns1123_subdomain);
            problems.extend(part("version", version, dns1035_label));
            problems
        }
        _ => vec![format!(
            "an apiVersion is a DNS-1035 label, which must consist of lower case alphanumeric characters or '-', start with an \
             alphabetic character, and end with an alphanumeric character {DNS1035_EXAMPLE} with an optional DNS subdomain \
             prefix and '/' (e.g. 'example.com/MyVersion')"
        )],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn texts(errors: FieldErrors) -> Vec<String> {
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_name_has_a_group_and_a_resource() {
        for (name, problems) in
            [("apps.deployments", 0), ("a.b.pods", 0), ("pods", 1), ("A.1pods", 2), (".pods", 1)]
        {
            assert_eq!(StorageVersions.validate_name(name).len(), problems, "{name}");
        }
    }

    #[test]
    fn servers_say_what_they_read_and_write() {
        let check = |status: Value| {
            texts(StorageVersions.validate_status_update(&json!({"status": status}), &json!({})))
        };
        let server = |id: &str, version: &str| json!({"apiServerID": id, "encodingVersion": version, "decodableVersions": [version]});
        let (one, two) = (server("a", "apps/v1"), server("b", "apps/v1"));
        assert_eq!(
            check(json!({"storageVersions": [one, two], "commonEncodingVersion": "apps/v1"})),
            [""; 0]
        );
        assert_eq!(check(json!({})), [""; 0]);
        assert_eq!(
            check(json!({"storageVersions": [one]})),
            ["status.commonEncodingVersion: Invalid value: null: the common encoding version is apps/v1"]
        );
        assert_eq!(
            check(json!({"storageVersions": [one, one], "commonEncodingVersion": "v2"})),
            [
                "status.storageVersions[1].apiServerID: Duplicate value: \"a\"",
                "status.commonEncodingVersion: Invalid value: \"v2\": the actual common encoding version is apps/v1",
            ]
        );
        let mut odd = one.clone();
        odd["decodableVersions"] = json!(["apps/v2"]);
        odd["servedVersions"] = json!(["v3"]);
        assert_eq!(
            check(json!({"storageVersions": [odd], "commonEncodingVersion": "apps/v1"})),
            [
                "status.storageVersions[0].decodableVersions: Invalid value: [\"apps/v2\"]: decodableVersions must include encodingVersion apps/v1",
                "status.storageVersions[0].servedVersions[0]: Invalid value: \"v3\": individual served version : v3 must be included in decodableVersions : [apps/v2]",
            ]
        );
        let condition = json!({"type": "T", "status": "True"});
        assert_eq!(
            check(json!({"conditions": [condition, condition]})).last().map(String::as_str),
            Some("status[1].message: Required value")
        );
        for (version, problems) in [("v1", 0), ("g/v1", 0), ("/v1", 1), ("g/", 1), ("a/b/c", 1), ("G/1", 2)] {
            assert_eq!(version_problems(version).len(), problems, "{version}");
        }
    }

    #[test]
    fn a_table_names_three_servers() {
        let cells = |count: usize| {
            let servers: Vec<Value> = (0..count)
                .map(|n| json!({"apiServerID": format!("s{n}"), "encodingVersion": "v1"}))
                .collect();
            let object = json!({"metadata": {"name": "a.b"}, "status": {"storageVersions": servers}});
            StorageVersions.cells(&object, Timestamp::UNIX_EPOCH)[2].as_str().unwrap_or_default().to_owned()
        };
        for (count, text) in [(0, "<unset>"), (2, "s0=v1,s1=v1"), (5, "s0=v1,s1=v1,s2=v1 + 2 more...")] {
            assert_eq!(cells(count), text);
        }
    }
}
