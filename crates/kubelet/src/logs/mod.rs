//! Container logs in CRI's format: reading, following, rotating.

mod changes;
mod line;
mod links;
mod reader;
mod rotate;

pub(crate) use line::LogOptions;
pub(crate) use links::LogLinks;
pub(crate) use reader::{LogEnd, stream};
pub use rotate::LogLimits;
pub(crate) use rotate::run as rotate;

use std::io;
use std::path::Path;

/// Enough of a log's end for any termination message: a runtime writes up to 16 KiB of text as one entry, and an
/// entry that the window cuts is lost.
const WINDOW: u64 = 64 * 1024;

/// The last lines of a log as plain text, for termination messages.
pub(crate) fn tail_text(path: &Path, lines: usize, bytes: usize) -> io::Result<String> {
    let raw = ferrite_hostfs::read_tail(path, WINDOW)?;
    let parsed: Vec<line::Line<'_>> = raw.split_inclusive(|b| *b == b'\n').filter_map(line::parse).collect();
    let mut out: Vec<u8> = Vec::new();
    for line in &parsed[parsed.len().saturating_sub(lines)..] {
        out.extend_from_slice(line.text);
        if line.ends {
            out.push(b'\n');
        }
    }
    let start = out.len().saturating_sub(bytes);
    Ok(String::from_utf8_lossy(&out[start..]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_as_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let entry = |tag: &str, text: &str| format!("2026-01-01T00:00:00.000000000Z stdout {tag} {text}\n");
        let hundred: String = (0..100).map(|i| entry("F", &i.to_string())).collect();
        let last_eighty: String = (20..100).map(|i| format!("{i}\n")).collect();
        let long = entry("F", &"x".repeat(16 * 1024));
        for (log, expected) in [
            (String::new(), String::new()),
            (entry("F", "DONE"), "DONE\n".into()),
            (entry("P", "DONE"), "DONE".into()),
            (entry("F", "a") + &entry("P", "b") + &entry("P", "c"), "a\nbc".into()),
            (hundred, last_eighty),
            (long.clone(), "x".repeat(2047) + "\n"),
            (long.repeat(8) + &entry("P", "DONE"), "x".repeat(2043) + "\nDONE"),
        ] {
            std::fs::write(&path, log).unwrap();
            assert_eq!(tail_text(&path, 80, 2048).unwrap(), expected);
        }
        assert!(tail_text(&dir.path().join("missing"), 80, 2048).is_err());
    }
}
