//! Matches requests with the rules of FlowSchemas.

use crate::auth::User;
use crate::request::{Route, Verb};
use ferrite_json::Value;

/// Stands for everything of its kind.
const ALL: &str = "*";

/// The part of a request that rules are about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Digest<'a> {
    pub verb: &'a str,
    pub about: About<'a>,
}

/// The subject matter of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum About<'a> {
    Resource { group: &'a str, resource: &'a str, subresource: &'a str, namespace: &'a str },
    Path(&'a str),
}

impl<'a> Digest<'a> {
    /// `method` is in lower case.
    pub fn new(route: &'a Route, verb: Option<Verb>, method: &'a str, path: &'a str) -> Self {
        let Route::Resource(target) = route else { return Self { verb: method, about: About::Path(path) } };
        let name = target.name.as_deref().unwrap_or_default();
        let itself = target.group.is_empty() && target.resource == "namespaces";
        let about = About::Resource {
            group: &target.group,
            resource: &target.resource,
            subresource: target.subresource.as_deref().unwrap_or_default(),
            // A namespace is in itself, as upstream sees it.
            namespace: target.namespace.as_deref().unwrap_or(if itself { name } else { "" }),
        };
        Self { verb: verb.map_or("", Verb::as_str), about }
    }

    pub fn namespace(&self) -> &'a str {
        match self.about {
            About::Resource { namespace, .. } => namespace,
            About::Path(_) => "",
        }
    }
}

/// The requests of some subjects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    subjects: Vec<Subject>,
    resources: Vec<ResourceRule>,
    paths: Vec<PathRule>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Subject {
    User(String),
    Group(String),
    ServiceAccount { namespace: String, name: String },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ResourceRule {
    verbs: Vec<String>,
    groups: Vec<String>,
    /// With their subresources, as `pods/log`.
    resources: Vec<String>,
    cluster_scope: bool,
    namespaces: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct PathRule {
    verbs: Vec<String>,
    paths: Vec<String>,
}

fn contains(list: &[String], asked: &str) -> bool {
    matches!(list, [only] if only == ALL) || list.iter().any(|one| one == asked)
}

impl Subject {
    fn is(&self, user: &User) -> bool {
        match self {
            Self::User(name) => name == ALL || *name == user.name,
            Self::Group(name) => name == ALL || user.is_in(name),
            Self::ServiceAccount { namespace, name } => {
                let account =
                    user.name.strip_prefix("system:serviceaccount:").and_then(|a| a.split_once(':'));
                account.is_some_and(|(of, called)| of == namespace && (name == ALL || called == name))
            }
        }
    }
}

impl ResourceRule {
    fn matches(&self, verb: &str, group: &str, resource: &str, subresource: &str, namespace: &str) -> bool {
        let named = |listed: &String| match listed.split_once('/') {
            Some((of, part)) => of == resource && part == subresource && !subresource.is_empty(),
            None => listed == resource && subresource.is_empty(),
        };
        contains(&self.verbs, verb)
            && (matches!(&self.resources[..], [only] if only == ALL) || self.resources.iter().any(named))
            && contains(&self.groups, group)
            && if namespace.is_empty() { self.cluster_scope } else { contains(&self.namespaces, namespace) }
    }
}

impl PathRule {
    fn matches(&self, verb: &str, path: &str) -> bool {
        let covers = |listed: &String| {
            let prefix = listed.trim_end_matches('*');
            let below = path.strip_prefix(prefix.trim_end_matches('/'));
            listed == ALL || listed == path || below.is_some_and(|rest| rest.starts_with('/'))
        };
        contains(&self.verbs, verb) && self.paths.iter().any(covers)
    }
}

impl Rule {
    pub fn read(value: &Value) -> Self {
        Self {
            subjects: list(value, "subjects").iter().filter_map(subject).collect(),
            resources: list(value, "resourceRules")
                .iter()
                .map(|rule| ResourceRule {
                    verbs: strings(rule, "verbs"),
                    groups: strings(rule, "apiGroups"),
                    resources: strings(rule, "resources"),
                    cluster_scope: rule.get("clusterScope").and_then(Value::as_bool).unwrap_or(false),
                    namespaces: strings(rule, "namespaces"),
                })
                .collect(),
            paths: list(value, "nonResourceRules")
                .iter()
                .map(|rule| PathRule {
                    verbs: strings(rule, "verbs"),
                    paths: strings(rule, "nonResourceURLs"),
                })
                .collect(),
        }
    }

    pub fn matches(&self, user: &User, digest: &Digest<'_>) -> bool {
        self.subjects.iter().any(|subject| subject.is(user))
            && match digest.about {
                About::Resource { group, resource, subresource, namespace } => self
                    .resources
                    .iter()
                    .any(|rule| rule.matches(digest.verb, group, resource, subresource, namespace)),
                About::Path(path) => self.paths.iter().any(|rule| rule.matches(digest.verb, path)),
            }
    }
}

fn subject(value: &Value) -> Option<Subject> {
    let text = |pointer| value.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    match value.get("kind")?.as_str()? {
        "User" => Some(Subject::User(text("/user/name")?)),
        "Group" => Some(Subject::Group(text("/group/name")?)),
        "ServiceAccount" => Some(Subject::ServiceAccount {
            namespace: text("/serviceAccount/namespace")?,
            name: text("/serviceAccount/name")?,
        }),
        _ => None,
    }
}

pub(super) fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], |all| &all[..])
}

fn strings(value: &Value, key: &str) -> Vec<String> {
    list(value, key).iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn on<'a>(verb: &'a str, group: &'a str, resource: &'a str, namespace: &'a str) -> Digest<'a> {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        Digest { verb, about: About::Resource { group, resource, subresource, namespace } }
    }

    fn at<'a>(verb: &'a str, path: &'a str) -> Digest<'a> {
        Digest { verb, about: About::Path(path) }
    }

    #[test]
    fn subjects_are_users_groups_and_service_accounts() {
        let account = |namespace, name| json!({"kind": "ServiceAccount", "serviceAccount": {"namespace": namespace, "name": name}});
        let rows = [
            (json!({"kind": "User", "user": {"name": "*"}}), true),
            (json!({"kind": "User", "user": {"name": "system:serviceaccount:a:b"}}), true),
            (json!({"kind": "User", "user": {"name": "b"}}), false),
            (json!({"kind": "User"}), false),
            (json!({"kind": "Group", "group": {"name": "system:serviceaccounts"}}), true),
            (json!({"kind": "Group", "group": {"name": "*"}}), true),
            (json!({"kind": "Group", "group": {"name": "others"}}), false),
            (account("a", "b"), true),
            (account("a", "*"), true),
            (account("a", "c"), false),
            (account("aa", "*"), false),
            (json!({"kind": "Robot"}), false),
        ];
        let user = User::new("system:serviceaccount:a:b", ["system:serviceaccounts"]);
        for (subject, expected) in rows {
            let rule = json!({"subjects": [subject], "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}]});
            assert_eq!(Rule::read(&rule).matches(&user, &at("get", "/x")), expected, "{subject}");
        }
    }

    #[test]
    fn resources_match_by_verb_group_name_and_scope() {
        let rule =
            |verbs: &[&str], groups: &[&str], resources: &[&str], cluster: bool, namespaces: &[&str]| {
                json!({
                    "verbs": verbs, "apiGroups": groups, "resources": resources,
                    "clusterScope": cluster, "namespaces": namespaces,
                })
            };
        let rows = [
            (rule(&["*"], &["*"], &["*"], true, &["*"]), on("get", "apps", "deployments/scale", "a"), true),
            (rule(&["*"], &["*"], &["*"], true, &["*"]), on("list", "", "nodes", ""), true),
            (rule(&["*"], &["*"], &["*"], false, &["*"]), on("list", "", "nodes", ""), false),
            (rule(&["*"], &["*"], &["*"], true, &[]), on("list", "", "pods", "a"), false),
            (rule(&["get", "list"], &[""], &["pods"], false, &["a"]), on("list", "", "pods", "a"), true),
            (rule(&["get", "list"], &[""], &["pods"], false, &["a"]), on("watch", "", "pods", "a"), false),
            (
                rule(&["get", "list"], &[""], &["pods"], false, &["a"]),
                on("get", "", "pods/status", "a"),
                false,
            ),
            (rule(&["get"], &[""], &["pods/status"], false, &["a"]), on("get", "", "pods/status", "a"), true),
            (rule(&["get"], &[""], &["pods/status"], false, &["a"]), on("get", "", "pods", "a"), false),
            (rule(&["get"], &["apps"], &["pods"], false, &["a"]), on("get", "", "pods", "a"), false),
            // A star among others is a name like any other, as upstream.
            (rule(&["get", "*"], &[""], &["pods"], false, &["a"]), on("list", "", "pods", "a"), false),
        ];
        for (rule, digest, expected) in rows {
            let rule =
                json!({"subjects": [{"kind": "User", "user": {"name": "*"}}], "resourceRules": [rule]});
            let matched = Rule::read(&rule).matches(&User::new("u", ["g"]), &digest);
            assert_eq!(matched, expected, "{rule} {digest:?}");
        }
    }

    #[test]
    fn paths_match_whole_or_below() {
        let rows = [
            ("*", "/anything", true),
            ("/healthz", "/healthz", true),
            ("/healthz", "/healthz/ping", true),
            ("/healthz", "/healthzz", false),
            ("/apis/*", "/apis/apps", true),
            ("/apis/*", "/api", false),
            ("/apis/*", "/apis", false),
        ];
        for (path, asked, expected) in rows {
            let rule = json!({
                "subjects": [{"kind": "User", "user": {"name": "*"}}],
                "nonResourceRules": [{"verbs": ["get"], "nonResourceURLs": [path]}],
            });
            let rule = Rule::read(&rule);
            assert_eq!(rule.matches(&User::new("u", ["g"]), &at("get", asked)), expected, "{path} {asked}");
            assert!(!rule.matches(&User::new("u", ["g"]), &at("post", asked)));
        }
    }
}
