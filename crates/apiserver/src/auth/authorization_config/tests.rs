use super::*;
use std::os::unix::ffi::OsStrExt;

fn file() -> tempfile::NamedTempFile {
    tempfile::NamedTempFile::new().expect("a file")
}

fn of(authorizers: &str) -> Result<AuthorizationConfig, String> {
    let text = format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n{authorizers}"
    );
    AuthorizationConfig::parse(text.as_bytes()).map_err(|error| error.to_string())
}

/// A webhook with the members `change`, which stand for usual ones of the same name.
fn webhook(kubeconfig: &std::path::Path, change: &[(&str, &str)]) -> Result<AuthorizationConfig, String> {
    let connection = format!("{{type: KubeConfigFile, kubeConfigFile: {}}}", kubeconfig.display());
    let usual = [
        ("timeout", "3s"),
        ("subjectAccessReviewVersion", "v1"),
        ("matchConditionSubjectAccessReviewVersion", "v1"),
        ("failurePolicy", "NoOpinion"),
        ("connectionInfo", connection.as_str()),
    ];
    let kept = usual.iter().filter(|(key, _)| !change.iter().any(|(changed, _)| changed == key));
    let members: Vec<String> = kept
        .chain(change)
        .filter(|(_, value)| !value.is_empty())
        .map(|(key, value)| format!("    {key}: {value}\n"))
        .collect();
    of(&format!("- type: Webhook\n  name: hook\n  webhook:\n{}", members.concat()))
}

#[test]
fn all_versions_and_types_are_read() {
    for version in ["v1", "v1beta1", "v1alpha1"] {
        let text = format!(
            "{{apiVersion: apiserver.config.k8s.io/{version}, kind: AuthorizationConfiguration, authorizers: [\
             {{type: Node, name: node}}, {{type: RBAC, name: rbac}}, {{type: ABAC, name: abac}},\
             {{type: AlwaysAllow, name: alwaysallow}}, {{type: AlwaysDeny, name: alwaysdeny}}]}}"
        );
        let config = AuthorizationConfig::parse(text.as_bytes()).expect("a configuration");
        assert_eq!(
            config.built_in().collect::<Vec<_>>(),
            ["Node", "RBAC", "ABAC", "AlwaysAllow", "AlwaysDeny"]
        );
    }
    for (text, part) in [
        ("", "authorizers: Required value: at least one authorization mode must be defined"),
        (
            "{kind: AuthorizationConfiguration, apiVersion: apiserver.config.k8s.io/v2}",
            "no kind \"AuthorizationConfiguration\" is registered",
        ),
        ("{apiVersion: apiserver.config.k8s.io/v1}", "Object 'Kind' is missing"),
        (
            "{kind: AuthorizationConfiguration, apiVersion: apiserver.config.k8s.io/v1, x: 1}",
            "strict decoding error: unknown field \"x\"",
        ),
    ] {
        let error = AuthorizationConfig::parse(text.as_bytes()).expect_err(text).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn authorizers_are_checked_with_upstreams_words() {
    for (authorizers, error) in [
        ("- {name: x}", "authorizers[0].type: Required value"),
        (
            "- {type: Foo, name: x}",
            "authorizers[0].type: Unsupported value: \"Foo\": supported values: \"ABAC\", \"AlwaysAllow\", \"AlwaysDeny\", \"Node\", \"RBAC\", \"Webhook\"",
        ),
        (
            "- {type: RBAC, name: rbac}\n- {type: RBAC, name: rbac2}",
            "authorizers[1].type: Duplicate value: \"RBAC\"",
        ),
        ("- {type: RBAC}", "authorizers[0].name: Required value"),
        (
            "- {type: RBAC, name: rbac}\n- {type: Node, name: rbac}",
            "authorizers[1].name: Duplicate value: \"rbac\"",
        ),
        ("- {type: Webhook, name: a}", "authorizers[0].webhook: Required value: required when type=Webhook"),
        (
            "- {type: RBAC, name: rbac, webhook: {}}",
            "authorizers[0].webhook: Invalid value: \"non-null\": may only be specified when type=Webhook",
        ),
        ("- {type: RBAC, name: roles}", "expected name rbac for authorizer RBAC instead of roles"),
    ] {
        assert_eq!(of(authorizers).expect_err(authorizers), error);
    }
    let error = of("- {type: RBAC, name: A_b}").expect_err("a bad name");
    assert!(error.starts_with("authorizers[0].name: Invalid value: \"A_b\": authorizer name is invalid: a lowercase RFC 1123 subdomain"), "{error}");
}

#[test]
fn webhooks_are_checked_with_upstreams_words() {
    let kubeconfig = file();
    let path = kubeconfig.path();
    for (change, error) in [
        (&[("timeout", "")][..], "authorizers[0].timeout: Required value"),
        (&[("timeout", "31s")], "authorizers[0].timeout: Invalid value: \"31s\": must be > 0s and <= 30s"),
        (&[("timeout", "-1s")], "authorizers[0].timeout: Invalid value: \"-1s\": must be > 0s and <= 30s"),
        (&[("authorizedTTL", "-1m")], "authorizers[0].authorizedTTL: Invalid value: \"-1m0s\": must be > 0s"),
        (
            &[("unauthorizedTTL", "-1m")],
            "authorizers[0].unauthorizedTTL: Invalid value: \"-1m0s\": must be > 0s",
        ),
        (&[("subjectAccessReviewVersion", "")], "authorizers[0].subjectAccessReviewVersion: Required value"),
        (
            &[("subjectAccessReviewVersion", "v2")],
            "authorizers[0].subjectAccessReviewVersion: Unsupported value: \"v2\": supported values: \"v1\", \"v1beta1\"",
        ),
        (
            &[
                ("matchConditionSubjectAccessReviewVersion", ""),
                ("matchConditions", "[{expression: 'true'}]"),
            ],
            "authorizers[0].matchConditionSubjectAccessReviewVersion: Required value: required if match conditions are specified",
        ),
        (
            &[("matchConditionSubjectAccessReviewVersion", "v1beta1")],
            "authorizers[0].matchConditionSubjectAccessReviewVersion: Unsupported value: \"v1beta1\": supported values: \"v1\"",
        ),
        (&[("failurePolicy", "")], "authorizers[0].failurePolicy: Required value"),
        (
            &[("failurePolicy", "Allow")],
            "authorizers[0].failurePolicy: Unsupported value: \"Allow\": supported values: \"NoOpinion\", \"Deny\"",
        ),
        (&[("connectionInfo", "{}")], "authorizers[0].connectionInfo.type: Required value"),
        (
            &[("connectionInfo", "{type: KubeConfigFile}")],
            "authorizers[0].connectionInfo.kubeConfigFile: Required value",
        ),
        (
            &[("connectionInfo", "{type: KubeConfigFile, kubeConfigFile: a}")],
            "authorizers[0].connectionInfo.kubeConfigFile: Invalid value: \"a\": must be an absolute path",
        ),
        (
            &[("connectionInfo", "{type: KubeConfigFile, kubeConfigFile: /nowhere/a}")],
            "authorizers[0].connectionInfo.kubeConfigFile: Invalid value: \"/nowhere/a\": error loading file: stat /nowhere/a: no such file or directory",
        ),
        (
            &[("connectionInfo", "{type: KubeConfigFile, kubeConfigFile: /tmp}")],
            "authorizers[0].connectionInfo.kubeConfigFile: Invalid value: \"/tmp\": must be a regular file",
        ),
        (
            &[("connectionInfo", "{type: InClusterConfig, kubeConfigFile: /tmp}")],
            "authorizers[0].connectionInfo.kubeConfigFile: Invalid value: \"/tmp\": can only be set when type=KubeConfigFile",
        ),
        (
            &[("matchConditions", "[{expression: ' '}]")],
            "authorizers[0].matchConditions[0].expression: Required value",
        ),
        (
            &[("matchConditions", "[{expression: 'true'}, {expression: 'true'}]")],
            "authorizers[0].matchConditions[1].expression: Duplicate value: \"true\"",
        ),
        (
            &[("matchConditions", "[{expression: request.user}]")],
            "authorizers[0].matchConditions[0].expression: Invalid value: \"request.user\": must evaluate to bool but got string",
        ),
    ] {
        assert_eq!(webhook(path, change).expect_err(error), error);
    }
    let error =
        webhook(path, &[("matchConditions", "[{expression: request.foo == ''}]")]).expect_err("no field");
    let start = "authorizers[0].matchConditions[0].expression: Invalid value: \"request.foo == ''\": compilation failed: ERROR: <input>:1:8: undefined field 'foo'";
    assert!(error.starts_with(start), "{error}");
    let many: Vec<String> = (0..65).map(|n| format!("{{expression: '{n} == 0'}}")).collect();
    let error =
        webhook(path, &[("matchConditions", &format!("[{}]", many.join(",")))]).expect_err("too many");
    assert_eq!(error, "authorizers[0].matchConditions: Too many: 65: must have at most 64 items");
    assert!(webhook(path, &[("timeout", "x")]).expect_err("no duration").contains("strict decoding error"));
}

#[test]
fn times_have_upstreams_defaults() {
    let kubeconfig = file();
    let path = kubeconfig.path();
    let times = |change: &[(&str, &str)]| match webhook(path, change).expect("valid").authorizers.as_slice() {
        [Authorizer::Webhook(webhook)] => {
            assert_eq!(webhook.kubeconfig.as_os_str().as_bytes(), path.as_os_str().as_bytes());
            (webhook.authorized_ttl.as_secs(), webhook.unauthorized_ttl.as_secs(), webhook.timeout.as_secs())
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(times(&[]), (300, 30, 3));
    assert_eq!(times(&[("authorizedTTL", "1m"), ("unauthorizedTTL", "7s"), ("timeout", "30s")]), (60, 7, 30));
    let off = [("cacheAuthorizedRequests", "false"), ("cacheUnauthorizedRequests", "false")];
    assert_eq!(times(&off), (0, 0, 3));
    assert_eq!(times(&[("cacheAuthorizedRequests", "true"), ("authorizedTTL", "0s")]), (300, 30, 3));
}
