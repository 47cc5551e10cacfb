//! The log of a process in the background, in files of a limited size.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A file is put aside when it is larger.
const MOST_BYTES: u64 = 10 << 20;
/// Files that were put aside and are kept: `ferrite.log.1` is the newest.
const KEPT: usize = 3;

/// The log of this process, when it has one.
static LOG: OnceLock<Mutex<Rotated>> = OnceLock::new();

/// From now on log messages go to `path`, and so does everything else on standard error.
pub fn log_to(path: &Path) -> io::Result<()> {
    let log = Rotated::open(path, MOST_BYTES)?;
    nix::unistd::dup2_stderr(&log.file)?;
    // A process has one log, from its start.
    let _ = LOG.set(Mutex::new(log));
    Ok(())
}

/// A message as one line. Names, errors and answers in it may be somebody else's: a line break in them would begin a message of
/// their author's choice.
fn one_line(message: &[u8]) -> Cow<'_, [u8]> {
    let (text, end) = match message {
        [text @ .., b'\n'] => (text, &b"\n"[..]),
        text => (text, &b""[..]),
    };
    if !text.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
        return Cow::Borrowed(message);
    }
    let mut line = Vec::with_capacity(message.len() + 16);
    for byte in text {
        match byte {
            b'\n' => line.extend_from_slice(b"\\n"),
            b'\r' => line.extend_from_slice(b"\\r"),
            byte => line.push(*byte),
        }
    }
    line.extend_from_slice(end);
    Cow::Owned(line)
}

/// Standard error, rotated when it is a file of ours. Each write is one message.
#[derive(Debug)]
pub struct Writer;

impl Write for Writer {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let bytes = one_line(message);
        if let Some(log) = LOG.get() {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            if log.count(bytes.len()) {
                // A disk that is full is no reason to stop: the log then grows on in the old file.
                if log.rotate().is_ok() {
                    nix::unistd::dup2_stderr(&log.file)?;
                }
            }
        }
        io::stderr().write_all(&bytes)?;
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[derive(Debug)]
struct Rotated {
    path: PathBuf,
    file: File,
    length: u64,
    most: u64,
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

impl Rotated {
    fn open(path: &Path, most: u64) -> io::Result<Self> {
        let file = append(path)?;
        let length = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, length, most })
    }

    /// Counts bytes that are about to be written. Returns true if they belong in a new file.
    fn count(&mut self, bytes: usize) -> bool {
        let full = self.length > 0 && self.length + bytes as u64 > self.most;
        self.length += bytes as u64;
        full
    }

    fn aside(&self, number: usize) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        name.into()
    }

    /// Puts the file aside and begins another.
    fn rotate(&mut self) -> io::Result<()> {
        for number in (1..KEPT).rev() {
            match std::fs::rename(self.aside(number), self.aside(number + 1)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        std::fs::rename(&self.path, self.aside(1))?;
        self.file = append(&self.path)?;
        self.length = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line() {
        for (message, line) in [
            ("INFO a\n", "INFO a\n"),
            ("INFO a", "INFO a"),
            ("", ""),
            ("\n", "\n"),
            ("WARN error=x\n2026-01-01 INFO all is well\n", "WARN error=x\\n2026-01-01 INFO all is well\n"),
            ("WARN error=x\r\ny", "WARN error=x\\r\\ny"),
        ] {
            assert_eq!(one_line(message.as_bytes()), line.as_bytes());
        }
    }

    /// As the process logs: a subscriber hands a message over in one piece.
    #[test]
    fn nobody_begins_a_message_within_another() {
        use std::sync::{Arc, Mutex};
        #[derive(Clone, Default)]
        struct Lines(Arc<Mutex<Vec<Vec<u8>>>>);
        impl Write for Lines {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().push(one_line(bytes).into_owned());
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || {
            let answer = "no\nWARN forged";
            tracing::warn!(error = %answer, "a registry refuses");
        });
        let lines = lines.0.lock().unwrap();
        assert_eq!(lines.len(), 1);
        let text = String::from_utf8_lossy(&lines[0]).into_owned();
        assert!(text.ends_with("error=no\\nWARN forged\n") && text.lines().count() == 1, "{text}");
    }

    #[test]
    fn old_files_are_kept_and_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ferrite.log");
        let mut log = Rotated::open(&path, 10).unwrap();
        for line in ["one\n", "two\n", "three\n", "four five six\n", "seven\n", "eight\n", "nine ten\n"] {
            if log.count(line.len()) {
                log.rotate().unwrap();
                log.count(line.len());
            }
            log.file.write_all(line.as_bytes()).unwrap();
        }
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).ok();
        assert_eq!(read("ferrite.log").as_deref(), Some("nine ten\n"));
        assert_eq!(read("ferrite.log.1").as_deref(), Some("eight\n"));
        assert_eq!(read("ferrite.log.3").as_deref(), Some("four five six\n"));
        assert_eq!(read("ferrite.log.4"), None, "older ones are gone");
        assert_eq!(Rotated::open(&path, 10).unwrap().length, 9, "a file that is there counts");
    }
}
