//! Values written down as JSON.

use serde::Serialize;

use crate::{Map, Text, Value, to_value};

/// A value written as JSON. Keys are literals, names or expressions in brackets; values may be any expression that
/// can be serialised.
///
/// ```
/// let port = 80;
/// let service = ferrite_json::json!({"spec": {"ports": [{"port": port, "name": null}]}});
/// assert_eq!(service["spec"]["ports"][0]["port"], 80);
/// ```
#[macro_export]
macro_rules! json {
    (null) => { $crate::Value::Null };
    ([ $($items:tt)* ]) => { $crate::json_items!([] $($items)*) };
    ({ $($members:tt)* }) => { $crate::json_members!([] $($members)*) };
    ($value:expr) => { $crate::whole(&$value) };
}

#[doc(hidden)]
#[macro_export]
macro_rules! json_items {
    ([$($done:expr,)*]) => { $crate::Value::Array(::std::vec![$($done,)*]) };
    ([$($done:expr,)*] null $(, $($rest:tt)*)?) => {
        $crate::json_items!([$($done,)* $crate::Value::Null,] $($($rest)*)?)
    };
    ([$($done:expr,)*] [ $($items:tt)* ] $(, $($rest:tt)*)?) => {
        $crate::json_items!([$($done,)* $crate::json!([ $($items)* ]),] $($($rest)*)?)
    };
    ([$($done:expr,)*] { $($members:tt)* } $(, $($rest:tt)*)?) => {
        $crate::json_items!([$($done,)* $crate::json!({ $($members)* }),] $($($rest)*)?)
    };
    ([$($done:expr,)*] $value:expr $(, $($rest:tt)*)?) => {
        $crate::json_items!([$($done,)* $crate::whole(&$value),] $($($rest)*)?)
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! json_members {
    ([$($done:expr,)*]) => { $crate::members([$($done,)*]) };
    ([$($done:expr,)*] $key:tt : null $(, $($rest:tt)*)?) => {
        $crate::json_members!([$($done,)* $crate::member($key, $crate::Value::Null),] $($($rest)*)?)
    };
    ([$($done:expr,)*] $key:tt : [ $($items:tt)* ] $(, $($rest:tt)*)?) => {
        $crate::json_members!([$($done,)* $crate::member($key, $crate::json!([ $($items)* ])),] $($($rest)*)?)
    };
    ([$($done:expr,)*] $key:tt : { $($members:tt)* } $(, $($rest:tt)*)?) => {
        $crate::json_members!([$($done,)* $crate::member($key, $crate::json!({ $($members)* })),] $($($rest)*)?)
    };
    ([$($done:expr,)*] $key:tt : $value:expr $(, $($rest:tt)*)?) => {
        $crate::json_members!([$($done,)* $crate::member($key, $crate::whole(&$value)),] $($($rest)*)?)
    };
}

pub fn member(key: impl Into<Text>, value: Value) -> (Text, Value) {
    (key.into(), value)
}

pub fn members<const N: usize>(members: [(Text, Value); N]) -> Value {
    Value::Object(Map::from_members(members.into()))
}

#[expect(clippy::expect_used, reason = "a literal whose parts are no JSON is a mistake of its writer")]
pub fn whole<T: Serialize + ?Sized>(value: &T) -> Value {
    to_value(value).expect("what stands in a JSON literal can be serialised")
}
