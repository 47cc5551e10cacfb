//! Mirrors Endpoints that people keep into EndpointSlices: those who route Services read slices only.

pub(in crate::endpoints) mod controller;
pub(in crate::endpoints) mod decide;
