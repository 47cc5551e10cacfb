//! Finds the parts of a watch event that decide where its object belongs, without parsing the rest.
//!
//! The scanner reads JSON as API servers write it: without spaces between the tokens, and without escapes in names. Of all
//! else it says nothing, and a parser reads it. It does not look into values that it passes over: the decoder of the
//! object does that next.

use std::ops::Range;

use ferrite_json::scan::{plain_string, value_end};

/// The type and the object of a watch event. None if the text is written in another way.
///
/// The object is all that follows, but for the last brace: [`head`] says whether it is one object.
pub(crate) fn event(text: &str) -> Option<(&str, &str)> {
    let rest = text.strip_prefix("{\"type\":\"")?;
    let (kind, rest) = rest.split_once('"')?;
    let object = rest.strip_prefix(",\"object\":")?.trim_ascii_end().strip_suffix('}')?;
    (!kind.contains('\\')).then_some((kind, object))
}

/// The metadata of an object as far as an informer needs it.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Head<'a> {
    pub(crate) name: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) resource_version: &'a str,
    /// The bytes of the managed fields, with their name and a comma: the text without them is an object, too.
    pub(crate) managed_fields: Option<Range<usize>>,
}

/// The metadata of the object that is the text. None if it is written in another way.
pub(crate) fn head(text: &str) -> Option<Head<'_>> {
    let mut scanner = Scanner { bytes: text.as_bytes(), at: 0 };
    let mut found = None;
    scanner.members(|scanner, name, _| match name {
        b"metadata" if found.is_none() => {
            found = Some(metadata(scanner)?);
            Some(())
        }
        b"metadata" => None,
        _ => scanner.skip(),
    })?;
    (scanner.at == text.len()).then_some(found)?
}

fn metadata<'a>(scanner: &mut Scanner<'a>) -> Option<Head<'a>> {
    let mut found: [Option<&'a [u8]>; 4] = [None; 4];
    let mut managed_fields = None;
    scanner.members(|scanner, name, start| {
        let slot = match name {
            b"name" => 0,
            b"namespace" => 1,
            b"uid" => 2,
            b"resourceVersion" => 3,
            b"managedFields" => {
                if !matches!(scanner.peek()?, b'{' | b'[') {
                    return None;
                }
                scanner.skip()?;
                let range = with_comma(scanner.bytes, start..scanner.at);
                return managed_fields.replace(range).is_none().then_some(());
            }
            _ => return scanner.skip(),
        };
        let value = scanner.string()?;
        // Of two members of one name a parser says that there are two.
        found[slot].replace(value).is_none().then_some(())
    })?;
    let text = |slot: usize| std::str::from_utf8(found[slot].unwrap_or_default()).ok();
    Some(Head {
        name: text(0)?,
        namespace: text(1)?,
        uid: text(2)?,
        resource_version: text(3)?,
        managed_fields,
    })
}

/// The range of a member with the comma behind it, or else with the one before it.
fn with_comma(bytes: &[u8], Range { start, end }: Range<usize>) -> Range<usize> {
    if bytes.get(end) == Some(&b',') {
        return start..end + 1;
    }
    match start.checked_sub(1).filter(|before| bytes[*before] == b',') {
        Some(before) => before..end,
        None => start..end,
    }
}

struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Scanner<'a> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// Calls `each` at the value of every member, with the name and the place where the member begins.
    fn members(&mut self, mut each: impl FnMut(&mut Self, &'a [u8], usize) -> Option<()>) -> Option<()> {
        self.expect(b'{')?;
        if self.peek()? == b'}' {
            self.at += 1;
            return Some(());
        }
        loop {
            let start = self.at;
            let name = self.string()?;
            self.expect(b':')?;
            each(self, name, start)?;
            match self.peek()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Some(());
                }
                _ => return None,
            }
        }
    }

    /// A text without its quotes. None if it has escapes.
    fn string(&mut self) -> Option<&'a [u8]> {
        let (text, end) = plain_string(self.bytes, self.at)?;
        self.at = end;
        Some(text)
    }

    /// Passes over any value.
    fn skip(&mut self) -> Option<()> {
        if matches!(self.peek()?, b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n') {
            return None;
        }
        self.at = value_end(self.bytes, self.at)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_events_apart_as_servers_write_them() {
        for (text, expected) in [
            (r#"{"type":"ADDED","object":{"a":"}\""}}"#, Some(("ADDED", r#"{"a":"}\""}"#))),
            ("{\"type\":\"ADDED\",\"object\":{}}\r", Some(("ADDED", "{}"))),
            (r#"{"type":"ADDED","object":{}"#, Some(("ADDED", "{"))),
            (r#"{"type":"A\u0044DED","object":{}}"#, None),
            (r#"{"object":{},"type":"ADDED"}"#, None),
            (r#"{ "type":"ADDED","object":{}}"#, None),
        ] {
            assert_eq!(event(text), expected, "{text}");
        }
    }

    #[test]
    fn finds_metadata_and_the_place_of_managed_fields() {
        let text = r#"{"kind":"Pod","metadata":{"name":"a","labels":{"name":"b"},"managedFields":[{"f:name":{}}],"uid":"u"},"spec":{"name":7}}"#;
        let found = head(text).unwrap();
        assert_eq!((found.name, found.namespace, found.uid), ("a", "", "u"));
        assert_eq!(&text[found.managed_fields.unwrap()], r#""managedFields":[{"f:name":{}}],"#);
        for odd in [
            r#"{"metadata":{"name":"\u0061"}}"#,
            r#"{"metadata":{"name":null}}"#,
            r#"{"metadata":{"managedFields":null}}"#,
            r#"{"metadata":{"name":"a","name":"b"}}"#,
            r#"{"metadata":{},"metadata":{}}"#,
            r#"{"metadata": {}}"#,
            r#"{"kind":"Pod"}"#,
            r#"{"metadata":{}}x"#,
            r#"{"metadata":{}},"more":{"a":1}"#,
            r#"{"metadata":{"labels": {}}}"#,
            r#"{"metadata":{"name":"a"#,
            r#"{"metadata":{}"#,
            r#"{"a":"\"#,
        ] {
            assert_eq!(head(odd), None, "{odd}");
        }
    }
}
