mod behaviour;
mod changes;
mod compared;
mod further;
mod hostile;
mod odd_values;
mod pod_life;
mod pods;
mod validation;
mod warned;
mod wider;

use super::*;
use crate::field::FieldErrors;
use crate::resource::Strategy;
use ferrite_json::{Value, json};
use std::sync::Arc;

/// The strategy of the newest stable version of a kind; where two groups have it, the first's.
fn strategy(kind: &str) -> Arc<dyn Strategy> {
    let version = if kind == "HorizontalPodAutoscaler" { "v2" } else { "v1" };
    built_in().into_iter().find(|r| r.kind == kind && r.version == version).unwrap().strategy
}

fn texts(errors: FieldErrors) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}

/// Puts `changes` over `object`, objects merged and everything else replaced.
fn overlay(object: &mut Value, changes: &Value) {
    match changes {
        Value::Object(fields) if object.is_object() => {
            for (key, value) in fields {
                overlay(&mut object[key], value);
            }
        }
        other => *object = other.clone(),
    }
}

/// An authority's certificate, as PEM.
pub(in crate::kinds) fn authority() -> String {
    format!("-----BEGIN CERTIFICATE-----\n{AUTHORITY}\n-----END CERTIFICATE-----\n")
}

const AUTHORITY: &str = "MIIBLjCB4aADAgECAhRpAuRf8Zs6x60mse/UVE0t9TCYozAFBgMrZXAwDDEKMAgGA1UEAwwBYTAgFw0yNjExMTgxNjI4MjBaGA8yMTI2MTAyNTE2MjgyMFowDDEKMAgGA1UEAwwBYTAqMAUGAytlcAMhAGcdTddqnuasNGrzmjPLxGp5Ud3z2DF5ygtvHpUixxyUo1MwUTAdBgNVHQ4EFgQUellIG7fSaZbTPwj4WG+sS4Cl2C8wHwYDVR0jBBgwFoAUellIG7fSaZbTPwj4WG+sS4Cl2C8wDwYDVR0TAQH/BAUwAwEB/zAFBgMrZXADQQBvmxjkC1yFwpdgXq0o5GY8M0hnaOVmIqA1rHBv7dZQ7gnWC5kYHJXGo9gXdKeGVJ1ssCTDtqo4iH6VwWC/0mgH";
/// A PKCS#10 request that has nothing but a key.
const EMPTY_REQUEST: &str = "MH8wMwIBADAAMCowBQYDK2VwAyEAZx1N12qe5qw0avOaM8vEanlR3fPYMXnKC28elSLHHJSgADAFBgMrZXADQQA6z4R9qzS989AWS3lHCZ+q42FWaSyxJfzhqMhZ0a+FuRautM2fy7nrAqibJwu0IJDyO/ZUA9MKVB+Qh+FmYoYA";

fn minimal(kind: &str) -> Value {
    let template =
        json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let workload = json!({"spec": {"selector": {"matchLabels": {"app": "a"}}, "template": template}});
    let job = json!({"template": {"spec": {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never"}}});
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["*"]});
    let webhook = json!({"name": "w.example.com", "clientConfig": {"url": "https://192.0.2.1/"}, "sideEffects": "None",
        "admissionReviewVersions": ["v1"], "rules": [rule]});
    let storage = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}},
        "capacity": {"storage": "1Gi"}});
    let request = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURSBSRVFVRVNULS0tLS0KQUFBQQotLS0tLUVORCBDRVJUSUZJQ0FURSBSRVFVRVNULS0tLS0K";
    let mut object = match kind {
        "Pod" => json!({"spec": template["spec"]}),
        "ClusterTrustBundle" => json!({"spec": {"trustBundle": authority()}}),
        "PodCertificateRequest" => {
            json!({"spec": {"signerName": "example.com/s", "podName": "p", "podUID": "1",
            "serviceAccountName": "s", "serviceAccountUID": "2", "nodeName": "n", "nodeUID": "3",
            "maxExpirationSeconds": 3600, "stubPKCS10Request": EMPTY_REQUEST}})
        }
        "Deployment" | "ReplicaSet" | "DaemonSet" | "StatefulSet" => workload,
        "ReplicationController" => json!({"spec": {"selector": {"app": "a"}, "template": template}}),
        "PodTemplate" => json!({"template": template}),
        "Job" => json!({"spec": job}),
        "CronJob" => json!({"spec": {"schedule": "@daily", "jobTemplate": {"spec": job}}}),
        "Service" => json!({"spec": {"ports": [{"port": 80}]}}),
        "EndpointSlice" => json!({"addressType": "IPv4", "endpoints": [{"addresses": ["192.0.2.1"]}]}),
        "Event" => json!({"involvedObject": {"namespace": "n"}}),
        "events.k8s.io Event" => {
            json!({"regarding": {"namespace": "n"}, "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": "c", "reportingInstance": "i", "action": "A", "reason": "R", "type": "Normal"})
        }
        "Binding" => json!({"target": {"kind": "Node", "name": "n"}}),
        "PersistentVolumeClaim" => json!({"spec": storage}),
        "PersistentVolume" => {
            let mut spec = storage;
            spec["hostPath"] = json!({"path": "/x"});
            json!({"spec": spec})
        }
        "HorizontalPodAutoscaler" => {
            json!({"spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}, "maxReplicas": 3}})
        }
        "ControllerRevision" => json!({"data": {}}),
        "ValidatingWebhookConfiguration" | "MutatingWebhookConfiguration" => json!({"webhooks": [webhook]}),
        "ValidatingAdmissionPolicy" => {
            json!({"spec": {"matchConstraints": {"resourceRules": [rule]}, "validations": [{"expression": "true"}]}})
        }
        "MutatingAdmissionPolicy" => json!({"spec": {"matchConstraints": {"resourceRules": [rule]},
            "reinvocationPolicy": "Never", "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": "[JSONPatch{op: 'remove', path: '/data'}]"}}]}}),
        "ValidatingAdmissionPolicyBinding" => {
            json!({"spec": {"policyName": "p", "validationActions": ["Deny"]}})
        }
        "MutatingAdmissionPolicyBinding" => json!({"spec": {"policyName": "p"}}),
        "CustomResourceDefinition" => json!({"spec": {"group": "x.example", "scope": "Cluster",
            "names": {"plural": "ws", "kind": "W"}, "versions": [{"name": "v1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object"}}}]}}),
        "APIService" => json!({"spec": {"group": "x.example", "version": "v1", "groupPriorityMinimum": 1,
            "versionPriority": 1}}),
        "SubjectAccessReview" => json!({"spec": {"user": "u", "nonResourceAttributes": {"path": "/"}}}),
        "SelfSubjectAccessReview" => json!({"spec": {"nonResourceAttributes": {"path": "/"}}}),
        "LocalSubjectAccessReview" => {
            json!({"spec": {"user": "u", "resourceAttributes": {"namespace": "n"}}})
        }
        "CertificateSigningRequest" => {
            json!({"spec": {"request": request, "signerName": "x.example/s", "usages": ["client auth"]}})
        }
        "FlowSchema" => json!({"spec": {"priorityLevelConfiguration": {"name": "p"}}}),
        "PriorityLevelConfiguration" => {
            json!({"spec": {"type": "Limited", "limited": {"limitResponse": {"type": "Reject"}}}})
        }
        "IngressClass" => json!({"spec": {"controller": "x.example/c"}}),
        "Ingress" => json!({"spec": {"defaultBackend": {"service": {"name": "s", "port": {"number": 80}}}}}),
        "IPAddress" => json!({"spec": {"parentRef": {"resource": "services", "name": "s"}}}),
        "ServiceCIDR" => json!({"spec": {"cidrs": ["198.18.0.0/24"]}}),
        "RuntimeClass" => json!({"handler": "runc"}),
        "RoleBinding" | "ClusterRoleBinding" => json!({"roleRef": {"kind": "ClusterRole", "name": "view"}}),
        "ResourceSlice" => json!({"spec": {"driver": "d.example", "allNodes": true,
            "pool": {"name": "p", "resourceSliceCount": 1}}}),
        "StorageClass" => json!({"provisioner": "x.example/p"}),
        "LeaseCandidate" => {
            json!({"spec": {"leaseName": "l", "binaryVersion": "1.36.0", "emulationVersion": "1.36.0",
            "strategy": "OldestEmulationVersion"}})
        }
        "DeviceTaintRule" => json!({"spec": {"taint": {"key": "k", "effect": "NoSchedule"}}}),
        "ResourcePoolStatusRequest" => json!({"spec": {"driver": "d.example"}}),
        "PodGroup" => json!({"spec": {"schedulingPolicy": {"basic": {}}}}),
        "Workload" => {
            json!({"spec": {"podGroupTemplates": [{"name": "t", "schedulingPolicy": {"basic": {}}}]}})
        }
        "StorageVersionMigration" => json!({"spec": {"resource": {"resource": "pods"}}}),
        "CSIStorageCapacity" => json!({"storageClassName": "c"}),
        "VolumeAttachment" => {
            json!({"spec": {"attacher": "a.example", "nodeName": "n", "source": {"persistentVolumeName": "p"}}})
        }
        "VolumeAttributesClass" => json!({"driverName": "d.example", "parameters": {"a": "b"}}),
        _ => json!({}),
    };
    let name = match kind {
        "CustomResourceDefinition" => "ws.x.example",
        "APIService" => "v1.x.example",
        _ => "x",
    };
    object["metadata"] = json!({"name": name, "namespace": "n", "uid": "u"});
    object
}

/// Errors of a minimal object with some fields changed, defaulted as the server would.
fn errors_with(kind: &str, changes: &Value) -> Vec<String> {
    let mut object = minimal(kind);
    overlay(&mut object, changes);
    errors_of(&*strategy(kind), object)
}

fn errors_of(strategy: &dyn Strategy, mut object: Value) -> Vec<String> {
    strategy.default(&mut object);
    strategy.prepare_create(&mut object);
    texts(strategy.validate(&object))
}

#[test]
fn minimal_objects_are_valid() {
    for resource in built_in() {
        let qualified = format!("{} {}", resource.group, resource.kind);
        let object = match qualified.as_str() {
            "events.k8s.io Event" => minimal(&qualified),
            _ => minimal(&resource.kind),
        };
        assert_eq!(errors_of(&*resource.strategy, object), [""; 0], "{resource:?}");
    }
}

#[test]
fn every_row_is_complete() {
    for resource in built_in() {
        assert!(
            !resource.kind.is_empty() && resource.plural.starts_with(&resource.singular[..3]),
            "{resource:?}"
        );
        assert!(resource.verbs.is_sorted(), "{resource:?}");
        assert!(resource.subresources.is_sorted_by_key(|s| s.name), "{resource:?}");
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let mut object = ferrite_json::json!({"metadata": {"name": "x"}});
        resource.strategy.default(&mut object);
        let once = object.clone();
        resource.strategy.default(&mut object);
        assert_eq!(object, once, "defaulting {resource:?} twice");
        let (columns, cells) = (resource.strategy.columns(), resource.strategy.cells(&object, now));
        // As upstream: a row of an IPAddress has an age for which there is no column.
        let more = usize::from(resource.kind == "IPAddress");
        assert_eq!(columns.len() + more, cells.len(), "{resource:?}");
        for field in resource.strategy.selectable_fields() {
            resource.strategy.selectable_value(&object, field);
        }
    }
}
