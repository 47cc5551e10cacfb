//! The text of an expression, places in it, and messages that point at them.

use std::fmt;

/// Longest line, in bytes, that an error message quotes.
const MAX_SNIPPET: usize = 16384;
/// Most errors that one message shows.
const MAX_SHOWN: usize = 100;

/// The text of an expression as code points, with the starts of its lines.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub text: Vec<char>,
    /// Offsets of the first code point of every line.
    lines: Vec<usize>,
}

/// A place in an expression: a line, counted from 1, and a column, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    pub line: i32,
    pub column: i32,
}

impl Location {
    /// The place of errors that concern the whole expression.
    pub const NONE: Self = Self { line: -1, column: -1 };
}

/// One error of the parser or of the type checker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issue {
    pub location: Location,
    pub message: String,
    /// The issue as upstream displays it: place, message and the line with a caret below the place.
    pub display: String,
}

impl fmt::Display for Issue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.display)
    }
}

impl Source {
    pub fn new(text: &str) -> Self {
        let text: Vec<char> = text.chars().collect();
        let mut lines = vec![0];
        lines.extend(text.iter().enumerate().filter(|(_, c)| **c == '\n').map(|(at, _)| at + 1));
        Self { text, lines }
    }

    pub fn location(&self, offset: usize) -> Location {
        let line = self.lines.partition_point(|start| *start <= offset);
        Location { line: line as i32, column: (offset - self.lines[line - 1]) as i32 }
    }

    pub fn slice(&self, start: usize, end: usize) -> String {
        self.text[start..end.min(self.text.len())].iter().collect()
    }

    pub fn issue(&self, location: Location, message: impl Into<String>) -> Issue {
        let message = message.into();
        // As upstream: a text without characters has no first column and no line to show.
        let column = if self.text.is_empty() { 0 } else { location.column + 1 };
        let mut display = format!("ERROR: <input>:{}:{column}: {message}", location.line);
        if let Some(line) = self.line(location.line)
            && !self.text.is_empty()
            && line.iter().map(|c| c.len_utf8()).sum::<usize>() <= MAX_SNIPPET
        {
            display.push_str("\n | ");
            display.extend(line.iter().map(|c| if *c == '\t' { ' ' } else { *c }));
            display.push_str("\n | ");
            let column = location.column.max(0) as usize;
            // Characters of more than one byte take the width of two: their marks are wide, too.
            display.extend(line.iter().take(column).map(|c| if c.is_ascii() { '.' } else { '\u{ff0e}' }));
            display.push(match line.get(column) {
                Some(c) if !c.is_ascii() => '\u{ff3e}',
                _ => '^',
            });
        }
        Issue { location, message, display }
    }

    fn line(&self, line: i32) -> Option<&[char]> {
        let index = usize::try_from(line).ok()?.checked_sub(1)?;
        let start = *self.lines.get(index)?;
        let end = self.lines.get(index + 1).map_or(self.text.len(), |next| next - 1);
        self.text.get(start..end)
    }
}

/// The message that shows `issues` in the order of their places.
pub(crate) fn display(issues: &[Issue]) -> String {
    let mut sorted: Vec<&Issue> = issues.iter().collect();
    sorted.sort_by_key(|issue| issue.location);
    let mut shown: Vec<String> = sorted.iter().take(MAX_SHOWN).map(|issue| issue.display.clone()).collect();
    if issues.len() > MAX_SHOWN {
        shown.push(format!("{} more errors were truncated", issues.len() - MAX_SHOWN));
    }
    shown.join("\n")
}
