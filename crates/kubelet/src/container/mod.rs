//! Makes the runtime's request from a container of a spec. Everything here is a pure function, except
//! reading the file of a seccomp profile.

pub(crate) mod apparmor;
pub(crate) mod config;
pub(crate) mod dns;
pub(crate) mod env;
pub(crate) mod env_file;
pub(crate) mod expand;
pub(crate) mod fields;
pub(crate) mod hosts;
pub(crate) mod huge_pages;
mod oom_score;
pub(crate) mod read_only;
pub(crate) mod resources;
pub(crate) mod sandbox;
pub(crate) mod seccomp;
pub(crate) mod security;
pub(crate) mod sysctl;
pub(crate) mod totals;
