//! `autoscaling`: one kind in two versions. Objects are stored in the newer one.

mod convert;
mod rules;
pub(in crate::kinds) mod scale;
pub(super) mod v1;
pub(super) mod v2;
