//! From JSON to the protobuf message Go would write.

use super::envelope;
use super::writer::Writer;
use crate::codec::{scalar, time};
use crate::schema::{Field, Kind, Slot, TypeRef, Wire};
use ferrite_json::{Node, NodeKind, Tape, Value};
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
    let mut text = Vec::new();
    value.write_to(&mut text);
    let mut encoder = Encoder::default();
    encoder.encode(type_, &text)?;
    Ok(encoder.message().to_vec())
}

/// Encodes objects one after another, with the same memory.
#[derive(Debug, Default)]
pub struct Encoder {
    tape: Tape,
    writer: Writer,
    places: Vec<u32>,
}

impl Encoder {
    /// Encodes an object, given as JSON without spaces, as a message of `type_`, without an envelope.
    pub fn encode(&mut self, type_: TypeRef, text: &[u8]) -> Result<(), EncodeError> {
        let text = std::str::from_utf8(text).map_err(|_| EncodeError::NotAnObject)?;
        // The name may be that of any member, too: of a property in a schema, say.
        if self.transcode(type_, text, Some(FIELDS)).is_err() {
            self.transcode(type_, text, None)?;
        }
        Ok(())
    }

    /// The message that was encoded last.
    pub fn message(&self) -> &[u8] {
        self.writer.written()
    }

    fn transcode(&mut self, type_: TypeRef, text: &str, opaque: Option<&str>) -> Result<(), EncodeError> {
        self.writer.clear();
        self.places.clear();
        let root = self.tape.read(text, opaque).ok_or(EncodeError::TooDeep)?;
        if root.kind() != NodeKind::Object {
            return Err(EncodeError::NotAnObject);
        }
        let mut transcoder = Transcoder { root, writer: &mut self.writer, places: &mut self.places };
        transcoder.message(type_, Some(root), 0)
    }
}

/// The member that takes most of an object's text, and is text in protobuf, too: the fields of a manager.
const FIELDS: &str = "fieldsV1";

/// The place of a member that is absent or null. The first place is that of the whole object.
const ABSENT: u32 = 0;

struct Transcoder<'t, 'w> {
    root: Node<'t>,
    writer: &'w mut Writer,
    /// The places of the values that are yet to be written. Each level puts its own on top and removes them.
    places: &'w mut Vec<u32>,
}

impl<'t> Transcoder<'t, '_> {
    /// Without an object, the message of a struct whose fields are all zero.
    fn message(&mut self, type_: TypeRef, object: Option<Node<'t>>, depth: usize) -> Result<(), EncodeError> {
        let base = self.places.len();
        self.places.resize(base + type_.fields.len(), ABSENT);
        for (key, value) in object.into_iter().flat_map(Node::members) {
            let key = key.text().ok_or(EncodeError::NotAnObject)?;
            if value.raw() != "null"
                && let Some(field) = type_.place(&key)
            {
                self.places[base + field] = value.place();
            }
        }
        self.fields(type_, type_.wire, base, depth)?;
        self.places.truncate(base);
        Ok(())
    }

    fn fields(
        &mut self,
        type_: TypeRef,
        wire: &'static [Wire],
        base: usize,
        depth: usize,
    ) -> Result<(), EncodeError> {
        if depth > crate::codec::MAX_DEPTH {
            return Err(EncodeError::TooDeep);
        }
        for Wire { tag, slot } in wire.iter().rev() {
            match slot {
                Slot::Inline(inner) => {
                    self.nested(*tag, |t| t.fields(type_, inner, base, depth + 1))?;
                }
                Slot::Field(index) => {
                    let index = usize::from(*index);
                    let Some(field) = type_.fields.get(index) else { continue };
                    let place = self.places[base + index];
                    let value = (place != ABSENT).then(|| self.root.at(place));
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

    /// A nested message: `content` writes it, backwards as everything here.
    fn nested(
        &mut self,
        tag: u32,
        content: impl FnOnce(&mut Self) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let before = self.writer.len();
        content(self)?;
        self.writer.close(tag, before);
        Ok(())
    }

    fn field(
        &mut self,
        tag: u32,
        field: &'static Field,
        value: Option<Node<'t>>,
        depth: usize,
    ) -> Result<(), EncodeError> {
        let wrong = EncodeError::Shape { type_: "", field: field.name };
        match (&field.kind, value) {
            (Kind::List(item), Some(list)) if list.kind() == NodeKind::List => {
                self.reversed(list.items(), |t, value| t.element(tag, item, value, field.name, depth))
            }
            (Kind::Map(item), Some(map)) if map.kind() == NodeKind::Object => {
                let members = map.members().flat_map(|(key, value)| [key, value]);
                let mut value = None;
                // A value comes before its key, backwards.
                self.reversed(members, |t, node| match value.take() {
                    None => {
                        value = Some(node);
                        Ok(())
                    }
                    Some(value) => t.nested(tag, |t| {
                        t.element(2, item, value, field.name, depth)?;
                        t.text(1, node, field.name)
                    }),
                })
            }
            (Kind::List(_) | Kind::Map(_), None) => Ok(()),
            (Kind::List(_) | Kind::Map(_), Some(_)) => Err(wrong),
            (kind, Some(value)) => self.element(tag, kind, value, field.name, depth),
            (_, None) if field.presence.is_pointer() => Ok(()),
            (Kind::Bytes | Kind::Strings, None) => Ok(()),
            (kind, None) => self.zero(tag, kind, depth),
        }
    }

    /// Goes through nodes from the last to the first.
    fn reversed(
        &mut self,
        nodes: impl Iterator<Item = Node<'t>>,
        mut each: impl FnMut(&mut Self, Node<'t>) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let base = self.places.len();
        self.places.extend(nodes.map(Node::place));
        while self.places.len() > base {
            let Some(place) = self.places.pop() else { break };
            each(self, self.root.at(place))?;
        }
        Ok(())
    }

    /// Go writes a field that is no pointer even when it is zero.
    fn zero(&mut self, tag: u32, kind: &Kind, depth: usize) -> Result<(), EncodeError> {
        match kind {
            Kind::Bool | Kind::Int32 | Kind::Int64 => self.writer.number(tag, 0),
            Kind::Double => self.writer.double(tag, 0.0),
            Kind::Quantity => self.quantity(tag, "0"),
            Kind::IntOrString => self.int_or_string(tag, 0, None),
            Kind::Struct(type_) => self.nested(tag, |t| t.message(type_, None, depth + 1))?,
            _ => self.writer.bytes(tag, b""),
        }
        Ok(())
    }

    fn text(&mut self, tag: u32, node: Node<'t>, name: &'static str) -> Result<(), EncodeError> {
        let text = node.text().ok_or(EncodeError::Shape { type_: "", field: name })?;
        self.writer.bytes(tag, text.as_bytes());
        Ok(())
    }

    fn quantity(&mut self, tag: u32, text: &str) {
        let before = self.writer.len();
        self.writer.bytes(1, text.as_bytes());
        self.writer.close(tag, before);
    }

    fn int_or_string(&mut self, tag: u32, number: i32, text: Option<&str>) {
        let before = self.writer.len();
        self.writer.bytes(3, text.unwrap_or_default().as_bytes());
        self.writer.signed(2, number.into());
        self.writer.number(1, u64::from(text.is_some()));
        self.writer.close(tag, before);
    }

    fn element(
        &mut self,
        tag: u32,
        kind: &Kind,
        value: Node<'t>,
        name: &'static str,
        depth: usize,
    ) -> Result<(), EncodeError> {
        let wrong = || EncodeError::Shape { type_: "", field: name };
        match (kind, value.kind()) {
            // JSON text. An embedded object of a known kind is JSON, too, which every reader of raw extensions understands.
            (Kind::Raw, _) => self.nested(tag, |t| {
                t.writer.bytes(1, value.raw().as_bytes());
                Ok(())
            })?,
            (kind, NodeKind::Null) => self.zero(tag, kind, depth)?,
            (Kind::String, NodeKind::String) => self.text(tag, value, name)?,
            (Kind::Bool, NodeKind::Bool) => self.writer.number(tag, u64::from(value.raw() == "true")),
            (Kind::Int32 | Kind::Int64, NodeKind::Number) => {
                self.writer.signed(tag, value.raw().parse().map_err(|_| wrong())?);
            }
            (Kind::Double, NodeKind::Number) => {
                self.writer.double(tag, value.raw().parse().map_err(|_| wrong())?);
            }
            (Kind::Bytes, NodeKind::String) => {
                let text = value.text().ok_or_else(wrong)?;
                let bytes = scalar::decode_base64(&text).map_err(|_| wrong())?;
                self.writer.bytes(tag, &bytes);
            }
            (Kind::Quantity, NodeKind::String) => self.quantity(tag, &value.text().ok_or_else(wrong)?),
            (Kind::Quantity, NodeKind::Number) => self.quantity(tag, value.raw()),
            (Kind::IntOrString, NodeKind::String) => {
                self.int_or_string(tag, 0, Some(&value.text().ok_or_else(wrong)?));
            }
            (Kind::IntOrString, NodeKind::Number) => {
                self.int_or_string(tag, value.raw().parse().map_err(|_| wrong())?, None);
            }
            (Kind::Time | Kind::MicroTime, NodeKind::String) => {
                let time = time::parse_time(&value.text().ok_or_else(wrong)?).map_err(|_| wrong())?;
                // Times have whole seconds in both formats; microtimes lose what is below a microsecond.
                let (seconds, nanos) = scalar::floor_seconds(time);
                let nanos = match kind {
                    Kind::MicroTime => nanos / 1000 * 1000,
                    _ => 0,
                };
                self.nested(tag, |t| {
                    t.writer.signed(2, nanos.into());
                    t.writer.signed(1, seconds);
                    Ok(())
                })?;
            }
            (Kind::Duration, NodeKind::String) => {
                let text = value.text().ok_or_else(wrong)?;
                let nanos = scalar::parse_duration(&text).ok_or_else(wrong)?;
                self.nested(tag, |t| {
                    t.writer.signed(1, nanos);
                    Ok(())
                })?;
            }
            (Kind::Strings, NodeKind::List) => {
                self.nested(tag, |t| t.reversed(value.items(), |t, item| t.text(1, item, name)))?;
            }
            (Kind::Struct(type_), NodeKind::Object) => {
                self.nested(tag, |t| t.message(type_, Some(value), depth + 1))?;
            }
            (Kind::SchemaOrArray(type_) | Kind::SchemaOrStrings(type_), NodeKind::Object) => {
                self.nested(tag, |t| t.nested(1, |t| t.message(type_, Some(value), depth + 1)))?;
            }
            (Kind::SchemaOrArray(type_), NodeKind::List) => self.nested(tag, |t| {
                let item = Kind::Struct(type_);
                t.reversed(value.items(), |t, value| t.element(2, &item, value, name, depth))
            })?,
            (Kind::SchemaOrStrings(_), NodeKind::List) => {
                self.nested(tag, |t| t.reversed(value.items(), |t, item| t.text(2, item, name)))?;
            }
            (Kind::SchemaOrBool(_), NodeKind::Bool) => self.nested(tag, |t| {
                t.writer.number(1, u64::from(value.raw() == "true"));
                Ok(())
            })?,
            // Upstream sets `allows` beside a schema.
            (Kind::SchemaOrBool(type_), NodeKind::Object) => self.nested(tag, |t| {
                t.nested(2, |t| t.message(type_, Some(value), depth + 1))?;
                t.writer.number(1, 1);
                Ok(())
            })?,
            _ => return Err(wrong()),
        }
        Ok(())
    }
}

/// Writes the envelope's message around `raw`.
pub(super) fn unknown(api_version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.bytes(4, b"");
    writer.bytes(3, b"");
    writer.bytes(envelope::RAW, raw);
    let before = writer.len();
    writer.bytes(2, kind.as_bytes());
    writer.bytes(1, api_version.as_bytes());
    writer.close(1, before);
    writer.raw(super::MAGIC);
    writer.written().to_vec()
}

/// `meta.v1.WatchEvent` around the bytes of an encoded object.
pub(super) fn watch_event(type_: &str, object: &[u8]) -> Vec<u8> {
    let mut writer = Writer::default();
    let before = writer.len();
    writer.bytes(1, object);
    writer.close(2, before);
    writer.bytes(1, type_.as_bytes());
    writer.written().to_vec()
}
