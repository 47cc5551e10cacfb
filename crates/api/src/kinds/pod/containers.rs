//! Validation of containers.
