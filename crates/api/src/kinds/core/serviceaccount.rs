//! ServiceAccounts.

use crate::kinds::common::access::{list_mut, text};
use crate::kinds::common::row::{NAME, shown};
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::age;
use ferrite_json::{Value, json};
use jiff::Timestamp;

const ENFORCE_SECRETS: &str = "kubernetes.io/enforce-mountable-secrets";

pub(in crate::kinds) struct ServiceAccounts;

impl Strategy for ServiceAccounts {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn prepare_create(&self, object: &mut Value) {
        keep_only_secret_names(object);
    }

    fn prepare_update(&self, new: &mut Value, _old: &Value) {
        keep_only_secret_names(new);
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        match object["metadata"]["annotations"].get(ENFORCE_SECRETS) {
            Some(_) => vec![format!(
                "metadata.annotations[{ENFORCE_SECRETS}]: deprecated in v1.32+; prefer separate namespaces to isolate \
                 access to mounted secrets"
            )],
            None => Vec::new(),
        }
    }

    fn warnings_on_update(&self, new: &Value, old: &Value) -> Vec<String> {
        match self.warnings(old).is_empty() {
            true => self.warnings(new),
            false => Vec::new(),
        }
    }

    fn returns_deleted(&self) -> bool {
        true
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![crate::meta::name(object).into(), age(object, now).into()]
    }
}

/// Secrets of an account are in its namespace: only their names are kept.
fn keep_only_secret_names(account: &mut Value) {
    for secret in list_mut(account, "secrets") {
        *secret = match text(secret, "name") {
            "" => json!({}),
            name => json!({ "name": name }),
        };
    }
}
