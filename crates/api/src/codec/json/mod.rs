//! JSON against a type, in one pass over the bytes.
//!
//! Upstream's rules: field names are case-sensitive; `null` is the same as absent; integers are whole and in
//! range; fields the type does not know are dropped and reported, as are duplicates (the last one counts).

mod conform;
mod lexer;
#[cfg(test)]
mod tests;

pub use conform::{conform, conform_in_place};

use super::{DecodeError, Decoded, MAX_DEPTH};
use super::{scalar, time};
use crate::schema::{Field, Kind, Type, TypeRef};
use ferrite_json::{Map, Text, Value};
use lexer::{Lexer, Shape};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write as _;

/// An error, boxed: every level of decoding returns it, and it is rare.
type Fault = Box<DecodeError>;

impl From<Fault> for DecodeError {
    fn from(fault: Fault) -> Self {
        *fault
    }
}

/// Room for as many members as objects usually have.
const USUAL: usize = 8;
/// Upstream stops collecting strict errors here.
const MAX_STRICT: usize = 100;

/// Decodes an object of `type_`.
pub fn decode(type_: TypeRef, bytes: &[u8]) -> Result<Decoded, DecodeError> {
    let mut decoder = Decoder::new(bytes);
    let value = decoder.value(&Kind::Struct(type_), "", 0);
    let decoded = value.and_then(|value| decoder.finish(value.unwrap_or_else(|| Value::Object(Map::new()))));
    decoded.map_err(|fault| broken(bytes).unwrap_or(fault).into())
}

/// Where a document is no JSON: upstream looks for that first.
fn broken(bytes: &[u8]) -> Option<Fault> {
    let mut decoder = Decoder::new(bytes);
    let passed = decoder.skip(0).and_then(|()| decoder.lexer.end());
    passed.err().filter(|fault| matches!(**fault, DecodeError::Syntax(_)))
}

/// Decodes JSON of no known type, as custom resources and patches are. Only duplicates are reported.
pub fn decode_any(bytes: &[u8]) -> Result<Decoded, DecodeError> {
    let mut decoder = Decoder::new(bytes);
    let value = decoder.any(0, true)?;
    Ok(decoder.finish(value)?)
}

/// `apiVersion` and `kind` of a document, empty where absent. The rest is only checked to be JSON.
pub fn type_meta(bytes: &[u8]) -> Result<(String, String), DecodeError> {
    let mut decoder = Decoder::new(bytes);
    let shape = decoder.lexer.shape()?;
    if shape != Shape::Object {
        decoder.skip(0)?;
        decoder.lexer.end()?;
        // Null leaves Go's struct as it is: it says nothing.
        if shape == Shape::Null {
            return Ok(Default::default());
        }
        return Err(DecodeError::Mismatch {
            found: shape.go_name().into(),
            place: "value".into(),
            expected: "struct { APIVersion string \"json:\\\"apiVersion,omitempty\\\"\"; Kind string \
                       \"json:\\\"kind,omitempty\\\"\" }"
                .into(),
        });
    }
    let (mut api_version, mut kind) = (String::new(), String::new());
    decoder.members(|decoder, name| {
        // As Go: the names of fields are compared without regard to case.
        let slot = match () {
            () if name.eq_ignore_ascii_case("apiVersion") => &mut api_version,
            () if name.eq_ignore_ascii_case("kind") => &mut kind,
            () => return decoder.skip(1),
        };
        match decoder.lexer.shape()? {
            Shape::String => *slot = decoder.lexer.string()?.into_owned(),
            Shape::Null => decoder.lexer.null()?,
            other => {
                return Err(Fault::new(DecodeError::Mismatch {
                    found: other.go_name().into(),
                    place: format!("struct field .{name}"),
                    expected: "string".into(),
                }));
            }
        }
        Ok(())
    })?;
    decoder.lexer.end()?;
    Ok((api_version, kind))
}

enum Segment<'a> {
    Field(&'static Field),
    Key(Cow<'a, str>),
    Index(usize),
}

struct Decoder<'a> {
    lexer: Lexer<'a>,
    /// Where we are, for strict errors.
    path: Vec<Segment<'a>>,
    /// The struct whose field is being read, for type errors.
    owner: Option<TypeRef>,
    strict: Vec<String>,
    seen: HashSet<String>,
    /// The first value of another type than its field's. As in Go, reading goes on behind it: a text that its type
    /// cannot read is reported instead, wherever it stands.
    mistyped: Option<Fault>,
}

impl<'a> Decoder<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self {
            lexer: Lexer::new(bytes),
            path: Vec::new(),
            owner: None,
            strict: Vec::new(),
            seen: HashSet::new(),
            mistyped: None,
        }
    }

    fn finish(mut self, value: Value) -> Result<Decoded, Fault> {
        self.lexer.end()?;
        match self.mistyped {
            Some(fault) => Err(fault),
            None => Ok(Decoded { value, strict: self.strict }),
        }
    }

    fn complain(&mut self, what: &str, name: &str) {
        if self.strict.len() >= MAX_STRICT {
            return;
        }
        let mut path = String::new();
        for segment in &self.path {
            let _ = match segment {
                Segment::Index(index) => write!(path, "[{index}]"),
                Segment::Field(field) if path.is_empty() => write!(path, "{}", field.name),
                Segment::Key(name) if path.is_empty() => write!(path, "{name}"),
                Segment::Field(field) => write!(path, ".{}", field.name),
                Segment::Key(name) => write!(path, ".{name}"),
            };
        }
        if !path.is_empty() {
            path.push('.');
        }
        path.push_str(name);
        let text = format!("{what} field {}", crate::field::go_quote(&path));
        if self.seen.insert(text.clone()) {
            self.strict.push(text);
        }
    }

    fn mismatch(&self, found: impl Into<String>, expected: impl Into<String>) -> Fault {
        let place = match self.owner {
            None => String::from("value"),
            Some(owner) => {
                let mut place = format!("struct field {}", owner.go_name());
                for segment in &self.path {
                    if let Segment::Field(field) = segment {
                        if !field.embedded.is_empty() {
                            let _ = write!(place, ".{}", field.embedded);
                        }
                        let _ = write!(place, ".{}", field.name);
                    }
                }
                place
            }
        };
        Fault::new(DecodeError::Mismatch { found: found.into(), place, expected: expected.into() })
    }

    /// A value of `kind`; `None` for null. `go` is the type as Go prints it, if the kind alone does not
    /// determine it.
    fn value(&mut self, kind: &Kind, go: &str, depth: usize) -> Result<Option<Value>, Fault> {
        if depth > MAX_DEPTH {
            return Err(Fault::new(DecodeError::TooDeep));
        }
        let shape = self.lexer.shape()?;
        if shape == Shape::Null {
            self.lexer.null()?;
            return Ok(None);
        }
        let value = match (kind, shape) {
            (Kind::Struct(type_), Shape::Object) => self.object(type_, depth)?,
            (Kind::List(item), Shape::Array) => self.list(item, item_of(go), depth)?,
            (Kind::Strings, Shape::Array) => self.list(&Kind::String, "", depth)?,
            (Kind::Map(item), Shape::Object) => self.map(item, item_of(go), depth)?,
            (Kind::SchemaOrArray(type_), Shape::Array) => self.list(&Kind::Struct(type_), "", depth)?,
            (Kind::SchemaOrStrings(_), Shape::Array) => self.list(&Kind::String, "", depth)?,
            (Kind::SchemaOrBool(_), Shape::Bool) => Value::Bool(self.lexer.bool()?),
            (
                Kind::SchemaOrArray(type_) | Kind::SchemaOrBool(type_) | Kind::SchemaOrStrings(type_),
                Shape::Object,
            ) => self.object(type_, depth)?,
            (Kind::Raw, _) => self.any(depth, false)?,
            (Kind::Bool, Shape::Bool) => Value::Bool(self.lexer.bool()?),
            (
                Kind::Int32 | Kind::Int64 | Kind::Double | Kind::Quantity | Kind::IntOrString,
                Shape::Number,
            ) => {
                let text = self.lexer.number()?;
                match self.number(kind, go, text) {
                    Err(fault) if matches!(kind, Kind::Int32 | Kind::Int64 | Kind::Double) => {
                        self.mistyped.get_or_insert(fault);
                        return Ok(None);
                    }
                    read => read?,
                }
            }
            (
                Kind::String
                | Kind::Bytes
                | Kind::Quantity
                | Kind::IntOrString
                | Kind::Time
                | Kind::MicroTime
                | Kind::Duration,
                Shape::String,
            ) => match text(kind, self.lexer.string()?) {
                Err(fault) if matches!(kind, Kind::Bytes) => {
                    self.mistyped.get_or_insert(fault);
                    return Ok(None);
                }
                read => read?,
            },
            (Kind::Time | Kind::MicroTime | Kind::Duration, _) => {
                return Err(self.mismatch(shape.go_name(), "string"));
            }
            (Kind::IntOrString, _) => {
                return Err(self.mismatch(shape.go_name(), "int32"));
            }
            // Upstream hands whatever is there to the parser of quantities, which refuses it.
            (Kind::Quantity, _) => Value::String(scalar::canonical_quantity(shape.go_name())?),
            (Kind::SchemaOrArray(_) | Kind::SchemaOrBool(_) | Kind::SchemaOrStrings(_), _) => {
                return Err(self.mismatch(shape.go_name(), go_name(kind, go)));
            }
            _ => {
                let fault = self.mismatch(shape.go_name(), go_name(kind, go));
                self.mistyped.get_or_insert(fault);
                self.skip(depth)?;
                return Ok(None);
            }
        };
        Ok(Some(value))
    }

    fn object(&mut self, type_: TypeRef, depth: usize) -> Result<Value, Fault> {
        let outer = self.owner.replace(type_);
        let mut map = Map::with_capacity(USUAL);
        let mut seen = [false; Type::MOST_FIELDS];
        self.members(|decoder, name| {
            let Some(place) = type_.place(&name) else {
                decoder.complain("unknown", &name);
                return decoder.skip(depth + 1);
            };
            if std::mem::replace(&mut seen[place], true) {
                decoder.complain("duplicate", &name);
            }
            let field = &type_.fields[place];
            decoder.path.push(Segment::Field(field));
            let value = decoder.value(&field.kind, field.go, depth + 1)?;
            decoder.path.pop();
            match value {
                Some(value) => map.insert(Text::const_new(field.name), value),
                None => None,
            };
            Ok(())
        })?;
        self.owner = outer;
        Ok(Value::Object(map))
    }

    fn map(&mut self, item: &Kind, go: &str, depth: usize) -> Result<Value, Fault> {
        let mut map = Map::new();
        self.members(|decoder, name| {
            if map.contains_key(&*name) {
                decoder.complain("duplicate", &name);
            }
            decoder.path.push(Segment::Key(name.clone()));
            let value = decoder.value(item, go, depth + 1)?;
            decoder.path.pop();
            map.insert(name, value.unwrap_or_else(|| zero(item)));
            Ok(())
        })?;
        Ok(Value::Object(map))
    }

    fn list(&mut self, item: &Kind, go: &str, depth: usize) -> Result<Value, Fault> {
        let mut list = Vec::new();
        self.elements(|decoder| {
            decoder.path.push(Segment::Index(list.len()));
            let value = decoder.value(item, go, depth + 1)?;
            decoder.path.pop();
            list.push(value.unwrap_or_else(|| zero(item)));
            Ok(())
        })?;
        Ok(Value::Array(list))
    }

    /// Passes over any JSON.
    fn skip(&mut self, depth: usize) -> Result<(), Fault> {
        if depth > MAX_DEPTH {
            return Err(Fault::new(DecodeError::TooDeep));
        }
        match self.lexer.shape()? {
            Shape::Null => self.lexer.null(),
            Shape::Bool => self.lexer.bool().map(drop),
            Shape::Number => self.lexer.number().map(drop),
            Shape::String => self.lexer.skip_string(),
            Shape::Array => self.elements(|decoder| decoder.skip(depth + 1)),
            Shape::Object => self.members(|decoder, _| decoder.skip(depth + 1)),
        }
    }

    /// Any JSON. `strict` reports duplicates.
    fn any(&mut self, depth: usize, strict: bool) -> Result<Value, Fault> {
        if depth > MAX_DEPTH {
            return Err(Fault::new(DecodeError::TooDeep));
        }
        Ok(match self.lexer.shape()? {
            Shape::Null => {
                self.lexer.null()?;
                Value::Null
            }
            Shape::Bool => Value::Bool(self.lexer.bool()?),
            Shape::String => Value::String(self.lexer.string()?.into()),
            Shape::Number => {
                let text = self.lexer.number()?;
                let number = lexer::number_value(text);
                number.map(Value::Number).ok_or_else(|| self.mismatch(format!("number {text}"), "float64"))?
            }
            Shape::Array => {
                let mut list = Vec::new();
                self.elements(|decoder| {
                    decoder.path.push(Segment::Index(list.len()));
                    list.push(decoder.any(depth + 1, strict)?);
                    decoder.path.pop();
                    Ok(())
                })?;
                Value::Array(list)
            }
            Shape::Object => {
                let mut map = Map::new();
                self.members(|decoder, name| {
                    if strict {
                        if map.contains_key(&*name) {
                            decoder.complain("duplicate", &name);
                        }
                        decoder.path.push(Segment::Key(name.clone()));
                    }
                    let value = decoder.any(depth + 1, strict)?;
                    if strict {
                        decoder.path.pop();
                    }
                    map.insert(name, value);
                    Ok(())
                })?;
                Value::Object(map)
            }
        })
    }

    fn number(&self, kind: &Kind, go: &str, text: &str) -> Result<Value, Fault> {
        let wrong = || self.mismatch(format!("number {text}"), go_name(kind, go));
        Ok(match kind {
            Kind::Int32 => text.parse::<i32>().map_err(|_| wrong())?.into(),
            Kind::Int64 => text.parse::<i64>().map_err(|_| wrong())?.into(),
            Kind::Double => double(text.parse().map_err(|_| wrong())?).ok_or_else(wrong)?,
            Kind::IntOrString => {
                text.parse::<i32>().map_err(|_| self.mismatch(format!("number {text}"), "int32"))?.into()
            }
            Kind::Quantity => Value::String(scalar::canonical_quantity(text)?),
            _ => return Err(wrong()),
        })
    }

    fn members(
        &mut self,
        mut each: impl FnMut(&mut Self, Cow<'a, str>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.lexer.advance();
        if self.lexer.peek()? == b'}' {
            self.lexer.advance();
            return Ok(());
        }
        loop {
            if self.lexer.peek()? != b'"' {
                return Err(self.lexer.unexpected("looking for beginning of object key string"));
            }
            let name = self.lexer.string()?;
            if self.lexer.peek()? != b':' {
                return Err(self.lexer.unexpected("after object key"));
            }
            self.lexer.advance();
            each(self, name)?;
            match self.lexer.peek()? {
                b',' => self.lexer.advance(),
                b'}' => {
                    self.lexer.advance();
                    return Ok(());
                }
                _ => return Err(self.lexer.unexpected("after object key:value pair")),
            }
        }
    }

    fn elements(&mut self, mut each: impl FnMut(&mut Self) -> Result<(), Fault>) -> Result<(), Fault> {
        self.lexer.advance();
        if self.lexer.peek()? == b']' {
            self.lexer.advance();
            return Ok(());
        }
        loop {
            each(self)?;
            match self.lexer.peek()? {
                b',' => self.lexer.advance(),
                b']' => {
                    self.lexer.advance();
                    return Ok(());
                }
                _ => return Err(self.lexer.unexpected("after array element")),
            }
        }
    }
}

/// A double as Go writes it: whole numbers without a fraction.
pub(super) fn double(number: f64) -> Option<Value> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if !number.is_finite() {
        return None;
    }
    if number.fract() == 0.0 && number.abs() < EXACT {
        return Some(Value::from(number as i64));
    }
    Some(Value::from(number))
}

/// Checks a scalar's text and brings it to the form in which it is kept.
fn text(kind: &Kind, text: Cow<'_, str>) -> Result<Value, Fault> {
    Ok(Value::String(match kind {
        Kind::Bytes => scalar::encode_base64(&scalar::decode_base64(&text)?).into(),
        Kind::Quantity => scalar::canonical_quantity(text.trim())?,
        Kind::Time => scalar::format_time(time::parse_time(&text)?).into(),
        Kind::MicroTime => scalar::format_micro_time(time::parse_micro_time(&text)?).into(),
        _ => text.into(),
    }))
}

/// The value that null stands for inside a list or map.
fn zero(kind: &Kind) -> Value {
    match kind {
        Kind::String | Kind::Bytes => "".into(),
        Kind::Bool => false.into(),
        Kind::Int32 | Kind::Int64 | Kind::Double | Kind::IntOrString => 0.into(),
        Kind::Quantity => "0".into(),
        Kind::Struct(_) => Value::Object(Map::new()),
        _ => Value::Null,
    }
}

/// The Go type as it appears in type errors: `go` where the schema's table has it.
fn go_name(kind: &Kind, go: &str) -> String {
    if go.is_empty() { go_type(kind) } else { go.into() }
}

/// The Go type of the items of a list or map, empty where it has a name of its own that hides them.
fn item_of(go: &str) -> &str {
    let of_map = || go.strip_prefix("map[")?.split_once(']').map(|(_, item)| item);
    go.strip_prefix("[]").or_else(of_map).unwrap_or_default()
}

/// The Go type that a kind stands for, of those without a name of their own.
fn go_type(kind: &Kind) -> String {
    match kind {
        Kind::String => "string".into(),
        Kind::Bool => "bool".into(),
        Kind::Int32 => "int32".into(),
        Kind::Int64 => "int64".into(),
        Kind::Double => "float64".into(),
        Kind::Bytes => "[]uint8".into(),
        Kind::Quantity => "resource.Quantity".into(),
        Kind::IntOrString => "intstr.IntOrString".into(),
        Kind::Time => "v1.Time".into(),
        Kind::MicroTime => "v1.MicroTime".into(),
        Kind::Duration => "v1.Duration".into(),
        Kind::Raw => "runtime.RawExtension".into(),
        Kind::Strings => "[]string".into(),
        Kind::Struct(type_) => Type::go_qualified(type_).into(),
        Kind::List(item) => format!("[]{}", go_type(item)),
        Kind::Map(item) => format!("map[string]{}", go_type(item)),
        Kind::SchemaOrArray(_) => "v1.JSONSchemaPropsOrArray".into(),
        Kind::SchemaOrBool(_) => "v1.JSONSchemaPropsOrBool".into(),
        Kind::SchemaOrStrings(_) => "v1.JSONSchemaPropsOrStringArray".into(),
    }
}
