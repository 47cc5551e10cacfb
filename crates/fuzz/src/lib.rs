//! Fuzz targets, one for each kind of input that an attacker can send.
//!
//! A target takes any bytes and must come back: no panic, no endless loop, no memory out of proportion. Most
//! also check a law of their format, such as "reading, writing and reading again gives the same value".

mod documents;
mod expressions;
mod nodes;
mod request;

/// A way in for untrusted bytes. Inputs to start from are in `seeds/<name>`.
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
}

pub const TARGETS: &[Target] = &[
    documents::JSON,
    documents::YAML,
    documents::PROTOBUF,
    documents::PATCH,
    documents::APPLY,
    documents::SELECTOR,
    documents::QUANTITY,
    expressions::CEL,
    request::REQUEST,
    nodes::SPDY,
    nodes::LAYER,
    nodes::REFERENCE,
    nodes::PAGE,
    nodes::DNS,
];
