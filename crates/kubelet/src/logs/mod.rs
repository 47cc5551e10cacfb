//! Container logs in CRI's format: reading, following, rotating.

mod line;
mod reader;
mod rotate;

pub(crate) use line::LogOptions;
pub(crate) use reader::{LogEnd, stream};
pub(crate) use rotate::run as rotate;

use std::path::Path;

/// The last lines of a log as plain text, for termination messages.
pub(crate) fn tail_text(path: &Path, lines: usize, bytes: usize) -> String {
    // Each line carries a time and a stream beside its text; read enough to cover them.
    let window = (bytes + lines * 64) as u64;
    let Ok(raw) = ferrite_hostfs::read_tail(path, window) else { return String::new() };
    let parsed: Vec<line::Line<'_>> = raw.split_inclusive(|b| *b == b'\n').filter_map(line::parse).collect();
    let mut out: Vec<u8> = Vec::new();
    for line in &parsed[parsed.len().saturating_sub(lines)..] {
        out.extend_from_slice(line.text);
        if line.ends {
            out.push(b'\n');
        }
    }
    let start = out.len().saturating_sub(bytes);
    String::from_utf8_lossy(&out[start..]).into_owned()
}
