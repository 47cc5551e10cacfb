//! Storage: claims find volumes, and volumes come and go with claims.

pub(crate) mod attach_detach;
pub(crate) mod binder;
pub(crate) mod ephemeral;
pub(crate) mod expander;
pub mod local_path;
pub(crate) mod objects;
