//! Selectors of objects in a collection, and the few facts about an object that they need.

mod scanned;

use super::stored;
use crate::options::ListOptions;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_api::selector::{FieldSelector, LabelSelector, check_field};
use ferrite_store::Entry;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Which objects of a collection are meant.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selectors {
    labels: LabelSelector,
    fields: FieldSelector,
}

impl Selectors {
    pub fn parse(resource: &Resource, options: &ListOptions) -> Result<Self, Status> {
        let labels =
            LabelSelector::parse(&options.label_selector).map_err(|e| Status::bad_request(e.to_string()))?;
        let fields =
            FieldSelector::parse(&options.field_selector).map_err(|e| Status::bad_request(e.to_string()))?;
        for term in fields.terms() {
            check_field(resource, &term.field).map_err(Status::bad_request)?;
        }
        Ok(Self { labels, fields })
    }

    /// The value that a field must have, if these demand one.
    pub fn exact(&self, field: &str) -> Option<&str> {
        self.fields.exact(field)
    }

    pub fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Returns true if a stored object is selected. Parses no more of it than it must.
    pub fn select(&self, resource: &Resource, entry: &Entry) -> bool {
        if self.is_everything() {
            return true;
        }
        let by_text = scanned::selects(&self.labels, self.fields.terms(), resource, entry.plain());
        by_text.unwrap_or_else(|| self.select_parsed(resource, entry))
    }

    fn select_parsed(&self, resource: &Resource, entry: &Entry) -> bool {
        let deep = self.fields.terms().iter().any(|t| !t.field.starts_with("metadata."));
        let facts = if deep { Facts::of(resource, entry) } else { Facts::of_metadata(entry) };
        facts.is_some_and(|facts| self.matches(&facts))
    }

    /// As [`Selectors::matches`], where the facts are those of the metadata and the other fields are read as text. None if
    /// that does not do: all facts are needed.
    pub fn matches_text(&self, resource: &Resource, entry: &Entry, metadata: &Facts) -> Option<bool> {
        if !self.labels.matches(&metadata.labels) {
            return Some(false);
        }
        for term in self.fields.terms() {
            let text = match term.field.as_str() {
                field if field.starts_with("metadata.") => metadata.field(field).as_bytes(),
                field => scanned::text_of(resource, entry.plain(), field)?,
            };
            if (text == term.value.as_bytes()) != term.equal {
                return Some(false);
            }
        }
        Some(true)
    }

    pub fn matches(&self, facts: &Facts) -> bool {
        self.labels.matches(&facts.labels)
            && self.fields.terms().iter().all(|term| (facts.field(&term.field) == term.value) == term.equal)
    }
}

/// The facts about an object that selectors can use.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    name: String,
    namespace: String,
    labels: BTreeMap<String, String>,
    /// The kind's own selectable fields.
    fields: Vec<(String, String)>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Metadata {
    name: String,
    namespace: String,
    labels: BTreeMap<String, String>,
}

impl Facts {
    /// All facts. None when the stored value is not an object.
    pub fn of(resource: &Resource, entry: &Entry) -> Option<Self> {
        let mut facts = Self::of_metadata(entry)?;
        let selectable = resource.strategy.fields();
        if !selectable.is_empty() {
            let object = stored::decode(resource, entry)?;
            let value =
                |field: &&str| ((*field).to_owned(), resource.strategy.selectable_value(&object, field));
            facts.fields = selectable.iter().map(value).collect();
        }
        Some(facts)
    }

    /// The facts of an object that has a name and nothing else.
    pub fn of_name(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// The facts from the metadata alone; the rest of the object is not parsed.
    pub fn of_metadata(entry: &Entry) -> Option<Self> {
        let metadata: Metadata = ferrite_json::from_slice(stored::metadata(entry.plain())?).ok()?;
        let Metadata { name, namespace, labels } = metadata;
        Some(Self { name, namespace, labels, fields: Vec::new() })
    }

    fn field(&self, field: &str) -> &str {
        match field {
            "metadata.name" => &self.name,
            "metadata.namespace" => &self.namespace,
            field => self.fields.iter().find(|(f, _)| *f == field).map_or("", |(_, value)| value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;
    use ferrite_store::{LeaseId, Revision};

    #[test]
    fn selects_by_the_few_facts_there_are() {
        let table = super::super::ResourceMap::new(ferrite_api::kinds::built_in());
        let pods = table.find("", "v1", "pods").unwrap();
        let pod = json!({
            "metadata": {"name": "web", "namespace": "a", "labels": {"app": "x\"}"}},
            "spec": {"nodeName": "n1"},
            "status": {"phase": "Running"},
        });
        let entry = Entry {
            value: stored::encode(pods, &pod),
            created: Revision(1),
            modified: Revision(1),
            version: 1,
            lease: LeaseId::NONE,
            plain: ferrite_store::Plain::default(),
        };
        let rows = [
            ("", "", true),
            ("app", "", true),
            ("app!=y", "", true),
            ("app=y", "", false),
            ("", "metadata.name=web", true),
            ("", "metadata.namespace!=a", false),
            ("", "spec.nodeName=n1,status.phase=Running", true),
            ("", "spec.nodeName!=n1", false),
            ("!app", "spec.nodeName=n1", false),
        ];
        for (labels, fields, expected) in rows {
            let options = ListOptions {
                label_selector: labels.into(),
                field_selector: fields.into(),
                ..ListOptions::default()
            };
            let selectors = Selectors::parse(pods, &options).unwrap();
            assert_eq!(selectors.select(pods, &entry), expected, "{labels} {fields}");
            let metadata = Facts::of_metadata(&entry).unwrap();
            assert_eq!(selectors.matches_text(pods, &entry, &metadata), Some(expected), "{labels} {fields}");
            let facts = Facts::of(pods, &entry).unwrap();
            assert_eq!(selectors.matches(&facts), expected, "{labels} {fields}");
        }
        // Values that are no text, or may have a default, are not guessed.
        let metadata = Facts::of_metadata(&entry).unwrap();
        for field in ["spec.hostNetwork=false", "status.podIP=", "spec.restartPolicy=Always"] {
            let options = ListOptions { field_selector: field.into(), ..ListOptions::default() };
            let selectors = Selectors::parse(pods, &options).unwrap();
            assert_eq!(selectors.matches_text(pods, &entry, &metadata), None, "{field}");
            assert_eq!(
                scanned::selects(&selectors.labels, selectors.fields.terms(), pods, entry.plain()),
                None
            );
        }
    }
}
