//! The protobuf wire format, read without trusting it.

use crate::codec::DecodeError;

const TRUNCATED: DecodeError = DecodeError::Truncated;

/// A field's content by wire type.
#[derive(Debug, Clone, Copy)]
pub(super) enum Content<'a> {
    Varint(u64),
    Fixed64(u64),
    Fixed32,
    Bytes(&'a [u8]),
}

impl<'a> Content<'a> {
    fn wire_type(&self) -> u8 {
        match self {
            Self::Varint(_) => 0,
            Self::Fixed64(_) => 1,
            Self::Bytes(_) => 2,
            Self::Fixed32 => 5,
        }
    }

    pub(super) fn bytes(self, field: &'static str) -> Result<&'a [u8], DecodeError> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            other => Err(DecodeError::WireType { wire_type: other.wire_type(), field }),
        }
    }

    pub(super) fn varint(self, field: &'static str) -> Result<u64, DecodeError> {
        match self {
            Self::Varint(number) => Ok(number),
            other => Err(DecodeError::WireType { wire_type: other.wire_type(), field }),
        }
    }

    pub(super) fn double(self, field: &'static str) -> Result<f64, DecodeError> {
        match self {
            Self::Fixed64(bits) => Ok(f64::from_bits(bits)),
            other => Err(DecodeError::WireType { wire_type: other.wire_type(), field }),
        }
    }

    /// Strings need not be UTF-8 in Go; invalid bytes become the replacement character, as in its JSON.
    pub(super) fn text(self, field: &'static str) -> Result<String, DecodeError> {
        Ok(String::from_utf8_lossy(self.bytes(field)?).into_owned())
    }
}

/// The fields of a message, one after the other.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    pub(super) fn next(&mut self) -> Result<Option<(u32, Content<'a>)>, DecodeError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let key = self.varint()?;
        let tag = u32::try_from(key >> 3).ok().filter(|tag| *tag > 0);
        let tag = tag.ok_or(DecodeError::Protobuf("illegal tag"))?;
        let content = match key & 7 {
            0 => Content::Varint(self.varint()?),
            1 => {
                let bytes: [u8; 8] = self.take(8)?.try_into().map_err(|_| TRUNCATED)?;
                Content::Fixed64(u64::from_le_bytes(bytes))
            }
            2 => {
                let length = usize::try_from(self.varint()?).map_err(|_| TRUNCATED)?;
                Content::Bytes(self.take(length)?)
            }
            5 => {
                self.take(4)?;
                Content::Fixed32
            }
            _ => return Err(DecodeError::Protobuf("illegal wireType")),
        };
        Ok(Some((tag, content)))
    }

    /// Packed numbers: a run of varints without tags.
    pub(super) fn packed(&mut self) -> Result<Option<u64>, DecodeError> {
        if self.rest.is_empty() { Ok(None) } else { self.varint().map(Some) }
    }

    fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.rest.split_first().ok_or(TRUNCATED)?;
            self.rest = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(DecodeError::Protobuf("integer overflow"))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        if length > self.rest.len() {
            return Err(TRUNCATED);
        }
        let (taken, rest) = self.rest.split_at(length);
        self.rest = rest;
        Ok(taken)
    }
}
