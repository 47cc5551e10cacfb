//! Who set which field: managedFields on every write.

use crate::options::WriteOptions;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use jiff::Timestamp;
use serde_json::Value;

/// Brings managedFields of `new` up to date for a write that is not an apply.
pub(crate) fn on_write(
    resource: &Resource,
    old: Option<&Value>,
    new: &mut Value,
    options: &WriteOptions,
    subresource: Option<&str>,
    now: Timestamp,
) {
    let _ = (resource, old, new, options, subresource, now);
}

pub(crate) fn apply(
    resource: &Resource,
    old: &Value,
    applied: &Value,
    options: &WriteOptions,
    subresource: Option<&str>,
) -> Result<Value, Status> {
    let _ = (resource, old, options, subresource);
    Ok(applied.clone())
}
