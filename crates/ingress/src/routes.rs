//! The routing table as a pure function of the objects.
//!
//! A host belongs to one namespace: that of the oldest Ingress that names it, in a rule or for TLS. Rules of other
//! namespaces for it are refused, and the wildcard of another namespace neither takes its requests nor lends it a
//! certificate. So nobody receives requests, or uses keys, of a host that another namespace had before.

use crate::class::{Standing, standing};
use crate::paths::{elements, normalized};
use ferrite_client::ObjectKey;
use k8s_openapi::api::networking::v1::{HTTPIngressPath, Ingress, IngressBackend, IngressClass};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// A port of a Service, as a backend names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PortRef {
    Number(i32),
    Name(Box<str>),
}

/// A port of a Service in the namespace of the Ingress.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendRef {
    pub service: ObjectKey,
    pub port: PortRef,
}

/// Where a matching request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Service(Arc<BackendRef>),
    /// A backend that is no Service.
    Unsupported,
}

/// A rule that is not followed, for the author of the Ingress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub ingress: ObjectKey,
    pub reason: &'static str,
    pub message: String,
}

/// The rules of one host.
#[derive(Debug, Default)]
struct HostRules {
    namespace: Box<str>,
    exact: HashMap<Box<str>, Target>,
    /// By the elements of the path, joined; the entry of type Prefix counts before one that is implementation specific.
    prefix: HashMap<Box<str>, PrefixRule>,
    /// Elements of the longest prefix: more of a request's path need not be compared.
    deepest: usize,
    default: Option<Target>,
}

#[derive(Debug, Clone)]
struct PrefixRule {
    target: Target,
    specific: bool,
}

/// The whole table.
#[derive(Debug, Default)]
pub struct Routes {
    /// By host; a wildcard by the name after `*.`; rules without a host by the empty name.
    exact: HashMap<Box<str>, HostRules>,
    wildcard: HashMap<Box<str>, HostRules>,
    any: HostRules,
    /// The Secret of each TLS host, written as in the Ingress; the empty name for connections that name none.
    pub certificates: HashMap<Box<str>, ObjectKey>,
    /// Every Service that a rule names.
    pub backends: BTreeSet<Arc<BackendRef>>,
}

impl Routes {
    /// Finds the target of a request: the rules of the most specific host, in them an exact path before the longest
    /// prefix before the default backend of the host, at last the default backend of all.
    pub fn find(&self, host: &str, path: &str) -> Option<&Target> {
        let path = normalized(path);
        let rules = self.rules_of(host);
        let own = rules.and_then(|rules| rules.find(&path));
        match rules {
            // A host without a default backend shares the one for everything.
            Some(_) => own.or(self.any.default.as_ref()),
            None => self.any.find(&path),
        }
    }

    fn rules_of(&self, host: &str) -> Option<&HostRules> {
        let exact = self.exact.get(host);
        exact.or_else(|| host.split_once('.').and_then(|(_, rest)| self.wildcard.get(rest)))
    }

    /// The host's Secret: its own, or that of a wildcard of the same namespace, or that for all hosts.
    pub fn certificate_of(&self, host: &str) -> Option<&ObjectKey> {
        let own = self.certificates.get(host);
        own.or_else(|| {
            let (_, rest) = host.split_once('.')?;
            let wildcard = self.certificates.get(format!("*.{rest}").as_str())?;
            let owner = self.exact.get(host).map(|rules| &*rules.namespace);
            owner.is_none_or(|owner| owner == &*wildcard.namespace).then_some(wildcard)
        })
        .or_else(|| if self.exact.contains_key(host) { None } else { self.certificates.get("") })
    }

    fn entry(&mut self, host: &str) -> &mut HostRules {
        match host.strip_prefix("*.") {
            _ if host.is_empty() => &mut self.any,
            Some(rest) => self.wildcard.entry(rest.into()).or_default(),
            None => self.exact.entry(host.into()).or_default(),
        }
    }
}

impl HostRules {
    fn find(&self, path: &str) -> Option<&Target> {
        if let Some(target) = self.exact.get(path) {
            return Some(target);
        }
        let mut known = String::new();
        let mut found = self.prefix.get("");
        for element in elements(path).take(self.deepest) {
            known.push('/');
            known.push_str(element);
            found = self.prefix.get(known.as_str()).or(found);
        }
        found.map(|rule| &rule.target).or(self.default.as_ref())
    }

    /// Adds a rule; false if an older Ingress has the same.
    fn add(&mut self, path: &HTTPIngressPath, target: Target) -> bool {
        let text = path.path.as_deref().unwrap_or("/");
        if path.path_type == "Exact" {
            return match self.exact.contains_key(text) {
                true => false,
                false => self.exact.insert(text.into(), target).is_none(),
            };
        }
        let specific = path.path_type != "Prefix";
        let parts: Vec<&str> = elements(text).collect();
        let key: Box<str> = parts.iter().flat_map(|part| ["/", part]).collect::<String>().into();
        match self.prefix.get(&key) {
            Some(there) if !there.specific || specific => return false,
            _ => {}
        }
        self.deepest = self.deepest.max(parts.len());
        self.prefix.insert(key, PrefixRule { target, specific });
        true
    }
}

/// Makes the table, and says which rules it does not follow.
pub fn build(ingresses: &[Arc<Ingress>], classes: &[Arc<IngressClass>]) -> (Routes, Vec<Finding>) {
    let mut build = Build::default();
    let mut ours: Vec<&Ingress> = Vec::new();
    for ingress in ingresses {
        match standing(ingress, classes) {
            Standing::Ours => ours.push(ingress),
            Standing::Foreign => {}
            Standing::WithParameters => build.refuse(
                ingress,
                "ClassParameters",
                "its IngressClass has parameters, and this controller takes none: remove spec.parameters of the class"
                    .into(),
            ),
        }
    }
    // The older counts; objects of one second by their names.
    ours.sort_by_cached_key(|ingress| {
        let created = ingress.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (created, ObjectKey::of(*ingress))
    });
    for ingress in ours {
        build.add(ingress);
    }
    (build.routes, build.findings)
}

#[derive(Default)]
struct Build {
    routes: Routes,
    findings: Vec<Finding>,
    /// The namespace of each host that was named so far.
    owners: HashMap<Box<str>, Box<str>>,
}

impl Build {
    fn refuse(&mut self, ingress: &Ingress, reason: &'static str, message: String) {
        self.findings.push(Finding { ingress: ObjectKey::of(ingress), reason, message });
    }

    fn add(&mut self, ingress: &Ingress) {
        let Some(spec) = &ingress.spec else { return };
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let mut hosts: BTreeSet<&str> = BTreeSet::new();
        for rule in spec.rules.iter().flatten() {
            let host = rule.host.as_deref().unwrap_or_default();
            if !self.claim(ingress, host, namespace) {
                continue;
            }
            hosts.insert(host);
            self.routes.entry(host).namespace = namespace.into();
            for path in rule.http.iter().flat_map(|http| &http.paths) {
                let target = self.target(ingress, &path.backend, namespace);
                if !self.routes.entry(host).add(path, target) {
                    let text = path.path.as_deref().unwrap_or("/");
                    let message =
                        format!("path {text} of host {} is routed by an older Ingress", shown(host));
                    self.refuse(ingress, "PathTaken", message);
                }
            }
        }
        if let Some(backend) = &spec.default_backend {
            let target = self.target(ingress, backend, namespace);
            for host in &hosts {
                self.routes.entry(host).default.get_or_insert_with(|| target.clone());
            }
            if self.claim(ingress, "", namespace) {
                self.routes.any.namespace = namespace.into();
                self.routes.any.default.get_or_insert(target);
            }
        }
        for tls in spec.tls.iter().flatten() {
            let Some(secret) = tls.secret_name.as_deref().filter(|name| !name.is_empty()) else { continue };
            let secret = ObjectKey::new(namespace, secret);
            let named = tls.hosts.as_deref().unwrap_or_default();
            // Without hosts, the certificate is for the hosts of the rules.
            let all = hosts.iter().copied().filter(|_| named.is_empty());
            for host in named.iter().map(String::as_str).chain(all).collect::<Vec<_>>() {
                if self.claim(ingress, host, namespace) {
                    self.routes.certificates.entry(host.into()).or_insert_with(|| secret.clone());
                }
            }
        }
    }

    /// Claims the host for the namespace. Returns true if the host belongs to the namespace now.
    fn claim(&mut self, ingress: &Ingress, host: &str, namespace: &str) -> bool {
        let around = host.split_once('.').map(|(_, rest)| format!("*.{rest}"));
        let around = around.filter(|_| !host.starts_with("*."));
        let owner = self.owners.get(host).or_else(|| self.owners.get(around?.as_str()));
        match owner {
            Some(owner) if &**owner != namespace => {
                let message =
                    format!("host {} belongs to namespace {owner}: an older Ingress names it", shown(host));
                let finding = Finding { ingress: ObjectKey::of(ingress), reason: "HostTaken", message };
                if !self.findings.contains(&finding) {
                    self.findings.push(finding);
                }
                false
            }
            _ => {
                self.owners.entry(host.into()).or_insert_with(|| namespace.into());
                true
            }
        }
    }

    fn target(&mut self, ingress: &Ingress, backend: &IngressBackend, namespace: &str) -> Target {
        let Some(service) = &backend.service else {
            let message = "a backend is no Service: requests for it are answered with 503".to_owned();
            self.refuse(ingress, "UnsupportedBackend", message);
            return Target::Unsupported;
        };
        let port = service.port.as_ref();
        let name = port.and_then(|port| port.name.as_deref()).filter(|name| !name.is_empty());
        let port = match name {
            Some(name) => PortRef::Name(name.into()),
            None => PortRef::Number(port.and_then(|port| port.number).unwrap_or_default()),
        };
        let service = ObjectKey::new(namespace, service.name.as_str());
        let reference = Arc::new(BackendRef { service, port });
        self.routes.backends.insert(Arc::clone(&reference));
        Target::Service(reference)
    }
}

fn shown(host: &str) -> &str {
    if host.is_empty() { "*" } else { host }
}

#[cfg(test)]
mod tests;
