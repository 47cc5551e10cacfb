//! JSONPath of printer columns and selectable fields: the part that definitions use.
//!
//! `.spec.a`, `.a['b.c']`, `.a[0]`, `.a[-1]`, `.a[*].b`, and `.a[?(@.type=="Ready")].status`.

use ferrite_json::Value;

#[derive(Debug, Clone, PartialEq)]
enum Step {
    Member(String),
    Index(i64),
    Slice(Option<i64>, Option<i64>),
    All,
    Filter { path: Vec<Step>, equal: bool, value: Value },
    Exists(Vec<Step>),
}

/// A parsed path.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonPath(Vec<Step>);

/// Steps of a path are no more than this.
const MAX_STEPS: usize = 64;

impl JsonPath {
    /// None when the text is not a path that is understood.
    pub fn parse(text: &str) -> Option<Self> {
        parse_steps(text.trim()).map(Self)
    }

    /// The values that the path leads to.
    pub fn find<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        follow(&self.0, value)
    }

    /// The names of a path that only descends into members.
    pub fn members(&self) -> Option<Vec<&str>> {
        self.0
            .iter()
            .map(|step| if let Step::Member(name) = step { Some(name.as_str()) } else { None })
            .collect()
    }
}

fn follow<'v>(steps: &[Step], value: &'v Value) -> Vec<&'v Value> {
    let mut found = vec![value];
    for step in steps {
        let mut next = Vec::new();
        for value in found {
            match (step, value) {
                (Step::Member(name), Value::Object(map)) => next.extend(map.get(name)),
                (Step::All, Value::Object(map)) => next.extend(map.values()),
                (Step::All, Value::Array(list)) => next.extend(list),
                (Step::Index(index), Value::Array(list)) => {
                    let at = if *index < 0 { list.len() as i64 + index } else { *index };
                    next.extend(usize::try_from(at).ok().and_then(|at| list.get(at)));
                }
                (Step::Slice(from, to), Value::Array(list)) => {
                    let place = |at: i64| {
                        let at = if at < 0 { list.len() as i64 + at } else { at };
                        usize::try_from(at).unwrap_or_default().min(list.len())
                    };
                    let (from, to) = (place(from.unwrap_or(0)), to.map_or(list.len(), place));
                    next.extend(list.get(from..to).into_iter().flatten());
                }
                (Step::Filter { path, equal, value: wanted }, Value::Array(list)) => {
                    let meets = |item: &&Value| {
                        follow(path, item).first().is_some_and(|found| (*found == wanted) == *equal)
                    };
                    next.extend(list.iter().filter(meets));
                }
                (Step::Exists(path), Value::Array(list)) => {
                    next.extend(list.iter().filter(|item| !follow(path, item).is_empty()));
                }
                _ => {}
            }
        }
        found = next;
    }
    found
}

fn parse_steps(text: &str) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    let mut rest = text.strip_prefix('$').unwrap_or(text);
    while !rest.is_empty() {
        if steps.len() == MAX_STEPS {
            return None;
        }
        if let Some(after) = rest.strip_prefix('.') {
            if after.is_empty() {
                break;
            }
            if after.starts_with('[') {
                rest = after;
                continue;
            }
            let (name, left) = take_name(after)?;
            steps.push(if name == "*" { Step::All } else { Step::Member(name) });
            rest = left;
        } else if let Some(after) = rest.strip_prefix('[') {
            let end = closing(after)?;
            let (inside, left) = after.split_at(end);
            steps.push(parse_bracket(inside.trim())?);
            rest = left.strip_prefix(']')?;
        } else if steps.is_empty() {
            // A path may leave out the first dot.
            let (name, left) = take_name(rest)?;
            steps.push(Step::Member(name));
            rest = left;
        } else {
            return None;
        }
    }
    Some(steps)
}

/// A name up to the next dot or bracket; a backslash takes the next character as it is.
fn take_name(text: &str) -> Option<(String, &str)> {
    let mut name = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '.' | '[' => return (!name.is_empty()).then(|| (name, &text[at..])),
            '\\' => name.extend(chars.next().map(|(_, c)| c)),
            ' ' | '{' | '}' | '(' | ')' => return None,
            c => name.push(c),
        }
    }
    (!name.is_empty()).then_some((name, ""))
}

/// Where the bracket that is open closes, quotes and brackets inside it left aside.
fn closing(text: &str) -> Option<usize> {
    let (mut quote, mut depth) = (None, 0usize);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[') => depth += 1,
            (None, ']') if depth == 0 => return Some(at),
            (None, ']') => depth -= 1,
            _ => {}
        }
    }
    None
}

fn parse_bracket(text: &str) -> Option<Step> {
    if text == "*" {
        return Some(Step::All);
    }
    if let Some(name) = quoted(text) {
        return Some(Step::Member(name));
    }
    if let Some(filter) = text.strip_prefix("?(").and_then(|rest| rest.strip_suffix(')')) {
        return parse_filter(filter.trim());
    }
    if let Some((from, to)) = text.split_once(':') {
        let place = |text: &str| if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) };
        return Some(Step::Slice(place(from)?, place(to)?));
    }
    text.parse().ok().map(Step::Index)
}

fn quoted(text: &str) -> Option<String> {
    let inner = |quote: char| text.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    inner('\'').or_else(|| inner('"')).map(str::to_owned)
}

fn parse_filter(text: &str) -> Option<Step> {
    let operator = ["==", "!="].into_iter().find_map(|operator| Some((operator, text.find(operator)?)));
    let path = |text: &str| parse_steps(text.trim().strip_prefix('@')?);
    let Some((operator, at)) = operator else { return path(text).map(Step::Exists) };
    let right = text[at + 2..].trim();
    let value = match quoted(right) {
        Some(text) => text.into(),
        None => ferrite_json::from_str(right).ok()?,
    };
    Some(Step::Filter { path: path(&text[..at])?, equal: operator == "==", value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn paths_lead_to_values() {
        let object = json!({
            "spec": {"a": 1, "b.c": "x", "l": [{"n": "a", "v": 1}, {"n": "b", "v": 2}]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other"}]},
        });
        for (path, found) in [
            (".spec.a", vec![json!(1)]),
            ("spec.a", vec![json!(1)]),
            (".spec['b.c']", vec![json!("x")]),
            (".spec.b\\.c", vec![json!("x")]),
            (".spec.l[1].v", vec![json!(2)]),
            (".spec.l[-1].n", vec![json!("b")]),
            (".spec.l[*].v", vec![json!(1), json!(2)]),
            (".spec.l[0:1].n", vec![json!("a")]),
            (".status.conditions[?(@.type==\"Ready\")].status", vec![json!("True")]),
            (".status.conditions[?(@.type=='Ready')].status", vec![json!("True")]),
            (".status.conditions[?(@.status)].type", vec![json!("Ready")]),
            (".spec.missing.x", vec![]),
        ] {
            let parsed = JsonPath::parse(path).unwrap_or_else(|| panic!("{path}"));
            assert_eq!(parsed.find(&object).into_iter().cloned().collect::<Vec<_>>(), found, "{path}");
        }
        for bad in [".a[", ".a[x]", ".a b", ".a[?(x)]"] {
            assert_eq!(JsonPath::parse(bad), None, "{bad}");
        }
    }
}
