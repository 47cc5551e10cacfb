//! Groups that this process serves itself without storage, beside those of other servers.
//!
//! A mounted group has an APIService like every other one, made when the server starts. If an administrator
//! replaces it by one that names a Service, that server answers from then on, also after a restart.

use crate::encode;
use crate::filters::Asked;
use crate::http::Response;
use crate::negotiate::{self, Representation, Shape};
use crate::request::{Route, Verb};
use crate::server::ApiServer;
use ferrite_api::Status;
use ferrite_json::{Value, json};
use futures_util::future::BoxFuture;
use std::fmt::Debug;
use std::sync::Arc;

/// A resource of a mounted group, as discovery shows it.
#[derive(Debug, Clone, Copy)]
pub struct MountedResource {
    pub plural: &'static str,
    pub singular: &'static str,
    pub kind: &'static str,
    pub namespaced: bool,
}

/// An authorized read of a mounted group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedRequest {
    pub resource: String,
    /// None for all namespaces, and for resources that have none.
    pub namespace: Option<String>,
    /// None for a list.
    pub name: Option<String>,
    pub label_selector: String,
    pub field_selector: String,
}

/// One version of a group that this process serves: its resources can be read and listed.
pub trait MountedGroup: Debug + Send + Sync {
    fn group(&self) -> &'static str;
    fn version(&self) -> &'static str;
    fn resources(&self) -> &'static [MountedResource];
    /// ClusterRoles that the group needs, brought up to date at every start.
    fn roles(&self) -> Vec<Value> {
        Vec::new()
    }
    /// The object or the list that is asked for.
    fn answer<'a>(
        &'a self,
        server: &'a Arc<ApiServer>,
        request: MountedRequest,
    ) -> BoxFuture<'a, Result<Value, Status>>;
}

/// The verbs of every mounted resource.
const VERBS: [&str; 2] = ["get", "list"];

/// The resources in the form of aggregated discovery.
pub(crate) fn aggregated(group: &dyn MountedGroup) -> Vec<Value> {
    let one = |resource: &MountedResource| {
        json!({
            "resource": resource.plural,
            "responseKind": {"group": "", "version": "", "kind": resource.kind},
            "scope": if resource.namespaced { "Namespaced" } else { "Cluster" },
            "singularResource": resource.singular,
            "verbs": VERBS,
        })
    };
    group.resources().iter().map(one).collect()
}

/// The resources in the form of `/apis/<group>/<version>`.
fn listed(group: &dyn MountedGroup) -> Value {
    let one = |resource: &MountedResource| {
        json!({
            "name": resource.plural,
            "singularName": resource.singular,
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": VERBS,
        })
    };
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{}/{}", group.group(), group.version()),
        "resources": group.resources().iter().map(one).collect::<Vec<Value>>(),
    })
}

/// JSON or YAML: these kinds have no schema, which protobuf needs.
fn representation(accept: &str) -> Result<Representation, Status> {
    let known: Vec<&str> = accept.split(',').filter(|clause| !clause.contains("protobuf")).collect();
    let unacceptable = || Status::not_acceptable("application/json, application/yaml");
    if known.is_empty() {
        return Err(unacceptable());
    }
    negotiate::accept(&known.join(","), |_, shape| shape == Shape::AsIs).ok_or_else(unacceptable)
}

/// Answers a request for a mounted group.
pub(crate) async fn handle(
    server: &Arc<ApiServer>,
    group: &dyn MountedGroup,
    asked: Asked,
) -> Result<Response, Status> {
    asked.user.as_ref().ok_or_else(Status::unauthorized)?;
    let representation = representation(asked.accept())?;
    let target = match asked.route {
        Route::Resources { .. } => return encode::value(200, &listed(group), representation),
        Route::Resource(target) => target,
        _ => return Err(Status::no_such_path()),
    };
    let resource = group.resources().iter().find(|resource| resource.plural == target.resource);
    let resource = resource.ok_or_else(Status::no_such_path)?;
    // One object of a namespaced resource has its namespace in the path; a cluster-wide resource never has one.
    let misplaced = match resource.namespaced {
        true => target.name.is_some() && target.namespace.is_none(),
        false => target.namespace.is_some(),
    };
    if misplaced || target.subresource.is_some() {
        return Err(Status::no_such_path());
    }
    if !matches!(asked.verb, Some(Verb::Get | Verb::List)) {
        return Err(Status::not_allowed());
    }
    let parameter = |name: &str| asked.query.get(name).unwrap_or_default().to_owned();
    let request = MountedRequest {
        resource: target.resource,
        namespace: target.namespace,
        name: target.name,
        label_selector: parameter("labelSelector"),
        field_selector: parameter("fieldSelector"),
    };
    let answer = group.answer(server, request).await?;
    encode::value(200, &answer, representation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::negotiate::Format;

    #[test]
    fn clients_of_protobuf_get_json_if_they_take_it() {
        for (accept, format) in [
            ("", Some(Format::Json)),
            ("application/json", Some(Format::Json)),
            ("application/yaml", Some(Format::Yaml)),
            ("application/vnd.kubernetes.protobuf,application/json", Some(Format::Json)),
            ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", Some(Format::Json)),
            ("application/vnd.kubernetes.protobuf", None),
            ("text/html", None),
        ] {
            assert_eq!(representation(accept).ok().map(|found| found.format), format, "{accept}");
        }
    }
}
