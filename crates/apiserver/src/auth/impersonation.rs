//! Acting as somebody else, for those who may.

use super::{Action, Rbac, User, decide, denied};
use crate::registry::View;
use ferrite_api::Status;
use http::HeaderMap;
use percent_encoding::percent_decode_str;
use std::collections::BTreeMap;

const EXTRA: &str = "impersonate-extra-";

/// The user a request is made as: the one who asks, unless its headers name another.
pub(crate) fn impersonate(
    rbac: &Rbac,
    view: &View,
    user: User,
    headers: &HeaderMap,
    wanted: &Action,
) -> Result<User, Status> {
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
    let may = |group: &str, resource: &str, subresource: &str, namespace: &str, name: &str| {
        let action = Action {
            verb: "impersonate".into(),
            group: group.into(),
            resource: resource.into(),
            subresource: subresource.into(),
            namespace: namespace.into(),
            name: name.into(),
            ..Action::default()
        };
        if decide(rbac, view, &user, &action).allowed {
            return Ok(());
        }
        // As upstream: the refusal speaks of the narrower right that would have sufficed.
        let mode = match account {
            Some(_) => "serviceaccount",
            None => "user-info",
        };
        let verb = format!("impersonate-on:{mode}:{}", wanted.verb);
        Err(denied(&user, &Action { verb, ..wanted.clone() }, ""))
    };
    match account {
        Some((namespace, account)) => may("", "serviceaccounts", "", namespace, account)?,
        None => may("", "users", "", "", &name)?,
    }
    for group in &groups {
        may("", "groups", "", "", group)?;
    }
    for (key, values) in &extra {
        for value in values {
            may("authentication.k8s.io", "userextras", key, "", value)?;
        }
    }
    if !uid.is_empty() {
        may("authentication.k8s.io", "uids", "", "", &uid)?;
    }
    let given = !groups.is_empty();
    let mut acted = match (account, name.as_str()) {
        (_, "system:anonymous") if !given => User::anonymous(),
        (Some((namespace, account)), _) if !given => User::service_account(namespace, account, ""),
        _ => User::new(name, groups),
    };
    acted.uid = uid;
    acted.extra = extra;
    Ok(acted)
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
