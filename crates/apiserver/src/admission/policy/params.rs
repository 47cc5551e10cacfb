//! The parameters of a policy.

use super::compiled::{Binding, Definition, ParamKind, ParamRef};
use crate::registry::View;
use ferrite_api::resource::Resource;
use ferrite_json::Value;
use std::sync::Arc;
use thiserror::Error;

/// Why a policy's parameters cannot be found, in upstream's words.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum ParamError {
    #[error("failed to find resource referenced by paramKind: '{0}'")]
    UnknownKind(String),
    #[error("cannot use namespaced paramRef in policy binding that matches cluster-scoped resources")]
    NoNamespace,
    #[error("paramRef.namespace must not be provided for a cluster-scoped `paramKind`")]
    Namespace,
    #[error("{0}")]
    Selector(String),
    #[error("one of name or selector must be provided")]
    Neither,
    #[error("failed to convert params: {0}")]
    Conversion(String),
    #[error("no params found for policy binding with `Deny` parameterNotFoundAction")]
    NotFound,
}

/// The resource of a policy's parameters; none of a policy without parameters.
pub(super) fn resource<'v>(
    view: &'v View,
    definition: &Definition,
) -> Result<Option<&'v Arc<Resource>>, ParamError> {
    let Some(ParamKind { group, version, kind }) = &definition.param_kind else { return Ok(None) };
    match view.of_kind(group, version, kind) {
        Some(resource) => Ok(Some(resource)),
        None => Err(ParamError::UnknownKind(format!("{group}/{version}, Kind={kind}"))),
    }
}

/// The parameters with which a policy is evaluated for a binding: once for each. No parameter at all counts as one that
/// is null.
pub(super) async fn collect(
    view: &View,
    resource: Option<&Arc<Resource>>,
    binding: &Binding,
    namespace: &str,
) -> Result<Vec<Option<Arc<Value>>>, ParamError> {
    let (Some(resource), Some(reference)) = (resource, &binding.params) else { return Ok(vec![None]) };
    let namespace = place(resource, reference, namespace)?;
    let found: Vec<Arc<Value>> = match (&reference.selector, reference.name.as_str()) {
        (_, name) if !name.is_empty() => {
            let found = view.converted_object(resource, namespace, name).await;
            found.map_err(|status| ParamError::Conversion(status.message))?.into_iter().collect()
        }
        (Some(selector), _) => {
            let selector = selector.as_ref().map_err(|error| ParamError::Selector(error.to_string()))?;
            let all = view.converted_objects(resource, namespace).await;
            let all = all.map_err(|status| ParamError::Conversion(status.message))?.into_iter();
            all.filter(|object| selector.matches_object(object)).collect()
        }
        (None, _) => return Err(ParamError::Neither),
    };
    if found.is_empty() && reference.denies_without {
        return Err(ParamError::NotFound);
    }
    Ok(found.into_iter().map(Some).collect())
}

/// The namespace of the parameters; empty for those that have none.
fn place<'a>(resource: &Resource, reference: &'a ParamRef, request: &'a str) -> Result<&'a str, ParamError> {
    match (resource.is_namespaced(), reference.namespace.as_str(), request) {
        (false, "", _) => Ok(""),
        (false, _, _) => Err(ParamError::Namespace),
        (true, "", "") => Err(ParamError::NoNamespace),
        (true, "", namespace) | (true, namespace, _) => Ok(namespace),
    }
}
