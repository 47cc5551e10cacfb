//! Wire formats. Every decoder answers a JSON value that obeys the schema, or says why it cannot.
//!
//! - [`json`] reads JSON against a type, in one pass, with upstream's rules and wording;
//! - [`yaml`] turns YAML into JSON text and takes the same way;
//! - [`protobuf`] transcodes `application/vnd.kubernetes.protobuf` in both directions;
//! - [`normalise()`] gives a value the form that upstream would write after a round trip through Go.

mod error;
pub mod json;
mod normalise;
pub mod protobuf;
mod scalar;
mod time;
pub mod yaml;

pub use error::DecodeError;
pub use normalise::{Step, empty_places, normalise, normalise_as_sent, normalise_for_storage};
pub use time::check_time;

use ferrite_json::Value;

/// Nesting beyond this is refused by every decoder and patch.
///
/// Deep enough for any real object, shallow enough for a small stack. It also leaves room for the levels that a list or
/// a watch event adds: `serde_json`, with which clients (ours too) read them, refuses more than 127.
pub const MAX_DEPTH: usize = 112;

/// Nesting that an object may have apart from its managedFields, which mirror it a few levels further down:
/// fields that the server adds never take it beyond [`MAX_DEPTH`].
pub const MAX_OBJECT_DEPTH: usize = 100;

/// The decoded body of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    /// The object without the fields its type does not know.
    pub value: Value,
    /// The complaints of strict field validation, in the order of the document and in upstream's words:
    /// `unknown field "spec.foo"`, `duplicate field "spec.replicas"`.
    pub strict: Vec<String>,
}

impl Decoded {
    /// The one message in which upstream reports [`Decoded::strict`] when validation is strict.
    pub fn strict_error(&self) -> Option<String> {
        (!self.strict.is_empty()).then(|| format!("strict decoding error: {}", self.strict.join(", ")))
    }

    /// The complaints, one text each, as upstream warns of them: those of YAML are split into lines.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.strict.iter().flat_map(|complaint| match complaint.strip_prefix("yaml: unmarshal errors:\n") {
            Some(lines) => lines.lines().map(str::trim).collect::<Vec<_>>(),
            None => vec![complaint.as_str()],
        })
    }
}
