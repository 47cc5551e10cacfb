//! A change by a webhook or a policy may concern those that have answered before it: they are asked once more, as
//! upstream asks them.

use super::{Attributes, Operation};
use ferrite_api::meta;
use ferrite_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// State that the stages of one request share.
#[derive(Default)]
pub(crate) struct Reinvocation {
    wanted: bool,
    again: bool,
    stages: BTreeMap<&'static str, StageMemory>,
}

/// A stage's state from the first round.
#[derive(Default)]
struct StageMemory {
    /// The object when the stage ended.
    last: Option<Value>,
    /// Those that ran and want to run again when a later one changes the object.
    ran: BTreeSet<String>,
    /// Those that run again.
    again: BTreeSet<String>,
}

impl StageMemory {
    fn require(&mut self) {
        self.again.append(&mut self.ran);
    }
}

impl Reinvocation {
    /// Begins the second round if something has changed the object in the first.
    pub(super) fn begin_again(&mut self) -> bool {
        self.again = self.wanted;
        self.wanted
    }

    /// Returns true if this is the second round.
    pub fn is_again(&self) -> bool {
        self.again
    }

    /// A stage begins.
    pub fn begin(&mut self, stage: &'static str, object: Option<&Value>) {
        let again = self.again;
        let memory = self.stages.entry(stage).or_default();
        if again && memory.last.as_ref() != object {
            memory.require();
        }
    }

    /// Returns true if an entry of a stage runs in this round. In the second round, only an entry that ran
    /// in the first, wants to run again, and was followed by a change.
    pub fn runs(&self, stage: &'static str, id: &str) -> bool {
        !self.again || self.stages.get(stage).is_some_and(|memory| memory.again.contains(id))
    }

    /// One of a stage has changed the object.
    pub fn changed(&mut self, stage: &'static str) {
        self.stages.entry(stage).or_default().require();
        self.wanted = true;
    }

    /// One of a stage has run, and wants to run again after later changes.
    pub fn reinvocable(&mut self, stage: &'static str, id: &str) {
        self.stages.entry(stage).or_default().ran.insert(id.to_owned());
    }

    /// A stage ends.
    pub fn end(&mut self, stage: &'static str, object: Option<&Value>) {
        self.stages.entry(stage).or_default().last = object.cloned();
    }
}

/// Fields of a new object that upstream sets after it was changed, and this server before.
pub(super) struct Unstamped {
    taken: Vec<(&'static str, Value)>,
}

impl Unstamped {
    /// Takes them out of an object that is about to be created.
    pub fn take(attributes: &Attributes<'_>, object: &mut Value) -> Self {
        if attributes.operation != Operation::Create || attributes.subresource.is_some() {
            return Self { taken: Vec::new() };
        }
        let name = attributes.unnamed.then_some("name");
        let metadata = meta::metadata_mut(object);
        let fields = ["uid", "creationTimestamp"].into_iter().chain(name);
        Self { taken: fields.filter_map(|field| Some((field, metadata.remove(field)?))).collect() }
    }

    /// Puts them back. Fields that others may not change are taken from `before`, the object before the
    /// change.
    pub fn put_back(self, object: &mut Value, before: Value) {
        let metadata = meta::metadata_mut(object);
        for (field, value) in self.taken {
            // As upstream: a name is drawn only for an object that nobody has named.
            let named = field == "name" && metadata.get("name").is_some_and(|name| *name != "");
            if !named {
                metadata.insert(field, value);
            }
        }
        // As upstream: managers that cannot be read are those from before.
        let managers = "managedFields";
        let given = metadata.get(managers);
        if given != before["metadata"].get(managers) && !given.is_none_or(are_readable) {
            match before["metadata"].get(managers) {
                Some(managers_before) => metadata.insert(managers, managers_before.clone()),
                None => metadata.remove(managers),
            };
        }
    }
}

fn are_readable(managers: &Value) -> bool {
    let readable = |entry: &Value| {
        matches!(entry["operation"].as_str(), Some("Apply" | "Update"))
            && entry["apiVersion"].as_str().is_some_and(|version| !version.is_empty())
            && entry["fieldsType"] == "FieldsV1"
            && entry["fieldsV1"].is_object()
    };
    managers.as_array().is_some_and(|entries| entries.iter().all(readable))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    const STAGE: &str = "stage";

    /// Runs a round: each step is an identifier, whether it wants to run again, and whether it changes the object.
    /// Returns those that ran.
    fn round(
        reinvocation: &mut Reinvocation,
        object: &mut Value,
        steps: &[(&str, bool, bool)],
    ) -> Vec<String> {
        reinvocation.begin(STAGE, Some(object));
        let mut ran = Vec::new();
        for (id, reinvocable, changes) in steps {
            if !reinvocation.runs(STAGE, id) {
                continue;
            }
            ran.push((*id).to_owned());
            if *changes && object[*id] != true {
                object[*id] = true.into();
                reinvocation.changed(STAGE);
            }
            if *reinvocable {
                reinvocation.reinvocable(STAGE, id);
            }
        }
        reinvocation.end(STAGE, Some(object));
        ran
    }

    #[test]
    fn those_run_again_that_want_to_and_were_followed_by_a_change() {
        type Steps = &'static [(&'static str, bool, bool)];
        let rows: [(Steps, bool, &[&str]); 5] = [
            (&[("a", true, false), ("b", true, false)], false, &[]),
            (&[("a", true, false), ("b", true, true)], true, &["a"]),
            (&[("a", false, false), ("b", true, true)], true, &[]),
            (&[("a", true, true), ("b", true, false)], true, &[]),
            (&[("a", true, true), ("b", true, true), ("c", true, true)], true, &["a", "b"]),
        ];
        for (steps, again, second) in rows {
            let (mut reinvocation, mut object) = (Reinvocation::default(), json!({}));
            assert_eq!(round(&mut reinvocation, &mut object, steps).len(), steps.len());
            assert_eq!(reinvocation.begin_again(), again, "{steps:?}");
            if again {
                assert_eq!(round(&mut reinvocation, &mut object, steps), second, "{steps:?}");
            }
        }
    }

    #[test]
    fn a_change_outside_the_stage_runs_all_again_that_want_to() {
        let steps = [("a", true, true), ("b", true, false), ("c", false, false)];
        let (mut reinvocation, mut object) = (Reinvocation::default(), json!({}));
        round(&mut reinvocation, &mut object, &steps);
        assert!(reinvocation.begin_again());
        object["plugin"] = 1.into();
        assert_eq!(round(&mut reinvocation, &mut object, &steps), ["a", "b"]);
    }
}
