//! The parts that every component of a cluster has, as upstream's component-base: feature gates, metrics, health
//! checks, durations in Go's notation, configuration files, and the port on which a component answers for itself.
//!
//! This crate knows no kind of object and no client. Components stand on it and on `ferrite-client`.

mod config;
mod duration;
mod followed;
mod gates;
pub mod health;
mod inotify;
pub mod metrics;
mod nearest;
mod pages;
mod places;
mod plain;
mod serve;
pub mod steps;
mod token_bucket;

pub use config::{ConfigError, TypeMeta, read_config};
pub use duration::{GoDuration, ParseDurationError};
pub use followed::FollowedFiles;
pub use gates::{FeatureGates, Gate, GateError, Stage};
pub use inotify::Watcher;
pub use nearest::nearest;
pub use pages::Pages;
pub use places::{Place, Places};
pub use plain::{PlainLimits, serve_plain};
pub use serve::{Access, Denied, Endpoint, EndpointOptions};
pub use token_bucket::{Moment, Rate, TokenBucket};
