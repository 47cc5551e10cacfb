//! `rbac.authorization.k8s.io`.

pub(super) mod bindings;
pub(super) mod roles;

/// The group of users, groups and roles.
const GROUP: &str = "rbac.authorization.k8s.io";
