//! JSONPath of printer columns and selectable fields: the part that definitions use.
//!
//! `.spec.a`, `.a['b.c']`, `.a[0]`, `.a[-1]`, `.a[1:9:2]`, `.a[0,2]`, `.a[*].b`, `.a..b`, and
//! `.a[?(@.type=="Ready")].status` with any comparison.

use ferrite_json::Value;
use std::cmp::Ordering;

#[derive(Debug, Clone, PartialEq)]
enum Step {
    Member(String),
    Index(i64),
    Slice {
        from: Option<i64>,
        to: Option<i64>,
        step: usize,
    },
    All,
    /// The value and all that it holds but plain values.
    Recursive,
    /// The results of several steps, one after the other.
    Union(Vec<Step>),
    Filter {
        left: Vec<Step>,
        comparison: Comparison,
        right: Operand,
    },
    Exists(Vec<Step>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// The right side of a comparison.
#[derive(Debug, Clone, PartialEq)]
enum Operand {
    Value(Value),
    Path(Vec<Step>),
}

impl Comparison {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "==" => Self::Equal,
            "!=" => Self::Unequal,
            "<" => Self::Less,
            "<=" => Self::LessOrEqual,
            ">" => Self::Greater,
            ">=" => Self::GreaterOrEqual,
            _ => return None,
        })
    }

    /// Compares two values. Those of different types have no order, and are not equal.
    fn holds(self, left: &Value, right: &Value) -> bool {
        let order = match (left, right) {
            (Value::Number(_), Value::Number(_)) => match (left.as_i64(), right.as_i64()) {
                (Some(left), Some(right)) => Some(left.cmp(&right)),
                _ => left.as_f64().zip(right.as_f64()).and_then(|(left, right)| left.partial_cmp(&right)),
            },
            (Value::String(left), Value::String(right)) => Some(left.as_str().cmp(right.as_str())),
            _ => None,
        };
        match self {
            Self::Equal => left == right,
            Self::Unequal => left != right,
            Self::Less => order == Some(Ordering::Less),
            Self::LessOrEqual => order.is_some_and(Ordering::is_le),
            Self::Greater => order == Some(Ordering::Greater),
            Self::GreaterOrEqual => order.is_some_and(Ordering::is_ge),
        }
    }
}

/// A parsed path.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonPath(Vec<Step>);

/// Steps of a path are no more than this.
const MAX_STEPS: usize = 64;
/// Values that are visited for one path. Steps that yield a value more than once would multiply otherwise.
const MAX_VISITS: usize = 50_000;

impl JsonPath {
    /// None when the text is not a path that is understood.
    pub fn parse(text: &str) -> Option<Self> {
        parse_steps(text.trim(), MAX_NESTING).map(Self)
    }

    /// The values that the path leads to; none where it visits too many.
    pub fn find<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        Walk { left: MAX_VISITS }.follow(&self.0, value).unwrap_or_default()
    }

    /// The names of a path that only descends into members.
    pub fn members(&self) -> Option<Vec<&str>> {
        self.0
            .iter()
            .map(|step| if let Step::Member(name) = step { Some(name.as_str()) } else { None })
            .collect()
    }
}

/// Too many values were visited.
struct TooMany;

struct Walk {
    /// Values that may still be visited.
    left: usize,
}

impl Walk {
    fn follow<'v>(&mut self, steps: &[Step], value: &'v Value) -> Result<Vec<&'v Value>, TooMany> {
        let mut found = vec![value];
        for step in steps {
            let mut next = Vec::new();
            for value in found {
                self.step(step, value, &mut next)?;
            }
            found = next;
        }
        Ok(found)
    }

    fn visit(&mut self, count: usize) -> Result<(), TooMany> {
        self.left = self.left.checked_sub(count).ok_or(TooMany)?;
        Ok(())
    }

    fn step<'v>(&mut self, step: &Step, value: &'v Value, next: &mut Vec<&'v Value>) -> Result<(), TooMany> {
        self.visit(1)?;
        match (step, value) {
            (Step::Member(name), Value::Object(map)) => next.extend(map.get(name)),
            (Step::All, Value::Object(map)) => {
                self.visit(map.len())?;
                next.extend(map.values());
            }
            (Step::All, Value::Array(list)) => {
                self.visit(list.len())?;
                next.extend(list);
            }
            (Step::Index(index), Value::Array(list)) => {
                next.extend(place(*index, list.len()).and_then(|at| list.get(at)));
            }
            (Step::Slice { from, to, step }, Value::Array(list)) => {
                let from = place(from.unwrap_or(0), list.len());
                let to = to.map_or(Some(list.len()), |to| place(to, list.len()));
                // As upstream: a slice beyond the end has nothing.
                let part = from.zip(to).and_then(|(from, to)| list.get(from..to));
                self.visit(part.map_or(0, <[Value]>::len))?;
                next.extend(part.into_iter().flatten().step_by(*step));
            }
            (Step::Recursive, value) => self.descend(value, next)?,
            (Step::Union(steps), value) => {
                for step in steps {
                    self.step(step, value, next)?;
                }
            }
            (Step::Filter { left, comparison, right }, Value::Array(list)) => {
                self.visit(list.len())?;
                for item in list {
                    let left = self.follow(left, item)?;
                    let right = match right {
                        Operand::Value(value) => vec![value],
                        Operand::Path(path) => self.follow(path, item)?,
                    };
                    if let (Some(left), Some(right)) = (left.first(), right.first())
                        && comparison.holds(left, right)
                    {
                        next.push(item);
                    }
                }
            }
            (Step::Exists(path), Value::Array(list)) => {
                self.visit(list.len())?;
                for item in list {
                    if !self.follow(path, item)?.is_empty() {
                        next.push(item);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn descend<'v>(&mut self, value: &'v Value, next: &mut Vec<&'v Value>) -> Result<(), TooMany> {
        self.visit(1)?;
        let below: Vec<&Value> = match value {
            Value::Object(map) => map.values().collect(),
            Value::Array(list) => list.iter().collect(),
            _ => return Ok(()),
        };
        if !below.is_empty() {
            next.push(value);
        }
        below.into_iter().try_for_each(|value| self.descend(value, next))
    }
}

/// A place in a list, counted from its end if it is negative.
fn place(at: i64, length: usize) -> Option<usize> {
    let length = i64::try_from(length).ok()?;
    usize::try_from(if at < 0 { length.checked_add(at)? } else { at }).ok()
}

/// Filters may be nested in filters so deep.
const MAX_NESTING: usize = 8;

/// `nesting` is how deep filters in the text may be nested.
fn parse_steps(text: &str, nesting: usize) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    let mut rest = text.strip_prefix('$').unwrap_or(text);
    while !rest.is_empty() {
        if steps.len() == MAX_STEPS {
            return None;
        }
        if let Some(after) = rest.strip_prefix("..") {
            if steps.last() == Some(&Step::Recursive) {
                return None;
            }
            steps.push(Step::Recursive);
            rest = after;
            if !rest.is_empty() && !rest.starts_with(['.', '[']) {
                let (name, left) = take_name(rest).filter(|(name, _)| name != "*")?;
                steps.push(Step::Member(name));
                rest = left;
            }
        } else if let Some(after) = rest.strip_prefix('.') {
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
            steps.push(parse_bracket(inside.trim(), true, nesting)?);
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

fn parse_bracket(text: &str, takes_union: bool, nesting: usize) -> Option<Step> {
    if text == "*" {
        return Some(Step::All);
    }
    if let Some(filter) = text.strip_prefix("?(").and_then(|rest| rest.strip_suffix(')')) {
        return parse_filter(filter.trim(), nesting.checked_sub(1)?);
    }
    if takes_union && text.contains(',') {
        let parts = text.split(',').take(MAX_STEPS + 1);
        let parts: Option<Vec<Step>> = parts.map(|part| parse_bracket(part.trim(), false, nesting)).collect();
        return parts.filter(|parts| parts.len() <= MAX_STEPS).map(Step::Union);
    }
    if let Some(name) = quoted(text) {
        return Some(Step::Member(name));
    }
    let mut parts = text.split(':');
    let first = parts.next()?;
    let number = |text: &str| if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) };
    match (parts.next(), parts.next(), parts.next()) {
        (None, ..) => first.parse().ok().map(Step::Index),
        (Some(to), step, None) => {
            let step: Option<i64> = number(step.unwrap_or_default())?;
            let step = usize::try_from(step.unwrap_or(1)).ok().filter(|step| *step > 0)?;
            Some(Step::Slice { from: number(first)?, to: number(to)?, step })
        }
        _ => None,
    }
}

fn quoted(text: &str) -> Option<String> {
    let inner = |quote: char| text.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    inner('\'').or_else(|| inner('"')).map(str::to_owned)
}

/// The content of `?( )`: a path, or a comparison of a path with a value or another path.
fn parse_filter(text: &str, nesting: usize) -> Option<Step> {
    const SIGNS: [char; 4] = ['!', '<', '>', '='];
    let path = |text: &str| parse_steps(text.trim().strip_prefix('@')?, nesting);
    let Some(at) = text.find(SIGNS).filter(|at| *at > 0) else { return path(text).map(Step::Exists) };
    let (left, rest) = text.split_at(at);
    let end = rest.find(|sign| !SIGNS.contains(&sign))?;
    let (sign, right) = rest.split_at(end);
    let right = right.trim();
    let right = match quoted(right) {
        Some(text) => Operand::Value(text.into()),
        None if right.starts_with('@') => Operand::Path(path(right)?),
        None => Operand::Value(ferrite_json::from_str(right).ok()?),
    };
    Some(Step::Filter { left: path(left)?, comparison: Comparison::parse(sign)?, right })
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
            (".status.conditions[?(@.type!='Ready')].type", vec![json!("Other")]),
            (".spec.l[?(@.v>1)].n", vec![json!("b")]),
            (".spec.l[?(@.v >= 1)].n", vec![json!("a"), json!("b")]),
            (".spec.l[?(@.v<2)].n", vec![json!("a")]),
            (".spec.l[?(@.v<=1.5)].n", vec![json!("a")]),
            (".spec.l[?(@.n<'b')].v", vec![json!(1)]),
            (".spec.l[?(@.n>1)].v", vec![]),
            (".spec.l[?(@.n==@.n)].v", vec![json!(1), json!(2)]),
            (".spec.l[0,1].v", vec![json!(1), json!(2)]),
            (".spec['a','b.c']", vec![json!(1), json!("x")]),
            (".spec.l[::2].n", vec![json!("a")]),
            (".spec.l[0:9].n", vec![]),
            ("..n", vec![json!("a"), json!("b")]),
            (".spec..v", vec![json!(1), json!(2)]),
            ("..l[0].n", vec![json!("a")]),
            (".spec.missing.x", vec![]),
        ] {
            let parsed = JsonPath::parse(path).unwrap_or_else(|| panic!("{path}"));
            assert_eq!(parsed.find(&object).into_iter().cloned().collect::<Vec<_>>(), found, "{path}");
        }
        for bad in [".a[", ".a[x]", ".a b", ".a[?(x)]", ".a[::0]", ".a[1:2:3:4]", "....a", ".a[?(@.b=<1)]"] {
            assert_eq!(JsonPath::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn paths_that_multiply_end() {
        let mut nested = json!({"a": 1});
        for _ in 0..60 {
            nested = json!({"x": nested, "l": [1, 1]});
        }
        let recursive = JsonPath::parse("..x..x..x..x..x..a").expect("a path");
        assert_eq!(recursive.find(&nested), Vec::<&Value>::new());
        let union = JsonPath::parse(&format!(".l{}", "[0,0,0,0,0,0,0,0]".repeat(20))).expect("a path");
        assert_eq!(union.find(&json!({"l": [[[[[[[]]]]]]]})), Vec::<&Value>::new());
        assert_eq!(JsonPath::parse("..x..a").expect("a path").find(&nested).len(), 60);
        let wide = json!({"l": [vec![0; 1000]]});
        for part in ["[*,*]", "[0:1000,0:1000]"] {
            let path = format!(".l[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]{part}");
            assert_eq!(JsonPath::parse(&path).expect("a path").find(&wide).len(), 0, "{part}");
        }
        let items = json!({"l": vec![1; MAX_VISITS + 1]});
        assert_eq!(JsonPath::parse(".l[?(@==1)]").expect("a path").find(&items).len(), 0);
    }

    #[test]
    fn filters_are_nested_so_deep_and_no_deeper() {
        let nested = |levels: usize| format!("{}.b{}", ".a[?(@".repeat(levels), ")]".repeat(levels));
        assert!(JsonPath::parse(&nested(MAX_NESTING)).is_some());
        assert!(JsonPath::parse(&nested(MAX_NESTING + 1)).is_none());
        assert!(JsonPath::parse(&nested(50_000)).is_none());
    }
}
