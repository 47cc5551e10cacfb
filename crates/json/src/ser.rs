//! Values out of other types.

use serde::Serialize;
use serde::ser::{self, Impossible};

use crate::{Error, Map, Text, Value};

/// Converts a value of any type to JSON.
pub fn to_value<T: Serialize>(value: T) -> Result<Value, Error> {
    value.serialize(Builder)
}

/// Builds a value from serialised data.
struct Builder;

/// Serializer methods for types that convert directly to a value.
macro_rules! values {
    ($($method:ident: $type:ty)+) => {$(
        fn $method(self, value: $type) -> Result<Value, Error> {
            Ok(value.into())
        }
    )+};
}

impl ser::Serializer for Builder {
    type Ok = Value;
    type Error = Error;
    type SerializeSeq = Items;
    type SerializeTuple = Items;
    type SerializeTupleStruct = Items;
    type SerializeTupleVariant = Variant<Items>;
    type SerializeMap = Members;
    type SerializeStruct = Members;
    type SerializeStructVariant = Variant<Members>;

    values! {
        serialize_bool: bool
        serialize_i8: i8
        serialize_i16: i16
        serialize_i32: i32
        serialize_i64: i64
        serialize_u8: u8
        serialize_u16: u16
        serialize_u32: u32
        serialize_u64: u64
        serialize_f64: f64
        serialize_str: &str
        serialize_bytes: &[u8]
    }

    fn serialize_f32(self, value: f32) -> Result<Value, Error> {
        Ok(f64::from(value).into())
    }

    fn serialize_char(self, value: char) -> Result<Value, Error> {
        Ok(Value::String(compact_str::ToCompactString::to_compact_string(&value)))
    }

    fn serialize_none(self) -> Result<Value, Error> {
        Ok(Value::Null)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Value, Error> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<Value, Error> {
        Ok(Value::Null)
    }

    fn serialize_unit_struct(self, _name: &'static str) -> Result<Value, Error> {
        Ok(Value::Null)
    }

    fn serialize_unit_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
    ) -> Result<Value, Error> {
        Ok(Value::String(Text::const_new(variant)))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        value: &T,
    ) -> Result<Value, Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<Value, Error> {
        Ok(tagged(variant, value.serialize(self)?))
    }

    fn serialize_seq(self, length: Option<usize>) -> Result<Items, Error> {
        Ok(Items(Vec::with_capacity(length.unwrap_or_default())))
    }

    fn serialize_tuple(self, length: usize) -> Result<Items, Error> {
        self.serialize_seq(Some(length))
    }

    fn serialize_tuple_struct(self, _name: &'static str, length: usize) -> Result<Items, Error> {
        self.serialize_seq(Some(length))
    }

    fn serialize_tuple_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Variant<Items>, Error> {
        Ok(Variant { name: variant, content: self.serialize_seq(Some(length))? })
    }

    fn serialize_map(self, length: Option<usize>) -> Result<Members, Error> {
        Ok(Members { members: Vec::with_capacity(length.unwrap_or_default()), key: Text::default() })
    }

    fn serialize_struct(self, _name: &'static str, length: usize) -> Result<Members, Error> {
        self.serialize_map(Some(length))
    }

    fn serialize_struct_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Variant<Members>, Error> {
        Ok(Variant { name: variant, content: self.serialize_map(Some(length))? })
    }
}

/// A variant with content: an object with one member.
fn tagged(variant: &'static str, content: Value) -> Value {
    Value::Object(Map::from_members(vec![(Text::const_new(variant), content)]))
}

struct Items(Vec<Value>);

impl ser::SerializeSeq for Items {
    type Ok = Value;
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.0.push(to_value(value)?);
        Ok(())
    }

    fn end(self) -> Result<Value, Error> {
        Ok(Value::Array(self.0))
    }
}

impl ser::SerializeTuple for Items {
    type Ok = Value;
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        ser::SerializeSeq::serialize_element(self, value)
    }

    fn end(self) -> Result<Value, Error> {
        ser::SerializeSeq::end(self)
    }
}

impl ser::SerializeTupleStruct for Items {
    type Ok = Value;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        ser::SerializeSeq::serialize_element(self, value)
    }

    fn end(self) -> Result<Value, Error> {
        ser::SerializeSeq::end(self)
    }
}

struct Members {
    members: Vec<(Text, Value)>,
    /// The key of the value to come.
    key: Text,
}

impl ser::SerializeMap for Members {
    type Ok = Value;
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Error> {
        self.key = key.serialize(Key)?;
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.members.push((std::mem::take(&mut self.key), to_value(value)?));
        Ok(())
    }

    fn end(self) -> Result<Value, Error> {
        Ok(Value::Object(Map::from_members(self.members)))
    }
}

impl ser::SerializeStruct for Members {
    type Ok = Value;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), Error> {
        self.members.push((Text::const_new(name), to_value(value)?));
        Ok(())
    }

    fn end(self) -> Result<Value, Error> {
        ser::SerializeMap::end(self)
    }
}

struct Variant<C> {
    name: &'static str,
    content: C,
}

impl ser::SerializeTupleVariant for Variant<Items> {
    type Ok = Value;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        ser::SerializeSeq::serialize_element(&mut self.content, value)
    }

    fn end(self) -> Result<Value, Error> {
        Ok(tagged(self.name, ser::SerializeSeq::end(self.content)?))
    }
}

impl ser::SerializeStructVariant for Variant<Members> {
    type Ok = Value;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), Error> {
        ser::SerializeStruct::serialize_field(&mut self.content, name, value)
    }

    fn end(self) -> Result<Value, Error> {
        Ok(tagged(self.name, ser::SerializeMap::end(self.content)?))
    }
}

/// Makes keys: JSON's are strings, and numbers and truth values are written as such.
struct Key;

/// Serializer methods for types whose text is a key.
macro_rules! keys {
    ($($method:ident: $type:ty)+) => {$(
        fn $method(self, value: $type) -> Result<Text, Error> {
            Ok(compact_str::ToCompactString::to_compact_string(&value))
        }
    )+};
}

fn no_key() -> Error {
    ser::Error::custom("key must be a string")
}

impl ser::Serializer for Key {
    type Ok = Text;
    type Error = Error;
    type SerializeSeq = Impossible<Text, Error>;
    type SerializeTuple = Impossible<Text, Error>;
    type SerializeTupleStruct = Impossible<Text, Error>;
    type SerializeTupleVariant = Impossible<Text, Error>;
    type SerializeMap = Impossible<Text, Error>;
    type SerializeStruct = Impossible<Text, Error>;
    type SerializeStructVariant = Impossible<Text, Error>;

    keys! {
        serialize_bool: bool
        serialize_i8: i8
        serialize_i16: i16
        serialize_i32: i32
        serialize_i64: i64
        serialize_u8: u8
        serialize_u16: u16
        serialize_u32: u32
        serialize_u64: u64
        serialize_char: char
        serialize_str: &str
    }

    fn serialize_f32(self, _value: f32) -> Result<Text, Error> {
        Err(no_key())
    }

    fn serialize_f64(self, _value: f64) -> Result<Text, Error> {
        Err(no_key())
    }

    fn serialize_bytes(self, _value: &[u8]) -> Result<Text, Error> {
        Err(no_key())
    }

    fn serialize_none(self) -> Result<Text, Error> {
        Err(no_key())
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Text, Error> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<Text, Error> {
        Err(no_key())
    }

    fn serialize_unit_struct(self, _name: &'static str) -> Result<Text, Error> {
        Err(no_key())
    }

    fn serialize_unit_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
    ) -> Result<Text, Error> {
        Ok(Text::const_new(variant))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        value: &T,
    ) -> Result<Text, Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        _index: u32,
        _variant: &'static str,
        _value: &T,
    ) -> Result<Text, Error> {
        Err(no_key())
    }

    fn serialize_seq(self, _length: Option<usize>) -> Result<Self::SerializeSeq, Error> {
        Err(no_key())
    }

    fn serialize_tuple(self, _length: usize) -> Result<Self::SerializeTuple, Error> {
        Err(no_key())
    }

    fn serialize_tuple_struct(
        self,
        _name: &'static str,
        _length: usize,
    ) -> Result<Self::SerializeTupleStruct, Error> {
        Err(no_key())
    }

    fn serialize_tuple_variant(
        self,
        _name: &'static str,
        _index: u32,
        _variant: &'static str,
        _length: usize,
    ) -> Result<Self::SerializeTupleVariant, Error> {
        Err(no_key())
    }

    fn serialize_map(self, _length: Option<usize>) -> Result<Self::SerializeMap, Error> {
        Err(no_key())
    }

    fn serialize_struct(self, _name: &'static str, _length: usize) -> Result<Self::SerializeStruct, Error> {
        Err(no_key())
    }

    fn serialize_struct_variant(
        self,
        _name: &'static str,
        _index: u32,
        _variant: &'static str,
        _length: usize,
    ) -> Result<Self::SerializeStructVariant, Error> {
        Err(no_key())
    }
}
