//! The log: one line for each event, in a file that is rotated by its size, or on standard output.

use super::backend::{AuditBatch, AuditMode, AuditTruncate, Backend, Queued, Throttle, next_batch};
use super::metrics;
use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Lines that are written together when nobody asked for batches.
const LINES: usize = 256;

/// The format of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuditFormat {
    Json,
    /// Upstream's old format: one line of text.
    Legacy,
}

/// A log of events.
#[derive(Debug, Clone)]
pub struct AuditLog {
    /// None is standard output.
    pub path: Option<PathBuf>,
    /// Days that old files are kept; zero is for ever.
    pub max_age: u32,
    /// Old files that are kept; zero is all.
    pub max_backups: usize,
    /// Megabytes after which a new file begins; zero is never.
    pub max_size: u64,
    /// True if old files are compressed.
    pub compress: bool,
    pub format: AuditFormat,
    pub mode: AuditMode,
    pub truncate: Option<AuditTruncate>,
}

/// Opens the log and starts the task that writes it.
pub(super) fn start(log: &AuditLog) -> io::Result<(Backend, JoinHandle<()>)> {
    let output = match &log.path {
        None => Output::Stdout,
        Some(path) => Output::File(LogFile::open(path.clone(), log.max_size << 20)?),
    };
    let (backend, queue) = Backend::new("log", log.format, log.mode.clone(), log.truncate);
    let worker = tokio::spawn(run(queue, output, log.clone()));
    Ok((backend, worker))
}

enum Output {
    Stdout,
    File(LogFile),
}

impl Output {
    /// Writes whole lines. Returns true if a new file was begun.
    fn write(&mut self, lines: &[u8]) -> io::Result<bool> {
        match self {
            Self::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(lines).and_then(|()| out.flush()).map(|()| false)
            }
            Self::File(file) => file.write(lines),
        }
    }
}

async fn run(mut queue: mpsc::Receiver<Queued>, output: Output, log: AuditLog) {
    let output = Arc::new(Mutex::new(output));
    let batch = match &log.mode {
        AuditMode::Batch(batch) => Some(batch),
        AuditMode::Blocking | AuditMode::BlockingStrict => None,
    };
    let mut throttle =
        batch.and_then(|b| b.throttle).map(|limit| Throttle::new(limit, tokio::time::Instant::now()));
    let mut tidying: Option<JoinHandle<()>> = None;
    let mut carried = None;
    loop {
        let events = match batch {
            Some(limits @ AuditBatch { max_size: 2.., .. }) => {
                next_batch(&mut queue, limits, None, &mut carried).await
            }
            _ => {
                let mut events = Vec::new();
                (queue.recv_many(&mut events, LINES).await > 0).then_some(events)
            }
        };
        let Some(events) = events else { break };
        if let Some(throttle) = &mut throttle {
            tokio::time::sleep_until(throttle.take(tokio::time::Instant::now())).await;
        }
        let target = Arc::clone(&output);
        let lines: Vec<_> = events.iter().map(|event| event.line.clone()).collect();
        let written = tokio::task::spawn_blocking(move || {
            let mut output = target.lock().unwrap_or_else(PoisonError::into_inner);
            lines.iter().map(|line| output.write(line)).collect::<Vec<_>>()
        })
        .await
        .unwrap_or_default();
        let mut rotated = false;
        let mut results = written.into_iter();
        for event in events {
            let stored = match results.next() {
                Some(Ok(begun)) => {
                    rotated |= begun;
                    true
                }
                Some(Err(error)) => {
                    metrics::failed("log", 1, &error);
                    false
                }
                None => {
                    metrics::failed("log", 1, &"the writer panicked");
                    false
                }
            };
            event.finish(stored);
        }
        if rotated && tidying.as_ref().is_none_or(JoinHandle::is_finished) {
            let log = log.clone();
            tidying = Some(tokio::task::spawn_blocking(move || tidy(&log, Timestamp::now())));
        }
    }
    if let Some(tidying) = tidying {
        let _ = tidying.await;
    }
}

/// The file that is written now.
struct LogFile {
    path: PathBuf,
    file: File,
    size: u64,
    /// Zero is no limit.
    max_bytes: u64,
}

impl LogFile {
    fn open(path: PathBuf, max_bytes: u64) -> io::Result<Self> {
        if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path)?;
        let size = file.metadata()?.len();
        Ok(Self { path, file, size, max_bytes })
    }

    fn write(&mut self, lines: &[u8]) -> io::Result<bool> {
        let length = lines.len() as u64;
        let mut rotated = false;
        if self.max_bytes > 0 {
            if length > self.max_bytes {
                let why = format!("write length {length} exceeds maximum file size {}", self.max_bytes);
                return Err(io::Error::other(why));
            }
            if self.size > 0 && self.size + length > self.max_bytes {
                self.rotate(Timestamp::now())?;
                rotated = true;
            }
        }
        self.file.write_all(lines)?;
        self.size += length;
        Ok(rotated)
    }

    /// Begins a new file with the owner and mode of the old one, which gets the time into its name.
    fn rotate(&mut self, now: Timestamp) -> io::Result<()> {
        let old = self.file.metadata()?;
        std::fs::rename(&self.path, backup_name(&self.path, now))?;
        let mode = old.permissions().mode() & 0o777;
        let file = OpenOptions::new().create(true).append(true).mode(mode).open(&self.path)?;
        let new = file.metadata()?;
        if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
            std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()))?;
        }
        self.file = file;
        self.size = 0;
        Ok(())
    }
}

const TIME: &str = "%Y-%m-%dT%H-%M-%S%.3f";

/// A file's name before its extension, and the extension with its dot.
fn name_parts(path: &Path) -> (String, String) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match name.rfind('.') {
        Some(at) => (name[..at].to_owned(), name[at..].to_owned()),
        None => (name, String::new()),
    }
}

fn backup_name(path: &Path, now: Timestamp) -> PathBuf {
    let (stem, extension) = name_parts(path);
    let time = now.to_zoned(TimeZone::UTC).strftime("%Y-%m-%dT%H-%M-%S.%3f").to_string();
    path.with_file_name(format!("{stem}-{time}{extension}"))
}

/// An old file of a log.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Backup {
    name: String,
    time: Timestamp,
}

/// When a file was an old one of the log at `path`. None for other files.
fn backup_time(path: &Path, name: &str) -> Option<Timestamp> {
    let (stem, extension) = name_parts(path);
    let name = name.strip_suffix(".gz").unwrap_or(name);
    let time = name.strip_prefix(&stem)?.strip_prefix('-')?.strip_suffix(&extension)?;
    let time = DateTime::strptime(TIME, time).ok()?;
    time.to_zoned(TimeZone::UTC).ok().map(|time| time.timestamp())
}

/// The old files to remove, and those to compress.
fn plan(mut backups: Vec<Backup>, log: &AuditLog, now: Timestamp) -> (Vec<String>, Vec<String>) {
    backups.sort_by_key(|backup| std::cmp::Reverse(backup.time));
    let (mut remove, mut keep) = (Vec::new(), Vec::new());
    // A file and its compressed copy count as one.
    let mut times: Vec<Timestamp> = Vec::new();
    for backup in backups {
        if times.last() != Some(&backup.time) {
            times.push(backup.time);
        }
        let excess = log.max_backups > 0 && times.len() > log.max_backups;
        let seconds = now.as_second() - backup.time.as_second();
        let expired = log.max_age > 0 && seconds > i64::from(log.max_age) * 86_400;
        if excess || expired { remove.push(backup.name) } else { keep.push(backup.name) }
    }
    keep.retain(|name| log.compress && !name.ends_with(".gz"));
    (remove, keep)
}

/// Removes old files that are too many or too old, and compresses the others if that is wanted.
fn tidy(log: &AuditLog, now: Timestamp) {
    let Some(path) = &log.path else { return };
    let directory = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => {
            tracing::warn!(%error, "cannot list the old files of the audit log");
            return;
        }
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let backups = names.filter_map(|name| backup_time(path, &name).map(|time| Backup { name, time }));
    let (remove, compressed) = plan(backups.collect(), log, now);
    for name in remove {
        if let Err(error) = std::fs::remove_file(directory.join(&name)) {
            tracing::warn!(%error, name, "cannot remove an old file of the audit log");
        }
    }
    for name in compressed {
        if let Err(error) = compress(&directory.join(&name)) {
            tracing::warn!(%error, name, "cannot compress an old file of the audit log");
        }
    }
}

fn compress(path: &Path) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".gz");
    let target = PathBuf::from(name);
    let mut source = File::open(path)?;
    let mode = source.metadata()?.permissions().mode() & 0o777;
    let out = OpenOptions::new().create(true).truncate(true).write(true).mode(mode).open(&target)?;
    let mut encoder = GzEncoder::new(out, Compression::default());
    let copied = io::copy(&mut source, &mut encoder).and_then(|_| encoder.finish());
    match copied {
        Ok(_) => std::fs::remove_file(path),
        Err(error) => {
            // The whole file is still there; a part of its copy helps nobody.
            let _ = std::fs::remove_file(&target);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(path: &Path) -> AuditLog {
        AuditLog {
            path: Some(path.to_owned()),
            max_age: 0,
            max_backups: 0,
            max_size: 0,
            compress: false,
            format: AuditFormat::Json,
            mode: AuditMode::Blocking,
            truncate: None,
        }
    }

    #[test]
    fn old_files_are_told_by_the_time_in_their_names() {
        let path = Path::new("/x/audit.log");
        let time: Timestamp = "2026-01-02T03:04:05.678Z".parse().unwrap();
        let name = backup_name(path, time);
        assert_eq!(name, Path::new("/x/audit-2026-01-02T03-04-05.678.log"));
        for (name, is_backup) in [
            ("audit-2026-01-02T03-04-05.678.log", true),
            ("audit-2026-01-02T03-04-05.678.log.gz", true),
            ("audit.log", false),
            ("audit-2026.log", false),
            ("other-2026-01-02T03-04-05.678.log", false),
        ] {
            assert_eq!(backup_time(path, name).is_some_and(|t| t == time), is_backup, "{name}");
        }
    }

    #[test]
    fn the_newest_files_stay() {
        let now: Timestamp = "2026-01-10T00:00:00Z".parse().unwrap();
        let backup = |day: i8, end: &str| Backup {
            name: format!("{day}{end}"),
            time: format!("2026-01-0{day}T00:00:00Z").parse().unwrap(),
        };
        let all = || vec![backup(1, ".gz"), backup(5, ""), backup(3, ".gz"), backup(3, "")];
        let base = log(Path::new("/x/a.log"));
        /// Backups, age and compression; the files to remove and to compress.
        type Row = (usize, u32, bool, &'static [&'static str], &'static [&'static str]);
        let rows: &[Row] = &[
            (0, 0, false, &[], &[]),
            (2, 0, false, &["1.gz"], &[]),
            (1, 0, true, &["3.gz", "3", "1.gz"], &["5"]),
            (0, 6, false, &["3.gz", "3", "1.gz"], &[]),
            (0, 0, true, &[], &["5", "3"]),
        ];
        for (max_backups, max_age, compress, removed, compressed) in rows {
            let log = AuditLog {
                max_backups: *max_backups,
                max_age: *max_age,
                compress: *compress,
                ..base.clone()
            };
            let (mut remove, compress) = plan(all(), &log, now);
            let mut removed: Vec<&str> = removed.to_vec();
            removed.sort_unstable();
            remove.sort_unstable();
            assert_eq!(
                (remove, compress),
                (
                    removed.iter().map(|s| s.to_string()).collect(),
                    compressed.iter().map(|s| s.to_string()).collect()
                )
            );
        }
    }

    #[test]
    fn a_full_file_is_put_away_and_can_be_read_compressed() {
        use std::io::Read;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/audit.log");
        let mut file = LogFile::open(path.clone(), 10).unwrap();
        assert!(!file.write(b"12345\n").unwrap());
        assert!(file.write(b"67890\n").unwrap());
        assert!(file.write(b"12345678901").is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"67890\n");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        // An existing file is continued, and put away when it is full.
        let mut file = LogFile::open(path.clone(), 10).unwrap();
        assert_eq!(file.size, 6);
        tidy(&AuditLog { compress: true, ..log(&path) }, Timestamp::now());
        let names = || {
            let entries = std::fs::read_dir(path.parent().unwrap()).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let compressed = names().into_iter().find(|name| name.ends_with(".gz")).expect("a compressed file");
        let mut text = String::new();
        let bytes = File::open(path.with_file_name(&compressed)).unwrap();
        assert_eq!(bytes.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        flate2::read::GzDecoder::new(bytes).read_to_string(&mut text).unwrap();
        assert_eq!(text, "12345\n");
        assert!(file.write(b"abcdef\n").unwrap());
        assert_eq!(names().len(), 3);
    }
}
