//! From a request that may be made to the handler of its route.

use crate::aggregation;
use crate::call::Call;
use crate::documents;
use crate::filters::Asked;
use crate::http::Response;
use crate::negotiate::{self, Format, Representation, Shape};
use crate::request::{self, Route, Target, Verb};
use crate::server::ApiServer;
use crate::tunnel;
use crate::verbs;
use ferrite_api::Status;
use ferrite_api::resource::{Connect, Resource};
use std::sync::Arc;

/// Answers a request that has passed the filters. An error comes with the representation the client accepts.
pub(crate) async fn handle(
    server: Arc<ApiServer>,
    asked: Asked,
    deadline: tokio::time::Instant,
) -> Result<Response, (Status, Representation)> {
    let for_errors = asked.for_errors();
    let services = server.aggregator.services();
    let document = match &asked.route {
        Route::OpenApiV3Document(path) => format!("/{path}"),
        _ => String::new(),
    };
    let path = if document.is_empty() { asked.parts.uri.path() } else { &document };
    if let Some(remote) = services.remote_of_path(path) {
        let remote = Arc::clone(remote);
        return aggregation::proxy::handle(&server, &remote, asked).await.map_err(|s| (s, for_errors));
    }
    if let Some(mounted) = services.mounted_of_path(asked.parts.uri.path()) {
        let mounted = Arc::clone(mounted);
        let answer = aggregation::mounted::handle(&server, &*mounted, asked).await;
        return answer.map_err(|status| (status, for_errors));
    }
    let accept = asked.accept().to_owned();
    let plain = |status: Status| (status, for_errors);
    let Asked { parts, body, route, query, verb, user, seat } = asked;
    let user = user.ok_or_else(|| plain(Status::unauthorized()))?;
    // The read of one object is answered at once; everything else lets the other requests of its connection start
    // first.
    if !matches!((&route, verb), (Route::Resource(_), Some(Verb::Get))) {
        tokio::task::yield_now().await;
    }
    let not_allowed = || (Status::not_allowed(), for_errors);
    let Route::Resource(target) = &route else {
        // A version that is not there is missed whatever is to be done with it.
        let is_known = match &route {
            Route::Resources { group, version } => {
                server.registry.table.rows().iter().any(|r| r.group == *group && r.version == *version)
            }
            _ => true,
        };
        if is_known && !route.takes(&parts.method, verb, false) {
            return Err(not_allowed());
        }
        if route == Route::Tunnel {
            return tunnel::accept(&server, parts, &user).map_err(plain);
        }
        let answer = documents::answer(&server, &route, &parts, &query, &accept).await;
        return answer.map_err(|s| (s, for_errors));
    };
    let table = server.registry.tables.current();
    let Some(resource) = table.find(&target.group, &target.version, &target.resource) else {
        // As upstream: a request for a group that nobody serves reaches no part of the server.
        let known = table.rows().iter().any(|row| row.group == target.group && row.custom.is_none());
        return if known {
            Err((Status::no_such_path(), for_errors))
        } else {
            Ok(documents::page_not_found())
        };
    };
    // A namespaced object needs its namespace, and a cluster-wide one has none.
    let wants_place = target.name.is_some() || target.namespace.is_some();
    // As upstream: the server of custom kinds looks at the verb, too.
    let makes_nowhere =
        resource.custom.is_some() && matches!(verb, Some(Verb::Create | Verb::DeleteCollection));
    if target.namespace.is_some() != resource.is_namespaced() && (wants_place || makes_nowhere) {
        if resource.custom.is_some() {
            return Ok(documents::page_not_found());
        }
        return Err((Status::no_such_path(), for_errors));
    }
    // A part that the kind does not have is missed whatever is to be done with it.
    if let Some(part) = &target.subresource
        && (resource.subresource(part).is_none() || (part != "proxy" && !target.rest.is_empty()))
    {
        if resource.custom.is_none() {
            return Err((Status::no_such_path(), for_errors));
        }
        let name = target.name.as_deref().unwrap_or_default();
        let missing = Status::not_found(&resource.group, &resource.plural, name);
        let deprecation = resource.custom.as_ref().and_then(|custom| custom.version().deprecation.clone());
        return match deprecation {
            // As upstream: also the use of a part that a deprecated version does not have is warned of.
            Some(warning) => Ok(verbs::refusal(&missing, for_errors, vec![warning])),
            None => Err((missing, for_errors)),
        };
    }
    let watchable = target.subresource.is_none() && resource.verbs.contains(&"watch");
    if (target.subresource.is_none() && !is_served(resource, target)) || (target.watch_prefix && !watchable) {
        return Err((Status::no_such_path(), for_errors));
    }
    if !route.takes(&parts.method, verb, resource.is_namespaced()) {
        return Err(not_allowed());
    }
    let Route::Resource(target) = route else { return Err(not_allowed()) };
    // A user who may do everything may also send OPTIONS to the far side of a proxy.
    let asks_options =
        parts.method == ::http::Method::OPTIONS && target.subresource.as_deref() == Some("proxy");
    let Some(verb) = verb.or(asks_options.then_some(Verb::Get)) else { return Err(not_allowed()) };
    check_segments(&target).map_err(plain)?;
    // Streams to a kubelet or a backend are in the far side's words.
    let connects = matches!(target.subresource.as_deref(), Some("exec" | "attach" | "portforward" | "proxy"));
    let representation = match connects {
        true => for_errors,
        false => {
            let part = target.subresource.as_deref();
            let lists = matches!(verb, Verb::List | Verb::Watch);
            if part == Some("log") {
                negotiate::check_log(&accept).map_err(plain)?;
            } else if verb != Verb::Patch || crate::patch::is_patch(&parts.headers) {
                negotiate::check_route(&accept, lists).map_err(plain)?;
            }
            let has_table = has_table(resource, part);
            let found = negotiate::accept(&accept, |format, shape| match shape {
                Shape::Table { .. } => has_table && format != Format::Protobuf,
                // Objects of custom kinds have no protobuf form, nor have their scales.
                Shape::AsIs => resource.custom.is_none() || format != Format::Protobuf,
                shape => shape != Shape::AggregatedDiscovery,
            });
            match (found, verb) {
                (Some(found), _) => found,
                // As upstream: a shape that does not exist is refused before the watch is looked at.
                (None, Verb::Watch) if negotiate::accept(&accept, |_, _| true).is_some() => {
                    return Err(plain(Status::not_acceptable(negotiate::WATCHED)));
                }
                (None, _) => return Err(plain(Status::not_acceptable(negotiate::ACCEPTED))),
            }
        }
    };
    let admission = crate::options::Warnings::new(parts.extensions.get().cloned());
    let call = Call {
        server: Arc::clone(&server),
        user,
        resource: Arc::clone(resource),
        target,
        verb,
        query,
        parts,
        body: std::sync::Mutex::new(Some(body)),
        representation,
        deadline,
        warnings: Vec::new(),
        admission,
        seat,
    };
    verbs::handle(call).await.map_err(|s| (s, for_errors))
}

/// Returns true if objects of a kind, or of one of its subresources, have a table form. Upstream's reviews
/// and other requests whose objects are not stored have no columns.
fn has_table(resource: &Resource, part: Option<&str>) -> bool {
    let asks = matches!(resource.hooks.connect, Some(Connect::Review | Connect::Binding));
    match part {
        Some("eviction" | "binding" | "token" | "log") => false,
        Some("approval" | "ephemeralcontainers" | "finalize" | "resize") => false,
        Some("status") => resource.strategy.status_has_table(),
        _ => !asks,
    }
}

/// Refuses names that no object can have because no path can name them.
fn check_segments(target: &request::Target) -> Result<(), Status> {
    let refuse = |what: &str, name: &str| {
        let why = match name {
            "." | ".." => format!("may not be '{name}'"),
            name if name.contains('/') => "may not contain '/'".to_owned(),
            name if name.contains('%') => "may not contain '%'".to_owned(),
            _ => return Ok(()),
        };
        Err(Status::bad_request(format!("{what} parameter invalid: {name:?}: {why}")))
    };
    match (target.namespace.as_deref(), target.name.as_deref()) {
        (_, Some("")) => return Err(Status::bad_request("name must be provided")),
        (Some(""), Some(_)) => return Err(Status::bad_request("Namespace parameter required.")),
        _ => {}
    }
    refuse("Namespace", target.namespace.as_deref().unwrap_or_default())?;
    refuse("Name", target.name.as_deref().unwrap_or_default())
}

/// Returns true if any verb is served at the path of a resource: at one object, at the objects of a
/// namespace, or at those of all namespaces.
fn is_served(resource: &Resource, target: &Target) -> bool {
    let verbs: &[&str] = match (&target.name, &target.namespace) {
        (Some(_), _) => &["get", "update", "patch", "delete", "watch"],
        (None, None) if resource.is_namespaced() => &["list", "watch"],
        (None, _) => &["list", "watch", "create", "deletecollection"],
    };
    resource.verbs.iter().any(|verb| verbs.contains(verb))
}
