//! Passes over JSON text without parsing it.
//!
//! The functions find where a value ends. They do not check it: text that is no JSON has an end of some kind, or none.

/// The place behind the string whose first quote is at `at`. None if it has no end.
pub fn string_end(text: &[u8], at: usize) -> Option<usize> {
    if *text.get(at)? != b'"' {
        return None;
    }
    let mut at = at + 1;
    loop {
        at = quote_or_escape(text, at)?;
        if text[at] == b'"' {
            return Some(at + 1);
        }
        // The byte behind the backslash may be a quote.
        at += 2;
    }
}

/// The string without escapes whose first quote is at `at`: its text, and the place behind it.
pub fn plain_string(text: &[u8], at: usize) -> Option<(&[u8], usize)> {
    if *text.get(at)? != b'"' {
        return None;
    }
    let end = quote_or_escape(text, at + 1)?;
    (text[end] == b'"').then(|| (&text[at + 1..end], end + 1))
}

/// The place behind the value that begins at `at`. A number or a word ends before a comma or a closing bracket, which must
/// follow.
pub fn value_end(text: &[u8], at: usize) -> Option<usize> {
    match *text.get(at)? {
        b'"' => string_end(text, at),
        b'{' | b'[' => container_end(text, at),
        _ => {
            let length = text[at..].iter().position(|byte| matches!(byte, b',' | b'}' | b']'))?;
            Some(at + length)
        }
    }
}

/// The place behind the object or list that begins at `at`.
fn container_end(text: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0usize;
    loop {
        match *text.get(at)? {
            b'"' => {
                at = string_end(text, at)?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
}

const ONES: u64 = u64::from_ne_bytes([0x01; 8]);
const HIGH: u64 = u64::from_ne_bytes([0x80; 8]);
const QUOTES: u64 = u64::from_ne_bytes([b'"'; 8]);
const ESCAPES: u64 = u64::from_ne_bytes([b'\\'; 8]);

/// The high bit of the first byte that is zero. Bytes behind it may be marked, too.
fn zeros(word: u64) -> u64 {
    word.wrapping_sub(ONES) & !word & HIGH
}

/// The place of the first quote or backslash from `at` on, eight bytes at a time.
#[inline]
fn quote_or_escape(text: &[u8], mut at: usize) -> Option<usize> {
    while let Some((chunk, _)) = text.get(at..).and_then(<[u8]>::split_first_chunk::<8>) {
        let word = u64::from_le_bytes(*chunk);
        let found = zeros(word ^ QUOTES) | zeros(word ^ ESCAPES);
        if found != 0 {
            return Some(at + found.trailing_zeros() as usize / 8);
        }
        at += 8;
    }
    let rest = text.get(at..)?;
    rest.iter().position(|byte| matches!(byte, b'"' | b'\\')).map(|length| at + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_ends_of_values() {
        for (text, end) in [
            (r#""","#, Some(2)),
            (r#""abcdefg"x"#, Some(9)),
            (r#""abcdefgh"x"#, Some(10)),
            (r#""abcdefg\"hi\\"x"#, Some(15)),
            (r#""é\u0022"]"#, Some(10)),
            (r#"{"a":"}","b":[{},"]"]},"#, Some(22)),
            ("[],", Some(2)),
            ("7,", Some(1)),
            ("null}", Some(4)),
            ("", None),
            (r#""abc"#, None),
            (r#""abcdefg\"#, None),
            (r#"{"a":"#, None),
            ("7", None),
        ] {
            assert_eq!(value_end(text.as_bytes(), 0), end, "{text}");
            let shifted = format!("____{text}");
            assert_eq!(value_end(shifted.as_bytes(), 4), end.map(|end| end + 4), "{text}");
        }
    }

    #[test]
    fn a_plain_string_has_no_escapes() {
        for (text, found) in [
            (r#""abc""#, Some((&b"abc"[..], 5))),
            (r#""","#, Some((b"", 2))),
            (r#""a\n""#, None),
            (r#""abc"#, None),
            ("abc", None),
            ("", None),
        ] {
            assert_eq!(plain_string(text.as_bytes(), 0), found, "{text}");
        }
    }

    #[test]
    fn every_quote_is_found_wherever_it_stands() {
        // A byte beside the one that is sought may be marked by a carry.
        for length in 0..20 {
            for filler in [b'!', b'#', b'[', b']', 0, 0x80, 0xff] {
                let mut text = vec![filler; length];
                assert_eq!(quote_or_escape(&text, 0), None);
                for (at, sought) in (0..length).flat_map(|at| [(at, b'"'), (at, b'\\')]) {
                    let before = std::mem::replace(&mut text[at], sought);
                    assert_eq!(quote_or_escape(&text, 0), Some(at), "{text:?}");
                    text[at] = before;
                }
            }
        }
    }
}
