//! Delete: at once, gracefully, or held by finalizers.

use super::stored::Written;
use super::{Registry, Write, WriteStep, metadata, stored, unreadable};
use crate::admission::{Attributes, Operation};
use crate::options::{DeleteOptions, Propagation};
use ferrite_api::resource::{Deletion, Resource};
use ferrite_api::{Status, meta};
use ferrite_component::steps::Timer;
use ferrite_json::Value;
use ferrite_store::{Compare, Op, Outcome, Txn};
use jiff::{SignedDuration, Timestamp};
use std::sync::Arc;

/// The result of a delete.
pub(crate) enum Deleted {
    /// It is gone. The last state is answered.
    Gone(Written),
    /// It is marked and stays until its agent confirms or its finalizers are removed.
    Marked(Written),
}

const ORPHAN: &str = "orphan";
const FOREGROUND: &str = "foregroundDeletion";
const ATTEMPTS: usize = 16;

impl Registry {
    pub async fn delete(
        &self,
        write: &Write<'_>,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<Deleted, Status> {
        let resource = write.resource;
        let key = stored::key(resource, write.namespace, name);
        let timer = Timer::start();
        if options.propagation.is_none()
            && let Some(warning) = resource.strategy.deletion_warning()
        {
            write.options.warnings.add(warning);
        }
        // The object as this request marked it. If another request then removes it, this one is complete:
        // it is no error.
        let mut marked_here: Option<(Written, String)> = None;
        // The state that admission has accepted: it is asked again only about another.
        let mut admitted = None;
        for _ in 0..ATTEMPTS {
            let view = self.view();
            let found = view.snapshot.get(key.as_bytes()).cloned();
            let Some(entry) = found else {
                return match marked_here {
                    Some((marked, _)) => Ok(Deleted::Gone(marked)),
                    None => Err(Status::not_found(&resource.group, &resource.plural, name)),
                };
            };
            self.check_readable(&key, &entry)?;
            let shown = self.converter.entry(resource, &entry).await?;
            let old = self.recent.take_or_decode(resource, &key, &shown);
            let old = old.ok_or_else(|| unreadable(resource, name))?;
            if let Some((marked, _)) = marked_here.take_if(|(_, uid)| *uid != meta::uid(&old)) {
                // Another object took the name since: the one that was to go is gone.
                return Ok(Deleted::Gone(marked));
            }
            if marked_here.is_none() {
                check_delete_preconditions(resource, name, options, &old)?;
            }
            let attributes = Attributes {
                operation: Operation::Delete,
                resource,
                subresource: None,
                namespace: write.namespace,
                name,
                unnamed: write.requested.is_empty(),
                user: write.user,
                old: Some(&old),
                options: write.options,
                rbac: &self.rbac,
            };
            if admitted != Some(entry.modified) {
                self.admission.admit_delete(&view, &attributes).await?;
                admitted = Some(entry.modified);
            }
            // The store changes its maps in place where nobody holds a snapshot of them.
            drop(view);
            let step = decide(resource, &old, options, Timestamp::now());
            let mut encoded = None;
            let op = match &step {
                Step::Remove => Op::Delete { key: key.clone() },
                Step::Mark(new) | Step::MarkAndRemove(new) => {
                    let encoded = encoded.insert(self.encode(resource, new).await?);
                    Op::Put { key: key.clone(), value: encoded.value.clone(), lease: entry.lease }
                }
                Step::Keep => return Ok(Deleted::Marked(old.into())),
            };
            if options.dry_run {
                return Ok(match step {
                    Step::Mark(new) => Deleted::Marked((*new).into()),
                    Step::MarkAndRemove(new) => Deleted::Gone((*new).into()),
                    _ => Deleted::Gone(old.into()),
                });
            }
            let mut txn = Txn::default().when(Compare::ModifiedAt(key.clone(), entry.modified)).then(op);
            if step == Step::Remove {
                txn = self.with_addresses(resource, txn, Some(&old), None);
            }
            let uid = meta::uid(&old).to_owned();
            let removal = matches!(step, Step::MarkAndRemove(_)).then(|| {
                let removal = Txn::default().then(Op::Delete { key: key.clone() });
                self.with_addresses(resource, removal, Some(&old), None)
            });
            // An object is freed best by the thread that has just read it.
            let last = Some(old).filter(|_| step == Step::Remove);
            let ready = timer.elapsed();
            let (outcome, removed) = match removal {
                // Both reach the disk together: watchers see the mark and the end, and the client waits once.
                Some(removal) => self.commit_both(resource, "delete", txn, removal).await?,
                None => (self.commit(resource, "delete", txn).await?, None),
            };
            let Outcome::Committed { revision } = outcome else { continue };
            self.record(
                write,
                WriteStep { verb: "delete", name, uid: &uid, timer, admitted: ready, revision },
            );
            let written = |mut new: Box<Value>| {
                stored::set_version(&mut new, revision);
                let new = Arc::new(*new);
                match encoded {
                    Some(encoded) => Written::stored(Some(new), encoded, revision),
                    None => new.into(),
                }
            };
            return Ok(match step {
                Step::MarkAndRemove(new) => match removed {
                    Some(Outcome::Committed { .. }) => Deleted::Gone(written(new)),
                    // Another server wrote in between: the marked object is deleted in the next round.
                    _ => {
                        let uid = meta::uid(&new).to_owned();
                        marked_here = Some((written(new), uid));
                        continue;
                    }
                },
                Step::Mark(new) => Deleted::Marked(written(new)),
                Step::Remove | Step::Keep => Deleted::Gone(last.unwrap_or_default().into()),
            });
        }
        Err(Status::conflict(
            &resource.group,
            &resource.plural,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        ))
    }
}

/// Checks the UID and the version that delete options ask for.
pub(crate) fn check_delete_preconditions(
    resource: &Resource,
    name: &str,
    options: &DeleteOptions,
    old: &Value,
) -> Result<(), Status> {
    // As upstream: namespaces have words of their own, and all others name the kind where other conflicts name the
    // resource.
    let conflict = |what: &str, wanted: &str, found: &str, might: &str| {
        if resource.strategy.checks_preconditions_itself() {
            let why = format!(
                "Precondition failed: {what} in precondition: {wanted}, {what} in object meta: {found}"
            );
            return Status::conflict(&resource.group, &resource.plural, name, &why);
        }
        Status::conflict(
            &resource.group,
            &resource.kind,
            name,
            &format!(
                "the {what} in the precondition ({wanted}) does not match the {what} in record ({found}). The object might have been {might}"
            ),
        )
    };
    if let Some(uid) = &options.uid
        && uid != meta::uid(old)
    {
        return Err(conflict("UID", uid, meta::uid(old), "deleted and then recreated"));
    }
    let version = meta::str(old, "resourceVersion");
    if let Some(wanted) = &options.resource_version
        && wanted != version
    {
        return Err(conflict("ResourceVersion", wanted, version, "modified"));
    }
    Ok(())
}

/// The change that a delete makes to the stored object.
#[derive(Debug, PartialEq)]
enum Step {
    Remove,
    /// A kind with a grace period shows that the object goes, however short that is.
    MarkAndRemove(Box<Value>),
    Mark(Box<Value>),
    /// It is already on its way and this request does not hasten it.
    Keep,
}

fn decide(resource: &Resource, old: &Value, options: &DeleteOptions, now: Timestamp) -> Step {
    let mut new = old.clone();
    if !meta::is_deleting(old) && resource.strategy.begin_deletion(&mut new, &metadata::time(now)) {
        return Step::Mark(Box::new(new));
    }
    // As upstream: a kind with finalizers in its specification hears of the dependents once.
    if !resource.strategy.has_spec_finalizers() || !meta::is_deleting(old) {
        set_dependents_finalizer(resource, &mut new, options.propagation);
    }
    let held = meta::finalizers(&new).next().is_some() || held_by_spec(resource, old);
    let (graceful, grace) = match resource.strategy.deletion(old, options.grace_seconds) {
        Deletion::Immediate => (false, 0),
        Deletion::Graceful { seconds } => (true, seconds.max(0)),
    };
    if meta::is_deleting(old) {
        let current =
            old.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(0);
        // As upstream: a later delete may only shorten the grace period.
        let shortens = options.grace_seconds.is_some() && grace < current;
        return match (shortens || current == 0, held) {
            (true, false) if current == 0 => Step::Remove,
            (true, false) if grace == 0 => Step::MarkAndRemove(Box::new(marked(new, grace, now))),
            (_, _) if shortens => Step::Mark(Box::new(marked(new, grace, now))),
            _ if new != *old => Step::Mark(Box::new(new)),
            _ => Step::Keep,
        };
    }
    if grace == 0 && !held {
        return match graceful {
            true => Step::MarkAndRemove(Box::new(marked(new, 0, now))),
            false => Step::Remove,
        };
    }
    let mut new = marked(new, grace, now);
    if held_by_spec(resource, old) {
        resource.strategy.begin_finalization(&mut new);
    }
    Step::Mark(Box::new(new))
}

fn marked(mut object: Value, grace: i64, now: Timestamp) -> Value {
    let already = meta::is_deleting(&object);
    let at = now.checked_add(SignedDuration::from_secs(grace)).unwrap_or(now);
    let metadata = meta::metadata_mut(&mut object);
    metadata.insert("deletionTimestamp", metadata::time(at).into());
    metadata.insert("deletionGracePeriodSeconds", grace.into());
    // As upstream: a request for deletion changes the desired state.
    if !already && metadata.contains_key("generation") {
        metadata::increment_generation(&mut object);
    }
    object
}

/// Finalizers in the specification of a kind that has such hold the object.
pub(super) fn held_by_spec(resource: &Resource, object: &Value) -> bool {
    resource.strategy.has_spec_finalizers()
        && object.pointer("/spec/finalizers").and_then(Value::as_array).is_some_and(|f| !f.is_empty())
}

/// The garbage collector acts on finalizers: they carry the wish for dependents.
fn set_dependents_finalizer(resource: &Resource, object: &mut Value, propagation: Option<Propagation>) {
    let wanted = match propagation {
        _ if !resource.strategy.has_dependents() => None,
        Some(Propagation::Orphan) => Some(ORPHAN),
        Some(Propagation::Foreground) => Some(FOREGROUND),
        Some(Propagation::Background) => None,
        // Without a wish, one that was expressed before stands.
        None if meta::finalizers(object).any(|f| f == ORPHAN || f == FOREGROUND) => return,
        None if resource.strategy.orphans_by_default() => Some(ORPHAN),
        None => None,
    };
    let mut finalizers: Vec<Value> =
        meta::finalizers(object).filter(|f| *f != ORPHAN && *f != FOREGROUND).map(Into::into).collect();
    finalizers.extend(wanted.map(Value::from));
    let metadata = meta::metadata_mut(object);
    if finalizers.is_empty() {
        metadata.remove("finalizers");
    } else {
        metadata.insert("finalizers", finalizers.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_api::resource::Strategy;
    use ferrite_json::json;

    struct Graceful;
    impl Strategy for Graceful {
        fn deletion(&self, _object: &Value, requested: Option<i64>) -> Deletion {
            Deletion::Graceful { seconds: requested.unwrap_or(30) }
        }
    }

    fn pods() -> Resource {
        super::super::fixture::pods(Graceful)
    }

    fn grace(seconds: i64) -> DeleteOptions {
        DeleteOptions { grace_seconds: Some(seconds), ..DeleteOptions::default() }
    }

    fn after(step: Step) -> Option<i64> {
        match step {
            Step::Mark(o) => o.pointer("/metadata/deletionGracePeriodSeconds").and_then(Value::as_i64),
            _ => None,
        }
    }

    #[test]
    fn a_graceful_delete_marks_and_a_later_one_only_shortens() {
        let now = Timestamp::UNIX_EPOCH;
        let fresh = json!({"metadata": {"name": "a"}});
        assert_eq!(after(decide(&pods(), &fresh, &DeleteOptions::default(), now)), Some(30));
        assert!(matches!(decide(&pods(), &fresh, &grace(0), now), Step::MarkAndRemove(_)));

        let leaving = json!({"metadata": {"deletionTimestamp": "x", "deletionGracePeriodSeconds": 30}});
        assert_eq!(decide(&pods(), &leaving, &DeleteOptions::default(), now), Step::Keep);
        assert_eq!(decide(&pods(), &leaving, &grace(60), now), Step::Keep);
        assert_eq!(after(decide(&pods(), &leaving, &grace(5), now)), Some(5));
        assert!(matches!(decide(&pods(), &leaving, &grace(0), now), Step::MarkAndRemove(_)));
    }

    #[test]
    fn finalizers_hold_the_object() {
        let now = Timestamp::UNIX_EPOCH;
        let held = json!({"metadata": {"finalizers": ["a/b"]}});
        assert_eq!(after(decide(&pods(), &held, &grace(0), now)), Some(0));
        let leaving = json!({"metadata": {"finalizers": ["a/b"], "deletionTimestamp": "x", "deletionGracePeriodSeconds": 0}});
        assert_eq!(decide(&pods(), &leaving, &grace(0), now), Step::Keep);
    }

    #[test]
    fn propagation_becomes_a_finalizer() {
        let now = Timestamp::UNIX_EPOCH;
        let fresh = json!({"metadata": {"name": "a"}});
        let options = DeleteOptions { propagation: Some(Propagation::Foreground), ..grace(0) };
        let Step::Mark(marked) = decide(&pods(), &fresh, &options, now) else { panic!("must be held") };
        assert_eq!(marked["metadata"]["finalizers"], json!([FOREGROUND]));
    }

    struct Childless;
    impl Strategy for Childless {
        fn has_dependents(&self) -> bool {
            false
        }
    }

    struct Emptied;
    impl Strategy for Emptied {
        fn has_spec_finalizers(&self) -> bool {
            true
        }
    }

    #[test]
    fn propagation_means_nothing_without_dependents() {
        let now = Timestamp::UNIX_EPOCH;
        let fresh = json!({"metadata": {"name": "a"}, "spec": {"finalizers": ["kubernetes"]}});
        for propagation in [Propagation::Foreground, Propagation::Orphan] {
            let options = DeleteOptions { propagation: Some(propagation), ..grace(0) };
            let childless = super::super::fixture::pods(Childless);
            assert_eq!(decide(&childless, &fresh, &options, now), Step::Remove);
            let emptied = super::super::fixture::pods(Emptied);
            let Step::Mark(marked) = decide(&emptied, &fresh, &options, now) else { panic!("must be held") };
            assert_eq!(meta::finalizers(&marked).count(), 1);
            assert_eq!(decide(&emptied, &marked, &grace(0), now), Step::Keep);
            let mut deleting = fresh.clone();
            deleting["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            assert_eq!(decide(&emptied, &deleting, &options, now), Step::Keep, "it is too late");
        }
    }
}
