//! Writes the objects of a resource anew, in the version in which it is stored now, as StorageVersionMigrations ask.
//!
//! A resource is migrated once at a time, by the oldest of its migrations that wait. A migration goes through its
//! status: Running, then the resource version up to which objects are old, then Succeeded or Failed. Each step is one
//! write, so that a manager that starts in between goes on with the next one.

mod decide;
mod definition;
mod rewrite;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{Api, Controller, Informer, RateLimits};
use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
use kube::Client;
use kube::api::PostParams;

use crate::Context;
use crate::discovery::{self, Served};
use crate::error::{During, SyncError};
use decide::{FAILED, RUNNING, SUCCEEDED, Step, is_young, next_step, set_condition};
use rewrite::Outcome;

const NAME: &str = "storage-version-migrator-controller";
/// The manager of the conditions of definitions.
const RUNNER: &str = "migration-runner-controller";
/// Index of migrations by the resource that they are for.
const BY_RESOURCE: &str = "resource";
/// A resource without these verbs cannot be migrated.
const VERBS: [&str; 3] = ["update", "patch", "list"];
/// Delay before a resource that is not served yet is looked for again.
const ABSENT: Duration = Duration::from_secs(5);

/// A resource of any version, as `resource.group`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct GroupResource {
    group: String,
    resource: String,
}

impl GroupResource {
    fn of(migration: &StorageVersionMigration) -> Self {
        let of = migration.spec.as_ref().map(|spec| spec.resource.clone()).unwrap_or_default();
        Self { group: of.group, resource: of.resource }
    }
}

impl fmt::Display for GroupResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.resource, self.group)
    }
}

struct Migrator {
    client: Client,
    migrations: Informer<StorageVersionMigration>,
}

pub(crate) fn start(context: &Context) {
    let migrations: Informer<StorageVersionMigration> = context.informers.get();
    migrations.add_index(BY_RESOURCE, |migration| vec![GroupResource::of(migration).to_string()]);
    let migrator = Migrator { client: context.client.clone(), migrations: migrations.clone() };
    let kit: Controller<GroupResource> = context.declared(NAME, context.workers(NAME), RateLimits::default());
    kit.watches(&migrations, |change, queue| queue.add(GroupResource::of(change.object())))
        .run_with(Arc::new(migrator), |migrator, resource| async move { migrator.sync(&resource).await });
}

impl Migrator {
    /// Takes one step. Its write wakes the next one.
    async fn sync(&self, resource: &GroupResource) -> Result<Option<Duration>, SyncError> {
        let known = self.migrations.by_index(BY_RESOURCE, &resource.to_string());
        match next_step(&known) {
            None => Ok(None),
            Some(Step::Promote(migration)) => {
                definition::mark_running(&self.client, resource, &name_of(migration)).await?;
                self.conclude(migration, RUNNING, "MigrationRunning", "The migration is running").await
            }
            Some(Step::Migrate(migration)) => self.migrate(resource, migration).await,
            Some(Step::Finish(migration)) => {
                let has_succeeded = decide::is_true(migration, SUCCEEDED);
                definition::mark_finished(&self.client, resource, has_succeeded).await?;
                let mut finished = migration.clone();
                decide::end_running(&mut finished, jiff::Timestamp::now());
                self.write_status(&finished).await
            }
        }
    }

    async fn migrate(
        &self,
        resource: &GroupResource,
        migration: &StorageVersionMigration,
    ) -> Result<Option<Duration>, SyncError> {
        let found = discovery::discover(&self.client).await?;
        let is_it = |served: &&Served| {
            served.resource.group == resource.group && served.resource.plural == resource.resource
        };
        let Some(served) = found.served.iter().find(is_it) else {
            if found.is_stale(&resource.group) {
                return Err(SyncError::Other(format!("{resource} cannot be discovered at present")));
            }
            if is_young(migration, jiff::Timestamp::now()) {
                return Ok(Some(ABSENT));
            }
            return self.fail(migration, "resource does not exist in discovery").await;
        };
        let until = migration.status.as_ref().and_then(|status| status.resource_version.as_deref());
        match until.filter(|version| !version.is_empty()) {
            None => self.note_version(migration, served).await,
            Some(until) => match rewrite::rewrite(&self.client, served, until).await? {
                Outcome::Done => {
                    self.conclude(migration, SUCCEEDED, "StorageVersionMigrationSucceeded", "").await
                }
                Outcome::Refused(why) => {
                    self.fail(migration, &format!("migration encountered unhandled error: {why}")).await
                }
            },
        }
    }

    /// Writes down the version of the store: objects that change later are stored in the new form anyway.
    async fn note_version(
        &self,
        migration: &StorageVersionMigration,
        served: &Served,
    ) -> Result<Option<Duration>, SyncError> {
        if !served.can(&VERBS) {
            let of = &served.resource;
            let what = format!("{}/{}, Resource={}", of.group, of.version, of.plural);
            let why =
                format!("resource {what:?} does not support discovery operations: [{}]", VERBS.join(" "));
            return self.fail(migration, &why).await;
        }
        let mut noted = migration.clone();
        noted.status.get_or_insert_default().resource_version =
            Some(rewrite::current_version(&self.client, served).await?);
        self.write_status(&noted).await
    }

    async fn fail(
        &self,
        migration: &StorageVersionMigration,
        why: &str,
    ) -> Result<Option<Duration>, SyncError> {
        self.conclude(migration, FAILED, "StorageVersionMigrationFailed", why).await
    }

    async fn conclude(
        &self,
        migration: &StorageVersionMigration,
        condition: &str,
        reason: &str,
        message: &str,
    ) -> Result<Option<Duration>, SyncError> {
        let mut concluded = migration.clone();
        set_condition(&mut concluded, condition, reason, message, jiff::Timestamp::now());
        self.write_status(&concluded).await
    }

    /// A conflict is an error: the migration has changed, and is looked at again.
    async fn write_status(&self, migration: &StorageVersionMigration) -> Result<Option<Duration>, SyncError> {
        let name = name_of(migration);
        let api: Api<StorageVersionMigration> = Api::all(self.client.clone());
        match api.replace_status(&name, &PostParams::default(), migration).await {
            Ok(_) => Ok(None),
            Err(error) if ferrite_client::is_not_found(&error) => Ok(None),
            Err(error) => Err(error).during(|| format!("write the status of the migration {name}")),
        }
    }
}

fn name_of(migration: &StorageVersionMigration) -> String {
    migration.metadata.name.clone().unwrap_or_default()
}
