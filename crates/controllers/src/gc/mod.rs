//! Removes objects whose owners are gone, and holds owners until their dependents are.

mod collector;
mod decide;
mod dump;
mod graph;

pub(crate) use collector::start;

const FOREGROUND: &str = "foregroundDeletion";
const ORPHAN: &str = "orphan";
