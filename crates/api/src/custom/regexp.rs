//! Patterns of schemas: Go's regular expressions, compiled when they are first used.

use ferrite_json::Text;
use regex::Regex;
use std::sync::OnceLock;

/// Bytes that a compiled pattern may take. Go has no such limit, but refuses repetitions beyond 1000.
const SIZE_LIMIT: usize = 1 << 20;

/// A pattern of a schema. Most definitions have many that no object ever meets, so that it is compiled late.
#[derive(Debug)]
pub struct Pattern {
    source: Text,
    compiled: OnceLock<Option<Regex>>,
}

impl Pattern {
    pub fn new(source: &str) -> Self {
        Self { source: source.into(), compiled: OnceLock::new() }
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// A pattern that does not compile matches nothing.
    pub fn is_match(&self, text: &str) -> bool {
        let compiled = self.compiled.get_or_init(|| compile(&self.source).ok());
        compiled.as_ref().is_some_and(|regex| regex.is_match(text))
    }
}

/// The reason why a pattern is refused, in Go's words as far as possible; none if it is good.
pub(super) fn problem(source: &str) -> Option<String> {
    compile(source).err()
}

/// Finds patterns that Go refuses and the regex crate takes: many repetitions, and repetitions of
/// repetitions.
fn refused(source: &str) -> Option<String> {
    const MOST: u32 = 1000;
    let bytes = source.as_bytes();
    let (mut at, mut in_class, mut before) = (0, false, None::<usize>);
    while let Some(byte) = bytes.get(at) {
        let mut end = at + 1;
        let repeats = match byte {
            b'\\' => {
                end += 1;
                false
            }
            b'[' => {
                in_class = true;
                false
            }
            b']' => {
                in_class = false;
                false
            }
            _ if in_class => false,
            b'*' | b'+' | b'?' => true,
            b'{' => match source.get(at..).and_then(|rest| rest.find('}')) {
                Some(length) => {
                    let inside = source.get(at + 1..at + length).unwrap_or_default();
                    let counts: Option<Vec<u32>> = inside
                        .split(',')
                        .filter(|part| !part.is_empty())
                        .map(|part| part.parse().ok())
                        .collect();
                    match counts {
                        Some(counts) if !counts.is_empty() => {
                            end = at + length + 1;
                            if counts.iter().any(|count| *count > MOST) {
                                return Some(format!("invalid repeat count: `{}`", source.get(at..end)?));
                            }
                            true
                        }
                        _ => false,
                    }
                }
                None => false,
            },
            _ => false,
        };
        if repeats {
            // One question mark behind a repetition makes it lazy.
            if bytes.get(end) == Some(&b'?') {
                end += 1;
            }
            if let Some(start) = before {
                return Some(format!("invalid nested repetition operator: `{}`", source.get(start..end)?));
            }
        }
        // A group may begin with a question mark.
        let opens = *byte == b'(' && bytes.get(end) == Some(&b'?');
        if opens {
            end += 1;
        }
        before = repeats.then_some(at);
        at = end;
    }
    None
}

fn compile(source: &str) -> Result<Regex, String> {
    if let Some(why) = refused(source) {
        return Err(format!("error parsing regexp: {why}"));
    }
    let translated = translate(source);
    regex::RegexBuilder::new(&translated).size_limit(SIZE_LIMIT).dfa_size_limit(SIZE_LIMIT).build().map_err(
        |error| {
            let why = explain(source, &error);
            format!("error parsing regexp: {why}")
        },
    )
}

/// Go's classes `\d`, `\s`, `\w` and `\b` are of ASCII only, and `\z` is the end of the text.
fn translate(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut in_class = false;
    let mut chars = source.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                let Some(next) = chars.next() else {
                    out.push('\\');
                    break;
                };
                let replaced = match (next, in_class) {
                    ('d', true) => "0-9",
                    ('d', false) => "[0-9]",
                    ('D', false) => "[^0-9]",
                    ('s', true) => r"\t\n\x0C\r ",
                    ('s', false) => r"[\t\n\x0C\r ]",
                    ('S', false) => r"[^\t\n\x0C\r ]",
                    ('w', true) => "0-9A-Za-z_",
                    ('w', false) => "[0-9A-Za-z_]",
                    ('W', false) => "[^0-9A-Za-z_]",
                    ('b', false) => r"(?-u:\b)",
                    ('B', false) => r"(?-u:\B)",
                    _ => "",
                };
                if replaced.is_empty() {
                    out.push('\\');
                    out.push(next);
                } else {
                    out.push_str(replaced);
                }
            }
            '[' if in_class => match chars.peek() {
                // A class such as `[:alpha:]` inside a class.
                Some(':') => {
                    out.push('[');
                    while let Some(next) = chars.next() {
                        out.push(next);
                        if next == ':' && chars.peek() == Some(&']') {
                            out.extend(chars.next());
                            break;
                        }
                    }
                }
                _ => out.push_str(r"\["),
            },
            '[' => {
                in_class = true;
                out.push('[');
                if chars.peek() == Some(&'^') {
                    out.extend(chars.next());
                }
                // A bracket that comes first is one of the class.
                if chars.peek() == Some(&']') {
                    chars.next();
                    out.push_str(r"\]");
                }
            }
            ']' if in_class => {
                in_class = false;
                out.push(']');
            }
            // Operators between classes that Go does not have.
            '&' | '~' | '-' if in_class && chars.peek() == Some(&c) => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

/// Go's complaint about a pattern.
fn explain(source: &str, error: &regex::Error) -> String {
    let text = error.to_string();
    let has = |what: &str| text.contains(what);
    if has("unclosed group") {
        format!("missing closing ): `{source}`")
    } else if has("unopened group") {
        format!("unexpected ): `{source}`")
    } else if has("unclosed character class") {
        let from = source.rfind('[').unwrap_or_default();
        format!("missing closing ]: `{}`", &source[from..])
    } else if has("repetition operator missing expression") {
        let operator = source.chars().find(|c| matches!(c, '*' | '+' | '?' | '{')).unwrap_or('*');
        format!("missing argument to repetition operator: `{operator}`")
    } else if has("invalid character class range") {
        let chars: Vec<char> = source.chars().collect();
        let bad = chars.windows(3).find(|w| w[1] == '-' && w[0] > w[2]);
        let bad: String = bad.map_or_else(|| source.to_owned(), |w| w.iter().collect());
        format!("invalid character class range: `{bad}`")
    } else if has("look-around") {
        let from = source.find("(?").unwrap_or_default();
        let end = source[from..].char_indices().nth(3).map_or(source.len(), |(at, _)| from + at);
        format!("invalid or unsupported Perl syntax: `{}`", &source[from..end])
    } else if has("incomplete escape") {
        "trailing backslash at end of expression: ``".to_owned()
    } else if has("exceeds size limit") {
        format!("expression too large: `{source}`")
    } else {
        format!("invalid expression: `{source}`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_they_mean_to_go() {
        for (pattern, text, matches) in [
            ("^[a-z]+$", "abc", true),
            ("b", "abc", true),
            (r"^\d+$", "١", false),
            (r"^\w+$", "é", false),
            (r"^[\w.-]+$", "a.b-c", true),
            ("^[]a]+$", "]a", true),
            ("^[[:alpha:]]+$", "aB", true),
            ("^[a[]$", "[", true),
            ("^[a&&b]+$", "&", true),
            (r"^\S+\s\S+$", "a b", true),
            ("^(?:a{2,3}?b*?)+$", "aab", true),
        ] {
            assert_eq!(problem(pattern), None, "{pattern}");
            assert_eq!(Pattern::new(pattern).is_match(text), matches, "{pattern} {text}");
        }
        for (pattern, why) in [
            ("(", "error parsing regexp: missing closing ): `(`"),
            ("a)", "error parsing regexp: unexpected ): `a)`"),
            ("[a", "error parsing regexp: missing closing ]: `[a`"),
            ("*", "error parsing regexp: missing argument to repetition operator: `*`"),
            ("a{1001}", "error parsing regexp: invalid repeat count: `{1001}`"),
            ("a**", "error parsing regexp: invalid nested repetition operator: `**`"),
            ("[z-a]", "error parsing regexp: invalid character class range: `z-a`"),
            ("(?=a)", "error parsing regexp: invalid or unsupported Perl syntax: `(?=`"),
        ] {
            assert_eq!(problem(pattern).as_deref(), Some(why), "{pattern}");
        }
        assert!(problem("((a{1000}){1000}){1000}").is_some());
    }
}
