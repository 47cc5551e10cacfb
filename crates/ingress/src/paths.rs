//! The path of a request, as rules are compared with it.

use percent_encoding::percent_decode_str;
use std::borrow::Cow;

/// The path without dot segments, empty elements and percent encoding of characters that need none, so that `/a/../b`
/// and `/%62` meet the rules of `/b`. A rule sees the path that a server behind it may understand; the server itself
/// receives the path as the client wrote it. An encoded slash stays encoded: it separates nothing.
pub fn normalized(path: &str) -> Cow<'_, str> {
    let plain = !path.contains('%') && !path.contains("//") && !path.contains("/.");
    if plain {
        return Cow::Borrowed(path);
    }
    let mut elements: Vec<String> = Vec::new();
    let raw: Vec<&str> = path.split('/').skip(1).collect();
    for (place, element) in raw.iter().enumerate() {
        let last = place + 1 == raw.len();
        match decoded(element).as_str() {
            ".." => {
                elements.pop();
                if last {
                    elements.push(String::new());
                }
            }
            "." | "" if !last => {}
            "." => elements.push(String::new()),
            other => elements.push(other.to_owned()),
        }
    }
    Cow::Owned(format!("/{}", elements.join("/")))
}

/// The element with its percent encoding undone, except for slashes and bytes that are no text.
fn decoded(element: &str) -> String {
    let pieces = element.replace("%2f", "%252f").replace("%2F", "%252F");
    percent_decode_str(&pieces).decode_utf8().map_or_else(|_| element.to_owned(), Cow::into_owned)
}

/// The elements of a rule's path; a slash at the end adds none.
pub fn elements(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|element| !element.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_mean_what_a_server_understands() {
        for (path, want) in [
            ("/", "/"),
            ("/a/b", "/a/b"),
            ("/a/b/", "/a/b/"),
            ("/a//b", "/a/b"),
            ("/a/./b", "/a/b"),
            ("/a/../b", "/b"),
            ("/../../b", "/b"),
            ("/a/%2e%2e/b", "/b"),
            ("/a/%2E./b", "/b"),
            ("/a/..", "/"),
            ("/a/b/..", "/a/"),
            ("/a/.", "/a/"),
            ("/%62", "/b"),
            ("/a%2fb", "/a%2fb"),
            ("/a%2F..%2Fb", "/a%2F..%2Fb"),
            ("/%ff", "/%ff"),
            ("/...", "/..."),
            ("/a.b/.c", "/a.b/.c"),
        ] {
            assert_eq!(normalized(path), want, "{path}");
        }
    }
}
