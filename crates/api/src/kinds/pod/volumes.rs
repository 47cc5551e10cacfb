//! Validation of volumes.
