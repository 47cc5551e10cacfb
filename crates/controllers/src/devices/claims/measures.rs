//! Metrics of the resourceclaim controller, with upstream's names.

use std::sync::{Arc, LazyLock};

use ferrite_client::Change;
use ferrite_component::metrics::{Counter, Family, Gauge, registry};
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::decide::{admin_access, source};
use ferrite_client::resource_claims::is_allocated;

static CREATES: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "resourceclaim_controller_creates_total",
        "Number of ResourceClaims creation requests, by result and admin access.",
        &["status", "admin_access"],
    )
});

static CLAIMS: LazyLock<Arc<Family<Gauge>>> = LazyLock::new(|| {
    registry().gauge(
        "resourceclaim_controller_resource_claims",
        "Number of ResourceClaims, by allocation, admin access and source.",
        &["allocated", "admin_access", "source"],
    )
});

pub(super) fn count_creation(claim: &ResourceClaim, created: bool) {
    let status = if created { "success" } else { "failure" };
    CREATES.with(&[status, admin_access(claim)]).increment();
}

/// Keeps the number of claims of each sort.
pub(super) fn observe(change: &Change<ResourceClaim>) {
    let add = |claim: &ResourceClaim, amount: i64| {
        let allocated = if is_allocated(claim) { "true" } else { "false" };
        CLAIMS.with(&[allocated, admin_access(claim), source(claim)]).add(amount);
    };
    match change {
        Change::Added(claim) => add(claim, 1),
        Change::Updated { old, new } => {
            add(old, -1);
            add(new, 1);
        }
        Change::Deleted(claim) => add(claim, -1),
    }
}
