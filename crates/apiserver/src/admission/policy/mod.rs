//! Admission policies: expressions that refuse or change requests, without a webhook.
//!
//! The way of a request: [`compiled`] policies that match it, their bindings that match it, the parameters of each
//! binding ([`params`]), and for each parameter one evaluation ([`evaluate`]) of the policy's expressions. [`validate`]
//! and [`mutate`] are the two stages; [`patch`] has the changes of mutations.
//!
//! Policies have no say in policies and bindings: one that refuses everything can still be removed.

mod compiled;
mod evaluate;
mod metrics;
mod mutate;
mod params;
mod patch;
mod validate;

pub(super) use mutate::MutatingPolicies;
pub(super) use validate::ValidatingPolicies;

use super::configured::{Configured, Current};
use super::{Attributes, Operation, authorizer, expressions};
use crate::auth::Answers;
use crate::registry::View;
use compiled::{Binding, Definition};
use evaluate::Inputs;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_cel::Value as Cel;
use ferrite_json::Value;
use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

const GROUP: &str = "admissionregistration.k8s.io";

/// The budget of an evaluation after which others get a turn on the thread.
const TURN: u64 = 300_000;

/// Reviews are never stored, and a policy that refuses them breaks the cluster.
const REVIEWS: &[(&str, &str)] = &[
    ("authentication.k8s.io", "selfsubjectreviews"),
    ("authentication.k8s.io", "tokenreviews"),
    ("authorization.k8s.io", "localsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectrulesreviews"),
    ("authorization.k8s.io", "subjectaccessreviews"),
];

/// Returns true if policies do not apply to a resource.
fn is_exempt(resource: &Resource) -> bool {
    let policies = resource.group == GROUP
        && matches!(
            &*resource.plural,
            "validatingadmissionpolicies"
                | "validatingadmissionpolicybindings"
                | "mutatingadmissionpolicies"
                | "mutatingadmissionpolicybindings"
        );
    policies || REVIEWS.contains(&(&*resource.group, &*resource.plural))
}

/// The stored policies of one kind with their bindings.
struct Policies {
    definitions: Configured<Definition>,
    bindings: Configured<Binding>,
}

impl Policies {
    fn new(policies: &'static str, bindings: &'static str) -> Self {
        Self {
            definitions: Configured::new(GROUP, policies, Box::new(Definition::new)),
            bindings: Configured::new(GROUP, bindings, Box::new(Binding::new)),
        }
    }

    fn concern(&self, view: &View, attributes: &Attributes<'_>) -> bool {
        !self.definitions.is_empty(view)
            && !is_exempt(attributes.resource)
            && self.definitions.current(view).iter().any(|definition| definition.may_match(attributes))
    }

    /// The policies that may match a request and have bindings, with these.
    fn candidates(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
    ) -> Vec<(Arc<Definition>, Vec<Arc<Binding>>)> {
        let definitions = self.definitions.current(view);
        let bindings: Current<Binding> = self.bindings.current(view);
        let candidates = definitions.iter().filter(|definition| definition.may_match(attributes));
        candidates
            .map(|definition| {
                let own = bindings.iter().filter(|binding| binding.policy == definition.name);
                (Arc::clone(definition), own.cloned().collect::<Vec<_>>())
            })
            .filter(|(_, bindings)| !bindings.is_empty())
            .collect()
    }
}

/// Values shared by the evaluations of one request. Each is made when it is first needed.
struct Session<'a> {
    view: &'a View,
    attributes: &'a Attributes<'a>,
    authorizer: OnceLock<(Cel<'static>, Cel<'static>)>,
    namespace: OnceLock<Option<Arc<Value>>>,
    /// The answers of authorization webhooks about `authorizer`.
    answers: Arc<Answers>,
}

impl<'a> Session<'a> {
    fn new(view: &'a View, attributes: &'a Attributes<'a>) -> Self {
        Self {
            view,
            attributes,
            authorizer: OnceLock::new(),
            namespace: OnceLock::new(),
            answers: Arc::default(),
        }
    }

    fn authorizer(&self) -> &(Cel<'static>, Cel<'static>) {
        self.authorizer.get_or_init(|| authorizer::authorizer(self.view, self.attributes, &self.answers))
    }

    /// The request's namespace; none of a request without one. As upstream, a Namespace is not in itself here.
    fn namespace(&self) -> Result<Option<&Value>, Status> {
        let resource = self.attributes.resource;
        let name = self.attributes.namespace;
        if name.is_empty() || resource.group.is_empty() && resource.kind == "Namespace" {
            return Ok(None);
        }
        let found = self.namespace.get_or_init(|| self.view.get("", "namespaces", "", name));
        match found {
            Some(namespace) => Ok(Some(namespace)),
            None => Err(Status::not_found("", "namespaces", name)),
        }
    }

    /// The stored object. A create has none, also where the server knows the object that it is about.
    async fn old(&self, matched: &Resource) -> Result<Option<Cow<'a, Value>>, Status> {
        match self.attributes.old.filter(|_| self.attributes.operation != Operation::Create) {
            Some(old) => self.as_matched(matched, old).await.map(Some),
            None => Ok(None),
        }
    }

    /// The value of `request`; null for a policy that does not read it.
    fn request(&self, definition: &Definition, matched: &Resource) -> Value {
        match definition.reads_request {
            true => Value::Object(expressions::request(self.attributes, matched)),
            false => Value::Null,
        }
    }

    /// Returns true if a policy matches another version than the request's. The body of a subresource is the same in
    /// all versions.
    fn converts(&self, matched: &Resource) -> bool {
        let own = self.attributes.resource;
        (&own.group, &own.version) != (&matched.group, &matched.version)
            && self.attributes.kind() == own.gvk()
    }

    /// An object of the request as the version that a policy matches.
    async fn as_matched<'o>(&self, matched: &Resource, object: &'o Value) -> Result<Cow<'o, Value>, Status> {
        if !self.converts(matched) {
            return Ok(Cow::Borrowed(object));
        }
        self.view.convert(self.attributes.resource, matched, object).await.map(Cow::Owned)
    }

    /// The values that the expressions of a policy read. Those that it does not read are not made.
    fn inputs<'i>(
        &'i self,
        definition: &Definition,
        object: Option<&'i Value>,
        old: Option<&'i Value>,
        params: Option<&'i Value>,
        request: &'i Value,
    ) -> Inputs<'i> {
        Inputs {
            object,
            old,
            params,
            request,
            namespace: None,
            authorizer: definition.reads_authorizer.then(|| self.authorizer()),
        }
    }
}

/// The error of an object that cannot be converted to the version that a policy matches.
fn unconverted(status: &Status) -> String {
    format!("failed to convert object version: {}", status.message)
}

/// Returns true if a binding matches the request.
fn binding_matches(
    binding: &Binding,
    view: &View,
    attributes: &Attributes<'_>,
    object: Option<&Value>,
) -> Result<bool, Status> {
    match &binding.matcher {
        None => Ok(true),
        Some(matcher) => matcher.resource(view, attributes, object).map(|found| found.is_some()),
    }
}

/// Operations whose object can be changed.
fn is_mutable(operation: Operation) -> bool {
    operation != Operation::Delete
}
