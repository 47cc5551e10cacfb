//! The identity of an object over its whole life.

use std::fmt;

/// The UID of an object. Servers make UUIDs, which take 16 bytes here; any other text is kept as it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Uid(Repr);

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Repr {
    /// Written in lower case with hyphens: only that form is printed as it was read.
    Uuid([u8; 16]),
    Other(Box<str>),
}

impl From<&str> for Uid {
    fn from(text: &str) -> Self {
        Self(parse(text).map_or_else(|| Repr::Other(text.into()), Repr::Uuid))
    }
}

const HYPHENS: [usize; 4] = [8, 13, 18, 23];

fn parse(text: &str) -> Option<[u8; 16]> {
    let text: &[u8; 36] = text.as_bytes().try_into().ok()?;
    let mut uuid = [0; 16];
    let mut digits = 0;
    for (at, byte) in text.iter().enumerate() {
        if HYPHENS.contains(&at) {
            (*byte == b'-').then_some(())?;
            continue;
        }
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            _ => return None,
        };
        uuid[digits / 2] = uuid[digits / 2] << 4 | digit;
        digits += 1;
    }
    Some(uuid)
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Other(text) => f.write_str(text),
            Repr::Uuid(uuid) => {
                for (at, byte) in uuid.iter().enumerate() {
                    if matches!(at, 4 | 6 | 8 | 10) {
                        f.write_str("-")?;
                    }
                    write!(f, "{byte:02x}")?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_uid_is_printed_as_it_was_read() {
        let uuid = "0123abcd-4567-89ef-0123-456789abcdef";
        assert!(matches!(Uid::from(uuid).0, Repr::Uuid(_)));
        for text in [
            uuid,
            "",
            "x",
            "0123ABCD-4567-89ef-0123-456789abcdef",
            "0123abcd04567-89ef-0123-456789abcdef",
            "0123abcd-4567-89ef-0123-456789abcde\u{e9}",
        ] {
            assert_eq!(Uid::from(text).to_string(), text);
            assert_eq!(Uid::from(text), Uid::from(text));
        }
        assert_ne!(Uid::from(uuid), Uid::from("0123abcd-4567-89ef-0123-456789abcdee"));
    }
}
