//! SPDY/3.1 frames: bytes to values and back. No I/O.

use std::collections::BTreeMap;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use hyper::body::Bytes;

use super::dictionary::dictionary;

pub const HEADER_LENGTH: usize = 8;
/// Longest frame accepted.
pub const MAX_FRAME: usize = 1 << 20;
/// Longest header block after decompression.
const MAX_HEADERS: usize = 64 * 1024;

const VERSION: u16 = 3;
const FLAG_FIN: u8 = 1;

pub type Headers = BTreeMap<String, String>;

/// A frame as far as Kubernetes' streams need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    Syn {
        id: u32,
        headers: Headers,
        fin: bool,
    },
    Reply {
        id: u32,
        headers: Headers,
        fin: bool,
    },
    Data {
        id: u32,
        bytes: Bytes,
        fin: bool,
    },
    Reset {
        id: u32,
        status: u32,
    },
    Ping {
        id: u32,
    },
    GoAway {
        last: u32,
        status: u32,
    },
    /// Settings, window updates, further headers: nothing to do.
    Other,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SpdyError {
    #[error("SPDY version {0} is not 3")]
    Version(u16),
    #[error("SPDY frame of {0} bytes is too long")]
    TooLong(usize),
    #[error("SPDY frame is malformed: {0}")]
    Malformed(&'static str),
}

/// The header of a frame: its first eight bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    first: u32,
    flags: u8,
    pub length: usize,
}

pub fn head(bytes: &[u8; HEADER_LENGTH]) -> Result<Head, SpdyError> {
    let first = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let length = u32::from_be_bytes([0, bytes[5], bytes[6], bytes[7]]) as usize;
    if length > MAX_FRAME {
        return Err(SpdyError::TooLong(length));
    }
    Ok(Head { first, flags: bytes[4], length })
}

/// Reads frames; header compression makes it remember.
pub struct Reader {
    zlib: Decompress,
}

impl Default for Reader {
    fn default() -> Self {
        Self { zlib: Decompress::new(true) }
    }
}

fn number(bytes: &[u8], at: usize) -> Result<u32, SpdyError> {
    let four = bytes.get(at..at + 4).and_then(|slice| slice.try_into().ok());
    four.map(u32::from_be_bytes).ok_or(SpdyError::Malformed("it ends too early"))
}

const ID: u32 = 0x7fff_ffff;

impl Reader {
    pub fn frame(&mut self, head: Head, body: Bytes) -> Result<Frame, SpdyError> {
        let fin = head.flags & FLAG_FIN != 0;
        if head.first >> 31 == 0 {
            return Ok(Frame::Data { id: head.first & ID, bytes: body, fin });
        }
        let version = (head.first >> 16 & 0x7fff) as u16;
        if version != VERSION {
            return Err(SpdyError::Version(version));
        }
        Ok(match head.first & 0xffff {
            1 => {
                let id = number(&body, 0)? & ID;
                let block = body.get(10..).ok_or(SpdyError::Malformed("it ends too early"))?;
                Frame::Syn { id, headers: self.headers(block)?, fin }
            }
            2 => {
                let id = number(&body, 0)? & ID;
                let block = body.get(4..).ok_or(SpdyError::Malformed("it ends too early"))?;
                Frame::Reply { id, headers: self.headers(block)?, fin }
            }
            3 => Frame::Reset { id: number(&body, 0)? & ID, status: number(&body, 4)? },
            6 => Frame::Ping { id: number(&body, 0)? },
            7 => Frame::GoAway { last: number(&body, 0)? & ID, status: number(&body, 4)? },
            8 => {
                // The block must go through the decompressor, or the next one cannot be read.
                let block = body.get(4..).ok_or(SpdyError::Malformed("it ends too early"))?;
                self.headers(block)?;
                Frame::Other
            }
            _ => Frame::Other,
        })
    }

    fn headers(&mut self, block: &[u8]) -> Result<Headers, SpdyError> {
        let plain = self.inflate(block)?;
        let count = number(&plain, 0)?;
        let mut at = 4;
        let mut headers = Headers::new();
        let text = |at: &mut usize| -> Result<String, SpdyError> {
            let length = number(&plain, *at)? as usize;
            *at += 4;
            let bytes =
                plain.get(*at..at.saturating_add(length)).ok_or(SpdyError::Malformed("it ends too early"))?;
            *at += length;
            String::from_utf8(bytes.to_vec()).map_err(|_| SpdyError::Malformed("a header is not text"))
        };
        for _ in 0..count {
            let name = text(&mut at)?.to_ascii_lowercase();
            let value = text(&mut at)?;
            headers.insert(name, value);
        }
        Ok(headers)
    }

    fn inflate(&mut self, mut block: &[u8]) -> Result<Vec<u8>, SpdyError> {
        let mut out = Vec::with_capacity(4096);
        loop {
            if out.len() == out.capacity() {
                if out.len() >= MAX_HEADERS {
                    return Err(SpdyError::Malformed("its headers are too long"));
                }
                out.reserve(out.len().max(1024));
            }
            let before = self.zlib.total_in();
            let result = self.zlib.decompress_vec(block, &mut out, FlushDecompress::Sync);
            let used = (self.zlib.total_in() - before) as usize;
            block = &block[used..];
            match result {
                Ok(Status::Ok | Status::BufError | Status::StreamEnd) => {
                    if block.is_empty() && out.len() < out.capacity() {
                        return Ok(out);
                    }
                    if used == 0 && out.len() < out.capacity() {
                        return Err(SpdyError::Malformed("its headers cannot be decompressed"));
                    }
                }
                Err(error) if error.needs_dictionary().is_some() => {
                    self.zlib
                        .set_dictionary(&dictionary())
                        .map_err(|_| SpdyError::Malformed("it uses an unknown dictionary"))?;
                }
                Err(_) => return Err(SpdyError::Malformed("its headers cannot be decompressed")),
            }
        }
    }
}

/// Writes frames; header compression makes it remember.
pub struct Writer {
    zlib: Compress,
}

impl Writer {
    pub fn new() -> Result<Self, SpdyError> {
        let mut zlib = Compress::new(Compression::fast(), true);
        zlib.set_dictionary(&dictionary()).map_err(|_| SpdyError::Malformed("no dictionary"))?;
        Ok(Self { zlib })
    }

    pub fn frame(&mut self, frame: &Frame) -> Result<Vec<u8>, SpdyError> {
        let flag = |fin: bool| if fin { FLAG_FIN } else { 0 };
        Ok(match frame {
            Frame::Data { id, bytes, fin } => {
                let mut out = Vec::with_capacity(HEADER_LENGTH + bytes.len());
                out.extend((id & ID).to_be_bytes());
                out.push(flag(*fin));
                out.extend(&(bytes.len() as u32).to_be_bytes()[1..]);
                out.extend_from_slice(bytes);
                out
            }
            Frame::Syn { id, headers, fin } => {
                let mut body = id.to_be_bytes().to_vec();
                body.extend([0; 6]);
                body.extend(self.deflate(headers)?);
                control(1, flag(*fin), &body)
            }
            Frame::Reply { id, headers, fin } => {
                let mut body = id.to_be_bytes().to_vec();
                body.extend(self.deflate(headers)?);
                control(2, flag(*fin), &body)
            }
            Frame::Reset { id, status } => control(3, 0, &pair(*id, *status)),
            Frame::Ping { id } => control(6, 0, &id.to_be_bytes()),
            Frame::GoAway { last, status } => control(7, 0, &pair(*last, *status)),
            Frame::Other => Vec::new(),
        })
    }

    fn deflate(&mut self, headers: &Headers) -> Result<Vec<u8>, SpdyError> {
        let mut plain = (headers.len() as u32).to_be_bytes().to_vec();
        for (name, value) in headers {
            for text in [name, value] {
                plain.extend((text.len() as u32).to_be_bytes());
                plain.extend(text.as_bytes());
            }
        }
        let mut out = Vec::with_capacity(plain.len() + 64);
        let mut rest = &plain[..];
        loop {
            let before = self.zlib.total_in();
            self.zlib
                .compress_vec(rest, &mut out, FlushCompress::Sync)
                .map_err(|_| SpdyError::Malformed("headers cannot be compressed"))?;
            rest = &rest[(self.zlib.total_in() - before) as usize..];
            if rest.is_empty() && out.len() < out.capacity() {
                return Ok(out);
            }
            out.reserve(256);
        }
    }
}

fn pair(first: u32, second: u32) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&first.to_be_bytes());
    out[4..].copy_from_slice(&second.to_be_bytes());
    out
}

fn control(kind: u16, flags: u8, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LENGTH + body.len());
    out.extend((0x8000 | VERSION).to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.push(flags);
    out.extend(&(body.len() as u32).to_be_bytes()[1..]);
    out.extend(body);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(reader: &mut Reader, bytes: &[u8]) -> Result<Frame, SpdyError> {
        let head = head(bytes[..8].try_into().unwrap())?;
        assert_eq!(bytes.len(), 8 + head.length);
        reader.frame(head, Bytes::copy_from_slice(&bytes[8..]))
    }

    #[test]
    fn frames_survive_the_wire() {
        let (mut writer, mut reader) = (Writer::new().unwrap(), Reader::default());
        let headers = Headers::from([("streamtype".into(), "stdin".into()), ("port".into(), "80".into())]);
        for frame in [
            Frame::Syn { id: 1, headers: headers.clone(), fin: false },
            Frame::Reply { id: 1, headers: Headers::new(), fin: true },
            Frame::Syn { id: 3, headers, fin: true },
            Frame::Data { id: 3, bytes: Bytes::from_static(b"hello"), fin: true },
            Frame::Reset { id: 3, status: 5 },
            Frame::Ping { id: 9 },
            Frame::GoAway { last: 3, status: 0 },
        ] {
            let bytes = writer.frame(&frame).unwrap();
            assert_eq!(read(&mut reader, &bytes), Ok(frame));
        }
    }

    #[test]
    fn the_first_block_names_the_dictionary() {
        let bytes = Writer::new()
            .unwrap()
            .frame(&Frame::Reply { id: 1, headers: Headers::new(), fin: false })
            .unwrap();
        assert_eq!(bytes[..4], [0x80, 3, 0, 2]);
        assert_eq!(bytes[14..18], [0xe3, 0xc6, 0xa7, 0xc2]);
    }

    #[test]
    fn long_headers_survive_and_too_long_ones_do_not() {
        let (mut writer, mut reader) = (Writer::new().unwrap(), Reader::default());
        let noise: String = (0..20_000u32)
            .map(|n| char::from(b'a' + (n.wrapping_mul(2_654_435_761) >> 27) as u8 % 26))
            .collect();
        let frame = Frame::Syn { id: 1, headers: Headers::from([("x".into(), noise)]), fin: false };
        assert_eq!(read(&mut reader, &writer.frame(&frame).unwrap()), Ok(frame));
        let bomb =
            Frame::Syn { id: 3, headers: Headers::from([("x".into(), "a".repeat(1 << 20))]), fin: false };
        assert!(read(&mut reader, &writer.frame(&bomb).unwrap()).is_err());
        assert_eq!(head(&[0, 0, 0, 1, 0, 255, 255, 255]), Err(SpdyError::TooLong(0xff_ffff)));
    }

    proptest! {
        #[test]
        fn nonsense_is_an_error_not_a_panic(kind in 0u8..12, body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = vec![0x80, 3, 0, kind, 0];
            bytes.extend(&(body.len() as u32).to_be_bytes()[1..]);
            bytes.extend(&body);
            let _ = read(&mut Reader::default(), &bytes);
        }
    }
}
