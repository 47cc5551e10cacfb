//! Which requests a configuration selects: rules, match policy, and selectors of namespaces and objects.
//!
//! Webhooks ([`Matcher::of_webhook`]) and policies with their bindings ([`Matcher::of_match_resources`]) share it.

use super::{Attributes, Operation};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_api::selector::{LabelSelector, SelectorError};
use ferrite_json::Value;

/// The resources, operations and names that one rule is about.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rule {
    groups: Vec<String>,
    versions: Vec<String>,
    operations: Vec<String>,
    /// Name and subresource; the latter is empty for the resource itself.
    resources: Vec<(String, String)>,
    scope: RuleScope,
    /// Empty for all.
    names: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum RuleScope {
    #[default]
    Any,
    Namespaced,
    Cluster,
    /// A word that means nothing: matches nothing.
    Unknown,
}

fn texts(rule: &Value, key: &str) -> Vec<String> {
    let list = rule[key].as_array().into_iter().flatten();
    list.filter_map(|text| text.as_str().map(str::to_owned)).collect()
}

fn exact_or_any(list: &[String], wanted: &str) -> bool {
    list.iter().any(|item| item == "*" || item == wanted)
}

impl Rule {
    /// A `RuleWithOperations` or `NamedRuleWithOperations`.
    pub fn parse(rule: &Value) -> Self {
        let split = |text: String| match text.split_once('/') {
            Some((resource, subresource)) => (resource.to_owned(), subresource.to_owned()),
            None => (text, String::new()),
        };
        Self {
            groups: texts(rule, "apiGroups"),
            versions: texts(rule, "apiVersions"),
            operations: texts(rule, "operations"),
            resources: texts(rule, "resources").into_iter().map(split).collect(),
            scope: match rule["scope"].as_str() {
                None | Some("" | "*") => RuleScope::Any,
                Some("Namespaced") => RuleScope::Namespaced,
                Some("Cluster") => RuleScope::Cluster,
                Some(_) => RuleScope::Unknown,
            },
            names: texts(rule, "resourceNames"),
        }
    }

    fn parse_all(rules: &Value) -> Vec<Self> {
        rules.as_array().into_iter().flatten().map(Self::parse).collect()
    }

    /// Returns true if the rule selects the request, taken as one for `resource`.
    fn matches(&self, attributes: &Attributes<'_>, resource: &Resource) -> bool {
        let subresource = attributes.subresource.unwrap_or_default();
        exact_or_any(&self.operations, attributes.operation.name())
            && self.resources.iter().any(|(name, sub)| {
                (name == "*" || *name == *resource.plural) && (sub == "*" || sub == subresource)
            })
            && exact_or_any(&self.groups, &resource.group)
            && exact_or_any(&self.versions, &resource.version)
            && self.in_scope(attributes, resource)
            && (self.names.is_empty() || self.names.iter().any(|name| name == attributes.given_name()))
    }

    fn in_scope(&self, attributes: &Attributes<'_>, resource: &Resource) -> bool {
        let cluster = || {
            (resource.group.is_empty() && resource.plural == "namespaces")
                || attributes.given_namespace().is_empty()
        };
        match self.scope {
            RuleScope::Any => true,
            RuleScope::Namespaced => !cluster(),
            RuleScope::Cluster => cluster(),
            RuleScope::Unknown => false,
        }
    }
}

/// Decides which requests one webhook, policy or binding is about.
#[derive(Debug)]
pub(crate) struct Matcher {
    rules: Vec<Rule>,
    excluded: Vec<Rule>,
    /// True if no rules at all means every resource.
    all_without_rules: bool,
    /// True if a rule for another version of the resource counts.
    equivalent: bool,
    namespaces: Result<LabelSelector, SelectorError>,
    objects: Result<LabelSelector, SelectorError>,
}

fn selector(value: &Value) -> Result<LabelSelector, SelectorError> {
    match value {
        // As upstream's defaults: no selector selects everything.
        Value::Null => Ok(LabelSelector::everything()),
        selector => LabelSelector::from_value(selector),
    }
}

impl Matcher {
    /// Of an entry of `webhooks`.
    pub fn of_webhook(webhook: &Value) -> Self {
        Self {
            rules: Rule::parse_all(&webhook["rules"]),
            excluded: Vec::new(),
            all_without_rules: false,
            equivalent: webhook["matchPolicy"] != "Exact",
            namespaces: selector(&webhook["namespaceSelector"]),
            objects: selector(&webhook["objectSelector"]),
        }
    }

    /// Of `matchConstraints` of a policy, or `matchResources` of a binding; none is everything.
    pub fn of_match_resources(resources: &Value) -> Self {
        Self {
            rules: Rule::parse_all(&resources["resourceRules"]),
            excluded: Rule::parse_all(&resources["excludeResourceRules"]),
            all_without_rules: true,
            equivalent: resources["matchPolicy"] != "Exact",
            namespaces: selector(&resources["namespaceSelector"]),
            objects: selector(&resources["objectSelector"]),
        }
    }

    /// Returns false if the request's operation and the words of the rules already exclude a match. A
    /// request that is excluded here never matches.
    pub fn may_match(&self, attributes: &Attributes<'_>) -> bool {
        if self.rules.is_empty() {
            return self.all_without_rules;
        }
        let (operation, subresource) =
            (attributes.operation.name(), attributes.subresource.unwrap_or_default());
        self.rules.iter().any(|rule| {
            exact_or_any(&rule.operations, operation)
                // Resources of other groups and names may share objects with this one.
                && rule.resources.iter().any(|(_, sub)| sub == "*" || sub == subresource)
                && (self.equivalent || exact_or_any(&rule.groups, &attributes.resource.group))
        })
    }

    /// The resource as which the request is selected: its own, or another version of it. `object` is the
    /// new object, if there is one.
    ///
    /// Fails where upstream does: the namespace is gone, or a selector cannot be read.
    pub fn resource<'a>(
        &self,
        view: &'a View,
        attributes: &Attributes<'a>,
        object: Option<&Value>,
    ) -> Result<Option<&'a Resource>, Status> {
        if !self.may_match(attributes) {
            return Ok(None);
        }
        // As upstream: a selector that cannot be applied is an error only for requests that the rules select.
        let namespaces = self.selects_namespace(view, attributes, object);
        if matches!(namespaces, Ok(false)) {
            return Ok(None);
        }
        let objects = self.selects_object(attributes, object);
        if matches!(objects, Ok(false)) {
            return Ok(None);
        }
        if self.by_rules(&self.excluded, view, attributes).is_some() {
            return Ok(None);
        }
        let found = match self.rules.is_empty() && self.all_without_rules {
            true => Some(attributes.resource),
            false => self.by_rules(&self.rules, view, attributes),
        };
        if found.is_some() {
            namespaces?;
            objects?;
        }
        Ok(found)
    }

    fn by_rules<'a>(
        &self,
        rules: &[Rule],
        view: &'a View,
        attributes: &Attributes<'a>,
    ) -> Option<&'a Resource> {
        if rules.iter().any(|rule| rule.matches(attributes, attributes.resource)) {
            return Some(attributes.resource);
        }
        if !self.equivalent || rules.is_empty() {
            return None;
        }
        let has_part =
            |other: &Resource| attributes.subresource.is_none_or(|name| other.subresource(name).is_some());
        let others: Vec<&Resource> = view
            .equivalents(attributes.resource)
            .map(AsRef::as_ref)
            .filter(|other| has_part(other))
            .collect();
        // As upstream: an earlier rule goes before an earlier version.
        rules.iter().find_map(|rule| others.iter().copied().find(|other| rule.matches(attributes, other)))
    }

    fn selects_namespace(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<bool, Status> {
        let is_namespace = attributes.resource.plural == "namespaces";
        let name = attributes.given_namespace();
        if name.is_empty() && !is_namespace {
            return Ok(true);
        }
        let selector = self.namespaces.as_ref().map_err(Status::internal)?;
        if selector.is_empty() {
            return Ok(true);
        }
        if is_namespace
            && attributes.subresource.is_none()
            && matches!(attributes.operation, Operation::Create | Operation::Update)
        {
            return Ok(object.is_some_and(|namespace| selector.matches_object(namespace)));
        }
        let namespace =
            view.get("", "namespaces", "", name).ok_or_else(|| Status::not_found("", "namespaces", name))?;
        Ok(selector.matches_object(&namespace))
    }

    fn selects_object(&self, attributes: &Attributes<'_>, object: Option<&Value>) -> Result<bool, Status> {
        let selector = self.objects.as_ref().map_err(Status::internal)?;
        if selector.is_empty() {
            return Ok(true);
        }
        let mut seen = object.into_iter().chain(attributes.old);
        // Options of streams have no metadata and so no labels to select by.
        Ok(seen.any(|object| object.get("metadata").is_some() && selector.matches_object(object)))
    }
}

/// An object of one version of a resource as another one, without asking anybody: [`View::convert`] also knows kinds
/// whose versions a webhook converts.
pub(crate) fn converted(from: &Resource, to: &Resource, object: &Value) -> Value {
    let mut object = object.clone();
    if from.group != to.group || from.version != to.version {
        from.to_storage(&mut object);
        to.from_storage(&mut object);
    }
    object
}

/// Configurations of admission itself: no webhook and no policy has a say in them, or one that refuses everything could
/// not be removed.
pub(crate) fn is_exempt(resource: &Resource) -> bool {
    resource.group == "admissionregistration.k8s.io"
        && matches!(
            &*resource.kind,
            "ValidatingWebhookConfiguration"
                | "MutatingWebhookConfiguration"
                | "ValidatingAdmissionPolicy"
                | "ValidatingAdmissionPolicyBinding"
                | "MutatingAdmissionPolicy"
                | "MutatingAdmissionPolicyBinding"
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::User;
    use crate::options::WriteOptions;
    use crate::registry::Registry;
    use crate::registry::fixture;
    use ferrite_json::json;

    struct Request {
        operation: Operation,
        resource: (&'static str, &'static str, &'static str),
        subresource: Option<&'static str>,
        namespace: &'static str,
        name: &'static str,
        old: Value,
        new: Value,
    }

    fn request(operation: Operation, resource: (&'static str, &'static str, &'static str)) -> Request {
        Request {
            operation,
            resource,
            subresource: None,
            namespace: "default",
            name: "a",
            old: Value::Null,
            new: json!({"metadata": {"name": "a", "labels": {"app": "web"}}}),
        }
    }

    const PODS: (&str, &str, &str) = ("", "v1", "pods");
    const EVENTS: (&str, &str, &str) = ("events.k8s.io", "v1", "events");
    const NODES: (&str, &str, &str) = ("", "v1", "nodes");
    const NAMESPACES: (&str, &str, &str) = ("", "v1", "namespaces");

    /// The resource as which a request is selected, as `group/version/plural`.
    fn selected(registry: &Registry, matcher: &Matcher, request: &Request) -> Result<Option<String>, Status> {
        let (view, user, options) = (registry.view(), User::new("u", [""; 0]), WriteOptions::default());
        let (group, version, plural) = request.resource;
        let resource = registry.table.find(group, version, plural).expect("a resource");
        let attributes = Attributes {
            operation: request.operation,
            resource,
            subresource: request.subresource,
            namespace: request.namespace,
            name: request.name,
            unnamed: false,
            user: &user,
            old: Some(&request.old).filter(|old| !old.is_null()),
            options: &options,
            rbac: &registry.rbac,
        };
        let new = Some(&request.new).filter(|new| !new.is_null());
        let found = matcher.resource(&view, &attributes, new)?;
        Ok(found.map(|r| format!("{}/{}/{}", r.group, r.version, r.plural)))
    }

    fn rules(group: &str, version: &str, operation: &str, resource: &str, scope: &str) -> Value {
        json!({"rules": [{
            "apiGroups": [group], "apiVersions": [version], "operations": [operation], "resources": [resource],
            "scope": scope,
        }]})
    }

    #[tokio::test]
    async fn rules_select_by_every_word() {
        let registry = fixture::registry();
        use Operation::{Connect, Create, Delete, Update};
        let part = |subresource| Request { subresource: Some(subresource), ..request(Update, PODS) };
        let cluster = || Request { namespace: "", ..request(Create, NODES) };
        let rows = [
            (rules("", "v1", "CREATE", "pods", "*"), request(Create, PODS), true),
            (rules("*", "*", "*", "*", "*"), request(Create, PODS), true),
            (rules("*", "*", "*", "*", "*"), part("status"), false),
            (rules("*", "*", "*", "*/*", "*"), part("status"), true),
            (rules("*", "*", "*", "*/*", "*"), request(Create, PODS), true),
            (rules("", "v1", "UPDATE", "pods/*", "*"), part("status"), true),
            (rules("", "v1", "UPDATE", "pods/*", "*"), request(Update, PODS), true),
            (rules("", "v1", "UPDATE", "*/status", "*"), part("status"), true),
            (rules("", "v1", "UPDATE", "pods/status", "*"), part("resize"), false),
            (rules("", "v1", "CREATE", "pods", "*"), request(Update, PODS), false),
            (rules("", "v1", "DELETE", "pods", "*"), request(Delete, PODS), true),
            (
                rules("", "v1", "CONNECT", "pods/exec", "*"),
                Request { operation: Connect, ..part("exec") },
                true,
            ),
            (rules("apps", "v1", "*", "pods", "*"), request(Create, PODS), false),
            (rules("", "v2", "*", "pods", "*"), request(Create, PODS), false),
            (rules("", "v1", "*", "services", "*"), request(Create, PODS), false),
            (rules("", "v1", "*", "pods", "Namespaced"), request(Create, PODS), true),
            (rules("", "v1", "*", "pods", "Cluster"), request(Create, PODS), false),
            (rules("", "v1", "*", "nodes", "Cluster"), cluster(), true),
            (rules("", "v1", "*", "nodes", "Namespaced"), cluster(), false),
            (
                rules("", "v1", "*", "namespaces", "Cluster"),
                Request { namespace: "", ..request(Create, NAMESPACES) },
                true,
            ),
            (json!({}), request(Create, PODS), false),
        ];
        for (webhook, request, matches) in rows {
            let matcher = Matcher::of_webhook(&webhook);
            let got = selected(&registry, &matcher, &request).expect("no error");
            assert_eq!(got.is_some(), matches, "{webhook} {:?} {:?}", request.resource, request.subresource);
        }
    }

    #[tokio::test]
    async fn another_version_counts_unless_the_policy_is_exact() {
        let registry = fixture::registry();
        let mut webhook = rules("", "v1", "CREATE", "events", "*");
        let asked = request(Operation::Create, EVENTS);
        let got = selected(&registry, &Matcher::of_webhook(&webhook), &asked).expect("no error");
        assert_eq!(got.as_deref(), Some("/v1/events"));
        webhook["matchPolicy"] = "Exact".into();
        assert_eq!(selected(&registry, &Matcher::of_webhook(&webhook), &asked).expect("no error"), None);
    }

    #[tokio::test]
    async fn selectors_and_exclusions_narrow() {
        let registry = fixture::registry();
        let all =
            json!([{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*"]}]);
        let labels = |app: &str| json!({"metadata": {"labels": {"app": app}}});
        let change = |old: &str, new: &str| Request {
            old: labels(old),
            new: labels(new),
            ..request(Operation::Update, PODS)
        };
        let named = |name: &'static str| Request { name, ..request(Operation::Create, PODS) };
        let web = json!({"matchLabels": {"app": "web"}});
        let nodes = Request { namespace: "", ..request(Operation::Create, NODES) };
        let namespace = Request { namespace: "", ..request(Operation::Create, NAMESPACES) };
        let only = |name: &str| json!([{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["*"], "resources": ["pods"], "resourceNames": [name]}]);
        let rows = [
            (json!({}), request(Operation::Create, PODS), true),
            (json!({"resourceRules": all, "objectSelector": web}), change("web", "db"), true),
            (json!({"resourceRules": all, "objectSelector": web}), change("db", "web"), true),
            (json!({"resourceRules": all, "objectSelector": web}), change("db", "db"), false),
            (json!({"resourceRules": all, "namespaceSelector": web}), nodes, true),
            (json!({"resourceRules": all, "namespaceSelector": web}), namespace, true),
            (json!({"excludeResourceRules": all}), request(Operation::Create, PODS), false),
            (json!({"excludeResourceRules": only("a")}), named("a"), false),
            (json!({"excludeResourceRules": only("a")}), named("b"), true),
            (json!({"resourceRules": only("a")}), named("a"), true),
            (json!({"resourceRules": only("a")}), named("b"), false),
        ];
        for (resources, request, matches) in rows {
            let matcher = Matcher::of_match_resources(&resources);
            let got = selected(&registry, &matcher, &request).expect("no error");
            assert_eq!(got.is_some(), matches, "{resources} {:?}", request.name);
        }
        // A namespace that is not there is an error, but only for requests that the rules select.
        let gone = json!({"resourceRules": all, "namespaceSelector": web});
        let refused = selected(&registry, &Matcher::of_match_resources(&gone), &named("a"));
        assert_eq!(refused.expect_err("no namespace").code, 404);
        let other = json!({"resourceRules": [{"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["x"]}], "namespaceSelector": web});
        let ignored = selected(&registry, &Matcher::of_match_resources(&other), &named("a"));
        assert_eq!(ignored.expect("no error"), None);
    }
}
