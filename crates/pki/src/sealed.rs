//! Bytes that only the holder of a key can read (AES-256-GCM).

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;

const LENGTH: usize = 32;

/// A key that seals a few messages. Each has a random nonce of its own.
#[derive(Clone, PartialEq, Eq)]
pub struct SealKey([u8; LENGTH]);

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key must not reach a log.
        f.write_str("SealKey")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    #[error("the system has no random numbers")]
    Random,
    #[error("the content was sealed with another key, or was changed")]
    NotOurs,
}

impl SealKey {
    pub fn generate() -> Result<Self, SealError> {
        let mut key = [0; LENGTH];
        SystemRandom::new().fill(&mut key).map_err(|_| SealError::Random)?;
        Ok(Self(key))
    }

    /// As hexadecimal digits, for a person to copy.
    pub fn reveal(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.len() == 2 * LENGTH
            && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let mut key = [0; LENGTH];
        for (byte, at) in key.iter_mut().zip((0..text.len()).step_by(2)) {
            *byte = digits.then(|| u8::from_str_radix(&text[at..at + 2], 16).ok()).flatten()?;
        }
        digits.then_some(Self(key))
    }

    fn cipher(&self) -> LessSafeKey {
        LessSafeKey::new(
            UnboundKey::new(&AES_256_GCM, &self.0).expect("the key has the length of the cipher's"),
        )
    }

    /// The nonce, then the ciphertext with its tag.
    pub fn seal(&self, content: &[u8]) -> Result<Vec<u8>, SealError> {
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| SealError::Random)?;
        let mut sealed = content.to_vec();
        let unique = Nonce::assume_unique_for_key(nonce);
        self.cipher()
            .seal_in_place_append_tag(unique, Aad::empty(), &mut sealed)
            .map_err(|_| SealError::Random)?;
        Ok([&nonce[..], &sealed].concat())
    }

    pub fn open(&self, sealed: &[u8]) -> Result<Vec<u8>, SealError> {
        let (nonce, content) = sealed.split_at_checked(NONCE_LEN).ok_or(SealError::NotOurs)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| SealError::NotOurs)?;
        let mut content = content.to_vec();
        let open =
            self.cipher().open_in_place(nonce, Aad::empty(), &mut content).map_err(|_| SealError::NotOurs)?;
        Ok(open.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_key_opens_what_it_sealed() {
        let key = SealKey::generate().expect("a key");
        let sealed = key.seal(b"content").expect("sealed");
        assert_eq!(key.open(&sealed).as_deref(), Ok(&b"content"[..]));
        assert_ne!(key.seal(b"content").expect("sealed"), sealed, "each time another nonce");
        assert_eq!(SealKey::generate().expect("a key").open(&sealed), Err(SealError::NotOurs));
        for damaged in [&sealed[..sealed.len() - 1], &sealed[1..], &[]] {
            assert_eq!(key.open(damaged), Err(SealError::NotOurs));
        }
        assert!(!format!("{key:?}").contains(&key.reveal()));
    }

    #[test]
    fn keys_are_read_as_they_are_written() {
        let key = SealKey::generate().expect("a key");
        assert_eq!(SealKey::parse(&key.reveal()), Some(key.clone()));
        for bad in [String::new(), key.reveal().to_uppercase() + "A", "g".repeat(64), "é".repeat(32)] {
            assert_eq!(SealKey::parse(&bad), None, "{bad}");
        }
    }
}
