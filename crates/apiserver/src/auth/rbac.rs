//! Role-based access control: bindings give roles, roles hold rules, a rule that matches allows.
//!
//! Roles and bindings are kept decoded and follow the store: each decision applies the latest changes
//! first.

use super::modes::Mode;
use super::{Action, Decision, User};
use crate::registry::{ResourceMap, stored};
use ferrite_api::meta;
use ferrite_json::{Value, json};
use ferrite_store::{Change, Entry, Store, Watch};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

const GROUP: &str = "rbac.authorization.k8s.io";
const RESOURCES: [&str; 4] = ["clusterroles", "roles", "clusterrolebindings", "rolebindings"];

/// A rule of a role.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(super) verbs: Vec<String>,
    groups: Vec<String>,
    resources: Vec<String>,
    names: Vec<String>,
    paths: Vec<String>,
}

/// One combination of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part<'a> {
    pub verb: &'a str,
    pub group: &'a str,
    pub resource: &'a str,
    /// None stands for all names.
    pub name: Option<&'a str>,
    /// A path that is no resource's. The rest, but for the verb, is then empty.
    pub path: Option<&'a str>,
}

impl Part<'_> {
    /// The rule of this combination alone.
    pub fn rule(&self) -> Rule {
        let one = |text: &str| vec![text.to_owned()];
        match self.path {
            Some(path) => Rule { verbs: one(self.verb), paths: one(path), ..Rule::default() },
            None => Rule {
                verbs: one(self.verb),
                groups: one(self.group),
                resources: one(self.resource),
                names: self.name.map(str::to_owned).into_iter().collect(),
                ..Rule::default()
            },
        }
    }
}

/// The rules of a list that cover something: a bit for each.
struct Holders(Vec<u64>);

impl Holders {
    fn of(rules: &[Rule], covers: impl Fn(&Rule) -> bool) -> Self {
        let word = |rules: &[Rule]| {
            rules.iter().enumerate().fold(0, |word, (bit, rule)| word | u64::from(covers(rule)) << bit)
        };
        Self(rules.chunks(64).map(word).collect())
    }

    fn have_common<const N: usize>(all: [&Self; N]) -> bool {
        let words = all.iter().map(|holders| holders.0.len()).min().unwrap_or(0);
        (0..words).any(|at| all.iter().fold(u64::MAX, |common, holders| common & holders.0[at]) != 0)
    }
}

impl Rule {
    fn of(value: &Value) -> Self {
        let listed = |key: &str| -> Vec<String> {
            let list = value.get(key).and_then(Value::as_array).into_iter().flatten();
            list.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        Self {
            verbs: listed("verbs"),
            groups: listed("apiGroups"),
            resources: listed("resources"),
            names: listed("resourceNames"),
            paths: listed("nonResourceURLs"),
        }
    }

    pub fn all(role: &Value) -> Vec<Self> {
        role.get("rules").and_then(Value::as_array).into_iter().flatten().map(Self::of).collect()
    }

    pub(super) fn allows(&self, action: &Action) -> bool {
        let has = |list: &[String], wanted: &str| list.iter().any(|x| x == "*" || x == wanted);
        if !has(&self.verbs, &action.verb) {
            return false;
        }
        if let Some(path) = &action.path {
            return self.paths.iter().any(|allowed| match allowed.strip_suffix('*') {
                Some(prefix) => path.starts_with(prefix),
                None => allowed == path,
            });
        }
        has(&self.groups, &action.group)
            && self.covers(&action.resource, &action.subresource)
            && (self.names.is_empty() || self.names.contains(&action.name))
    }

    /// The rule in the form of a rules review: about resources, or about paths.
    pub fn to_value(&self) -> (Option<Value>, Option<Value>) {
        let resources = (!self.resources.is_empty()).then(|| {
            let mut rule =
                json!({"verbs": self.verbs, "apiGroups": self.groups, "resources": self.resources});
            if !self.names.is_empty() {
                rule["resourceNames"] = json!(self.names);
            }
            rule
        });
        let paths =
            (!self.paths.is_empty()).then(|| json!({"verbs": self.verbs, "nonResourceURLs": self.paths}));
        (resources, paths)
    }

    pub(super) fn everything() -> [Self; 2] {
        let all = || vec!["*".to_owned()];
        [
            Self { verbs: all(), groups: all(), resources: all(), ..Self::default() },
            Self { verbs: all(), paths: all(), ..Self::default() },
        ]
    }

    /// The number of combinations of one verb with one resource (of one name, if there are any), or with one path.
    pub(super) fn combinations(&self) -> usize {
        let resources = self.groups.len().saturating_mul(self.resources.len());
        let named = resources.saturating_mul(self.names.len().max(1));
        self.verbs.len().saturating_mul(named.saturating_add(self.paths.len()))
    }

    /// Reports the combinations of this rule that no rule of `held` covers. Each text is compared with the held rules once,
    /// however many combinations it is in.
    pub fn for_each_not_covered<'r>(&'r self, held: &[Self], report: &mut dyn FnMut(&Part<'r>)) {
        let verbs: Vec<_> = self.verbs.iter().map(|v| (v, Holders::of(held, |h| h.covers_verb(v)))).collect();
        let groups: Vec<_> =
            self.groups.iter().map(|g| (g, Holders::of(held, |h| h.covers_group(g)))).collect();
        let resources: Vec<_> =
            self.resources.iter().map(|r| (r, Holders::of(held, |h| h.covers_resource(r)))).collect();
        let names: Vec<(Option<&String>, Holders)> = match self.names.is_empty() {
            true => vec![(None, Holders::of(held, |h| h.names.is_empty()))],
            false => {
                let covers =
                    |name: &String| Holders::of(held, |h| h.names.is_empty() || h.names.contains(name));
                self.names.iter().map(|name| (Some(name), covers(name))).collect()
            }
        };
        let paths: Vec<_> = self.paths.iter().map(|p| (p, Holders::of(held, |h| h.covers_path(p)))).collect();
        for (verb, of_verb) in &verbs {
            for (group, of_group) in &groups {
                for (resource, of_resource) in &resources {
                    for (name, of_name) in &names {
                        if !Holders::have_common([of_verb, of_group, of_resource, of_name]) {
                            let name = name.map(String::as_str);
                            report(&Part { verb, group, resource, name, path: None });
                        }
                    }
                }
            }
            for (path, of_path) in &paths {
                if !Holders::have_common([of_verb, of_path]) {
                    report(&Part { verb, group: "", resource: "", name: None, path: Some(path) });
                }
            }
        }
    }

    fn covers_verb(&self, wanted: &str) -> bool {
        self.verbs.iter().any(|held| held == "*" || held == wanted)
    }

    fn covers_group(&self, wanted: &str) -> bool {
        self.groups.iter().any(|held| held == "*" || held == wanted)
    }

    fn covers_resource(&self, wanted: &str) -> bool {
        let subresource = wanted.split_once('/').map(|(_, subresource)| subresource);
        self.resources.iter().any(|held| {
            held == "*" || held == wanted || subresource.is_some() && held.strip_prefix("*/") == subresource
        })
    }

    fn covers_path(&self, wanted: &str) -> bool {
        self.paths.iter().any(|held| {
            held == wanted || held.ends_with('*') && wanted.starts_with(held.trim_end_matches('*'))
        })
    }

    /// Returns true if this rule grants all that another grants. A star covers everything, and nothing else covers a
    /// star. A rule for some names never covers one for all names.
    pub fn covers_rule(&self, other: &Self) -> bool {
        let names = match other.names.is_empty() {
            true => self.names.is_empty(),
            false => self.names.is_empty() || other.names.iter().all(|name| self.names.contains(name)),
        };
        names
            && other.verbs.iter().all(|verb| self.covers_verb(verb))
            && other.groups.iter().all(|group| self.covers_group(group))
            && other.resources.iter().all(|resource| self.covers_resource(resource))
            && other.paths.iter().all(|path| self.covers_path(path))
    }

    /// The rule as upstream prints it.
    pub(super) fn compact(&self) -> String {
        let list = |items: &[String]| {
            let quoted: Vec<String> = items.iter().map(|i| format!("{i:?}")).collect();
            format!("[{}]", quoted.join(" "))
        };
        let mut parts = Vec::new();
        for (key, items) in [
            ("APIGroups", &self.groups),
            ("Resources", &self.resources),
            ("ResourceNames", &self.names),
            ("NonResourceURLs", &self.paths),
            ("Verbs", &self.verbs),
        ] {
            if !items.is_empty() {
                parts.push(format!("{key}:{}", list(items)));
            }
        }
        format!("{{{}}}", parts.join(", "))
    }

    /// As upstream: a rule names a resource as a whole. Audiences of tokens stand in its place, and have slashes of their
    /// own.
    fn covers(&self, resource: &str, subresource: &str) -> bool {
        self.resources.iter().any(|allowed| {
            if allowed == "*" || subresource.is_empty() {
                return allowed == "*" || allowed == resource;
            }
            let parent = allowed.strip_suffix(subresource).and_then(|rest| rest.strip_suffix('/'));
            parent.is_some_and(|parent| parent == "*" || parent == resource)
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Binding {
    namespace: String,
    name: String,
    role_kind: String,
    /// The namespace of its role, empty for a cluster role, and the role's name.
    role: (String, String),
    subjects: Vec<Subject>,
}

/// A subject of a binding: kind, name and namespace.
type Subject = (String, String, String);

impl Binding {
    fn of(value: &Value) -> Self {
        let text = |value: &Value, pointer: &str| {
            value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let subjects = value.get("subjects").and_then(Value::as_array).into_iter().flatten();
        let (namespace, role_kind) = (meta::namespace(value).to_owned(), text(value, "/roleRef/kind"));
        let of_role = if role_kind == "Role" { namespace.clone() } else { String::new() };
        Self {
            name: meta::name(value).to_owned(),
            role: (of_role, text(value, "/roleRef/name")),
            namespace,
            role_kind,
            subjects: subjects.map(|s| (text(s, "/kind"), text(s, "/name"), text(s, "/namespace"))).collect(),
        }
    }

    /// The place of the subject that the user is.
    fn subject(&self, user: &User) -> Option<usize> {
        self.subjects.iter().position(|(kind, name, namespace)| match kind.as_str() {
            "User" => *name == user.name,
            "Group" => user.is_in(name),
            "ServiceAccount" => {
                let namespace = if namespace.is_empty() { &self.namespace } else { namespace };
                !namespace.is_empty() && is_service_account(&user.name, namespace, name)
            }
            _ => false,
        })
    }

    /// A subject in upstream's words.
    fn describe(&self, subject: usize) -> String {
        let Some((kind, name, namespace)) = self.subjects.get(subject) else { return String::new() };
        if kind != "ServiceAccount" {
            return format!("{kind} {name:?}");
        }
        let namespace = if namespace.is_empty() { &self.namespace } else { namespace };
        format!("{kind} {:?}", format!("{name}/{namespace}"))
    }
}

/// Returns true if a user is this service account. Every decision asks this of every binding, so no text is made.
fn is_service_account(user: &str, namespace: &str, name: &str) -> bool {
    let rest = user.strip_prefix("system:serviceaccount:").and_then(|rest| rest.strip_prefix(namespace));
    rest.and_then(|rest| rest.strip_prefix(':')) == Some(name)
}

#[derive(Default)]
struct State {
    /// By namespace (empty for cluster roles) and name.
    roles: HashMap<(String, String), Vec<Rule>>,
    /// By namespace, then name.
    bindings: HashMap<String, HashMap<String, Arc<Binding>>>,
    /// The bindings of users who asked, by the user's name. Forgotten with every change of roles or bindings.
    bound: HashMap<String, Vec<Bound>>,
    watches: Vec<(usize, Watch)>,
}

/// A binding, and the place of the subject that the user is.
type BoundTo = (Arc<Binding>, usize);

/// The bindings of one namespace, or of the cluster, that have a user as a subject.
struct Bound {
    groups: Vec<String>,
    namespace: String,
    bindings: Arc<[BoundTo]>,
}

/// The users whose bindings are remembered, and the places for each.
const MOST_BOUND: usize = 256;
const MOST_PLACES: usize = 16;

pub(crate) struct Rbac {
    store: Arc<Store>,
    table: Arc<ResourceMap>,
    /// The authorizers of the server, of which this is one.
    modes: RwLock<Arc<[Mode]>>,
    state: Mutex<State>,
}

impl Rbac {
    pub fn new(store: Arc<Store>, table: Arc<ResourceMap>, modes: Vec<Mode>) -> Self {
        let modes = RwLock::new(modes.into());
        let rbac = Self { store, table, modes, state: Mutex::new(State::default()) };
        *rbac.lock() = rbac.load();
        rbac
    }

    /// The authorizers that are asked, in their order.
    pub fn modes(&self) -> Arc<[Mode]> {
        Arc::clone(&self.modes.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks these authorizers from now on.
    pub fn set_modes(&self, modes: Vec<Mode>) {
        *self.modes.write().unwrap_or_else(PoisonError::into_inner) = modes.into();
    }

    /// Returns true if a decision may need the answer of a webhook.
    pub fn asks_webhooks(&self) -> bool {
        self.modes().iter().any(|mode| matches!(mode, Mode::Webhook(_)))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads everything anew.
    fn load(&self) -> State {
        let mut state = State::default();
        let snapshot = self.store.snapshot();
        for (kind, plural) in RESOURCES.iter().enumerate() {
            let Some(resource) = self.table.find(GROUP, "v1", plural) else { continue };
            let prefix = stored::prefix(resource);
            for (_, entry) in snapshot.range(prefix.as_bytes(), None) {
                state.put(kind, decoded(entry));
            }
            if let Ok(watch) = self.store.watch(prefix.as_bytes(), snapshot.revision()) {
                state.watches.push((kind, watch));
            }
        }
        state
    }

    /// The state, with the changes since the last call.
    fn current(&self) -> std::sync::MutexGuard<'_, State> {
        let mut state = self.lock();
        let mut changes: Vec<(usize, Change)> = Vec::new();
        let mut lost = false;
        for (kind, watch) in &mut state.watches {
            match watch.ready() {
                Ok(ready) => changes.extend(ready.into_iter().map(|change| (*kind, change))),
                Err(_) => lost = true,
            }
        }
        if lost {
            *state = self.load();
            return state;
        }
        for (kind, change) in changes {
            match (&change.entry, &change.previous) {
                (Some(entry), _) => state.put(kind, decoded(entry)),
                (None, Some(previous)) => state.remove(kind, decoded(previous)),
                (None, None) => {}
            }
        }
        state
    }

    pub fn decide(&self, user: &User, action: &Action) -> Decision {
        let mut state = self.current();
        for namespace in ["", action.namespace.as_str()] {
            for (binding, subject) in &*state.bound_to(user, namespace) {
                if state.rules(binding).iter().any(|rule| rule.allows(action)) {
                    return Decision {
                        allowed: true,
                        reason: reason(binding, &binding.describe(*subject)),
                        ..Decision::default()
                    };
                }
            }
            if action.namespace.is_empty() {
                break;
            }
        }
        Decision::default()
    }

    /// Every rule that holds for a user in a namespace, in the order of the bindings' names.
    pub fn rules_for(&self, user: &User, namespace: &str) -> Held {
        let state = self.current();
        let mut held = Held::default();
        for place in ["", namespace] {
            let mut bindings: Vec<&Arc<Binding>> =
                state.bindings.get(place).into_iter().flat_map(HashMap::values).collect();
            bindings.sort_by(|a, b| a.name.cmp(&b.name));
            for binding in bindings.into_iter().filter(|b| b.subject(user).is_some()) {
                match state.role(binding) {
                    Some(rules) => held.rules.extend_from_slice(rules),
                    None => held.missing.push(missing_role(binding)),
                }
            }
            if namespace.is_empty() {
                break;
            }
        }
        held
    }

    /// Returns true if a cluster role allows the action, whoever has it.
    pub fn role_allows(&self, role: &str, action: &Action) -> bool {
        let state = self.current();
        let rules = state.roles.get(&(String::new(), role.to_owned()));
        rules.is_some_and(|rules| rules.iter().any(|rule| rule.allows(action)))
    }
}

/// The rules that a user has in a namespace.
#[derive(Debug, Default)]
pub struct Held {
    pub rules: Vec<Rule>,
    /// One error for each binding whose role is absent.
    pub missing: Vec<String>,
}

fn missing_role(binding: &Binding) -> String {
    let kind = binding.role_kind.to_lowercase();
    format!("{kind}.rbac.authorization.k8s.io {:?} not found", binding.role.1)
}

fn reason(binding: &Binding, subject: &str) -> String {
    let (kind, name) = match binding.namespace.as_str() {
        "" => ("ClusterRoleBinding", binding.name.clone()),
        namespace => ("RoleBinding", format!("{}/{namespace}", binding.name)),
    };
    format!("RBAC: allowed by {kind} {name:?} of {} {:?} to {subject}", binding.role_kind, binding.role.1)
}

fn decoded(entry: &Entry) -> Value {
    ferrite_json::from_slice(entry.plain()).unwrap_or_default()
}

impl State {
    fn put(&mut self, kind: usize, object: Value) {
        self.bound.clear();
        let (namespace, name) = (meta::namespace(&object).to_owned(), meta::name(&object).to_owned());
        if kind < 2 {
            self.roles.insert((namespace, name), Rule::all(&object));
        } else {
            self.bindings.entry(namespace).or_default().insert(name, Arc::new(Binding::of(&object)));
        }
    }

    fn remove(&mut self, kind: usize, object: Value) {
        self.bound.clear();
        let (namespace, name) = (meta::namespace(&object).to_owned(), meta::name(&object).to_owned());
        if kind < 2 {
            self.roles.remove(&(namespace, name));
        } else if let Some(bindings) = self.bindings.get_mut(&namespace) {
            bindings.remove(&name);
            if bindings.is_empty() {
                self.bindings.remove(&namespace);
            }
        }
    }

    /// The bindings of a namespace, or of the cluster, that have the user as a subject. A user asks again and again, and
    /// most bindings are not theirs.
    fn bound_to(&mut self, user: &User, namespace: &str) -> Arc<[BoundTo]> {
        let known = self.bound.get(&user.name).into_iter().flatten();
        let mut known = known.filter(|known| known.namespace == namespace && known.groups == user.groups);
        if let Some(known) = known.next() {
            return Arc::clone(&known.bindings);
        }
        let all = self.bindings.get(namespace).into_iter().flat_map(HashMap::values);
        let bindings: Arc<[BoundTo]> =
            all.filter_map(|binding| Some((Arc::clone(binding), binding.subject(user)?))).collect();
        if self.bound.len() >= MOST_BOUND {
            self.bound.clear();
        }
        let places = self.bound.entry(user.name.clone()).or_default();
        if places.len() >= MOST_PLACES {
            places.clear();
        }
        let (groups, namespace) = (user.groups.clone(), namespace.to_owned());
        places.push(Bound { groups, namespace, bindings: Arc::clone(&bindings) });
        bindings
    }

    fn rules(&self, binding: &Binding) -> &[Rule] {
        self.role(binding).unwrap_or_default()
    }

    /// The rules of the role of a binding; none if there is no such role.
    fn role(&self, binding: &Binding) -> Option<&[Rule]> {
        self.roles.get(&binding.role).map(Vec::as_slice)
    }
}

#[cfg(test)]
mod tests;
