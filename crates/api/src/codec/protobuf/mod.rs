//! `application/vnd.kubernetes.protobuf`: transcoding between protobuf and JSON values through the schema.
//!
//! An object travels in an envelope: four bytes `k8s\0`, then `runtime.Unknown` with the object's apiVersion
//! and kind beside its message. The message layout is the schema's; bytes we write are those Go would write:
//! fields in the order of their tags, values that are not pointers even when they are zero.

mod decode;
mod encode;
mod envelope;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use decode::decode_message;
pub use encode::{EncodeError, Encoder, encode_message};
pub use envelope::{Envelope, decode, decode_as, encode, encode_as, encode_watch_event, frame, open, wrap};

/// The first bytes of every enveloped object.
pub const MAGIC: &[u8] = b"k8s\0";
