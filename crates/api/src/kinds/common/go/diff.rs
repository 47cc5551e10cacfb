//! The difference of two texts, line by line, with three lines around every change.

use std::collections::HashMap;

const AROUND: usize = 3;
/// From this many lines on, lines that are very frequent do not anchor a match.
const POPULAR_FROM: usize = 200;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Match {
    a: usize,
    b: usize,
    size: usize,
}

/// A part of the way from one text to the other: `a` lines become `b` lines.
#[derive(Debug, Clone)]
struct Step {
    equal: bool,
    a: std::ops::Range<usize>,
    b: std::ops::Range<usize>,
}

/// The unified difference of two texts; empty when they are equal.
pub fn diff(before: &str, after: &str) -> String {
    let (a, b): (Vec<&str>, Vec<&str>) = (before.lines().collect(), after.lines().collect());
    let mut out = String::new();
    for group in groups(&steps(&a, &b)) {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { continue };
        let header = |start: usize, end: usize| match end - start {
            1 => (start + 1).to_string(),
            0 => format!("{start},0"),
            length => format!("{},{length}", start + 1),
        };
        out.push_str(&format!(
            "@@ -{} +{} @@\n",
            header(first.a.start, last.a.end),
            header(first.b.start, last.b.end)
        ));
        let mut write = |sign: char, lines: &[&str]| {
            for line in lines {
                out.push(sign);
                out.push_str(line);
                out.push('\n');
            }
        };
        for step in group {
            if step.equal {
                write(' ', &a[step.a.clone()]);
            } else {
                write('-', &a[step.a.clone()]);
                write('+', &b[step.b.clone()]);
            }
        }
    }
    out
}

fn steps(a: &[&str], b: &[&str]) -> Vec<Step> {
    let mut places: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, line) in b.iter().enumerate() {
        places.entry(line).or_default().push(index);
    }
    if b.len() >= POPULAR_FROM {
        let popular = b.len() / 100 + 1;
        places.retain(|_, at| at.len() <= popular);
    }
    let mut matches = Vec::new();
    let mut open = vec![(0..a.len(), 0..b.len())];
    while let Some((of_a, of_b)) = open.pop() {
        let found = longest(a, b, &places, of_a.clone(), of_b.clone());
        if found.size > 0 {
            matches.push(found);
            open.push((of_a.start..found.a, of_b.start..found.b));
            open.push((found.a + found.size..of_a.end, found.b + found.size..of_b.end));
        }
    }
    matches.sort_unstable_by_key(|m| (m.a, m.b));
    matches.push(Match { a: a.len(), b: b.len(), size: 0 });
    let mut steps = Vec::new();
    let (mut i, mut j) = (0, 0);
    for found in matches {
        if i < found.a || j < found.b {
            steps.push(Step { equal: false, a: i..found.a, b: j..found.b });
        }
        (i, j) = (found.a + found.size, found.b + found.size);
        if found.size > 0 {
            match steps.last_mut() {
                Some(last) if last.equal => (last.a.end, last.b.end) = (i, j),
                _ => steps.push(Step { equal: true, a: found.a..i, b: found.b..j }),
            }
        }
    }
    steps
}

/// The longest run of lines both texts have, the earliest of those equally long.
fn longest(
    a: &[&str],
    b: &[&str],
    places: &HashMap<&str, Vec<usize>>,
    of_a: std::ops::Range<usize>,
    of_b: std::ops::Range<usize>,
) -> Match {
    let mut best = Match { a: of_a.start, b: of_b.start, size: 0 };
    let mut lengths: HashMap<usize, usize> = HashMap::new();
    for i in of_a.clone() {
        let mut next = HashMap::new();
        for &j in places.get(a[i]).map(Vec::as_slice).unwrap_or_default() {
            if j < of_b.start {
                continue;
            }
            if j >= of_b.end {
                break;
            }
            let size = j.checked_sub(1).and_then(|p| lengths.get(&p)).copied().unwrap_or(0) + 1;
            next.insert(j, size);
            if size > best.size {
                best = Match { a: i + 1 - size, b: j + 1 - size, size };
            }
        }
        lengths = next;
    }
    while best.a > of_a.start && best.b > of_b.start && a[best.a - 1] == b[best.b - 1] {
        best = Match { a: best.a - 1, b: best.b - 1, size: best.size + 1 };
    }
    while best.a + best.size < of_a.end
        && best.b + best.size < of_b.end
        && a[best.a + best.size] == b[best.b + best.size]
    {
        best.size += 1;
    }
    best
}

/// Changes that are near each other, with the lines around them.
fn groups(steps: &[Step]) -> Vec<Vec<Step>> {
    let mut steps = steps.to_vec();
    if let Some(first) = steps.first_mut().filter(|s| s.equal) {
        first.a.start = first.a.start.max(first.a.end.saturating_sub(AROUND));
        first.b.start = first.b.start.max(first.b.end.saturating_sub(AROUND));
    }
    if let Some(last) = steps.last_mut().filter(|s| s.equal) {
        last.a.end = last.a.end.min(last.a.start + AROUND);
        last.b.end = last.b.end.min(last.b.start + AROUND);
    }
    let mut groups = Vec::new();
    let mut group: Vec<Step> = Vec::new();
    for step in steps {
        if step.equal && step.a.len() > 2 * AROUND {
            let tail = Step {
                equal: true,
                a: step.a.start..step.a.end.min(step.a.start + AROUND),
                b: step.b.start..step.b.end.min(step.b.start + AROUND),
            };
            group.push(tail);
            groups.push(std::mem::take(&mut group));
            group.push(Step {
                equal: true,
                a: step.a.end - AROUND..step.a.end,
                b: step.b.end - AROUND..step.b.end,
            });
        } else {
            group.push(step);
        }
    }
    groups.push(group);
    groups.retain(|g| g.iter().any(|s| !s.equal));
    groups
}
