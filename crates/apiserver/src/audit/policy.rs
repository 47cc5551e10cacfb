//! The audit policy: the audited requests, the level of detail, and the stages.

use super::event::{Level, Stage};
use crate::auth::{Action, User};
use ferrite_api::codec::yaml;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::meta_validation::dns1123_subdomain;
use ferrite_json::{Value, json};
use serde::Deserialize;

const GROUP_VERSION: &str = "audit.k8s.io/v1";
/// A policy is a few pages; a larger file is something else.
const MAX_BYTES: u64 = 4 << 20;

/// Why a policy cannot be used, in upstream's words.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("failed to read file path {path:?}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("failed to read file path {0:?}: it is too large")]
    TooLarge(String),
    #[error("failed decoding: {0}")]
    Decode(String),
    #[error("unknown group version field {0} in policy")]
    Version(String),
    #[error("{0}")]
    Invalid(String),
    #[error("loaded illegal policy with 0 rules")]
    Empty,
    #[error("{error}: from file {path}")]
    InFile { path: String, error: Box<PolicyError> },
}

/// A policy that was read and found valid.
#[derive(Debug, Clone)]
pub struct AuditPolicy {
    rules: Vec<Rule>,
    omit_managed_fields: bool,
}

/// The policy's decision for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub level: Level,
    pub omits: Stages,
    pub omits_managed_fields: bool,
}

/// A set of stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Stages(u8);

impl Stages {
    pub fn contains(self, stage: Stage) -> bool {
        self.0 & (1 << stage as u8) != 0
    }

    fn of(names: &[String]) -> Self {
        let known = Stage::ALL.into_iter().filter(|stage| names.iter().any(|name| name == stage.name()));
        Self(known.fold(0, |set, stage| set | (1 << stage as u8)))
    }
}

#[derive(Debug, Clone)]
struct Rule {
    level: Level,
    omits: Stages,
    omits_managed_fields: Option<bool>,
    given: GivenRule,
}

/// A policy as its file has it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct GivenPolicy {
    rules: Vec<GivenRule>,
    omit_stages: Vec<String>,
    omit_managed_fields: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct GivenRule {
    level: String,
    users: Vec<String>,
    user_groups: Vec<String>,
    verbs: Vec<String>,
    resources: Vec<GroupResources>,
    namespaces: Vec<String>,
    #[serde(rename = "nonResourceURLs")]
    non_resource_urls: Vec<String>,
    omit_stages: Vec<String>,
    omit_managed_fields: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct GroupResources {
    group: String,
    resources: Vec<String>,
    resource_names: Vec<String>,
}

const POLICY_FIELDS: &[&str] =
    &["kind", "apiVersion", "metadata", "rules", "omitStages", "omitManagedFields"];
const RULE_FIELDS: &[&str] = &[
    "level",
    "users",
    "userGroups",
    "verbs",
    "resources",
    "namespaces",
    "nonResourceURLs",
    "omitStages",
    "omitManagedFields",
];
const RESOURCES_FIELDS: &[&str] = &["group", "resources", "resourceNames"];

impl AuditPolicy {
    pub fn read(path: &std::path::Path) -> Result<Self, PolicyError> {
        let name = path.display().to_string();
        let failed = |source| PolicyError::Read { path: name.clone(), source };
        if std::fs::metadata(path).map_err(failed)?.len() > MAX_BYTES {
            return Err(PolicyError::TooLarge(name));
        }
        let bytes = std::fs::read(path).map_err(failed)?;
        Self::parse(&bytes).map_err(|error| PolicyError::InFile { path: name, error: Box::new(error) })
    }

    /// Reads a policy, YAML or JSON. As upstream: unknown and repeated fields are no more than a warning.
    pub fn parse(bytes: &[u8]) -> Result<Self, PolicyError> {
        let decoded = yaml::decode_any(bytes).map_err(|error| PolicyError::Decode(error.to_string()))?;
        let mut complaints: Vec<String> = decoded.strict.clone();
        let mut value = decoded.value;
        check_kind(&value)?;
        complaints.extend(unknown_fields(&value));
        if !complaints.is_empty() {
            let why = complaints.join(", ");
            tracing::warn!(why, "the audit policy has fields that mean nothing, and is used without them");
        }
        drop_nulls(&mut value);
        let given: GivenPolicy =
            ferrite_json::from_value(value).map_err(|error| PolicyError::Decode(error.to_string()))?;
        let errors = validate(&given);
        match errors.as_slice() {
            [] => {}
            [one] => return Err(PolicyError::Invalid(one.to_string())),
            many => {
                let all: Vec<String> = many.iter().map(ToString::to_string).collect();
                return Err(PolicyError::Invalid(format!("[{}]", all.join(", "))));
            }
        }
        if given.rules.is_empty() {
            return Err(PolicyError::Empty);
        }
        let everywhere = Stages::of(&given.omit_stages);
        let rule = |rule: GivenRule| Rule {
            level: Level::named(&rule.level).unwrap_or(Level::None),
            omits: Stages(everywhere.0 | Stages::of(&rule.omit_stages).0),
            omits_managed_fields: rule.omit_managed_fields,
            given: rule,
        };
        Ok(Self {
            rules: given.rules.into_iter().map(rule).collect(),
            omit_managed_fields: given.omit_managed_fields,
        })
    }

    /// The first rule that a request matches decides; a request that matches none is not audited.
    pub(crate) fn evaluate(&self, user: Option<&User>, action: &Action) -> Verdict {
        match self.rules.iter().find(|rule| rule.given.matches(user, action)) {
            Some(rule) => Verdict {
                level: rule.level,
                omits: rule.omits,
                omits_managed_fields: rule.omits_managed_fields.unwrap_or(self.omit_managed_fields),
            },
            None => Verdict { level: Level::None, omits: Stages::default(), omits_managed_fields: false },
        }
    }
}

fn check_kind(value: &Value) -> Result<(), PolicyError> {
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
    let (version, kind) = (text("apiVersion"), text("kind"));
    if kind.is_empty() {
        return Err(PolicyError::Decode(format!("Object 'Kind' is missing in '{value}'")));
    }
    if version == GROUP_VERSION && kind == "Policy" {
        return Ok(());
    }
    if version == GROUP_VERSION && matches!(kind, "Event" | "EventList" | "PolicyList") {
        return Err(PolicyError::Decode(format!("a Policy is expected, and not a {kind}")));
    }
    if version.is_empty() {
        return Err(PolicyError::Version(format!("/, Kind={kind}")));
    }
    Err(PolicyError::Decode(format!(
        "no kind {kind:?} is registered for version {version:?} in scheme \"pkg/audit/scheme.go:30\""
    )))
}

/// Fields that no policy has, with their paths.
fn unknown_fields(policy: &Value) -> Vec<String> {
    fn look(value: &Value, path: &str, known: &[&str], found: &mut Vec<String>) {
        for (key, _) in value.as_object().into_iter().flatten() {
            if !known.contains(&key.as_str()) {
                found.push(format!("unknown field \"{path}{key}\""));
            }
        }
    }
    let mut found = Vec::new();
    look(policy, "", POLICY_FIELDS, &mut found);
    for (index, rule) in policy["rules"].as_array().into_iter().flatten().enumerate() {
        look(rule, &format!("rules[{index}]."), RULE_FIELDS, &mut found);
        for (inner, resources) in rule["resources"].as_array().into_iter().flatten().enumerate() {
            let path = format!("rules[{index}].resources[{inner}].");
            look(resources, &path, RESOURCES_FIELDS, &mut found);
        }
    }
    found
}

/// As Go reads JSON: null leaves a field as it is without it.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, member| !member.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn validate(policy: &GivenPolicy) -> Vec<FieldError> {
    let mut errors = check_stages(&policy.omit_stages, &Path::new("omitStages"));
    for (index, rule) in policy.rules.iter().enumerate() {
        let path = Path::new("rules").index(index);
        let level = path.child("level");
        match rule.level.as_str() {
            "" => errors.push(FieldError::required(&level, "")),
            name if Level::named(name).is_none() => {
                let levels = Level::ALL.map(Level::name);
                errors.push(FieldError::not_supported(&level, name, &levels));
            }
            _ => {}
        }
        let urls = path.child("nonResourceURLs");
        errors.extend(check_urls(&rule.non_resource_urls, &urls));
        errors.extend(check_resources(&rule.resources, &path.child("resources")));
        errors.extend(check_stages(&rule.omit_stages, &path.child("omitStages")));
        let of_resources = !rule.resources.is_empty() || !rule.namespaces.is_empty();
        if !rule.non_resource_urls.is_empty() && of_resources {
            let why = "rules cannot apply to both regular resources and non-resource URLs";
            errors.push(FieldError::invalid(&urls, json!(rule.non_resource_urls), why));
        }
    }
    errors
}

fn check_stages(names: &[String], path: &Path) -> Vec<FieldError> {
    let allowed = Stage::ALL.map(Stage::name);
    let unknown = names.iter().enumerate().filter(|(_, name)| !allowed.contains(&name.as_str()));
    unknown
        .map(|(index, name)| {
            let why = format!("allowed stages are {}", allowed.join(","));
            FieldError::invalid(&path.index(index), name.as_str(), why)
        })
        .collect()
}

fn check_urls(urls: &[String], path: &Path) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for (index, url) in urls.iter().enumerate().filter(|(_, url)| *url != "*") {
        let mut refuse = |why: &str| errors.push(FieldError::invalid(&path.index(index), url.as_str(), why));
        if !url.starts_with('/') {
            refuse("non-resource URL rules must begin with a '/' character");
        }
        if url.find('*').is_some_and(|at| at + 1 < url.len()) {
            refuse("non-resource URL wildcards '*' must be the final character of the rule");
        }
    }
    errors
}

fn check_resources(resources: &[GroupResources], path: &Path) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for of_group in resources {
        if !matches!(of_group.group.as_str(), "" | "*") {
            let problems = dns1123_subdomain(&of_group.group);
            if !problems.is_empty() {
                let (group, why) = (of_group.group.as_str(), problems.join(","));
                errors.push(FieldError::invalid(&path.child("group"), group, why));
            }
        }
        if !of_group.resource_names.is_empty() && of_group.resources.is_empty() {
            let names = json!(of_group.resource_names);
            let why = "using resourceNames requires at least one resource";
            errors.push(FieldError::invalid(&path.child("resourceNames"), names, why));
        }
    }
    errors
}

impl GivenRule {
    fn matches(&self, user: Option<&User>, action: &Action) -> bool {
        let named = |list: &[String], text: &str| list.iter().any(|entry| entry == text);
        if !self.users.is_empty() && !user.is_some_and(|user| named(&self.users, &user.name)) {
            return false;
        }
        if !self.user_groups.is_empty()
            && !user.is_some_and(|user| user.groups.iter().any(|group| named(&self.user_groups, group)))
        {
            return false;
        }
        if !self.verbs.is_empty() && !named(&self.verbs, &action.verb) {
            return false;
        }
        if !self.namespaces.is_empty() || !self.resources.is_empty() {
            return action.path.is_none()
                && (self.namespaces.is_empty() || named(&self.namespaces, &action.namespace))
                && (self.resources.is_empty() || self.resources.iter().any(|given| given.matches(action)));
        }
        match (&action.path, self.non_resource_urls.is_empty()) {
            (_, true) => true,
            (None, false) => false,
            (Some(path), false) => self.non_resource_urls.iter().any(|url| path_matches(path, url)),
        }
    }
}

fn path_matches(path: &str, url: &str) -> bool {
    url == "*" || url == path || (url.ends_with('*') && path.starts_with(url.trim_end_matches('*')))
}

impl GroupResources {
    fn matches(&self, action: &Action) -> bool {
        if self.group != "*" && self.group != action.group {
            return false;
        }
        if self.resources.is_empty() {
            return true;
        }
        if !self.resource_names.is_empty() && !self.resource_names.contains(&action.name) {
            return false;
        }
        let (resource, part) = (action.resource.as_str(), action.subresource.as_str());
        self.resources.iter().any(|given| match given.split_once('/') {
            None => given == "*" || (part.is_empty() && given == resource),
            Some((given, "*")) if given == resource => true,
            Some(("*", given)) => !part.is_empty() && given == part,
            Some((given, given_part)) => given == resource && given_part == part,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &str) -> Result<AuditPolicy, PolicyError> {
        AuditPolicy::parse(format!("apiVersion: audit.k8s.io/v1\nkind: Policy\n{rules}").as_bytes())
    }

    fn of_resource(verb: &str, group: &str, resource: &str, namespace: &str, name: &str) -> Action {
        let (resource, part) = resource.split_once('/').unwrap_or((resource, ""));
        Action {
            verb: verb.into(),
            group: group.into(),
            resource: resource.into(),
            subresource: part.into(),
            namespace: namespace.into(),
            name: name.into(),
            ..Action::default()
        }
    }

    fn of_path(verb: &str, path: &str) -> Action {
        Action { verb: verb.into(), path: Some(path.into()), ..Action::default() }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let jane = User::new("jane", ["devs"]);
        let rows: &[(&str, Action, Level)] = &[
            ("users: [jane]", of_resource("get", "", "pods", "a", "p"), Level::Metadata),
            ("users: [john]", of_resource("get", "", "pods", "a", "p"), Level::None),
            ("userGroups: [devs]", of_path("get", "/x"), Level::Metadata),
            ("userGroups: [ops]", of_path("get", "/x"), Level::None),
            ("verbs: [get]", of_resource("list", "", "pods", "a", ""), Level::None),
            ("namespaces: [a]", of_resource("get", "", "pods", "a", "p"), Level::Metadata),
            ("namespaces: ['']", of_resource("get", "", "nodes", "", "n"), Level::Metadata),
            ("namespaces: ['']", of_path("get", "/x"), Level::None),
            ("resources: [{group: ''}]", of_resource("get", "", "pods/log", "a", "p"), Level::Metadata),
            ("resources: [{group: apps}]", of_resource("get", "", "pods", "a", "p"), Level::None),
            ("resources: [{group: '*'}]", of_resource("get", "apps", "x", "a", "p"), Level::Metadata),
            ("resources: [{resources: [pods]}]", of_resource("get", "", "pods/log", "a", "p"), Level::None),
            (
                "resources: [{resources: [pods/log]}]",
                of_resource("get", "", "pods/log", "a", "p"),
                Level::Metadata,
            ),
            (
                "resources: [{resources: ['*/log']}]",
                of_resource("get", "", "pods/log", "a", "p"),
                Level::Metadata,
            ),
            ("resources: [{resources: ['*/log']}]", of_resource("get", "", "pods", "a", "p"), Level::None),
            (
                "resources: [{resources: ['pods/*']}]",
                of_resource("get", "", "pods", "a", "p"),
                Level::Metadata,
            ),
            ("resources: [{resources: ['*']}]", of_resource("get", "", "pods/x", "a", "p"), Level::Metadata),
            (
                "resources: [{resources: [pods], resourceNames: [q]}]",
                of_resource("get", "", "pods", "a", "p"),
                Level::None,
            ),
            ("nonResourceURLs: ['/healthz*']", of_path("get", "/healthz/etcd"), Level::Metadata),
            ("nonResourceURLs: ['/healthz']", of_path("get", "/healthz/etcd"), Level::None),
            ("nonResourceURLs: ['*']", of_resource("get", "", "pods", "a", "p"), Level::None),
        ];
        for (rule, action, level) in rows {
            let policy = policy(&format!("rules:\n- {{level: Metadata, {rule}}}")).expect(rule);
            assert_eq!(policy.evaluate(Some(&jane), action).level, *level, "{rule} {action:?}");
        }
        let two = policy("rules: [{level: None, verbs: [get]}, {level: Request}]").unwrap();
        assert_eq!(two.evaluate(None, &of_path("get", "/")).level, Level::None);
        assert_eq!(two.evaluate(None, &of_path("post", "/")).level, Level::Request);
    }

    #[test]
    fn stages_are_omitted_everywhere_or_by_a_rule_and_a_rule_has_the_last_word_on_managed_fields() {
        let text = "omitStages: [RequestReceived]\nomitManagedFields: true\nrules:\n\
            - {level: Metadata, verbs: [get], omitStages: [Panic], omitManagedFields: false}\n\
            - {level: Request}";
        let policy = policy(text).unwrap();
        let get = policy.evaluate(None, &of_path("get", "/"));
        assert!(get.omits.contains(Stage::RequestReceived) && get.omits.contains(Stage::Panic));
        assert!(!get.omits.contains(Stage::ResponseComplete) && !get.omits_managed_fields);
        let post = policy.evaluate(None, &of_path("post", "/"));
        assert!(post.omits.contains(Stage::RequestReceived) && !post.omits.contains(Stage::Panic));
        assert!(post.omits_managed_fields);
    }

    #[test]
    fn mistakes_are_named_as_upstream_names_them() {
        let stages = "allowed stages are RequestReceived,ResponseStarted,ResponseComplete,Panic";
        let rows: &[(&str, String)] = &[
            ("rules: []", "loaded illegal policy with 0 rules".into()),
            ("rules: [{}]", "rules[0].level: Required value".into()),
            (
                "rules: [{level: Some}]",
                "rules[0].level: Unsupported value: \"Some\": supported values: \"None\", \"Metadata\", \"Request\", \"RequestResponse\"".into(),
            ),
            (
                "rules: [{level: None, omitStages: [Never]}]",
                format!("rules[0].omitStages[0]: Invalid value: \"Never\": {stages}"),
            ),
            (
                "omitStages: [Never]\nrules: [{level: None, nonResourceURLs: [x]}]",
                format!("[omitStages[0]: Invalid value: \"Never\": {stages}, rules[0].nonResourceURLs[0]: Invalid value: \"x\": non-resource URL rules must begin with a '/' character]"),
            ),
            (
                "rules: [{level: None, nonResourceURLs: ['/a*b']}]",
                "rules[0].nonResourceURLs[0]: Invalid value: \"/a*b\": non-resource URL wildcards '*' must be the final character of the rule".into(),
            ),
            (
                "rules: [{level: None, nonResourceURLs: [/a], namespaces: [b]}]",
                "rules[0].nonResourceURLs: Invalid value: [\"/a\"]: rules cannot apply to both regular resources and non-resource URLs".into(),
            ),
            (
                "rules: [{level: None, resources: [{resourceNames: [a]}]}]",
                "rules[0].resources.resourceNames: Invalid value: [\"a\"]: using resourceNames requires at least one resource".into(),
            ),
        ];
        for (text, expected) in rows {
            assert_eq!(policy(text).expect_err(text).to_string(), *expected, "{text}");
        }
        let group = policy("rules: [{level: None, resources: [{group: apps/v1}]}]").unwrap_err().to_string();
        assert!(group.starts_with("rules[0].resources.group: Invalid value: \"apps/v1\""), "{group}");
        let kind = AuditPolicy::parse(b"apiVersion: audit.k8s.io/v1beta1\nkind: Policy").unwrap_err();
        assert!(kind.to_string().contains("no kind \"Policy\" is registered for version"), "{kind}");
        assert!(policy("rules: 7").is_err() && AuditPolicy::parse(b"{").is_err());
        // As upstream: a field that nobody knows is ignored.
        assert!(policy("rules: [{level: None, colour: red}]").is_ok());
    }
}
