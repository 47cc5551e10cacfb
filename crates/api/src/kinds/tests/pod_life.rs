//! Tests of changes to a pod, of nodes' reports about it, and of warnings when it is made.

use super::pods::{APP_ARMOR, SECCOMP, annotated, container, volume, with};
use super::*;

#[test]
fn subresources_of_pods_that_cannot_have_them() {
    let pods = strategy("Pod");
    let pod = |changes: Value| {
        let mut pod = with(minimal("Pod"), changes);
        pods.default(&mut pod);
        pod
    };
    let mirror = pod(json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "m"}}}));
    let sized = |cpu: &str| pod(container(json!({"resources": {"limits": {"cpu": cpu, "memory": "1Gi"}}})));
    let unsized_pod = pod(container(json!({"resources": {"requests": {"cpu": "1"}}})));
    let policy = pod(container(
        json!({"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}, "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}]}),
    ));
    let running = |status: Value| {
        let state = json!({"name": "c", "state": {"running": {}}});
        with(sized("1"), json!({"status": with(status, json!({"containerStatuses": [state]}))}))
    };
    let small = || json!({"requests": {"cpu": "1", "memory": "1Gi"}});
    let whole = |resources: Value| {
        let own = container(json!({"resources": {"requests": {"cpu": "1"}}}));
        pod(with(own, json!({"spec": {"resources": resources}})))
    };
    let kept = "spec.resources.requests: Forbidden: pod-level resource requests cannot be removed";
    for (subresource, old, new, messages) in [
        ("resize", &whole(small()), &whole(json!({"requests": {"cpu": "2", "memory": "64Mi"}})), vec![]),
        ("resize", &whole(json!({})), &whole(small()), vec![]),
        ("resize", &whole(small()), &whole(with(small(), json!({"limits": {"cpu": "4"}}))), vec![]),
        ("resize", &whole(small()), &whole(json!({"requests": {"cpu": "2"}})), vec![kept]),
        (
            "resize",
            &whole(small()),
            &whole(json!(null)),
            vec!["spec.resources: Forbidden: pod-level resources cannot be removed"],
        ),
        (
            "resize",
            &whole(small()),
            &whole(with(
                small(),
                json!({"requests": {"hugepages-2Mi": "4Mi"}, "limits": {"hugepages-2Mi": "4Mi"}}),
            )),
            vec!["spec: Forbidden: only cpu and memory resources are mutable at pod-level"],
        ),
        (
            "resize",
            &running(json!({})),
            &sized("2"),
            vec!["spec: Forbidden: Pod running on node without support for resize"],
        ),
        (
            "resize",
            &with(sized("1"), json!({"status": {"nodeAllocatableResourceClaimStatuses": [{}]}})),
            &sized("2"),
            vec!["spec: Forbidden: pods with node allocatable resource claims cannot be resized"],
        ),
        (
            "ephemeralcontainers",
            &mirror,
            &mirror,
            vec!["[]: Forbidden: static pods do not support ephemeral containers"],
        ),
        ("resize", &mirror, &mirror, vec!["[]: Forbidden: static pods cannot be resized"]),
        (
            "resize",
            &pod(json!({"spec": {"os": {"name": "windows"}}})),
            &pod(json!({"spec": {"os": {"name": "windows"}}})),
            vec!["[]: Forbidden: windows pods cannot be resized"],
        ),
        ("resize", &sized("1"), &sized("2"), vec![]),
        // As upstream: claims are compared with those of the old pod alone.
        (
            "resize",
            &sized("1"),
            &pod(container(
                json!({"resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "claims": [{"name": "x"}]}}),
            )),
            vec![
                "spec.containers[0].resources.claims[0]: Not found: \"x\": must be one of the names in pod.spec.resourceClaims which is empty",
            ],
        ),
        ("resize", &sized("1"), &policy, vec!["spec: Forbidden: only cpu and memory resources are mutable"]),
        (
            "resize",
            &sized("1"),
            &unsized_pod,
            vec![
                "spec: Invalid value: \"Guaranteed\": Pod QOS Class may not change as a result of resizing",
                "spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed",
                "spec.containers[0].resources.limits: Forbidden: resource limits cannot be removed",
            ],
        ),
    ] {
        let errors = texts(pods.validate_subresource_update(subresource, new, old));
        assert_eq!(errors, messages, "{subresource}");
    }
}

#[test]
fn what_nodes_report() {
    let pods = strategy("Pod");
    let pod = |status: Value| {
        let spec = container(
            json!({"resources": {"requests": {"example.com/d": "1"}, "limits": {"example.com/d": "1"}}}),
        );
        with(with(minimal("Pod"), spec), json!({"status": status}))
    };
    let allocated = |resource: Value| json!({"containerStatuses": [{"name": "c", "allocatedResourcesStatus": [resource]}]});
    let place = "status.containerStatuses[0]";
    for (status, messages) in [
        (
            json!({"containerStatuses": [{"name": "c", "user": {"linux": {"uid": -1, "gid": 0, "supplementalGroups": [-2]}}}]}),
            vec![
                format!("{place}.user.linux.uid: Invalid value: -1: must be between 0 and 2147483647, inclusive"),
                format!("{place}.user.linux.supplementalGroups[0]: Invalid value: -2: must be between 0 and 2147483647, inclusive"),
            ],
        ),
        (
            allocated(json!({"name": "example.com/d", "resources": [{"resourceID": "1", "health": "Healthy"},
                {"resourceID": "1", "health": "Ill", "message": ""}]})),
            vec![
                format!("{place}.allocatedResourcesStatus[0].resources[1].health: Unsupported value: \"Ill\": supported values: \"Healthy\", \"Unhealthy\", \"Unknown\""),
                format!("{place}.allocatedResourcesStatus[0].resources[1].message: Required value: must be non-empty if specified"),
                format!("{place}.allocatedResourcesStatus[0].resources[1].resourceID: Duplicate value: \"1\""),
            ],
        ),
        (
            allocated(json!({"name": "claim:x"})),
            vec![format!(
                "{place}.allocatedResourcesStatus[0].name: Invalid value: \"claim:x\": must match one of the container's resource claims in a format 'claim:<claimName>/<request>' or 'claim:<claimName>' if request is empty"
            )],
        ),
        (
            json!({"ephemeralContainerStatuses": [{"name": "e", "allocatedResourcesStatus": [{}]}]}),
            vec![
                "status.ephemeralContainerStatuses[0].allocatedResourcesStatus: Forbidden: must not be specified in container status".to_owned(),
            ],
        ),
        (
            json!({"extendedResourceClaimStatus": {"requestMappings": [{"containerName": "x", "resourceName": "r", "requestName": "q"}]}}),
            vec![
                "status.extendedResourceClaimStatus.requestMappings[0].containerName: Invalid value: \"x\": must match the name of an entry in spec.initContainers.name or spec.containers.name".to_owned(),
                "status.extendedResourceClaimStatus.resourceClaimName: Required value".to_owned(),
            ],
        ),
    ] {
        let errors = texts(pods.validate_status_update(&pod(status.clone()), &pod(json!({}))));
        assert_eq!(errors, messages, "{status}");
    }
    let mut new = pod(json!({"conditions": [{"type": "A"}]}));
    let old = pod(json!({"observedGeneration": 3, "conditions": [{"type": "A", "observedGeneration": 2}]}));
    pods.prepare_status_update(&mut new, &old);
    assert_eq!(
        (&new["status"]["observedGeneration"], &new["status"]["conditions"][0]["observedGeneration"]),
        (&json!(3), &json!(2))
    );
}

#[test]
fn what_is_said_of_a_pod() {
    let tell = |changes: &Value| {
        let mut pod = with(minimal("Pod"), changes.clone());
        let pods = strategy("Pod");
        pods.default(&mut pod);
        pods.prepare_create(&mut pod);
        pods.warnings(&pod)
    };
    for (changes, messages) in [
        (
            json!({"metadata": {"name": "a.b"}}),
            vec![
                "metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; a DNS label is recommended: [must not contain dots]",
            ],
        ),
        (
            annotated("scheduler.alpha.kubernetes.io/critical-pod", ""),
            vec![
                "metadata.annotations[scheduler.alpha.kubernetes.io/critical-pod]: non-functional in v1.16+; use the \"priorityClassName\" field instead",
            ],
        ),
        (
            annotated(SECCOMP, "unconfined"),
            vec![
                "metadata.annotations[container.seccomp.security.alpha.kubernetes.io/c]: non-functional in v1.27+; use the \"seccompProfile\" field instead",
            ],
        ),
        (
            annotated(APP_ARMOR, "unconfined"),
            vec![
                "metadata.annotations[container.apparmor.security.beta.kubernetes.io/c]: deprecated since v1.30; use the \"appArmorProfile\" field instead",
            ],
        ),
        (
            json!({"spec": {"topologySpreadConstraints": [{"topologyKey": "beta.kubernetes.io/os", "labelSelector": {}}]}}),
            vec![
                "spec.topologySpreadConstraints[0].topologyKey: beta.kubernetes.io/os is deprecated since v1.14; use \"kubernetes.io/os\" instead",
            ],
        ),
        (
            json!({"spec": {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                {"podAffinityTerm": {"topologyKey": "k"}}]}}}}),
            vec![
                "spec.affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.labelSelector: a null labelSelector results in matching no pod",
            ],
        ),
        (
            json!({"spec": {"nodeSelector": {"node-role.kubernetes.io/master": "", "app.kubernetes.io/created-by": "x"}}}),
            vec![
                "spec.nodeSelector[app.kubernetes.io/created-by]: deprecated since v1.9",
                "spec.nodeSelector[node-role.kubernetes.io/master]: use \"node-role.kubernetes.io/control-plane\" instead",
            ],
        ),
        (
            json!({"spec": {"containers": [
                {"name": "c", "image": "i", "ports": [{"containerPort": 1, "name": "x"}]},
                {"name": "d", "image": "i", "ports": [{"containerPort": 2, "name": "x"}]}]}}),
            vec![
                "spec.containers[1].ports[0]: duplicate port name \"x\" with spec.containers[0].ports[0], services and probes that select ports by name will use spec.containers[0].ports[0]",
            ],
        ),
        (
            container(json!({"ports": [{"containerPort": 1, "hostPort": 1}, {"containerPort": 1},
                {"containerPort": 1, "hostPort": 1, "hostIP": "192.0.2.1"}]})),
            vec![
                "spec.containers[0].ports[1]: overlapping port definition with spec.containers[0].ports[0]",
                "spec.containers[0].ports[2]: dangerously ambiguous port definition with spec.containers[0].ports[0]",
                "spec.containers[0].ports[2]: overlapping port definition with spec.containers[0].ports[1]",
            ],
        ),
        (
            json!({"spec": {"overhead": {"memory": "100m"}}}),
            vec!["spec.overhead[memory]: fractional byte value \"100m\" is invalid, must be an integer"],
        ),
        (
            volume(json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}},
                {"secret": {"name": "s", "items": [{"key": "k", "path": "t"}]}}]}})),
            vec![
                "volume \"v\" (Projected): overlapping paths: \"t\" (Secret \"s\") with \"t\" (ServiceAccountToken)",
            ],
        ),
        (
            container(
                json!({"env": [{"name": "A", "value": "x"}, {"name": "A", "value": "$(A)"}, {"name": "A", "value": "$(A)y"}]}),
            ),
            vec![
                "spec.containers[0].env[1]: hides previous definition of \"A\", which may be dropped when using apply",
            ],
        ),
        (
            json!({"spec": {"dnsConfig": {"nameservers": ["2001:DB8::1"]}}}),
            vec![
                "spec.dnsConfig.nameservers[0]: IPv6 address \"2001:DB8::1\" should be in RFC 5952 canonical format (\"2001:db8::1\")",
            ],
        ),
    ] {
        assert_eq!(tell(&changes), messages, "{changes}");
    }
}
