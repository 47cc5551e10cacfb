//! Sets of field paths, and their form in `fieldsV1`.

use ferrite_json::{Map, Text, Value};
use std::borrow::Cow;
use std::fmt;

/// One step of a path. Keys and values hold canonical JSON text, so that they order and compare.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathElement {
    /// A field by its name, which is the schema's own where there is one.
    Field(Text),
    /// An element of a keyed list, by its keys: `{"name":"c"}`.
    Key(Text),
    /// An element of a set.
    Value(Text),
    Index(i64),
}

impl PathElement {
    /// `keys` are in order.
    pub(super) fn key<'a>(keys: impl Iterator<Item = (&'a str, Cow<'a, Value>)>) -> Self {
        let mut text = Vec::with_capacity(32);
        for (name, value) in keys {
            text.push(if text.is_empty() { b'{' } else { b',' });
            // Writing to a vector does not fail, and JSON always serialises.
            let _ = ferrite_json::to_writer(&mut text, name);
            text.push(b':');
            let _ = ferrite_json::to_writer(&mut text, &*value);
        }
        text.push(b'}');
        Self::Key(Text::from_utf8(text).unwrap_or_default())
    }

    /// An element that one key, a text, identifies.
    pub(super) fn named(key: &str, name: &str) -> Self {
        let mut text = Text::with_capacity(key.len() + name.len() + 7);
        for part in ["{\"", key, "\":"] {
            text.push_str(part);
        }
        if name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/')) {
            for part in ["\"", name, "\"}"] {
                text.push_str(part);
            }
        } else {
            text.push_str(&Value::from(name).to_string());
            text.push('}');
        }
        Self::Key(text)
    }

    pub(super) fn value(value: &Value) -> Self {
        Self::Value(value.to_string().into())
    }

    /// `f:spec`, `k:{"name":"c"}`, `v:"x"`, `i:0`.
    pub(super) fn encode(&self) -> Text {
        match self {
            Self::Field(name) => Self::field_key(name),
            Self::Key(keys) => encoded("k:", keys),
            Self::Value(value) => encoded("v:", value),
            Self::Index(index) => encoded("i:", &index.to_string()),
        }
    }

    /// As a field of this name is encoded.
    pub(super) fn field_key(name: &str) -> Text {
        encoded("f:", name)
    }

    /// Returns true for an element of a kind that nobody knows. As upstream: such elements are left out.
    fn is_unknown(text: &str) -> bool {
        matches!(text.as_bytes(), [kind, b':', ..] if !b"fkvi".contains(kind))
    }

    fn decode(text: &str) -> Option<Self> {
        let json = |text: &str| crate::codec::json::decode_any(text.as_bytes()).ok().map(|d| d.value);
        let (kind, rest) = text.split_once(':')?;
        Some(match kind {
            "f" => Self::Field(rest.into()),
            "k" => Self::Key(json(rest).filter(Value::is_object)?.to_string().into()),
            "v" => Self::Value(json(rest)?.to_string().into()),
            "i" => Self::Index(rest.parse().ok()?),
            _ => return None,
        })
    }
}

fn encoded(kind: &str, text: &str) -> Text {
    let mut encoded = Text::with_capacity(kind.len() + text.len());
    encoded.push_str(kind);
    encoded.push_str(text);
    encoded
}

/// As upstream prints a step in messages: `.spec`, `[name="c"]`, `[="x"]`, `[0]`.
impl fmt::Display for PathElement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(name) => write!(f, ".{name}"),
            Self::Key(keys) => {
                let keys: Map = ferrite_json::from_str(keys).unwrap_or_default();
                let listed: Vec<String> = keys.iter().map(|(k, v)| format!("{k}={v}")).collect();
                write!(f, "[{}]", listed.join(","))
            }
            Self::Value(value) => write!(f, "[={value}]"),
            Self::Index(index) => write!(f, "[{index}]"),
        }
    }
}

/// The subtree below one step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Entry {
    /// The path that ends here is in the set.
    pub(super) member: bool,
    pub(super) below: FieldSet,
}

impl Entry {
    pub(super) fn is_empty(&self) -> bool {
        !self.member && self.below.is_empty()
    }
}

/// A set of paths.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FieldSet {
    /// In the order of their elements, each of which is there once. Objects are walked in that order, so that a set
    /// is mostly built by adding to its end.
    pub(super) entries: Vec<(PathElement, Entry)>,
}

impl FieldSet {
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Where an element is, or where it belongs.
    fn find(&self, element: &PathElement) -> Result<usize, usize> {
        match self.entries.last() {
            Some((last, _)) if last < element => Err(self.entries.len()),
            _ => self.entries.binary_search_by(|(ours, _)| ours.cmp(element)),
        }
    }

    pub(super) fn get(&self, element: &PathElement) -> Option<&Entry> {
        self.find(element).ok().map(|at| &self.entries[at].1)
    }

    /// Inserts the subtree below an element; an empty one leaves no trace. Elements come mostly in order.
    pub(super) fn put(&mut self, element: PathElement, entry: Entry) {
        if entry.is_empty() {
            return;
        }
        match self.find(&element) {
            Ok(at) => self.entries[at].1 = entry,
            Err(at) => self.entries.insert(at, (element, entry)),
        }
    }

    /// A set of subtrees in any order; of two below one element the last counts. A list may be as long as a request's body:
    /// each of its elements put in its place would move all that follow.
    pub(super) fn of_entries(mut entries: Vec<(PathElement, Entry)>) -> Self {
        entries.retain(|(_, entry)| !entry.is_empty());
        if !entries.is_sorted_by(|(a, _), (b, _)| a < b) {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
            entries.dedup_by(|later, earlier| {
                let is_same = later.0 == earlier.0;
                if is_same {
                    std::mem::swap(&mut later.1, &mut earlier.1);
                }
                is_same
            });
        }
        Self { entries }
    }

    /// Adds a path; the empty one is not a path.
    pub fn insert(&mut self, path: &[PathElement]) {
        if let Some((first, rest)) = path.split_first() {
            let at = self.find(first).unwrap_or_else(|at| {
                self.entries.insert(at, (first.clone(), Entry::default()));
                at
            });
            let entry = &mut self.entries[at].1;
            if rest.is_empty() {
                entry.member = true;
            } else {
                entry.below.insert(rest);
            }
        }
    }

    /// A set of dotted paths of field names.
    pub fn of_fields(paths: &[&str]) -> Self {
        let mut set = Self::default();
        for path in paths {
            let path: Vec<PathElement> =
                path.split('.').map(|name| PathElement::Field(name.into())).collect();
            set.insert(&path);
        }
        set
    }

    /// Adds the paths of `other`.
    #[must_use]
    pub fn union(mut self, other: Self) -> Self {
        if self.is_empty() {
            return other;
        }
        let mut new = Vec::new();
        for (element, theirs) in other.entries {
            match self.find(&element) {
                Err(at) if at == self.entries.len() && new.is_empty() => self.entries.push((element, theirs)),
                Err(_) => new.push((element, theirs)),
                Ok(at) => {
                    let ours = &mut self.entries[at].1;
                    ours.member |= theirs.member;
                    ours.below = std::mem::take(&mut ours.below).union(theirs.below);
                }
            }
        }
        if !new.is_empty() {
            // Two runs in order: the sort merges them.
            self.entries.extend(new);
            self.entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self
    }

    /// Leaves the paths that are not in `other`.
    #[must_use]
    pub fn difference(mut self, other: &Self) -> Self {
        self.subtract(other, &|ours, theirs| {
            ours.member &= !theirs.member;
            ours.below = std::mem::take(&mut ours.below).difference(&theirs.below);
        });
        self
    }

    /// Leaves the paths that are neither in `other` nor below a path in it.
    #[must_use]
    pub fn recursive_difference(mut self, other: &Self) -> Self {
        self.subtract(other, &|ours, theirs| {
            if theirs.member {
                *ours = Entry::default();
            } else {
                ours.below = std::mem::take(&mut ours.below).recursive_difference(&theirs.below);
            }
        });
        self
    }

    /// Visits only the entries of `other`: the subtracted set is usually small.
    fn subtract(&mut self, other: &Self, from: &dyn Fn(&mut Entry, &Entry)) {
        let mut is_any_empty = false;
        for (element, theirs) in &other.entries {
            if let Ok(at) = self.find(element) {
                let ours = &mut self.entries[at].1;
                from(ours, theirs);
                is_any_empty |= ours.is_empty();
            }
        }
        if is_any_empty {
            self.entries.retain(|(_, entry)| !entry.is_empty());
        }
    }

    pub fn intersection(&self, other: &Self) -> Self {
        let mut out = Self::default();
        for (element, ours) in &self.entries {
            if let Some(theirs) = other.get(element) {
                out.put(
                    element.clone(),
                    Entry {
                        member: ours.member && theirs.member,
                        below: ours.below.intersection(&theirs.below),
                    },
                );
            }
        }
        out
    }

    /// Every path, members of a level before the paths below it, printed as upstream prints them.
    pub fn paths(&self) -> Vec<String> {
        let mut out = Vec::new();
        self.paths_into("", &mut out);
        out
    }

    fn paths_into(&self, prefix: &str, out: &mut Vec<String>) {
        for (element, entry) in &self.entries {
            if entry.member {
                out.push(format!("{prefix}{element}"));
            }
        }
        for (element, entry) in &self.entries {
            entry.below.paths_into(&format!("{prefix}{element}"), out);
        }
    }

    /// The first steps of its paths, encoded.
    pub(super) fn first_steps(&self) -> impl Iterator<Item = Text> {
        self.entries.iter().map(|(element, _)| element.encode())
    }

    pub fn to_fields_v1(&self) -> Value {
        let mut map = Map::new();
        for (element, entry) in &self.entries {
            let mut below = entry.below.to_fields_v1();
            if let (true, Value::Object(below)) = (entry.member, &mut below)
                && !below.is_empty()
            {
                below.insert(".", Value::Object(Map::new()));
            }
            map.insert(element.encode(), below);
        }
        Value::Object(map)
    }

    /// `None` when it is not a set of fields.
    pub fn from_fields_v1(value: &Value) -> Option<Self> {
        let mut entries = Vec::new();
        for (key, below) in value.as_object()? {
            if key == "." {
                continue;
            }
            if PathElement::is_unknown(key) {
                continue;
            }
            let member = below.as_object()?.is_empty() || below.get(".").is_some();
            let entry = Entry { member, below: Self::from_fields_v1(below)? };
            entries.push((PathElement::decode(key)?, entry));
        }
        Some(Self::of_entries(entries))
    }
}
