//! Attacks on the built program: each test repeats an attack, with real containers and clients, and checks
//! that it fails.
//!
//! One module for each position an attacker may have.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test that fails should stop at once")]

mod api;
#[allow(dead_code, reason = "shared with the end-to-end tests")]
#[path = "../e2e/archive.rs"]
mod archive;
mod cluster;
mod files;
mod pods;
#[allow(dead_code, reason = "shared with the end-to-end tests")]
#[path = "../e2e/server.rs"]
mod server;
#[allow(dead_code, reason = "shared with the end-to-end tests")]
#[path = "../e2e/world.rs"]
mod world;
