//! APIServices.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    clear_status, default_field, ensure_object, flag, int, list, object, object_mut, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, required};
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::core::configmap::decoded_len;
use crate::meta_validation::{dns1035_label, dns1123_subdomain, path_segment, port_number};
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
use ferrite_json::{Value, json};
use jiff::Timestamp;

const GROUP_PRIORITY_MAX: i64 = 20_000;
const VERSION_PRIORITY_MAX: i64 = 1000;
const PORT: i64 = 443;
const CONDITION_STATUSES: [&str; 3] = ["True", "False", "Unknown"];

/// Reason and message of the condition of an APIService without a Service.
const LOCAL: (&str, &str) = ("Local", "Local APIServices are always available");

pub(in crate::kinds) struct ApiServices;

impl Strategy for ApiServices {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn knows_finalizers(&self) -> bool {
        false
    }

    fn status_has_table(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        if let Some(service) = object_mut(ensure_object(object, "spec"), "service") {
            default_field(service, "port", PORT);
        }
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    /// A group of this server itself is available at once.
    fn prepare_create(&self, object: &mut Value) {
        clear_status(object);
        if object.pointer("/spec/service").is_none_or(Value::is_null) {
            let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
            object["status"] = json!({"conditions": [{"type": "Available", "status": "True",
                "lastTransitionTime": now.to_string(), "reason": LOCAL.0, "message": LOCAL.1}]});
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let (group, version) = (text(spec, "group"), text(spec, "version"));
        let mut errors = Vec::new();
        let wanted = format!("{version}.{group}");
        for key in ["generateName", "name"] {
            let name = crate::meta::str(object, key);
            if !name.is_empty() && path_segment(name).is_empty() && name != wanted {
                errors.push(FieldError::invalid(
                    &Path::new("metadata").child(key),
                    name,
                    format!("must be `spec.version+\".\"+spec.group`: {wanted:?}"),
                ));
            }
        }
        if group.is_empty() {
            if version != "v1" {
                errors.push(FieldError::required(
                    &path.child("group"),
                    "only v1 may have an empty group and it better be legacy kube",
                ));
            }
        } else {
            let problems = dns1123_subdomain(group);
            if !problems.is_empty() {
                errors.push(FieldError::invalid(&path.child("group"), group, problems.join(",")));
            }
        }
        errors.extend(complaints(&path.child("version"), version, dns1035_label(version)));
        for (key, max) in
            [("groupPriorityMinimum", GROUP_PRIORITY_MAX), ("versionPriority", VERSION_PRIORITY_MAX)]
        {
            let value = int(spec, key);
            if !(1..=max).contains(&value) {
                errors.push(FieldError::invalid(
                    &path.child(key),
                    value,
                    format!("must be positive and less than {max}"),
                ));
            }
        }
        errors.extend(validate_service(spec, &path));
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let path = Path::new("status").child("conditions");
        let conditions = list(&new["status"], "conditions").iter().enumerate();
        let wrong = conditions.filter(|(_, c)| !CONDITION_STATUSES.contains(&text(c, "status")));
        wrong
            .map(|(index, condition)| {
                let path = path.index(index).child("status");
                FieldError::not_supported(&path, text(condition, "status"), &CONDITION_STATUSES)
            })
            .collect()
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        path_segment(name)
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Service"), shown("Available"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let service = self::object(&object["spec"], "service")
            .map_or_else(|| "Local".to_owned(), |s| format!("{}/{}", text(s, "namespace"), text(s, "name")));
        let available = list(&object["status"], "conditions").iter().find(|c| text(c, "type") == "Available");
        let available = match available.map(|c| (text(c, "status"), text(c, "reason"))) {
            Some(("True", _)) => "True".to_owned(),
            Some((status, reason)) => format!("{status} ({reason})"),
            None => "Unknown".to_owned(),
        };
        vec![cell::name(object), service.into(), available.into(), cell::age(object, now)]
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

fn validate_service(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let insecure = flag(spec, "insecureSkipTLSVerify");
    let bundle = !text(spec, "caBundle").is_empty();
    let Some(service) = object(spec, "service") else {
        if bundle {
            errors.push(FieldError::invalid(
                &path.child("caBundle"),
                format!("{} bytes", decoded_len(&spec["caBundle"])),
                "local APIServices may not have a caBundle",
            ));
        }
        if insecure {
            errors.push(FieldError::invalid(
                &path.child("insecureSkipTLSVerify"),
                true,
                "local APIServices may not have insecureSkipTLSVerify",
            ));
        }
        return errors;
    };
    for key in ["namespace", "name"] {
        errors.extend(required(service, key, &path.child("service")));
    }
    if let Some(problem) = port_number(int(service, "port")) {
        errors.push(FieldError::invalid(
            &path.child("service").child("port"),
            int(service, "port"),
            format!("port is not valid: {problem}"),
        ));
    }
    if insecure && bundle {
        errors.push(FieldError::invalid(
            &path.child("insecureSkipTLSVerify"),
            true,
            "may not be true if caBundle is present",
        ));
    }
    errors
}
