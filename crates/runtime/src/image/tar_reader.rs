//! A tar stream, entry by entry, with bounds on everything a header can ask for.
//!
//! Only the path fields of a header are left to the `tar` crate. Its reader buffers whatever an extended
//! header announces and splits extended attributes at newlines, which binary values contain; here the size
//! is limited and the length decides.

use std::io::{self, Read};

use super::ImageError;

const BLOCK: usize = 512;
/// Long names and extended attributes of one entry together.
const MAX_EXTENSION: u64 = 1 << 20;
/// As the kernel: a longer path could not be created.
const MAX_PATH: usize = 4096;

/// Where a header keeps its numbers.
mod fields {
    use std::ops::Range;
    pub(super) const MODE: Range<usize> = 100..108;
    pub(super) const UID: Range<usize> = 108..116;
    pub(super) const GID: Range<usize> = 116..124;
    pub(super) const SIZE: Range<usize> = 124..136;
    pub(super) const MTIME: Range<usize> = 136..148;
    pub(super) const SUM: Range<usize> = 148..156;
    pub(super) const MAJOR: Range<usize> = 329..337;
    pub(super) const MINOR: Range<usize> = 337..345;
}

/// The type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Symlink,
    HardLink,
    Char,
    Block,
    Fifo,
}

/// One entry's metadata; its content is read from the [`TarReader`].
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Seconds and nanoseconds since the epoch.
    pub(crate) mtime: (i64, u32),
    pub(crate) size: u64,
    pub(crate) device: (u32, u32),
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The extended headers' values for the next entry.
#[derive(Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    bytes: u64,
}

/// Reads entries in order. Reading from it gives the current entry's content.
pub(crate) struct TarReader<R> {
    inner: R,
    /// Content of the current entry not read yet.
    left: u64,
    /// Zeros between that content and the next header.
    padding: u64,
}

impl<R: Read> TarReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, left: 0, padding: 0 }
    }

    /// Returns the reader behind the last entry.
    pub(crate) fn into_inner(self) -> R {
        self.inner
    }

    /// The next entry; nothing at the end of the archive. Content left unread is skipped.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, ImageError> {
        let mut extension = Extension::default();
        loop {
            let skip = self.left + self.padding;
            (self.left, self.padding) = (0, 0);
            let skipped = io::copy(&mut (&mut self.inner).take(skip), &mut io::sink()).map_err(read_error)?;
            if skipped < skip {
                return Err(invalid("it ends in the middle of an entry"));
            }
            let Some(block) = self.block()? else { return Ok(None) };
            let header = tar::Header::from_byte_slice(&block);
            check_sum(&block)?;
            let size = unsigned(&block[fields::SIZE])?;
            if size > u64::MAX / 4 {
                return Err(invalid("an entry's size is beyond all bounds"));
            }
            self.left = size;
            self.padding = size.next_multiple_of(BLOCK as u64) - size;
            match block[156] {
                b'x' => extension.pax(&self.small(size, &extension)?)?,
                b'L' => extension.path = Some(trim(self.small(size, &extension)?)),
                b'K' => extension.link = Some(trim(self.small(size, &extension)?)),
                b'g' => {}
                kind => return entry(header, kind, size, extension).map(Some),
            }
            extension.bytes += size;
        }
    }

    /// The next header block; nothing when the end marker or the end of the stream was reached.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, ImageError> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.inner.read(&mut block[filled..]) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(error)),
            }
        }
        match filled {
            BLOCK if block.iter().any(|byte| *byte != 0) => Ok(Some(block)),
            0 | BLOCK => Ok(None),
            _ => Err(invalid("it ends in the middle of a header")),
        }
    }

    fn small(&mut self, size: u64, extension: &Extension) -> Result<Vec<u8>, ImageError> {
        if size + extension.bytes > MAX_EXTENSION {
            return Err(ImageError::Limit { what: "extended tar header", limit: MAX_EXTENSION });
        }
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes).map_err(read_error)?;
        Ok(bytes)
    }
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        let read = self.inner.read(&mut buffer[..want])?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= read as u64;
        Ok(read)
    }
}

impl Extension {
    /// Records are `<length> <key>=<value>\n`, the length counting the whole record.
    fn pax(&mut self, mut bytes: &[u8]) -> Result<(), ImageError> {
        let bad = || invalid("malformed extended header");
        while !bytes.is_empty() {
            let space = bytes.iter().take(20).position(|byte| *byte == b' ').ok_or_else(bad)?;
            let length: usize = text(&bytes[..space])?.parse().map_err(|_| bad())?;
            let record = bytes.get(space + 1..length).ok_or_else(bad)?;
            let record = record.strip_suffix(b"\n").ok_or_else(bad)?;
            bytes = &bytes[length..];
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(bad)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(text(value)?.parse().map_err(invalid)?),
                b"uid" => self.uid = Some(text(value)?.parse().map_err(invalid)?),
                b"gid" => self.gid = Some(text(value)?.parse().map_err(invalid)?),
                b"mtime" => self.mtime = Some(timestamp(text(value)?).ok_or_else(bad)?),
                key if key.starts_with(b"GNU.sparse.") => {
                    return Err(ImageError::Unsupported("sparse files in an image layer".into()));
                }
                key => {
                    if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                        self.xattrs.push((name.to_vec(), value.to_vec()));
                    }
                }
            }
        }
        Ok(())
    }
}

fn entry(header: &tar::Header, kind: u8, size: u64, ext: Extension) -> Result<Entry, ImageError> {
    let path = ext.path.unwrap_or_else(|| header.path_bytes().into_owned());
    // Old archives mark a directory only by the slash at its end.
    let kind = match kind {
        b'0' | 0 | b'7' if path.ends_with(b"/") => Kind::Directory,
        b'0' | 0 | b'7' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' => Kind::Char,
        b'4' => Kind::Block,
        b'5' => Kind::Directory,
        b'6' => Kind::Fifo,
        b'S' => return Err(ImageError::Unsupported("sparse files in an image layer".into())),
        other => return Err(ImageError::Unsupported(format!("tar entry type {:?}", char::from(other)))),
    };
    if ext.size.is_some_and(|announced| announced != size) {
        return Err(ImageError::Unsupported("tar entries of 8 GiB or more".into()));
    }
    let link =
        ext.link.or_else(|| header.link_name_bytes().map(|link| link.into_owned())).unwrap_or_default();
    if path.len() > MAX_PATH || link.len() > MAX_PATH {
        return Err(ImageError::Limit { what: "length of a path in a layer", limit: MAX_PATH as u64 });
    }
    let block = header.as_bytes();
    let id = |field| u32::try_from(unsigned(&block[field])?).map_err(invalid);
    let mtime = match ext.mtime {
        Some(mtime) => mtime,
        None => (number(&block[fields::MTIME])?, 0),
    };
    let device = match kind {
        Kind::Char | Kind::Block => (id(fields::MAJOR)?, id(fields::MINOR)?),
        _ => (0, 0),
    };
    Ok(Entry {
        kind,
        path,
        link,
        mode: (unsigned(&block[fields::MODE])? & 0o7777) as u32,
        uid: ext.uid.map_or_else(|| id(fields::UID), Ok)?,
        gid: ext.gid.map_or_else(|| id(fields::GID), Ok)?,
        mtime,
        size,
        device,
        xattrs: ext.xattrs,
    })
}

/// `-1.5` is one and a half seconds before the epoch: minus two seconds plus half a second.
fn timestamp(text: &str) -> Option<(i64, u32)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos: u32 = digits.parse().ok()?;
    match whole.starts_with('-') && nanos > 0 {
        true => Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos)),
        false => Some((seconds, nanos)),
    }
}

fn check_sum(block: &[u8; BLOCK]) -> Result<(), ImageError> {
    let counted = |(n, byte): (usize, &u8)| if fields::SUM.contains(&n) { 32 } else { u64::from(*byte) };
    let sum: u64 = block.iter().enumerate().map(counted).sum();
    match unsigned(&block[fields::SUM]) {
        Ok(expected) if expected == sum => Ok(()),
        _ => Err(invalid("a header's check sum is wrong")),
    }
}

/// A numeric field: octal text between spaces and zero bytes, nothing meaning zero, or big-endian binary
/// in two's complement when the top bit is set.
fn number(field: &[u8]) -> Result<i64, ImageError> {
    let bad = || invalid("a numeric field is not a number");
    if let [first, rest @ ..] = field
        && first & 0x80 != 0
    {
        // The second bit is the sign; the first only marks the encoding.
        let start = if first & 0x40 != 0 { -1 } else { 0 };
        let start = start << 6 | i64::from(first & 0x3f);
        return rest.iter().try_fold(start, |value, byte| {
            value.checked_mul(256).map(|value| value | i64::from(*byte)).ok_or_else(bad)
        });
    }
    let text = field.split(|byte| *byte == 0).next().unwrap_or_default().trim_ascii();
    let text = std::str::from_utf8(text).map_err(|_| bad())?;
    if text.is_empty() {
        return Ok(0);
    }
    i64::from_str_radix(text, 8).map_err(|_| bad())
}

fn unsigned(field: &[u8]) -> Result<u64, ImageError> {
    u64::try_from(number(field)?).map_err(|_| invalid("a numeric field is negative"))
}

fn trim(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
        bytes.truncate(end);
    }
    bytes
}

fn text(bytes: &[u8]) -> Result<&str, ImageError> {
    std::str::from_utf8(bytes).map_err(invalid)
}

fn invalid(why: impl ToString) -> ImageError {
    ImageError::invalid("tar archive", why)
}

/// Maps a failed read of the stream to an error; limits and digests report through the reader.
pub(crate) fn read_error(error: io::Error) -> ImageError {
    ImageError::Io { what: "read the archive", path: Default::default(), source: error }.unwrap_io()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps() {
        for (text, want) in [
            ("0", Some((0, 0))),
            ("1.5", Some((1, 500_000_000))),
            ("-1.5", Some((-2, 500_000_000))),
            ("12.0000000019", Some((12, 1))),
            ("", None),
            ("1.x", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(timestamp(text), want, "{text}");
        }
    }

    #[test]
    fn numbers() {
        for (field, want) in [
            (b"0000644\0".as_slice(), Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"        ", Some(0)),
            (b"12345678", None),
            (b"-1\0\0\0\0\0\0", Some(-1)),
            (b"\x80\0\0\0\0\0\x01\0", Some(256)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xfe", Some(-2)),
            (b"\x80\0\0\0\0\0\0\x02\0\0\0\0", Some(0x2_0000_0000)),
            (b"\xbf\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", None),
        ] {
            assert_eq!(number(field).ok(), want, "{field:?}");
        }
    }

    #[test]
    fn binary_attributes_survive() {
        let mut extension = Extension::default();
        let value = b"a\nb=\0c";
        let mut record = b" SCHILY.xattr.security.capability=".to_vec();
        record.extend_from_slice(value);
        record.push(b'\n');
        let length = record.len() + 2;
        let mut bytes = length.to_string().into_bytes();
        bytes.extend(record);
        extension.pax(&bytes).unwrap();
        assert_eq!(extension.xattrs, [(b"security.capability".to_vec(), value.to_vec())]);
    }

    proptest::proptest! {
        /// Nothing a stream contains may panic or allocate beyond the limits.
        #[test]
        fn any_bytes(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..4096)) {
            let mut reader = TarReader::new(bytes.as_slice());
            while let Ok(Some(_)) = reader.next() {}
            let _ = Extension::default().pax(&bytes);
        }

        /// The same with a valid checksum, so that the reader parses the fields.
        #[test]
        fn any_header(mut block in proptest::collection::vec(proptest::num::u8::ANY, 512), kind in "[0-7xLKgS]") {
            block[156] = kind.as_bytes()[0];
            let mut header = tar::Header::from_byte_slice(&block).clone();
            header.set_cksum();
            let mut bytes = header.as_bytes().to_vec();
            bytes.extend([0; 2048]);
            let mut reader = TarReader::new(bytes.as_slice());
            for _ in 0..8 {
                if !matches!(reader.next(), Ok(Some(_))) {
                    break;
                }
            }
        }
    }
}
