//! Reads and writes PEM as Go does: text between blocks, and broken blocks, are skipped.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// One block of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    pub kind: String,
    pub has_headers: bool,
    pub content: Vec<u8>,
}

/// The blocks of a text, in their order.
pub fn blocks(bytes: &[u8]) -> Vec<Block> {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines().map(str::trim_end);
    let mut blocks = Vec::new();
    while let Some(line) = lines.next() {
        let Some(kind) = line.strip_prefix("-----BEGIN ").and_then(|l| l.strip_suffix("-----")) else {
            continue;
        };
        let end = format!("-----END {kind}-----");
        let mut rest = lines.clone();
        let mut body: Vec<&str> = Vec::new();
        let ended = rest.by_ref().any(|line| {
            let is_end = line == end;
            if !is_end {
                body.push(line);
            }
            is_end
        });
        if !ended {
            continue;
        }
        let headers = body.iter().take_while(|line| line.contains(':')).count();
        let encoded: String = body[headers..].concat();
        let Ok(content) = STANDARD.decode(encoded.trim()) else { continue };
        blocks.push(Block { kind: kind.to_owned(), has_headers: headers > 0, content });
        lines = rest;
    }
    blocks
}

/// The text of a block, with lines of 64 characters as Go writes them.
pub fn encode(kind: &str, content: &[u8]) -> String {
    let encoded = STANDARD.encode(content);
    let mut text = format!("-----BEGIN {kind}-----\n");
    let mut rest = encoded.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(64));
        text.push_str(line);
        text.push('\n');
        rest = after;
    }
    text.push_str(&format!("-----END {kind}-----\n"));
    text
}

/// True if bytes are whole DER sequences, as certificates are.
pub(crate) fn is_sequences(mut bytes: &[u8]) -> bool {
    const SEQUENCE: u8 = 0x30;
    while let [tag, first, rest @ ..] = bytes {
        let (length, rest) = match *first {
            short @ 0..=0x7f => (usize::from(short), rest),
            long => {
                let count = usize::from(long & 0x7f);
                if !(1..=4).contains(&count) || rest.len() < count {
                    return false;
                }
                let length = rest[..count].iter().fold(0, |n, byte| n << 8 | usize::from(*byte));
                (length, &rest[count..])
            }
        };
        if *tag != SEQUENCE || rest.len() < length {
            return false;
        }
        bytes = &rest[length..];
    }
    bytes.is_empty()
}

#[cfg(test)]
mod tests {
    use super::{blocks, encode, is_sequences};

    #[test]
    fn a_written_block_is_read_again() {
        for length in [0, 1, 48, 49, 200] {
            let content = vec![7; length];
            let text = encode("CERTIFICATE", &content);
            let found = blocks(text.as_bytes());
            assert_eq!((found.len(), &found[0].content), (1, &content), "{text}");
            assert!(text.lines().all(|line| line.len() <= 64), "{text}");
        }
    }

    #[test]
    fn broken_blocks_are_passed_over() {
        let text = b"x\n-----BEGIN A-----\n!!\n-----END A-----\n-----BEGIN B-----\nK: v\n\nMAA=\n-----END B-----\n-----BEGIN C-----\n";
        let found = blocks(text);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].kind.as_str(), found[0].has_headers, &found[0].content[..]),
            ("B", true, &[0x30, 0][..])
        );
    }

    #[test]
    fn sequences_are_whole() {
        for (bytes, whole) in [
            (&[][..], true),
            (&[0x30, 0], true),
            (&[0x30, 0x81, 1, 5, 0x30, 0], true),
            (&[0x30, 1], false),
            (&[0x02, 1, 1], false),
            (&[0x30], false),
            (&[0x30, 0x80, 0, 0], false),
        ] {
            assert_eq!(is_sequences(bytes), whole, "{bytes:?}");
        }
    }
}
