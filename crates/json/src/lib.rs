//! JSON values as API objects have them.
//!
//! The same shape and the same methods as `serde_json`'s values, another layout. An object of the API has
//! some hundred short keys and short strings, in maps of a few members. Here a short string lies in the value
//! itself, and the members of a map lie side by side in the order of their keys: most values need no allocation, and
//! a lookup of a member reads a few neighbouring words. A map of many members becomes a tree, so that no
//! body makes insertions slow.
//!
//! Text is read and written by `serde_json`, whose functions are here under their own names.
//!
//! Clone, drop, comparison and writing go down a value by recursion. Every way to make a value out of input is bounded:
//! `serde_json` reads 128 levels, the codecs of the API fewer. Code that nests one value in another checks the outcome
//! with [`Value::count_within`] first.

mod compact;
mod de;
mod macros;
mod map;
pub mod scan;
mod ser;
mod tape;
mod value;
mod write;

pub use compact::{from_compact, from_compact_without};
pub use compact_str::CompactString as Text;
pub use de::{from_slice, from_value};
pub use map::{Entry, IntoIter, Iter, IterMut, Map};
pub use ser::to_value;
pub use serde_json::{
    Deserializer, Error, Number, from_reader, from_str, to_string, to_string_pretty, to_vec, to_vec_pretty,
    to_writer,
};
pub use tape::{Node, NodeKind, Tape};
pub use value::{Index, Value};
pub use write::write_text;

#[doc(hidden)]
pub use macros::{member, members, whole};

#[cfg(test)]
mod tests;
