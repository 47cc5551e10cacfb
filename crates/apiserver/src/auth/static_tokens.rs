//! Tokens from a file: `--token-auth-file`.

use super::User;
use std::collections::HashMap;

/// Users by their tokens.
#[derive(Clone, Default)]
pub struct StaticTokens(HashMap<String, User>);

impl std::fmt::Debug for StaticTokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Tokens must not reach a log.
        f.debug_tuple("StaticTokens").field(&self.0.len()).finish()
    }
}

/// A line of the file that is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenFileError {
    #[error(
        "line {line} of the token file has {columns} columns: at least token, user name and user uid are needed"
    )]
    Columns { line: usize, columns: usize },
    #[error("line {line} of the token file has a quote that is not closed, or text beside a quoted value")]
    Quote { line: usize },
}

/// The values of a line of comma-separated values. A value in quotes may have commas, and quotes as two of them.
fn columns(line: &str) -> Option<Vec<String>> {
    let mut columns = Vec::new();
    let mut rest = line;
    loop {
        let after = match rest.trim_start().strip_prefix('"') {
            None => {
                let (value, after) = rest.split_once(',').map_or((rest, None), |(v, a)| (v, Some(a)));
                columns.push(value.trim_start().to_owned());
                after
            }
            Some(quoted) => {
                let mut value = String::new();
                let mut left = quoted;
                loop {
                    let (part, after) = left.split_once('"')?;
                    value.push_str(part);
                    match after.strip_prefix('"') {
                        Some(after) => {
                            value.push('"');
                            left = after;
                        }
                        None => {
                            left = after;
                            break;
                        }
                    }
                }
                columns.push(value);
                if left.is_empty() { None } else { Some(left.strip_prefix(',')?) }
            }
        };
        match after {
            Some(after) => rest = after,
            None => return Some(columns),
        }
    }
}

impl StaticTokens {
    /// Reads `token,user,uid,"group1,group2"` lines. As upstream, a line without a token is passed over, and the last
    /// of several lines with the same token counts.
    pub fn parse(text: &str) -> Result<Self, TokenFileError> {
        let mut users = HashMap::new();
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim_end_matches('\r')));
        for (line, content) in lines.filter(|(_, content)| !content.is_empty()) {
            let columns = columns(content).ok_or(TokenFileError::Quote { line })?;
            let [token, name, uid, rest @ ..] = &columns[..] else {
                return Err(TokenFileError::Columns { line, columns: columns.len() });
            };
            if token.is_empty() {
                tracing::warn!(line, "a line of the token file has no token");
                continue;
            }
            let groups = rest.first().map_or("", String::as_str).split(',');
            let groups = groups.map(str::trim).filter(|group| !group.is_empty());
            let user = User { uid: uid.clone(), ..User::new(name.clone(), groups) };
            if users.insert(token.clone(), user).is_some() {
                tracing::warn!(line, "a line of the token file has a token that another line has");
            }
        }
        Ok(Self(users))
    }

    pub(crate) fn user(&self, token: &str) -> Option<&User> {
        self.0.get(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_tokens_with_their_users() {
        let text = "t1,alice,1\nt2,bob,2,\"a, b\"\n\n,nobody,3\nt3,\"o\"\"neil\",4,one\r\nt1,carol,5\n";
        let tokens = StaticTokens::parse(text).expect("valid");
        let of = |token: &str| tokens.user(token).map(|u| (u.name.clone(), u.uid.clone(), u.groups.clone()));
        let groups = |all: &[&str]| all.iter().map(|g| (*g).to_owned()).collect::<Vec<_>>();
        assert_eq!(of("t1"), Some(("carol".into(), "5".into(), groups(&["system:authenticated"]))));
        assert_eq!(of("t2"), Some(("bob".into(), "2".into(), groups(&["a", "b", "system:authenticated"]))));
        assert_eq!(of("t3").map(|u| u.0), Some("o\"neil".into()));
        assert_eq!((of(""), of("t4")), (None, None));
    }

    #[test]
    fn lines_that_are_no_tokens_are_named() {
        for (text, expected) in [
            ("t,u", TokenFileError::Columns { line: 1, columns: 2 }),
            ("t,u,1\n\"t,u,1", TokenFileError::Quote { line: 2 }),
            ("t,u,1,\"a\"b", TokenFileError::Quote { line: 1 }),
        ] {
            assert_eq!(StaticTokens::parse(text).err(), Some(expected), "{text}");
        }
    }
}
