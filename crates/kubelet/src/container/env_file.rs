//! Files of environment variables (`fileKeyRef`): `NAME='value'` lines, a strict part of the shell's grammar.

/// A file of variables is at most this long; a line of upstream's is as long.
pub(crate) const LIMIT: u64 = 64 * 1024;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum EnvFileError {
    #[error("invalid environment variable format at line {line}: {problem}")]
    Format { line: usize, problem: &'static str },
    #[error("invalid environment variable format starting at line {0}: unclosed single quote")]
    Unclosed(usize),
    #[error("the file has more than {LIMIT} bytes")]
    TooLong,
    #[error("the file is no text")]
    NotText,
}

const BLANKS: [char; 2] = [' ', '\t'];

/// The value of `key`; nothing when the file has none, or an empty one. As upstream, lines after the key
/// are not read.
pub(crate) fn value(text: &[u8], key: &str) -> Result<Option<String>, EnvFileError> {
    if u64::try_from(text.len()).is_ok_and(|length| length > LIMIT) {
        return Err(EnvFileError::TooLong);
    }
    let text = std::str::from_utf8(text).map_err(|_| EnvFileError::NotText)?;
    if text.contains('\0') {
        return Err(EnvFileError::NotText);
    }
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    while let Some((first, line)) = lines.next() {
        let line = line.trim_start_matches(BLANKS);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let bad = |problem| EnvFileError::Format { line: first, problem };
        let (name, rest) = line.split_once('=').ok_or(bad("missing '='"))?;
        if name.trim_end_matches(BLANKS).is_empty() {
            return Err(bad("empty variable name"));
        }
        if name.ends_with(BLANKS) {
            return Err(bad("whitespace before '=' is not allowed"));
        }
        // As in a shell: `NAME= 'value'` gives NAME nothing.
        if rest.starts_with(BLANKS) {
            if name == key {
                return Ok(None);
            }
            continue;
        }
        let mut rest = rest.strip_prefix('\'').ok_or(bad("value must be enclosed in single quotes"))?;
        let (mut value, mut at) = (String::new(), first);
        let after = loop {
            if let Some((end, after)) = rest.split_once('\'') {
                value.push_str(end);
                break after.trim_start_matches(BLANKS);
            }
            value.push_str(rest);
            value.push('\n');
            (at, rest) = lines.next().ok_or(EnvFileError::Unclosed(first))?;
        };
        if !after.is_empty() && !after.starts_with('#') {
            let problem = "unexpected content after closing quote";
            return Err(EnvFileError::Format { line: at, problem });
        }
        if name == key {
            return Ok(Some(value).filter(|value| !value.is_empty()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_upstream_reads_them() {
        let found = |text: &str| Ok(Some(text.to_owned()));
        let bad = |line, problem| Err(EnvFileError::Format { line, problem });
        for (text, expected) in [
            ("K='v'", found("v")),
            ("  K='v' # why", found("v")),
            ("# K='x'\n\nA='b'\nK='v'\n", found("v")),
            ("K='one\ntwo'\n", found("one\ntwo")),
            ("A='\nK=no'\nK='v'", found("v")),
            ("K='$(A) \\n'", found("$(A) \\n")),
            ("K='v'\r\n", found("v")),
            ("A='v'", Ok(None)),
            ("K=''", Ok(None)),
            ("K= 'v'", Ok(None)),
            ("", Ok(None)),
            ("K", bad(1, "missing '='")),
            ("='v'", bad(1, "empty variable name")),
            ("K ='v'", bad(1, "whitespace before '=' is not allowed")),
            ("\nK=v", bad(2, "value must be enclosed in single quotes")),
            ("K='a\nb' c", bad(2, "unexpected content after closing quote")),
            ("K='v", Err(EnvFileError::Unclosed(1))),
            ("K='v'\nbroken", found("v")),
            ("K='a\0b'", Err(EnvFileError::NotText)),
        ] {
            assert_eq!(value(text.as_bytes(), "K"), expected, "{text:?}");
        }
        assert_eq!(value(&vec![b'#'; LIMIT as usize + 1], "K"), Err(EnvFileError::TooLong));
        assert_eq!(value(b"K='\xff'", "K"), Err(EnvFileError::NotText));
    }
}
