//! Resources that may only be used where a quota covers them, by the server's configuration.

use super::amounts::{Amounts, list};
use super::evaluators::count_key;
use super::scopes::Scope;
use ferrite_json::Value;

/// A resource, and the part of its consumption that some quota has to cover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limited {
    /// The key under which quotas count the resource's objects.
    pub(super) count: String,
    /// Parts of names: whatever is consumed under a name that has one of them.
    contains: Vec<String>,
    /// Objects in one of these scopes.
    scopes: Vec<Scope>,
}

impl Limited {
    /// An entry of `limitedResources` in a configuration of quotas.
    pub fn parse(entry: &Value) -> Result<Self, &'static str> {
        let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
        let resource = text("resource");
        if resource.is_empty() {
            return Err("resource: Required value");
        }
        let contains = list(entry, "matchContains").iter().filter_map(Value::as_str).map(str::to_owned);
        Ok(Self {
            count: count_key(&text("apiGroup"), &resource),
            contains: contains.collect(),
            scopes: list(entry, "matchScopes").iter().map(Scope::of_term).collect(),
        })
    }

    /// The names in `usage` that a quota has to speak of.
    pub(super) fn names<'a>(&self, usage: &'a Amounts) -> impl Iterator<Item = &'a str> {
        let consumed = usage.iter().filter(|(_, amount)| !amount.is_zero() && !amount.is_negative());
        consumed
            .map(|(name, _)| name.as_str())
            .filter(|name| self.contains.iter().any(|part| name.contains(part.as_str())))
    }

    pub(super) fn scopes(&self) -> &[Scope] {
        &self.scopes
    }
}
