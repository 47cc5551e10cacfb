//! Identifiers nobody else has.

use rand::RngExt;
use uuid::Uuid;

/// A unique identifier. It is no secret, so it costs no system call.
pub(crate) fn random() -> Uuid {
    uuid::Builder::from_random_bytes(rand::rng().random()).into_uuid()
}
