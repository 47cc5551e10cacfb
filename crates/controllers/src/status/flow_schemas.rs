//! Reports if the priority level that a FlowSchema names exists.

use std::sync::Arc;

use ferrite_client::{Api, Informer, ObjectKey, is_not_found};
use ferrite_json::json;
use k8s_openapi::api::flowcontrol::v1::{FlowSchema, FlowSchemaCondition, PriorityLevelConfiguration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Patch, PatchParams};

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "priority-and-fairness-config-consumer";
const MANAGER: &str = "api-priority-and-fairness-config-consumer-v1";

pub(crate) fn start(context: &Context) {
    let schemas: Informer<FlowSchema> = context.informers.get();
    let levels: Informer<PriorityLevelConfiguration> = context.informers.get();
    let watched = schemas.clone();
    let kit = context
        .controller(NAME)
        .reconciles(&schemas)
        .watches(&levels, move |_, queue| super::add_all(&watched, queue));
    let client = context.client.clone();
    super::run(kit, schemas, move |schema: Arc<FlowSchema>| {
        let exists = levels.get(&ObjectKey::cluster(level_of(&schema))).is_some();
        let wanted = decide(&schema, exists, Timestamp::now());
        write(client.clone(), schema, wanted)
    });
}

fn level_of(schema: &FlowSchema) -> String {
    schema.spec.as_ref().map(|s| s.priority_level_configuration.name.clone()).unwrap_or_default()
}

/// The condition to write, if it is not there yet.
fn decide(schema: &FlowSchema, exists: bool, now: Timestamp) -> Option<FlowSchemaCondition> {
    let level = level_of(schema);
    let (status, reason, what) = match exists {
        true => ("False", "Found", "and it exists"),
        false => ("True", "NotFound", "but there is no such object"),
    };
    let message =
        format!("This FlowSchema references the PriorityLevelConfiguration object named {level:?} {what}");
    let current = schema
        .status
        .as_ref()
        .and_then(|s| s.conditions.as_ref())
        .and_then(|conditions| conditions.iter().find(|c| c.type_.as_deref() == Some("Dangling")));
    if current.is_some_and(|c| c.status.as_deref() == Some(status) && c.message.as_ref() == Some(&message)) {
        return None;
    }
    let since = match current {
        Some(current) if current.status.as_deref() == Some(status) => current.last_transition_time.clone(),
        _ => Some(Time(now)),
    };
    Some(FlowSchemaCondition {
        type_: Some("Dangling".to_owned()),
        status: Some(status.to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_transition_time: since,
    })
}

async fn write(
    client: Client,
    schema: Arc<FlowSchema>,
    condition: Option<FlowSchemaCondition>,
) -> Result<(), SyncError> {
    let (Some(condition), Some(name)) = (condition, &schema.metadata.name) else { return Ok(()) };
    let patch = json!({
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "FlowSchema",
        "metadata": {"name": name},
        "status": {"conditions": [condition]},
    });
    let api: Api<FlowSchema> = Api::all(client);
    match api.patch_status(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(patch)).await {
        Err(error) if is_not_found(&error) => Ok(()),
        other => other.map(drop).during(|| format!("write the status of FlowSchema {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_dangles_without_its_priority_level() {
        let mut schema: FlowSchema = ferrite_json::from_value(json!({"metadata": {"name": "a"}, "spec":
                {"priorityLevelConfiguration": {"name": "low"}, "matchingPrecedence": 1}}))
        .expect("a schema");
        let now = Timestamp::UNIX_EPOCH;
        for (exists, status, reason) in [(true, "False", "Found"), (false, "True", "NotFound")] {
            let condition = decide(&schema, exists, now).expect("a change");
            assert_eq!(condition.status.as_deref(), Some(status));
            assert_eq!(condition.reason.as_deref(), Some(reason));
            schema.status = ferrite_json::from_value(json!({"conditions": [condition]})).expect("a status");
            assert_eq!(decide(&schema, exists, now), None);
        }
    }
}
