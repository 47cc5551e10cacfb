//! SHA-256 digests, the only algorithm images use in practice.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use ring::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

use super::ImageError;

/// A SHA-256 digest, written `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The 64 digits without the algorithm: names of files and directories.
    pub fn hex(&self) -> String {
        use fmt::Write;
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// Reads 64 lower-case hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let bytes: &[u8; 64] = text.as_bytes().try_into().ok()?;
        let mut digest = [0; 32];
        for (place, pair) in digest.iter_mut().zip(bytes.chunks_exact(2)) {
            *place = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(digest))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        text.strip_prefix("sha256:").and_then(Self::from_hex).ok_or_else(|| {
            ImageError::Unsupported(format!(
                "digest {:?}: only sha256 with 64 lower-case digits is known",
                text.chars().take(100).collect::<String>()
            ))
        })
    }
}

impl TryFrom<String> for Digest {
    type Error = ImageError;

    fn try_from(text: String) -> Result<Self, ImageError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// A digest in the making.
pub(crate) struct Hasher(Context);

impl Default for Hasher {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        let mut digest = [0; 32];
        digest.copy_from_slice(self.0.finish().as_ref());
        Digest(digest)
    }
}

/// Hashes and counts the bytes that pass through.
pub(crate) struct HashingReader<R> {
    inner: R,
    hasher: Hasher,
    count: u64,
}

impl<R: Read> HashingReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, hasher: Hasher::default(), count: 0 }
    }

    pub(crate) fn finish(self) -> (Digest, u64) {
        (self.hasher.finish(), self.count)
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        self.count += read as u64;
        Ok(read)
    }
}

/// The chain ids of a stack of layers, base first: the first is the layer's own diff id, each further
/// one the digest of the one beneath and the layer's diff id with a space between.
pub fn chain_ids(diff_ids: &[Digest]) -> Vec<Digest> {
    let mut chain: Vec<Digest> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        let next = match chain.last() {
            None => diff_id.clone(),
            Some(parent) => Digest::of(format!("{parent} {diff_id}").as_bytes()),
        };
        chain.push(next);
    }
    chain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of(b""));
        for bad in ["", "sha256:", "sha512:00", &empty[..70], &empty.to_uppercase(), &format!("{empty}0")] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
        }
    }

    /// Three layers of which the first and the last are the empty archive: equal diff ids, different chains.
    /// The expected values were computed outside of this program.
    #[test]
    fn chain_vectors() {
        let empty = Digest::of(&[0; 1024]);
        assert_eq!(empty.hex(), "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef");
        let chain = chain_ids(&[empty.clone(), Digest::of(b"second layer"), empty.clone()]);
        let printed: Vec<_> = chain.iter().map(Digest::hex).collect();
        assert_eq!(
            printed,
            [
                "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef",
                "4031c06931929f413c287ea637f61a7e9ad693329e31b00506a97beb3d4f8a24",
                "221c822e7833943751669a5363721c3a33e7d5eacd32adfdbbd3025bd3b30a4a",
            ]
        );
        assert_eq!(chain_ids(&[]), []);
    }
}
