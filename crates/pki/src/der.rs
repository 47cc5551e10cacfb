//! The little of DER that is needed to give a signed structure another subject, and to read algorithms as they are
//! encoded.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

pub(crate) const SEQUENCE: u8 = 0x30;
pub(crate) const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 6;
const PRINTABLE_STRING: u8 = 0x13;
const UTF8_STRING: u8 = 0x0c;
const BIT_STRING: u8 = 3;
/// Where a certificate has its subject: after version, serial number, algorithm, issuer and validity.
const SUBJECT: usize = 5;

/// An element: its tag, the length of its content, and the content.
pub(crate) fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    let length = content.len().to_be_bytes();
    let length = &length[content.len().leading_zeros() as usize / 8..];
    match length {
        [] => out.push(0),
        [short] if *short < 0x80 => out.push(*short),
        long => {
            out.push(0x80 | u8::try_from(long.len()).unwrap_or(u8::MAX));
            out.extend(long);
        }
    }
    out.extend(content);
    out
}

/// An attribute of a name, as Go writes it: a printable string if it can be one.
pub(crate) fn attribute(oid: &[u8], value: &str) -> Vec<u8> {
    let printable = |byte: u8| byte.is_ascii_alphanumeric() || b" '()+,-./:=?".contains(&byte);
    let tag = if value.bytes().all(printable) { PRINTABLE_STRING } else { UTF8_STRING };
    element(SEQUENCE, &[element(OBJECT_IDENTIFIER, oid), element(tag, value.as_bytes())].concat())
}

/// The first element as it is, its content, and the bytes after it.
pub(crate) fn first(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (head, length) = match *bytes.get(1)? {
        short @ 0..0x80 => (2, usize::from(short)),
        0x80 => return None,
        long => {
            let head = 2 + usize::from(long & 0x7f);
            let digits = bytes.get(2..head).filter(|digits| digits.len() <= 4)?;
            (head, digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit)))
        }
    };
    let end = head.checked_add(length)?;
    Some((bytes.get(..end)?, bytes.get(head..end)?, bytes.get(end..)?))
}

/// Replaces the element at `place` of the signed part, and signs it anew. None if it is not such a
/// structure.
fn replaced<E>(
    signed: &[u8],
    place: usize,
    with: &[u8],
    sign: impl FnOnce(&[u8]) -> Result<Vec<u8>, E>,
) -> Option<Result<Vec<u8>, E>> {
    let (_, content, _) = first(signed)?;
    let (_, mut fields, rest) = first(content)?;
    let (algorithm, ..) = first(rest)?;
    let mut body = Vec::with_capacity(signed.len() + with.len());
    for index in 0.. {
        if fields.is_empty() {
            break;
        }
        let (field, _, next) = first(fields)?;
        body.extend(if index == place { with } else { field });
        fields = next;
    }
    let body = element(SEQUENCE, &body);
    Some(sign(&body).map(|signature| {
        let bits = element(BIT_STRING, &[&[0], signature.as_slice()].concat());
        element(SEQUENCE, &[body.as_slice(), algorithm, &bits].concat())
    }))
}

/// A certificate with another subject, signed anew.
pub(crate) fn with_subject<E>(
    certificate: &[u8],
    subject: &[u8],
    sign: impl FnOnce(&[u8]) -> Result<Vec<u8>, E>,
) -> Option<Result<Vec<u8>, E>> {
    replaced(certificate, SUBJECT, subject, sign)
}

pub(crate) fn to_pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// A request with another subject, signed anew.
#[cfg(test)]
pub(crate) fn with_request_subject<E>(
    request: &[u8],
    subject: &[u8],
    sign: impl FnOnce(&[u8]) -> Result<Vec<u8>, E>,
) -> Option<Result<Vec<u8>, E>> {
    replaced(request, 1, subject, sign)
}

/// A certificate as one of version 1: without extensions, and without the field that says another version.
#[cfg(test)]
pub(crate) fn as_version_1<E>(
    certificate: &[u8],
    sign: impl FnOnce(&[u8]) -> Result<Vec<u8>, E>,
) -> Option<Result<Vec<u8>, E>> {
    const VERSION: usize = 0;
    const EXTENSIONS: usize = 7;
    let unsigned: Result<_, E> = replaced(certificate, EXTENSIONS, &[], |_| Ok(Vec::new()))?;
    replaced(&unsigned.ok()?, VERSION, &[], sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_written_and_read() {
        for size in [0, 1, 127, 128, 255, 256, 70_000] {
            let content = vec![7; size];
            let mut bytes = element(4, &content);
            bytes.push(9);
            let (whole, inner, rest) = first(&bytes).expect("an element");
            assert_eq!((whole.len() + 1, inner, rest), (bytes.len(), &content[..], &[9][..]));
        }
        for broken in
            [&[][..], &[4], &[4, 1], &[4, 0x80], &[4, 0x85, 1, 1, 1, 1, 1], &[4, 0x84, 255, 255, 255, 255]]
        {
            assert_eq!(first(broken), None, "{broken:?}");
        }
    }
}
