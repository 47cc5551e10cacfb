//! Progress messages for a person who waits.

use std::io::{IsTerminal, Write};
use std::time::Instant;

/// Steps, one line each, printed when they are done.
pub struct Progress {
    started: Instant,
    terminal: bool,
    quiet: bool,
}

impl Progress {
    pub fn new(quiet: bool) -> Self {
        Self { started: Instant::now(), terminal: std::io::stdout().is_terminal(), quiet }
    }

    pub fn done(&self, what: &str, detail: &str) {
        if self.quiet {
            return;
        }
        let mark = if self.terminal { "\x1b[32m✓\x1b[0m" } else { "✓" };
        let elapsed = self.started.elapsed().as_secs_f64();
        self.line(&format!("{mark} {elapsed:>6.2}s  {what:<18} {detail}"));
    }

    pub fn line(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        // A closed output is no reason to stop.
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    }
}

/// A bar for a known or unknown number of bytes.
pub struct Bar {
    what: String,
    terminal: bool,
    shown: std::sync::Mutex<Option<Instant>>,
}

impl Bar {
    pub fn new(what: &str) -> Self {
        Self {
            what: what.to_owned(),
            terminal: std::io::stderr().is_terminal(),
            shown: std::sync::Mutex::new(None),
        }
    }

    /// Redraws at most ten times a second; says nothing when nobody watches.
    pub fn update(&self, done: u64, total: Option<u64>) {
        if !self.terminal {
            return;
        }
        let mut shown = self.shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let finished = total.is_some_and(|t| done >= t);
        if !finished && shown.is_some_and(|at| at.elapsed().as_millis() < 100) {
            return;
        }
        *shown = Some(Instant::now());
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let text = match total.filter(|t| *t > 0) {
            Some(total) => {
                let filled = usize::try_from(done.min(total) * 30 / total).unwrap_or(0);
                let bar = format!("{}{}", "█".repeat(filled), "░".repeat(30 - filled));
                format!("\r{} {bar} {:.1}/{:.1} MiB", self.what, mib(done), mib(total))
            }
            None => format!("\r{} {:.1} MiB", self.what, mib(done)),
        };
        let mut out = std::io::stderr().lock();
        let _ = write!(out, "{text}\x1b[K").and_then(|()| out.flush());
    }

    pub fn finish(&self) {
        if self.terminal {
            let _ = writeln!(std::io::stderr());
        }
    }
}
