//! Who asks, and whether they may.

use crate::request::{Route, Target, Verb};
use ferrite_api::Status;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Who a request comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub groups: Vec<String>,
}

const AUTHENTICATED: &str = "system:authenticated";
/// Members may do everything, whatever the policy says.
const MASTERS: &str = "system:masters";

impl User {
    /// A user known to be who they say: everybody authenticated is in `system:authenticated`.
    pub fn new(name: impl Into<String>, groups: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let mut groups: Vec<String> = groups.into_iter().map(Into::into).collect();
        if !groups.iter().any(|g| g == AUTHENTICATED) {
            groups.push(AUTHENTICATED.into());
        }
        Self { name: name.into(), groups }
    }

    /// The user a client certificate speaks for: name from the common name, groups from the organisations.
    /// The handshake has verified the chain.
    pub(crate) fn from_certificate(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let subject = certificate.subject();
        let name = subject.iter_common_name().find_map(|n| n.as_str().ok())?;
        if name.is_empty() {
            return None;
        }
        Some(Self::new(name, subject.iter_organization().filter_map(|o| o.as_str().ok())))
    }

    fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }
}

/// Paths that any authenticated user may read: discovery, version, health.
fn is_public(route: &Route) -> bool {
    matches!(
        route,
        Route::Version
            | Route::Root
            | Route::Health { .. }
            | Route::CoreVersions
            | Route::Groups
            | Route::Group(_)
            | Route::Resources { .. }
            | Route::OpenApiV2
            | Route::OpenApiV3
            | Route::OpenApiV3Document(_)
            | Route::NoSuchResource
    )
}

/// The cluster's own components. Each runs with the identity upstream gives it.
const COMPONENTS: [&str; 2] = ["system:kube-controller-manager", "system:kube-scheduler"];

/// Whether `user` may do this. Members of `system:masters`, the cluster's components and its nodes may use
/// the API; anybody else authenticated may read discovery alone.
pub(crate) fn authorize(user: &User, route: &Route, verb: Option<Verb>) -> Result<(), Status> {
    let trusted =
        user.is_in(MASTERS) || user.is_in("system:nodes") || COMPONENTS.contains(&user.name.as_str());
    if trusted || is_public(route) {
        return Ok(());
    }
    let verb = verb.map_or("get", Verb::as_str);
    Err(match route {
        Route::Resource(target) => denied(user, target, verb),
        _ => Status::new(403, "Forbidden", format!("forbidden: User {:?} cannot {verb} path", user.name)),
    })
}

fn denied(user: &User, target: &Target, verb: &str) -> Status {
    let resource = match &target.subresource {
        Some(subresource) => format!("{}/{subresource}", target.resource),
        None => target.resource.clone(),
    };
    let scope = match &target.namespace {
        Some(namespace) => format!("in the namespace {namespace:?}"),
        None => "at the cluster scope".into(),
    };
    Status::forbidden(
        &target.group,
        &target.resource,
        target.name.as_deref().unwrap_or_default(),
        &format!(
            "User {:?} cannot {verb} resource {resource:?} in API group {:?} {scope}",
            user.name, target.group
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::route;

    #[test]
    fn masters_and_components_may_and_others_may_not() {
        let pods = route("/api/v1/namespaces/x/pods/web");
        let rows = [
            (User::new("admin", [MASTERS]), true),
            (User::new("system:kube-scheduler", Vec::<String>::new()), true),
            (User::new("system:node:a", ["system:nodes"]), true),
            (User::new("mallory", ["developers"]), false),
        ];
        for (user, allowed) in rows {
            assert_eq!(authorize(&user, &pods, Some(Verb::Get)).is_ok(), allowed, "{}", user.name);
            assert!(authorize(&user, &Route::Version, None).is_ok());
        }
    }

    #[test]
    fn a_refusal_names_user_verb_and_resource() {
        let user = User::new("mallory", ["developers"]);
        let refused = authorize(&user, &route("/api/v1/namespaces/x/pods/web/log"), Some(Verb::Get));
        assert_eq!(
            refused.unwrap_err().message,
            r#"pods "web" is forbidden: User "mallory" cannot get resource "pods/log" in API group "" in the namespace "x""#
        );
    }
}
