//! CustomResourceDefinitions: whether their names are free, when they are served, and how they go away.

use std::collections::BTreeSet;
use std::sync::Arc;

use ferrite_client::{Api, Informer, ObjectKey, is_conflict, is_not_found};
use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionCondition as Condition,
    CustomResourceDefinitionNames as Names, CustomResourceDefinitionStatus as Status,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, PostParams};

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "apiextensions-controllers";
/// Index of definitions by their API group.
const BY_GROUP: &str = "group";
const MANAGER: &str = "kube-apiserver";
const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";
/// Instances removed in one round.
const AT_ONCE: u32 = 500;

pub(crate) fn start(context: &Context) {
    let definitions: Informer<CustomResourceDefinition> = context.informers.get();
    definitions.add_index(BY_GROUP, |definition| vec![definition.spec.group.clone()]);
    let (client, others, known) = (context.client.clone(), definitions.clone(), definitions.clone());
    // Names that one gives up another may have been waiting for.
    let kit = context.controller(NAME).watches(&definitions, move |change, queue| {
        queue.add(ObjectKey::of(&**change.object()));
        for other in others.by_index(BY_GROUP, &change.object().spec.group) {
            queue.add(ObjectKey::of(&*other));
        }
    });
    super::run(kit, definitions, move |definition: Arc<CustomResourceDefinition>| {
        let rivals = known.by_index(BY_GROUP, &definition.spec.group);
        let step = decide(&definition, &rivals, Timestamp::now());
        act(client.clone(), definition, step)
    });
}

#[derive(Debug, PartialEq)]
enum Step {
    Nothing,
    WriteStatus(Box<Status>),
    /// Its instances go, then the finalizer.
    CleanUp,
}

fn decide(
    definition: &CustomResourceDefinition,
    all: &[Arc<CustomResourceDefinition>],
    now: Timestamp,
) -> Step {
    if definition.metadata.deletion_timestamp.is_some() {
        let held = definition.metadata.finalizers.iter().flatten().any(|f| f == CLEANUP);
        return if held { Step::CleanUp } else { Step::Nothing };
    }
    let others = all.iter().filter(|other| {
        other.spec.group == definition.spec.group && other.metadata.name != definition.metadata.name
    });
    let taken = Taken::by(others.map(|other| &**other));
    let before = definition.status.clone().unwrap_or_default();
    let accepted = before.accepted_names.clone().unwrap_or_default();
    let (names, problem) = accept(&definition.spec.names, accepted, &taken);
    let accepts = match problem {
        None => condition("NamesAccepted", "True", "NoConflicts", "no conflicts found"),
        Some((reason, message)) => condition("NamesAccepted", "False", reason, &message),
    };
    let names_are_good = accepts.status == "True";
    let established = before.conditions.iter().flatten().find(|c| c.type_ == "Established").cloned();
    let established = match established {
        Some(established) if established.status == "True" => established,
        _ if names_are_good => {
            condition("Established", "True", "InitialNamesAccepted", "the initial names have been accepted")
        }
        _ => condition("Established", "False", "NotAccepted", "not all names are accepted"),
    };
    let mut after = before.clone();
    after.accepted_names = Some(names);
    let mut conditions = before.conditions.clone().unwrap_or_default();
    set_condition(&mut conditions, accepts, now);
    set_condition(&mut conditions, established, now);
    after.conditions = Some(conditions);
    if after == before { Step::Nothing } else { Step::WriteStatus(Box::new(after)) }
}

fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        ..Condition::default()
    }
}

fn set_condition(conditions: &mut Vec<Condition>, mut new: Condition, now: Timestamp) {
    match conditions.iter_mut().find(|c| c.type_ == new.type_) {
        Some(old) => {
            let moved = old.status != new.status;
            new.last_transition_time = if moved { Some(Time(now)) } else { old.last_transition_time.clone() };
            *old = new;
        }
        None => {
            new.last_transition_time = Some(Time(now));
            conditions.push(new);
        }
    }
}

/// The names other definitions of the group have been given.
#[derive(Default)]
struct Taken<'a> {
    resources: BTreeSet<&'a str>,
    kinds: BTreeSet<&'a str>,
}

impl<'a> Taken<'a> {
    fn by(others: impl Iterator<Item = &'a CustomResourceDefinition>) -> Self {
        let mut taken = Self::default();
        for names in others.filter_map(|other| other.status.as_ref()?.accepted_names.as_ref()) {
            taken.resources.insert(&names.plural);
            taken.resources.extend(names.singular.as_deref());
            taken.resources.extend(names.short_names.iter().flatten().map(String::as_str));
            taken.kinds.insert(&names.kind);
            taken.kinds.extend(names.list_kind.as_deref());
        }
        taken
    }
}

/// The names a definition has from now on. One that is taken keeps what it was; the last such is told.
fn accept(wanted: &Names, before: Names, taken: &Taken<'_>) -> (Names, Option<(&'static str, String)>) {
    let mut names = before;
    let mut problem = None;
    let free = |name: &str, before: &str, taken: &BTreeSet<&str>| {
        if name == before || !taken.contains(name) {
            Ok(())
        } else {
            Err(format!("{name:?} is already in use"))
        }
    };
    match free(&wanted.plural, &names.plural, &taken.resources) {
        Ok(()) => names.plural.clone_from(&wanted.plural),
        Err(why) => problem = Some(("PluralConflict", why)),
    }
    let text = |name: &Option<String>| name.clone().unwrap_or_default();
    match free(&text(&wanted.singular), &text(&names.singular), &taken.resources) {
        Ok(()) => names.singular.clone_from(&wanted.singular),
        Err(why) => problem = Some(("SingularConflict", why)),
    }
    if wanted.short_names != names.short_names {
        let had: Vec<&String> = names.short_names.iter().flatten().collect();
        let conflicts: Vec<String> = wanted
            .short_names
            .iter()
            .flatten()
            .filter(|name| !had.contains(name))
            .filter_map(|name| free(name, "", &taken.resources).err())
            .collect();
        match conflicts.as_slice() {
            [] => names.short_names.clone_from(&wanted.short_names),
            [only] => problem = Some(("ShortNamesConflict", only.clone())),
            many => problem = Some(("ShortNamesConflict", format!("[{}]", many.join(", ")))),
        }
    }
    match free(&wanted.kind, &names.kind, &taken.kinds) {
        Ok(()) => names.kind.clone_from(&wanted.kind),
        Err(why) => problem = Some(("KindConflict", why)),
    }
    match free(&text(&wanted.list_kind), &text(&names.list_kind), &taken.kinds) {
        Ok(()) => names.list_kind.clone_from(&wanted.list_kind),
        Err(why) => problem = Some(("ListKindConflict", why)),
    }
    names.categories.clone_from(&wanted.categories);
    (names, problem)
}

async fn act(client: Client, definition: Arc<CustomResourceDefinition>, step: Step) -> Result<(), SyncError> {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let name = definition.metadata.name.clone().unwrap_or_default();
    let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
    let mut new = (*definition).clone();
    let result = match step {
        Step::Nothing => return Ok(()),
        Step::WriteStatus(status) => {
            new.status = Some(*status);
            api.replace_status(&name, &params, &new).await
        }
        Step::CleanUp => {
            remove_instances(client, &definition).await?;
            if let Some(finalizers) = &mut new.metadata.finalizers {
                finalizers.retain(|f| f != CLEANUP);
            }
            api.replace(&name, &params, &new).await
        }
    };
    match result {
        // A newer state is on its way here.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
        other => other.map(drop).during(|| format!("write CustomResourceDefinition {name}")),
    }
}

/// Asks for the deletion of every instance; an error while some remain.
async fn remove_instances(client: Client, definition: &CustomResourceDefinition) -> Result<(), SyncError> {
    let spec = &definition.spec;
    let Some(version) =
        spec.versions.iter().find(|v| v.served && v.storage).or(spec.versions.iter().find(|v| v.served))
    else {
        return Ok(());
    };
    let resource = ApiResource {
        group: spec.group.clone(),
        version: version.name.clone(),
        api_version: format!("{}/{}", spec.group, version.name),
        kind: spec.names.kind.clone(),
        plural: spec.names.plural.clone(),
    };
    let all: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let found = match all.list(&ListParams::default().limit(AT_ONCE)).await {
        // What is not served has no instances.
        Err(error) if is_not_found(&error) => return Ok(()),
        other => other.during(|| format!("list {}.{}", resource.plural, resource.group))?,
    };
    for object in &found.items {
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let api: Api<DynamicObject> = match &object.metadata.namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
            None => all.clone(),
        };
        if object.metadata.deletion_timestamp.is_none() {
            match api.delete(name, &DeleteParams::default()).await {
                Err(error) if is_not_found(&error) => {}
                other => {
                    other.map(drop).during(|| format!("delete {} {name}", resource.kind))?;
                }
            }
        }
    }
    match found.items.len() {
        0 => Ok(()),
        some => Err(SyncError::Other(format!("{some} instances of {} are going away", resource.kind))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn definition(name: &str, names: ferrite_json::Value) -> CustomResourceDefinition {
        ferrite_json::from_value(
            json!({"metadata": {"name": name}, "spec": {"group": "g.example", "scope": "Cluster",
            "names": names, "versions": []}}),
        )
        .expect("a definition")
    }

    fn status(step: Step) -> Status {
        match step {
            Step::WriteStatus(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn free_names_are_accepted_and_taken_ones_wait() {
        let now = Timestamp::UNIX_EPOCH;
        let mut first = definition("wids", json!({"plural": "wids", "kind": "Wid", "shortNames": ["w"]}));
        let given = status(decide(&first, &[], now));
        let conditions = given.conditions.clone().expect("conditions");
        assert_eq!(
            conditions.iter().map(|c| (&*c.type_, &*c.status)).collect::<Vec<_>>(),
            [("NamesAccepted", "True"), ("Established", "True")]
        );
        first.status = Some(given);
        assert_eq!(decide(&first, &[], now), Step::Nothing);

        let second = definition("gads", json!({"plural": "gads", "kind": "Wid", "shortNames": ["w"]}));
        let refused = status(decide(&second, &[Arc::new(first)], now));
        let names = refused.accepted_names.expect("names");
        assert_eq!((names.plural.as_str(), names.kind.as_str()), ("gads", ""));
        let conditions = refused.conditions.expect("conditions");
        assert_eq!(conditions[0].reason.as_deref(), Some("KindConflict"));
        assert_eq!(conditions[0].message.as_deref(), Some("\"Wid\" is already in use"));
        assert_eq!(conditions[1].reason.as_deref(), Some("NotAccepted"));
    }

    #[test]
    fn one_that_goes_away_is_cleaned_up_once() {
        let mut leaving = definition("wids", json!({"plural": "wids", "kind": "Wid"}));
        leaving.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        leaving.metadata.finalizers = Some(vec![CLEANUP.to_owned()]);
        assert_eq!(decide(&leaving, &[], Timestamp::UNIX_EPOCH), Step::CleanUp);
        leaving.metadata.finalizers = Some(vec!["other.example/x".to_owned()]);
        assert_eq!(decide(&leaving, &[], Timestamp::UNIX_EPOCH), Step::Nothing);
    }
}
