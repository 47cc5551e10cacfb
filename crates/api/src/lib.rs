//! The API's own knowledge, without I/O: kinds, schema, codecs, defaulting, validation, patches, selectors.
//!
//! An object travels through the server as a [`ferrite_json::Value`] whose shape is described once, in
//! [`schema`]. Everything that depends on a kind is behind [`resource::Resource`]: a row of the table in
//! [`kinds`] for the built-in ones.

mod cidr;
pub mod codec;
pub mod cron;
pub mod custom;
pub mod field;
pub mod gvk;
pub mod kinds;
pub mod managed_fields;
pub mod meta;
pub mod meta_validation;
pub mod patch;
pub mod pem;
pub mod policy;
pub mod quantity;
pub mod quota;
pub mod resource;
pub mod schema;
pub mod selector;
pub mod status;
pub mod table;
pub mod version;

pub use cidr::{Cidr, number as address_number};
pub use gvk::{Gvk, Gvr};
pub use status::Status;
