//! Impersonation, for users who may.
//!
//! Constrained impersonation comes first: a right to be somebody (`impersonate:<mode>`) and a right to do this as
//! somebody (`impersonate-on:<mode>:<verb>`). The old verb `impersonate`, which has fewer limits, comes last.

mod headers;

use super::{Action, Rbac, User, decide, denied, settled};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::meta_validation::{dns1123_label, dns1123_subdomain};
use ferrite_component::metrics::{Counter, Family, Histogram, registry};
use headers::Wanted;
use http::HeaderMap;
use std::cell::Cell;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

pub(crate) use headers::{forget, impersonates};

const AUTHENTICATION: &str = "authentication.k8s.io";
const ANONYMOUS: &str = "system:anonymous";
const UNAUTHENTICATED: &str = "system:unauthenticated";
/// Where a service account's token says on which node its pod runs.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
/// From this many on, a right to all of them is asked for before each of them.
const MANY: usize = 4;

/// The mode of the old verb.
const LEGACY: &str = "legacy";

struct Attempts {
    total: Arc<Family<Counter>>,
    duration: Arc<Family<Histogram>>,
    authorizations: Arc<Family<Counter>>,
}

static ATTEMPTS: LazyLock<Attempts> = LazyLock::new(|| {
    const SECONDS: &[f64] =
        &[0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024];
    let labels = &["decision", "mode"];
    Attempts {
        total: registry().counter(
            "apiserver_impersonation_attempts_total",
            "Requests as somebody else, by the decision and the mode that it was made by.",
            labels,
        ),
        duration: registry().histogram(
            "apiserver_impersonation_attempts_duration_seconds",
            "How long the decision about a request as somebody else took.",
            labels,
            SECONDS,
        ),
        authorizations: registry().counter(
            "apiserver_impersonation_authorization_attempts_total",
            "Rights that were asked for to decide about requests as somebody else.",
            labels,
        ),
    }
});

/// The effective user of a request: the authenticated one, unless its headers name another. With the mode
/// of constrained impersonation that allows it.
pub(crate) async fn impersonate(
    rbac: &Rbac,
    view: &View,
    user: Arc<User>,
    headers: &HeaderMap,
    action: &Action,
) -> Result<(Arc<User>, Option<&'static str>), Status> {
    let Some(wanted) = Wanted::parse(headers)? else { return Ok((user, None)) };
    let started = Instant::now();
    let (became, asked) = settled(rbac, || {
        let asked = Cell::new(0);
        let may = |action: &Action| {
            asked.set(asked.get() + 1);
            decide(rbac, view, &user, action).allowed
        };
        (wanted.become_by(&user, action, &may), asked.get())
    })
    .await;
    let (decision, mode) = match &became {
        Ok((_, mode)) => ("allowed", mode.map_or(LEGACY, Mode::name)),
        Err(_) => ("denied", LEGACY),
    };
    ATTEMPTS.total.with(&[decision, mode]).increment();
    ATTEMPTS.duration.with(&[decision, mode]).observe(started.elapsed());
    ATTEMPTS.authorizations.with(&[decision, mode]).add(asked);
    became.map(|(user, mode)| (Arc::new(user), mode.map(Mode::name)))
}

/// Modes of constrained impersonation, in the order in which they are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    AssociatedNode,
    ArbitraryNode,
    ServiceAccount,
    UserInfo,
}

impl Mode {
    const ALL: [Self; 4] = [Self::AssociatedNode, Self::ArbitraryNode, Self::ServiceAccount, Self::UserInfo];

    fn name(self) -> &'static str {
        match self {
            Self::AssociatedNode => "associated-node",
            Self::ArbitraryNode => "arbitrary-node",
            Self::ServiceAccount => "serviceaccount",
            Self::UserInfo => "user-info",
        }
    }

    /// Returns true if the mode applies to the wanted user. Nodes and service accounts are given by name
    /// alone: the server knows the rest.
    fn serves(self, wanted: &Wanted, user: &User) -> bool {
        match self {
            Self::AssociatedNode => {
                let here = user.extra.get(NODE_NAME).map(Vec::as_slice).unwrap_or_default();
                wanted.is_name_only()
                    && service_account(&user.name).is_some()
                    && node(&wanted.name).is_some_and(|node| here == [node])
            }
            Self::ArbitraryNode => wanted.is_name_only() && node(&wanted.name).is_some(),
            Self::ServiceAccount => wanted.is_name_only() && service_account(&wanted.name).is_some(),
            Self::UserInfo => node(&wanted.name).is_none() && service_account(&wanted.name).is_none(),
        }
    }
}

/// The name of the node that a user is.
fn node(user: &str) -> Option<&str> {
    user.strip_prefix("system:node:").filter(|name| dns1123_subdomain(name).is_empty())
}

/// Namespace and name of the service account that a user is.
fn service_account(user: &str) -> Option<(&str, &str)> {
    let (namespace, name) = user.strip_prefix("system:serviceaccount:")?.split_once(':')?;
    (dns1123_label(namespace).is_empty() && dns1123_subdomain(name).is_empty()).then_some((namespace, name))
}

type May<'a> = &'a dyn Fn(&Action) -> bool;

impl Wanted {
    /// The user that `user` becomes for an action, and the mode that allows it; none if the old verb allows
    /// it. As upstream, the refusal is that of the first mode that could have served.
    fn become_by(&self, user: &User, action: &Action, may: May<'_>) -> Result<(User, Option<Mode>), Status> {
        let mut refused = None;
        for mode in Mode::ALL.into_iter().filter(|mode| mode.serves(self, user)) {
            match self.constrained(mode, user, action, may) {
                Ok(()) => return Ok((self.user(true), Some(mode))),
                Err(status) => refused = refused.or(Some(status)),
            }
        }
        self.check(user, "impersonate", None, may).map_err(|status| refused.unwrap_or(status))?;
        Ok((self.user(false), None))
    }

    fn constrained(&self, mode: Mode, user: &User, action: &Action, may: May<'_>) -> Result<(), Status> {
        let on = Action { verb: format!("impersonate-on:{}:{}", mode.name(), action.verb), ..action.clone() };
        require(user, &on, may)?;
        self.check(user, &format!("impersonate:{}", mode.name()), Some(mode), may)
    }

    /// Every right that a verb needs: to the name, the UID, each group and each value of extra. Without a mode it is the
    /// old verb, which asks for names and groups in the core group and has no limits of its own.
    fn check(&self, user: &User, verb: &str, mode: Option<Mode>, may: May<'_>) -> Result<(), Status> {
        let right = |group: &str, resource: &str, name: &str| Action {
            verb: verb.into(),
            group: group.into(),
            version: "v1".into(),
            resource: resource.into(),
            name: name.into(),
            ..Action::default()
        };
        let core = if mode.is_some() { AUTHENTICATION } else { "" };
        require(user, &self.right_to_name(core, mode, &right), may)?;
        if !self.uid.is_empty() {
            require(user, &right(AUTHENTICATION, "uids", &self.uid), may)?;
        }
        let constrained = mode.is_some();
        if constrained {
            self.check_groups(user, &right)?;
            self.check_extra(user, &right)?;
        }
        let all_groups = || may(&right(core, "groups", "*"));
        if !(constrained && self.groups.len() >= MANY && all_groups()) {
            for group in &self.groups {
                require(user, &right(core, "groups", group), may)?;
            }
        }
        let extra = |key: &str, value: &str| Action {
            subresource: key.into(),
            ..right(AUTHENTICATION, "userextras", value)
        };
        let values: usize = self.extra.values().map(Vec::len).sum();
        let many = self.extra.len() >= MANY || values >= MANY;
        if !(constrained && many && may(&extra("*", "*"))) {
            for (key, values) in &self.extra {
                for value in values {
                    require(user, &extra(key, value), may)?;
                }
            }
        }
        Ok(())
    }

    fn right_to_name(
        &self,
        core: &str,
        mode: Option<Mode>,
        right: &dyn Fn(&str, &str, &str) -> Action,
    ) -> Action {
        match (mode, node(&self.name), service_account(&self.name)) {
            // As upstream: the right is asked for all nodes, since which one it is has been decided.
            (Some(Mode::AssociatedNode), ..) => right(core, "nodes", "*"),
            (Some(_), Some(node), _) => right(core, "nodes", node),
            (_, _, Some((namespace, name))) => {
                Action { namespace: namespace.into(), ..right(core, "serviceaccounts", name) }
            }
            _ => right(core, "users", &self.name),
        }
    }

    /// Groups that no constrained mode gives away.
    fn check_groups(&self, user: &User, right: &dyn Fn(&str, &str, &str) -> Action) -> Result<(), Status> {
        const MASTERS: &str = "system:masters";
        for (group, why) in [
            ("", "impersonating the empty string group is not allowed"),
            (MASTERS, "impersonating the system:masters group is not allowed"),
        ] {
            if self.groups.iter().any(|g| g == group) {
                return Err(denied(user, &right(AUTHENTICATION, "groups", group), why));
            }
        }
        Ok(())
    }

    fn check_extra(&self, user: &User, right: &dyn Fn(&str, &str, &str) -> Action) -> Result<(), Status> {
        let problem = self.extra.iter().find_map(|(key, values)| extra_problem(key, values));
        problem.map_or(Ok(()), |why| Err(denied(user, &right(AUTHENTICATION, "userextras", ""), &why)))
    }

    /// The user that the request goes on as.
    fn user(&self, constrained: bool) -> User {
        let mut groups = self.groups.clone();
        if groups.is_empty() {
            if constrained && node(&self.name).is_some() {
                groups.push("system:nodes".into());
            } else if let Some((namespace, _)) = service_account(&self.name) {
                groups
                    .extend(["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")]);
            }
        }
        let mut add = |group: &str| {
            if !groups.iter().any(|g| g == group) {
                groups.push(group.into());
            }
        };
        if self.name == ANONYMOUS {
            add(UNAUTHENTICATED);
        } else if !self.groups.iter().any(|g| g == UNAUTHENTICATED) {
            add("system:authenticated");
        }
        User { name: self.name.clone(), groups, uid: self.uid.clone(), extra: self.extra.clone() }
    }
}

fn require(user: &User, right: &Action, may: May<'_>) -> Result<(), Status> {
    if may(right) { Ok(()) } else { Err(denied(user, right, "")) }
}

/// Reason why a constrained mode does not take a key of extra and its values.
fn extra_problem(key: &str, values: &[String]) -> Option<String> {
    if key.is_empty() {
        return Some("impersonating the empty string key in extra is not allowed".into());
    }
    if let Some(why) = path_problem(key) {
        return Some(format!("impersonating an invalid key in extra is not allowed: {why}"));
    }
    if key.chars().any(char::is_uppercase) {
        return Some(format!("impersonating a non-lowercase key in extra is not allowed: {key:?}"));
    }
    if values.is_empty() {
        return Some("impersonating empty values in extra is not allowed".into());
    }
    values
        .iter()
        .any(String::is_empty)
        .then(|| "impersonating the empty string value in extra is not allowed".into())
}

/// Reason why a text is no path with a domain before it.
fn path_problem(text: &str) -> Option<String> {
    const FIELD: &str = "extra.key: Invalid value";
    let parts = text.split_once('/').filter(|(host, path)| !host.is_empty() && !path.is_empty());
    let Some((host, path)) = parts else {
        return Some(format!("{FIELD}: {text:?}: must be a domain-prefixed path (such as \"acme.io/foo\")"));
    };
    if let Some(why) = dns1123_subdomain(host).first() {
        return Some(format!("{FIELD}: {host:?}: {why}"));
    }
    let in_path = |c: char| c.is_ascii_alphanumeric() || "/-._~%!$&'()*+,;=:".contains(c);
    (!path.chars().all(in_path)).then(|| {
        format!(
            "{FIELD}: {path:?}: Invalid path (regex used for validation is '[A-Za-z0-9/\\-._~%!$&'()*+,;=:]+')"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn agent(node: &str) -> User {
        let mut user = User::service_account("kube-system", "agent", "");
        user.extra.insert(NODE_NAME.into(), vec![node.into()]);
        user
    }

    fn wanted(name: &str) -> Wanted {
        Wanted { name: name.into(), ..Wanted::default() }
    }

    fn list_pods() -> Action {
        Action { verb: "list".into(), resource: "pods".into(), ..Action::default() }
    }

    #[test]
    fn an_agent_may_be_its_own_node() {
        let may = |action: &Action| {
            let is = action.verb == "impersonate:associated-node"
                && action.resource == "nodes"
                && action.name == "*";
            is || action.verb == "impersonate-on:associated-node:list"
        };
        let (node, mode) =
            wanted("system:node:n1").become_by(&agent("n1"), &list_pods(), &may).expect("its own");
        assert_eq!(mode, Some(Mode::AssociatedNode));
        assert_eq!(node.groups, ["system:nodes", "system:authenticated"]);
        for other in [agent("n2"), User::new("somebody", ["g"])] {
            let refused = wanted("system:node:n1").become_by(&other, &list_pods(), &may);
            let refused = refused.expect_err("it is not theirs");
            assert!(refused.message.contains("impersonate-on:arbitrary-node:list"), "{}", refused.message);
        }
    }

    #[test]
    fn each_mode_serves_its_own() {
        let uid = |w: Wanted| Wanted { uid: "u".into(), ..w };
        let group = |w: Wanted| Wanted { groups: vec!["g".into()], ..w };
        let extra = |w: Wanted| Wanted { extra: BTreeMap::from([("a.b/c".into(), vec!["x".into()])]), ..w };
        let (node, account) = (|| wanted("system:node:n1"), || wanted("system:serviceaccount:ns:a"));
        let plain = || wanted("jane");
        for (wanted, modes) in [
            (node(), vec![Mode::AssociatedNode, Mode::ArbitraryNode]),
            (uid(node()), vec![]),
            (group(node()), vec![]),
            (extra(node()), vec![]),
            (account(), vec![Mode::ServiceAccount]),
            (group(account()), vec![]),
            (uid(account()), vec![]),
            (plain(), vec![Mode::UserInfo]),
            (uid(group(extra(plain()))), vec![Mode::UserInfo]),
            // These are no names of nodes and accounts, so they are names of users.
            (wanted("system:node:No"), vec![Mode::UserInfo]),
            (wanted("system:serviceaccount:a:b:c"), vec![Mode::UserInfo]),
        ] {
            let served: Vec<Mode> =
                Mode::ALL.into_iter().filter(|mode| mode.serves(&wanted, &agent("n1"))).collect();
            assert_eq!(served, modes, "{wanted:?}");
        }
    }

    #[test]
    fn constrained_modes_do_not_give_everything_away() {
        // Every right but the old one.
        let may = |action: &Action| action.verb.starts_with("impersonate:") || action.verb.contains("-on:");
        let jane = |groups: &[&str], extra: &[(&str, &str)]| Wanted {
            name: "jane".into(),
            groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            extra: extra.iter().map(|(k, v)| ((*k).to_owned(), vec![(*v).to_owned()])).collect(),
            ..Wanted::default()
        };
        let user = User::new("proxy", ["g"]);
        for (wanted, allowed) in [
            (jane(&["developers"], &[]), true),
            (jane(&["system:masters"], &[]), false),
            (jane(&["a", "b", "c", "d", "system:masters"], &[]), false),
            (jane(&[""], &[]), false),
            (jane(&[], &[("acme.io/team", "x")]), true),
            (jane(&[], &[("team", "x")]), false),
            (jane(&[], &[("acme.io/Team", "x")]), false),
            (jane(&[], &[("acme.io/team", "")]), false),
            (Wanted { groups: vec!["g".into()], ..wanted("system:serviceaccount:ns:a") }, false),
            (Wanted { uid: "u".into(), ..wanted("system:node:n1") }, false),
        ] {
            assert_eq!(wanted.become_by(&user, &list_pods(), &may).is_ok(), allowed, "{wanted:?}");
        }
        // A user who has the old right too may do as before.
        assert!(jane(&["system:masters"], &[]).become_by(&user, &list_pods(), &|_| true).is_ok());
    }

    #[test]
    fn many_groups_are_asked_for_at_once() {
        let may = |action: &Action| action.resource != "groups" || action.name == "*";
        let with = |count: usize| Wanted { groups: vec!["g".into(); count], ..wanted("jane") };
        let user = User::new("proxy", ["g"]);
        assert!(with(4).become_by(&user, &list_pods(), &may).is_ok());
        assert!(with(3).become_by(&user, &list_pods(), &may).is_err());
    }

    #[test]
    fn groups_are_completed_as_upstream_does() {
        let of = |name: &str, groups: &[&str], constrained| {
            Wanted { groups: groups.iter().map(|g| (*g).to_owned()).collect(), ..wanted(name) }
                .user(constrained)
                .groups
        };
        assert_eq!(of("system:node:n", &[], false), ["system:authenticated"]);
        assert_eq!(of("system:anonymous", &["g"], false), ["g", "system:unauthenticated"]);
        assert_eq!(of("jane", &["system:unauthenticated"], false), ["system:unauthenticated"]);
        assert_eq!(
            of("system:serviceaccount:ns:a", &[], true),
            ["system:serviceaccounts", "system:serviceaccounts:ns", "system:authenticated"]
        );
        assert_eq!(of("system:serviceaccount:ns:a", &["g"], false), ["g", "system:authenticated"]);
    }
}
