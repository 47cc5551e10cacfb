//! Custom kinds: resources that a CustomResourceDefinition describes.
//!
//! A definition's OpenAPI schemas are compiled once to [`Schema`]s. [`prune`] drops unknown fields, [`default`] fills
//! defaults, [`validate`] checks values, and server-side apply merges by them. [`Definition`] makes one
//! [`crate::resource::Resource`] of each served version.

mod approval;
pub mod default;
mod definition;
mod format;
pub mod json_path;
mod metadata;
pub mod prune;
mod regexp;
mod rules;
mod schema;
pub mod spec;
mod strategy;
#[cfg(test)]
mod tests;
pub mod validate;

pub use approval::Approval;
pub(crate) use approval::annotation;
pub use definition::{ConversionWebhook, Custom, Definition, DefinitionError, Kind, ScalePaths, Version};
pub use metadata::normalise_metadata;
pub use regexp::Pattern;
pub use rules::RuleSet;
pub use schema::{Additional, Checks, ListType, Schema, Type};
