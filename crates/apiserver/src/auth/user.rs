//! The user of a request.

use std::collections::BTreeMap;

/// The user of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub groups: Vec<String>,
    /// Empty when the way of authentication knows none.
    pub uid: String,
    /// Further facts about them, for policies and audits.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Members may do everything, whatever the policy says.
const MASTERS: &str = "system:masters";
const AUTHENTICATED: &str = "system:authenticated";
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";

/// The user of a request without credentials.
const ANONYMOUS: &str = "system:anonymous";

impl User {
    /// An authenticated user: every such user is in `system:authenticated`.
    pub fn new(name: impl Into<String>, groups: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let mut groups: Vec<String> = groups.into_iter().map(Into::into).collect();
        if !groups.iter().any(|g| g == AUTHENTICATED) {
            groups.push(AUTHENTICATED.into());
        }
        Self { name: name.into(), groups, ..Self::default() }
    }

    /// The user of a request without credentials.
    pub(crate) fn anonymous() -> Self {
        Self { name: ANONYMOUS.into(), groups: vec!["system:unauthenticated".into()], ..Self::default() }
    }

    pub(crate) fn service_account(namespace: &str, name: &str, uid: &str) -> Self {
        let groups = ["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")];
        Self { uid: uid.into(), ..Self::new(format!("system:serviceaccount:{namespace}:{name}"), groups) }
    }

    pub(crate) fn with_credential(mut self, id: String) -> Self {
        self.extra.insert(CREDENTIAL_ID.into(), vec![id]);
        self
    }

    pub(crate) fn is_anonymous(&self) -> bool {
        self.name == ANONYMOUS
    }

    /// Returns true if they may do everything, whatever the policy says.
    pub(crate) fn is_master(&self) -> bool {
        self.is_in(MASTERS)
    }

    pub(crate) fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }
}
