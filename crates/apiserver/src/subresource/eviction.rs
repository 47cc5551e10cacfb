//! `pods/eviction`: a delete that a disruption budget may refuse.

use crate::admission::{Attributes, Operation};
use crate::auth::User;
use crate::call::Call;
use crate::encode;
use crate::http::Response;
use crate::options::{DeleteOptions, Query, WriteOptions};
use crate::registry::{Update, Write, check_delete_preconditions};
use crate::verbs;
use ferrite_api::selector::LabelSelector;
use ferrite_api::{Gvk, Status, meta};
use ferrite_json::{Value, json};

const REFUSED: &str = "Cannot evict pod as it would violate the pod's disruption budget.";
const GROUP: &str = "policy";
/// Evictions of one budget that nobody has confirmed yet.
const MAX_DISRUPTED: usize = 2000;
/// When to come back to a budget whose controller is behind.
const RETRY_SECONDS: u64 = 10;

pub(super) async fn handle(call: &mut Call) -> Result<Response, Status> {
    let options = call.write_options()?;
    let eviction = call.read_as(&Gvk::new(GROUP, "v1", "Eviction"), options.field_validation).await?;
    call.check_namespace(&eviction)?;
    // As upstream: admission comes before the name is checked and the pod is looked up.
    let pod = call.server.registry.read(&call.resource, call.namespace(), call.name());
    let eviction = admit(call, &options, pod.as_ref().ok(), eviction).await?;
    if meta::name(&eviction) != call.name() {
        return Err(Status::bad_request("name in URL does not match name in Eviction object"));
    }
    let pod = pod?;
    let delete = DeleteOptions::parse(&Query::default(), eviction.get("deleteOptions"))?;
    let dry_run = options.dry_run || delete.dry_run;
    let mut delete = DeleteOptions { dry_run, ..delete };
    if !is_ignored(&pod) {
        let budgets = budgets_of(call, &pod);
        let budget = match budgets.as_slice() {
            [] => None,
            [only] => Some(only),
            _ => {
                return Err(Status::new(
                    500,
                    "",
                    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
                ));
            }
        };
        if let Some(budget) = budget {
            match is_ready(&pod) || !unhealthy_may_go(budget) {
                true => take(call, budget, dry_run).await?,
                // It must still be unhealthy when it goes.
                false => {
                    let seen = meta::str(&pod, "resourceVersion").to_owned();
                    delete.resource_version.get_or_insert(seen);
                }
            }
        }
    }
    let delete = mark(call, delete).await?;
    let write_options = WriteOptions { dry_run, within: true, ..WriteOptions::default() };
    call.server.registry.delete(&call.write(&write_options), call.name(), &delete).await?;
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    encode::value(201, &status, call.representation)
}

async fn admit(
    call: &Call,
    options: &WriteOptions,
    pod: Option<&Value>,
    mut eviction: Value,
) -> Result<Value, Status> {
    let registry = &call.server.registry;
    let attributes = Attributes {
        operation: Operation::Create,
        resource: &call.resource,
        subresource: Some("eviction"),
        namespace: call.namespace(),
        name: call.name(),
        unnamed: false,
        user: &call.user,
        old: pod,
        options,
        rbac: &registry.rbac,
    };
    let view = registry.view();
    registry.admission.mutate(&view, &attributes, &mut eviction).await?;
    registry.admission.validate(&view, &attributes, Some(&eviction)).await?;
    Ok(eviction)
}

/// Pods that do no work, or have not begun to, are nobody's loss.
fn is_ignored(pod: &Value) -> bool {
    let phase = pod["status"]["phase"].as_str().unwrap_or_default();
    matches!(phase, "Succeeded" | "Failed" | "Pending") || meta::is_deleting(pod)
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Returns true if a pod that is not ready may be evicted without being counted.
fn unhealthy_may_go(budget: &Value) -> bool {
    let number = |key: &str| budget["status"][key].as_i64().unwrap_or(0);
    budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        || (number("currentHealthy") >= number("desiredHealthy") && number("desiredHealthy") > 0)
}

fn budgets_of(call: &Call, pod: &Value) -> Vec<Value> {
    let selects = |budget: &Value| {
        let selector = &budget["spec"]["selector"];
        selector.is_object()
            && LabelSelector::from_value(selector).is_ok_and(|selector| selector.matches_object(pod))
    };
    let view = call.server.registry.view();
    view.objects(GROUP, "poddisruptionbudgets", call.namespace()).filter(selects).collect()
}

fn refused(cause: String) -> Status {
    let mut status = Status::too_many_requests(REFUSED).with_empty_details();
    if let Some(details) = &mut status.details {
        details.insert("causes", json!([{"reason": "DisruptionBudget", "message": cause}]));
    }
    status
}

/// Checks that a budget allows one more eviction.
fn check(budget: &Value) -> Result<(), Status> {
    let name = meta::name(budget);
    let status = &budget["status"];
    let number = |key: &str| status[key].as_i64().unwrap_or(0);
    let generation = budget["metadata"]["generation"].as_i64().unwrap_or(0);
    if number("observedGeneration") < generation {
        let mut busy =
            refused(format!("The disruption budget {name} is still being processed by the server."));
        if let Some(details) = &mut busy.details {
            details.insert("retryAfterSeconds", RETRY_SECONDS.into());
        }
        return Err(busy);
    }
    let forbidden = |why: &str| Status::forbidden(GROUP, "poddisruptionbudget", name, why);
    if number("disruptionsAllowed") < 0 {
        return Err(forbidden("pdb disruptions allowed is negative"));
    }
    if status["disruptedPods"].as_object().is_some_and(|pods| pods.len() > MAX_DISRUPTED) {
        return Err(forbidden(
            "DisruptedPods map too big - too many evictions not confirmed by PDB controller",
        ));
    }
    if number("disruptionsAllowed") > 0 {
        return Ok(());
    }
    let failed =
        status["conditions"].as_array().into_iter().flatten().find(|c| {
            c["type"] == "DisruptionAllowed" && c["status"] == "False" && c["reason"] == "SyncFailed"
        });
    Err(refused(match failed {
        Some(condition) => format!(
            "The disruption budget {name} does not allow evicting pods currently because it failed sync: {}",
            condition["message"].as_str().unwrap_or_default()
        ),
        None => format!(
            "The disruption budget {name} needs {} healthy pods and has {} currently",
            number("desiredHealthy"),
            number("currentHealthy")
        ),
    }))
}

/// Takes one disruption from a budget, and names the pod in its status for the controller.
async fn take(call: &Call, budget: &Value, dry_run: bool) -> Result<(), Status> {
    check(budget)?;
    if dry_run {
        return Ok(());
    }
    let change = |old: &Value| {
        check(old)?;
        Ok(taken(old, call.name(), &verbs::now()))
    };
    let registry = &call.server.registry;
    let budgets =
        registry.table.find(GROUP, "v1", "poddisruptionbudgets").ok_or_else(Status::no_such_path)?;
    let user = User::new("system:apiserver", ["system:masters"]);
    let options = WriteOptions { field_manager: "kube-apiserver".into(), ..WriteOptions::default() };
    let update = Update {
        write: Write {
            resource: budgets,
            namespace: call.namespace(),
            requested: call.name(),
            user: &user,
            options: &options,
            copied: false,
        },
        name: meta::name(budget),
        subresource: Some("status"),
        change: &change,
        replaces: false,
        applied: None,
    };
    registry.update(&update).await.map(drop)
}

fn taken(budget: &Value, pod: &str, now: &str) -> Value {
    let mut budget = budget.clone();
    let generation = budget["metadata"]["generation"].clone();
    let left = budget["status"]["disruptionsAllowed"].as_i64().unwrap_or(0) - 1;
    let status = &mut budget["status"];
    status["disruptionsAllowed"] = left.into();
    if !status["disruptedPods"].is_object() {
        status["disruptedPods"] = json!({});
    }
    status["disruptedPods"][pod] = now.into();
    let (value, reason) = if left > 0 { ("True", "SufficientPods") } else { ("False", "InsufficientPods") };
    let before =
        status["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == "DisruptionAllowed");
    let since = match before.filter(|c| c["status"] == value) {
        Some(condition) => condition["lastTransitionTime"].clone(),
        None => now.into(),
    };
    let condition = json!({
        "type": "DisruptionAllowed", "status": value, "observedGeneration": generation,
        "lastTransitionTime": since, "reason": reason, "message": "",
    });
    match status["conditions"].as_array_mut() {
        None => status["conditions"] = json!([condition]),
        Some(list) => match list.iter_mut().find(|c| c["type"] == "DisruptionAllowed") {
            Some(old) => *old = condition,
            None => list.push(condition),
        },
    }
    budget
}

/// Records in the pod's status why it goes. Preconditions then hold for the updated pod.
async fn mark(call: &Call, delete: DeleteOptions) -> Result<DeleteOptions, Status> {
    let change = |old: &Value| {
        check_delete_preconditions(&call.resource, call.name(), &delete, old)?;
        Ok(targeted(old, &verbs::now()))
    };
    let user = User::new("system:apiserver", ["system:masters"]);
    let options = WriteOptions { dry_run: delete.dry_run, within: true, ..WriteOptions::default() };
    // As an apply, it leaves the managers of fields alone.
    let conversions = crate::managed::Conversions::new(&call.resource);
    let update = Update {
        write: Write { user: &user, ..call.write(&options) },
        name: call.name(),
        subresource: Some("status"),
        change: &change,
        replaces: false,
        applied: Some(&conversions),
    };
    let marked = call.server.registry.update(&update).await?;
    let pinned = delete.resource_version.is_some() && !delete.dry_run;
    let version = pinned.then(|| meta::str(&marked.object(&call.resource), "resourceVersion").to_owned());
    Ok(DeleteOptions { resource_version: version.or(delete.resource_version), ..delete })
}

fn targeted(pod: &Value, now: &str) -> Value {
    let condition = json!({
        "type": "DisruptionTarget", "status": "True", "lastProbeTime": null, "lastTransitionTime": now,
        "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting",
    });
    let mut pod = pod.clone();
    if !pod["status"].is_object() {
        pod["status"] = json!({});
    }
    match pod["status"]["conditions"].as_array_mut() {
        None => pod["status"]["conditions"] = json!([condition]),
        Some(list) => match list.iter_mut().find(|c| c["type"] == "DisruptionTarget") {
            Some(old) if old["status"] == "True" => {}
            Some(old) => *old = condition,
            None => list.push(condition),
        },
    }
    pod
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(allowed: i64, observed: i64) -> Value {
        json!({
            "metadata": {"name": "b", "generation": 2},
            "status": {
                "disruptionsAllowed": allowed, "observedGeneration": observed,
                "desiredHealthy": 3, "currentHealthy": 3,
            },
        })
    }

    #[test]
    fn a_budget_is_asked() {
        let cause = |status: Status| status.details.unwrap()["causes"][0]["message"].clone();
        assert_eq!(check(&budget(1, 2)), Ok(()));
        let none = check(&budget(0, 2)).unwrap_err();
        assert_eq!((none.code, none.message.as_str()), (429, REFUSED));
        assert_eq!(cause(none), "The disruption budget b needs 3 healthy pods and has 3 currently");
        let behind = check(&budget(1, 1)).unwrap_err();
        assert_eq!(behind.details.as_ref().unwrap()["retryAfterSeconds"], 10);
        assert_eq!(cause(behind), "The disruption budget b is still being processed by the server.");
        assert_eq!(check(&budget(-1, 2)).unwrap_err().code, 403);
        let mut failed = budget(0, 2);
        failed["status"]["conditions"] =
            json!([{"type": "DisruptionAllowed", "status": "False", "reason": "SyncFailed", "message": "x"}]);
        assert!(cause(check(&failed).unwrap_err()).as_str().unwrap().ends_with("it failed sync: x"));
    }

    #[test]
    fn what_is_taken_is_told() {
        let after = taken(&budget(2, 2), "p", "now");
        assert_eq!(after["status"]["disruptionsAllowed"], 1);
        assert_eq!(after["status"]["disruptedPods"], json!({"p": "now"}));
        assert_eq!(after["status"]["conditions"][0]["reason"], "SufficientPods");
        let last = taken(&after, "q", "later");
        assert_eq!(last["status"]["conditions"][0]["status"], "False");
        assert_eq!(last["status"]["conditions"][0]["lastTransitionTime"], "later");
        assert_eq!(last["status"]["conditions"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn unhealthy_pods_go_where_nobody_is_hurt() {
        let mut budget = budget(0, 2);
        assert!(unhealthy_may_go(&budget));
        budget["status"]["currentHealthy"] = 2.into();
        assert!(!unhealthy_may_go(&budget));
        budget["spec"] = json!({"unhealthyPodEvictionPolicy": "AlwaysAllow"});
        assert!(unhealthy_may_go(&budget));
    }
}
