//! Revisions, watch, durability.
