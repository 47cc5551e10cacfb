//! The dependency policy of `deny.toml`: licences, crates that may not enter the tree, where crates come from.
//!
//! The file is in cargo-deny's format, so that `cargo deny check` reads it as well. It is checked here with
//! cargo's own reports, because the gate must not depend on a tool that takes minutes to build.

use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;

/// The rules for dependencies.
#[derive(Debug, Default)]
struct Policy {
    licenses: Vec<String>,
    /// Further licences of single crates.
    exceptions: BTreeMap<String, Vec<String>>,
    /// Crates that may not be used, and why.
    banned: BTreeMap<String, String>,
}

/// Checks every crate that the lock file brings in, and that our own crates use those that they declare.
pub fn check() -> Result<(), String> {
    eprintln!("+ dependency policy (deny.toml)");
    let text = std::fs::read_to_string("deny.toml").map_err(|e| format!("cannot read deny.toml: {e}"))?;
    let policy = Policy::parse(&text)?;
    let output = Command::new("cargo")
        .args(["metadata", "--format-version", "1", "--locked"])
        .output()
        .map_err(|e| format!("cannot run cargo metadata: {e}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))?;
    crate::unused::check(&metadata)?;
    let problems: Vec<String> =
        metadata["packages"].as_array().into_iter().flatten().filter_map(|p| policy.problem(p)).collect();
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("the dependency policy is broken:\n{}", problems.join("\n"))),
    }
}

impl Policy {
    fn parse(text: &str) -> Result<Self, String> {
        let file: toml::Table = text.parse().map_err(|e| format!("deny.toml: {e}"))?;
        let strings = |value: Option<&toml::Value>| -> Vec<String> {
            let items = value.and_then(toml::Value::as_array).into_iter().flatten();
            items.filter_map(|item| item.as_str().map(str::to_owned)).collect()
        };
        let tables = |section: &str, key: &str| -> Vec<toml::Value> {
            let found = file.get(section).and_then(|section| section.get(key)?.as_array());
            found.cloned().unwrap_or_default()
        };
        let name =
            |row: &toml::Value| row.get("crate").and_then(toml::Value::as_str).unwrap_or_default().to_owned();
        let reason = |row: &toml::Value| {
            row.get("reason").and_then(toml::Value::as_str).unwrap_or_default().to_owned()
        };
        Ok(Self {
            licenses: strings(file.get("licenses").and_then(|licenses| licenses.get("allow"))),
            exceptions: tables("licenses", "exceptions")
                .iter()
                .map(|row| (name(row), strings(row.get("allow"))))
                .collect(),
            banned: tables("bans", "deny").iter().map(|row| (name(row), reason(row))).collect(),
        })
    }

    /// Reason why a package may not be used; none if it may.
    fn problem(&self, package: &Value) -> Option<String> {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        let (name, version) = (text("name"), text("version"));
        if let Some(why) = self.banned.get(name) {
            return Some(format!("{name} {version} is banned: {why}"));
        }
        match package["source"].as_str() {
            // Ours.
            None => return None,
            Some(source) if !source.starts_with("registry+") => {
                return Some(format!("{name} {version} comes from {source}, which is no registry"));
            }
            Some(_) => {}
        }
        // Before SPDX a slash was an "or".
        let license = text("license").replace('/', " OR ");
        let allowed = |requirement: &spdx::LicenseReq| {
            let wanted = requirement.to_string();
            let extra = self.exceptions.get(name).into_iter().flatten();
            self.licenses.iter().chain(extra).any(|known| *known == wanted)
        };
        match spdx::Expression::parse_mode(&license, spdx::ParseMode::LAX) {
            Err(_) => Some(format!("{name} {version} has no licence that can be read: {license:?}")),
            Ok(expression) if expression.evaluate(allowed) => None,
            Ok(_) => Some(format!("{name} {version} has the licence {license}, which is not allowed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_policy_says_is_done() {
        let policy = Policy::parse(
            r#"
            [licenses]
            allow = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"]
            exceptions = [{ crate = "special", allow = ["MPL-2.0+"] }]
            [bans]
            deny = [{ crate = "evil", reason = "it is" }]
            "#,
        )
        .expect("a policy");
        for (name, license, source, problem) in [
            ("a", "MIT", "registry+x", None),
            ("a", "MIT/GPL-3.0", "registry+x", None),
            ("a", "(MIT OR GPL-3.0-only) AND Apache-2.0", "registry+x", None),
            ("a", "Apache-2.0 WITH LLVM-exception", "registry+x", None),
            ("a", "GPL-3.0-only", "registry+x", Some("not allowed")),
            ("a", "MIT AND GPL-3.0-only", "registry+x", Some("not allowed")),
            ("a", "", "registry+x", Some("no licence")),
            ("a", "MIT", "git+x", Some("no registry")),
            ("special", "MPL-2.0+", "registry+x", None),
            ("other", "MPL-2.0+", "registry+x", Some("not allowed")),
            ("evil", "MIT", "registry+x", Some("it is")),
        ] {
            let package = json!({"name": name, "version": "1", "license": license, "source": source});
            let found = policy.problem(&package);
            match (problem, &found) {
                (None, None) => {}
                (Some(part), Some(text)) if text.contains(part) => {}
                _ => panic!("{name} {license} {source}: {found:?}"),
            }
        }
        assert_eq!(policy.problem(&json!({"name": "ours", "version": "1"})), None);
    }
}
