//! The embedded container runtime: images, layers, sandboxes, containers, supervisor, streams.

pub mod image;
