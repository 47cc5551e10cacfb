//! systemd as the manager of control groups.
//!
//! On a machine where systemd owns the control groups, a pod is a slice and a container is a scope below it:
//! units that systemd makes when it is asked to over D-Bus. [`Slice`] knows names and paths, `limits.rs` what a
//! unit is limited to in systemd's words, [`Manager`] the calls. Everything here waits: call it where waiting
//! is allowed. [`Logind`] delays shutdowns of the machine.

mod connection;
mod limits;
mod logind;
mod manager;
mod names;
#[cfg(feature = "testing")]
pub mod testing;
mod wire;

pub use connection::CallError;
pub use logind::{InhibitLock, Logind};
pub use manager::{Manager, ScopeRequest};
pub use names::{NameError, Slice, escape};
pub use wire::{Property, Value};
