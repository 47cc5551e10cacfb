//! Validation rules: `x-kubernetes-validations` of a structural schema, compiled once and run against many objects.

mod compile;
mod error;
mod path;
mod run;

pub use compile::{CompiledRule, RuleEnvironment};
pub use error::{BadValue, FieldError, FieldErrorKind};
pub use run::{Outcome, RuleInput};

use std::collections::BTreeMap;

use ferrite_json::Value as Json;

use crate::schema::{DeclType, Schema, SchemaError, Shape};

/// The rules of a schema, at all its levels.
#[derive(Debug)]
pub struct ValidationRules {
    schema: Schema,
    /// The schema of the root with the fields that every resource has.
    root_schema: Option<Schema>,
    root: RuleNode,
}

/// The rules of one node of a schema, and those below it.
#[derive(Debug, Default)]
struct RuleNode {
    rules: Vec<CompiledRule>,
    /// The node has rules, but no type that expressions can see.
    untyped: bool,
    items: Option<Box<RuleNode>>,
    additional: Option<Box<RuleNode>>,
    properties: BTreeMap<String, RuleNode>,
    all_of: Vec<RuleNode>,
}

impl RuleNode {
    fn is_empty(&self) -> bool {
        self.rules.is_empty()
            && !self.untyped
            && self.items.is_none()
            && self.additional.is_none()
            && self.properties.is_empty()
            && self.all_of.is_empty()
    }
}

impl ValidationRules {
    /// Compiles the rules of an OpenAPI v3 schema; `None` if it has none. `resource_root` says that it is the schema of a
    /// whole resource. A rule that does not compile becomes an error of every object that it is run against.
    pub fn compile(
        openapi: &Json,
        resource_root: bool,
        environment: &RuleEnvironment,
    ) -> Result<Option<Self>, SchemaError> {
        let schema = Schema::from_openapi(openapi)?;
        let root_schema = resource_root.then(|| {
            let mut root = schema.clone();
            root.add_type_and_object_meta();
            root
        });
        let decl = root_schema.as_ref().unwrap_or(&schema).decl_type(false);
        let root = build(openapi, &schema, decl.as_ref(), environment);
        Ok((!root.is_empty()).then_some(Self { schema, root_schema, root }))
    }

    /// The rules at the root, in the order of the schema.
    pub fn root_rules(&self) -> &[CompiledRule] {
        &self.root.rules
    }

    /// Runs all rules. They may cost `budget` together.
    pub fn validate(&self, input: RuleInput<'_>, budget: i64) -> Outcome {
        run::validate(self, input, budget)
    }
}

/// Compiles the rules of `validation`, which is a node's schema or a part of its `allOf`, for values of `node`.
fn build(
    validation: &Json,
    node: &Schema,
    decl: Option<&DeclType>,
    environment: &RuleEnvironment,
) -> RuleNode {
    let rules = validation["x-kubernetes-validations"].as_array().map_or(&[][..], Vec::as_slice);
    let mut built = RuleNode::default();
    match decl {
        Some(decl) => {
            built.rules = rules.iter().map(|rule| compile::rule(rule, node, decl, environment)).collect()
        }
        None => built.untyped = !rules.is_empty(),
    }
    let below = match decl.map(|decl| &decl.shape) {
        Some(Shape::List(below) | Shape::Map(below)) => Some(&**below),
        _ => None,
    };
    let child = |validation: &Json, node: &Schema, decl: Option<&DeclType>| {
        let built = build(validation, node, decl, environment);
        (!built.is_empty()).then(|| Box::new(built))
    };
    if let (items @ Json::Object(_), Some(node)) = (&validation["items"], &node.items) {
        built.items = child(items, node, below);
    }
    if let (additional @ Json::Object(_), Some(node)) =
        (&validation["additionalProperties"], &node.additional_properties)
    {
        built.additional = child(additional, node, below);
    }
    for (name, property) in validation["properties"].as_object().into_iter().flatten() {
        let Some(node) = node.properties.as_ref().and_then(|properties| properties.get(name.as_str())) else {
            continue;
        };
        let own;
        let of = match crate::escape::escape(name) {
            Some(escaped) => match decl.map(|decl| &decl.shape) {
                Some(Shape::Object(fields)) => fields.get(&escaped),
                _ => None,
            },
            // Expressions cannot name the property, but rules below it see their own part.
            None => {
                own = node.decl_type(false);
                own.as_ref()
            }
        };
        if let Some(built_child) = of.and_then(|of| child(property, node, Some(of))) {
            built.properties.insert(name.to_string(), *built_child);
        }
    }
    for part in validation["allOf"].as_array().into_iter().flatten() {
        let part = build(part, node, decl, environment);
        if !part.is_empty() {
            built.all_of.push(part);
        }
    }
    built
}
