//! Type checks of a policy's expressions against the schemas of the kinds that it matches. They only warn: a policy
//! works as it works, whatever they find.

use super::param_kind;
use crate::gvk::Gvk;
use ferrite_cel::{CompileError, DeclType, Environment, Schema, Type};
use ferrite_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The most kinds that are looked up for one rule of a policy.
const MAX_KINDS: usize = 10;
const AUTHORIZER: &str = "kubernetes.authorization.Authorizer";

/// A fault of an expression, as the policy's status shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The expression: `spec.validations[0].expression`.
    pub field_ref: String,
    pub warning: String,
}

/// The types of one kind's objects; none if the schema has none.
pub type KindType = (Gvk, Option<DeclType>);

/// The kinds that a policy's rules name, in their order. `kinds_for` finds the kinds of a group, a version and a
/// resource. As upstream: rules with a wildcard name none.
pub fn kinds_to_check(spec: &Value, mut kinds_for: impl FnMut(&str, &str, &str) -> Vec<Gvk>) -> Vec<Gvk> {
    let mut found = BTreeSet::new();
    for rule in
        spec.pointer("/matchConstraints/resourceRules").and_then(Value::as_array).into_iter().flatten()
    {
        let strings = |key: &str| -> Vec<&str> {
            let items = rule.get(key).and_then(Value::as_array).into_iter().flatten();
            items.filter_map(Value::as_str).collect()
        };
        let (mut groups, mut versions) = (strings("apiGroups"), strings("apiVersions"));
        if groups.iter().chain(&versions).any(|name| name.contains('*')) {
            continue;
        }
        let mut resources = strings("resources");
        resources.retain(|resource| !resource.contains(['*', '/']));
        groups.sort_unstable();
        versions.sort_unstable();
        resources.sort_unstable();
        let mut count = 0;
        for group in &groups {
            for version in &versions {
                for resource in &resources {
                    for kind in kinds_for(group, version, resource) {
                        found.insert((kind.group, kind.version, kind.kind));
                        count += 1;
                        if count == MAX_KINDS {
                            return in_order(found);
                        }
                    }
                }
            }
        }
    }
    in_order(found)
}

fn in_order(found: BTreeSet<(String, String, String)>) -> Vec<Gvk> {
    found.into_iter().map(|(group, version, kind)| Gvk { group, version, kind }).collect()
}

/// The type of a kind's objects, from the schemas of an OpenAPI v3 document. None if the document does not have the
/// kind.
pub fn type_of(schemas: &Map, kind: &Gvk) -> Option<KindType> {
    const KINDS: &str = "x-kubernetes-group-version-kind";
    let is = |entry: &Value| {
        let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or_default();
        (text("group"), text("version"), text("kind")) == (&*kind.group, &*kind.version, &*kind.kind)
    };
    let (name, schema) = schemas.iter().find(|(_, schema)| {
        schema.get(KINDS).and_then(Value::as_array).is_some_and(|kinds| kinds.iter().any(is))
    })?;
    let mut open = vec![name.as_str()];
    let whole = populated(schemas, schema, &mut open);
    let of = Schema::from_openapi(&whole).ok().and_then(|schema| schema.decl_type(true));
    Some((kind.clone(), of.map(|of| of.with_name(&kind.kind))))
}

/// The name of the schema that another refers to, also where the reference stands in `allOf` beside a description.
fn reference(schema: &Value) -> Option<&str> {
    if let Some(path) = schema.get("$ref").and_then(Value::as_str) {
        return path.rsplit('/').next();
    }
    schema.get("allOf").and_then(Value::as_array)?.iter().find_map(reference)
}

/// The schema with its references replaced by their targets. As upstream: a type within itself is an object
/// without fields. `open` has the names on the way here.
fn populated<'s>(schemas: &'s Map, schema: &'s Value, open: &mut Vec<&'s str>) -> Value {
    let name = reference(schema);
    let schema = match name {
        None => schema,
        Some(name) if open.contains(&name) => return json!({"type": "object"}),
        Some(name) => match schemas.get(name) {
            Some(schema) => {
                open.push(name);
                schema
            }
            None => return json!({}),
        },
    };
    let mut made = Map::new();
    for (key, value) in schema.as_object().into_iter().flatten() {
        let value = match key.as_str() {
            "properties" => {
                let properties = value.as_object().into_iter().flatten();
                let below = properties.map(|(name, schema)| (name.clone(), populated(schemas, schema, open)));
                Value::Object(below.collect())
            }
            "items" => populated(schemas, value, open),
            "additionalProperties" if value.is_object() => populated(schemas, value, open),
            "description" | "default" | "x-kubernetes-group-version-kind" => continue,
            "format" if value == "int-or-string" => {
                // Built-in kinds have the format where custom ones have the extension.
                made.insert("x-kubernetes-int-or-string", true.into());
                continue;
            }
            _ => value.clone(),
        };
        made.insert(key.clone(), value);
    }
    if name.is_some() {
        open.pop();
    }
    Value::Object(made)
}

/// Checks the validations of a policy and their messages against each kind. `params` is the type of its parameters, if
/// that is known.
pub fn check(spec: &Value, kinds: &[KindType], params: Option<&DeclType>) -> Vec<Warning> {
    let has_params = param_kind(spec).is_some();
    let environments: Vec<(&Gvk, Environment)> = kinds
        .iter()
        .map(|(kind, object)| (kind, environment(spec, object.as_ref(), has_params, params)))
        .collect();
    let mut warnings = Vec::new();
    let validations = spec.get("validations").and_then(Value::as_array).into_iter().flatten();
    for (index, validation) in validations.enumerate() {
        for key in ["expression", "messageExpression"] {
            let Some(expression) = validation.get(key).and_then(Value::as_str) else { continue };
            if expression.is_empty() {
                continue;
            }
            let found: Vec<String> = environments
                .iter()
                .filter_map(|(kind, environment)| {
                    let issues = fault(environment, expression)?;
                    Some(format!("{}: {issues}\n", named(kind)))
                })
                .collect();
            if !found.is_empty() {
                let field_ref = format!("spec.validations[{index}].{key}");
                warnings.push(Warning { field_ref, warning: found.join("\n") });
            }
        }
    }
    warnings
}

/// A kind as Go prints it.
fn named(kind: &Gvk) -> String {
    format!("{}/{}, Kind={}", kind.group, kind.version, kind.kind)
}

fn fault(environment: &Environment, expression: &str) -> Option<String> {
    match environment.compile(expression) {
        Ok(_) | Err(CompileError::Program(_)) => None,
        Err(error) => Some(error.to_string()),
    }
}

fn environment(
    spec: &Value,
    object: Option<&DeclType>,
    has_params: bool,
    params: Option<&DeclType>,
) -> Environment {
    // As upstream: `authorizer.requestResource` is not declared here.
    let mut environment = Environment::kubernetes(super::MINOR)
        .with_admission_variables(has_params, false)
        .with_variable("authorizer", Type::object(AUTHORIZER));
    if let Some(object) = object {
        for variable in ["object", "oldObject"] {
            environment = environment.with_typed_variable(variable, object);
        }
    }
    if let Some(params) = params.filter(|_| has_params) {
        environment = environment.with_typed_variable("params", params);
    }
    environment = environment.with_policy_variables([]);
    for variable in spec.get("variables").and_then(Value::as_array).into_iter().flatten() {
        let text = |key: &str| variable.get(key).and_then(Value::as_str).unwrap_or_default();
        let of = environment.check(text("expression")).unwrap_or(Type::Dyn);
        environment.add_policy_variable(text("name"), of.of_policy_variable());
    }
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schemas() -> Map {
        let schemas = json!({
            "Deployment": {
                "type": "object",
                "x-kubernetes-group-version-kind": [{"group": "apps", "version": "v1", "kind": "Deployment"}],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "metadata": {"allOf": [{"$ref": "#/components/schemas/Meta"}], "default": {}},
                    "spec": {"allOf": [{"$ref": "#/components/schemas/Spec"}], "description": "said"},
                },
            },
            "Meta": {"type": "object", "properties": {
                "name": {"type": "string"}, "generateName": {"type": "string"},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            }},
            "Spec": {"type": "object", "properties": {
                "replicas": {"type": "integer", "format": "int32"},
                "port": {"allOf": [{"$ref": "#/components/schemas/IntOrString"}]},
                "again": {"$ref": "#/components/schemas/Spec"},
                "template": {"type": "array", "items": {"$ref": "#/components/schemas/Meta"}},
            }},
            "IntOrString": {"format": "int-or-string", "oneOf": [{"type": "integer"}, {"type": "string"}]},
        });
        schemas.as_object().unwrap().clone()
    }

    fn warnings(spec: &Value) -> Vec<(String, String)> {
        let kinds = [type_of(&schemas(), &Gvk::new("apps", "v1", "Deployment")).unwrap()];
        let params = spec.get("paramKind").and_then(|_| kinds[0].1.clone());
        check(spec, &kinds, params.as_ref()).into_iter().map(|w| (w.field_ref, w.warning)).collect()
    }

    #[test]
    fn expressions_are_held_against_the_schemas() {
        let spec = json!({"validations": [
            {"expression": "object.spec.replicas > \"x\""},
            {"expression": "object.spec.bogus == 1", "messageExpression": "object.metadata.name + 1"},
            {"expression": "object.spec.replicas < 5 && object.spec.port == 1 && object.metadata.labels['a'] == 'b'"},
            {"expression": "object.spec.template.all(t, t.name != '') && oldObject == null"},
            {"expression": "authorizer.requestResource.check('get').allowed()"},
        ]});
        let found = warnings(&spec);
        let expected = [
            (
                "spec.validations[0].expression",
                "apps/v1, Kind=Deployment: ERROR: <input>:1:22: found no matching overload for '_>_' applied to '(int, string)'\n | object.spec.replicas > \"x\"\n | .....................^\n",
            ),
            (
                "spec.validations[1].expression",
                "apps/v1, Kind=Deployment: ERROR: <input>:1:12: undefined field 'bogus'\n | object.spec.bogus == 1\n | ...........^\n",
            ),
        ];
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!((found.0.as_str(), found.1.as_str()), expected);
        }
        let refs: Vec<&str> = found.iter().map(|(field, _)| field.as_str()).collect();
        assert_eq!(refs[2..], ["spec.validations[1].messageExpression", "spec.validations[4].expression"]);
    }

    #[test]
    fn variables_and_params_have_types_too() {
        let spec = json!({
            "paramKind": {"apiVersion": "apps/v1", "kind": "Deployment"},
            "variables": [{"name": "n", "expression": "object.spec.replicas"}, {"name": "broken", "expression": "1 +"}],
            "validations": [
                {"expression": "variables.n == 'x'"},
                {"expression": "variables.broken == 'x' && params.spec.replicas == 1"},
                {"expression": "params.spec.nothing == 1"},
            ],
        });
        let refs: Vec<String> = warnings(&spec).into_iter().map(|(field, _)| field).collect();
        assert_eq!(refs, ["spec.validations[0].expression", "spec.validations[2].expression"]);
    }

    #[test]
    fn rules_name_kinds_unless_they_have_wildcards() {
        let find = |group: &str, version: &str, resource: &str| match resource {
            "events" => vec![Gvk::new("", version, "Event"), Gvk::new("events.k8s.io", version, "Event")],
            "nothing" => Vec::new(),
            _ => vec![Gvk::new(group, version, resource)],
        };
        let kinds = |rules: Value| -> Vec<String> {
            let spec = json!({"matchConstraints": {"resourceRules": rules}});
            kinds_to_check(&spec, find).iter().map(named).collect()
        };
        let rule = |groups: &[&str], versions: &[&str], resources: &[&str]| json!({"apiGroups": groups, "apiVersions": versions, "resources": resources});
        assert_eq!(
            kinds(json!([
                rule(&["b", "a"], &["v1"], &["x", "x/status", "*/scale", "nothing"]),
                rule(&["a"], &["v1"], &["x"])
            ])),
            ["a/v1, Kind=x", "b/v1, Kind=x"]
        );
        assert_eq!(
            kinds(json!([rule(&[""], &["v1"], &["events"])])),
            ["/v1, Kind=Event", "events.k8s.io/v1, Kind=Event"]
        );
        for wild in
            [rule(&["*"], &["v1"], &["x"]), rule(&["a"], &["*"], &["x"]), rule(&["a"], &["v1"], &["*"])]
        {
            assert!(kinds(json!([wild])).is_empty());
        }
        let many: Vec<String> = (10..40).map(|n| format!("r{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(kinds(json!([rule(&["a"], &["v1"], &many)])).len(), MAX_KINDS);
    }
}
