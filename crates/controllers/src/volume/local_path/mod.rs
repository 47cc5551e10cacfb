//! The provisioner of local volumes: directories of nodes. Decision 0018 has the reasons.

mod controller;
mod decide;

pub use controller::{ACCOUNT, start};
