//! Secrets.

mod key_pair;

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_text, ensure_object, map, text};
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::core::configmap::{DATA_MAX, decoded_len, immutable_errors};
use crate::meta_validation::config_map_key;
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::age;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferrite_json::Value;
use jiff::Timestamp;

const ACCOUNT_ANNOTATION: &str = "kubernetes.io/service-account.name";

pub(in crate::kinds) struct Secrets;

impl Strategy for Secrets {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        default_text(object, "type", "Opaque");
        merge_string_data(object);
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let data_path = Path::new("data");
        let data = map(object, "data");
        let mut errors = Vec::new();
        let mut total = 0;
        for (key, value) in data.into_iter().flatten() {
            let path = data_path.key(key);
            errors
                .extend(config_map_key(key).into_iter().map(|p| FieldError::invalid(&path, key.as_str(), p)));
            total += decoded_len(value);
        }
        if total > DATA_MAX {
            errors.push(FieldError::too_long(&data_path, DATA_MAX));
        }
        let absent = |key: &str| data.is_none_or(|d| !d.contains_key(key));
        let mut require = |keys: &[&str]| {
            for key in keys {
                if absent(key) {
                    errors.push(FieldError::required(&data_path.key(key), ""));
                }
            }
        };
        match text(object, "type") {
            "kubernetes.io/service-account-token" => {
                let account =
                    object.pointer("/metadata/annotations").map_or("", |a| text(a, ACCOUNT_ANNOTATION));
                if account.is_empty() {
                    let path = Path::new("metadata").child("annotations").key(ACCOUNT_ANNOTATION);
                    errors.push(FieldError::required(&path, ""));
                }
            }
            "kubernetes.io/dockercfg" => errors.extend(docker_config(data, ".dockercfg")),
            "kubernetes.io/dockerconfigjson" => errors.extend(docker_config(data, ".dockerconfigjson")),
            // Either of the two is enough.
            "kubernetes.io/basic-auth" if absent("username") && absent("password") => {
                require(&["username", "password"]);
            }
            "kubernetes.io/ssh-auth" => {
                let key =
                    data.and_then(|d| d.get("ssh-privatekey")).and_then(Value::as_str).unwrap_or_default();
                if key.is_empty() {
                    errors.push(FieldError::required(&data_path.key("ssh-privatekey"), ""));
                }
            }
            "kubernetes.io/tls" => require(&["tls.crt", "tls.key"]),
            _ => {}
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = Vec::new();
        if text(new, "type") != text(old, "type") {
            errors.push(FieldError::invalid(&Path::new("type"), text(new, "type"), "field is immutable"));
        }
        errors.extend(immutable_errors(new, old, &["data"]));
        errors.extend(self.validate(new));
        errors
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        // An update that does not name the type keeps it.
        default_text(new, "type", text(old, "type"));
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        if text(object, "type") != "kubernetes.io/tls" {
            return Vec::new();
        }
        let part = |key: &str| STANDARD.decode(text(&object["data"], key)).unwrap_or_default();
        let problem = key_pair::check(&part("tls.crt"), &part("tls.key")).err();
        problem.map(|problem| problem.to_string()).into_iter().collect()
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["type"]
    }

    fn text_fields(&self) -> &'static [&'static str] {
        &["type"]
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        text(object, field).to_owned()
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Type"), shown("Data"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![
            crate::meta::name(object).into(),
            text(object, "type").into(),
            map(object, "data").map_or(0, ferrite_json::Map::len).into(),
            age(object, now).into(),
        ]
    }
}

/// `stringData` is for writing only: its values replace those of `data` and it is never kept.
fn merge_string_data(secret: &mut Value) {
    let Some(plain) = secret.as_object_mut().and_then(|o| o.remove("stringData")) else { return };
    let Some(plain) = plain.as_object().filter(|p| !p.is_empty()) else { return };
    let data = ensure_object(secret, "data");
    for (key, value) in plain {
        data[key] = STANDARD.encode(value.as_str().unwrap_or_default()).into();
    }
}

fn docker_config(data: Option<&ferrite_json::Map>, key: &str) -> Option<FieldError> {
    let path = Path::new("data").key(key);
    let Some(encoded) = data.and_then(|d| d.get(key)).and_then(Value::as_str) else {
        return Some(FieldError::required(&path, ""));
    };
    let decoded = STANDARD.decode(encoded).unwrap_or_default();
    let problem = match crate::codec::json::decode_any(&decoded) {
        Ok(decoded) if decoded.value.is_object() || decoded.value.is_null() => return None,
        Ok(decoded) => {
            let found = match decoded.value {
                Value::Array(_) => "array",
                Value::String(_) => "string",
                Value::Bool(_) => "bool",
                _ => "number",
            };
            format!("json: cannot unmarshal {found} into Go value of type map[string]interface {{}}")
        }
        Err(error) => error.to_string(),
    };
    Some(FieldError::invalid(&path, "<secret contents redacted>", problem))
}
