//! Binds claims to volumes.
//!
//! [`matching`] finds the volume that suits a claim, [`decide`] has the two state machines, [`bind`] the writes as pure
//! changes, [`controller`] the informers and the API.

mod bind;
mod controller;
mod decide;
mod matching;

pub(crate) use controller::start;
