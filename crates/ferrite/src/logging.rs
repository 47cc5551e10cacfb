//! Structured logs on standard error, quiet by default, with klog's levels.

mod rotate;

pub use rotate::log_to;

use std::sync::OnceLock;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;
use tracing_subscriber::{Registry, reload};

static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// `-v` as klog's: 0 logs warnings and errors, 2 messages for operators, 4 and more messages for
/// developers. Libraries log one level later than we do.
pub fn start(verbosity: u8) {
    let (filter, handle) = reload::Layer::new(filter(verbosity));
    let layer = tracing_subscriber::fmt::layer().with_writer(|| rotate::Writer).with_ansi(false);
    // A second start in one process (tests) keeps the first.
    if tracing_subscriber::registry().with(layer.with_filter(filter)).try_init().is_ok() {
        let _ = FILTER.set(handle);
    }
}

/// Changes the level while the process runs.
pub fn set_verbosity(verbosity: u8) {
    if let Some(handle) = FILTER.get() {
        let _ = handle.reload(filter(verbosity));
    }
}

fn filter(verbosity: u8) -> Targets {
    let (ours, theirs) = match verbosity {
        0 => (LevelFilter::WARN, LevelFilter::ERROR),
        1..=3 => (LevelFilter::INFO, LevelFilter::WARN),
        4..=5 => (LevelFilter::DEBUG, LevelFilter::INFO),
        6..=9 => (LevelFilter::TRACE, LevelFilter::DEBUG),
        _ => (LevelFilter::TRACE, LevelFilter::TRACE),
    };
    Targets::new().with_default(theirs).with_target("ferrite", ours)
}
