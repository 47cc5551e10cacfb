use ferrite_client::Api;
use std::sync::Arc;

use ferrite_controllers::{Config, Signers};
use ferrite_json::{Value, json};
use ferrite_pki::Authority;
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, ResourceQuota, Service};
use k8s_openapi::api::networking::v1::{IPAddress, ServiceCIDR};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};

use crate::support::Cluster;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_is_made_of_those_it_selects() {
    let cluster = Cluster::start(&[]).await;
    let roles: Api<ClusterRole> = Api::all(cluster.client.clone());
    let create = |role: Value| {
        let roles = roles.clone();
        async move {
            roles.create(&PostParams::default(), &ferrite_json::from_value(role).unwrap()).await.unwrap()
        }
    };
    create(json!({"metadata": {"name": "whole"},
        "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"to": "whole"}}]}}))
    .await;
    create(json!({"metadata": {"name": "part", "labels": {"to": "whole"}},
        "rules": [{"verbs": ["get"], "apiGroups": ["z"], "resources": ["zs"]}]}))
    .await;
    let rules = |all: &[Arc<ClusterRole>]| {
        let whole = all.iter().find(|role| role.metadata.name.as_deref() == Some("whole"))?;
        Some(whole.rules.as_ref().map_or(0, Vec::len))
    };
    cluster.eventually("the rule", |all| rules(all).filter(|count| *count == 1)).await;
    roles.delete("part", &DeleteParams::default()).await.unwrap();
    cluster.eventually("no rule", |all| rules(all).filter(|count| *count == 0)).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_is_counted_when_it_comes_and_when_something_goes() {
    let cluster = Cluster::start(&[]).await;
    let map = |name: &str| json!({"metadata": {"name": name}});
    cluster.create_namespace("q").await;
    cluster.create::<ConfigMap>("q", map("a")).await;
    cluster
        .create::<ResourceQuota>(
            "q",
            json!({"metadata": {"name": "q"}, "spec": {"hard": {"configmaps": "9", "pods": "3"}}}),
        )
        .await;
    let used = |wanted: &'static str| {
        move |all: &[Arc<ResourceQuota>]| {
            let used = all.first()?.status.as_ref()?.used.as_ref()?;
            (used.get("configmaps")?.0 == wanted).then_some(())
        }
    };
    // The CA's map is there too.
    cluster.eventually("the count", used("2")).await;
    cluster.create::<ConfigMap>("q", map("b")).await;
    cluster.eventually("the charge", used("3")).await;
    cluster.api::<ConfigMap>("q").delete("a", &DeleteParams::default()).await.unwrap();
    cluster.eventually("the release", used("2")).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_with_scopes_keep_count_of_pods_that_come_while_others_go() {
    let cluster = Cluster::start(&[]).await;
    cluster.create_namespace("q").await;
    for (name, scope) in [("ending", "Terminating"), ("lasting", "NotTerminating")] {
        let spec = json!({"hard": {"pods": "5", "requests.cpu": "1"}, "scopes": [scope]});
        cluster.create::<ResourceQuota>("q", json!({"metadata": {"name": name}, "spec": spec})).await;
    }
    let used = |ending: &'static str, lasting: &'static str| {
        move |all: &[Arc<ResourceQuota>]| {
            let of = |name: &str| {
                let quota = all.iter().find(|quota| quota.metadata.name.as_deref() == Some(name))?;
                let used = quota.status.as_ref()?.used.as_ref()?;
                Some((used.get("pods")?.0.clone(), used.get("requests.cpu")?.0.clone()))
            };
            let wanted = |pods: &str| (pods.to_owned(), if pods == "0" { "0" } else { "100m" }.to_owned());
            (of("ending")? == wanted(ending) && of("lasting")? == wanted(lasting)).then_some(())
        }
    };
    let pod = |name: &str, deadline: Option<i64>| {
        json!({"metadata": {"name": name}, "spec": {"activeDeadlineSeconds": deadline, "containers":
            [{"name": "c", "image": "a", "resources": {"requests": {"cpu": "100m"}}}]}})
    };
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    cluster.eventually("the first count", used("0", "0")).await;
    let pods = cluster.api::<Pod>("q");
    for _ in 0..30 {
        cluster.create::<Pod>("q", pod("lasting", None)).await;
        cluster.eventually("a lasting pod", used("0", "1")).await;
        // The next pod comes while the quota is counted because this one goes.
        pods.delete("lasting", &now).await.unwrap();
        cluster.create::<Pod>("q", pod("ending", Some(3600))).await;
        cluster.eventually("an ending pod", used("1", "0")).await;
        pods.delete("ending", &now).await.unwrap();
    }
    cluster.eventually("nothing", used("0", "0")).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_knows_how_many_may_go() {
    let cluster = Cluster::start(&["n1"]).await;
    cluster
        .create::<PodDisruptionBudget>(
            "default",
            json!({"metadata": {"name": "b"},
                   "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}}),
        )
        .await;
    for name in ["p1", "p2"] {
        cluster
            .create::<Pod>(
                "default",
                json!({"metadata": {"name": name, "labels": {"app": "x"}},
                       "spec": {"containers": [{"name": "c", "image": "a"}]}}),
            )
            .await;
    }
    cluster
        .eventually("one that may go", |all: &[Arc<PodDisruptionBudget>]| {
            let status = all.first()?.status.as_ref()?;
            (status.disruptions_allowed == Some(1) && status.current_healthy == Some(2)).then_some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_approved_is_signed() {
    let authority = Arc::new(Authority::create("kubernetes").unwrap());
    let config = Config { signers: Signers::all(authority), ..Config::default() };
    let cluster = Cluster::start_with(&[], config).await;
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, "alice");
    let pem = params.serialize_request(&key).unwrap().pem().unwrap();
    let mut request: CertificateSigningRequest = ferrite_json::from_value(json!({
        "metadata": {"name": "r"},
        "spec": {"request": "", "signerName": "kubernetes.io/kube-apiserver-client", "usages": ["client auth"]},
    }))
    .unwrap();
    request.spec.request = k8s_openapi::ByteString(pem.into_bytes());
    let requests: Api<CertificateSigningRequest> = Api::all(cluster.client.clone());
    requests.create(&PostParams::default(), &request).await.unwrap();
    let approved = json!({"status": {"conditions": [{"type": "Approved", "status": "True", "reason": "R"}]}});
    requests
        .patch_subresource("approval", "r", &PatchParams::default(), &Patch::Merge(approved))
        .await
        .unwrap();
    cluster
        .eventually("the certificate", |all: &[Arc<CertificateSigningRequest>]| {
            let certificate = all.first()?.status.as_ref()?.certificate.as_ref()?;
            certificate.0.starts_with(b"-----BEGIN CERTIFICATE-----").then_some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_range_of_addresses_stays_while_they_are_held() {
    let config = Config { service_range_grace: std::time::Duration::ZERO, ..Config::default() };
    let cluster = Cluster::start_with(&[], config).await;
    let ranges: Api<ServiceCIDR> = Api::all(cluster.client.clone());
    let range = json!({"metadata": {"name": "more"}, "spec": {"cidrs": ["10.77.0.0/24"]}});
    ranges.create(&PostParams::default(), &ferrite_json::from_value(range).unwrap()).await.unwrap();
    let ready = |status: &'static str| {
        move |all: &[Arc<ServiceCIDR>]| {
            let more = all.iter().find(|range| range.metadata.name.as_deref() == Some("more"))?;
            let held = more
                .metadata
                .finalizers
                .iter()
                .flatten()
                .any(|f| f == "networking.k8s.io/service-cidr-finalizer");
            let conditions = more.status.as_ref()?.conditions.as_ref()?;
            (held && conditions.iter().any(|c| c.type_ == "Ready" && c.status == status)).then_some(())
        }
    };
    cluster.eventually("a range that is ready", ready("True")).await;
    let service =
        json!({"metadata": {"name": "s"}, "spec": {"clusterIP": "10.77.0.9", "ports": [{"port": 80}]}});
    cluster.create::<Service>("default", service).await;
    // Nobody waits here for all to know of the address, as in a real cluster: the controller must know it before.
    cluster
        .eventually("the address", |all: &[Arc<IPAddress>]| {
            all.iter().find(|address| address.metadata.name.as_deref() == Some("10.77.0.9")).map(|_| ())
        })
        .await;
    ranges.delete("more", &DeleteParams::default()).await.unwrap();
    cluster.eventually("a range that cannot go", ready("False")).await;
    cluster.api::<Service>("default").delete("s", &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("a range that is gone", |all: &[Arc<ServiceCIDR>]| {
            (!all.iter().any(|range| range.metadata.name.as_deref() == Some("more"))).then_some(())
        })
        .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expressions_of_policies_are_checked_against_the_kinds_they_match() {
    let cluster = Cluster::start(&[]).await;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let definition = json!({
        "metadata": {"name": "wids.stable.example.com"},
        "spec": {"group": "stable.example.com", "scope": "Namespaced",
            "names": {"plural": "wids", "singular": "wid", "kind": "Wid", "listKind": "WidList"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object",
                "properties": {"spec": {"type": "object", "properties": {"n": {"type": "integer"}}}}}}}]},
    });
    definitions.create(&PostParams::default(), &ferrite_json::from_value(definition).unwrap()).await.unwrap();
    let established = |all: &[Arc<CustomResourceDefinition>]| {
        let conditions = all.first()?.status.as_ref()?.conditions.as_ref()?;
        conditions.iter().any(|c| c.type_ == "Established" && c.status == "True").then_some(())
    };
    cluster.eventually("the definition", established).await;

    let policies: Api<ValidatingAdmissionPolicy> = Api::all(cluster.client.clone());
    let policy = |name: &str, group: &str, resource: &str, expressions: &[&str]| {
        let validations: Vec<Value> = expressions.iter().map(|e| json!({"expression": e})).collect();
        json!({"metadata": {"name": name}, "spec": {"validations": validations, "matchConstraints": {"resourceRules": [
            {"apiGroups": [group], "apiVersions": ["v1"], "resources": [resource], "operations": ["CREATE"]}]}}})
    };
    let objects = [
        policy("typed", "apps", "deployments", &["object.spec.replicas > 'x'", "object.spec.replicas > 1"]),
        policy("custom", "stable.example.com", "wids", &["object.spec.n == 1", "object.spec.m == 1"]),
        policy("good", "", "pods", &["object.spec.containers.all(c, c.image != '')"]),
    ];
    for object in objects {
        policies.create(&PostParams::default(), &ferrite_json::from_value(object).unwrap()).await.unwrap();
    }
    // The warnings in a policy's status, once it is written.
    let warnings = |name: &'static str| {
        move |all: &[Arc<ValidatingAdmissionPolicy>]| {
            let policy = all.iter().find(|policy| policy.metadata.name.as_deref() == Some(name))?;
            let status = policy.status.as_ref()?;
            status.observed_generation.filter(|observed| Some(*observed) == policy.metadata.generation)?;
            let checking = status.type_checking.as_ref()?;
            let warnings = checking.expression_warnings.iter().flatten();
            Some(warnings.map(|w| (w.field_ref.clone(), w.warning.clone())).collect::<Vec<_>>())
        }
    };
    let typed = cluster.eventually("typed", warnings("typed")).await;
    assert_eq!(typed.len(), 1);
    assert_eq!(typed[0].0, "spec.validations[0].expression");
    assert_eq!(
        typed[0].1,
        "apps/v1, Kind=Deployment: ERROR: <input>:1:22: found no matching overload for '_>_' applied to '(int, string)'\n | object.spec.replicas > 'x'\n | .....................^\n"
    );
    let custom = cluster.eventually("custom", warnings("custom")).await;
    assert_eq!(custom.len(), 1);
    assert_eq!(custom[0].0, "spec.validations[1].expression");
    assert!(
        custom[0].1.starts_with("stable.example.com/v1, Kind=Wid: ERROR: <input>:1:12: undefined field 'm'"),
        "{custom:?}"
    );
    assert!(cluster.eventually("good", warnings("good")).await.is_empty());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_announced_disruption_that_does_not_happen_is_taken_back() {
    let cluster = Cluster::start(&["n"]).await;
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "a"}]}});
    cluster.create::<Pod>("default", pod).await;
    let announced = json!({"status": {"conditions": [{"type": "DisruptionTarget", "status": "True",
        "reason": "PreemptionByScheduler", "lastTransitionTime": "2020-01-01T00:00:00Z"}]}});
    let pods = cluster.api::<Pod>("default");
    pods.patch_status("p", &PatchParams::default(), &Patch::Strategic(announced)).await.unwrap();
    let condition = cluster
        .eventually("the announcement taken back", |pods: &[Arc<Pod>]| {
            let conditions = pods.first()?.status.as_ref()?.conditions.as_ref()?;
            conditions.iter().find(|c| c.type_ == "DisruptionTarget" && c.status == "False").cloned()
        })
        .await;
    assert_eq!(condition.reason, None);
    cluster.stop().await;
}
