//! EndpointSlices.

pub(in crate::endpoints) mod controller;
pub(in crate::endpoints) mod decide;
mod measures;
mod topology;
