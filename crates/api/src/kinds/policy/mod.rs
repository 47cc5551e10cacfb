//! Kinds of `policy`.

pub(super) mod poddisruptionbudget;
