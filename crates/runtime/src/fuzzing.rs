//! Parsers of untrusted bytes that only the fuzzer calls from outside. Not part of the interface.

use crate::image::ImageError;
use crate::image::tar_reader::{TarReader, read_error};
use crate::streaming::spdy_codec::{HEADER_LENGTH, Reader, SpdyError, head};
use bytes::Bytes;
use std::io;

/// Reads SPDY frames until the bytes end or one is refused; returns their number.
pub fn spdy(mut bytes: &[u8]) -> Result<usize, SpdyError> {
    let mut reader = Reader::default();
    let mut frames = 0;
    while let Some((first, rest)) = bytes.split_first_chunk::<HEADER_LENGTH>() {
        let head = head(first)?;
        let Some((body, rest)) = rest.split_at_checked(head.length) else { break };
        reader.frame(head, Bytes::copy_from_slice(body))?;
        frames += 1;
        bytes = rest;
    }
    Ok(frames)
}

/// Reads a layer's archive to its end; returns the total size of its files.
pub fn layer(bytes: &[u8]) -> Result<u64, ImageError> {
    let mut archive = TarReader::new(bytes);
    let mut content = 0;
    while archive.next()?.is_some() {
        content += io::copy(&mut archive, &mut io::sink()).map_err(read_error)?;
    }
    Ok(content)
}
