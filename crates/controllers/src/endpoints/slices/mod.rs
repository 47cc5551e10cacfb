//! EndpointSlices.

pub(in crate::endpoints) mod controller;
mod decide;
