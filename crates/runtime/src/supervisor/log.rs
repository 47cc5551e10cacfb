//! Container output as CRI log lines: `<time> stdout|stderr F|P <text>`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Longest text in one entry; longer lines become several partial ones.
pub const MAX_LINE: usize = 16 * 1024;

/// One stream's lines on their way into the log.
#[derive(Debug)]
pub struct LineSplitter {
    name: &'static str,
    pending: Vec<u8>,
}

impl LineSplitter {
    pub fn new(name: &'static str) -> Self {
        Self { name, pending: Vec::new() }
    }

    /// Takes output and appends the entries it completes to `out`.
    pub fn push(&mut self, mut bytes: &[u8], time: &str, out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let room = MAX_LINE - self.pending.len();
            let window = &bytes[..bytes.len().min(room)];
            match window.iter().position(|b| *b == b'\n') {
                Some(end) => {
                    self.entry(time, 'F', &window[..end], out);
                    bytes = &bytes[end + 1..];
                }
                // A line of exactly the limit is whole, not partial: check the next byte first.
                None if window.len() == room && bytes.get(room) == Some(&b'\n') => {
                    self.entry(time, 'F', window, out);
                    bytes = &bytes[room + 1..];
                }
                None if window.len() == room => {
                    self.entry(time, 'P', window, out);
                    bytes = &bytes[room..];
                }
                None => {
                    self.pending.extend_from_slice(window);
                    return;
                }
            }
        }
    }

    /// The stream has ended: text after the last newline becomes a partial entry, so that readers add no newline
    /// that the container did not write.
    pub fn finish(&mut self, time: &str, out: &mut Vec<u8>) {
        if !self.pending.is_empty() {
            self.entry(time, 'P', &[], out);
        }
    }

    fn entry(&mut self, time: &str, tag: char, rest: &[u8], out: &mut Vec<u8>) {
        // Writing to a Vec cannot fail.
        let _ = write!(out, "{time} {} {tag} ", self.name);
        out.extend_from_slice(&self.pending);
        out.extend_from_slice(rest);
        out.push(b'\n');
        // Give the memory back: long lines are rare and a supervisor lives long.
        self.pending = Vec::new();
    }
}

/// The log file, opened by path so that it can be opened anew after rotation.
#[derive(Debug)]
pub struct LogFile {
    path: Option<PathBuf>,
    file: Option<File>,
}

impl LogFile {
    /// `None` keeps nothing.
    pub fn open(path: Option<PathBuf>) -> io::Result<Self> {
        let file = path.as_deref().map(open).transpose()?;
        Ok(Self { path, file })
    }

    pub fn reopen(&mut self) -> io::Result<()> {
        if let Some(path) = &self.path {
            self.file = Some(open(path)?);
        }
        Ok(())
    }

    pub fn write(&mut self, bytes: &[u8]) {
        if let Some(file) = &mut self.file
            && !bytes.is_empty()
        {
            // A full disk loses log lines; it must not stop the container or its supervisor.
            let _ = file.write_all(bytes);
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    // A pod with a hostPath volume may have put a FIFO or a link there: neither is waited for nor followed.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().append(true).create(true).mode(0o640).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other(format!("{} is not a regular file", path.display())));
    }
    Ok(file)
}

/// Time in the form log readers parse, always with nine digits so that lines stay aligned.
pub fn timestamp(nanoseconds: i64) -> String {
    let (seconds, fraction) = (nanoseconds.div_euclid(1_000_000_000), nanoseconds.rem_euclid(1_000_000_000));
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{fraction:09}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// Days since 1970-01-01 as a Gregorian date. Counting years from March puts the leap day last.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(pieces: &[&[u8]]) -> String {
        let mut splitter = LineSplitter::new("stdout");
        let mut out = Vec::new();
        for piece in pieces {
            splitter.push(piece, "T", &mut out);
        }
        splitter.finish("T", &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn lines() {
        assert_eq!(split(&[b"a\nb\n"]), "T stdout F a\nT stdout F b\n");
        assert_eq!(split(&[b"he", b"llo\n\n"]), "T stdout F hello\nT stdout F \n");
        assert_eq!(split(&[b"no newline"]), "T stdout P no newline\n");
        assert_eq!(split(&[b"a\nno newline"]), "T stdout F a\nT stdout P no newline\n");
        assert_eq!(split(&[]), "");
    }

    #[test]
    fn long_lines_become_partial_entries() {
        let long = vec![b'x'; MAX_LINE + 3];
        let text = split(&[&long, b"\n"]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], format!("T stdout P {}", "x".repeat(MAX_LINE)));
        assert_eq!(lines[1], "T stdout F xxx");
        let mut exact = vec![b'x'; MAX_LINE];
        exact.push(b'\n');
        assert_eq!(split(&[&exact]), format!("T stdout F {}\n", "x".repeat(MAX_LINE)));
    }

    #[test]
    fn a_log_is_a_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink(path("victim"), path("link")).unwrap();
        for (name, good) in [("new/0.log", true), ("new/0.log", true), ("pipe", false), ("link", false)] {
            assert_eq!(LogFile::open(Some(path(name))).is_ok(), good, "{name}");
        }
        assert!(!path("victim").exists());
    }

    #[test]
    fn times() {
        for (nanoseconds, expected) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (1_475_713_029_669_794_202, "2016-10-06T00:17:09.669794202Z"),
            (951_782_400_000_000_000, "2000-02-29T00:00:00.000000000Z"),
            (1_735_689_599_999_999_999, "2024-12-31T23:59:59.999999999Z"),
        ] {
            assert_eq!(timestamp(nanoseconds), expected);
        }
    }
}
