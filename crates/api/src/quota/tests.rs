use super::*;
use ferrite_json::json;

fn quota(spec: Value, hard: Value, used: Value) -> Value {
    json!({"metadata": {"name": "q"}, "spec": spec, "status": {"hard": hard, "used": used}})
}

fn pod(resources: Value) -> Value {
    json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "resources": resources}]}})
}

#[test]
fn a_pod_is_refused_charged_or_none_of_the_quotas_business() {
    let pods = evaluator("", "pods").unwrap();
    let cpu = |amount: &str| pod(json!({"requests": {"cpu": amount}}));
    let hard = json!({"pods": "2", "requests.cpu": "1"});
    let used = json!({"pods": "1", "requests.cpu": "600m"});
    let rows = [
        (
            quota(json!({}), hard.clone(), used.clone()),
            cpu("500m"),
            Err(
                "exceeded quota: q, requested: requests.cpu=500m, used: requests.cpu=600m, limited: requests.cpu=1",
            ),
        ),
        (quota(json!({}), hard.clone(), used.clone()), cpu("400m"), Ok(Some(("requests.cpu", "1")))),
        (
            quota(json!({}), hard.clone(), used.clone()),
            pod(json!({})),
            Err("failed quota: q: must specify requests.cpu for: c"),
        ),
        (
            quota(json!({}), hard.clone(), json!({"pods": "1"})),
            cpu("1m"),
            Err("status unknown for quota: q, resources: pods,requests.cpu"),
        ),
        (
            quota(json!({"scopes": ["BestEffort"]}), json!({"pods": "0"}), json!({"pods": "0"})),
            cpu("1"),
            Ok(None),
        ),
        (
            quota(json!({"scopes": ["BestEffort"]}), json!({"pods": "0"}), json!({"pods": "0"})),
            pod(json!({})),
            Err("exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0"),
        ),
        (quota(json!({}), json!({"secrets": "0"}), json!({"secrets": "0"})), cpu("1"), Ok(None)),
    ];
    for (quota, pod, expected) in rows {
        let found = charge(&pods, &[], &[quota], &pod, None).map_err(|e| e.to_string());
        match (found, expected) {
            (Ok(changed), Ok(Some((name, amount)))) => {
                assert_eq!(changed[0].1[name].to_string(), amount, "{pod}");
            }
            (Ok(changed), Ok(None)) => assert!(changed.is_empty(), "{changed:?}"),
            (found, expected) => assert_eq!(found.unwrap_err(), expected.unwrap_err()),
        }
    }
}

#[test]
fn usage_has_the_names_that_quotas_give_it() {
    let rows = [
        (
            ("", "services"),
            json!({"spec": {"type": "LoadBalancer", "ports": [{"port": 1}, {"port": 2}]}}),
            &[("count/services", "1"), ("services.nodeports", "2"), ("services.loadbalancers", "1")][..],
        ),
        (
            ("", "services"),
            json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": [{"port": 1}]}}),
            &[("services.nodeports", "0")],
        ),
        (
            ("", "persistentvolumeclaims"),
            json!({"spec": {"storageClassName": "gold", "resources": {"requests": {"storage": "2Gi"}}}}),
            &[
                ("requests.storage", "2Gi"),
                ("gold.storageclass.storage.k8s.io/requests.storage", "2Gi"),
                ("gold.storageclass.storage.k8s.io/persistentvolumeclaims", "1"),
            ],
        ),
        (("apps", "deployments"), json!({}), &[("count/deployments.apps", "1")]),
        (
            ("", "pods"),
            pod(json!({"requests": {"example.com/gpu": "2"}, "limits": {"memory": "1Gi"}})),
            &[
                ("requests.example.com/gpu", "2"),
                ("limits.memory", "1Gi"),
                ("pods", "1"),
                ("count/pods", "1"),
            ],
        ),
        (
            ("resource.k8s.io", "resourceclaims"),
            json!({"spec": {"devices": {"requests": [{"exactly": {"deviceClassName": "gpu", "count": 3}}]}}}),
            &[("gpu.deviceclass.resource.k8s.io/devices", "3")],
        ),
    ];
    for ((group, plural), object, expected) in rows {
        let usage = evaluator(group, plural).unwrap().usage(&object);
        for (name, amount) in expected {
            assert_eq!(
                usage.get(*name).map(ToString::to_string).as_deref(),
                Some(*amount),
                "{plural} {name}"
            );
        }
    }
    assert!(evaluator("", "events").is_none());
}

#[test]
fn an_update_costs_the_difference() {
    let services = evaluator("", "services").unwrap();
    let service = |kind: &str| json!({"spec": {"type": kind, "ports": [{"port": 1}]}});
    let quota = quota(json!({}), json!({"services.nodeports": "1"}), json!({"services.nodeports": "1"}));
    let found = charge(
        &services,
        &[],
        std::slice::from_ref(&quota),
        &service("ClusterIP"),
        Some(&service("NodePort")),
    )
    .unwrap();
    assert_eq!(found[0].1["services.nodeports"].to_string(), "0");
    assert!(charge(&services, &[], &[quota], &service("NodePort"), Some(&service("ClusterIP"))).is_err());
}

#[test]
fn an_update_that_uses_less_is_allowed_where_too_much_is_used() {
    let services = evaluator("", "services").unwrap();
    let service =
        |ports: usize| json!({"spec": {"type": "NodePort", "ports": vec![json!({"port": 1}); ports]}});
    let quota = quota(json!({}), json!({"services.nodeports": "1"}), json!({"services.nodeports": "5"}));
    let found = charge(&services, &[], std::slice::from_ref(&quota), &service(2), Some(&service(3))).unwrap();
    assert_eq!(found[0].1["services.nodeports"].to_string(), "4");
    assert!(charge(&services, &[], &[quota], &service(4), Some(&service(3))).is_err());
}

#[test]
fn an_update_into_a_scope_counts_whole() {
    let pods = evaluator("", "pods").unwrap();
    let old = pod(json!({"requests": {"cpu": "1"}}));
    let mut new = old.clone();
    new["spec"]["activeDeadlineSeconds"] = 60.into();
    assert!(pods.counts_update(None, Some(&old), &new) && pods.counts_update(None, Some(&new), &old));
    assert!(
        !pods.counts_update(None, Some(&old), &old) && !pods.counts_update(Some("status"), Some(&old), &new)
    );
    let scoped = |scope: &str, hard: &str| {
        let hard = json!({"pods": hard, "requests.cpu": "9"});
        quota(json!({"scopes": [scope]}), hard, json!({"pods": "1", "requests.cpu": "1"}))
    };
    let quotas = [scoped("NotTerminating", "5"), scoped("Terminating", "5")];
    let found = charge(&pods, &[], &quotas, &new, Some(&old)).unwrap();
    assert_eq!(found.len(), 1);
    let shown: Vec<String> = found[0].1.iter().map(|(n, a)| format!("{n}={a}")).collect();
    assert_eq!((found[0].0, shown), (1, vec!["pods=2".to_owned(), "requests.cpu=2".to_owned()]));
    let full = charge(&pods, &[], &[scoped("Terminating", "1")], &new, Some(&old)).unwrap_err().to_string();
    assert_eq!(full, "exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1");
    // The next update of the same pod costs nothing.
    assert_eq!(charge(&pods, &[], &quotas, &new, Some(&new)), Ok(Vec::new()));
}

#[test]
fn a_pod_counts_until_its_grace_period_is_over_twice() {
    let pods = evaluator("", "pods").unwrap();
    let now = jiff::Timestamp::now();
    for (since, grace, counts) in
        [(10, Some(30), true), (40, Some(30), false), (-10, Some(0), true), (10, None, true)]
    {
        let mut pod = pod(json!({}));
        let deleted = now - jiff::SignedDuration::from_secs(since);
        pod["metadata"]["deletionTimestamp"] = deleted.to_string().into();
        if let Some(grace) = grace {
            pod["metadata"]["deletionGracePeriodSeconds"] = grace.into();
        }
        assert_eq!(pods.usage(&pod).contains_key("pods"), counts, "{since} {grace:?}");
    }
}

#[test]
fn scopes_select_by_priority_and_affinity() {
    let pods = evaluator("", "pods").unwrap();
    let term = |operator: &str, values: &[&str]| {
        let scope = json!([{"scopeName": "PriorityClass", "operator": operator, "values": values}]);
        quota(
            json!({"scopeSelector": {"matchExpressions": scope}}),
            json!({"pods": "1"}),
            json!({"pods": "0"}),
        )
    };
    let high = json!({"spec": {"priorityClassName": "high"}});
    let plain = json!({"spec": {}});
    let crossing = json!({"spec": {"affinity": {"podAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [{"namespaces": ["other"]}],
    }}}});
    let cross = quota(json!({"scopes": ["CrossNamespacePodAffinity"]}), json!({"pods": "0"}), json!({}));
    for (quota, pod, expected) in [
        (term("In", &["high"]), &high, true),
        (term("In", &["high"]), &plain, false),
        (term("NotIn", &["high"]), &plain, true),
        (term("Exists", &[]), &high, true),
        (term("DoesNotExist", &[]), &high, false),
        (cross.clone(), &crossing, true),
        (cross, &plain, false),
    ] {
        let hard = amounts(&quota["status"]["hard"]);
        assert_eq!(pods.matches(&quota, &hard, pod), expected, "{quota} {pod}");
    }
}

#[test]
fn counting_anew_leaves_no_resource_out() {
    let quota = quota(json!({}), json!({"pods": "9", "requests.cpu": "9", "secrets": "1"}), json!({}));
    let hard = amounts(&quota["status"]["hard"]);
    let pods = evaluator("", "pods").unwrap();
    let (a, mut done) = (pod(json!({"requests": {"cpu": "1"}})), pod(json!({"requests": {"cpu": "1"}})));
    done["status"] = json!({"phase": "Succeeded"});
    let used = recount(&quota, &hard, [(&pods, &a), (&pods, &done)]);
    let shown: Vec<String> = used.iter().map(|(n, a)| format!("{n}={a}")).collect();
    assert_eq!(shown, ["pods=1", "requests.cpu=1", "secrets=0"]);
}

#[test]
fn what_is_limited_needs_a_quota_that_covers_it() {
    let pods = evaluator("", "pods").unwrap();
    let limited = |entry: Value| vec![Limited::parse(&entry).unwrap()];
    let by_name = limited(json!({"resource": "pods", "matchContains": ["requests.cpu", "gpu"]}));
    let by_scope = limited(json!({"resource": "pods",
        "matchScopes": [{"scopeName": "PriorityClass", "operator": "In", "values": ["high", "higher"]}]}));
    let elsewhere = limited(json!({"resource": "pods", "apiGroup": "other", "matchContains": ["cpu"]}));
    let important = json!({"spec": {"priorityClassName": "high", "containers": []}});
    let plain = pod(json!({"requests": {"cpu": "1"}}));
    let cpu = quota(json!({}), json!({"requests.cpu": "2"}), json!({"requests.cpu": "0"}));
    let count = quota(json!({}), json!({"pods": "2"}), json!({"pods": "0"}));
    let high = quota(
        json!({"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "Exists"}]}}),
        json!({"pods": "2"}),
        json!({"pods": "0"}),
    );
    let consume = Some("insufficient quota to consume: requests.cpu");
    let scopes = Some("insufficient quota to match these scopes: [{PriorityClass In [high higher]}]");
    let rows = [
        (&by_name, vec![], &plain, consume),
        (&by_name, vec![count.clone()], &plain, consume),
        (&by_name, vec![cpu], &plain, None),
        (&by_name, vec![], &important, None),
        (&elsewhere, vec![], &plain, None),
        (&by_scope, vec![], &plain, None),
        (&by_scope, vec![], &important, scopes),
        (&by_scope, vec![count], &important, scopes),
        (&by_scope, vec![high], &important, None),
    ];
    for (limited, quotas, pod, expected) in rows {
        let found = charge(&pods, limited, &quotas, pod, None).err().map(|e| e.to_string());
        assert_eq!(found.as_deref(), expected, "{limited:?} {quotas:?} {pod}");
    }
    // An update that uses no more than before needs no quota.
    assert_eq!(charge(&pods, &by_name, &[], &plain, Some(&plain)), Ok(Vec::new()));
    assert!(Limited::parse(&json!({"matchContains": ["cpu"]})).is_err());
}
