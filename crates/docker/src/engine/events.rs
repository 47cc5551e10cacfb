//! Events, as one line of JSON per event in a file to which every process appends.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use serde::{Deserialize, Serialize};

use super::{Engine, EngineError, Result};
use crate::record::Container;
use crate::units;

/// Beyond this the file becomes the old one and a new one starts: two of them are kept.
const MAX_FILE: u64 = 8 << 20;

/// Something that happened to a container or an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Nanoseconds since 1970.
    pub time: i64,
    /// `container`, `image`, `volume` or `network`.
    pub kind: String,
    /// `create`, `start`, `die`, …
    pub action: String,
    pub id: String,
    pub attributes: BTreeMap<String, String>,
}

impl Engine {
    /// Notes what happened to a container. That it cannot be noted is no reason to fail.
    pub(super) fn note(&self, container: &Container, action: &str, more: &[(&str, String)]) {
        let mut attributes = container.config.labels.clone();
        attributes.insert("image".into(), container.config.image.clone());
        attributes.insert("name".into(), container.name.clone());
        attributes.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        self.append(&Event {
            time: units::now(),
            kind: "container".into(),
            action: action.into(),
            id: container.id.clone(),
            attributes,
        });
    }

    pub(super) fn note_image(&self, id: &str, action: &str, name: &str) {
        self.append(&Event {
            time: units::now(),
            kind: "image".into(),
            action: action.into(),
            id: id.to_owned(),
            attributes: BTreeMap::from([("name".to_owned(), name.to_owned())]),
        });
    }

    pub(super) fn note_network(&self, network: &super::Network, action: &str, container: Option<&str>) {
        let mut attributes = BTreeMap::from([
            ("name".to_owned(), network.name.clone()),
            ("type".to_owned(), network.driver.clone()),
        ]);
        attributes.extend(container.map(|id| ("container".to_owned(), id.to_owned())));
        self.append(&Event {
            time: units::now(),
            kind: "network".into(),
            action: action.into(),
            id: network.id.clone(),
            attributes,
        });
    }

    fn append(&self, event: &Event) {
        let path = self.paths.events();
        let result = serde_json::to_vec(event).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() > MAX_FILE) {
                std::fs::rename(&path, older(&path))?;
            }
            // One write: lines of different processes do not mix.
            File::options().create(true).append(true).open(&path)?.write_all(&line)
        });
        if let Err(error) = result {
            tracing::warn!(%error, "event not recorded");
        }
    }

    /// Returns the events since a time, and follows new ones.
    pub fn events(&self, since: i64) -> Result<Follow> {
        let fail = || EngineError::io("read events");
        let path = self.paths.events();
        // There must be something to watch.
        File::options().create(true).append(true).open(&path).map_err(fail())?;
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)
            .and_then(|watch| {
                let flags = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_MOVE | AddWatchFlags::IN_CREATE;
                watch.add_watch(self.paths.root(), flags).map(|_| watch)
            })
            .map_err(|errno| fail()(errno.into()))?;
        let mut past = Vec::new();
        if since < units::now() {
            for path in [older(&path), path.clone()] {
                let Ok(file) = File::open(path) else { continue };
                past.extend(BufReader::new(file).lines().map_while(io::Result::ok).filter_map(|l| parse(&l)));
            }
        }
        past.retain(|event: &Event| event.time >= since);
        let mut file = File::open(&path).map_err(fail())?;
        let position = file.seek(SeekFrom::End(0)).map_err(fail())?;
        let known = past.last().map_or(0, |event| event.time);
        Ok(Follow { past, path, position, pending: Vec::new(), watch, known })
    }
}

fn older(path: &Path) -> PathBuf {
    path.with_extension("jsonl.1")
}

fn parse(line: &str) -> Option<Event> {
    serde_json::from_str(line).ok()
}

/// Events as they come.
pub struct Follow {
    /// The events before the follower was made.
    pub past: Vec<Event>,
    path: PathBuf,
    position: u64,
    pending: Vec<u8>,
    watch: Inotify,
    known: i64,
}

impl Follow {
    /// Waits for the next events. Blocks, at most until `deadline` (nanoseconds since 1970).
    pub fn next(&mut self, deadline: Option<i64>) -> io::Result<Vec<Event>> {
        loop {
            let events = self.read()?;
            let now = units::now();
            if !events.is_empty() || deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(events);
            }
            let wait = deadline.map_or(-1, |deadline| ((deadline - now) / 1_000_000 + 1).min(60_000));
            wait_readable(&self.watch, i32::try_from(wait).unwrap_or(i32::MAX))?;
            let _ = self.watch.read_events();
        }
    }

    fn read(&mut self) -> io::Result<Vec<Event>> {
        use io::Read;
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        if file.metadata()?.len() < self.position {
            // A new file has taken the old one's place.
            self.position = 0;
            self.pending.clear();
        }
        file.seek(SeekFrom::Start(self.position))?;
        self.position += file.take(MAX_FILE).read_to_end(&mut self.pending)? as u64;
        let mut events = Vec::new();
        while let Some(end) = self.pending.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            events.extend(parse(&String::from_utf8_lossy(&line)));
        }
        events.retain(|event| event.time > self.known || self.position > 0);
        Ok(events)
    }
}

/// Waits until a descriptor has something to read, for at most `milliseconds`.
pub(super) fn wait_readable(fd: &impl AsFd, milliseconds: i32) -> io::Result<()> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::NONE);
    match poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], timeout) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
