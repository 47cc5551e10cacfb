//! A Job on an API server that refuses writes, loses answers and shows changes late, under a controller that is
//! restarted between any two writes. However it goes, no pod is counted twice and the Job comes to an end.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use ferrite_client::{EventType, ObjectKey};
use ferrite_json::{Value, json};
use futures_util::FutureExt;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::core::Status;
use proptest::prelude::*;

use super::memory::Memory;
use super::sync::{Seen, Writes, sync};
use super::{Rules, completion_index, has_finalizer, is_finished, name, policy, uid};
use crate::pods::{self, is_active, is_terminating, phase};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The write is not done.
    Refused,
    /// The write is done and the answer lost.
    Lost,
    /// This write and all later ones of the sync are not done, and the controller forgets everything.
    Crash,
}

#[derive(Debug, Clone)]
enum Step {
    Sync(Vec<Fault>),
    /// The informers show everything up to now.
    Deliver,
    Restart,
    Start(usize),
    Succeed(usize),
    Fail(usize, i32),
    /// Somebody deletes a pod.
    Delete(usize),
    /// The kubelet has stopped a pod that is being deleted.
    Stop(usize),
    Advance(i64),
    Suspend(bool),
}

struct Server {
    now: Timestamp,
    job: Job,
    pods: BTreeMap<String, Pod>,
    made: usize,
    version: u64,
    faults: VecDeque<Fault>,
    crashed: bool,
    /// Number of created pods that the informers have not shown yet.
    undelivered: usize,
    /// UIDs of pods that are in one of the counters.
    counted: HashSet<String>,
    /// UIDs of pods that succeeded while they were tracked.
    succeeded: HashSet<String>,
}

fn refused(reason: &str, code: u16) -> kube::Error {
    kube::Error::Api(Status::failure("simulated", reason).with_code(code).boxed())
}

fn edit<T: serde::Serialize + serde::de::DeserializeOwned>(object: &mut T, change: impl FnOnce(&mut Value)) {
    let mut value = ferrite_json::to_value(&*object).unwrap();
    change(&mut value);
    *object = ferrite_json::from_value(value).unwrap();
}

impl Server {
    fn fault(&mut self) -> Fault {
        let fault = self.faults.pop_front().unwrap_or(Fault::None);
        self.crashed |= fault == Fault::Crash;
        if self.crashed { Fault::Refused } else { fault }
    }

    /// Does the write unless it is refused, and answers unless the answer is lost.
    fn write<T>(
        &mut self,
        write: impl FnOnce(&mut Self) -> Result<T, kube::Error>,
    ) -> Result<T, kube::Error> {
        match self.fault() {
            Fault::None => write(self),
            Fault::Lost => write(self).and_then(|_| Err(refused("Timeout", 504))),
            Fault::Refused | Fault::Crash => Err(refused("InternalError", 500)),
        }
    }

    fn uncounted(&self) -> (Vec<String>, Vec<String>) {
        let uncounted = self.job.status.as_ref().and_then(|status| status.uncounted_terminated_pods.clone());
        let uncounted = uncounted.unwrap_or_default();
        (uncounted.succeeded.unwrap_or_default(), uncounted.failed.unwrap_or_default())
    }

    fn counters(&self) -> (i32, i32) {
        let status = self.job.status.clone().unwrap_or_default();
        (status.succeeded.unwrap_or(0), status.failed.unwrap_or(0))
    }

    fn update_status(&mut self, new: &Job) -> Result<Job, kube::Error> {
        if new.metadata.resource_version != self.job.metadata.resource_version {
            return Err(refused("Conflict", 409));
        }
        let (before, lists) = (self.counters(), self.uncounted());
        let old = std::mem::replace(&mut self.job.status, new.status.clone());
        self.version += 1;
        self.job.metadata.resource_version = Some(self.version.to_string());
        let (after, left) = (self.counters(), self.uncounted());
        let is_indexed = Rules::of(&self.job).unwrap().indexed;
        // A pod that leaves a list is counted once, and no other pod is.
        let gone = |list: &[String], left: &[String]| -> Vec<String> {
            list.iter().filter(|uid| !left.contains(uid)).cloned().collect()
        };
        let (succeeded, failed) = (gone(&lists.0, &left.0), gone(&lists.1, &left.1));
        assert_eq!(usize::try_from(after.1 - before.1).unwrap(), failed.len(), "failed");
        if !is_indexed {
            assert_eq!(usize::try_from(after.0 - before.0).unwrap(), succeeded.len(), "succeeded");
        }
        for uid in succeeded.into_iter().chain(failed) {
            assert!(self.counted.insert(uid.clone()), "{uid} is counted twice");
        }
        let listed: Vec<_> = left.0.iter().chain(&left.1).collect();
        assert_eq!(listed.iter().collect::<HashSet<_>>().len(), listed.len(), "a pod is listed twice");
        assert!(listed.iter().all(|uid| !self.counted.contains(*uid)), "a counted pod is listed again");
        assert!(listed.len() <= 500);
        let value = |job: &Job| ferrite_json::to_value(job).unwrap();
        let before = Job { status: old, ..self.job.clone() };
        let kinds = ferrite_api::kinds::built_in();
        let jobs = kinds.iter().find(|kind| kind.plural == "jobs").unwrap();
        let errors = jobs.strategy.validate_status_update(&value(&self.job), &value(&before));
        assert!(errors.is_empty(), "{errors:?}");
        // A time on the wire has whole seconds.
        edit(&mut self.job, |_| ());
        Ok(self.job.clone())
    }

    /// Removes the pod if nothing holds it.
    fn collect(&mut self, uid: &str) {
        let pod = &self.pods[uid];
        let held = pod.metadata.finalizers.as_ref().is_some_and(|finalizers| !finalizers.is_empty());
        if is_terminating(pod) && pods::is_finished(pod) && !held {
            self.pods.remove(uid);
        }
    }

    /// The pod of this number among those that satisfy `wanted`.
    fn pick(&self, number: usize, wanted: impl Fn(&Pod) -> bool) -> Option<String> {
        let found: Vec<_> =
            self.pods.values().filter(|pod| wanted(pod)).map(|pod| uid(pod).to_owned()).collect();
        (!found.is_empty()).then(|| found[number % found.len()].clone())
    }

    fn end(&mut self, uid: &str, code: i32) {
        let now = self.now;
        let tracked = has_finalizer(&self.pods[uid]);
        if code == 0 && tracked {
            self.succeeded.insert(uid.to_owned());
        }
        let phase = if code == 0 { "Succeeded" } else { "Failed" };
        edit(self.pods.get_mut(uid).unwrap(), |pod| {
            pod["status"] = json!({"phase": phase, "containerStatuses": [
                {"name": "c", "ready": false, "restartCount": 0, "image": "", "imageID": "",
                 "state": {"terminated": {"exitCode": code, "finishedAt": now}}}]});
        });
        self.collect(uid);
    }
}

struct World {
    server: Mutex<Server>,
}

impl World {
    fn server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap()
    }
}

impl Writes for World {
    async fn create_pod(&self, _: &Job, pod: &Pod) -> Result<(), kube::Error> {
        let mut server = self.server();
        // A lost answer to a create leaves one pod more than wanted, as upstream.
        if matches!(server.fault(), Fault::Refused | Fault::Crash) {
            return Err(refused("InternalError", 500));
        }
        assert!(has_finalizer(pod));
        server.made += 1;
        server.undelivered += 1;
        let mut pod = pod.clone();
        let uid = format!("pod-{:03}", server.made);
        pod.metadata.name = Some(format!("{}{}", pod.metadata.generate_name.clone().unwrap(), server.made));
        pod.metadata.uid = Some(uid.clone());
        edit(&mut pod, |pod| pod["status"] = json!({"phase": "Pending"}));
        server.pods.insert(uid, pod);
        Ok(())
    }

    async fn delete_pod(&self, _: &Job, pod: &Pod) -> Result<(), kube::Error> {
        let now = self.server().now;
        self.server().write(|server| {
            let found = server.pods.get_mut(uid(pod)).ok_or_else(|| refused("NotFound", 404))?;
            if !is_terminating(found) {
                edit(found, |pod| pod["metadata"]["deletionTimestamp"] = json!(now));
            }
            server.collect(uid(pod));
            Ok(())
        })
    }

    async fn remove_finalizer(&self, pod: &Pod) -> Result<(), kube::Error> {
        self.server().write(|server| {
            let job = server.job.clone();
            let rules = Rules::of(&job).unwrap();
            let (succeeded, failed) = server.uncounted();
            let is_noted =
                [&succeeded, &failed].iter().any(|list| list.iter().any(|known| known == uid(pod)))
                    || server.counted.contains(uid(pod));
            let completed = job.status.as_ref().and_then(|status| status.completed_indexes.clone());
            let completed =
                super::indexes::Indexes::parse(&completed.unwrap_or_default(), rules.index_count());
            let by_index = rules.indexed && completion_index(pod).is_some_and(|index| completed.has(index));
            if phase(pod) == "Succeeded" || rules.is_failed(pod) {
                let is_ignored = !policy::counts(rules.failure_policy, pod);
                assert!(is_noted || is_ignored || by_index, "{} is lost", name(pod));
            }
            let found = server.pods.get_mut(uid(pod)).ok_or_else(|| refused("NotFound", 404))?;
            found.metadata.finalizers = None;
            server.collect(uid(pod));
            Ok(())
        })
    }

    async fn update_status(&self, job: &Job) -> Result<Job, kube::Error> {
        self.server().write(|server| server.update_status(job))
    }

    fn event(&self, _: &Job, _: EventType, _: &str, _: &str) {}
}

/// The controller with its informers.
struct Controller {
    memory: Memory,
    job: Arc<Job>,
    pods: BTreeMap<String, Arc<Pod>>,
    key: ObjectKey,
}

impl Controller {
    fn started(server: &mut Server) -> Self {
        server.undelivered = 0;
        let pods = server.pods.iter().map(|(uid, pod)| (uid.clone(), Arc::new(pod.clone()))).collect();
        let job = Arc::new(server.job.clone());
        Self { memory: Memory::default(), key: ObjectKey::of(&*job), job, pods }
    }

    fn deliver(&mut self, server: &mut Server) {
        let (memory, key) = (&self.memory, &self.key);
        // Every creation has an event, also that of a pod which is gone by now.
        memory.expectations.creations_observed(key, std::mem::take(&mut server.undelivered));
        let gone = |pod: &Pod, is_final: bool| {
            memory.expectations.deletion_observed(key, name(pod));
            if is_final || !has_finalizer(pod) {
                memory.removal_observed(key, uid(pod));
            }
        };
        for (uid, pod) in &server.pods {
            match self.pods.get(uid) {
                _ if is_terminating(pod) => gone(pod, false),
                Some(_) if !has_finalizer(pod) => memory.removal_observed(key, uid),
                _ => {}
            }
        }
        for (uid, pod) in &self.pods {
            if !server.pods.contains_key(uid) {
                gone(pod, true);
            }
        }
        self.pods = server.pods.iter().map(|(uid, pod)| (uid.clone(), Arc::new(pod.clone()))).collect();
        self.job = Arc::new(server.job.clone());
    }

    fn sync(&self, world: &World) {
        self.memory.begin(&self.key, &self.job);
        if is_finished(&self.job) || self.memory.is_stale(&self.key, &self.job) {
            return;
        }
        let seen = Seen {
            job: self.job.clone(),
            satisfied: self.memory.expectations.satisfied(&self.key),
            removed: self.memory.removed(&self.key),
            pods: self.pods.values().cloned().collect(),
        };
        let now = world.server().now;
        // A sync that fails is tried again, which later steps do.
        let _ =
            sync(world, &self.memory, &self.key, seen, now).now_or_never().expect("the fake answers at once");
    }
}

fn apply(step: &Step, world: &World, controller: &mut Controller) {
    match step {
        Step::Sync(faults) => {
            world.server().faults = faults.iter().copied().collect();
            controller.sync(world);
            let mut server = world.server();
            server.faults.clear();
            if std::mem::take(&mut server.crashed) {
                *controller = Controller::started(&mut server);
            }
        }
        Step::Deliver => controller.deliver(&mut world.server()),
        Step::Restart => *controller = Controller::started(&mut world.server()),
        Step::Start(number) => {
            let mut server = world.server();
            if let Some(uid) = server.pick(*number, |pod| is_active(pod) && phase(pod) == "Pending") {
                edit(server.pods.get_mut(&uid).unwrap(), |pod| pod["status"] = json!({"phase": "Running"}));
            }
        }
        Step::Succeed(number) => {
            let mut server = world.server();
            if let Some(uid) = server.pick(*number, is_active) {
                server.end(&uid, 0);
            }
        }
        Step::Fail(number, code) => {
            let mut server = world.server();
            if let Some(uid) = server.pick(*number, is_active) {
                server.end(&uid, *code);
            }
        }
        Step::Delete(number) => {
            let mut server = world.server();
            let now = server.now;
            if let Some(uid) = server.pick(*number, |pod| !is_terminating(pod)) {
                edit(server.pods.get_mut(&uid).unwrap(), |pod| {
                    pod["metadata"]["deletionTimestamp"] = json!(now)
                });
                server.collect(&uid);
            }
        }
        Step::Stop(number) => {
            let mut server = world.server();
            if let Some(uid) = server.pick(*number, |pod| is_terminating(pod) && !pods::is_finished(pod)) {
                server.end(&uid, 137);
            }
        }
        Step::Advance(seconds) => {
            let mut server = world.server();
            server.now += SignedDuration::from_secs(*seconds);
        }
        Step::Suspend(suspend) => {
            let mut server = world.server();
            if !is_finished(&server.job) {
                server.version += 1;
                let version = server.version.to_string();
                server.job.spec.as_mut().unwrap().suspend = Some(*suspend);
                server.job.metadata.resource_version = Some(version);
            }
        }
    }
}

/// Limits that hold at every moment.
fn check(world: &World) {
    let server = world.server();
    let rules = Rules::of(&server.job).unwrap();
    let active: Vec<_> = server.pods.values().filter(|pod| is_active(pod) && has_finalizer(pod)).collect();
    assert!(active.len() <= usize::try_from(rules.parallelism).unwrap(), "{} pods are active", active.len());
    if rules.indexed {
        let indexes: HashSet<_> = active.iter().map(|pod| completion_index(pod).unwrap()).collect();
        assert_eq!(indexes.len(), active.len(), "an index has two pods");
        assert!(indexes.iter().all(|index| *index < rules.index_count()));
    }
}

/// From here on nothing fails: every pod succeeds and the Job ends.
fn settle(world: &World, controller: &mut Controller) {
    apply(&Step::Suspend(false), world, controller);
    for _ in 0..60 {
        for _ in 0..8 {
            apply(&Step::Stop(0), world, controller);
            apply(&Step::Succeed(0), world, controller);
        }
        for step in [Step::Deliver, Step::Sync(vec![]), Step::Deliver, Step::Advance(600)] {
            apply(&step, world, controller);
            check(world);
        }
        if is_finished(&world.server().job) {
            return;
        }
    }
    let server = world.server();
    panic!("the job does not end: {:#?}\n{:#?}", server.job.status, server.pods);
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let fault = prop_oneof![4 => Just(Fault::None), 1 => Just(Fault::Refused), 1 => Just(Fault::Lost), 1 => Just(Fault::Crash)];
    let step = prop_oneof![
        6 => prop::collection::vec(fault, 0..12).prop_map(Step::Sync),
        4 => Just(Step::Deliver),
        1 => Just(Step::Restart),
        2 => (0usize..8).prop_map(Step::Start),
        3 => (0usize..8).prop_map(Step::Succeed),
        3 => (0usize..8, prop_oneof![Just(1), Just(3)]).prop_map(|(pod, code)| Step::Fail(pod, code)),
        1 => (0usize..8).prop_map(Step::Delete),
        2 => (0usize..8).prop_map(Step::Stop),
        2 => (1i64..700).prop_map(Step::Advance),
        1 => any::<bool>().prop_map(Step::Suspend),
    ];
    prop::collection::vec(step, 0..60)
}

fn specs() -> impl Strategy<Value = Value> {
    let ignoring = json!({"rules": [{"action": "Ignore", "onExitCodes": {"operator": "In", "values": [3]}}]});
    (
        prop::option::of(0i32..6),
        1i32..5,
        0i32..8,
        any::<bool>(),
        prop::option::of(0i32..3),
        any::<bool>(),
        prop_oneof![3 => Just(Value::Null), 1 => Just(ignoring)],
    )
        .prop_map(|(completions, parallelism, limit, indexed, per_index, only_failed, policy)| {
            let indexed = indexed && completions.is_some();
            let replacement =
                if only_failed || policy.is_object() { "Failed" } else { "TerminatingOrFailed" };
            json!({
                "completions": completions, "parallelism": parallelism, "backoffLimit": limit,
                "completionMode": if indexed { "Indexed" } else { "NonIndexed" },
                "backoffLimitPerIndex": per_index.filter(|_| indexed),
                "podReplacementPolicy": replacement, "podFailurePolicy": policy,
                "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c"}]}},
            })
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_pod_is_counted_twice_and_the_job_ends(spec in specs(), steps in steps()) {
        let mut job: Job = ferrite_json::from_value(json!({
            "metadata": {"name": "j", "namespace": "ns", "uid": "job", "resourceVersion": "1"}, "spec": spec})).unwrap();
        job.metadata.generation = Some(1);
        let world = World { server: Mutex::new(Server {
            now: "2024-01-01T00:00:00Z".parse().unwrap(),
            job, pods: BTreeMap::new(), made: 0, undelivered: 0, version: 1, faults: VecDeque::new(), crashed: false,
            counted: HashSet::new(), succeeded: HashSet::new(),
        }) };
        let mut controller = Controller::started(&mut world.server());
        let mut suspended = false;
        for step in &steps {
            suspended |= matches!(step, Step::Suspend(true));
            apply(step, &world, &mut controller);
            check(&world);
        }
        settle(&world, &mut controller);
        let server = world.server();
        let rules = Rules::of(&server.job).unwrap();
        prop_assert!(server.pods.values().all(|pod| !has_finalizer(pod)), "a pod is left with the finalizer");
        let (succeeded, failed) = server.counters();
        let counted = if rules.indexed { failed } else { succeeded + failed };
        prop_assert_eq!(usize::try_from(counted).unwrap(), server.counted.len());
        // A pod of a suspended job is deleted without being counted, also when it has just succeeded.
        if !rules.indexed && !suspended {
            prop_assert!(server.succeeded.is_subset(&server.counted), "a success is lost");
        }
    }
}

#[test]
fn a_job_that_ends_is_measured() {
    let job: Job = ferrite_json::from_value(json!({
        "metadata": {"name": "j", "namespace": "ns", "uid": "job", "resourceVersion": "1", "generation": 1},
        "spec": {"completions": 1, "parallelism": 1, "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c"}]}}}}))
    .unwrap();
    let world = World {
        server: Mutex::new(Server {
            now: "2024-01-01T00:00:00Z".parse().unwrap(),
            job,
            pods: BTreeMap::new(),
            made: 0,
            undelivered: 0,
            version: 1,
            faults: VecDeque::new(),
            crashed: false,
            counted: HashSet::new(),
            succeeded: HashSet::new(),
        }),
    };
    let mut controller = Controller::started(&mut world.server());
    settle(&world, &mut controller);
    let families = &super::measures::FAMILIES;
    for action in ["pods_created", "tracking"] {
        assert!(families.syncs.with(&["NonIndexed", "success", action]).get() > 0, "{action}");
    }
    assert!(families.pods.with(&["NonIndexed", "succeeded"]).get() > 0);
    assert!(families.finished.with(&["NonIndexed", "succeeded", "CompletionsReached"]).get() > 0);
}
