//! One line of a CRI log, and the options of a reader.

use jiff::Timestamp;
use std::time::Duration;

/// `<time> <stream> <P|F> <text>`. The text excludes the newline.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    pub time: &'a str,
    pub stderr: bool,
    /// The text ends here; otherwise the container's line goes on with the next one.
    pub ends: bool,
    pub text: &'a [u8],
}

/// A line of the log, with its newline; nothing when it is not one.
pub(crate) fn parse(raw: &[u8]) -> Option<Line<'_>> {
    let raw = raw.strip_suffix(b"\n").unwrap_or(raw);
    let mut parts = raw.splitn(4, |b| *b == b' ');
    let time = std::str::from_utf8(parts.next()?).ok()?;
    let stderr = match parts.next()? {
        b"stdout" => false,
        b"stderr" => true,
        _ => return None,
    };
    let tags = parts.next()?;
    let ends = tags.split(|b| *b == b':').next() != Some(b"P");
    Some(Line { time, stderr, ends, text: parts.next().unwrap_or_default() })
}

/// A reader's options.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LogOptions {
    pub follow: bool,
    pub previous: bool,
    pub timestamps: bool,
    pub tail: Option<u64>,
    pub limit_bytes: Option<u64>,
    pub since: Option<Timestamp>,
    /// Only this stream.
    pub stderr: Option<bool>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum OptionError {
    #[error("{name}: invalid value {value:?}")]
    Invalid { name: &'static str, value: String },
    #[error("at most one of sinceTime or sinceSeconds may be specified")]
    TwoSinces,
}

impl LogOptions {
    /// From the query of a request, by PodLogOptions' names.
    pub(crate) fn from_query<'a>(
        query: impl Iterator<Item = (&'a str, &'a str)>,
        now: Timestamp,
    ) -> Result<Self, OptionError> {
        let mut options = Self::default();
        let mut since_seconds = None;
        for (key, value) in query {
            let number =
                |name| value.parse::<u64>().map_err(|_| OptionError::Invalid { name, value: value.into() });
            // As upstream's conversion; Python clients write `True` and `False`.
            let flag = value != "0" && !value.eq_ignore_ascii_case("false");
            match key {
                "follow" => options.follow = flag,
                "previous" => options.previous = flag,
                "timestamps" => options.timestamps = flag,
                "tailLines" | "tail" if value != "all" && !value.is_empty() => {
                    options.tail = Some(number("tailLines")?);
                }
                "limitBytes" if !value.is_empty() => {
                    options.limit_bytes = match number("limitBytes")? {
                        0 => return Err(OptionError::Invalid { name: "limitBytes", value: value.into() }),
                        n => Some(n),
                    };
                }
                "sinceSeconds" if !value.is_empty() => since_seconds = Some(number("sinceSeconds")?),
                "sinceTime" if !value.is_empty() => {
                    let time = value
                        .parse()
                        .map_err(|_| OptionError::Invalid { name: "sinceTime", value: value.into() })?;
                    options.since = Some(time);
                }
                "stream" => {
                    options.stderr = match value {
                        "Stdout" => Some(false),
                        "Stderr" => Some(true),
                        _ => None,
                    };
                }
                _ => {}
            }
        }
        if let Some(seconds) = since_seconds {
            if options.since.is_some() {
                return Err(OptionError::TwoSinces);
            }
            let ago = now.checked_sub(Duration::from_secs(seconds));
            options.since = Some(ago.unwrap_or(Timestamp::MIN));
        }
        Ok(options)
    }
}

/// Turns lines of the log into the bytes a reader gets. Remembers how much it has given.
#[derive(Debug)]
pub(crate) struct Formatter {
    timestamps: bool,
    since: Option<Timestamp>,
    stderr: Option<bool>,
    left: Option<u64>,
    /// The line in progress was begun, so its continuation gets no time in front.
    continued: bool,
}

impl Formatter {
    pub(crate) fn new(options: &LogOptions) -> Self {
        Self {
            timestamps: options.timestamps,
            since: options.since,
            stderr: options.stderr,
            left: options.limit_bytes,
            continued: false,
        }
    }

    /// Appends the part of `raw` that the reader gets. Returns false when the reader has all it may get.
    pub(crate) fn push(&mut self, raw: &[u8], out: &mut Vec<u8>) -> bool {
        let Some(line) = parse(raw) else { return true };
        if self.stderr.is_some_and(|wanted| wanted != line.stderr) {
            return true;
        }
        if let Some(since) = self.since {
            match line.time.parse::<Timestamp>() {
                Ok(time) if time < since => return true,
                _ => {}
            }
        }
        let start = out.len();
        if self.timestamps && !self.continued {
            out.extend_from_slice(line.time.as_bytes());
            out.push(b' ');
        }
        out.extend_from_slice(line.text);
        if line.ends {
            out.push(b'\n');
        }
        self.continued = !line.ends;
        if let Some(left) = &mut self.left {
            let added = (out.len() - start) as u64;
            if added >= *left {
                out.truncate(start + usize::try_from(*left).unwrap_or(usize::MAX));
                *left = 0;
                return false;
            }
            *left -= added;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "2024-01-01T00:00:00.000000001Z stdout F one\n\
                       2024-01-01T00:00:01Z stderr F err\n\
                       garbage\n\
                       2024-01-01T00:00:02Z stdout P par\n\
                       2024-01-01T00:00:02Z stdout F tial\n\
                       2024-01-01T00:00:03Z stdout F\n";

    fn run(options: LogOptions) -> String {
        let mut formatter = Formatter::new(&options);
        let mut out = Vec::new();
        for line in LOG.as_bytes().split_inclusive(|b| *b == b'\n') {
            if !formatter.push(line, &mut out) {
                break;
            }
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn readers_get_what_they_ask_for() {
        let all = LogOptions::default;
        for (options, expected) in [
            (all(), "one\nerr\npartial\n\n"),
            (LogOptions { limit_bytes: Some(6), ..all() }, "one\ner"),
            (LogOptions { stderr: Some(true), ..all() }, "err\n"),
            (LogOptions { since: Some("2024-01-01T00:00:02Z".parse().unwrap()), ..all() }, "partial\n\n"),
            (
                LogOptions {
                    timestamps: true,
                    since: Some("2024-01-01T00:00:02Z".parse().unwrap()),
                    ..all()
                },
                "2024-01-01T00:00:02Z partial\n2024-01-01T00:00:03Z \n",
            ),
        ] {
            assert_eq!(run(options.clone()), expected, "{options:?}");
        }
    }

    #[test]
    fn queries() {
        let now: Timestamp = "2024-01-01T00:01:00Z".parse().unwrap();
        let parse = |pairs: &[(&str, &str)]| LogOptions::from_query(pairs.iter().copied(), now);
        let got =
            parse(&[("follow", "true"), ("tailLines", "5"), ("sinceSeconds", "60"), ("x", "y")]).unwrap();
        assert!(got.follow && got.tail == Some(5));
        assert_eq!(got.since, Some("2024-01-01T00:00:00Z".parse().unwrap()));
        for (value, expected) in [
            ("true", true),
            ("True", true),
            ("", true),
            ("1", true),
            ("false", false),
            ("False", false),
            ("0", false),
        ] {
            assert_eq!(parse(&[("follow", value)]).unwrap().follow, expected, "{value}");
        }
        assert!(parse(&[("tailLines", "-1")]).is_err());
        assert!(parse(&[("limitBytes", "0")]).is_err());
        assert_eq!(
            parse(&[("sinceSeconds", "1"), ("sinceTime", "2024-01-01T00:00:00Z")]),
            Err(OptionError::TwoSinces)
        );
    }
}
