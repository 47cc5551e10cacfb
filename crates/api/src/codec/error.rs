use thiserror::Error;

/// Why bytes are not an object of the expected type. Texts are upstream's where clients see them.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// Not JSON.
    #[error("{0}")]
    Syntax(String),
    /// Not YAML.
    #[error("error converting YAML to JSON: yaml: {0}")]
    Yaml(String),
    /// YAML that has no JSON form.
    #[error("error converting YAML to JSON: {0}")]
    NoJson(String),
    /// JSON of another shape than the type's. `place` is `struct field PodSpec.spec.containers` or `value`.
    #[error("json: cannot unmarshal {found} into Go {place} of type {expected}")]
    Mismatch { found: String, place: String, expected: String },
    /// A quantity, time or base64 text that does not parse.
    #[error("{0}")]
    Text(String),
    #[error("exceeded max depth")]
    TooDeep,
    /// The body has no protobuf envelope.
    #[error("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")]
    NoEnvelope,
    /// The envelope holds nothing.
    #[error("empty body")]
    EmptyBody,
    /// The protobuf message is cut short.
    #[error("unexpected EOF")]
    Truncated,
    /// The protobuf message contradicts itself.
    #[error("proto: {0}")]
    Protobuf(&'static str),
    /// A protobuf field whose wire type is not that of its type.
    #[error("proto: wrong wireType = {wire_type} for field {field}")]
    WireType { wire_type: u8, field: &'static str },
}

impl DecodeError {
    /// The same problem as upstream words it when the object comes from a strategic merge, which it converts
    /// from an unstructured map rather than from JSON.
    pub fn unstructured(&self) -> String {
        let Self::Mismatch { found, place, expected } = self else {
            return match self {
                // Only bytes are decoded by the converter itself.
                Self::Text(why) if why.contains("base64") => format!("error decoding from json: {why}"),
                other => other.to_string(),
            };
        };
        // An IntOrString reads itself.
        if place == "value" && expected == "int32" {
            return self.to_string();
        }
        let found = match found.split_once(' ') {
            Some((_, number)) if number.contains(['.', 'e', 'E']) => "float64",
            Some(_) => "int64",
            None => match found.as_str() {
                "array" => "slice",
                "object" => "map",
                "number" => "int64",
                other => other,
            },
        };
        match expected.as_str() {
            // Go could convert these, though not to anything the field means.
            "string" if found == "int64" => format!("cannot convert {found} to {expected}"),
            "int32" | "int64" if found == "float64" => format!("cannot convert {found} to {expected}"),
            "string" | "bool" | "int32" | "int64" | "float64" => format!("unrecognized type: {expected}"),
            list if list.starts_with("[]") => format!("cannot restore slice from {found}"),
            map if map.starts_with("map[") => format!("cannot restore map from {found}"),
            _ => format!("cannot restore struct from: {found}"),
        }
    }
}
