//! The values of literals.

use thiserror::Error;

/// A literal that has no value. The texts are upstream's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum LiteralError {
    #[error("invalid int literal")]
    Int,
    #[error("invalid uint literal")]
    Uint,
    #[error("invalid double literal")]
    Double,
    #[error("unable to unescape string")]
    String,
}

pub(crate) fn int(text: &str, negative: bool) -> Result<i64, LiteralError> {
    let (digits, radix) = text.strip_prefix("0x").map_or((text, 10), |digits| (digits, 16));
    let digits = if negative { format!("-{digits}") } else { digits.to_owned() };
    i64::from_str_radix(&digits, radix).map_err(|_| LiteralError::Int)
}

pub(crate) fn uint(text: &str) -> Result<u64, LiteralError> {
    let text = text.trim_end_matches(['u', 'U']);
    let (digits, radix) = text.strip_prefix("0x").map_or((text, 10), |digits| (digits, 16));
    u64::from_str_radix(digits, radix).map_err(|_| LiteralError::Uint)
}

pub(crate) fn double(text: &str, negative: bool) -> Result<f64, LiteralError> {
    let value: f64 = text.parse().map_err(|_| LiteralError::Double)?;
    if value.is_infinite() {
        return Err(LiteralError::Double);
    }
    Ok(if negative { -value } else { value })
}

pub(crate) fn unescape(text: &str) -> Result<String, LiteralError> {
    String::from_utf8(decode(text, false)?).map_err(|_| LiteralError::String)
}

pub(crate) fn unescape_bytes(text: &str) -> Result<Vec<u8>, LiteralError> {
    decode(text, true)
}

/// The text between the quotes. In bytes, octal and `\x` escapes are bytes; in strings they are code points.
fn decode(text: &str, bytes: bool) -> Result<Vec<u8>, LiteralError> {
    let (body, raw) = text.strip_prefix(['r', 'R']).map_or((text, false), |body| (body, true));
    let width =
        if body.len() >= 6 && (body.starts_with("'''") || body.starts_with("\"\"\"")) { 3 } else { 1 };
    let body = body.get(width..body.len() - width).ok_or(LiteralError::String)?;
    if raw || !body.contains('\\') {
        return Ok(body.as_bytes().to_vec());
    }
    let mut out = Vec::with_capacity(body.len());
    let mut chars = body.chars();
    let mut utf8 = [0; 4];
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.extend_from_slice(c.encode_utf8(&mut utf8).as_bytes());
            continue;
        }
        let escape = chars.next().ok_or(LiteralError::String)?;
        let simple = match escape {
            'a' => Some(7),
            'b' => Some(8),
            'f' => Some(12),
            'n' => Some(b'\n'),
            'r' => Some(b'\r'),
            't' => Some(b'\t'),
            'v' => Some(11),
            '\\' | '\'' | '"' | '`' | '?' => Some(escape as u8),
            _ => None,
        };
        if let Some(byte) = simple {
            out.push(byte);
            continue;
        }
        let (count, radix, mut code) = match escape {
            'x' | 'X' => (2, 16, 0),
            'u' => (4, 16, 0),
            'U' => (8, 16, 0),
            '0'..='3' => (2, 8, escape.to_digit(8).unwrap_or(0)),
            _ => return Err(LiteralError::String),
        };
        if bytes && matches!(escape, 'u' | 'U') {
            return Err(LiteralError::String);
        }
        for _ in 0..count {
            let digit = chars.next().and_then(|c| c.to_digit(radix)).ok_or(LiteralError::String)?;
            code = code
                .checked_mul(radix)
                .and_then(|code| code.checked_add(digit))
                .ok_or(LiteralError::String)?;
        }
        if bytes {
            out.push(u8::try_from(code).map_err(|_| LiteralError::String)?);
        } else {
            let c = char::from_u32(code).ok_or(LiteralError::String)?;
            out.extend_from_slice(c.encode_utf8(&mut utf8).as_bytes());
        }
    }
    Ok(out)
}
