//! From a protobuf message to a JSON value.

use super::reader::{Content, Reader};
use crate::codec::{DecodeError, MAX_DEPTH, json, scalar};
use crate::schema::{Field, Kind, Slot, TypeRef, Wire};
use ferrite_json::{Map, Value};
use jiff::Timestamp;

/// Decodes a message of `type_` without an envelope. Tags the schema does not know are skipped; the zero
/// value of a field that is no pointer is the same as absent.
pub fn decode_message(type_: TypeRef, message: &[u8]) -> Result<Value, DecodeError> {
    let mut map = Map::new();
    message_into(type_, message, &mut map, 0)?;
    let value = Value::Object(map);
    // A message may become several levels of JSON, and raw JSON within it begins to count anew.
    value.count_within(MAX_DEPTH).ok_or(DecodeError::TooDeep)?;
    Ok(value)
}

pub(super) fn message_into(
    type_: TypeRef,
    message: &[u8],
    map: &mut Map,
    depth: usize,
) -> Result<(), DecodeError> {
    if depth > MAX_DEPTH {
        return Err(DecodeError::TooDeep);
    }
    fields_into(type_, type_.wire, message, map, depth)
}

fn fields_into(
    type_: TypeRef,
    wire: &'static [Wire],
    message: &[u8],
    map: &mut Map,
    depth: usize,
) -> Result<(), DecodeError> {
    let mut reader = Reader::new(message);
    while let Some((tag, content)) = reader.next()? {
        let Ok(at) = wire.binary_search_by_key(&tag, |w| w.tag) else { continue };
        match wire.get(at).map(|w| &w.slot) {
            Some(Slot::Inline(inner)) => {
                fields_into(type_, inner, content.bytes(type_.name)?, map, depth)?;
            }
            Some(Slot::Field(index)) => {
                if let Some(field) = type_.fields.get(usize::from(*index)) {
                    field_into(field, content, map, depth)?;
                }
            }
            None => {}
        }
    }
    Ok(())
}

fn field_into(
    field: &'static Field,
    content: Content<'_>,
    map: &mut Map,
    depth: usize,
) -> Result<(), DecodeError> {
    let name = field.name;
    match &field.kind {
        Kind::List(item) => {
            let list = map.entry(name).or_insert_with(|| Value::Array(Vec::new()));
            let Value::Array(list) = list else { return Ok(()) };
            if let (Kind::Int32 | Kind::Int64 | Kind::Bool, Content::Bytes(packed)) = (item, content) {
                let mut packed = Reader::new(packed);
                while let Some(number) = packed.packed()? {
                    list.push(element(item, Content::Varint(number), name, depth)?);
                }
                return Ok(());
            }
            list.push(element(item, content, name, depth)?);
        }
        Kind::Map(item) => {
            let (key, value) = entry(item, content, name, depth)?;
            let inner = map.entry(name).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(inner) = inner {
                inner.insert(key, value);
            }
        }
        // A message that comes twice is merged into one.
        Kind::Struct(type_) => {
            let inner = map.entry(name).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(inner) = inner {
                message_into(type_, content.bytes(name)?, inner, depth + 1)?;
            }
        }
        kind => {
            let value = element(kind, content, name, depth)?;
            let zero = match (&value, kind) {
                (Value::Null, _) => true,
                (_, Kind::Bytes) => false,
                (Value::String(text), Kind::String) => text.is_empty(),
                (Value::Bool(flag), Kind::Bool) => !flag,
                (Value::Number(number), Kind::Int32 | Kind::Int64 | Kind::Double) => {
                    number.as_f64() == Some(0.0)
                }
                _ => false,
            };
            if value.is_null() || (zero && !field.presence.is_pointer()) {
                map.remove(name);
            } else {
                map.insert(name.to_owned(), value);
            }
        }
    }
    Ok(())
}

fn entry(
    item: &Kind,
    content: Content<'_>,
    name: &'static str,
    depth: usize,
) -> Result<(String, Value), DecodeError> {
    let mut key = String::new();
    let mut value = None;
    let mut reader = Reader::new(content.bytes(name)?);
    while let Some((tag, content)) = reader.next()? {
        match tag {
            1 => key = content.text(name)?,
            2 => value = Some(element(item, content, name, depth)?),
            _ => {}
        }
    }
    let value = match value {
        Some(value) => value,
        None => match item {
            Kind::String | Kind::Bytes => "".into(),
            Kind::Struct(_) => Value::Object(Map::new()),
            Kind::Quantity => "0".into(),
            _ => Value::Null,
        },
    };
    Ok((key, value))
}

fn element(
    kind: &Kind,
    content: Content<'_>,
    name: &'static str,
    depth: usize,
) -> Result<Value, DecodeError> {
    // Go truncates numbers to the width of the field, and so do we.
    #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
    Ok(match kind {
        Kind::String => content.text(name)?.into(),
        Kind::Bool => (content.varint(name)? != 0).into(),
        Kind::Int32 => (content.varint(name)? as i32).into(),
        Kind::Int64 => (content.varint(name)? as i64).into(),
        Kind::Double => {
            json::double(content.double(name)?).ok_or(DecodeError::Protobuf("number is not finite"))?
        }
        Kind::Bytes => scalar::encode_base64(content.bytes(name)?).into(),
        Kind::Quantity => quantity(content.bytes(name)?)?,
        Kind::IntOrString => int_or_string(content.bytes(name)?)?,
        Kind::Time => match timestamp(content.bytes(name)?)? {
            Some(time) => scalar::format_time(time).into(),
            None => Value::Null,
        },
        Kind::MicroTime => match timestamp(content.bytes(name)?)? {
            Some(time) => scalar::format_micro_time(time).into(),
            None => Value::Null,
        },
        Kind::Duration => duration(content.bytes(name)?)?,
        Kind::Raw => raw(content.bytes(name)?, depth + 1)?,
        Kind::Strings => strings(content.bytes(name)?)?,
        Kind::Struct(type_) => {
            let mut map = Map::new();
            message_into(type_, content.bytes(name)?, &mut map, depth + 1)?;
            Value::Object(map)
        }
        Kind::SchemaOrArray(type_) | Kind::SchemaOrBool(type_) | Kind::SchemaOrStrings(type_) => {
            schema_or(kind, type_, content.bytes(name)?, depth)?
        }
        // The table has no list of lists and no map of maps but through a wrapper message.
        Kind::List(_) | Kind::Map(_) => Value::Null,
    })
}

fn quantity(message: &[u8]) -> Result<Value, DecodeError> {
    let mut text = String::from("0");
    let mut reader = Reader::new(message);
    while let Some((tag, content)) = reader.next()? {
        if tag == 1 {
            text = content.text("string")?;
        }
    }
    if text.is_empty() {
        text.push('0');
    }
    Ok(scalar::canonical_quantity(&text)?.into())
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
fn int_or_string(message: &[u8]) -> Result<Value, DecodeError> {
    let (mut is_string, mut number, mut text) = (false, 0, String::new());
    let mut reader = Reader::new(message);
    while let Some((tag, content)) = reader.next()? {
        match tag {
            1 => is_string = content.varint("type")? == 1,
            2 => number = content.varint("intVal")? as i32,
            3 => text = content.text("strVal")?,
            _ => {}
        }
    }
    Ok(if is_string { text.into() } else { number.into() })
}

/// `None` for an empty message: Go's zero time.
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
fn timestamp(message: &[u8]) -> Result<Option<Timestamp>, DecodeError> {
    if message.is_empty() {
        return Ok(None);
    }
    let (mut seconds, mut nanos) = (0, 0);
    let mut reader = Reader::new(message);
    while let Some((tag, content)) = reader.next()? {
        match tag {
            1 => seconds = content.varint("seconds")? as i64,
            2 => nanos = content.varint("nanos")? as i32,
            _ => {}
        }
    }
    Timestamp::new(seconds, nanos).map(Some).map_err(|_| DecodeError::Protobuf("time out of range"))
}

#[allow(clippy::cast_possible_wrap)]
fn duration(message: &[u8]) -> Result<Value, DecodeError> {
    let mut nanos = 0i64;
    let mut reader = Reader::new(message);
    while let Some((tag, content)) = reader.next()? {
        if tag == 1 {
            nanos = content.varint("duration")? as i64;
        }
    }
    Ok(scalar::format_duration(nanos).into())
}

fn raw(message: &[u8], depth: usize) -> Result<Value, DecodeError> {
    let mut bytes: &[u8] = &[];
    let mut reader = Reader::new(message);
    while let Some((tag, content)) = reader.next()? {
        if tag == 1 {
            bytes = content.bytes("raw")?;
        }
    }
    if bytes.is_empty() {
        return Ok(Value::Null);
    }
    if bytes.starts_with(super::MAGIC) {
        return super::envelope::decode_embedded(bytes, depth);
    }
    Ok(json::decode_any(bytes)?.value)
}

fn strings(message: &[u8]) -> Result<Value, DecodeError> {
    let mut list = Vec::new();
    let mut reader = Reader::new(message);
    while let Some((tag, content)) = reader.next()? {
        if tag == 1 {
            list.push(Value::String(content.text("items")?.into()));
        }
    }
    Ok(Value::Array(list))
}

fn schema_or(kind: &Kind, type_: TypeRef, message: &[u8], depth: usize) -> Result<Value, DecodeError> {
    let mut schema = None;
    let mut list = Vec::new();
    let mut allows = false;
    let mut reader = Reader::new(message);
    while let Some((tag, content)) = reader.next()? {
        match (kind, tag) {
            (Kind::SchemaOrBool(_), 1) => allows = content.varint("allows")? != 0,
            (Kind::SchemaOrBool(_), 2) | (_, 1) => {
                let mut map = Map::new();
                message_into(type_, content.bytes("schema")?, &mut map, depth + 1)?;
                schema = Some(Value::Object(map));
            }
            (Kind::SchemaOrArray(_), 2) => {
                let mut map = Map::new();
                message_into(type_, content.bytes("jSONSchemas")?, &mut map, depth + 1)?;
                list.push(Value::Object(map));
            }
            (Kind::SchemaOrStrings(_), 2) => list.push(content.text("property")?.into()),
            _ => {}
        }
    }
    Ok(match (schema, kind) {
        (Some(schema), _) => schema,
        (None, Kind::SchemaOrBool(_)) => allows.into(),
        (None, _) => Value::Array(list),
    })
}
