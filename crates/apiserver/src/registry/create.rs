//! Create.

use super::addresses::holds_addresses;
use super::checks::{self, Sent};
use super::stored::Written;
use super::update::CHARGE_ATTEMPTS;
use super::{Registry, Write, WriteStep, metadata, store_status, stored};
use crate::admission::{Attributes, Charges, Operation};
use crate::auth::{Grant, check_escalation, check_param_access, settled};
use crate::managed;
use ferrite_api::Status;
use ferrite_api::meta;
use ferrite_api::resource::Resource;
use ferrite_component::steps::Timer;
use ferrite_json::Value;
use ferrite_store::{Compare, Entry, Lease, LeaseId, Op, Outcome, Txn};
use jiff::Timestamp;
use std::sync::Arc;

/// Attempts to find a free generated name, as upstream.
const GENERATE_ATTEMPTS: usize = 8;
const QUOTA_CONTENDED: &str = "too many others use the same quota at once; try again";
const ADDRESS_TAKEN: &str = "another server has just given the address away; try again";

/// The name is another object's, which may be on its way out.
fn taken(resource: &Resource, name: &str, entry: &Entry) -> Status {
    let mut status = Status::already_exists(&resource.group, &resource.plural, name);
    if stored::decode(resource, entry).is_some_and(|existing| meta::is_deleting(&existing)) {
        status.message = format!("object is being deleted: {}", status.message);
    }
    status
}

fn grant<'a>(write: &Write<'a>, new: &'a Value) -> Grant<'a> {
    Grant {
        user: write.user,
        resource: write.resource,
        namespace: write.namespace,
        requested: write.requested,
        old: None,
        new,
    }
}

/// The write that makes an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Object,
    /// An apply, which has written managedFields.
    Apply,
    /// An update of the status of an object that does not exist.
    Status,
}

impl Origin {
    fn subresource(self) -> Option<&'static str> {
        (self == Self::Status).then_some("status")
    }
}

impl Registry {
    /// Creates an object that has been decoded. Returns it as stored, or as it would be.
    pub async fn create(&self, write: &Write<'_>, object: Value) -> Result<Written, Status> {
        self.create_with(write, object, Origin::Object).await
    }

    /// As [`Registry::create`], for an object whose managedFields an apply has written.
    pub async fn create_applied(&self, write: &Write<'_>, object: Value) -> Result<Written, Status> {
        self.create_with(write, object, Origin::Apply).await
    }

    /// As [`Registry::create`], for an update of the status of a kind that updates create. As upstream: such an object gets
    /// no addresses.
    pub async fn create_by_status(&self, write: &Write<'_>, object: Value) -> Result<Written, Status> {
        self.create_with(write, object, Origin::Status).await
    }

    async fn create_with(&self, write: &Write<'_>, object: Value, origin: Origin) -> Result<Written, Status> {
        let generate = meta::str(&object, "generateName").to_owned();
        if !meta::name(&object).is_empty() || generate.is_empty() {
            return self.create_named(write, object, origin, None).await;
        }
        if !write.resource.strategy.supports_generate_name() {
            let mut object = object;
            meta::set_str(&mut object, "name", &generate);
            return self.create_named(write, object, origin, None).await;
        }
        let mut last = None;
        for _ in 0..GENERATE_ATTEMPTS {
            let mut object = object.clone();
            meta::set_str(&mut object, "name", &metadata::generate_name(&generate));
            match self.create_named(write, object, origin, Some(&generate)).await {
                Err(status) if status.reason == "AlreadyExists" => last = Some(status),
                other => return other,
            }
        }
        Err(last.unwrap_or_else(|| Status::internal("no name was generated")))
    }

    /// `drawn` is the prefix of a generated name, if the client gave none.
    async fn create_named(
        &self,
        write: &Write<'_>,
        mut object: Value,
        origin: Origin,
        drawn: Option<&str>,
    ) -> Result<Written, Status> {
        let resource = write.resource;
        let strategy = &resource.strategy;
        let timer = Timer::start();
        let now = Timestamp::now();
        let given = meta::namespace(&object);
        if resource.is_namespaced() && !given.is_empty() && given != write.namespace {
            return Err(Status::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        if resource.custom.as_ref().is_some_and(|custom| custom.kind.terminating) {
            let why = "create not allowed while custom resource definition is terminating";
            return Err(Status::forbidden(&resource.group, &resource.plural, meta::name(&object), why));
        }
        if !resource.is_namespaced() && !given.is_empty() {
            // As upstream: an object without a namespace is one whatever the client says.
            meta::metadata_mut(&mut object).remove("namespace");
        }
        let versioned = meta::str(&object, "resourceVersion").parse().is_ok_and(|version: u64| version != 0);
        let sent = Sent::take(resource, &mut object);
        let unlabelled = object.pointer("/metadata/labels").is_none();
        if drawn.is_some() {
            // As upstream: defaults come before names are drawn.
            let name = meta::name(&object).to_owned();
            meta::metadata_mut(&mut object).remove("name");
            strategy.default(&mut object);
            meta::set_str(&mut object, "name", &name);
        } else {
            strategy.default(&mut object);
        }
        metadata::stamp_new(resource, &mut object, write.namespace, now);
        metadata::merge_owners(&mut object, &write.options.warnings, metadata::OWNERS_GIVEN);
        if origin != Origin::Apply {
            managed::on_write(resource, None, &mut object, write.options, origin.subresource(), now);
        }

        let view = self.view();
        let name = meta::name(&object).to_owned();
        let key = stored::key(resource, write.namespace, &name);
        if drawn.is_some()
            && let Some(entry) = view.snapshot.get(key.as_bytes())
        {
            // Another name is drawn. Nobody is asked about one that is taken.
            return Err(taken(resource, &name, entry));
        }
        let attributes = Attributes {
            operation: Operation::Create,
            resource,
            subresource: origin.subresource(),
            namespace: write.namespace,
            name: &name,
            unnamed: false,
            user: write.user,
            old: None,
            options: write.options,
            rbac: &self.rbac,
        };
        // As upstream: mutating admission runs before names are generated, and sees only the prefix.
        let unnamed = Attributes { name: drawn.unwrap_or(&name), unnamed: drawn.is_some(), ..attributes };
        let renamed;
        let (mut attributes, mut key, mut name) = (attributes, key, name.as_str());
        if self.admission.mutate(&view, &unnamed, &mut object).await? {
            // As upstream: a webhook or a policy may give the object another name, but not another place.
            let given = meta::namespace(&object);
            if resource.is_namespaced() && !given.is_empty() && given != write.namespace {
                return Err(Status::bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request",
                ));
            }
            renamed = meta::name(&object).to_owned();
            name = &renamed;
            key = stored::key(resource, write.namespace, name);
            attributes = Attributes { name, ..attributes };
        }
        settled(&self.rbac, || check_escalation(&self.rbac, &view, &grant(write, &object))).await?;
        // Has no effect if admission has changed nothing. Values that admission sets are complete: they
        // need no defaults.
        metadata::merge_owners(&mut object, &write.options.warnings, metadata::OWNERS_ADMITTED);
        self.drop_disabled(resource, &mut object, None);
        strategy.prepare_create(&mut object);
        if unlabelled {
            strategy.complete_default_labels(&mut object);
        }
        let prepared;
        if meta::name(&object) != name {
            // The object had no name, and its kind gave it one.
            prepared = meta::name(&object).to_owned();
            name = &prepared;
            key = stored::key(resource, write.namespace, name);
            attributes = Attributes { name, ..attributes };
        }
        let allocation = match origin {
            Origin::Status => super::allocator::Allocation::none(),
            _ => self.services.allocate(&view, resource, &mut object, None, write.options.dry_run)?,
        };
        super::normalise(resource, &mut object);
        super::check_depth(&object)?;
        let mut errors = sent.errors(&object, |object| checks::of_new(resource, object));
        let needed = strategy.needed_namespace_label(&object, None, None);
        errors.splice(0..0, checks::of_namespace(&view, write.namespace, needed));
        if !errors.is_empty() {
            return Err(metadata::invalid(resource, name, &errors));
        }
        let param_access = || check_param_access(&self.rbac, &view, &grant(write, &object));
        if let Some(error) = settled(&self.rbac, param_access).await {
            return Err(metadata::invalid(resource, name, &[error]));
        }
        let warnings = strategy.warnings_on_create(&object).into_iter().chain(self.inert_warning(resource));
        warnings.for_each(|w| write.options.warnings.add(w));
        self.admission.validate(&view, &attributes, Some(&object)).await?;
        let mut charges = self.admission.charge(&view, &attributes, &object)?;

        if write.options.dry_run {
            return match view.snapshot.get(key.as_bytes()) {
                Some(entry) => Err(taken(resource, name, entry)),
                None => Ok(Written::from(object).reread(resource)),
            };
        }
        if versioned && origin != Origin::Apply {
            // As upstream: it is the store that refuses, and it has no words for a client.
            return Err(Status::new(500, "", "resourceVersion should not be set on objects to be created"));
        }
        let lease = self.lease_for(resource, now).await?;
        let encoded = self.encode(resource, &object).await?;
        super::check_size(&encoded.value, 0)?;
        let outrun = |why| Status::conflict(&resource.group, &resource.plural, name, why);
        // Drop the object before waiting for the commit: the thread that allocated it frees it while it is
        // in cache.
        let needed = !write.copied || holds_addresses(resource) || !charges.is_empty();
        let uid = meta::uid(&object).to_owned();
        let object = Some(object).filter(|_| needed);
        let admitted = timer.elapsed();
        // The store changes its maps in place where nobody holds a snapshot of them.
        drop(view);
        for _ in 0..CHARGE_ATTEMPTS {
            let put = Op::Put { key: key.clone(), value: encoded.value.clone(), lease };
            let txn = Txn::default().when(Compare::Absent(key.clone())).then(put);
            let txn = charges.onto(self.with_addresses(resource, txn, None, object.as_ref()));
            if let Outcome::Committed { revision } = self.commit(resource, "create", txn).await? {
                allocation.keep();
                self.record(write, WriteStep { verb: "create", name, uid: &uid, timer, admitted, revision });
                let object = object.map(|mut object| {
                    stored::set_version(&mut object, revision);
                    Arc::new(object)
                });
                return Ok(Written::stored(object, encoded, revision).reread(resource));
            }
            // Somebody else has taken the name, the address, or of the same quota.
            let view = self.view();
            if let Some(entry) = view.snapshot.get(key.as_bytes()) {
                return Err(taken(resource, name, entry));
            }
            charges = match &object {
                Some(object) if holds_addresses(resource) && self.lost_address(object) => {
                    return Err(outrun(ADDRESS_TAKEN));
                }
                Some(object) => self.admission.charge(&view, &attributes, object)?,
                None => Charges::default(),
            };
        }
        Err(outrun(QUOTA_CONTENDED))
    }

    /// Events do not stay for ever: those written within one minute share a lease.
    pub(super) async fn lease_for(&self, resource: &Resource, now: Timestamp) -> Result<LeaseId, Status> {
        const SHARED_FOR: u64 = 60;
        if !resource.hooks.ttl {
            return Ok(LeaseId::NONE);
        }
        let now = u64::try_from(now.as_second()).unwrap_or(0);
        let mut current = self.event_lease.lock().await;
        if let Some(lease) = *current
            && lease.expires_at >= now + self.event_ttl
        {
            return Ok(lease.id);
        }
        let expires_at = now + self.event_ttl + SHARED_FOR;
        let id = self.store.grant(expires_at).await.map_err(store_status)?;
        *current = Some(Lease { id, expires_at });
        Ok(id)
    }
}
