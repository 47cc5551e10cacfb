//! Semantic versions (semver.org, 2.0.0): their form and their order.

use std::cmp::Ordering;

/// A version without its build metadata, which has no part in the order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Version {
    numbers: [u64; 3],
    before: Vec<Identifier>,
}

/// One part of the mark of a version before its release. Numbers come before words.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Identifier {
    Number(u64),
    Word(String),
}

impl Version {
    /// Reads a version; none if the text has another form.
    pub fn parse(text: &str) -> Option<Self> {
        let (text, build) = match text.split_once('+') {
            Some((text, build)) => (text, Some(build)),
            None => (text, None),
        };
        let (core, before) = match text.split_once('-') {
            Some((core, before)) => (core, Some(before)),
            None => (text, None),
        };
        if !build.is_none_or(|build| build.split('.').all(is_word)) {
            return None;
        }
        let numbers: Vec<u64> = core.split('.').map(number).collect::<Option<_>>()?;
        let before = before.map(|before| before.split('.').map(identifier).collect::<Option<_>>());
        Some(Self { numbers: numbers.try_into().ok()?, before: before.unwrap_or(Some(Vec::new()))? })
    }
}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        // A release follows everything that came before it.
        let is_release = |version: &Self| version.before.is_empty();
        self.numbers
            .cmp(&other.numbers)
            .then_with(|| is_release(self).cmp(&is_release(other)))
            .then_with(|| self.before.cmp(&other.before))
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

fn number(text: &str) -> Option<u64> {
    let plain = is_digits(text) && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok()).flatten()
}

fn identifier(text: &str) -> Option<Identifier> {
    match is_digits(text) {
        true => number(text).map(Identifier::Number),
        false => is_word(text).then(|| Identifier::Word(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_three_numbers() {
        for (text, good) in [
            ("1.2.3", true),
            ("1.2.3-rc.1+build.5", true),
            ("0.0.0", true),
            ("1.2", false),
            ("01.2.3", false),
            ("1.x.3", false),
            ("1.2.3-01", false),
            ("1.2.3-", false),
            ("1.2.3+", false),
            ("", false),
            ("1.2.99999999999999999999", false),
        ] {
            assert_eq!(Version::parse(text).is_some(), good, "{text}");
        }
    }

    #[test]
    fn versions_are_in_order() {
        let ordered = [
            "0.0.0",
            "0.9.0",
            "1.0.0-1",
            "1.0.0-2",
            "1.0.0-alpha",
            "1.0.0-alpha.1",
            "1.0.0-beta",
            "1.0.0",
            "1.10.0",
        ];
        let versions: Vec<Version> = ordered.into_iter().filter_map(Version::parse).collect();
        assert_eq!(versions.len(), ordered.len());
        assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
        assert_eq!(Version::parse("1.0.0+a"), Version::parse("1.0.0+b"));
        assert_eq!(Version::parse("0.0.0"), Some(Version::default()));
    }
}
