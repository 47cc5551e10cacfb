//! Expressions with the outcomes that the specification and Kubernetes v1.36 give.
//!
//! The data is in `tests/data`, one case a line. A case that fails here must be fixed, or be listed in
//! `docs/differences.md` with the reason, and in [`KNOWN`].

mod expressions;
mod rules;
mod values;

use ferrite_json::Value as Json;

/// Cases in which we differ on purpose: the name, or its start before a `*`.
const KNOWN: &[&str] = &[
    // Kubernetes prints so: it has version 2 of the strings extension, and the specification is newer.
    "specification/string_ext/format/*",
    // Kubernetes does not make an error of a field of a value that has none.
    "specification/optionals/optionals/map_null_entry_no_such_key",
    "specification/optionals/optionals/map_present_key_invalid_field",
    // Kubernetes finds an index of an impossible type before anything runs.
    "specification/fields/map_fields/map_bad_key_type_and_false",
];

/// The cases of a file.
pub fn cases(text: &str) -> impl Iterator<Item = Json> + '_ {
    text.lines().map(|line| ferrite_json::from_str(line).expect("a line of the data is JSON"))
}

/// Collects failures, so that one run shows them all.
#[derive(Default)]
pub struct Report {
    count: usize,
    failures: Vec<String>,
}

impl Report {
    pub fn case(&mut self, name: &str, outcome: Result<(), String>) {
        self.count += 1;
        let known = KNOWN.iter().any(|known| match known.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == *known,
        });
        match (outcome, known) {
            (Err(problem), false) => self.failures.push(format!("{name}: {problem}")),
            (Ok(()), true) if KNOWN.contains(&name) => {
                self.failures.push(format!("{name}: passes, but is listed as a difference"));
            }
            _ => {}
        }
    }

    pub fn finish(self) {
        assert!(self.count > 0, "there are no cases");
        let shown: Vec<&str> = self.failures.iter().map(String::as_str).take(400).collect();
        assert!(
            self.failures.is_empty(),
            "{} of {} cases fail:\n{}",
            self.failures.len(),
            self.count,
            shown.join("\n")
        );
    }
}
