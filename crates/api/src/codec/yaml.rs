//! YAML, by way of JSON text: upstream converts the document and takes JSON's way from there, and so do we.

use super::{DecodeError, Decoded, MAX_DEPTH, json};
use crate::field::go_quote;
use crate::schema::TypeRef;
use ferrite_json::Value;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, Options, Spanned};
use std::collections::HashSet;
use std::fmt;

/// A document may expand (aliases) to this many bytes of JSON and no further.
const MAX_EXPANDED: usize = 16 << 20;

/// The YAML parser spends far more stack on a level than ours.
const MAX_YAML_DEPTH: usize = 64;

/// Decodes an object of `type_`.
pub fn decode(type_: TypeRef, bytes: &[u8]) -> Result<Decoded, DecodeError> {
    read(bytes)?.decode(type_)
}

/// Decodes YAML of no known type.
pub fn decode_any(bytes: &[u8]) -> Result<Decoded, DecodeError> {
    let document = read(bytes)?;
    Ok(document.report(json::decode_any(document.json.as_bytes())?))
}

/// The document as JSON text, keys in the order of the document and duplicates included.
pub fn to_json(bytes: &[u8]) -> Result<String, DecodeError> {
    read(bytes).map(|document| document.json)
}

/// A document that has been read.
#[derive(Debug, Default)]
pub struct Document {
    json: String,
    /// Upstream's complaints about keys that come twice in a map.
    duplicates: Vec<String>,
    /// The document is YAML and has no JSON form.
    refused: Option<DecodeError>,
}

impl Document {
    /// The document as JSON text, keys in their order and duplicates included.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Decodes an object of `type_`.
    pub fn decode(&self, type_: TypeRef) -> Result<Decoded, DecodeError> {
        Ok(self.report(json::decode(type_, self.json.as_bytes())?))
    }

    /// Upstream finds duplicates while it reads YAML and reports them in YAML's terms, before all else.
    fn report(&self, mut decoded: Decoded) -> Decoded {
        if !self.duplicates.is_empty() {
            decoded.strict.retain(|complaint| !complaint.starts_with("duplicate field "));
            let listed = format!("yaml: unmarshal errors:\n  {}", self.duplicates.join("\n  "));
            decoded.strict.insert(0, listed);
        }
        decoded
    }
}

/// Reads a document, to decode it as one thing or another.
pub fn read(bytes: &[u8]) -> Result<Document, DecodeError> {
    let text = std::str::from_utf8(bytes).map_err(|_| DecodeError::Yaml("invalid UTF-8".into()))?;
    let text = before_brackets(first_document(text));
    if let Some(line) = leading_tab(text) {
        let place = if line > 1 { format!("line {line}: ") } else { String::new() };
        return Err(DecodeError::Yaml(format!("{place}{NO_TOKEN}")));
    }
    let mut document = Document::default();
    let mut whole = false;
    let read = serde_saphyr::with_deserializer_from_str_with_options(text, options(), |deserializer| {
        Node { out: &mut document, depth: 0 }.deserialize(deserializer)?;
        whole = true;
        Ok(())
    });
    if let Some(refused) = document.refused.take() {
        return Err(refused);
    }
    if !document.duplicates.is_empty() {
        // Only the last value of a key counts; the others may be of any type.
        document.json = json::decode_any(document.json.as_bytes())?.value.to_string();
    }
    match read {
        // As upstream: text after a document that ends with a bracket is ignored.
        Err(_) if whole && text.trim_start().starts_with(['{', '[']) => Ok(document),
        read => read
            .map(|()| document)
            .map_err(|error| DecodeError::Yaml(in_upstreams_words(text, &error.to_string()))),
    }
}

const NO_TOKEN: &str = "found character that cannot start any token";

/// The line of a tab in front of the first token. The parser takes it for a blank; upstream's does not where a token
/// could begin.
fn leading_tab(text: &str) -> Option<usize> {
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start_matches(' ');
        if line.starts_with('\t') {
            return Some(index + 1);
        }
        if !(line.is_empty() || line.starts_with('#')) {
            return None;
        }
    }
    None
}

/// A text that begins with a bracket, up to the one that closes it, if more closing brackets follow: upstream does not
/// parse them.
fn before_brackets(text: &str) -> &str {
    if !text.trim_start().starts_with(['{', '[']) {
        return text;
    }
    let (mut depth, mut quote, mut escaped) = (0_usize, None, false);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some('"'), '\\') if !escaped => {
                escaped = true;
                continue;
            }
            (Some(open), c) if c == open && !escaped => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            // A comment may have brackets of its own: the parser decides.
            (None, '#') => return text,
            (None, '{' | '[') => depth += 1,
            (None, '}' | ']') if depth == 1 => {
                let (document, rest) = text.split_at(at + 1);
                return if rest.trim_start().starts_with(['}', ']']) { document } else { text };
            }
            (None, '}' | ']') => depth -= 1,
            _ => {}
        }
        escaped = false;
    }
    text
}

/// Which of upstream's two parts complains: they count lines differently.
enum Part {
    Scanner,
    Parser,
}

/// The parser's complaint as upstream's parser says it: the line first, unless it is the first, and no column.
fn in_upstreams_words(text: &str, error: &str) -> String {
    let place = error.rsplit_once(" at line ").and_then(|(why, place)| {
        let line: u32 = place.split(',').next()?.trim().parse().ok()?;
        Some((why, line))
    });
    let Some((why, line)) = place else { return error.to_owned() };
    const NO_CONTENT: &str = "did not find expected node content";
    const NO_KEY: &str = "did not find expected key";
    // The position of an open bracket is its own; upstream complains about the end, which begins a line.
    let end = || 1 + u32::try_from(text.lines().count()).unwrap_or(u32::MAX - 1);
    let awaits = text.trim_end().ends_with(['{', '[', ',', ':']);
    let (part, line, why) = match why {
        why if why.starts_with("unclosed bracket") && awaits => (Part::Parser, end(), NO_CONTENT),
        why if why.starts_with("unclosed bracket '{'") => {
            (Part::Parser, end(), "did not find expected ',' or '}'")
        }
        why if why.starts_with("unclosed bracket '['") => {
            (Part::Parser, end(), "did not find expected ',' or ']'")
        }
        "misplaced bracket" if text.trim_start().starts_with(['}', ']']) => (Part::Parser, line, NO_CONTENT),
        "misplaced bracket" => (Part::Parser, line, NO_KEY),
        why if why.ends_with("found unknown escape character") => {
            (Part::Scanner, line, "found unknown escape character")
        }
        why if why.starts_with("mismatched bracket '['") => {
            (Part::Parser, line, "did not find expected ',' or ']'")
        }
        why if why.starts_with("mismatched bracket '{'") => {
            (Part::Parser, line, "did not find expected ',' or '}'")
        }
        "unclosed quote" => (Part::Scanner, line, "found unexpected end of stream"),
        why if why.starts_with("while ") => {
            let (context, problem) = why.split_once(", ").unwrap_or(("", why));
            let part = if context.starts_with("while parsing") { Part::Parser } else { Part::Scanner };
            (part, line, problem)
        }
        why if why.starts_with("invalid trailing content after") => (Part::Parser, line, NO_KEY),
        why if why.starts_with("unexpected character") || why.starts_with("tabs disallowed") => {
            (Part::Scanner, line, NO_TOKEN)
        }
        "invalid indentation in multiline quoted scalar" => {
            (Part::Scanner, line, "found unexpected end of stream")
        }
        "simple key expected ':'" => (Part::Scanner, line.saturating_add(1), "could not find expected ':'"),
        "alias references unknown anchor" => return unknown_anchor(text, line),
        why => (Part::Scanner, line, why),
    };
    let told = match part {
        Part::Parser => line.saturating_sub(1),
        Part::Scanner if line > 1 => line,
        Part::Scanner => 0,
    };
    if told > 0 { format!("line {told}: {why}") } else { why.to_owned() }
}

/// The complaint about an alias of the line. Upstream names it, and no line.
fn unknown_anchor(text: &str, line: u32) -> String {
    let line = text.lines().nth(line.saturating_sub(1) as usize).unwrap_or_default();
    let rest = line.split_once('*').map_or("", |(_, rest)| rest);
    let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect();
    format!("unknown anchor '{name}' referenced")
}

/// The text before the second document, which upstream ignores.
fn first_document(text: &str) -> &str {
    let mut begun = false;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let bare = line.trim_end();
        let marker = bare == "---" || line.starts_with("--- ");
        let ends = marker || bare == "...";
        if ends && begun {
            return &text[..at];
        }
        begun |= marker || !(bare.is_empty() || bare.trim_start().starts_with(['#', '%']));
        at += line.len();
    }
    text
}

/// Writes a value as YAML.
pub fn encode(value: &Value) -> Result<String, serde_saphyr::SerializeError> {
    serde_saphyr::to_string(value)
}

fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_YAML_DEPTH.min(MAX_DEPTH),
            max_documents: 2,
            max_aliases: 1_000,
            max_anchors: 1_000,
        },
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        with_snippet: false,
        emit_comments: false,
    }
}

/// Writes one node as JSON.
struct Node<'a> {
    out: &'a mut Document,
    depth: usize,
}

impl Node<'_> {
    fn push<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        if self.out.json.len() + text.len() > MAX_EXPANDED {
            return Err(E::custom("document contains excessive aliasing"));
        }
        self.out.json.push_str(text);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.depth > MAX_YAML_DEPTH {
            return Err(D::Error::custom("exceeded max depth"));
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML node")
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        self.push(if value { "true" } else { "false" })
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.push(&value.to_string())
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.push(&value.to_string())
    }

    fn visit_i128<E: serde::de::Error>(self, value: i128) -> Result<(), E> {
        self.push(&value.to_string())
    }

    fn visit_u128<E: serde::de::Error>(self, value: u128) -> Result<(), E> {
        self.push(&value.to_string())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        let number = json::double(value).ok_or_else(|| E::custom("number is not finite"))?;
        self.push(&number.to_string())
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        self.push(&Value::from(value).to_string())
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.push("null")
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<(), E> {
        self.push("null")
    }

    fn visit_some<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        self.out.json.push('[');
        let start = self.out.json.len();
        loop {
            let before = self.out.json.len();
            if before > start {
                self.out.json.push(',');
            }
            if list.next_element_seed(Node { out: self.out, depth: self.depth + 1 })?.is_none() {
                self.out.json.truncate(before);
                self.out.json.push(']');
                return Ok(());
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        self.out.json.push('{');
        while let Some(key) = map.next_key::<Spanned<Key>>()? {
            if !seen.is_empty() {
                self.out.json.push(',');
            }
            let written = match key.value {
                Key::Text(text) => text,
                Key::Null => "null".to_owned(),
                Key::Container(json) => {
                    let why = format!("invalid map key: {}", go_text(&json));
                    self.out.refused.get_or_insert(DecodeError::Yaml(why.clone()));
                    return Err(A::Error::custom(why));
                }
            };
            self.out.json.push_str(if written == "null" { "\"null\"" } else { &written });
            self.out.json.push(':');
            let value_at = self.out.json.len();
            map.next_value_seed(Node { out: self.out, depth: self.depth + 1 })?;
            if written == "null" {
                let value = go_text(self.out.json.get(value_at..).unwrap_or_default());
                let why = format!("unsupported map key of type: %!s(<nil>), key: <nil>, value: {value}");
                self.out.refused.get_or_insert(DecodeError::NoJson(why));
            }
            if seen.contains(&written) {
                let line = key.referenced.line();
                self.out.duplicates.push(format!("line {line}: key {written} already set in map"));
            }
            seen.insert(written);
        }
        self.out.json.push('}');
        Ok(())
    }
}

/// A key of a map.
enum Key {
    /// A JSON string: numbers and booleans become strings, as upstream's converter does.
    Text(String),
    Null,
    /// The JSON of a list or a map, which is no key.
    Container(String),
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut key = Document::default();
        deserializer.deserialize_any(Node { out: &mut key, depth: 0 })?;
        let key = key.json;
        Ok(match key.as_bytes().first() {
            Some(b'"') => Self::Text(key),
            Some(b'{' | b'[') => Self::Container(key),
            _ if key == "null" => Self::Null,
            _ => Self::Text(Value::from(key).to_string()),
        })
    }
}

/// A value as Go's `%#v` prints it.
fn go_text(json: &str) -> String {
    fn print(value: &Value, nil: &str) -> String {
        let inner = |value: &Value| print(value, "interface {}(nil)");
        match value {
            Value::Null => nil.to_owned(),
            Value::String(text) => go_quote(text),
            Value::Array(items) => {
                format!("[]interface {{}}{{{}}}", items.iter().map(inner).collect::<Vec<_>>().join(", "))
            }
            Value::Object(map) => {
                let members = map.iter().map(|(key, value)| format!("{}:{}", go_quote(key), inner(value)));
                format!("map[interface {{}}]interface {{}}{{{}}}", members.collect::<Vec<_>>().join(", "))
            }
            other => other.to_string(),
        }
    }
    print(&json::decode_any(json.as_bytes()).map(|decoded| decoded.value).unwrap_or_default(), "<nil>")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema;
    use ferrite_json::json;

    #[test]
    fn converts_as_upstream() {
        for (text, value) in [
            (
                "a: 1\nb: [x, 'y', \"2\", null, ~, yes, 1.5, 1.0]",
                json!({"a": 1, "b": ["x", "y", "2", null, null, true, 1.5, 1]}),
            ),
            ("1: a\ntrue: b", json!({"1": "a", "true": "b"})),
            ("a: &x {k: v}\nb: *x", json!({"a": {"k": "v"}, "b": {"k": "v"}})),
            ("a: |\n  two\n  lines\n", json!({"a": "two\nlines\n"})),
            ("---\na: 2026-01-02\n", json!({"a": "2026-01-02"})),
            ("{\"a\": [1, {\"b\": \"\\u00e9\"}]}", json!({"a": [1, {"b": "é"}]})),
            ("{a: '}', \"b\": \"\\\"}\"} }\n]", json!({"a": "}", "b": "\"}"})),
            ("[[1]]]", json!([[1]])),
            ("", json!(null)),
        ] {
            assert_eq!(decode_any(text.as_bytes()).map(|d| d.value), Ok(value), "{text}");
        }
    }

    #[test]
    fn reports_duplicates_and_unknown_fields() {
        let type_ = schema::kind("", "v1", "ConfigMap").expect("known");
        let text =
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c, extra: 1}\ndata:\n  k: \"1\"\n  k: \"2\"\n";
        let decoded = decode(type_, text.as_bytes()).expect("valid");
        assert_eq!(
            decoded.strict,
            [
                "yaml: unmarshal errors:\n  line 6: key \"k\" already set in map",
                "unknown field \"metadata.extra\"",
            ]
        );
        assert_eq!(decoded.value["data"], json!({"k": "2"}));
    }

    #[test]
    fn keys_are_scalars_and_not_null() {
        for (text, told) in [
            ("a: {null: b}", "unsupported map key of type: %!s(<nil>), key: <nil>, value: \"b\""),
            ("~: 5", "unsupported map key of type: %!s(<nil>), key: <nil>, value: 5"),
            (
                "~: {a: [x, null]}",
                "unsupported map key of type: %!s(<nil>), key: <nil>, value: map[interface {}]interface {}{\"a\":[]interface {}{\"x\", interface {}(nil)}}",
            ),
            ("? [a, 1]\n: b", "yaml: invalid map key: []interface {}{\"a\", 1}"),
            ("? {a: 1}\n: b", "yaml: invalid map key: map[interface {}]interface {}{\"a\":1}"),
        ] {
            let error = decode_any(text.as_bytes()).expect_err(text).to_string();
            assert_eq!(error, format!("error converting YAML to JSON: {told}"), "{text}");
        }
        assert_eq!(decode_any(b"'null': 1").map(|decoded| decoded.value), Ok(json!({"null": 1})));
    }

    #[test]
    fn only_the_last_value_of_a_key_is_read() {
        let type_ = schema::kind("", "v1", "ConfigMap").expect("known");
        let decoded = decode(type_, b"data: {k: 1, k: \"2\"}").expect("valid");
        assert_eq!(decoded.value["data"], json!({"k": "2"}));
        assert_eq!(decoded.strict, ["yaml: unmarshal errors:\n  line 1: key \"k\" already set in map"]);
    }

    #[test]
    fn refuses_bombs() {
        let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
        for level in 1..12 {
            let before = level - 1;
            let aliases = vec![format!("*a{before}"); 10].join(",");
            bomb.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
        }
        assert!(to_json(bomb.as_bytes()).is_err());
        assert!(to_json("[".repeat(10_000).as_bytes()).is_err());
        let indented: String = (0..5_000).map(|n| format!("{}a:\n", " ".repeat(n))).collect();
        assert!(to_json(indented.as_bytes()).is_err());
        // As upstream: text after the first document is ignored.
        assert_eq!(to_json(b"a: b\n---\nc: d\n").unwrap(), to_json(b"a: b\n").unwrap());
        assert!(to_json(b"a: [").is_err());
    }

    #[test]
    fn encodes_what_it_decodes() {
        let value = json!({"a": "true", "b": ["1", 1, null, {"c": ""}], "d": "x: y\n", "e": {}, "f": [], "g": "2026-01-02"});
        let text = encode(&value).expect("encodes");
        assert_eq!(decode_any(text.as_bytes()).expect("decodes").value, value);
    }

    #[test]
    fn complains_in_upstreams_words() {
        for (text, told) in [
            ("a: {b: c}}", "did not find expected key"),
            ("x: y\na: {b: c}}", "line 1: did not find expected key"),
            ("}", "did not find expected node content"),
            ("{", "line 1: did not find expected node content"),
            ("a: [", "line 1: did not find expected node content"),
            ("x: y\na: {b: c\n", "line 2: did not find expected ',' or '}'"),
            ("x: y\na: @b\n", "line 2: found character that cannot start any token"),
            ("x: y\na: \"b\\q\"\n", "line 2: found unknown escape character"),
            ("x: *nope\n", "unknown anchor 'nope' referenced"),
            ("\ta: b", NO_TOKEN),
            ("# c\n \n \ta: b", "line 3: found character that cannot start any token"),
            ("x: y\na: b: c\n", "line 2: mapping values are not allowed in this context"),
        ] {
            let error = to_json(text.as_bytes()).unwrap_err();
            assert_eq!(error, DecodeError::Yaml(told.into()), "{text}");
        }
        // The text behind the first document is not read.
        assert_eq!(to_json(b"a: b\n...\nc\n").unwrap(), to_json(b"a: b\n").unwrap());
    }

    proptest::proptest! {
        #[test]
        fn never_panics(text in "[\\PC\n]{0,120}") {
            let _ = to_json(text.as_bytes());
        }
    }
}
