//! Mirrors Endpoints that people maintain into EndpointSlices: service proxies read slices only.

pub(in crate::endpoints) mod controller;
pub(in crate::endpoints) mod decide;
