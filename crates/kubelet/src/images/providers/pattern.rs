//! Which images a pattern means: `*.example.com`, `registry.io:8080/path`.

/// Why something is not a pattern, in the words of upstream's URL parser.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("parse {url:?}: {problem}")]
pub(super) struct PatternError {
    url: String,
    problem: String,
}

/// Host with wildcards in its labels, port, and the beginning of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pattern {
    labels: Vec<String>,
    port: String,
    path: String,
}

impl Pattern {
    pub(super) fn parse(text: &str) -> Result<Self, PatternError> {
        let wrong = |problem: String| Err(PatternError { url: format!("https://{text}"), problem });
        let end = text.find(['/', '?', '#']).unwrap_or(text.len());
        let (host, rest) = text.split_at(end);
        let path = rest.split(['?', '#']).next().unwrap_or_default();
        if text.contains(|c: char| c.is_ascii_control()) {
            return wrong("net/url: invalid control character in URL".into());
        }
        if let Some(bad) = host.chars().find(|c| " \"<>\\^`{|}".contains(*c)) {
            return wrong(format!("invalid character {bad:?} in host name").replace('\'', "\""));
        }
        for (at, _) in text.match_indices('%') {
            let escape: String = text[at..].chars().take(3).collect();
            let hex = escape.len() == 3 && escape[1..].bytes().all(|b| b.is_ascii_hexdigit());
            if !hex || at < host.len() {
                return wrong(format!("invalid URL escape {escape:?}"));
            }
        }
        // Brackets hold an IPv6 address, whose colons begin no port.
        let after_address = host.rfind(']').map_or(0, |at| at + 1);
        let (name, port) = match host[after_address..].find(':') {
            Some(at) => {
                let name = &host[..after_address + at];
                let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
                (bare.unwrap_or(name), &host[after_address + at + 1..])
            }
            None => (host, ""),
        };
        if !port.bytes().all(|b| b.is_ascii_digit()) {
            return wrong(format!("invalid port \":{port}\" after host"));
        }
        Ok(Self {
            labels: name.split('.').map(str::to_owned).collect(),
            port: port.to_owned(),
            path: path.to_owned(),
        })
    }

    /// As upstream: as many labels, each matched by itself; the same port; the path is a plain prefix.
    pub(super) fn matches(&self, image: &str) -> bool {
        let Ok(image) = Self::parse(image) else { return false };
        self.port == image.port
            && self.labels.len() == image.labels.len()
            && image.path.starts_with(&self.path)
            && self
                .labels
                .iter()
                .zip(&image.labels)
                .all(|(pattern, label)| glob(pattern.as_bytes(), label.as_bytes()))
    }
}

/// Shell patterns as Go's `filepath.Match` reads them: `*`, `?`, `[a-z]`, `[^a]`, `\x`. A pattern that is none
/// matches nothing.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let Some((first, rest)) = pattern.split_first() else { return text.is_empty() };
    match first {
        b'*' => (0..=text.len()).any(|skipped| glob(rest, &text[skipped..])),
        b'?' => text.split_first().is_some_and(|(_, text)| glob(rest, text)),
        b'[' => text.split_first().is_some_and(|(byte, text)| {
            class(rest, *byte).is_some_and(|(matched, rest)| matched && glob(rest, text))
        }),
        b'\\' => rest.split_first().is_some_and(|(escaped, rest)| {
            text.split_first().is_some_and(|(byte, text)| byte == escaped && glob(rest, text))
        }),
        _ => text.split_first().is_some_and(|(byte, text)| byte == first && glob(rest, text)),
    }
}

/// Returns true if a byte is in the class that begins here, and the pattern after the class.
fn class(pattern: &[u8], byte: u8) -> Option<(bool, &[u8])> {
    let (negated, mut rest) = match pattern.strip_prefix(b"^") {
        Some(rest) => (true, rest),
        None => (false, pattern),
    };
    let (mut matched, mut any) = (false, false);
    loop {
        if any && let Some(rest) = rest.strip_prefix(b"]") {
            return Some((matched != negated, rest));
        }
        let (low, after) = class_member(rest)?;
        let (high, after) = match after.strip_prefix(b"-") {
            Some(after) => class_member(after)?,
            None => (low, after),
        };
        matched |= (low..=high).contains(&byte);
        any = true;
        rest = after;
    }
}

fn class_member(pattern: &[u8]) -> Option<(u8, &[u8])> {
    match pattern {
        [b'\\', escaped, rest @ ..] => Some((*escaped, rest)),
        [b'-' | b']', ..] => None,
        [byte, rest @ ..] => Some((*byte, rest)),
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images() {
        for (pattern, image, expected) in [
            (
                "123456789.dkr.ecr.us-east-1.amazonaws.com",
                "123456789.dkr.ecr.us-east-1.amazonaws.com/a",
                true,
            ),
            ("*.azurecr.io", "x.azurecr.io/app", true),
            ("*.azurecr.io", "x.y.azurecr.io/app", false),
            ("*.azurecr.io", "azurecr.io/app", false),
            ("*.*.registry.io", "a.b.registry.io/c", true),
            ("app*.k8s.io", "app1.k8s.io/x", true),
            ("app*.k8s.io", "web.k8s.io/x", false),
            ("gcr.io", "gcr.io", true),
            ("gcr.io/path", "gcr.io/path/x", true),
            ("gcr.io/path", "gcr.io/pathology", true),
            ("gcr.io/path", "gcr.io/other", false),
            ("registry.io:8080/path", "registry.io:8080/path/x", true),
            ("registry.io:8080", "registry.io/x", false),
            ("registry.io", "registry.io:8080/x", false),
            ("127.0.0.*", "127.0.0.1:5000/x", false),
            ("127.0.0.*:5000", "127.0.0.1:5000/x", true),
            ("[::1]:5000", "[::1]:5000/x", true),
            ("r?.io", "r1.io/x", false),
            ("r[0-3].io", "r2.io/x", true),
            ("r[0-3].io", "r4.io/x", false),
            ("r[0-3.io", "r2.io/x", false),
            ("docker.io", "docker.io/library/busybox", true),
        ] {
            let parsed = Pattern::parse(pattern).unwrap();
            assert_eq!(parsed.matches(image), expected, "{pattern} {image}");
        }
    }

    #[test]
    fn what_is_no_pattern() {
        for (text, problem) in [
            ("registry.io:abc", "parse \"https://registry.io:abc\": invalid port \":abc\" after host"),
            ("a b.io", "parse \"https://a b.io\": invalid character \" \" in host name"),
            ("%invalid%", "parse \"https://%invalid%\": invalid URL escape \"%in\""),
            ("a.io/%zz", "parse \"https://a.io/%zz\": invalid URL escape \"%zz\""),
        ] {
            assert_eq!(Pattern::parse(text).unwrap_err().to_string(), problem);
        }
        assert!(Pattern::parse("a.io/%20x").is_ok());
    }
}
