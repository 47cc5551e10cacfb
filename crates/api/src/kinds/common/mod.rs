//! Helpers of several kinds: reading and checking fields, rows and cells of tables, shapes that kinds share.

pub(crate) mod access;
pub(super) mod cell;
pub(super) mod check;
pub(super) mod converted;
pub(super) mod declared;
pub(super) mod go;
pub(super) mod lifecycle;
pub(super) mod review;
pub(super) mod row;
pub(super) mod semver;
pub(super) mod volume_source;
pub(super) mod workload;
