//! Configuration files of apiserver.config.k8s.io: read with a limit, decoded strictly.

use ferrite_api::field::FieldError;
use ferrite_json::Value;
use serde::de::DeserializeOwned;
use std::io::Read;
use std::path::Path;

/// A larger file is no configuration.
pub(super) const MAX_BYTES: u64 = 1 << 20;

/// Decodes a kind, any of the versions, and refuses fields that are not known.
pub(super) fn decode<T: DeserializeOwned>(text: &[u8], kind: &str, versions: &[&str]) -> Result<T, String> {
    let decoded = ferrite_api::codec::yaml::decode_any(text).map_err(|error| error.to_string())?;
    if let Some(complaint) = decoded.strict.first() {
        return Err(format!("strict decoding error: {complaint}"));
    }
    let Value::Object(mut members) = decoded.value else { return Err("it is no object".to_owned()) };
    let mut text_of = |name: &str| match members.remove(name) {
        Some(Value::String(text)) => text.to_string(),
        _ => String::new(),
    };
    let (version, found) = (text_of("apiVersion"), text_of("kind"));
    if found.is_empty() {
        return Err("Object 'Kind' is missing".to_owned());
    }
    if found != kind || !versions.contains(&version.as_str()) {
        return Err(format!("no kind {found:?} is registered for version {version:?}"));
    }
    ferrite_json::from_value(members.into()).map_err(|error| {
        let text = error.to_string();
        match text.split_once(", expected ") {
            Some((what, _)) if what.starts_with("unknown field") => {
                format!("strict decoding error: {}", what.replace('`', "\""))
            }
            _ => format!("strict decoding error: {text}"),
        }
    })
}

/// Reads a file, at most one byte more than the limit.
pub(super) fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut text)?;
    Ok(text)
}

/// Errors in upstream's form.
pub(super) fn joined(errors: &[FieldError]) -> String {
    match errors {
        [one] => one.to_string(),
        many => {
            let all: Vec<String> = many.iter().map(ToString::to_string).collect();
            format!("[{}]", all.join(", "))
        }
    }
}
