//! The envelope around an object, and the frames of a stream.

use super::decode::message_into;
use super::encode::{self, EncodeError, encode_message};
use super::reader::Reader;
use super::{MAGIC, decode_message};
use crate::codec::{DecodeError, MAX_DEPTH, json};
use crate::schema::{self, TypeRef};
use ferrite_json::{Map, Value};

/// The tag of the object's message in `runtime.Unknown`.
pub(super) const RAW: u32 = 2;

/// An opened envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope<'a> {
    pub api_version: String,
    pub kind: String,
    /// The object's message, or its JSON when `content_type` says so.
    pub raw: &'a [u8],
    pub content_encoding: String,
    pub content_type: String,
}

/// Opens an envelope without looking into the object.
pub fn open(bytes: &[u8]) -> Result<Envelope<'_>, DecodeError> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(DecodeError::NoEnvelope)?;
    if rest.is_empty() {
        return Err(DecodeError::EmptyBody);
    }
    let mut envelope = Envelope {
        api_version: String::new(),
        kind: String::new(),
        raw: &[],
        content_encoding: String::new(),
        content_type: String::new(),
    };
    let mut reader = Reader::new(rest);
    while let Some((tag, content)) = reader.next()? {
        match tag {
            1 => {
                let mut type_meta = Reader::new(content.bytes("typeMeta")?);
                while let Some((tag, content)) = type_meta.next()? {
                    match tag {
                        1 => envelope.api_version = content.text("apiVersion")?,
                        2 => envelope.kind = content.text("kind")?,
                        _ => {}
                    }
                }
            }
            RAW => envelope.raw = content.bytes("raw")?,
            3 => envelope.content_encoding = content.text("contentEncoding")?,
            4 => envelope.content_type = content.text("contentType")?,
            _ => {}
        }
    }
    Ok(envelope)
}

/// Decodes an enveloped object of `type_`; apiVersion and kind are those of the envelope.
pub fn decode_as(type_: TypeRef, bytes: &[u8]) -> Result<Value, DecodeError> {
    let envelope = open(bytes)?;
    let value = if envelope.content_type == "application/json" {
        json::decode(type_, envelope.raw)?.value
    } else {
        decode_message(type_, envelope.raw)?
    };
    Ok(with_type_meta(value, &envelope))
}

/// Decodes an enveloped object of any built-in kind. `Ok(None)` when the kind is not in the schema.
pub fn decode(bytes: &[u8]) -> Result<Option<Value>, DecodeError> {
    let envelope = open(bytes)?;
    match schema::of_api_version(&envelope.api_version, &envelope.kind) {
        Some(type_) => decode_as(type_, bytes).map(Some),
        None => Ok(None),
    }
}

/// An object inside another's raw extension (the object of a watch event, say).
pub(super) fn decode_embedded(bytes: &[u8], depth: usize) -> Result<Value, DecodeError> {
    // Each level of embedding starts anew but for the depth, which goes on counting.
    if depth > MAX_DEPTH {
        return Err(DecodeError::TooDeep);
    }
    let envelope = open(bytes)?;
    let type_ = schema::of_api_version(&envelope.api_version, &envelope.kind)
        .ok_or(DecodeError::Protobuf("embedded object of an unknown kind"))?;
    let mut map = Map::new();
    message_into(type_, envelope.raw, &mut map, depth)?;
    Ok(with_type_meta(Value::Object(map), &envelope))
}

fn with_type_meta(mut value: Value, envelope: &Envelope<'_>) -> Value {
    if let Value::Object(map) = &mut value {
        for (key, text) in [("apiVersion", &envelope.api_version), ("kind", &envelope.kind)] {
            if !text.is_empty() {
                map.insert(key.to_owned(), text.clone().into());
            }
        }
    }
    value
}

/// Encodes an object of a built-in kind, found by its apiVersion and kind, in an envelope.
pub fn encode(value: &Value) -> Result<Vec<u8>, EncodeError> {
    let text = |key| value.get(key).and_then(Value::as_str).unwrap_or_default();
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    // Discovery's oldest kinds do not say their version, in which they are meta's all the same.
    let meant = if api_version.is_empty() { "v1" } else { api_version };
    let type_ = schema::of_api_version(meant, kind).ok_or_else(|| EncodeError::UnknownKind {
        api_version: api_version.to_owned(),
        kind: kind.to_owned(),
    })?;
    encode_as(type_, api_version, kind, value)
}

/// Encodes an object as a message of `type_` in an envelope of the given apiVersion and kind.
pub fn encode_as(
    type_: TypeRef,
    api_version: &str,
    kind: &str,
    value: &Value,
) -> Result<Vec<u8>, EncodeError> {
    Ok(wrap(api_version, kind, &encode_message(type_, value)?))
}

/// Puts an encoded message into an envelope.
pub fn wrap(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    encode::unknown(api_version, kind, raw)
}

/// A watch event as it stands in a stream: the bare message around `object`, which is enveloped already.
pub fn encode_watch_event(type_: &str, object: &[u8]) -> Vec<u8> {
    encode::watch_event(type_, object)
}

/// A frame of a protobuf stream: the length in four bytes, then the message. `None` beyond four gigabytes.
pub fn frame(message: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(message.len()).ok()?;
    let mut frame = Vec::with_capacity(message.len() + 4);
    frame.extend(length.to_be_bytes());
    frame.extend(message);
    Some(frame)
}
