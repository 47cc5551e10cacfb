//! Subresources: one module each, one row each in [`TABLE`].

pub(crate) mod binding;
mod connect;
pub(crate) mod dial;
mod eviction;
mod finalize;
pub(crate) mod forwarding;
mod kubelet;
mod proxy;
pub(crate) mod scale;
pub(crate) mod token;

pub(crate) use kubelet::read as read_kubelet;
pub(crate) use proxy::{endpoints_of, rewrite_page, slices_of};

use crate::call::Call;
use crate::http::Response;
use crate::request::Verb;
use crate::{encode, patch, verbs};
use ferrite_api::Status;
use std::pin::Pin;

type Handler =
    for<'a> fn(&'a mut Call) -> Pin<Box<dyn Future<Output = Result<Response, Status>> + Send + 'a>>;

const TABLE: &[(&str, Handler)] = &[
    ("status", |call| Box::pin(part(call, "status"))),
    ("approval", |call| Box::pin(part(call, "approval"))),
    ("resize", |call| Box::pin(part(call, "resize"))),
    ("scale", |call| Box::pin(scale::handle(call))),
    ("binding", |call| Box::pin(binding::handle(call))),
    ("eviction", |call| Box::pin(eviction::handle(call))),
    ("ephemeralcontainers", |call| Box::pin(part(call, "ephemeralcontainers"))),
    ("finalize", |call| Box::pin(finalize::handle(call))),
    ("token", |call| Box::pin(token::handle(call))),
    ("log", |call| Box::pin(kubelet::log(call))),
    ("exec", |call| Box::pin(kubelet::exec(call))),
    ("attach", |call| Box::pin(kubelet::attach(call))),
    ("portforward", |call| Box::pin(kubelet::port_forward(call))),
    ("proxy", |call| Box::pin(proxy::handle(call))),
];

pub(crate) async fn handle(call: &mut Call, name: &str) -> Result<Response, Status> {
    let Some(sub) = call.resource.subresource(name) else { return Err(Status::no_such_path()) };
    let Some((_, handler)) = TABLE.iter().find(|(row, _)| *row == name) else {
        return Err(Status::no_such_path());
    };
    if !sub.verbs.contains(&call.verb.as_str()) {
        if call.resource.custom.is_some() {
            return Err(not_supported(call));
        }
        return Err(Status::not_allowed());
    }
    connect::admit(call, name).await?;
    handler(call).await
}

/// The refusal of a verb that a part of a custom object does not have.
fn not_supported(call: &Call) -> Status {
    let (group, plural) = (&call.resource.group, &call.resource.plural);
    let message =
        format!("{} is not supported on resources of kind \"{plural}.{group}\"", call.verb.as_str());
    let mut status = Status::new(405, "MethodNotAllowed", message);
    let details = [("group", (**group).into()), ("kind", (**plural).into())];
    status.details = Some(Box::new(details.into_iter().collect()));
    status
}

/// A part of the object that is written by itself: the body is the whole object, of which only the part counts.
async fn part(call: &mut Call, name: &str) -> Result<Response, Status> {
    match call.verb {
        Verb::Get => {
            let entry = call.server.registry.load(&call.resource, call.namespace(), call.name()).await?;
            encode::entry(&call.resource, &entry, call.representation, call.include_object()?)
        }
        Verb::Update => verbs::update(call, Some(name)).await,
        Verb::Patch => patch::handle(call, Some(name)).await,
        _ => Err(Status::not_allowed()),
    }
}
