//! A runtime and an API server in memory, to drive the real workers through real sequences on a paused clock.

mod fake_api;
mod fake_runtime;
mod harness;

pub(crate) use fake_api::{FakeApi, Key};
pub(crate) use fake_runtime::FakeRuntime;
pub(crate) use harness::Harness;
