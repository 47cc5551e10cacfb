//! The ciphers of local keys, in upstream's layouts: the nonce comes first.

use aes::cipher::{BlockDecryptMut, BlockEncryptMut, KeyIvInit, block_padding::Pkcs7};
use aes::{Aes128, Aes192, Aes256};
use aes_gcm::aead::{Aead, AeadInPlace, KeyInit, Payload, consts::U12};
use aes_gcm::{AesGcm, Nonce};
use crypto_secretbox::XSalsa20Poly1305;
use ring::rand::{SecureRandom, SystemRandom};

const CBC_IV: usize = 16;
const GCM_NONCE: usize = 12;
const SECRETBOX_NONCE: usize = 24;
const SECRETBOX_TAG: usize = 16;
/// Bytes of an [`Seed`] value before the nonce, from which its key is derived.
const INFO: usize = 32;

/// Why bytes cannot be encrypted or decrypted. The wording is upstream's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CipherError {
    #[error("the stored data was shorter than the required size")]
    TooShort,
    #[error("the stored data is not a multiple of the block size")]
    BlockSize,
    #[error("invalid padding on input")]
    Padding,
    #[error("cipher: message authentication failed")]
    Authentication,
    #[error("output array was not large enough for encryption")]
    Secretbox,
    #[error("crypto/aes: invalid key size {0}")]
    KeySize(usize),
    #[error("unable to read sufficient random bytes")]
    Random,
}

/// A key with its cipher. Has no Debug that shows it.
pub(crate) enum Cipher {
    Cbc(Vec<u8>),
    Gcm(Gcm),
    Secretbox(Box<XSalsa20Poly1305>),
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cbc(_) => "Cbc([REDACTED])",
            Self::Gcm(_) => "Gcm([REDACTED])",
            Self::Secretbox(_) => "Secretbox([REDACTED])",
        })
    }
}

/// AES-GCM with a key of any size.
pub(crate) enum Gcm {
    Key128(Box<AesGcm<Aes128, U12>>),
    Key192(Box<AesGcm<Aes192, U12>>),
    Key256(Box<AesGcm<Aes256, U12>>),
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N], CipherError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| CipherError::Random)?;
    Ok(bytes)
}

impl Gcm {
    pub fn new(key: &[u8]) -> Result<Self, CipherError> {
        let wrong = |_| CipherError::KeySize(key.len());
        match key.len() {
            16 => Ok(Self::Key128(Box::new(KeyInit::new_from_slice(key).map_err(wrong)?))),
            24 => Ok(Self::Key192(Box::new(KeyInit::new_from_slice(key).map_err(wrong)?))),
            32 => Ok(Self::Key256(Box::new(KeyInit::new_from_slice(key).map_err(wrong)?))),
            length => Err(CipherError::KeySize(length)),
        }
    }

    /// Appends nonce, ciphertext and tag.
    pub fn seal(&self, value: &[u8], context: &[u8], out: &mut Vec<u8>) -> Result<(), CipherError> {
        let nonce = random::<GCM_NONCE>()?;
        out.extend_from_slice(&nonce);
        let begin = out.len();
        out.extend_from_slice(value);
        let (nonce, body) = (Nonce::from_slice(&nonce), &mut out[begin..]);
        let tag = match self {
            Self::Key128(cipher) => cipher.encrypt_in_place_detached(nonce, context, body),
            Self::Key192(cipher) => cipher.encrypt_in_place_detached(nonce, context, body),
            Self::Key256(cipher) => cipher.encrypt_in_place_detached(nonce, context, body),
        };
        out.extend_from_slice(&tag.map_err(|_| CipherError::Authentication)?);
        Ok(())
    }

    pub fn open(&self, stored: &[u8], context: &[u8]) -> Result<Vec<u8>, CipherError> {
        let (nonce, body) = stored.split_at_checked(GCM_NONCE).ok_or(CipherError::TooShort)?;
        let (nonce, payload) = (Nonce::from_slice(nonce), Payload { msg: body, aad: context });
        match self {
            Self::Key128(cipher) => cipher.decrypt(nonce, payload),
            Self::Key192(cipher) => cipher.decrypt(nonce, payload),
            Self::Key256(cipher) => cipher.decrypt(nonce, payload),
        }
        .map_err(|_| CipherError::Authentication)
    }
}

impl Cipher {
    pub fn cbc(key: &[u8]) -> Result<Self, CipherError> {
        match key.len() {
            16 | 24 | 32 => Ok(Self::Cbc(key.to_vec())),
            length => Err(CipherError::KeySize(length)),
        }
    }

    pub fn gcm(key: &[u8]) -> Result<Self, CipherError> {
        Gcm::new(key).map(Self::Gcm)
    }

    pub fn secretbox(key: &[u8]) -> Result<Self, CipherError> {
        let cipher = KeyInit::new_from_slice(key).map_err(|_| CipherError::KeySize(key.len()))?;
        Ok(Self::Secretbox(Box::new(cipher)))
    }

    /// Appends the encrypted value. `context` is authenticated where the cipher can.
    pub fn seal(&self, value: &[u8], context: &[u8], out: &mut Vec<u8>) -> Result<(), CipherError> {
        match self {
            Self::Cbc(key) => {
                let iv = random::<CBC_IV>()?;
                out.extend_from_slice(&iv);
                let body = match key.len() {
                    16 => cbc_seal::<Aes128>(key, &iv, value),
                    24 => cbc_seal::<Aes192>(key, &iv, value),
                    _ => cbc_seal::<Aes256>(key, &iv, value),
                };
                out.extend_from_slice(&body?);
                Ok(())
            }
            Self::Gcm(gcm) => gcm.seal(value, context, out),
            Self::Secretbox(cipher) => {
                let nonce = random::<SECRETBOX_NONCE>()?;
                out.extend_from_slice(&nonce);
                let body = cipher.encrypt((&nonce).into(), value).map_err(|_| CipherError::Secretbox)?;
                out.extend_from_slice(&body);
                Ok(())
            }
        }
    }

    pub fn open(&self, stored: &[u8], context: &[u8]) -> Result<Vec<u8>, CipherError> {
        match self {
            Self::Cbc(key) => {
                let (iv, body) = stored.split_at_checked(CBC_IV).ok_or(CipherError::TooShort)?;
                if body.is_empty() || body.len() % CBC_IV != 0 {
                    return Err(CipherError::BlockSize);
                }
                match key.len() {
                    16 => cbc_open::<Aes128>(key, iv, body),
                    24 => cbc_open::<Aes192>(key, iv, body),
                    _ => cbc_open::<Aes256>(key, iv, body),
                }
            }
            Self::Gcm(gcm) => gcm.open(stored, context),
            Self::Secretbox(cipher) => {
                if stored.len() < SECRETBOX_NONCE + SECRETBOX_TAG {
                    return Err(CipherError::TooShort);
                }
                let (nonce, body) = stored.split_at(SECRETBOX_NONCE);
                cipher.decrypt(nonce.into(), body).map_err(|_| CipherError::Secretbox)
            }
        }
    }
}

fn cbc_seal<C>(key: &[u8], iv: &[u8], value: &[u8]) -> Result<Vec<u8>, CipherError>
where
    C: aes::cipher::BlockCipher + aes::cipher::BlockEncryptMut,
    cbc::Encryptor<C>: KeyIvInit + BlockEncryptMut,
{
    let cipher =
        cbc::Encryptor::<C>::new_from_slices(key, iv).map_err(|_| CipherError::KeySize(key.len()))?;
    Ok(cipher.encrypt_padded_vec_mut::<Pkcs7>(value))
}

fn cbc_open<C>(key: &[u8], iv: &[u8], body: &[u8]) -> Result<Vec<u8>, CipherError>
where
    C: aes::cipher::BlockCipher + aes::cipher::BlockDecryptMut,
    cbc::Decryptor<C>: KeyIvInit + BlockDecryptMut,
{
    let cipher =
        cbc::Decryptor::<C>::new_from_slices(key, iv).map_err(|_| CipherError::KeySize(key.len()))?;
    cipher.decrypt_padded_vec_mut::<Pkcs7>(body).map_err(|_| CipherError::Padding)
}

/// A pseudo-random key from which each value's own key is derived, as upstream's KMS v2 has it: HKDF-expand with SHA-256
/// over 32 random bytes that stand before the nonce.
pub(crate) struct Seed(ring::hkdf::Prk);

impl std::fmt::Debug for Seed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seed([REDACTED])")
    }
}

struct KeyLength;

impl ring::hkdf::KeyType for KeyLength {
    fn len(&self) -> usize {
        32
    }
}

impl Seed {
    /// As upstream: a shorter seed is refused.
    pub fn new(seed: &[u8]) -> Result<Self, CipherError> {
        match seed.len() {
            length if length < 32 => Err(CipherError::KeySize(length)),
            _ => Ok(Self(ring::hkdf::Prk::new_less_safe(ring::hkdf::HKDF_SHA256, seed))),
        }
    }

    fn derive(&self, info: &[u8]) -> Result<Gcm, CipherError> {
        let mut key = [0; 32];
        let parts = [info];
        let expanded = self.0.expand(&parts, KeyLength).map_err(|_| CipherError::Random)?;
        expanded.fill(&mut key).map_err(|_| CipherError::Random)?;
        Gcm::new(&key)
    }

    pub fn seal(&self, value: &[u8], context: &[u8]) -> Result<Vec<u8>, CipherError> {
        let info = random::<INFO>()?;
        let mut out = Vec::with_capacity(INFO + GCM_NONCE + value.len() + 16);
        out.extend_from_slice(&info);
        self.derive(&info)?.seal(value, context, &mut out)?;
        Ok(out)
    }

    pub fn open(&self, stored: &[u8], context: &[u8]) -> Result<Vec<u8>, CipherError> {
        let (info, rest) = stored.split_at_checked(INFO).ok_or(CipherError::TooShort)?;
        self.derive(info)?.open(rest, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUE: &[u8] = br#"{"kind":"Secret","apiVersion":"v1","metadata":{"name":"a"}}"#;
    const CONTEXT: &[u8] = b"/registry/secrets/default/a";

    fn key(length: u8) -> Vec<u8> {
        (0..length).collect()
    }

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    /// Made with Python's cryptography and PyNaCl, over [`VALUE`] and [`CONTEXT`].
    const KNOWN: &[(&str, u8, &str)] = &[
        (
            "cbc",
            16,
            "6465666768696a6b6c6d6e6f7071727384dae64f6f36421d0828c8a3d20c4f273b1adaec31449757ae9c76253433d62bed6be5e832e1eab9ceded41412c1dfe478bb08aed9ce8ff73a72aad9dfe66f1a",
        ),
        (
            "cbc",
            24,
            "6465666768696a6b6c6d6e6f7071727352efc26e767f4d8852369f65ebadc68c4b4510ced397d393e20ae4d9b02910f15541f606b33a6293938207752a5edd860592dc46454e25e1f5198e6fcf457f31",
        ),
        (
            "cbc",
            32,
            "6465666768696a6b6c6d6e6f7071727344283a8a80a45cba29966b60a5c5bdab29df94c4e216912e2dd214420707bf0db6c99db71f64f8ad80a385316b4b7e7c8f5d5aaa5e63a1d93ccfcc4a6d5e4011",
        ),
        (
            "gcm",
            16,
            "32333435363738393a3b3c3dca1c64a3d29660500b5ff469ba62685aec21df631dbfb78cb36db7c0b6a31483ab9a635429483df7a47e8ebbcac8c70f537bc4d4d03215152fb76a2a41bfd5660c969adcec6948332af64d",
        ),
        (
            "gcm",
            24,
            "32333435363738393a3b3c3d1d2b8c45b2874fa1f1ca0ec7a0eaaa8bd3af228f8202fabc92530377d27eb1228eb0459f6cbf0927ae48fb622a31dc381b620112bbed6eb0160eedf9125191374fff2e99d3a679e52fb373",
        ),
        (
            "gcm",
            32,
            "32333435363738393a3b3c3dbd7984a9ab58a3d94f548fe529888bda4a917af1e01bc299a27364f69509b9041222e6697a8673cff56d0ebe865c98cf91958a88f0f67254b826cc70bc7d0c4ee0013ee5c35d80af5a59be",
        ),
        (
            "secretbox",
            32,
            "0a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20213dccbafee206634d3965e6dc7c2c9a48555c8b2f2a53c4837832f2dfd8c8040e4c41a8d398eada130aaa3f4143d8faf0c8d9a6818429b3cef40182c70498332ac8979a37470ae378ce0b69",
        ),
    ];
    const KNOWN_SEED: &str = "c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e732333435363738393a3b3c3da7444d7aa9403502af454398d96d8772bf96fac4b06d56a67498839358025339a26549d74c6e7e1442531051a7d6df99cc190fdeedab2c1e66e525ee7d4ac5604731e05deceae16344ce72";

    fn cipher(name: &str, length: u8) -> Cipher {
        match name {
            "cbc" => Cipher::cbc(&key(length)),
            "gcm" => Cipher::gcm(&key(length)),
            _ => Cipher::secretbox(&key(length)),
        }
        .unwrap()
    }

    #[test]
    fn values_of_other_implementations_are_read() {
        for (name, length, stored) in KNOWN {
            let cipher = cipher(name, *length);
            assert_eq!(cipher.open(&bytes(stored), CONTEXT).as_deref(), Ok(VALUE), "{name} {length}");
        }
        let seed = Seed::new(&key(32)).unwrap();
        assert_eq!(seed.open(&bytes(KNOWN_SEED), CONTEXT).as_deref(), Ok(VALUE));
    }

    #[test]
    fn what_is_sealed_is_opened_and_nothing_else() {
        for (name, length, _) in KNOWN {
            let cipher = cipher(name, *length);
            for value in [&b""[..], b"x", &[7; 16], &[7; 100_000]] {
                let (mut one, mut two) = (Vec::new(), Vec::new());
                cipher.seal(value, CONTEXT, &mut one).unwrap();
                cipher.seal(value, CONTEXT, &mut two).unwrap();
                assert_ne!(one, two, "a nonce is never used twice");
                assert_eq!(cipher.open(&one, CONTEXT).as_deref(), Ok(value));
                for end in 0..one.len().min(80) {
                    assert_ne!(cipher.open(&one[..end], CONTEXT).as_deref(), Ok(value));
                }
                if *name == "gcm" {
                    assert_eq!(cipher.open(&one, b"/elsewhere"), Err(CipherError::Authentication));
                }
                if *name != "cbc" {
                    *one.last_mut().unwrap() ^= 1;
                    assert!(cipher.open(&one, CONTEXT).is_err(), "{name}");
                }
            }
        }
        let seed = Seed::new(&key(32)).unwrap();
        let stored = seed.seal(VALUE, CONTEXT).unwrap();
        assert_eq!(seed.open(&stored, CONTEXT).as_deref(), Ok(VALUE));
        assert!(seed.open(&stored, b"/elsewhere").is_err() && seed.open(&stored[..31], CONTEXT).is_err());
        assert!(Seed::new(&key(31)).is_err() && Cipher::gcm(&key(15)).is_err());
    }

    #[test]
    fn keys_are_not_shown() {
        let shown = format!("{:?} {:?}", cipher("cbc", 32), Seed::new(&key(32)).unwrap());
        assert!(shown.contains("REDACTED") && !shown.contains("31"), "{shown}");
    }
}
