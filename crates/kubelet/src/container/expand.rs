//! `$(VAR)` in commands, arguments, environment values and sub-paths.

/// Replaces `$(NAME)` by the result of `lookup`; an unknown reference stays as it is, `$$` is a plain `$`.
pub(crate) fn expand(text: &str, lookup: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(tail) = after.strip_prefix('$') {
            out.push('$');
            rest = tail;
            continue;
        }
        let reference = after.strip_prefix('(').and_then(|inner| inner.split_once(')'));
        match reference {
            Some((name, tail)) => {
                match lookup(name) {
                    Some(value) => out.push_str(&value),
                    None => {
                        out.push_str("$(");
                        out.push_str(name);
                        out.push(')');
                    }
                }
                rest = tail;
            }
            None => {
                out.push('$');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_replaced_as_the_api_says() {
        let lookup = |name: &str| match name {
            "A" => Some("1".to_string()),
            "B" => Some("$(A)".to_string()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        for (text, expected) in [
            ("plain", "plain"),
            ("$(A)", "1"),
            ("x$(A)y$(A)", "x1y1"),
            ("$(B)", "$(A)"),
            ("$(EMPTY)|", "|"),
            ("$(NONE)", "$(NONE)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$", "$$"),
            ("$A $", "$A $"),
            ("$(A", "$(A"),
            ("$()", "$()"),
            ("ü$(A)ü", "ü1ü"),
        ] {
            assert_eq!(expand(text, lookup), expected, "{text}");
        }
    }
}
