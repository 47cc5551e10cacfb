//! The kind of a request, by which metrics and limits tell requests apart.

use crate::registry::ResourceMap;
use crate::request::{Route, Verb};
use ::http::Method;
use ferrite_api::resource::Resource;
use std::sync::Arc;

/// The scope of requests for one object, and of creates.
pub(super) const ONE: &str = "resource";
pub(super) const APPLY: &str = "application/apply-patch+yaml";

/// The labels of a request in metrics. Only served resources appear, which bounds the number of label
/// values.
#[derive(Debug, Clone)]
pub(crate) struct RequestKind {
    pub(super) resource: Option<Arc<Resource>>,
    pub(super) verb: &'static str,
    pub(super) subresource: &'static str,
    pub(super) scope: &'static str,
    pub(super) dry_run: bool,
    pub(super) mutating: bool,
    pub(super) long_running: bool,
}

/// Subresources that are a stream or a connection.
const STREAMS: [&str; 5] = ["attach", "exec", "log", "portforward", "proxy"];

impl RequestKind {
    pub fn of(
        method: &Method,
        route: &Route,
        verb: Option<Verb>,
        table: &ResourceMap,
        query: Option<&str>,
        content_type: Option<&[u8]>,
    ) -> Self {
        let reads = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
        let mut kind = Self {
            resource: None,
            verb: if reads { "GET" } else { "POST" },
            subresource: "",
            scope: "",
            dry_run: false,
            mutating: !reads,
            long_running: false,
        };
        if *route == Route::Tunnel {
            (kind.verb, kind.long_running) = ("CONNECT", true);
        }
        let Route::Resource(target) = route else { return kind };
        kind.resource = table.find(&target.group, &target.version, &target.resource).cloned();
        if let (Some(resource), Some(asked)) = (&kind.resource, &target.subresource) {
            kind.subresource = resource.subresources.iter().find(|s| s.name == asked).map_or("", |s| s.name);
        }
        let connects = STREAMS.contains(&kind.subresource);
        kind.long_running = connects || verb == Some(Verb::Watch);
        kind.dry_run = query.is_some_and(|q| q.contains("dryRun=All"));
        kind.verb = match verb {
            _ if connects => "CONNECT",
            Some(Verb::Get) => "GET",
            Some(Verb::List) => "LIST",
            Some(Verb::Watch) => "WATCH",
            Some(Verb::Create) => "POST",
            Some(Verb::Update) => "PUT",
            Some(Verb::Patch) if content_type == Some(APPLY.as_bytes()) => "APPLY",
            Some(Verb::Patch) => "PATCH",
            // As upstream: the scope tells the deletion of a collection from that of one object.
            Some(Verb::Delete | Verb::DeleteCollection) => "DELETE",
            None => "other",
        };
        kind.scope = match (&target.name, &target.namespace) {
            (Some(_), _) => ONE,
            _ if verb == Some(Verb::Create) => ONE,
            (None, Some(_)) => "namespace",
            (None, None) => "cluster",
        };
        kind
    }

    /// Streams have no deadline and are not counted among those in flight.
    pub fn is_long_running(&self) -> bool {
        self.long_running
    }

    /// Returns true if the request is about a served resource, and is no connection.
    pub fn is_of_resource(&self) -> bool {
        self.resource.is_some() && self.verb != "CONNECT"
    }

    pub fn is_watch(&self) -> bool {
        self.verb == "WATCH"
    }

    /// The resource that the request is about, if it is served.
    pub fn resource(&self) -> Option<&Resource> {
        self.resource.as_deref()
    }

    /// Writes have a limit of their own.
    pub fn is_mutating(&self) -> bool {
        self.mutating
    }

    /// The kind of a request for `path`.
    #[cfg(test)]
    pub fn sample(method: &str, path: &str, table: &ResourceMap) -> Self {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        let (path, query) = path.split_once('?').map_or((path, None), |(p, q)| (p, Some(q)));
        let route = crate::request::route(path);
        let named = matches!(&route, Route::Resource(t) if t.name.is_some());
        let verb = Verb::of(&method, named, query.is_some_and(|q| q.contains("watch=1")));
        Self::of(&method, &route, verb, table, query, None)
    }
}
