//! Streams a container's log, following it through rotation until the container has ended.

use super::changes::Changes;
use super::line::{Formatter, LogOptions};
use bytes::Bytes;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncSeekExt, SeekFrom};
use tokio::sync::mpsc;

const CHUNK: usize = 32 * 1024;
/// A line longer than this is not CRI's; it is given up.
const MAX_LINE: usize = 1 << 20;

/// Tells a follower that the container has ended: nothing more will be written.
#[async_trait::async_trait]
pub(crate) trait LogEnd: Send {
    async fn ended(&mut self);
}

/// Sends the log at `path`. Ends when it has all been sent, when the reader is gone, or, following, when the
/// container has ended and everything it wrote has been sent.
pub(crate) async fn stream(
    path: PathBuf,
    options: LogOptions,
    mut end: Box<dyn LogEnd>,
    out: mpsc::Sender<Bytes>,
) -> io::Result<()> {
    let mut changes = path.parent().filter(|_| options.follow).map(Changes::of);
    let mut file = open(&path).await?;
    let mut formatter = Formatter::new(&options);
    let mut pending = Vec::new();
    if let Some(tail) = options.tail {
        let length = file.metadata().await?.len();
        let offset = tail_offset(&mut file, tail, length).await?;
        file.seek(SeekFrom::Start(offset)).await?;
        if !options.follow {
            // Lines that were written since are more than was asked for.
            drain(&mut file.take(length - offset), &mut pending, &mut formatter, &out).await?;
            return Ok(());
        }
    }
    let mut ended = false;
    let ending = end.ended();
    tokio::pin!(ending);
    loop {
        loop {
            if !drain(&mut file, &mut pending, &mut formatter, &out).await? {
                return Ok(());
            }
            match reopen(&path, &file).await? {
                // Lines written between our last read and the rotation are still in the old file.
                Some(next) => {
                    if !drain(&mut file, &mut pending, &mut formatter, &out).await? {
                        return Ok(());
                    }
                    file = next;
                }
                None => break,
            }
        }
        let Some(changes) = changes.as_mut().filter(|_| !ended) else { return Ok(()) };
        tokio::select! {
            () = changes.next() => {}
            // One more pass takes the last lines.
            () = &mut ending => ended = true,
            () = out.closed() => return Ok(()),
        }
    }
}

/// Sends the file's content beyond the present position. Returns false when the reader wants no more.
async fn drain(
    file: &mut (impl AsyncRead + Unpin),
    pending: &mut Vec<u8>,
    formatter: &mut Formatter,
    out: &mpsc::Sender<Bytes>,
) -> io::Result<bool> {
    let mut buffer = vec![0; CHUNK];
    loop {
        let n = file.read(&mut buffer).await?;
        if n == 0 {
            return Ok(true);
        }
        pending.extend_from_slice(&buffer[..n]);
        let mut text = Vec::with_capacity(n);
        let mut used = 0;
        let mut more = true;
        while let Some(length) = pending[used..].iter().position(|b| *b == b'\n') {
            more = formatter.push(&pending[used..used + length + 1], &mut text);
            used += length + 1;
            if !more {
                break;
            }
        }
        pending.drain(..used);
        if pending.len() > MAX_LINE {
            pending.clear();
        }
        if !text.is_empty() && out.send(Bytes::from(text)).await.is_err() {
            return Ok(false);
        }
        if !more {
            return Ok(false);
        }
    }
}

/// Opens a log. A FIFO in its place would keep a thread for good, a link would show another file: both are errors.
async fn open(path: &Path) -> io::Result<File> {
    let path = path.to_owned();
    let opened = tokio::task::spawn_blocking(move || ferrite_hostfs::open_regular(&path)).await;
    Ok(File::from_std(opened.map_err(io::Error::other)??))
}

/// The new file when the log was rotated under the reader.
async fn reopen(path: &Path, current: &File) -> io::Result<Option<File>> {
    let here = current.metadata().await?;
    match tokio::fs::symlink_metadata(path).await {
        Ok(there) if (there.dev(), there.ino()) != (here.dev(), here.ino()) => Ok(Some(open(path).await?)),
        _ => Ok(None),
    }
}

/// Where the last `lines` lines of the first `length` bytes begin.
async fn tail_offset(file: &mut File, lines: u64, length: u64) -> io::Result<u64> {
    if lines == 0 {
        return Ok(length);
    }
    let (mut position, mut seen) = (length, 0u64);
    let mut buffer = vec![0; CHUNK];
    let mut last = true;
    while position > 0 {
        let size = usize::try_from(position.min(CHUNK as u64)).unwrap_or(CHUNK);
        position -= size as u64;
        file.seek(SeekFrom::Start(position)).await?;
        file.read_exact(&mut buffer[..size]).await?;
        for (i, byte) in buffer[..size].iter().enumerate().rev() {
            // The newline that ends the log begins no line.
            if *byte == b'\n' && !std::mem::take(&mut last) {
                seen += 1;
                if seen == lines {
                    return Ok(position + i as u64 + 1);
                }
            }
            last = false;
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use tokio::sync::oneshot;

    struct Ends(Option<oneshot::Receiver<()>>);

    #[async_trait::async_trait]
    impl LogEnd for Ends {
        async fn ended(&mut self) {
            match self.0.take() {
                Some(receiver) => {
                    let _ = receiver.await;
                }
                None => std::future::pending().await,
            }
        }
    }

    async fn read(path: &Path, options: LogOptions) -> String {
        let (sender, mut receiver) = mpsc::channel(64);
        stream(path.to_path_buf(), options, Box::new(Ends(None)), sender).await.unwrap();
        let mut all = Vec::new();
        while let Some(bytes) = receiver.recv().await {
            all.extend_from_slice(&bytes);
        }
        String::from_utf8(all).unwrap()
    }

    fn line(text: &str) -> String {
        format!("2024-01-01T00:00:00Z stdout F {text}\n")
    }

    #[tokio::test]
    async fn only_a_regular_file_is_a_log() {
        let dir = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        for name in ["pipe", "link"] {
            let (sender, mut receiver) = mpsc::channel(4);
            let end = Box::new(Ends(None));
            let streamed = stream(dir.path().join(name), LogOptions::default(), end, sender).await;
            assert!(streamed.is_err() && receiver.recv().await.is_none(), "{name}");
        }
    }

    #[tokio::test]
    async fn the_end_of_a_log_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let text: String = (0..5000).map(|i| line(&i.to_string())).collect();
        std::fs::write(&path, text).unwrap();
        for (tail, expected) in [(0, ""), (1, "4999\n"), (3, "4997\n4998\n4999\n")] {
            let options = LogOptions { tail: Some(tail), ..LogOptions::default() };
            assert_eq!(read(&path, options).await, expected);
        }
        // More than one piece is in the channel before the end is reached: lines that come meanwhile are not for this reader.
        let (sender, mut receiver) = mpsc::channel(1);
        let options = LogOptions { tail: Some(4000), ..LogOptions::default() };
        let reading = tokio::spawn(stream(path.clone(), options, Box::new(Ends(None)), sender));
        let mut got = receiver.recv().await.unwrap().to_vec();
        std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(line("late").as_bytes())
            .unwrap();
        while let Some(bytes) = receiver.recv().await {
            got.extend_from_slice(&bytes);
        }
        reading.await.unwrap().unwrap();
        let got = String::from_utf8(got).unwrap();
        assert_eq!((got.lines().count(), got.lines().last()), (4000, Some("4999")));
        let all = read(&path, LogOptions { tail: Some(100_000), ..LogOptions::default() }).await;
        assert_eq!(all.lines().count(), 5001);
    }

    #[tokio::test]
    async fn a_follower_sees_rotation_and_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, line("a")).unwrap();
        let (sender, mut receiver) = mpsc::channel(64);
        let (stop, stopped) = oneshot::channel();
        let options = LogOptions { follow: true, ..LogOptions::default() };
        let task = tokio::spawn(stream(path.clone(), options, Box::new(Ends(Some(stopped))), sender));
        assert_eq!(receiver.recv().await.unwrap(), "a\n");
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(line("b").as_bytes()).unwrap();
        assert_eq!(receiver.recv().await.unwrap(), "b\n");
        std::fs::rename(&path, dir.path().join("0.log.1")).unwrap();
        std::fs::write(&path, line("c")).unwrap();
        assert_eq!(receiver.recv().await.unwrap(), "c\n");
        stop.send(()).unwrap();
        assert!(receiver.recv().await.is_none());
        task.await.unwrap().unwrap();
    }
}
