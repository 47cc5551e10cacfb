//! From beside the cluster: local users, other processes, damaged files, floods of connections.

mod directory;
mod flood;
mod health;
mod log;
