//! Tests of errors of pods and their templates.

use super::*;

pub(super) const APP_ARMOR: &str = "container.apparmor.security.beta.kubernetes.io/c";
pub(super) const SECCOMP: &str = "container.seccomp.security.alpha.kubernetes.io/c";

pub(super) fn annotated(key: &str, value: &str) -> Value {
    json!({"metadata": {"annotations": {key: value}}})
}

pub(super) fn with(mut first: Value, second: Value) -> Value {
    overlay(&mut first, &second);
    first
}

pub(super) fn volume(source: Value) -> Value {
    json!({"spec": {"volumes": [with(json!({"name": "v"}), source)]}})
}

pub(super) fn container(fields: Value) -> Value {
    json!({"spec": {"containers": [with(json!({"name": "c", "image": "i"}), fields)]}})
}

#[test]
fn annotations_that_mean_something() {
    for (changes, messages) in [
        (
            annotated("kubernetes.io/config.mirror", "m"),
            vec![
                "metadata.annotations[kubernetes.io/config.mirror]: Invalid value: \"m\": must set spec.nodeName if mirror pod annotation is set",
            ],
        ),
        (with(annotated("kubernetes.io/config.mirror", "m"), json!({"spec": {"nodeName": "n"}})), vec![]),
        (
            annotated("controller.kubernetes.io/pod-deletion-cost", "+1"),
            vec![
                "metadata.annotations[controller.kubernetes.io/pod-deletion-cost]: Invalid value: \"+1\": must be a 32bit integer",
            ],
        ),
        (annotated("controller.kubernetes.io/pod-deletion-cost", "-5"), vec![]),
        (
            annotated("scheduler.alpha.kubernetes.io/tolerations", "x"),
            vec![
                "metadata.annotations: Invalid value: \"scheduler.alpha.kubernetes.io/tolerations\": invalid character 'x' looking for beginning of value",
            ],
        ),
        (
            annotated("scheduler.alpha.kubernetes.io/tolerations", r#"[{"operator":"Equal","effect":"No"}]"#),
            vec![
                "metadata.annotations.scheduler.alpha.kubernetes.io/tolerations[0].operator: Invalid value: \"Equal\": operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
                "metadata.annotations.scheduler.alpha.kubernetes.io/tolerations[0].effect: Unsupported value: \"No\": supported values: \"NoSchedule\", \"PreferNoSchedule\", \"NoExecute\"",
            ],
        ),
        (
            annotated("seccomp.security.alpha.kubernetes.io/pod", "x"),
            vec![
                "metadata.annotations.seccomp.security.alpha.kubernetes.io/pod: Invalid value: \"x\": must be a valid seccomp profile",
            ],
        ),
        (
            annotated(SECCOMP, "localhost/../x"),
            vec![
                "metadata.annotations.container.seccomp.security.alpha.kubernetes.io/c: Invalid value: \"../x\": must not contain '..'",
            ],
        ),
        (
            with(
                annotated(SECCOMP, "unconfined"),
                container(json!({"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}})),
            ),
            vec![
                "spec.containers[0].securityContext.seccompProfile.type: Forbidden: seccomp type in annotation and field must match",
            ],
        ),
        (
            annotated(APP_ARMOR, "bogus"),
            vec![
                "metadata.annotations[container.apparmor.security.beta.kubernetes.io/c]: Invalid value: \"bogus\": invalid AppArmor profile name: \"bogus\"",
            ],
        ),
        (
            annotated("container.apparmor.security.beta.kubernetes.io/x", "unconfined"),
            vec![
                "metadata.annotations[container.apparmor.security.beta.kubernetes.io/x]: Invalid value: \"x\": container not found",
            ],
        ),
        (
            with(
                annotated(APP_ARMOR, "localhost/a"),
                container(
                    json!({"securityContext": {"appArmorProfile": {"type": "Localhost", "localhostProfile": "b"}}}),
                ),
            ),
            vec![
                "spec.containers[0].securityContext.appArmorProfile.localhostProfile: Forbidden: apparmor profile in annotation and field must match",
            ],
        ),
    ] {
        assert_eq!(errors_with("Pod", &changes), messages, "{changes}");
    }
    assert_eq!(
        errors_with("Deployment", &json!({"spec": {"template": annotated(APP_ARMOR, "x")}})),
        [
            "spec.template.annotations[container.apparmor.security.beta.kubernetes.io/c]: Invalid value: \"x\": invalid AppArmor profile name: \"x\""
        ]
    );
}

#[test]
fn an_app_armor_annotation_becomes_a_field() {
    let profile = |annotation: &str, spec: Value| {
        let mut pod = with(with(minimal("Pod"), annotated(APP_ARMOR, annotation)), spec);
        strategy("Pod").prepare_create(&mut pod);
        pod["spec"]["containers"][0]["securityContext"]["appArmorProfile"].clone()
    };
    let unconfined = json!({"spec": {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}});
    for (annotation, spec, expected) in [
        ("runtime/default", json!({}), json!({"type": "RuntimeDefault"})),
        ("localhost/p", json!({}), json!({"type": "Localhost", "localhostProfile": "p"})),
        ("localhost/", json!({}), Value::Null),
        ("unconfined", unconfined, Value::Null),
        ("unconfined", json!({"spec": {"os": {"name": "windows"}}}), Value::Null),
    ] {
        assert_eq!(profile(annotation, spec), expected, "{annotation}");
    }
}

#[test]
fn annotations_that_stay() {
    let pod = |annotations: Value| {
        let mut pod = with(
            minimal("Pod"),
            json!({"metadata": {"annotations": annotations}, "spec": {"nodeName": "n"}}),
        );
        strategy("Pod").default(&mut pod);
        pod
    };
    let mirror = json!({"kubernetes.io/config.mirror": "m"});
    for (old, new, message) in [
        (
            json!({}),
            mirror.clone(),
            "[kubernetes.io/config.mirror]: Forbidden: may not add mirror pod annotation",
        ),
        (
            mirror,
            json!({}),
            "[kubernetes.io/config.mirror]: Forbidden: may not remove or update mirror pod annotation",
        ),
        (
            json!({}),
            json!({APP_ARMOR: "unconfined"}),
            "[container.apparmor.security.beta.kubernetes.io/c]: Forbidden: may not add AppArmor annotations",
        ),
        (
            json!({APP_ARMOR: "unconfined"}),
            json!({APP_ARMOR: "runtime/default"}),
            "[container.apparmor.security.beta.kubernetes.io/c]: Forbidden: may not remove or update AppArmor annotations",
        ),
    ] {
        let errors = texts(strategy("Pod").validate_update(&pod(new.clone()), &pod(old)));
        assert_eq!(errors, [format!("metadata.annotations{message}")], "{new}");
    }
}

#[test]
fn volumes_with_conditions() {
    let claim =
        json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
    let ephemeral = json!({"ephemeral": {"volumeClaimTemplate": claim}});
    let long = "v".repeat(60);
    for (changes, messages) in [
        (
            json!({"spec": {"volumes": [with(json!({"name": "v"}), ephemeral.clone()),
                {"name": "w", "persistentVolumeClaim": {"claimName": "x-v"}}]}}),
            vec![
                "spec.volumes[1].persistentVolumeClaim.claimName: Invalid value: \"x-v\": must not reference a PVC that gets created for an ephemeral volume".to_owned(),
            ],
        ),
        (
            with(json!({"metadata": {"name": "x".repeat(252)}}), volume(ephemeral.clone())),
            vec![format!(
                "spec.volumes[0].name: Invalid value: \"v\": PVC name \"{}-v\": must be no more than 253 characters",
                "x".repeat(252)
            )],
        ),
        (
            volume(with(
                ephemeral,
                json!({"ephemeral": {"volumeClaimTemplate": {"metadata": {"name": "a", "uid": "b", "labels": {"-": "x"}}}}}),
            )),
            vec![
                "spec.volumes[0].ephemeral.volumeClaimTemplate.metadata.labels: Invalid value: \"-\": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')".to_owned(),
                "spec.volumes[0].ephemeral.volumeClaimTemplate.metadata.name: Forbidden: cannot be set".to_owned(),
                "spec.volumes[0].ephemeral.volumeClaimTemplate.metadata.uID: Forbidden: cannot be set".to_owned(),
            ],
        ),
        (
            volume(json!({"iscsi": {"targetPortal": "p", "iqn": "iqn.x", "lun": 0}})),
            vec!["spec.volumes[0].iscsi.iqn: Invalid value: \"iqn.x\": must be valid format".to_owned()],
        ),
        (
            volume(json!({"iscsi": {"targetPortal": "p", "iqn": "x", "lun": 0}})),
            vec![
                "spec.volumes[0].iscsi.iqn: Invalid value: \"x\": must be valid format starting with iqn, eui, or naa".to_owned(),
            ],
        ),
        (volume(json!({"iscsi": {"targetPortal": "p", "iqn": "iqn.2024-01.com.example:storage.1"}})), vec![]),
        (volume(json!({"iscsi": {"targetPortal": "p", "iqn": "eui.0123456789abcdef"}})), vec![]),
        (
            json!({"spec": {"volumes": [{"name": long, "iscsi": {"targetPortal": "192.0.2.1:3260",
                "iqn": "iqn.2024-01.com.example:s", "initiatorName": "iqn.2024-01.com.example:i"}}]}}),
            vec![format!(
                "spec.volumes[0].name: Invalid value: \"{long}\": Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified."
            )],
        ),
        (
            volume(json!({"gcePersistentDisk": {}})),
            vec!["spec.volumes[0].persistentDisk.pdName: Required value".to_owned()],
        ),
        (
            volume(json!({"gitRepo": {"directory": "/x"}})),
            vec![
                "spec.volumes[0].gitRepo.repository: Required value".to_owned(),
                "spec.volumes[0].gitRepo.directory: Invalid value: \"/x\": must be a relative path".to_owned(),
            ],
        ),
        (
            volume(json!({"emptyDir": {}, "cephfs": {"monitors": ["m"]}, "downwardAPI": {}})),
            vec![
                "spec.volumes[0].cephFS: Forbidden: may not specify more than 1 volume type".to_owned(),
                "spec.volumes[0].downwarAPI: Forbidden: may not specify more than 1 volume type".to_owned(),
            ],
        ),
        (volume(json!({"image": {}})), vec!["spec.volumes[0].image.reference: Required value".to_owned()]),
        (
            volume(json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}})),
            vec![
                "spec.volumes[0].projected.sources[0].serviceAccountToken: Forbidden: must not be specified when serviceAccountName is not set".to_owned(),
            ],
        ),
        (
            volume(json!({"projected": {"sources": [{"clusterTrustBundle": {}}, {"podCertificate": {}}]}})),
            vec![
                "spec.volumes[0].projected.sources[0].clusterTrustBundle: Required value: either name or signerName must be specified".to_owned(),
                "spec.volumes[0].projected.sources[0].clusterTrustBundle.path: Required value".to_owned(),
                "spec.volumes[0].projected.sources[1].podCertificate.signerName: Required value".to_owned(),
                "spec.volumes[0].projected.sources[1].podCertificate.keyType: Unsupported value: \"\": supported values: \"RSA3072\", \"RSA4096\", \"ECDSAP256\", \"ECDSAP384\", \"ECDSAP521\", \"ED25519\"".to_owned(),
                "spec.volumes[0].projected.sources[1].podCertificate: Required value: specify at least one of credentialBundlePath, keyPath, and certificateChainPath".to_owned(),
            ],
        ),
        (
            volume(json!({"configMap": {"name": "c", "items": [{"key": "k", "path": ".."}]}})),
            vec![
                "spec.volumes[0].configMap.items[0].path: Invalid value: \"..\": must not contain '..'".to_owned(),
                "spec.volumes[0].configMap.items[0].path: Invalid value: \"..\": must not start with '..'".to_owned(),
            ],
        ),
    ] {
        assert_eq!(errors_with("Pod", &changes), messages, "{changes}");
    }
}

#[test]
fn options_for_windows() {
    let options = |options: Value| json!({"spec": {"securityContext": {"windowsOptions": options}}});
    let user = |name: &str| options(json!({"runAsUserName": name}));
    let (long_user, long_domain) = ("u".repeat(105), format!("{}\\u", "d".repeat(256)));
    let place = "spec.securityContext.windowsOptions";
    for (changes, messages) in [
        (
            options(json!({"gmsaCredentialSpec": ""})),
            vec![format!(
                "{place}.gmsaCredentialSpec: Invalid value: \"\": gmsaCredentialSpec cannot be an empty string"
            )],
        ),
        (
            options(json!({"gmsaCredentialSpec": "x".repeat(65_537)})),
            vec![format!(
                "{place}.gmsaCredentialSpec: Invalid value: \"{}\": gmsaCredentialSpec size must be under 64 KiB",
                "x".repeat(65_537)
            )],
        ),
        (
            user(""),
            vec![format!("{place}.runAsUserName: Invalid value: \"\": runAsUserName cannot be an empty string")],
        ),
        (
            user("a\tb"),
            vec![format!(
                "{place}.runAsUserName: Invalid value: \"a\\tb\": runAsUserName cannot contain control characters"
            )],
        ),
        (
            user("a\\b\\c"),
            vec![format!(
                "{place}.runAsUserName: Invalid value: \"a\\\\b\\\\c\": runAsUserName cannot contain more than one backslash"
            )],
        ),
        (
            user("\\"),
            vec![
                format!(
                    "{place}.runAsUserName: Invalid value: \"\\\\\": runAsUserName's Domain doesn't match the NetBios nor the DNS format"
                ),
                format!("{place}.runAsUserName: Invalid value: \"\\\\\": runAsUserName's User cannot be empty"),
            ],
        ),
        (
            user(&long_domain),
            vec![
                format!(
                    "{place}.runAsUserName: Invalid value: \"{d}\\\\u\": runAsUserName's Domain length must be under 256 characters",
                    d = "d".repeat(256)
                ),
                format!(
                    "{place}.runAsUserName: Invalid value: \"{d}\\\\u\": runAsUserName's Domain doesn't match the NetBios nor the DNS format",
                    d = "d".repeat(256)
                ),
            ],
        ),
        (
            user(&long_user),
            vec![format!(
                "{place}.runAsUserName: Invalid value: \"{long_user}\": runAsUserName's User length must not be longer than 104 characters"
            )],
        ),
        (
            user(". ."),
            vec![format!(
                "{place}.runAsUserName: Invalid value: \". .\": runAsUserName's User cannot contain only periods or spaces"
            )],
        ),
        (
            user("a@b"),
            vec![format!(
                "{place}.runAsUserName: Invalid value: \"a@b\": runAsUserName's User cannot contain the following characters: \"/\\:;|=,+*?<>@[]"
            )],
        ),
        (user("NT AUTHORITY\\NETWORK SERVICE"), vec![]),
        (
            with(
                options(json!({"hostProcess": true})),
                container(json!({"securityContext": {"windowsOptions": {"hostProcess": false}}})),
            ),
            vec![
                "spec.containers[0].securityContext.windowsOptions.hostProcess: Invalid value: false: pod hostProcess value must be identical if both are specified, was true".to_owned(),
            ],
        ),
        (
            json!({"spec": {"initContainers": [{"name": "i", "image": "i",
                "securityContext": {"windowsOptions": {"hostProcess": true}}}]}}),
            vec![
                "spec: Invalid value: \"\": If pod contains any hostProcess containers then all containers must be HostProcess containers".to_owned(),
                "spec.hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any hostProcess containers".to_owned(),
            ],
        ),
        (
            json!({"spec": {"os": {"name": "plan9"}}}),
            vec!["spec.os: Unsupported value: \"plan9\": supported values: \"linux\", \"windows\"".to_owned()],
        ),
        (
            json!({"spec": {"os": {}}}),
            vec!["spec.os.name: Required value".to_owned()],
        ),
    ] {
        assert_eq!(errors_with("Pod", &changes), messages, "{changes}");
    }
}

#[test]
fn amounts_and_claims() {
    let place = "spec.containers[0].resources";
    for (changes, messages) in [
        (
            container(json!({"resources": {"limits": {"hugepages-2Mi": "3Mi", "memory": "1Gi"}}})),
            vec![
                format!(
                    "{place}.limits[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi"
                ),
                format!(
                    "{place}.requests[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi"
                ),
            ],
        ),
        (
            with(
                json!({"spec": {"resourceClaims": [{"name": "a", "resourceClaimName": "a"}]}}),
                container(
                    json!({"resources": {"claims": [{"name": "a", "request": "r"}, {"name": "a"}, {"name": "b", "request": "-"}]}}),
                ),
            ),
            vec![
                format!("{place}.claims[1]: Duplicate value: \"a\""),
                format!(
                    "{place}.claims[2].request: Invalid value: \"-\": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
                ),
                format!(
                    "{place}.claims[2]: Not found: \"b\": must be one of the names in pod.spec.resourceClaims: a"
                ),
            ],
        ),
        (
            json!({"spec": {"overhead": {"example.com/x": "500m"}}}),
            vec![
                "spec.overhead.limits[example.com/x]: Invalid value: \"500m\": must be an integer".to_owned(),
            ],
        ),
    ] {
        assert_eq!(errors_with("Pod", &changes), messages, "{changes}");
    }
}

#[test]
fn where_pods_run() {
    let selector = json!({"matchLabels": {"a": "b"}});
    let term = |fields: Value| {
        let term = with(json!({"topologyKey": "k", "labelSelector": selector}), fields);
        json!({"metadata": {"labels": {"a": "b", "v": "1"}}, "spec": {"affinity": {"podAffinity":
            {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}})
    };
    let place = "spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0]";
    let preferred = json!({"spec": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "preference": {"matchExpressions": [{"key": "k", "operator": "In", "values": ["no label"]}]}}]}}}});
    for (changes, messages) in [
        (preferred, vec![]),
        (term(json!({"matchLabelKeys": ["v"]})), vec![]),
        (
            term(json!({"matchLabelKeys": ["a"]})),
            vec![format!("{place}[0]: Invalid value: \"a\": exists in both matchLabelKeys and labelSelector")],
        ),
        (
            term(json!({"matchLabelKeys": ["v"], "mismatchLabelKeys": ["v"]})),
            vec![
                format!("{place}[0]: Invalid value: \"v\": exists in both matchLabelKeys and labelSelector"),
                format!("{place}.matchLabelKeys[0]: Invalid value: \"v\": exists in both matchLabelKeys and mismatchLabelKeys"),
            ],
        ),
        (
            term(json!({"labelSelector": null, "matchLabelKeys": ["-"]})),
            vec![format!("{place}.matchLabelKeys: Forbidden: must not be specified when labelSelector is not set")],
        ),
        (
            json!({"spec": {"hostAliases": [{"ip": "192.0.2.01"}, {"ip": "::ffff:192.0.2.1"}, {"ip": "x"}]}}),
            vec![
                "spec.hostAliases[0].ip: Invalid value: \"192.0.2.01\": must not have leading 0s".to_owned(),
                "spec.hostAliases[1].ip: Invalid value: \"::ffff:192.0.2.1\": must not be an IPv4-mapped IPv6 address".to_owned(),
                "spec.hostAliases[2].ip: Invalid value: \"x\": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)".to_owned(),
            ],
        ),
    ] {
        assert_eq!(errors_with("Pod", &changes), messages, "{changes}");
    }
}

#[test]
fn containers_that_debug_say_less() {
    let pod = json!({"spec": {"ephemeralContainers": [{"name": "e", "image": " i", "restartPolicy": "Always",
        "ports": [{"containerPort": 1}], "resources": {"limits": {"cpu": "1"}}, "lifecycle": {}}]}});
    let place = "spec.ephemeralContainers[0]";
    let without = |key: &str| format!("{place}.{key}: Forbidden: cannot be set for an Ephemeral Container");
    assert_eq!(
        errors_with("Pod", &pod),
        [
            format!("{place}.image: Invalid value: \" i\": must not have leading or trailing whitespace"),
            without("ports"),
            without("resources"),
            without("restartPolicy"),
            without("lifecycle"),
            "spec.ephemeralContainers: Forbidden: cannot be set on create".to_owned(),
        ]
    );
}
