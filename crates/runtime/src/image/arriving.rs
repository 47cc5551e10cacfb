//! Blobs that are read while they arrive.

use std::fs::File;
use std::io::{self, Read, Take};

use bytes::{Buf, Bytes};
use tokio::sync::mpsc;

use super::content::BlobWriter;
use super::{Digest, ImageError};

/// A message from the sender of a blob.
pub(crate) enum Piece {
    /// It begins anew although it was asked to go on; only before any data.
    Restart,
    Data(Bytes),
    End,
}

/// A blob that is being downloaded. The reader gets first the part that an earlier attempt left and then
/// the new data. New data is written to the store before the reader gets it, so an interrupted download
/// continues from there.
pub(crate) struct Arriving<'a> {
    writer: BlobWriter<'a>,
    pieces: mpsc::Receiver<Piece>,
    /// The part that an earlier attempt left, until it was read. Only the first piece shows if it is still
    /// valid.
    earlier: Option<Take<File>>,
    /// The piece that is being read.
    current: Bytes,
    begun: bool,
    ended: bool,
}

impl<'a> Arriving<'a> {
    pub(crate) fn new(writer: BlobWriter<'a>, pieces: mpsc::Receiver<Piece>) -> Result<Self, ImageError> {
        let written = writer.written();
        let earlier = if written > 0 { Some(writer.reader()?.take(written)) } else { None };
        Ok(Self { writer, pieces, earlier, current: Bytes::new(), begun: false, ended: false })
    }

    /// Takes in the rest, which nobody needs to read, and checks the whole. The blob becomes part of the store if it
    /// is to be kept there, else it stays where it can be found and removed.
    pub(crate) fn finish(mut self, expected: &Digest, keep: bool) -> Result<(), ImageError> {
        while !self.ended {
            self.next()?;
        }
        match keep {
            true => self.writer.commit(Some(expected)).map(drop),
            false => self.writer.settle(expected),
        }
    }

    fn next(&mut self) -> Result<(), ImageError> {
        let piece = self.pieces.blocking_recv();
        match piece.ok_or_else(|| ImageError::Interrupted("the download ended early".into()))? {
            Piece::Restart if self.begun => {
                return Err(ImageError::Interrupted("the sender starts over".into()));
            }
            Piece::Restart => {
                self.earlier = None;
                self.writer.restart()?;
            }
            Piece::Data(bytes) => {
                self.writer.write(&bytes)?;
                self.current = bytes;
            }
            Piece::End => self.ended = true,
        }
        self.begun = true;
        Ok(())
    }
}

impl Read for Arriving<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.begun {
            self.next()?;
        }
        if let Some(file) = &mut self.earlier {
            match file.read(buffer)? {
                0 => self.earlier = None,
                count => return Ok(count),
            }
        }
        while self.current.is_empty() {
            if self.ended {
                return Ok(0);
            }
            self.next()?;
        }
        let count = buffer.len().min(self.current.len());
        self.current.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::content::ContentStore;

    /// The part of an earlier attempt, the sender's messages, and the data that the reader gets; `None` if
    /// reading fails.
    #[test]
    fn reading_while_it_arrives() {
        let data = |text: &'static str| Piece::Data(Bytes::from_static(text.as_bytes()));
        for (earlier, pieces, expected) in [
            ("", vec![data("hello "), data("world"), Piece::End], Some("hello world")),
            ("hello ", vec![data("world"), Piece::End], Some("hello world")),
            ("hello world", vec![Piece::End], Some("hello world")),
            ("hallo", vec![Piece::Restart, data("hello world"), Piece::End], Some("hello world")),
            ("", vec![Piece::End], Some("")),
            ("hello ", vec![data("there"), Piece::End], None),
            ("", vec![data("hello ")], None),
            ("", vec![data("hello "), Piece::Restart, data("hello world"), Piece::End], None),
        ] {
            let root = tempfile::tempdir().unwrap();
            let store = ContentStore::open(root.path()).unwrap();
            let digest = Digest::of(if expected == Some("") { b"" } else { b"hello world" });
            store.resume(&digest).unwrap().write(earlier.as_bytes()).unwrap();
            let (sender, queue) = mpsc::channel(8);
            pieces.into_iter().for_each(|piece| sender.try_send(piece).ok().unwrap());
            drop(sender);
            let mut blob = Arriving::new(store.resume(&digest).unwrap(), queue).unwrap();
            let mut text = String::new();
            let read = blob.read_to_string(&mut text).is_ok() && blob.finish(&digest, true).is_ok();
            assert_eq!(read.then_some(text.as_str()), expected);
            assert_eq!(store.has(&digest), expected.is_some(), "{expected:?}");
        }
    }

    #[test]
    fn what_is_not_kept_is_found_and_removed() {
        let root = tempfile::tempdir().unwrap();
        let store = ContentStore::open(root.path()).unwrap();
        let digest = Digest::of(b"hello");
        let (sender, queue) = mpsc::channel(2);
        sender.try_send(Piece::Data(Bytes::from_static(b"hello"))).ok().unwrap();
        sender.try_send(Piece::End).ok().unwrap();
        let blob = Arriving::new(store.resume(&digest).unwrap(), queue).unwrap();
        blob.finish(&digest, false).unwrap();
        assert!(!store.has(&digest));
        assert_eq!(store.resume(&digest).unwrap().written(), 5);
        store.remove(&digest).unwrap();
        assert_eq!(store.resume(&digest).unwrap().written(), 0);
    }
}
