//! A container's output as its supervisor wrote it down.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::{Engine, EngineError, Result};

/// Name of the log in a container's directory.
pub(super) const LOG: &str = "container.log";

/// One entry: a line, or a piece of a long one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// RFC 3339, as written.
    pub time: String,
    pub stderr: bool,
    /// With its newline, unless more of the line follows.
    pub bytes: Vec<u8>,
}

fn parse(entry: &[u8]) -> Option<LogLine> {
    let mut parts = entry.splitn(4, |b| *b == b' ');
    let (time, stream, tag, text) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let mut bytes = text.to_vec();
    if tag == b"F" {
        bytes.push(b'\n');
    }
    Some(LogLine { time: String::from_utf8_lossy(time).into_owned(), stderr: stream == b"stderr", bytes })
}

impl Engine {
    /// A container's log: the present lines, and with [`LogReader::next`] the following ones.
    pub fn logs(&self, name: &str) -> Result<LogReader> {
        let id = self.find(name)?.container.id;
        LogReader::open(self.clone(), id).map_err(EngineError::io("read the container's log"))
    }
}

/// Reads a log from its beginning.
pub struct LogReader {
    engine: Engine,
    id: String,
    path: PathBuf,
    position: u64,
    watch: Inotify,
}

impl LogReader {
    fn open(engine: Engine, id: String) -> io::Result<Self> {
        let directory = engine.directory(&id);
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        // The state file is replaced when the container ends; that wakes us too.
        let flags = AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF;
        watch.add_watch(&directory, flags)?;
        Ok(Self { path: directory.join(LOG), engine, id, position: 0, watch })
    }

    /// The lines added since the last call.
    pub fn available(&mut self) -> io::Result<Vec<LogLine>> {
        read_from(&self.path, &mut self.position)
    }

    /// Waits for more; `None` when the container has ended and everything was read. Blocks.
    pub fn next(&mut self) -> io::Result<Option<Vec<LogLine>>> {
        loop {
            let runs = self.engine.view(&self.id).is_ok_and(|view| {
                let state = view.state.effective();
                state.status.runs() || state.status == crate::record::Status::Restarting
            });
            let lines = self.available()?;
            if !lines.is_empty() {
                return Ok(Some(lines));
            }
            if !runs {
                return Ok(None);
            }
            // The exit record is elsewhere: check it every now and then, too.
            super::events::wait_readable(&self.watch, 500)?;
            let _ = self.watch.read_events();
        }
    }
}

fn read_from(path: &Path, position: &mut u64) -> io::Result<Vec<LogLine>> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    file.seek(SeekFrom::Start(*position))?;
    // In pieces: a log may be larger than memory.
    let mut reader = BufReader::new(file.take(4 << 20));
    let mut lines = Vec::new();
    loop {
        let mut entry = Vec::new();
        let count = reader.read_until(b'\n', &mut entry)?;
        if entry.pop_if(|last| *last == b'\n').is_none() {
            return Ok(lines);
        }
        *position += count as u64;
        lines.extend(parse(&entry));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries() {
        let line = parse(b"2026-01-01T00:00:00Z stdout F hello world").unwrap();
        assert_eq!((line.stderr, line.bytes.as_slice()), (false, b"hello world\n".as_slice()));
        let line = parse(b"2026-01-01T00:00:00Z stderr P part").unwrap();
        assert_eq!((line.stderr, line.bytes.as_slice()), (true, b"part".as_slice()));
        assert_eq!(parse(b"2026-01-01T00:00:00Z stdout F ").unwrap().bytes, b"\n");
        assert_eq!(parse(b"nonsense"), None);
    }
}
