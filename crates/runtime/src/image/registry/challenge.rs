//! Parses a registry's authentication challenge (`WWW-Authenticate`) and the token server's response. Pure.

use std::time::Duration;

use serde::Deserialize;

/// The authentication that a registry asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Challenge {
    /// A name and a password, for the registry itself.
    Basic,
    /// A token from that server.
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

/// Longest header that is parsed.
const MAX_HEADER: usize = 8 << 10;

/// The strongest of the challenges in the headers; `None` when we know none of them.
pub fn choose<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Challenge> {
    let mut basic = None;
    for header in headers.filter(|header| header.len() <= MAX_HEADER) {
        match parse(header) {
            Some(bearer @ Challenge::Bearer { .. }) => return Some(bearer),
            Some(Challenge::Basic) => basic = Some(Challenge::Basic),
            None => {}
        }
    }
    basic
}

fn parse(header: &str) -> Option<Challenge> {
    let header = header.trim_start();
    let (scheme, rest) = header.split_once([' ', '\t']).unwrap_or((header, ""));
    if scheme.eq_ignore_ascii_case("basic") {
        return Some(Challenge::Basic);
    }
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let (mut realm, mut service, mut scope) = (None, None, None);
    let mut rest = rest;
    while let Some((key, after)) = rest.split_once('=') {
        let (value, after) = value(after)?;
        match key.trim_matches([',', ' ', '\t']).to_ascii_lowercase().as_str() {
            "realm" => realm = Some(value),
            "service" => service = Some(value),
            "scope" => scope = Some(value),
            _ => {}
        }
        rest = after;
    }
    Some(Challenge::Bearer { realm: realm?, service, scope })
}

/// A word or a quoted text, and the rest.
fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(',').unwrap_or(text.len());
        return Some((text[..end].trim().to_owned(), &text[end..]));
    };
    let mut out = String::new();
    let mut characters = quoted.char_indices();
    while let Some((index, character)) = characters.next() {
        match character {
            '"' => return Some((out, &quoted[index + 1..])),
            '\\' => out.push(characters.next()?.1),
            other => out.push(other),
        }
    }
    None
}

/// A token and how long it is good for.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    pub token: String,
    pub life: Duration,
}

/// Tokens are good for at least this long, whatever their server says, as other clients have it.
const SHORTEST: u64 = 60;

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    token: Option<String>,
    /// The same token under its OAuth 2 name.
    #[serde(default)]
    access_token: Option<String>,
    #[serde(default)]
    expires_in: Option<f64>,
}

/// Reads a token server's answer.
pub fn parse_token(bytes: &[u8]) -> Result<Token, &'static str> {
    let answer: Answer = serde_json::from_slice(bytes).map_err(|_| "the token server's answer is no JSON")?;
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let token = given(answer.token)
        .or(given(answer.access_token))
        .ok_or("the token server's answer has no token in it")?;
    let seconds = answer.expires_in.filter(|s| s.is_finite() && *s > 0.0).map_or(0, |s| s as u64);
    Ok(Token { token, life: Duration::from_secs(seconds.clamp(SHORTEST, 24 * 3600)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers() {
        let bearer = |realm: &str, service: Option<&str>, scope: Option<&str>| {
            Some(Challenge::Bearer {
                realm: realm.into(),
                service: service.map(str::to_owned),
                scope: scope.map(str::to_owned),
            })
        };
        for (header, want) in [
            ("Basic realm=\"x\"", Some(Challenge::Basic)),
            ("basic", Some(Challenge::Basic)),
            (
                "Bearer realm=\"https://a/t\",service=\"s\",scope=\"repository:x:pull,push\"",
                bearer("https://a/t", Some("s"), Some("repository:x:pull,push")),
            ),
            ("bearer  service=s , realm=https://a/t", bearer("https://a/t", Some("s"), None)),
            ("Bearer realm=\"a\\\"b\",error=\"insufficient_scope\"", bearer("a\"b", None, None)),
            ("Bearer service=\"s\"", None),
            ("Bearer realm=\"unfinished", None),
            ("Bearer", None),
            ("Negotiate abc", None),
            ("", None),
        ] {
            assert_eq!(parse(header), want, "{header}");
        }
        let both = ["Basic realm=\"x\"", "Bearer realm=\"r\""];
        assert_eq!(choose(both.into_iter()), bearer("r", None, None), "a token goes before a password");
        assert_eq!(choose(["Negotiate"].into_iter()), None);
        let long = format!("Bearer realm=\"{}\"", "x".repeat(MAX_HEADER));
        assert_eq!(choose([long.as_str()].into_iter()), None);
    }

    #[test]
    fn tokens() {
        for (text, want) in [
            (r#"{"token":"a","expires_in":300}"#, Some(("a", 300))),
            (r#"{"access_token":"b"}"#, Some(("b", 60))),
            (r#"{"token":"","access_token":"b","expires_in":5}"#, Some(("b", 60))),
            (r#"{"token":"a","access_token":"a","expires_in":1e300,"issued_at":"x"}"#, Some(("a", 86_400))),
            (r#"{"token":"a","expires_in":-1}"#, Some(("a", 60))),
            ("{}", None),
            ("[]", None),
            ("no", None),
        ] {
            let token = parse_token(text.as_bytes()).ok();
            assert_eq!(token.as_ref().map(|t| (t.token.as_str(), t.life.as_secs())), want, "{text}");
        }
    }
}
