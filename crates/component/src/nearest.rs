//! The known name that a user most likely meant.

/// The name that differs from `asked` by the fewest letters, if they are few.
pub fn nearest<'a>(asked: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let asked: Vec<char> = asked.chars().take(MAX_LENGTH).map(|c| c.to_ascii_lowercase()).collect();
    let (distance, name) = known
        .into_iter()
        .map(|name| {
            let letters: Vec<char> = name.chars().take(MAX_LENGTH).map(|c| c.to_ascii_lowercase()).collect();
            (distance(&asked, &letters), name)
        })
        .min_by_key(|(distance, _)| *distance)?;
    (distance <= asked.len().max(3) / 3).then_some(name)
}

/// Longer names are compared by their first letters only: the comparison takes quadratic time.
const MAX_LENGTH: usize = 64;

/// The number of letters to insert, delete or replace (Levenshtein).
fn distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typing_error_is_recognised_and_a_stranger_is_not() {
        let known = ["leaderElection", "clientConnection", "profiles"];
        for (asked, expected) in [
            ("leaderElecton", Some("leaderElection")),
            ("clientconnection", Some("clientConnection")),
            ("profile", Some("profiles")),
            ("metrics", None),
            ("", None),
        ] {
            assert_eq!(nearest(asked, known), expected, "{asked}");
        }
        assert_eq!(nearest("x", []), None);
    }
}
