//! Acting as somebody else, for those who may.

use super::{Action, Rbac, User, decide, denied};
use crate::registry::View;
use ferrite_api::Status;
use http::HeaderMap;
use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;
use std::sync::Arc;

/// All headers that speak of it begin so.
const PREFIX: &str = "impersonate-";
const EXTRA: &str = "impersonate-extra-";

/// Whether a request may want to be made as somebody else.
pub(crate) fn impersonates(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| name.as_str().starts_with(PREFIX))
}

/// The user a request is made as: the one who asks, unless its headers name another.
pub(crate) fn impersonate(
    rbac: &Rbac,
    view: &View,
    user: Arc<User>,
    headers: &HeaderMap,
    wanted: &Action,
) -> Result<Arc<User>, Status> {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    let name = text("impersonate-user");
    let uid = text("impersonate-uid");
    let groups: Vec<String> = headers
        .get_all("impersonate-group")
        .iter()
        .filter_map(|v| v.to_str().ok())
        .map(str::to_owned)
        .collect();
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (header, value) in headers {
        if let (Some(key), Ok(value)) = (header.as_str().strip_prefix(EXTRA), value.to_str()) {
            let key = percent_decode_str(key).decode_utf8_lossy().to_lowercase();
            extra.entry(key).or_default().push(value.to_owned());
        }
    }
    if name.is_empty() {
        if groups.is_empty() && extra.is_empty() && uid.is_empty() {
            return Ok(user);
        }
        return Err(Status::bad_request(format!(
            "requested {} without impersonating a user name",
            go_user(&uid, &groups, &extra)
        )));
    }
    let account = name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    let identity = Identity { name: &name, account, uid: &uid, groups: &groups, extra: &extra };
    let may = |action: &Action| decide(rbac, view, &user, action).allowed;
    let narrow = identity.constrained(&user, wanted, &may);
    if let Err(refused) = &narrow
        && !identity.rights("impersonate", "").iter().all(may)
    {
        // As upstream: the refusal speaks of the narrower right that would have sufficed.
        return Err(refused.clone());
    }
    let given = !groups.is_empty();
    let mut acted = match (account, name.as_str()) {
        (_, "system:anonymous") if !given => User::anonymous(),
        // Who may be a node is one, with what nodes may do.
        (_, name) if !given && narrow.is_ok() && name.starts_with(NODE) => User::new(name, ["system:nodes"]),
        (Some((namespace, account)), _) if !given => User::service_account(namespace, account, ""),
        _ => User::new(name, groups),
    };
    acted.uid = uid;
    acted.extra = extra;
    Ok(Arc::new(acted))
}

/// Whom a request wants to be made as.
struct Identity<'a> {
    name: &'a str,
    /// Namespace and name, if it is a service account.
    account: Option<(&'a str, &'a str)>,
    uid: &'a str,
    groups: &'a [String],
    extra: &'a BTreeMap<String, Vec<String>>,
}

const AUTHENTICATION: &str = "authentication.k8s.io";
const NODE: &str = "system:node:";
/// Where a service account's token says on which node its pod runs.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

impl Identity<'_> {
    /// Every right that a verb needs. Users, groups and accounts are in `core` for the old verb, and beside the
    /// others for the new ones.
    fn rights(&self, verb: &str, core: &str) -> Vec<Action> {
        let right = |group: &str, resource: &str, subresource: &str, namespace: &str, name: &str| Action {
            verb: verb.into(),
            group: group.into(),
            resource: resource.into(),
            subresource: subresource.into(),
            namespace: namespace.into(),
            name: name.into(),
            ..Action::default()
        };
        let mut rights = vec![match self.account {
            Some((namespace, account)) => right(core, "serviceaccounts", "", namespace, account),
            None => right(core, "users", "", "", self.name),
        }];
        rights.extend(self.groups.iter().map(|group| right(core, "groups", "", "", group)));
        for (key, values) in self.extra {
            rights.extend(values.iter().map(|value| right(AUTHENTICATION, "userextras", key, "", value)));
        }
        if !self.uid.is_empty() {
            rights.push(right(AUTHENTICATION, "uids", "", "", self.uid));
        }
        rights
    }

    /// Constrained impersonation: a right to be somebody, and a right to do this as somebody. The last mode that could
    /// have served is the one refused.
    fn constrained(&self, user: &User, wanted: &Action, may: &dyn Fn(&Action) -> bool) -> Result<(), Status> {
        let mut refused = Ok(());
        for (mode, rights) in self.modes(user) {
            let on = Action { verb: format!("impersonate-on:{mode}:{}", wanted.verb), ..wanted.clone() };
            match std::iter::once(on).chain(rights).find(|right| !may(right)) {
                None => return Ok(()),
                Some(missing) => refused = Err(denied(user, &missing, "")),
            }
        }
        refused
    }

    /// The ways in which `user` may be this identity, each with the rights to be it.
    fn modes(&self, user: &User) -> Vec<(&'static str, Vec<Action>)> {
        let node = self.name.strip_prefix(NODE);
        let others = !self.groups.is_empty() || !self.extra.is_empty() || !self.uid.is_empty();
        let as_node = |mode: &'static str, name: &str| {
            let right = Action {
                verb: format!("impersonate:{mode}"),
                group: AUTHENTICATION.into(),
                resource: "nodes".into(),
                name: name.into(),
                ..Action::default()
            };
            (mode, vec![right])
        };
        if let Some(node) = node.filter(|_| !others) {
            let is_account = user.name.starts_with("system:serviceaccount:");
            let associated = is_account && user.extra.get(NODE_NAME).is_some_and(|names| *names == [node]);
            // As upstream: the right is asked for all nodes, since which one it is has been decided.
            let first = associated.then(|| as_node("associated-node", "*"));
            return first.into_iter().chain([as_node("arbitrary-node", node)]).collect();
        }
        let mode = if self.account.is_some() { "serviceaccount" } else { "user-info" };
        vec![(mode, self.rights(&format!("impersonate:{mode}"), AUTHENTICATION))]
    }
}

/// The user as Go prints it.
fn go_user(uid: &str, groups: &[String], extra: &BTreeMap<String, Vec<String>>) -> String {
    let list = |items: &[String]| {
        let quoted: Vec<String> = items.iter().map(|i| format!("{i:?}")).collect();
        format!("[]string{{{}}}", quoted.join(", "))
    };
    let groups = if groups.is_empty() { "[]string(nil)".into() } else { list(groups) };
    let extra = match extra.is_empty() {
        true => "map[string][]string(nil)".into(),
        false => {
            let pairs: Vec<String> = extra.iter().map(|(k, v)| format!("{k:?}:{}", list(v))).collect();
            format!("map[string][]string{{{}}}", pairs.join(", "))
        }
    };
    format!("&user.DefaultInfo{{Name:\"\", UID:{uid:?}, Groups:{groups}, Extra:{extra}}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_may_be_its_own_node() {
        let agent = |node: &str| {
            let mut user = User::service_account("kube-system", "agent", "");
            user.extra.insert(NODE_NAME.into(), vec![node.into()]);
            user
        };
        let wanted = Action { verb: "list".into(), resource: "pods".into(), ..Action::default() };
        let (groups, extra) = (Vec::new(), BTreeMap::new());
        let node =
            Identity { name: "system:node:n1", account: None, uid: "", groups: &groups, extra: &extra };
        let may = |action: &Action| {
            let is = action.verb == "impersonate:associated-node"
                && action.resource == "nodes"
                && action.name == "*";
            is || action.verb == "impersonate-on:associated-node:list"
        };
        assert!(node.constrained(&agent("n1"), &wanted, &may).is_ok());
        for other in [agent("n2"), User::new("somebody", ["g"])] {
            let refused = node.constrained(&other, &wanted, &may).expect_err("it is not theirs");
            assert!(refused.message.contains("impersonate-on:arbitrary-node:list"), "{}", refused.message);
        }
        let with_uid = Identity { uid: "u", ..node };
        assert!(
            with_uid
                .modes(&agent("n1"))
                .iter()
                .all(|(mode, rights)| *mode == "user-info" && rights.len() == 2)
        );
    }
}
