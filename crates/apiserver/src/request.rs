//! Parses the target of a request from its method and path alone.

use crate::zpages::Page;
use http::Method;
use percent_encoding::percent_decode_str;
use std::borrow::Cow;

/// The target of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    Version,
    /// `/healthz`, `/livez`, `/readyz`, with the check asked for, if any.
    Health {
        endpoint: Health,
        check: Option<String>,
    },
    Metrics,
    /// `/metrics/slis`
    Slis,
    /// `/statusz`, `/flagz`
    Page(Page),
    /// `/debug/pprof/<profile>`; empty for the list of them.
    Profile(String),
    /// `/debug/steps`
    Steps,
    /// The path at which agents open tunnels.
    Tunnel,
    /// `/debug/api_priority_and_fairness/<dump>`
    FlowControl(String),
    /// `/api`
    CoreVersions,
    /// `/apis`
    Groups,
    /// `/apis/<group>`
    Group(String),
    /// `/api/v1`, `/apis/<group>/<version>`
    Resources {
        group: String,
        version: String,
    },
    OpenApiV2,
    OpenApiV3,
    /// `/openapi/v3/<path>`
    OpenApiV3Document(String),
    /// `/.well-known/openid-configuration`
    OpenIdConfiguration,
    /// `/openid/v1/jwks`
    JsonWebKeys,
    Resource(Target),
    /// `/api/v1/watch` with nothing behind it: upstream cannot resolve it, and fails.
    Incomplete,
    /// Nothing of ours.
    Unknown,
    /// `/`
    Root,
}

impl Route {
    /// Returns true if the path supports the method. As upstream: documents support only GET, everything
    /// behind a proxy is left to the far side, and objects of all namespaces can only be read.
    pub fn takes(&self, method: &Method, verb: Option<Verb>, is_namespaced: bool) -> bool {
        match self {
            Self::Version
            | Self::CoreVersions
            | Self::Resources { .. }
            | Self::OpenIdConfiguration
            | Self::JsonWebKeys
            | Self::Tunnel => method == Method::GET,
            Self::Resource(target) if target.subresource.as_deref() == Some("proxy") => true,
            Self::Resource(target) => {
                let (named, everywhere) =
                    (target.name.is_some(), target.namespace.is_none() && is_namespaced);
                method != Method::HEAD
                    && (!target.watch_prefix || method == Method::GET)
                    && match verb {
                        Some(Verb::Get | Verb::List | Verb::Watch) => true,
                        Some(Verb::Update | Verb::Patch | Verb::Delete) => named,
                        Some(Verb::Create | Verb::DeleteCollection) => !everywhere,
                        None => false,
                    }
            }
            _ => true,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Healthz,
    Livez,
    Readyz,
}

impl Health {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthz => "healthz",
            Self::Livez => "livez",
            Self::Readyz => "readyz",
        }
    }
}

/// A resource, an object of it or one of its subresources.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Target {
    pub group: String,
    pub version: String,
    pub namespace: Option<String>,
    pub resource: String,
    pub name: Option<String>,
    pub subresource: Option<String>,
    /// The path after the subresource (`proxy/…`).
    pub rest: String,
    /// The path began with the old `watch/` prefix.
    pub watch_prefix: bool,
}

impl Target {
    /// The namespace whose objects are meant; None for those of all. As upstream, an empty one is none.
    pub fn within(&self) -> Option<&str> {
        self.namespace.as_deref().filter(|namespace| !namespace.is_empty())
    }
}

/// Subresources of a namespace: `/namespaces/x/status` is not a resource called `status` in `x`.
const NAMESPACE_SUBRESOURCES: [&str; 2] = ["status", "finalize"];

pub(crate) fn route(path: &str) -> Route {
    let Some(segments) = segments(path) else { return Route::Unknown };
    let parts: Vec<&str> = segments.iter().map(|segment| &**segment).collect();
    // As upstream: documents are found by their exact path, unless their handler also serves resources.
    let exact = !path.ends_with('/')
        || matches!(
            parts.first(),
            None | Some(&("api" | "apis" | "version" | ".well-known" | "openid" | "debug"))
        );
    match parts.as_slice() {
        _ if !exact => Route::Unknown,
        // An empty group is nobody's, and `/apis//` is not the list of groups.
        ["apis", "", ..] => Route::Unknown,
        ["apis"] if path.ends_with("//") => Route::Unknown,
        [] => Route::Root,
        ["version"] => Route::Version,
        ["metrics"] => Route::Metrics,
        ["metrics", "slis"] => Route::Slis,
        ["statusz"] => Route::Page(Page::Statusz),
        ["flagz"] => Route::Page(Page::Flagz),
        ["debug", "api_priority_and_fairness", dump] => Route::FlowControl((*dump).to_owned()),
        ["debug", "steps"] => Route::Steps,
        // `tunnel::PATH`
        ["ferrite", "v1", "tunnel"] => Route::Tunnel,
        ["debug", "pprof"] => Route::Profile(String::new()),
        ["debug", "pprof", profile] => Route::Profile((*profile).to_owned()),
        ["healthz", check @ ..] => health(Health::Healthz, check),
        ["livez", check @ ..] => health(Health::Livez, check),
        ["readyz", check @ ..] => health(Health::Readyz, check),
        ["openapi", "v2"] => Route::OpenApiV2,
        ["openapi", "v3"] => Route::OpenApiV3,
        ["openapi", "v3", rest @ ..] => Route::OpenApiV3Document(rest.join("/")),
        [".well-known", "openid-configuration"] => Route::OpenIdConfiguration,
        ["openid", "v1", "jwks"] => Route::JsonWebKeys,
        ["index.html"] => Route::Root,
        ["api"] => Route::CoreVersions,
        ["apis"] => Route::Groups,
        ["apis", group] => Route::Group((*group).to_owned()),
        ["api", version] => Route::Resources { group: String::new(), version: (*version).to_owned() },
        ["apis", group, version] => {
            Route::Resources { group: (*group).to_owned(), version: (*version).to_owned() }
        }
        ["api", version, rest @ ..] => target("", version, rest),
        ["apis", group, version, rest @ ..] => target(group, version, rest),
        _ => Route::Unknown,
    }
}

fn health(endpoint: Health, check: &[&str]) -> Route {
    match check {
        [] => Route::Health { endpoint, check: None },
        [one] => Route::Health { endpoint, check: Some((*one).to_owned()) },
        many => Route::Health { endpoint, check: Some(many.join("/")) },
    }
}

fn target(group: &str, version: &str, rest: &[&str]) -> Route {
    let (watch_prefix, rest) = match rest {
        ["watch" | "proxy"] => return Route::Incomplete,
        ["watch", rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let mut target =
        Target { group: group.into(), version: version.into(), watch_prefix, ..Target::default() };
    let rest = match rest {
        ["namespaces", namespace, subresource] if NAMESPACE_SUBRESOURCES.contains(subresource) => {
            target.resource = "namespaces".into();
            target.name = Some((*namespace).to_owned());
            target.subresource = Some((*subresource).to_owned());
            return Route::Resource(target);
        }
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => {
            target.namespace = Some((*namespace).to_owned());
            rest
        }
        rest => rest,
    };
    if let [resource, rest @ ..] = rest {
        target.resource = (*resource).to_owned();
        if let [name, rest @ ..] = rest {
            target.name = Some((*name).to_owned());
            if let [subresource, rest @ ..] = rest {
                target.subresource = Some((*subresource).to_owned());
                target.rest = rest.join("/");
            }
        }
    }
    Route::Resource(target)
}

/// The path's segments, decoded; those that are empty (`//`) stay, but for the last ones. None when the path begins with
/// two slashes or a segment does not decode to text. As upstream, an encoded slash separates segments as any other.
fn segments(path: &str) -> Option<Vec<Cow<'_, str>>> {
    let path = path.strip_prefix('/').filter(|path| !path.starts_with('/'))?;
    if path.contains("%2F") || path.contains("%2f") {
        let decoded = percent_decode_str(path).decode_utf8().ok()?;
        let decoded = decoded.trim_end_matches('/');
        return Some(decoded.split('/').map(|segment| Cow::Owned(segment.to_owned())).collect());
    }
    let path = path.trim_end_matches('/');
    if path.is_empty() {
        return Some(Vec::new());
    }
    path.split('/')
        .map(|segment| match segment {
            plain if !plain.contains('%') => Some(plain.into()),
            encoded => percent_decode_str(encoded).decode_utf8().ok(),
        })
        .collect()
}

/// The verb of a request, in the words of authorization and discovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    DeleteCollection,
}

impl Verb {
    pub fn of(method: &Method, has_name: bool, watch: bool) -> Option<Self> {
        Some(match (method, has_name) {
            (&Method::GET | &Method::HEAD, _) if watch => Self::Watch,
            (&Method::GET | &Method::HEAD, true) => Self::Get,
            (&Method::GET | &Method::HEAD, false) => Self::List,
            (&Method::POST, _) => Self::Create,
            (&Method::PUT, _) => Self::Update,
            (&Method::PATCH, _) => Self::Patch,
            (&Method::DELETE, true) => Self::Delete,
            (&Method::DELETE, false) => Self::DeleteCollection,
            _ => return None,
        })
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
            Self::Create => "create",
            Self::Update => "update",
            Self::Patch => "patch",
            Self::Delete => "delete",
            Self::DeleteCollection => "deletecollection",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(path: &str) -> Target {
        match route(path) {
            Route::Resource(target) => target,
            other => panic!("{path}: {other:?}"),
        }
    }

    #[test]
    fn a_path_below_watch_is_only_read() {
        let route = route("/api/v1/watch/namespaces/x/pods");
        for (method, taken) in [(Method::GET, true), (Method::POST, false), (Method::DELETE, false)] {
            assert_eq!(route.takes(&method, Some(Verb::Watch), true), taken, "{method}");
        }
    }

    #[test]
    fn paths_name_resources_objects_and_subresources() {
        /// Path; namespace, resource, name and subresource it names.
        type Row =
            (&'static str, Option<&'static str>, &'static str, Option<&'static str>, Option<&'static str>);
        let rows: &[Row] = &[
            ("/api/v1/pods", None, "pods", None, None),
            ("/api/v1/namespaces", None, "namespaces", None, None),
            ("/api/v1/namespaces/x", None, "namespaces", Some("x"), None),
            ("/api/v1/namespaces/x/finalize", None, "namespaces", Some("x"), Some("finalize")),
            ("/api/v1/namespaces/x/status", None, "namespaces", Some("x"), Some("status")),
            ("/api/v1/namespaces/x/pods", Some("x"), "pods", None, None),
            ("/api/v1/namespaces/x/pods/web", Some("x"), "pods", Some("web"), None),
            ("/api/v1/namespaces/x/pods/web/log", Some("x"), "pods", Some("web"), Some("log")),
            (
                "/apis/apps/v1/namespaces/x/deployments/web/scale",
                Some("x"),
                "deployments",
                Some("web"),
                Some("scale"),
            ),
            ("/api/v1/nodes/a%20b", None, "nodes", Some("a b"), None),
            ("/api/v1//pods", None, "", Some("pods"), None),
            ("/api/v1/nodes///", None, "nodes", None, None),
            ("/api/v1/nodes//status", None, "nodes", Some(""), Some("status")),
            ("/api/v1/namespaces//pods", Some(""), "pods", None, None),
            ("/api/v1/namespaces//pods/web", Some(""), "pods", Some("web"), None),
        ];
        for (path, namespace, plural, name, subresource) in rows {
            let t = resource(path);
            assert_eq!(
                (t.namespace.as_deref(), &*t.resource, t.name.as_deref(), t.subresource.as_deref()),
                (*namespace, *plural, *name, *subresource),
                "{path}"
            );
        }
        assert!(resource("/api/v1/watch/pods").watch_prefix);
        assert_eq!(resource("/api/v1/namespaces/x/pods/web/proxy/a/b").rest, "a/b");
    }

    #[test]
    fn other_paths_are_documents_or_nothing() {
        assert_eq!(route("/"), Route::Root);
        assert_eq!(route("/api"), Route::CoreVersions);
        assert_eq!(route("/apis/"), Route::Groups);
        assert_eq!(route("/apis/apps"), Route::Group("apps".into()));
        assert_eq!(route("/apis/apps/v1"), Route::Resources { group: "apps".into(), version: "v1".into() });
        assert_eq!(route("/apisx"), Route::Unknown);
        assert_eq!(route("//api"), Route::Unknown);
        assert_eq!(route("//"), Route::Unknown);
        assert_eq!(route("/api//"), Route::CoreVersions);
        assert_eq!(route("/apis//"), Route::Unknown);
        assert_eq!(route("/apis/apps//"), Route::Group("apps".into()));
        assert_eq!(route("/version//"), Route::Version);
        for path in
            ["/healthz/", "/livez/ping/", "/metrics/", "/openapi/v2/", "/index.html/", "/apis//v1/pods"]
        {
            assert_eq!(route(path), Route::Unknown, "{path}");
        }
        assert_eq!(route("/api/v1/watch/"), Route::Incomplete);
        assert_eq!(route("/apis/apps/v1/proxy"), Route::Incomplete);
        assert_eq!(route("/api/v1/namespaces/%ff/pods"), Route::Unknown);
        assert_eq!(
            route("/readyz/ping"),
            Route::Health { endpoint: Health::Readyz, check: Some("ping".into()) }
        );
    }
}
