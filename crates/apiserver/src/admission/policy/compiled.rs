//! Policies and bindings, compiled once for each of their versions.

use crate::admission::Attributes;
use crate::admission::matching::Matcher;
use crate::admission::times::compilation;
use ferrite_api::meta;
use ferrite_api::policy::{self, Compiler, ExpressionError, Use};
use ferrite_api::selector::{LabelSelector, SelectorError};
use ferrite_cel::Program;
use ferrite_json::Value;

/// An expression with its text, which messages show.
pub(super) struct Expression {
    pub source: String,
    pub program: Result<Program, ExpressionError>,
}

pub(super) struct Variable {
    pub name: String,
    pub expression: Expression,
}

pub(super) struct Validation {
    pub expression: Expression,
    pub message: String,
    pub message_expression: Option<Expression>,
    /// Empty for the usual one.
    pub reason: String,
}

pub(super) struct Annotation {
    pub key: String,
    pub expression: Expression,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PatchType {
    ApplyConfiguration,
    JsonPatch,
}

pub(super) struct Mutation {
    pub patch: PatchType,
    pub expression: Expression,
}

/// The kind of a policy's parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParamKind {
    pub group: String,
    pub version: String,
    pub kind: String,
}

/// A policy of either kind.
pub(super) struct Definition {
    pub name: String,
    pub ignores_failures: bool,
    pub matcher: Matcher,
    /// The names of the resources that its rules have; none where they have a wildcard.
    plurals: Option<Vec<String>>,
    pub param_kind: Option<ParamKind>,
    pub conditions: Vec<Expression>,
    pub variables: Vec<Variable>,
    pub validations: Vec<Validation>,
    pub annotations: Vec<Annotation>,
    pub mutations: Vec<Mutation>,
    pub reinvocable: bool,
    /// True if an expression reads `request`.
    pub reads_request: bool,
    /// True if an expression asks the authorizer.
    pub reads_authorizer: bool,
    /// The most levels of expressions that nest in one another while one of them is evaluated.
    pub levels: usize,
}

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn list<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn expression(compiler: &mut Compiler, of: Use, source: &str) -> Expression {
    Expression { program: compilation(|| compiler.compile(of, source)), source: source.to_owned() }
}

impl Definition {
    pub fn new(policy: &Value) -> Self {
        let spec = &policy["spec"];
        let param_kind = policy::param_kind(spec).map(|(group, version, kind)| ParamKind {
            group: group.to_owned(),
            version: version.to_owned(),
            kind: kind.to_owned(),
        });
        let params = param_kind.is_some();
        let mut plain = Compiler::plain(params);
        let conditions = list(spec, "matchConditions")
            .iter()
            .map(|condition| expression(&mut plain, Use::MatchCondition, text(condition, "expression")))
            .collect();
        let mut compiler = Compiler::composed(params);
        let variables: Vec<Variable> = list(spec, "variables")
            .iter()
            .map(|variable| {
                let (name, source) = (text(variable, "name"), text(variable, "expression"));
                let program = compiler.add_variable(name, source);
                Variable {
                    name: name.to_owned(),
                    expression: Expression { source: source.to_owned(), program },
                }
            })
            .collect();
        let validations = list(spec, "validations")
            .iter()
            .map(|validation| Validation {
                expression: expression(&mut compiler, Use::Validation, text(validation, "expression")),
                message: text(validation, "message").to_owned(),
                message_expression: Some(text(validation, "messageExpression"))
                    .filter(|source| !source.is_empty())
                    .map(|source| expression(&mut compiler, Use::Message, source)),
                reason: text(validation, "reason").to_owned(),
            })
            .collect();
        let annotations = list(spec, "auditAnnotations")
            .iter()
            .map(|annotation| Annotation {
                key: text(annotation, "key").to_owned(),
                expression: expression(
                    &mut compiler,
                    Use::AuditAnnotation,
                    text(annotation, "valueExpression"),
                ),
            })
            .collect();
        let mutations = list(spec, "mutations")
            .iter()
            .filter_map(|mutation| {
                let (patch, of, key) = match text(mutation, "patchType") {
                    "JSONPatch" => (PatchType::JsonPatch, Use::JsonPatch, "jsonPatch"),
                    "ApplyConfiguration" => {
                        (PatchType::ApplyConfiguration, Use::ApplyConfiguration, "applyConfiguration")
                    }
                    _ => return None,
                };
                let source = text(mutation.get(key)?, "expression");
                Some(Mutation { patch, expression: expression(&mut compiler, of, source) })
            })
            .collect();
        let mut definition = Self {
            name: meta::name(policy).to_owned(),
            ignores_failures: text(spec, "failurePolicy") == "Ignore",
            matcher: Matcher::of_match_resources(&spec["matchConstraints"]),
            plurals: plurals(&spec["matchConstraints"]),
            param_kind,
            conditions,
            variables,
            validations,
            annotations,
            mutations,
            reinvocable: text(spec, "reinvocationPolicy") == "IfNeeded",
            reads_request: false,
            reads_authorizer: false,
            levels: 0,
        };
        definition.levels = definition.nesting();
        definition.reads_request = definition.reads("request");
        definition.reads_authorizer =
            definition.reads("authorizer") || definition.reads("authorizer.requestResource");
        definition
    }

    fn nesting(&self) -> usize {
        let variables = self.variables.iter();
        let below = policy::nesting(
            variables.map(|variable| (variable.name.as_str(), variable.expression.program.as_ref().ok())),
        );
        let expressions = self.expressions().filter_map(|expression| expression.program.as_ref().ok());
        below + expressions.map(Program::depth).max().unwrap_or(0)
    }

    fn reads(&self, variable: &str) -> bool {
        let variables = self.variables.iter().map(|variable| &variable.expression);
        let programs =
            self.expressions().chain(variables).filter_map(|expression| expression.program.as_ref().ok());
        programs.into_iter().any(|program| program.uses_variable(variable))
    }

    fn expressions(&self) -> impl Iterator<Item = &Expression> {
        let validations = self.validations.iter();
        let validations = validations.flat_map(|v| [&v.expression].into_iter().chain(&v.message_expression));
        validations
            .chain(&self.conditions)
            .chain(self.annotations.iter().map(|annotation| &annotation.expression))
            .chain(self.mutations.iter().map(|mutation| &mutation.expression))
    }

    /// Returns false if the names of resources alone already exclude a match.
    pub fn may_match(&self, attributes: &Attributes<'_>) -> bool {
        let plural = &*attributes.resource.plural;
        self.plurals.as_ref().is_none_or(|plurals| plurals.iter().any(|name| name == plural))
            && self.matcher.may_match(attributes)
    }
}

/// The names of the resources that rules have, without subresources. None where one is a wildcard, or there are no
/// rules.
fn plurals(matching: &Value) -> Option<Vec<String>> {
    let rules = list(matching, "resourceRules");
    let names = rules.iter().flat_map(|rule| list(rule, "resources")).filter_map(Value::as_str);
    let names: Vec<String> =
        names.map(|name| name.split('/').next().unwrap_or_default().to_owned()).collect();
    (!rules.is_empty() && !names.iter().any(|name| name == "*")).then_some(names)
}

/// The action for a failed validation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Deny,
    Warn,
    Audit,
}

impl Action {
    pub fn name(self) -> &'static str {
        match self {
            Self::Deny => "Deny",
            Self::Warn => "Warn",
            Self::Audit => "Audit",
        }
    }
}

/// The parameters that a binding refers to.
pub(super) struct ParamRef {
    /// Empty where a selector is used.
    pub name: String,
    pub namespace: String,
    pub selector: Option<Result<LabelSelector, SelectorError>>,
    pub denies_without: bool,
}

/// A binding of either kind.
pub(super) struct Binding {
    pub name: String,
    pub policy: String,
    /// None matches everything that the policy matches.
    pub matcher: Option<Matcher>,
    pub params: Option<ParamRef>,
    pub actions: Vec<Action>,
}

impl Binding {
    pub fn new(binding: &Value) -> Self {
        let spec = &binding["spec"];
        let matching = spec.get("matchResources").filter(|matching| matching.is_object());
        let reference = spec.get("paramRef").filter(|reference| reference.is_object());
        let actions = list(spec, "validationActions").iter().filter_map(Value::as_str);
        Self {
            name: meta::name(binding).to_owned(),
            policy: text(spec, "policyName").to_owned(),
            matcher: matching.map(Matcher::of_match_resources),
            params: reference.map(|reference| ParamRef {
                name: text(reference, "name").to_owned(),
                namespace: text(reference, "namespace").to_owned(),
                selector: reference
                    .get("selector")
                    .filter(|selector| selector.is_object())
                    .map(LabelSelector::from_value),
                denies_without: text(reference, "parameterNotFoundAction") == "Deny",
            }),
            actions: actions
                .filter_map(|action| {
                    [Action::Deny, Action::Warn, Action::Audit]
                        .into_iter()
                        .find(|known| known.name() == action)
                })
                .collect(),
        }
    }
}
