//! Mirrors Endpoints that people keep into EndpointSlices: those who route Services read slices only.

pub(in crate::endpoints) mod controller;
mod decide;
