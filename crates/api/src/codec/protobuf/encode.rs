//! From a JSON value to the protobuf message Go would write.

use super::envelope;
use crate::codec::{scalar, time};
use crate::schema::{Field, Kind, Slot, TypeRef, Wire};
use ferrite_json::{Map, Value};
use thiserror::Error;

/// Why a value cannot be written as protobuf: it does not have the shape of its type.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EncodeError {
    #[error("{type_}.{field}: the value does not have the type of the field")]
    Shape { type_: &'static str, field: &'static str },
    #[error("no protobuf type for {api_version:?}, kind {kind:?}")]
    UnknownKind { api_version: String, kind: String },
    #[error("the object is not a JSON object")]
    NotAnObject,
    #[error("the object is nested too deeply")]
    TooDeep,
}

/// Encodes `value` as a message of `type_`, without an envelope.
pub fn encode_message(type_: TypeRef, value: &Value) -> Result<Vec<u8>, EncodeError> {
    let map = value.as_object().ok_or(EncodeError::NotAnObject)?;
    let mut writer = Writer::default();
    writer.message(type_, type_.wire, map, 0)?;
    Ok(writer.finish())
}

/// Writes a message from its end to its beginning, so that a length is known when it is written.
#[derive(Default)]
pub(super) struct Writer {
    reversed: Vec<u8>,
}

const VARINT: u32 = 0;
const FIXED64: u32 = 1;
const BYTES: u32 = 2;

impl Writer {
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.reversed.reverse();
        self.reversed
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.reversed.extend(bytes.iter().rev());
    }

    fn varint(&mut self, mut number: u64) {
        let mut buffer = [0u8; 10];
        let mut length = 0;
        loop {
            let more = number > 0x7f;
            buffer[length] = (number & 0x7f) as u8 | if more { 0x80 } else { 0 };
            length += 1;
            number >>= 7;
            if !more {
                break;
            }
        }
        self.raw(&buffer[..length]);
    }

    fn key(&mut self, tag: u32, wire_type: u32) {
        self.varint(u64::from(tag << 3 | wire_type));
    }

    pub(super) fn bytes(&mut self, tag: u32, bytes: &[u8]) {
        self.raw(bytes);
        self.varint(bytes.len() as u64);
        self.key(tag, BYTES);
    }

    fn number(&mut self, tag: u32, number: u64) {
        self.varint(number);
        self.key(tag, VARINT);
    }

    /// A nested message: `content` writes it, backwards as everything here.
    pub(super) fn nested(
        &mut self,
        tag: u32,
        content: impl FnOnce(&mut Self) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let before = self.reversed.len();
        content(self)?;
        self.varint((self.reversed.len() - before) as u64);
        self.key(tag, BYTES);
        Ok(())
    }

    fn message(
        &mut self,
        type_: TypeRef,
        wire: &'static [Wire],
        map: &Map,
        depth: usize,
    ) -> Result<(), EncodeError> {
        if depth > crate::codec::MAX_DEPTH {
            return Err(EncodeError::TooDeep);
        }
        for Wire { tag, slot } in wire.iter().rev() {
            match slot {
                Slot::Inline(inner) => {
                    self.nested(*tag, |w| w.message(type_, inner, map, depth + 1))?;
                }
                Slot::Field(index) => {
                    let Some(field) = type_.fields.get(usize::from(*index)) else { continue };
                    let value = map.get(field.name).filter(|v| !v.is_null());
                    self.field(*tag, field, value, depth).map_err(|error| match error {
                        EncodeError::Shape { type_: "", field } => {
                            EncodeError::Shape { type_: type_.name, field }
                        }
                        other => other,
                    })?;
                }
            }
        }
        Ok(())
    }

    fn field(
        &mut self,
        tag: u32,
        field: &'static Field,
        value: Option<&Value>,
        depth: usize,
    ) -> Result<(), EncodeError> {
        let wrong = EncodeError::Shape { type_: "", field: field.name };
        match (&field.kind, value) {
            (Kind::List(item), Some(Value::Array(list))) => {
                for value in list.iter().rev() {
                    self.element(tag, item, value, field.name, depth)?;
                }
                Ok(())
            }
            (Kind::Map(item), Some(Value::Object(map))) => {
                for (key, value) in map.iter().rev() {
                    self.nested(tag, |w| {
                        w.element(2, item, value, field.name, depth)?;
                        w.bytes(1, key.as_bytes());
                        Ok(())
                    })?;
                }
                Ok(())
            }
            (Kind::List(_) | Kind::Map(_), None) => Ok(()),
            (Kind::List(_) | Kind::Map(_), Some(_)) => Err(wrong),
            (kind, Some(value)) => self.element(tag, kind, value, field.name, depth),
            (_, None) if field.presence.is_pointer() => Ok(()),
            (Kind::Bytes | Kind::Strings, None) => Ok(()),
            (kind, None) => self.zero(tag, kind, depth),
        }
    }

    /// Go writes a field that is no pointer even when it is zero.
    fn zero(&mut self, tag: u32, kind: &Kind, depth: usize) -> Result<(), EncodeError> {
        match kind {
            Kind::String => self.bytes(tag, b""),
            Kind::Bool | Kind::Int32 | Kind::Int64 => self.number(tag, 0),
            Kind::Double => self.double(tag, 0.0),
            Kind::Quantity => self.quantity(tag, "0"),
            Kind::IntOrString => self.int_or_string(tag, 0, None),
            Kind::Struct(type_) => {
                let empty = Map::new();
                self.nested(tag, |w| w.message(type_, type_.wire, &empty, depth + 1))?;
            }
            _ => self.bytes(tag, b""),
        }
        Ok(())
    }

    fn double(&mut self, tag: u32, number: f64) {
        self.raw(&number.to_le_bytes());
        self.key(tag, FIXED64);
    }

    fn quantity(&mut self, tag: u32, text: &str) {
        let before = self.reversed.len();
        self.bytes(1, text.as_bytes());
        self.varint((self.reversed.len() - before) as u64);
        self.key(tag, BYTES);
    }

    fn int_or_string(&mut self, tag: u32, number: i32, text: Option<&str>) {
        let before = self.reversed.len();
        self.bytes(3, text.unwrap_or_default().as_bytes());
        self.number(2, signed(number.into()));
        self.number(1, u64::from(text.is_some()));
        self.varint((self.reversed.len() - before) as u64);
        self.key(tag, BYTES);
    }

    fn element(
        &mut self,
        tag: u32,
        kind: &Kind,
        value: &Value,
        name: &'static str,
        depth: usize,
    ) -> Result<(), EncodeError> {
        let wrong = || EncodeError::Shape { type_: "", field: name };
        match (kind, value) {
            (Kind::Raw, value) => {
                let bytes = raw_bytes(value)?;
                self.nested(tag, |w| {
                    w.bytes(1, &bytes);
                    Ok(())
                })?;
            }
            (kind, Value::Null) => self.zero(tag, kind, depth)?,
            (Kind::String, Value::String(text)) => self.bytes(tag, text.as_bytes()),
            (Kind::Bool, Value::Bool(flag)) => self.number(tag, u64::from(*flag)),
            (Kind::Int32 | Kind::Int64, Value::Number(number)) => {
                self.number(tag, signed(number.as_i64().ok_or_else(wrong)?));
            }
            (Kind::Double, Value::Number(number)) => {
                self.double(tag, number.as_f64().ok_or_else(wrong)?);
            }
            (Kind::Bytes, Value::String(text)) => {
                let bytes = scalar::decode_base64(text).map_err(|_| wrong())?;
                self.bytes(tag, &bytes);
            }
            (Kind::Quantity, Value::String(text)) => self.quantity(tag, text),
            (Kind::Quantity, Value::Number(number)) => self.quantity(tag, &number.to_string()),
            (Kind::IntOrString, Value::String(text)) => self.int_or_string(tag, 0, Some(text)),
            (Kind::IntOrString, Value::Number(number)) => {
                let number = number.as_i64().and_then(|n| i32::try_from(n).ok()).ok_or_else(wrong)?;
                self.int_or_string(tag, number, None);
            }
            (Kind::Time | Kind::MicroTime, Value::String(text)) => {
                let time = time::parse_time(text).map_err(|_| wrong())?;
                // Times have whole seconds in both formats; microtimes lose what is below a microsecond.
                let floor = scalar::floor_seconds(time);
                let nanos = match kind {
                    Kind::MicroTime => floor.1 / 1000 * 1000,
                    _ => 0,
                };
                self.nested(tag, |w| {
                    w.number(2, signed(nanos.into()));
                    w.number(1, signed(floor.0));
                    Ok(())
                })?;
            }
            (Kind::Duration, Value::String(text)) => {
                let nanos = scalar::parse_duration(text).ok_or_else(wrong)?;
                self.nested(tag, |w| {
                    w.number(1, signed(nanos));
                    Ok(())
                })?;
            }
            (Kind::Strings, Value::Array(list)) => self.nested(tag, |w| {
                for value in list.iter().rev() {
                    w.bytes(1, value.as_str().ok_or_else(wrong)?.as_bytes());
                }
                Ok(())
            })?,
            (Kind::Struct(type_), Value::Object(map)) => {
                self.nested(tag, |w| w.message(type_, type_.wire, map, depth + 1))?;
            }
            (Kind::SchemaOrArray(type_) | Kind::SchemaOrStrings(type_), Value::Object(map)) => {
                self.nested(tag, |w| w.nested(1, |w| w.message(type_, type_.wire, map, depth + 1)))?;
            }
            (Kind::SchemaOrArray(type_), Value::Array(list)) => self.nested(tag, |w| {
                for value in list.iter().rev() {
                    w.element(2, &Kind::Struct(type_), value, name, depth)?;
                }
                Ok(())
            })?,
            (Kind::SchemaOrStrings(_), Value::Array(list)) => self.nested(tag, |w| {
                for value in list.iter().rev() {
                    w.bytes(2, value.as_str().ok_or_else(wrong)?.as_bytes());
                }
                Ok(())
            })?,
            (Kind::SchemaOrBool(_), Value::Bool(flag)) => self.nested(tag, |w| {
                w.number(1, u64::from(*flag));
                Ok(())
            })?,
            // Upstream sets `allows` beside a schema.
            (Kind::SchemaOrBool(type_), Value::Object(map)) => self.nested(tag, |w| {
                w.nested(2, |w| w.message(type_, type_.wire, map, depth + 1))?;
                w.number(1, 1);
                Ok(())
            })?,
            _ => return Err(wrong()),
        }
        Ok(())
    }
}

/// Negative numbers take ten bytes, as protobuf's int32 and int64 do.
#[allow(clippy::cast_sign_loss)]
fn signed(number: i64) -> u64 {
    number as u64
}

/// The bytes of a raw extension: JSON text. An embedded object of a known kind is JSON too, which every
/// reader of raw extensions understands.
fn raw_bytes(value: &Value) -> Result<Vec<u8>, EncodeError> {
    Ok(value.to_string().into_bytes())
}

/// Writes the envelope's message around `raw`.
pub(super) fn unknown(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.bytes(4, b"");
    writer.bytes(3, b"");
    writer.bytes(envelope::RAW, raw);
    let type_meta = |w: &mut Writer| {
        w.bytes(2, kind.as_bytes());
        w.bytes(1, api_version.as_bytes());
        Ok(())
    };
    // Writing bytes cannot fail.
    let _ = writer.nested(1, type_meta);
    writer.raw(super::MAGIC);
    writer.finish()
}

/// `meta.v1.WatchEvent` around the bytes of an encoded object.
pub(super) fn watch_event(type_: &str, object: &[u8]) -> Vec<u8> {
    let mut writer = Writer::default();
    let raw = |w: &mut Writer| {
        w.bytes(1, object);
        Ok(())
    };
    // Writing bytes cannot fail.
    let _ = writer.nested(2, raw);
    writer.bytes(1, type_.as_bytes());
    writer.finish()
}
