use std::sync::Arc;

use ferrite_client::{Api, Informer};
use ferrite_json::{Value, json};
use k8s_openapi::api::batch::v1::{CronJob, Job, JobStatus};
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{DeleteParams, Patch, PatchParams};

use crate::support::Cluster;

const FINALIZER: &str = "batch.kubernetes.io/job-tracking";
const INDEX: &str = "batch.kubernetes.io/job-completion-index";

/// A Job whose pods the stand-in for the kubelet treats as `labels` say. The pods name their node.
fn job(name: &str, labels: Value, spec: Value) -> Value {
    let mut whole = json!({"template": {"metadata": {"labels": labels},
        "spec": {"nodeName": "n1", "restartPolicy": "Never", "containers": [{"name": "c", "image": "a"}]}}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": whole})
}

fn conditions(job: &Job) -> Vec<(String, String)> {
    let conditions = job.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .filter(|condition| condition.status == "True")
        .map(|condition| (condition.type_.clone(), condition.reason.clone().unwrap_or_default()))
        .collect()
}

async fn finished(cluster: &Cluster, name: &str) -> (Arc<Job>, JobStatus) {
    let job = cluster
        .eventually(&format!("the end of {name}"), |jobs: &[Arc<Job>]| {
            let job = jobs.iter().find(|job| job.metadata.name.as_deref() == Some(name))?;
            conditions(job)
                .iter()
                .any(|(kind, _)| kind == "Complete" || kind == "Failed")
                .then(|| job.clone())
        })
        .await;
    let status = job.status.clone().unwrap();
    assert_eq!((status.active.unwrap_or(0), status.terminating), (0, Some(0)), "nothing is left of {name}");
    let uncounted = status.uncounted_terminated_pods.clone().unwrap();
    assert!(uncounted.failed.is_none() && uncounted.succeeded.is_none());
    (job, status)
}

fn ended(kind: &str, reason: &str) -> Vec<(String, String)> {
    let before = if kind == "Complete" { "SuccessCriteriaMet" } else { "FailureTarget" };
    [before, kind].iter().map(|kind| ((*kind).to_owned(), reason.to_owned())).collect()
}

fn pods_of(pods: &[Arc<Pod>], job: &str) -> Vec<Arc<Pod>> {
    let named = |pod: &&Arc<Pod>| {
        pod.metadata.labels.as_ref().and_then(|labels| labels.get("job-name")).map(String::as_str)
            == Some(job)
    };
    pods.iter().filter(named).cloned().collect()
}

fn is_tracked(pod: &Pod) -> bool {
    pod.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER)
}

async fn events(cluster: &Cluster, of: &str, wanted: &[(&str, &str)]) {
    cluster
        .eventually(&format!("events of {of}"), |events: &[Arc<Event>]| {
            let has = |reason: &str, message: &str| {
                events.iter().any(|event| {
                    event.involved_object.name.as_deref() == Some(of)
                        && event.reason.as_deref() == Some(reason)
                        && event.message.as_deref().is_some_and(|text| text.contains(message))
                })
            };
            wanted.iter().all(|(reason, message)| has(reason, message)).then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_run_to_completion() {
    let cluster = Cluster::start(&["n1"]).await;
    let pods: Informer<Pod> = cluster.context.informers.get();
    let most = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (seen, all) = (most.clone(), pods.clone());
    pods.subscribe(move |_| {
        let active = |pod: &&Arc<Pod>| {
            pod.status.as_ref().is_some_and(|s| matches!(s.phase.as_deref(), Some("Pending" | "Running")))
        };
        let active = pods_of(&all.list(), "four").iter().filter(active).count();
        seen.fetch_max(active, std::sync::atomic::Ordering::Relaxed);
    });
    cluster
        .create::<Job>(
            "default",
            job("four", json!({"exit": "0"}), json!({"completions": 4, "parallelism": 2})),
        )
        .await;
    let indexed = json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed"});
    cluster.create::<Job>("default", job("indexed", json!({"exit": "0"}), indexed)).await;
    cluster.create::<Job>("default", job("any", json!({"exit": "0"}), json!({"parallelism": 2}))).await;
    cluster.create::<Job>("default", job("none", json!({"exit": "0"}), json!({"completions": 0}))).await;

    let (four, status) = finished(&cluster, "four").await;
    assert_eq!(conditions(&four), ended("Complete", "CompletionsReached"));
    assert_eq!((status.succeeded, status.failed, status.ready), (Some(4), None, Some(0)));
    assert!(status.completion_time.is_some() && status.start_time.is_some());
    assert!(most.load(std::sync::atomic::Ordering::Relaxed) <= 2, "no more than the parallelism");
    let owned = cluster
        .eventually("pods without the finalizer", |pods: &[Arc<Pod>]| {
            let owned = pods_of(pods, "four");
            owned.iter().all(|pod| !is_tracked(pod)).then_some(owned)
        })
        .await;
    assert_eq!(owned.len(), 4);
    for pod in &owned {
        let labels = pod.metadata.labels.as_ref().unwrap();
        assert_eq!(labels["batch.kubernetes.io/controller-uid"], *four.metadata.uid.as_ref().unwrap());
        assert!(!labels.contains_key(INDEX));
        assert!(pod.metadata.name.as_ref().unwrap().starts_with("four-"));
    }
    events(&cluster, "four", &[("SuccessfulCreate", "Created pod: four-"), ("Completed", "Job completed")])
        .await;

    let (job, status) = finished(&cluster, "indexed").await;
    assert_eq!(conditions(&job), ended("Complete", "CompletionsReached"));
    assert_eq!((status.completed_indexes.as_deref(), status.succeeded), (Some("0-2"), Some(3)));
    for pod in pods_of(&pods.list(), "indexed") {
        let index = &pod.metadata.labels.as_ref().unwrap()[INDEX];
        assert_eq!(*index, pod.metadata.annotations.as_ref().unwrap()[INDEX]);
        assert!(pod.metadata.name.as_ref().unwrap().starts_with(&format!("indexed-{index}-")));
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.hostname, Some(format!("indexed-{index}")));
        let variable = &spec.containers[0].env.as_ref().unwrap()[0];
        assert_eq!(variable.name, "JOB_COMPLETION_INDEX");
        let source = variable.value_from.as_ref().unwrap().field_ref.as_ref().unwrap();
        assert_eq!(source.field_path, format!("metadata.labels['{INDEX}']"));
    }
    let (job, status) = finished(&cluster, "any").await;
    assert_eq!(conditions(&job), ended("Complete", "CompletionsReached"));
    assert_eq!(status.succeeded, Some(2), "all pods may finish");
    let (job, status) = finished(&cluster, "none").await;
    assert_eq!((conditions(&job), status.succeeded), (ended("Complete", "CompletionsReached"), None));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_fail_for_every_reason() {
    let cluster = Cluster::start(&["n1"]).await;
    let indexed = |more: Value| {
        let mut spec = json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed"});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    let rule = |action: &str, code: i32| json!({"rules": [{"action": action, "onExitCodes": {"operator": "In", "values": [code]}}]});
    let fails_1 = json!({"exit": "0", "fails": "1"});
    for (name, labels, spec) in [
        ("limit", json!({"exit": "1"}), json!({"backoffLimit": 0})),
        ("policy", json!({"exit": "42"}), json!({"podFailurePolicy": rule("FailJob", 42)})),
        ("deadline", json!({}), json!({"activeDeadlineSeconds": 1, "parallelism": 2, "completions": 2})),
        ("index", fails_1.clone(), indexed(json!({"backoffLimitPerIndex": 0}))),
        ("most", fails_1.clone(), indexed(json!({"backoffLimitPerIndex": 0, "maxFailedIndexes": 0}))),
        (
            "failindex",
            json!({"exit": "7"}),
            indexed(
                json!({"completions": 1, "backoffLimitPerIndex": 5, "podFailurePolicy": rule("FailIndex", 7)}),
            ),
        ),
    ] {
        cluster.create::<Job>("default", job(name, labels, spec)).await;
    }
    for (name, reason, failed, message) in [
        ("limit", "BackoffLimitExceeded", Some(1), "Job has reached the specified backoff limit"),
        ("policy", "PodFailurePolicy", Some(1), "failed with exit code 42 matching FailJob rule at index 0"),
        ("deadline", "DeadlineExceeded", Some(2), "Job was active longer than specified deadline"),
        ("index", "FailedIndexes", Some(1), "Job has failed indexes"),
        (
            "most",
            "MaxFailedIndexesExceeded",
            None,
            "Job has exceeded the specified maximal number of failed indexes",
        ),
        ("failindex", "FailedIndexes", Some(1), "Job has failed indexes"),
    ] {
        let (job, status) = finished(&cluster, name).await;
        assert_eq!(conditions(&job), ended("Failed", reason), "{name}");
        if let Some(failed) = failed {
            assert_eq!(status.failed, Some(failed), "{name}");
        }
        assert_eq!(status.completion_time, None, "{name}");
        if name == "index" {
            let indexes = (status.completed_indexes.as_deref(), status.failed_indexes.as_deref());
            assert_eq!((indexes, status.succeeded), ((Some("0,2"), Some("1")), Some(2)));
        }
        events(&cluster, name, &[(reason, message)]).await;
    }
    cluster
        .eventually("the active pods deleted", |pods: &[Arc<Pod>]| {
            pods_of(pods, "deadline").is_empty().then_some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_pods_are_replaced_and_ignored_failures_do_not_count() {
    let cluster = Cluster::start(&["n1"]).await;
    // The back-off of an index starts with ten seconds: the first replacement needs no clock of its own.
    let spec =
        json!({"completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimitPerIndex": 1});
    cluster.create::<Job>("default", job("again", json!({"exit": "0", "fails": "1"}), spec)).await;
    let ignoring = json!({"backoffLimit": 0, "podFailurePolicy": {"rules": [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [3]}}]}});
    cluster.create::<Job>("default", job("ignoring", json!({"exit": "3"}), ignoring)).await;
    let replaced = cluster
        .eventually("a second pod of the index", |pods: &[Arc<Pod>]| {
            let annotation =
                |pod: &Arc<Pod>, name: &str| pod.metadata.annotations.as_ref()?.get(name).cloned();
            pods_of(pods, "again").into_iter().find(|pod| {
                annotation(pod, "batch.kubernetes.io/job-index-failure-count").as_deref() == Some("1")
            })
        })
        .await;
    assert_eq!(replaced.metadata.labels.as_ref().unwrap()[INDEX], "1");
    let (job, status) = finished(&cluster, "again").await;
    assert_eq!(conditions(&job), ended("Failed", "FailedIndexes"));
    assert_eq!((status.failed, status.failed_indexes.as_deref()), (Some(2), Some("1")));
    cluster
        .eventually("a second pod after an ignored failure", |pods: &[Arc<Pod>]| {
            (pods_of(pods, "ignoring").len() > 1).then_some(())
        })
        .await;
    let ignoring = cluster.api::<Job>("default").get("ignoring").await.unwrap();
    assert_eq!((conditions(&ignoring), ignoring.status.unwrap().failed), (vec![], None));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_are_suspended_scaled_and_resumed() {
    let cluster = Cluster::start(&["n1"]).await;
    let spec = json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed", "suspend": true});
    cluster.create::<Job>("default", job("s", json!({}), spec)).await;
    let api = cluster.api::<Job>("default");
    let patch = async |patch: Value| {
        api.patch("s", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    };
    let suspended = |status: &'static str, active: i32| {
        move |jobs: &[Arc<Job>]| {
            let found = jobs.first()?.status.clone()?;
            let condition = found.conditions.iter().flatten().find(|c| c.type_ == "Suspended")?;
            (condition.status == status && found.active.unwrap_or(0) == active).then_some(found)
        }
    };
    let status = cluster.eventually("the suspension", suspended("True", 0)).await;
    assert_eq!(status.start_time, None);
    events(&cluster, "s", &[("Suspended", "Job suspended")]).await;
    patch(json!({"spec": {"suspend": false}})).await;
    let status = cluster.eventually("three pods", suspended("False", 3)).await;
    assert!(status.start_time.is_some());
    assert_eq!(status.conditions.unwrap()[0].reason.as_deref(), Some("JobResumed"));
    events(&cluster, "s", &[("Resumed", "Job resumed"), ("SuccessfulCreate", "")]).await;
    patch(json!({"spec": {"parallelism": 1, "completions": 1}})).await;
    cluster
        .eventually("the pod of the index that is left", |pods: &[Arc<Pod>]| {
            let pods = pods_of(pods, "s");
            (pods.len() == 1 && pods[0].metadata.labels.as_ref()?.get(INDEX)? == "0").then_some(())
        })
        .await;
    patch(json!({"spec": {"suspend": true}})).await;
    let status = cluster.eventually("no pods", suspended("True", 0)).await;
    assert_eq!((status.failed, status.start_time), (None, None), "pods of a suspended job are not failures");
    cluster.eventually("no pods", |pods: &[Arc<Pod>]| pods.is_empty().then_some(())).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_are_adopted_released_and_freed() {
    let cluster = Cluster::start(&["n1"]).await;
    cluster
        .create::<Job>("default", job("own", json!({}), json!({"completions": 2, "parallelism": 2})))
        .await;
    let pods = cluster.api::<Pod>("default");
    let two = |pods: &[Arc<Pod>]| {
        let pods = pods_of(pods, "own");
        let running = pods.iter().all(|pod| pod.status.as_ref().unwrap().phase.as_deref() == Some("Running"));
        (pods.len() == 2 && running && pods.iter().all(|pod| is_tracked(pod))).then(|| pods[0].clone())
    };
    let first = cluster.eventually("two pods", two).await;
    let (name, uid) = (first.metadata.name.clone().unwrap(), first.metadata.uid.clone());
    let find = move |pods: &[Arc<Pod>]| pods.iter().find(|pod| pod.metadata.uid == uid).cloned();

    let orphan = json!({"metadata": {"ownerReferences": null}});
    pods.patch(&name, &PatchParams::default(), &Patch::Merge(orphan)).await.unwrap();
    cluster
        .eventually("the adoption", |pods: &[Arc<Pod>]| {
            let pod = find(pods)?;
            (pod.metadata.owner_references.is_some() && is_tracked(&pod)).then_some(())
        })
        .await;
    let labels = json!({"metadata": {"labels": null}});
    pods.patch(&name, &PatchParams::default(), &Patch::Merge(labels)).await.unwrap();
    let released = cluster
        .eventually("the release", |pods: &[Arc<Pod>]| {
            find(pods).filter(|pod| pod.metadata.owner_references.is_none() && !is_tracked(pod))
        })
        .await;
    assert_eq!(released.metadata.deletion_timestamp, None);
    cluster.eventually("another in its place", two).await;

    let jobs = cluster.api::<Job>("default");
    let orphan =
        DeleteParams { propagation_policy: Some(kube::api::PropagationPolicy::Orphan), ..Default::default() };
    jobs.delete("own", &orphan).await.unwrap();
    cluster
        .eventually("pods that nobody owns", |pods: &[Arc<Pod>]| {
            let pods = pods_of(pods, "own");
            let free = |pod: &Arc<Pod>| pod.metadata.owner_references.is_none() && !is_tracked(pod);
            (pods.len() == 2 && pods.iter().all(free)).then_some(())
        })
        .await;
    cluster.create::<Job>("default", job("gone", json!({}), json!({}))).await;
    cluster.eventually("a pod", |pods: &[Arc<Pod>]| (pods_of(pods, "gone").len() == 1).then_some(())).await;
    jobs.delete("gone", &DeleteParams::background()).await.unwrap();
    cluster.eventually("its end", |pods: &[Arc<Pod>]| pods_of(pods, "gone").is_empty().then_some(())).await;

    let elsewhere = json!({"managedBy": "example.com/other", "ttlSecondsAfterFinished": 0});
    cluster.create::<Job>("default", job("elsewhere", json!({"exit": "0"}), elsewhere)).await;
    let here = json!({"managedBy": "kubernetes.io/job-controller", "ttlSecondsAfterFinished": 0});
    cluster.create::<Job>("default", job("here", json!({"exit": "0"}), here)).await;
    cluster
        .eventually("the end of the job that this controller manages", |events: &[Arc<Event>]| {
            let ended = |event: &Arc<Event>| {
                event.involved_object.name.as_deref() == Some("here")
                    && event.reason.as_deref() == Some("Completed")
            };
            events.iter().any(ended).then_some(())
        })
        .await;
    cluster
        .eventually("its deletion after the time to live", |jobs: &[Arc<Job>]| {
            let names: Vec<_> = jobs.iter().filter_map(|job| job.metadata.name.as_deref()).collect();
            (names == ["elsewhere"]).then_some(())
        })
        .await;
    assert!(pods_of(&cluster.context.informers.get::<Pod>().list(), "elsewhere").is_empty());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_success_policy_ends_a_job_early() {
    let cluster = Cluster::start(&["n1"]).await;
    let mut object = job(
        "early",
        json!({"fails": ""}),
        json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed",
               "successPolicy": {"rules": [{"succeededIndexes": "1"}]}}),
    );
    object["spec"]["template"]["metadata"]["labels"] = json!({});
    cluster.create::<Job>("default", object).await;
    let pod = cluster
        .eventually("the pod of index 1", |pods: &[Arc<Pod>]| {
            let running = |pod: &&Arc<Pod>| {
                pod.metadata.labels.as_ref().unwrap()[INDEX] == "1"
                    && pod.status.as_ref().unwrap().phase.as_deref() == Some("Running")
            };
            pods.iter().find(running).cloned()
        })
        .await;
    let api: Api<Pod> = cluster.api("default");
    let succeeded = json!({"status": {"phase": "Succeeded"}});
    api.patch_status(pod.metadata.name.as_ref().unwrap(), &PatchParams::default(), &Patch::Merge(succeeded))
        .await
        .unwrap();
    let (job, status) = finished(&cluster, "early").await;
    assert_eq!(conditions(&job), ended("Complete", "SuccessPolicy"));
    assert_eq!(
        (status.completed_indexes.as_deref(), status.succeeded, status.failed),
        (Some("1"), Some(1), None)
    );
    cluster.eventually("the others deleted", |pods: &[Arc<Pod>]| (pods.len() == 1).then_some(())).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_indexes_than_one_sync_takes_complete() {
    let cluster = Cluster::start(&["n1"]).await;
    let spec = json!({"completions": 600, "parallelism": 600, "completionMode": "Indexed"});
    cluster.create::<Job>("default", job("wide", json!({"exit": "0"}), spec)).await;
    let (job, status) = finished(&cluster, "wide").await;
    assert_eq!(conditions(&job), ended("Complete", "CompletionsReached"));
    assert_eq!((status.completed_indexes.as_deref(), status.succeeded), (Some("0-599"), Some(600)));
    assert_eq!(cluster.context.informers.get::<Pod>().len(), 600, "one pod for each index");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cron_jobs_create_jobs_and_keep_few_of_them() {
    let cluster = Cluster::start(&["n1"]).await;
    let template = job("", json!({"exit": "0"}), json!({}));
    let cron = |name: &str, more: Value| {
        let mut spec = json!({"schedule": "@every 1s", "successfulJobsHistoryLimit": 1, "jobTemplate": {
            "metadata": {"labels": {"of": name}}, "spec": template["spec"]}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": name}, "spec": spec})
    };
    cluster.create::<CronJob>("default", cron("off", json!({"suspend": true}))).await;
    cluster.create::<CronJob>("default", cron("often", json!({"timeZone": "Asia/Tokyo"}))).await;
    let running = cluster
        .eventually("a success", |crons: &[Arc<CronJob>]| {
            crons
                .iter()
                .find(|cron| cron.status.as_ref().is_some_and(|s| s.last_successful_time.is_some()))
                .cloned()
        })
        .await;
    assert_eq!(running.metadata.name.as_deref(), Some("often"));
    let status = running.status.as_ref().unwrap();
    assert!(status.last_schedule_time.is_some());
    events(
        &cluster,
        "often",
        &[("SuccessfulCreate", "Created job often-"), ("SawCompletedJob", "condition: Complete")],
    )
    .await;
    let made = cluster.eventually("a job", |jobs: &[Arc<Job>]| jobs.first().cloned()).await;
    let annotation =
        &made.metadata.annotations.as_ref().unwrap()["batch.kubernetes.io/cronjob-scheduled-timestamp"];
    assert!(annotation.ends_with("+09:00"), "{annotation}");
    assert_eq!(made.metadata.labels.as_ref().unwrap()["of"], "often");
    let minutes: i64 = made.metadata.name.as_ref().unwrap().strip_prefix("often-").unwrap().parse().unwrap();
    let at: jiff::Timestamp = annotation.parse().unwrap();
    assert_eq!(minutes, at.as_second() / 60);

    let off = cluster.api::<CronJob>("default").get("off").await.unwrap();
    assert!(off.status.is_none_or(|status| status.last_schedule_time.is_none()));
    cluster.api::<CronJob>("default").delete("often", &DeleteParams::background()).await.unwrap();
    cluster.eventually("its jobs gone", |jobs: &[Arc<Job>]| jobs.is_empty().then_some(())).await;
    cluster.stop().await;
}

/// The steps of upstream's conformance tests of evictions and statuses that the others do not take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_pods_are_ignored_and_foreign_conditions_stay() {
    let cluster = Cluster::start(&["n1"]).await;
    let spec = json!({"completions": 3, "parallelism": 3, "completionMode": "Indexed", "backoffLimitPerIndex": 0,
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}});
    cluster.create::<Job>("default", job("evicted", json!({}), spec)).await;
    let ready = |jobs: &[Arc<Job>]| {
        let status = jobs.first()?.status.clone()?;
        (status.ready == Some(3) && status.active == Some(3)).then_some(status)
    };
    cluster.eventually("three ready pods", ready).await;
    let jobs = cluster.api::<Job>("default");
    let custom = json!({"metadata": {"annotations": {"patchedstatus": "true"}}, "status": {"conditions": [
        {"type": "Custom", "status": "True", "lastProbeTime": null, "lastTransitionTime": "2024-01-01T00:00:00Z"}]}});
    let patched = jobs.patch_status("evicted", &PatchParams::default(), &Patch::Merge(custom)).await.unwrap();
    assert_eq!(patched.metadata.annotations.unwrap()["patchedstatus"], "true");

    let api: Api<Pod> = cluster.api("default");
    let old: Vec<_> = cluster.context.informers.get::<Pod>().list();
    assert_eq!(old.len(), 3);
    let labels = json!({"spec": {"suspend": false}, "metadata": {"labels": {"patched": "true"}}});
    jobs.patch("evicted", &PatchParams::default(), &Patch::Strategic(labels)).await.unwrap();
    for pod in &old {
        let name = pod.metadata.name.as_deref().unwrap();
        // An announcement of long ago would be taken back.
        let now = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap();
        let target = json!({"status": {"conditions": [{"type": "DisruptionTarget", "status": "True",
            "lastTransitionTime": now, "reason": "EvictionByEvictionAPI"}]}});
        api.patch_status(name, &PatchParams::default(), &Patch::Strategic(target)).await.unwrap();
        api.delete(name, &DeleteParams::default()).await.unwrap();
    }
    let uids: Vec<_> = old.iter().map(|pod| pod.metadata.uid.clone()).collect();
    cluster
        .eventually("three new pods", |pods: &[Arc<Pod>]| {
            let new = pods.iter().filter(|pod| !uids.contains(&pod.metadata.uid)).count();
            (new == 3 && pods.len() == 3).then_some(())
        })
        .await;
    let status = cluster.eventually("three ready pods", ready).await;
    assert_eq!(status.failed, None, "evictions do not count");
    let conditions = status.conditions.unwrap();
    assert!(conditions.iter().any(|condition| condition.type_ == "Custom"), "{conditions:?}");
    jobs.delete_collection(
        &DeleteParams::background(),
        &kube::api::ListParams::default().labels("patched=true"),
    )
    .await
    .unwrap();
    cluster.eventually("nothing left", |pods: &[Arc<Pod>]| pods.is_empty().then_some(())).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cron_jobs_forbid_and_replace() {
    let cluster = Cluster::start(&["n1"]).await;
    let template = job("", json!({}), json!({}));
    let crons = cluster.api::<CronJob>("default");
    for policy in ["Allow", "Forbid", "Replace"] {
        let name = policy.to_lowercase();
        let cron = json!({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": name}, "spec": {
            "schedule": "@every 1s", "concurrencyPolicy": policy, "suspend": true,
            "jobTemplate": {"spec": template["spec"]}}});
        let cron = cluster.create::<CronJob>("default", cron).await;
        // A job of an earlier run, which is still active.
        let mut earlier = job(&format!("{name}-1"), json!({}), json!({}));
        earlier["metadata"]["ownerReferences"] = json!([{"apiVersion": "batch/v1", "kind": "CronJob", "name": name,
            "uid": cron.metadata.uid, "controller": true, "blockOwnerDeletion": true}]);
        let earlier = cluster.create::<Job>("default", earlier).await;
        let status = json!({"status": {"lastScheduleTime": "2024-01-01T00:00:00Z", "active": [{"apiVersion": "batch/v1",
            "kind": "Job", "namespace": "default", "name": format!("{name}-1"), "uid": earlier.metadata.uid}]}});
        crons.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        let resume = Patch::Merge(json!({"spec": {"suspend": false}}));
        crons.patch(&name, &PatchParams::default(), &resume).await.unwrap();
    }
    let missed = "too many missed start times";
    events(&cluster, "allow", &[("SuccessfulCreate", "Created job allow-"), ("TooManyMissedTimes", missed)])
        .await;
    events(
        &cluster,
        "forbid",
        &[("JobAlreadyActive", "Not starting job because prior execution is running")],
    )
    .await;
    let replaced =
        [("SuccessfulDelete", "Deleted job replace-1"), ("SuccessfulCreate", "Created job replace-")];
    events(&cluster, "replace", &replaced).await;
    let active = |crons: &[Arc<CronJob>], name: &str| -> Option<Vec<String>> {
        let cron = crons.iter().find(|cron| cron.metadata.name.as_deref() == Some(name))?;
        let active = cron.status.as_ref()?.active.as_ref()?;
        Some(active.iter().filter_map(|job| job.name.clone()).collect())
    };
    cluster
        .eventually("the lists of active jobs", |crons: &[Arc<CronJob>]| {
            let allowed = active(crons, "allow")?;
            let forbidden = active(crons, "forbid")?;
            let replaced = active(crons, "replace")?;
            (allowed.len() >= 2 && forbidden == ["forbid-1"] && !replaced.contains(&"replace-1".to_owned()))
                .then_some(())
        })
        .await;
    cluster.stop().await;
}
