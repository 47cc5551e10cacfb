use super::binding::PolicyBindings;
use super::policy::Policies;
use crate::resource::Strategy;
use ferrite_json::{Value, json};

/// A policy with `spec` over the least that a valid one has.
fn policy(mutating: bool, spec: &Value) -> Value {
    let rule =
        json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]});
    let mut object = json!({
        "metadata": {"name": "p"},
        "spec": {"matchConstraints": {"resourceRules": [rule]}},
    });
    match mutating {
        true => {
            object["spec"]["reinvocationPolicy"] = json!("Never");
            object["spec"]["mutations"] = json!([{"patchType": "ApplyConfiguration",
                "applyConfiguration": {"expression": "Object{}"}}]);
        }
        false => object["spec"]["validations"] = json!([{"expression": "true"}]),
    }
    for (key, value) in spec.as_object().into_iter().flatten() {
        object["spec"][key.as_str()] = value.clone();
    }
    Policies { mutating }.default(&mut object);
    object
}

fn errors(mutating: bool, spec: &Value) -> Vec<String> {
    let object = policy(mutating, spec);
    Policies { mutating }.validate(&object).iter().map(ToString::to_string).collect()
}

#[test]
fn expressions_of_a_policy_must_compile_and_have_the_right_types() {
    let undeclared = |name: &str, line: &str| {
        format!(
            "compilation failed: ERROR: <input>:1:1: undeclared reference to '{name}' (in container '')\\n | {line}\\n | ^"
        )
    };
    let table: Vec<(Value, String)> = vec![
        (json!({"validations": [{"expression": "1"}]}), "spec.validations[0].expression: Invalid value: \"1\": must evaluate to bool but got int".into()),
        (json!({"validations": [{"expression": " "}]}), "spec.validations[0].expression: Required value: expression is not specified".into()),
        (json!({"validations": [{"expression": "nothing == 1"}]}), format!("spec.validations[0].expression: Invalid value: \"nothing == 1\": {}", undeclared("nothing", "nothing == 1").replace("\\n", "\n"))),
        (json!({"validations": [{"expression": "true", "messageExpression": "1"}]}), "spec.validations[0].messageExpression: Invalid value: \"1\": must evaluate to string but got int".into()),
        (json!({"validations": [{"expression": "true", "messageExpression": " "}]}), "spec.validations[0].messageExpression: Invalid value: \" \": must be non-empty if specified".into()),
        (json!({"validations": [{"expression": "true", "message": " "}]}), "spec.validations[0].message: Invalid value: \" \": must be non-empty if specified".into()),
        (json!({"validations": [{"expression": "true", "message": "a\nb"}]}), "spec.validations[0].message: Invalid value: \"a\\nb\": must not contain line breaks".into()),
        (json!({"validations": [{"expression": "true", "reason": "Unauthorized"}]}), "spec.validations[0].reason: Unsupported value: \"Unauthorized\": supported values: \"Forbidden\", \"Invalid\", \"RequestEntityTooLarge\"".into()),
        (json!({"auditAnnotations": [{"key": "k", "valueExpression": "1"}]}), "spec.auditAnnotations[0].valueExpression: Invalid value: \"1\": must evaluate to one of [string null_type] but got int".into()),
        (json!({"auditAnnotations": [{"key": "k/x", "valueExpression": "'a'"}]}), "spec.auditAnnotations[0].key: Invalid value: \"p/k/x\": a valid label key must consist of".into()),
        (json!({"variables": [{"name": "for", "expression": "1"}]}), "spec.variables[0].name: Invalid value: \"for\": must be a valid CEL identifier".into()),
        (json!({"variables": [{"name": "", "expression": "1"}]}), "spec.variables[0].name: Required value: name is not specified".into()),
        (json!({"variables": [{"name": "a", "expression": "variables.b"}]}), "spec.variables[0].expression: Invalid value: \"variables.b\": compilation failed: ERROR: <input>:1:10: undefined field 'b'\n | variables.b\n | .........^".into()),
        (json!({"matchConditions": [{"name": "c", "expression": " 1 "}]}), "spec.matchConditions[0].expression: Invalid value: \"1\": must evaluate to bool but got int".into()),
        (json!({"matchConditions": [{"name": "c", "expression": "variables.a"}], "variables": [{"name": "a", "expression": "true"}]}), format!("spec.matchConditions[0].expression: Invalid value: \"variables.a\": {}", undeclared("variables", "variables.a").replace("\\n", "\n"))),
        (json!({"paramKind": {"apiVersion": "v1", "kind": "ConfigMap"}, "matchConditions": [{"name": "c", "expression": "params.data.a"}]}), "spec.matchConditions[0].expression: Invalid value: \"params.data.a\": must evaluate to bool but got dyn".into()),
    ];
    for (spec, expected) in table {
        let found = errors(false, &spec);
        let shown = found.iter().map(|e| e.replace("\\\\n", "\\n")).collect::<Vec<_>>();
        assert_eq!(shown.len(), 1, "{spec}: {shown:?}");
        assert!(shown[0].starts_with(&expected), "{spec}:\n{}\n{expected}", shown[0]);
    }
    let good = json!({
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "variables": [{"name": "a", "expression": "params.data.size()"}, {"name": "b", "expression": "variables.a + 1"}],
        "validations": [{"expression": "variables.b > 1 && authorizer.requestResource.check('get').allowed()",
            "messageExpression": "string(variables.b)", "reason": "Forbidden"}],
        "auditAnnotations": [{"key": "k", "valueExpression": "variables.b > 1 ? 'x' : 'y'"}],
        "matchConditions": [{"name": "c", "expression": "params.data.a == 'x'"}],
    });
    assert_eq!(errors(false, &good), Vec::<String>::new());
}

#[test]
fn mutations_make_objects_or_patches() {
    let json_patch =
        |expression: &str| json!([{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}]);
    let apply = |expression: &str| json!([{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}]);
    let delete =
        json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["DELETE"]});
    let table = [
        (
            json!({"mutations": apply("1")}),
            "spec.mutations[0].applyConfiguration.expression: Invalid value: \"1\": must evaluate to Object but got int",
        ),
        (
            json!({"mutations": apply("Object.spec{}")}),
            "spec.mutations[0].applyConfiguration.expression: Invalid value: \"Object.spec{}\": must evaluate to Object but got Object.spec",
        ),
        (
            json!({"mutations": json_patch("[1]")}),
            "spec.mutations[0].jsonPatch.expression: Invalid value: \"[1]\": must evaluate to list(JSONPatch) but got list(int)",
        ),
        (
            json!({"mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": "[JSONPatch{op: 'test', path: '/', value: 1}]"}, "applyConfiguration": {"expression": "Object{}"}}]}),
            "spec.mutations[0].applyConfiguration: Invalid value: \"{applyConfiguration}\": must not be specified when patchType is JSONPatch",
        ),
        (
            json!({"matchConstraints": {"resourceRules": [delete]}}),
            "spec.matchConstraints.resourceRules.operations: Unsupported value: \"DELETE\": supported values: \"*\", \"CONNECT\", \"CREATE\", \"UPDATE\"",
        ),
    ];
    for (spec, expected) in table {
        assert_eq!(errors(true, &spec), [expected], "{spec}");
    }
    let good = json!({"mutations": json_patch("[JSONPatch{op: 'add', path: '/metadata/labels/' + jsonpatch.escapeKey('a/b'), value: variables.v}]"),
        "variables": [{"name": "v", "expression": "request.userInfo.username"}]});
    assert_eq!(errors(true, &good), Vec::<String>::new());
    let mut binding = json!({"spec": {"policyName": "p", "matchResources": {"resourceRules": [delete]}}});
    PolicyBindings { mutating: true }.default(&mut binding);
    let found = PolicyBindings { mutating: true }.validate(&binding);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].path.as_str(), "spec.matchResources.resourceRules.operations");
}

#[test]
fn conditions_that_do_not_change_are_not_looked_at_again() {
    let bad = policy(false, &json!({"matchConditions": [{"name": "c", "expression": "1"}]}));
    let policies = Policies { mutating: false };
    assert_eq!(policies.validate_update(&bad, &bad).len(), 0);
    let mut other = bad.clone();
    other["spec"]["paramKind"] = json!({"apiVersion": "v1", "kind": "ConfigMap"});
    assert_eq!(policies.validate_update(&other, &bad).len(), 1);
}

#[test]
fn chains_of_variables_that_would_exhaust_the_stack_are_refused() {
    let mut variables = vec![json!({"name": "v0", "expression": "1"})];
    let sum = |below: usize| format!("{}variables.v{below}{}", "-(1 + ".repeat(90), ")".repeat(90));
    variables.extend((1..40).map(|n| json!({"name": format!("v{n}"), "expression": sum(n - 1)})));
    let found = errors(false, &json!({"variables": variables}));
    assert_eq!(found, ["spec.variables: Forbidden: variables read one another too deeply"]);
}

#[test]
fn statuses_name_the_expressions_that_they_warn_of() {
    let policies = Policies { mutating: false };
    let status = |warnings: Value| json!({"status": {"typeChecking": {"expressionWarnings": warnings}}});
    let good = status(json!([{"fieldRef": "spec.validations[0].expression", "warning": "w"}]));
    assert_eq!(policies.validate_status_update(&good, &good).len(), 0);
    let bad = status(json!([{"fieldRef": " ", "warning": ""}]));
    assert_eq!(policies.validate_status_update(&bad, &bad).len(), 2);
}
