//! Update and patch: one loop that reads, changes, checks and swaps.

use super::checks::{self, Sent};
use super::delete::held_by_spec;
use super::stored::Written;
use super::{Registry, Write, WriteStep, metadata, stored, unreadable};
use crate::admission::{Attributes, Operation};
use crate::auth::{
    Grant, check_claim_status, check_escalation, check_param_access, check_pod_certificate_status, settled,
};
use crate::managed::{Conversions, Recorded};
use ferrite_api::field::{FieldError, Path};
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_component::steps::Timer;
use ferrite_json::Value;
use ferrite_store::{Compare, Entry, Op, Outcome, Txn};
use jiff::Timestamp;
use std::cell::RefCell;
use std::sync::Arc;

/// Makes the new object from the stored one. Called again when another writer was faster.
pub(crate) type Change<'a> = &'a (dyn Fn(&Value) -> Result<Value, Status> + Send + Sync);

/// An update of an object or one of its subresources.
pub(crate) struct Update<'a> {
    pub write: Write<'a>,
    pub name: &'a str,
    /// `status` and others follow rules of their own.
    pub subresource: Option<&'a str>,
    pub change: Change<'a>,
    /// The client has sent the whole object: its UID is a precondition, where a patch may not change it.
    pub replaces: bool,
    /// The change has already brought managedFields up to date (server-side apply), with these conversions.
    pub applied: Option<&'a Conversions<'a>>,
}

/// An update is tried again this often when others write the same object.
const ATTEMPTS: usize = 16;
/// Attempts of a write while others change its quota: in each round one of them succeeds.
pub(super) const CHARGE_ATTEMPTS: usize = 256;
const CONFLICT: &str =
    "the object has been modified; please apply your changes to the latest version and try again";

/// The error of an update without an object: a client that replaces an object by its UID means another one.
fn missing(update: &Update<'_>) -> Status {
    let resource = update.write.resource;
    let creates = resource.strategy.create_on_update();
    let given = if update.replaces && creates { (update.change)(&Value::Null) } else { Ok(Value::Null) };
    given
        .and_then(|new| check_uid(update, &new, ""))
        .err()
        .unwrap_or_else(|| Status::not_found(&resource.group, &resource.plural, update.name))
}

/// The UID of a whole object is a precondition.
fn check_uid(update: &Update<'_>, new: &Value, stored_uid: &str) -> Result<(), Status> {
    let (resource, uid) = (update.write.resource, meta::uid(new));
    if uid.is_empty() || uid == stored_uid {
        return Ok(());
    }
    Err(precondition_failed(resource, update.write.namespace, update.name, "UID", uid, stored_uid))
}

/// The refusal of a write whose UID or version is not that of the stored object.
pub(crate) fn precondition_failed(
    resource: &Resource,
    namespace: &str,
    name: &str,
    what: &str,
    given: &str,
    stored: &str,
) -> Status {
    let key = stored::key(resource, namespace, name);
    let why = format!(
        "StorageError: invalid object, Code: 4, Key: {}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: {what} in precondition: {given}, {what} in object meta: {stored}",
        String::from_utf8_lossy(key.as_bytes()),
    );
    Status::conflict(&resource.group, &resource.plural, name, &why)
}

impl Registry {
    /// Changes a stored object. Returns it as stored, or as it would be.
    pub async fn update(&self, update: &Update<'_>) -> Result<Written, Status> {
        let resource = update.write.resource;
        let key = stored::key(resource, update.write.namespace, update.name);
        let timer = Timer::start();
        for _ in 0..ATTEMPTS {
            let view = self.view();
            let Some(entry) = view.snapshot.get(key.as_bytes()).cloned() else { return Err(missing(update)) };
            self.check_readable(&key, &entry)?;
            let shown = self.converter.entry(resource, &entry).await?;
            let old = self.recent.take_or_decode(resource, &key, &shown);
            let old = old.ok_or_else(|| unreadable(resource, update.name))?;
            let mut new = match update.applied {
                None => (update.change)(&old)?,
                Some(all) => Box::pin(all.settle(&self.converter, || (update.change)(&old))).await??,
            };
            self.check_preconditions(update, &new, &old)?;
            let attributes = self.update_attributes(update, &old);
            let allocation = self.prepare(update, &view, &attributes, &mut new, &old).await?;
            let mut charges = self.admission.charge(&view, &attributes, &new)?;
            if same(&new, &old) {
                if !self.store.is_stale(&key, &entry) && !self.is_outdated(resource, &entry, &old).await? {
                    // As upstream: nothing changes, so nothing is written and the resource version stays. What is stored
                    // with an old key or in an old form is written anew all the same.
                    return Ok(old.into());
                }
                // Nobody has changed it: its managers wrote when they wrote.
                new.clone_from(&old);
            }
            if update.write.options.dry_run {
                return Ok(Written::from(new).reread(resource));
            }
            let finished = is_finished(resource, &new);
            let encoded = self.encode(resource, &new).await?;
            super::check_size(&encoded.value, entry.value.len())?;
            let op = if finished {
                Op::Delete { key: key.clone() }
            } else {
                Op::Put { key: key.clone(), value: encoded.value.clone(), lease: entry.lease }
            };
            let mut txn = Txn::default().when(Compare::ModifiedAt(key.clone(), entry.modified)).then(op);
            let is_heartbeat = update.subresource.is_none() && resource.strategy.is_heartbeat(&new, &old);
            if is_heartbeat {
                txn = txn.relaxed();
            }
            let admitted = timer.elapsed();
            let mut txn = self.with_addresses(resource, txn, Some(&old), (!finished).then_some(&new));
            // Needed again only where a quota is charged.
            let uncharged = (!charges.is_empty()).then(|| (txn.clone(), Arc::clone(&old)));
            // The store changes its maps in place where nobody holds a snapshot of them, and an object is freed best by
            // the thread that has just read it.
            drop((view, old));
            for _ in 0..CHARGE_ATTEMPTS {
                let charged = charges.onto(txn);
                if let Outcome::Committed { revision } = self.commit(resource, "update", charged).await? {
                    allocation.keep();
                    if !is_heartbeat {
                        let (verb, name) = (verb_of(update.subresource), update.name);
                        let uid = meta::uid(&new);
                        self.record(&update.write, WriteStep { verb, name, uid, timer, admitted, revision });
                    }
                    stored::set_version(&mut new, revision);
                    let new = Arc::new(new);
                    if !finished {
                        self.recent.keep(resource, &key, &encoded.value, revision, &new);
                    }
                    return Ok(Written::stored(Some(new), encoded, revision).reread(resource));
                }
                // Another writer was faster. The change is made again on the present object; one that names
                // a version then fails its precondition.
                let now = self.view();
                let found = now.snapshot.get(key.as_bytes()).map(|entry| entry.modified);
                let Some((uncharged, old)) = &uncharged else { break };
                if found != Some(entry.modified) {
                    break;
                }
                // Only the quota has changed: nobody is asked again about the same object.
                txn = uncharged.clone();
                charges = self.admission.charge(&now, &self.update_attributes(update, old), &new)?;
            }
        }
        Err(Status::conflict(&resource.group, &resource.plural, update.name, CONFLICT))
    }

    /// True if an object is stored in another form than it would be written in now. Definitions of custom kinds
    /// change: the version that is stored, fields that are pruned, defaults.
    async fn is_outdated(&self, resource: &Resource, entry: &Entry, object: &Value) -> Result<bool, Status> {
        if resource.custom.is_none() {
            return Ok(false);
        }
        let encoded = self.encode(resource, object).await?;
        let read = |text: &[u8]| ferrite_json::from_slice::<Value>(text).ok();
        Ok(encoded.value != *entry.plain() && read(&encoded.value) != read(entry.plain()))
    }

    /// Checks name, UID and resource version.
    fn check_preconditions(&self, update: &Update<'_>, new: &Value, old: &Value) -> Result<(), Status> {
        let resource = update.write.resource;
        let conflict = |why: &str| Status::conflict(&resource.group, &resource.plural, update.name, why);
        metadata::check_name(new, update.name)?;
        let namespace = meta::namespace(new);
        if resource.is_namespaced() && !namespace.is_empty() && namespace != update.write.namespace {
            return Err(Status::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        if update.replaces {
            check_uid(update, new, meta::uid(old))?;
        }
        let version = meta::str(new, "resourceVersion");
        if version.is_empty() || version == "0" {
            if !resource.strategy.unconditional_update() {
                let path = Path::new("metadata").child("resourceVersion");
                let error = FieldError::invalid(&path, 0, "must be specified for an update");
                // As upstream: this refusal names the resource where others name the kind.
                return Err(Status::invalid(&resource.group, &resource.plural, update.name, &[error]));
            }
            return Ok(());
        }
        if let Err(why) = crate::options::parse_uint(version) {
            return Err(Status::new(500, "", why.to_string()));
        }
        if version != meta::str(old, "resourceVersion") {
            return Err(conflict(CONFLICT));
        }
        Ok(())
    }

    fn update_attributes<'a>(&'a self, update: &Update<'a>, old: &'a Value) -> Attributes<'a> {
        Attributes {
            operation: Operation::Update,
            resource: update.write.resource,
            subresource: update.subresource,
            namespace: update.write.namespace,
            name: update.name,
            unnamed: false,
            user: update.write.user,
            old: Some(old),
            options: update.write.options,
            rbac: &self.rbac,
        }
    }

    /// Prepares the new object for storage, and validates it.
    async fn prepare(
        &self,
        update: &Update<'_>,
        view: &super::View,
        attributes: &Attributes<'_>,
        new: &mut Value,
        old: &Value,
    ) -> Result<super::allocator::Allocation<'_>, Status> {
        let resource = update.write.resource;
        let strategy = &resource.strategy;
        let now = Timestamp::now();
        // An empty list means something here, and is lost in the form that objects are stored in.
        let given = new.pointer("/metadata/managedFields").and_then(Value::as_array);
        let forgets_managers = given.is_some_and(|entries| entries.is_empty());
        let is_status = update.subresource == Some("status");
        let sent = match is_status {
            true => beside_spec(new, old, |new| Sent::take(resource, new)),
            false => Sent::take(resource, new),
        };
        strategy.default(new);
        metadata::keep_identity(new, old);
        let warnings = &update.write.options.warnings;
        metadata::merge_owners(new, warnings, metadata::OWNERS_GIVEN);
        if update.applied.is_none() && update.subresource != Some("binding") {
            if forgets_managers {
                meta::metadata_mut(new).insert("managedFields", Value::Array(Vec::new()));
            }
            let (options, subresource) = (update.write.options, update.subresource);
            let recorded = Recorded { resource, options, subresource, now };
            Box::pin(recorded.on_update(&self.converter, old, new)).await;
        }
        let prepare = |new: &mut Value| match update.subresource {
            None => {
                self.drop_disabled(resource, new, Some(old));
                strategy.prepare_update(new, old);
            }
            Some("status") => strategy.prepare_status_update(new, old),
            Some(subresource) => strategy.prepare_subresource_update(subresource, new, old),
        };
        prepare(new);
        if self.admission.mutate(view, attributes, new).await? {
            // As upstream: a webhook or a policy changes no more than the client could.
            metadata::check_name(new, update.name)?;
            metadata::keep_identity(new, old);
            metadata::merge_owners(new, warnings, metadata::OWNERS_ADMITTED);
            prepare(new);
        }
        let Write { user, namespace, .. } = update.write;
        let grant = Grant { user, resource, namespace, requested: update.name, old: Some(old), new };
        settled(&self.rbac, || check_escalation(&self.rbac, view, &grant)).await?;
        let allocation = match update.subresource {
            None => {
                let dry_run = update.write.options.dry_run;
                self.services.allocate(view, resource, new, Some(old), dry_run)?
            }
            Some(_) => super::allocator::Allocation::none(),
        };
        let finish = |new: &mut Value| {
            super::normalise(resource, new);
            super::check_depth(new)
        };
        let finished = if is_status { beside_spec(new, old, finish) } else { finish(new) };
        finished?;
        // As upstream: status is not part of the desired state, and where a pod runs is not the client's
        // wish.
        if !matches!(update.subresource, Some("status" | "binding")) {
            metadata::bump_generation(resource, new, old);
        }
        let (mut errors, of_validation) = {
            let told = RefCell::new(Vec::new());
            let change = |new: &Value| {
                checks::of_change(resource, update.subresource, new, old, &mut told.borrow_mut())
            };
            (sent.errors(new, change), told.into_inner())
        };
        if !update.replaces && update.applied.is_none() && update.subresource.is_none() {
            let mut of_patch = strategy.validate_patch(new);
            of_patch.retain(|error| !errors.iter().any(|other| other.path == error.path));
            errors.extend(of_patch);
        }
        if update.subresource == Some("status") {
            let grant = Grant { user, resource, namespace, requested: update.name, old: Some(old), new };
            let verb = if update.replaces { "update" } else { "patch" };
            let refused = || check_claim_status(&self.rbac, view, &grant, verb);
            errors.splice(0..0, settled(&self.rbac, refused).await);
        }
        let needed = strategy.needed_namespace_label(new, Some(old), update.subresource);
        errors.splice(0..0, checks::of_namespace(view, namespace, needed));
        if !errors.is_empty() {
            return Err(metadata::invalid(resource, update.name, &errors));
        }
        if update.subresource == Some("status") {
            let grant = Grant { user, resource, namespace, requested: update.name, old: Some(old), new };
            let refused = || check_pod_certificate_status(&self.rbac, view, &grant);
            if let Some(error) = settled(&self.rbac, refused).await {
                return Err(metadata::invalid(resource, update.name, &[error]));
            }
        }
        if update.subresource.is_none() {
            let grant = Grant { user, resource, namespace, requested: update.name, old: Some(old), new };
            let param_access = || check_param_access(&self.rbac, view, &grant);
            if let Some(error) = settled(&self.rbac, param_access).await {
                return Err(metadata::invalid(resource, update.name, &[error]));
            }
            let told = strategy.warnings_on_update(new, old).into_iter();
            told.chain(of_validation).chain(self.inert_warning(resource)).for_each(|w| warnings.add(w));
        }
        self.admission.validate(view, attributes, Some(new)).await?;
        Ok(allocation)
    }
}

/// Does work on a changed object that gives each part the form in which it is stored. A specification that is the stored
/// one has that form already, and is put aside meanwhile.
pub(crate) fn beside_spec<T>(new: &mut Value, old: &Value, work: impl FnOnce(&mut Value) -> T) -> T {
    const SPEC: &str = "spec";
    let stored = old.get(SPEC);
    let spec = new.as_object_mut().filter(|map| stored.is_some() && map.get(SPEC) == stored);
    let spec = spec.and_then(|map| map.remove(SPEC));
    let result = work(new);
    if let (Some(spec), Some(map)) = (spec, new.as_object_mut()) {
        map.insert(SPEC, spec);
    }
    result
}

/// The name of the step in the object's life.
fn verb_of(subresource: Option<&str>) -> &'static str {
    match subresource {
        None => "update",
        Some("status") => "update status",
        Some("binding") => "bind",
        Some(_) => "update part",
    }
}

/// Returns true if nothing holds a deleted object any more.
fn is_finished(resource: &Resource, object: &Value) -> bool {
    let held = meta::finalizers(object).next().is_some() || held_by_spec(resource, object);
    let grace = object.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(0);
    meta::is_deleting(object) && grace == 0 && !held
}

/// Equal but for when managers last wrote, as upstream decides that an update is none.
fn same(new: &Value, old: &Value) -> bool {
    let same_manager = |new: &Value, old: &Value| same_but(new, old, "time", |_, new, old| new == old);
    let same_managers = |new: &Value, old: &Value| match (new, old) {
        (Value::Array(new), Value::Array(old)) => {
            new.len() == old.len() && new.iter().zip(old).all(|(new, old)| same_manager(new, old))
        }
        _ => new == old,
    };
    let same_metadata = |new: &Value, old: &Value| {
        same_but(new, old, "resourceVersion", |key, new, old| match key {
            "managedFields" => same_managers(new, old),
            _ => new == old,
        })
    };
    same_but(new, old, "", |key, new, old| match key {
        "metadata" => same_metadata(new, old),
        _ => new == old,
    })
}

/// Returns true if two values have the same members except one.
fn same_but(new: &Value, old: &Value, ignored: &str, same: impl Fn(&str, &Value, &Value) -> bool) -> bool {
    let (Value::Object(new), Value::Object(old)) = (new, old) else { return new == old };
    let count = |map: &ferrite_json::Map| map.len() - usize::from(map.contains_key(ignored));
    count(new) == count(old)
        && new
            .iter()
            .filter(|(key, _)| *key != ignored)
            .all(|(key, new)| old.get(key).is_some_and(|old| same(key, new, old)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_specification_that_is_stored_is_put_aside() {
        let old = json!({"spec": {"a": 1}, "status": {"b": 1}});
        let changed = json!({"spec": {"a": 2}, "status": {"b": 2}});
        for (mut new, seen) in [
            (json!({"spec": {"a": 1}, "status": {"b": 2}}), json!({"status": {"b": 2}})),
            (changed.clone(), changed),
            (json!({"status": {"b": 2}}), json!({"status": {"b": 2}})),
        ] {
            let before = new.clone();
            assert_eq!(beside_spec(&mut new, &old, |new| new.clone()), seen);
            assert_eq!(new, before);
        }
        let mut new = old.clone();
        // A kind whose specification is always written.
        beside_spec(&mut new, &old, |new| new["spec"] = json!({}));
        assert_eq!(new, old);
    }

    #[test]
    fn when_managers_wrote_and_the_version_make_no_difference() {
        let pod = |version: &str, time: &str, manager: &str, node: &str| {
            json!({
                "kind": "Pod",
                "metadata": {
                    "name": "a", "resourceVersion": version,
                    "managedFields": [{"manager": manager, "time": time}],
                },
                "spec": {"nodeName": node},
            })
        };
        let old = pod("1", "then", "m", "n");
        assert!(same(&pod("2", "now", "m", "n"), &old));
        assert!(!same(&pod("1", "then", "other", "n"), &old));
        assert!(!same(&pod("1", "then", "m", "other"), &old));
        let without = |pointer: &str, key: &str| {
            let mut object = old.clone();
            object.pointer_mut(pointer).unwrap().as_object_mut().unwrap().remove(key);
            object
        };
        for (pointer, key, is_same) in [
            ("/metadata", "resourceVersion", true),
            ("/metadata/managedFields/0", "time", true),
            ("/metadata/managedFields/0", "manager", false),
            ("/metadata", "managedFields", false),
            ("/metadata", "name", false),
            ("", "spec", false),
            ("", "metadata", false),
        ] {
            let object = without(pointer, key);
            assert_eq!((same(&object, &old), same(&old, &object)), (is_same, is_same), "{pointer} {key}");
        }
    }
}
