//! The built-in kinds: one file each, one row each in [`built_in`].

use crate::resource::Resource;

/// Every resource compiled into the server, in discovery's order.
pub fn built_in() -> Vec<Resource> {
    Vec::new()
}
