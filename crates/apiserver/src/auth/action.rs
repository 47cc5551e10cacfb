//! An action as policies describe it.

use crate::options::Query;
use crate::request::{Route, Target, Verb};
use ferrite_api::selector::{FieldSelector, FieldTerm, LabelSelector, Requirement};

/// An action as policies describe it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Action {
    pub verb: String,
    pub group: String,
    /// The version of the API. Only webhooks see it.
    pub version: String,
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
    /// Requirements for fields of the objects that a list is narrowed to.
    pub fields: Vec<FieldTerm>,
    /// Requirements for labels of the objects that a list is narrowed to.
    pub labels: Vec<Requirement>,
    /// A path that is no resource's. The rest is then empty.
    pub path: Option<String>,
}

impl Action {
    /// The action of a request.
    pub fn of(route: &Route, verb: Option<Verb>, method: &http::Method, path: &str, query: &Query) -> Self {
        match route {
            Route::Resource(target) => {
                let mut action = Self::on(target, verb.map_or("", Verb::as_str));
                if matches!(verb, Some(Verb::List | Verb::Watch | Verb::DeleteCollection)) {
                    action.select(
                        query.get("fieldSelector").unwrap_or_default(),
                        query.get("labelSelector").unwrap_or_default(),
                    );
                    // As upstream: a list of one is about that one.
                    if let Some(name) = action.selects("metadata.name") {
                        action.name = name.to_owned();
                    }
                }
                action
            }
            _ => {
                Self { verb: method.as_str().to_lowercase(), path: Some(path.to_owned()), ..Self::default() }
            }
        }
    }

    /// Narrows the action. As upstream: a selector that cannot be read narrows nothing.
    pub fn select(&mut self, fields: &str, labels: &str) {
        self.fields = FieldSelector::parse(fields).map(FieldSelector::into_terms).unwrap_or_default();
        if !labels.is_empty() {
            let parsed = LabelSelector::parse(labels).unwrap_or_else(|_| LabelSelector::everything());
            self.labels = parsed.requirements().to_vec();
        }
    }

    pub fn on(target: &Target, verb: &str) -> Self {
        let name = target.name.clone().unwrap_or_default();
        // A namespace is in itself, as upstream sees it.
        let itself = target.group.is_empty() && target.resource == "namespaces" && !name.is_empty();
        let namespace = match &target.namespace {
            Some(namespace) => namespace.clone(),
            None if itself => name.clone(),
            None => String::new(),
        };
        Self {
            verb: verb.to_owned(),
            group: target.group.clone(),
            version: target.version.clone(),
            resource: target.resource.clone(),
            subresource: target.subresource.clone().unwrap_or_default(),
            namespace,
            name,
            ..Self::default()
        }
    }

    /// The only value of a field that a list is narrowed to.
    pub fn selects(&self, field: &str) -> Option<&str> {
        self.fields.iter().find(|term| term.equal && term.field == field).map(|term| term.value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::route;

    #[test]
    fn lists_are_about_the_objects_that_they_select() {
        let list = |query: &str| {
            let path = "/apis/apps/v1/namespaces/x/deployments";
            let query = Query::parse(Some(query));
            Action::of(&route(path), Some(Verb::List), &http::Method::GET, path, &query)
        };
        let action = list("fieldSelector=metadata.name%3Dweb,spec.a!%3Db&labelSelector=a%20in%20(b,c),!d");
        assert_eq!((action.version.as_str(), action.name.as_str()), ("v1", "web"));
        assert_eq!(action.selects("metadata.name"), Some("web"));
        assert_eq!((action.selects("spec.a"), action.fields.len(), action.labels.len()), (None, 2, 2));
        let unreadable = list("fieldSelector=a&labelSelector=a%20in%20(");
        assert!(unreadable.fields.is_empty() && unreadable.labels.is_empty());
    }
}
