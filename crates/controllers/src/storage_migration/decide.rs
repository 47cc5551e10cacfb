//! The next step of the migrations of one resource.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

pub(super) const RUNNING: &str = "Running";
pub(super) const SUCCEEDED: &str = "Succeeded";
pub(super) const FAILED: &str = "Failed";

/// A resource that is not served may still come for so long after its migration was created.
const YOUNG: SignedDuration = SignedDuration::from_mins(1);

#[derive(Debug, PartialEq)]
pub(super) enum Step<'a> {
    /// Has ended, and still counts as running.
    Finish(&'a StorageVersionMigration),
    /// Runs, and has work to do.
    Migrate(&'a StorageVersionMigration),
    /// Is the next to run.
    Promote(&'a StorageVersionMigration),
}

pub(super) fn next_step(migrations: &[Arc<StorageVersionMigration>]) -> Option<Step<'_>> {
    let running = || migrations.iter().map(|migration| &**migration).filter(|m| is_true(m, RUNNING));
    if let Some(ended) = running().find(|migration| has_ended(migration)) {
        return Some(Step::Finish(ended));
    }
    if let Some(migration) = running().next() {
        return Some(Step::Migrate(migration));
    }
    let waiting = migrations.iter().map(|migration| &**migration).filter(|migration| !has_ended(migration));
    waiting.min_by(|a, b| age(a).cmp(&age(b))).map(Step::Promote)
}

fn age(migration: &StorageVersionMigration) -> (Option<Timestamp>, Option<&str>) {
    let metadata = &migration.metadata;
    (metadata.creation_timestamp.as_ref().map(|time| time.0), metadata.name.as_deref())
}

pub(super) fn is_young(migration: &StorageVersionMigration, now: Timestamp) -> bool {
    let created = migration.metadata.creation_timestamp.as_ref();
    created.is_some_and(|created| now.duration_since(created.0) < YOUNG)
}

fn conditions(migration: &StorageVersionMigration) -> impl Iterator<Item = &Condition> {
    migration.status.iter().flat_map(|status| status.conditions.iter().flatten())
}

pub(super) fn is_true(migration: &StorageVersionMigration, condition: &str) -> bool {
    conditions(migration).any(|known| known.type_ == condition && known.status == "True")
}

fn has_ended(migration: &StorageVersionMigration) -> bool {
    is_true(migration, SUCCEEDED) || is_true(migration, FAILED)
}

/// Adds a condition that is true. One that is there already stays as it is.
pub(super) fn set_condition(
    migration: &mut StorageVersionMigration,
    condition: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) {
    if conditions(migration).any(|known| known.type_ == condition) {
        return;
    }
    let status = migration.status.get_or_insert_default();
    status.conditions.get_or_insert_default().push(Condition {
        type_: condition.to_owned(),
        status: "True".to_owned(),
        last_transition_time: Time(now),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: None,
    });
}

/// The migration has ended, so it does not run any more.
pub(super) fn end_running(migration: &mut StorageVersionMigration, now: Timestamp) {
    let generation = migration.metadata.generation;
    let status = migration.status.get_or_insert_default();
    let running = status.conditions.iter_mut().flatten().find(|known| known.type_ == RUNNING);
    if let Some(running) = running {
        *running = Condition {
            type_: RUNNING.to_owned(),
            status: "False".to_owned(),
            last_transition_time: Time(now),
            reason: "MigrationCompleted".to_owned(),
            message: "Migration completed".to_owned(),
            observed_generation: generation,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn migration(name: &str, created: &str, conditions: &[&str]) -> Arc<StorageVersionMigration> {
        let conditions: Vec<_> = conditions
            .iter()
            .map(|condition| {
                let (name, status) = condition.split_once('=').unwrap_or((condition, "True"));
                json!({"type": name, "status": status, "reason": "r", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"})
            })
            .collect();
        let value = json!({"metadata": {"name": name, "generation": 1, "creationTimestamp": created},
            "spec": {"resource": {"group": "g", "resource": "r"}}, "status": {"conditions": conditions}});
        Arc::new(ferrite_json::from_value(value).unwrap())
    }

    const EARLY: &str = "2026-01-01T00:00:00Z";
    const LATE: &str = "2026-01-01T00:00:01Z";

    #[test]
    fn one_migration_runs_at_a_time_the_oldest_first() {
        let told = |migrations: &[(&str, &str, &[&str])]| {
            let migrations: Vec<_> =
                migrations.iter().map(|(name, created, has)| migration(name, created, has)).collect();
            next_step(&migrations).map(|step| {
                let (what, of) = match step {
                    Step::Finish(of) => ("finish", of),
                    Step::Migrate(of) => ("migrate", of),
                    Step::Promote(of) => ("promote", of),
                };
                format!("{what} {}", of.metadata.name.as_deref().unwrap_or_default())
            })
        };
        for (migrations, step) in [
            (&[][..], None),
            (&[("a", EARLY, &["Succeeded", "Running=False"][..])], None),
            (&[("a", LATE, &[]), ("b", EARLY, &[])], Some("promote b")),
            (&[("b", EARLY, &[]), ("a", EARLY, &[])], Some("promote a")),
            (&[("a", EARLY, &[]), ("b", LATE, &["Running"])], Some("migrate b")),
            (&[("a", EARLY, &[]), ("b", LATE, &["Running", "Failed"])], Some("finish b")),
            (&[("a", EARLY, &["Failed"]), ("b", LATE, &[])], Some("promote b")),
        ] {
            assert_eq!(told(migrations).as_deref(), step, "{migrations:?}");
        }
    }

    #[test]
    fn conditions_are_set_once_and_running_ends() {
        let now: Timestamp = LATE.parse().unwrap();
        let mut migration = Arc::unwrap_or_clone(migration("a", EARLY, &["Running"]));
        set_condition(&mut migration, SUCCEEDED, "Done", "", now);
        set_condition(&mut migration, SUCCEEDED, "Again", "", now);
        end_running(&mut migration, now);
        let told: Vec<_> =
            conditions(&migration).map(|c| format!("{}={} {}", c.type_, c.status, c.reason)).collect();
        assert_eq!(told, ["Running=False MigrationCompleted", "Succeeded=True Done"]);
        assert!(is_young(&migration, now) && !is_young(&migration, now + YOUNG));
    }
}
