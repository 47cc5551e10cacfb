//! From the checked tree to the form that is evaluated.
//!
//! A chain of selections and indexes is one step, variables of loops have fixed places, and parts without variables are
//! computed here: upstream does all three, and its costs show it.

use std::sync::Arc;

use crate::ast::{Comprehension, Expr, ExprKind, Id, Literal};
use crate::check::{Checked, Declarations, Reference};
use crate::cost::runtime::{self, CallCost};
use crate::error::{EvalError, err};
use crate::eval;
use crate::functions::{self, Function};
use crate::value::{Map, Value};

/// A step of the evaluation.
pub(crate) enum Node {
    Const(Value<'static>),
    Attribute(Box<Attribute>),
    And(Box<[Node; 2]>),
    Or(Box<[Node; 2]>),
    /// `==` or, negated, `!=`.
    Equal {
        args: Box<[Node; 2]>,
        negated: bool,
    },
    Call(Box<Call>),
    List(Box<[(Node, bool)]>),
    Map(Box<[(Node, Node, bool)]>),
    Object(Box<ObjectNode>),
    Fold(Box<Fold>),
    /// `in` with a list of constants.
    Member {
        value: Box<Node>,
        list: Value<'static>,
    },
    NotStrictlyFalse(Box<Node>),
    /// `or` and `orValue`: the second argument is evaluated only if the first has no value.
    OptionalOr {
        args: Box<[Node; 2]>,
        unwrap: bool,
    },
}

/// A variable or value, and the fields and indexes that are read from it.
pub(crate) struct Attribute {
    pub base: Base,
    pub qualifiers: Vec<Qualifier>,
    /// `has()`: the last qualifier is only looked for.
    pub test_only: bool,
}

pub(crate) enum Base {
    Variable(Arc<str>),
    Local {
        slot: usize,
        /// This is the last use of the value: it may be changed in place.
        take: bool,
    },
    /// Without the checker: one of these names, and its qualifiers may belong to the name.
    Names(Vec<Name>),
    Value(Node),
    Conditional(Box<(Node, Attribute, Attribute)>),
}

/// A name that an identifier may stand for, and its place if it is the variable of a loop.
pub(crate) struct Name {
    pub name: String,
    pub slot: Option<usize>,
}

pub(crate) struct Qualifier {
    pub by: By,
    pub optional: bool,
}

pub(crate) enum By {
    Const(Value<'static>),
    /// An index that is a variable or a chain of its own. It is not charged itself.
    Attribute(Attribute),
    Value(Node),
}

pub(crate) struct Call {
    pub name: Arc<str>,
    pub function: Option<Function>,
    pub cost: CallCost,
    pub args: Vec<Node>,
    /// The compiled form of a pattern that is a literal.
    pub pattern: Option<functions::regex::Literal>,
}

pub(crate) struct ObjectNode {
    pub name: Arc<str>,
    pub fields: Vec<(Arc<str>, Node, bool)>,
}

pub(crate) struct Fold {
    pub range: Node,
    pub accu: usize,
    /// Where the accumulator's first value is in [`Plan::inits`]: it is computed when it is first read.
    pub init: usize,
    pub first: usize,
    pub second: Option<usize>,
    pub condition: Node,
    pub step: Node,
    pub result: Node,
}

/// An expression ready to be evaluated.
pub(crate) struct Plan {
    pub root: Node,
    pub inits: Vec<Node>,
    /// Places for the variables of loops.
    pub slots: usize,
}

pub(crate) fn plan(
    root: &Expr,
    checked: Option<&Checked>,
    declarations: &Declarations,
) -> Result<Plan, EvalError> {
    let mut planner = Planner { checked, declarations, locals: Vec::new(), inits: Vec::new(), slots: 0 };
    let root = planner.node(root)?;
    Ok(Plan { root, inits: planner.inits, slots: planner.slots })
}

struct Planner<'e> {
    checked: Option<&'e Checked>,
    declarations: &'e Declarations,
    locals: Vec<Arc<str>>,
    inits: Vec<Node>,
    slots: usize,
}

impl Planner<'_> {
    fn reference(&self, id: Id) -> Option<&Reference> {
        self.checked.and_then(|checked| checked.reference(id))
    }

    fn node(&mut self, expr: &Expr) -> Result<Node, EvalError> {
        match &expr.kind {
            ExprKind::Literal(literal) => Ok(Node::Const(literal_value(literal))),
            ExprKind::Ident(name) => Ok(self.ident(expr.id, name)),
            ExprKind::Select { operand, field, test_only } => {
                let operand = self.node(operand)?;
                let mut attribute = attribute_of(operand);
                attribute
                    .qualifiers
                    .push(Qualifier { by: By::Const(Value::string(field.clone())), optional: false });
                attribute.test_only = *test_only;
                Ok(Node::Attribute(Box::new(attribute)))
            }
            ExprKind::Call { .. } => self.call(expr),
            ExprKind::List(elements) => {
                let items = elements
                    .iter()
                    .map(|element| Ok((self.node(&element.value)?, element.optional)))
                    .collect::<Result<Vec<_>, EvalError>>()?;
                if items.iter().all(|(item, optional)| matches!(item, Node::Const(_)) && !optional) {
                    let items = items.into_iter().filter_map(|(item, _)| constant(item)).collect();
                    return Ok(Node::Const(Value::list(items)));
                }
                Ok(Node::List(items.into()))
            }
            ExprKind::Map(entries) => {
                let entries = entries
                    .iter()
                    .map(|entry| Ok((self.node(&entry.key)?, self.node(&entry.value)?, entry.optional)))
                    .collect::<Result<Vec<_>, EvalError>>()?;
                let is_constant = |(key, value, optional): &(Node, Node, bool)| {
                    matches!((key, value), (Node::Const(_), Node::Const(_))) && !optional
                };
                if entries.iter().all(is_constant) {
                    let mut made = crate::value::Entries::default();
                    for (key, value, _) in entries {
                        if let (Some(key), Some(value)) = (constant(key), constant(value)) {
                            eval::insert_entry(&mut made, key, value)?;
                        }
                    }
                    return Ok(Node::Const(Value::Map(Map::from_entries(made))));
                }
                Ok(Node::Map(entries.into()))
            }
            ExprKind::Struct { name, fields } => {
                let name: Arc<str> = self
                    .declarations
                    .candidates(name)
                    .into_iter()
                    .find(|candidate| self.declarations.object(candidate).is_some())
                    .ok_or_else(|| err!("unknown type: {name}"))?
                    .into();
                let fields = fields
                    .iter()
                    .map(|field| Ok((field.name.clone(), self.node(&field.value)?, field.optional)))
                    .collect::<Result<_, EvalError>>()?;
                Ok(Node::Object(Box::new(ObjectNode { name, fields })))
            }
            ExprKind::Comprehension(fold) => self.fold(fold),
        }
    }

    fn ident(&self, id: Id, name: &Arc<str>) -> Node {
        let attribute =
            |base| Node::Attribute(Box::new(Attribute { base, qualifiers: Vec::new(), test_only: false }));
        if let Some(Reference::Type(of)) = self.reference(id) {
            return Node::Const(Value::Type(of.clone()));
        }
        let slot = |name: &str| self.locals.iter().rposition(|local| **local == *name);
        if (self.checked.is_some() || self.declarations.container.is_empty())
            && let Some(slot) = slot(name)
        {
            return attribute(Base::Local { slot, take: false });
        }
        if self.reference(id).is_some() {
            return attribute(Base::Variable(name.clone()));
        }
        // As upstream: without the checker a variable in the container hides that of a loop.
        let candidates = self.declarations.candidates(name).into_iter();
        attribute(Base::Names(candidates.map(|name| Name { slot: slot(&name), name }).collect()))
    }

    /// The function that a call means, and whether its target is an argument.
    fn resolve(&self, id: Id, target: Option<&Expr>, function: &Arc<str>) -> (Arc<str>, bool) {
        if self.checked.is_some() && self.reference(id).is_some() {
            return (function.clone(), target.is_some());
        }
        let known = |name: &String| functions::find(name).is_some();
        let Some(target) = target else {
            let found = self.declarations.candidates(function).into_iter().find(known);
            return (found.map_or_else(|| function.trim_start_matches('.').into(), Into::into), false);
        };
        let qualified = target.qualified_name().map(|prefix| format!("{prefix}.{function}"));
        let found = qualified.and_then(|name| self.declarations.candidates(&name).into_iter().find(known));
        match found {
            Some(name) => (name.into(), false),
            None => (function.clone(), true),
        }
    }

    fn call(&mut self, expr: &Expr) -> Result<Node, EvalError> {
        let ExprKind::Call { target, function, args } = &expr.kind else {
            return Err(EvalError::text("not a call"));
        };
        let (name, with_target) = self.resolve(expr.id, target.as_deref(), function);
        let mut nodes = Vec::with_capacity(args.len() + 1);
        if let (true, Some(target)) = (with_target, target) {
            nodes.push(self.node(target)?);
        }
        for arg in args {
            nodes.push(self.node(arg)?);
        }
        let overloads = self.checked.map_or(&[][..], |checked| checked.overloads(expr.id));
        let overload = if let [one] = overloads { &**one } else { "" };
        match (&*name, nodes.len()) {
            ("_&&_" | "_||_" | "_==_" | "_!=_", 2) => {
                let right = nodes.pop().unwrap_or(Node::Const(Value::Null));
                let left = nodes.pop().unwrap_or(Node::Const(Value::Null));
                let args = Box::new([left, right]);
                Ok(match &*name {
                    "_&&_" => Node::And(args),
                    "_||_" => Node::Or(args),
                    name => Node::Equal { args, negated: name == "_!=_" },
                })
            }
            ("_?_:_", 3) => {
                let mut nodes = nodes.into_iter();
                let (Some(condition), Some(yes), Some(no)) = (nodes.next(), nodes.next(), nodes.next())
                else {
                    return Err(EvalError::text("no such overload: _?_:_"));
                };
                let base = Base::Conditional(Box::new((condition, branch(yes), branch(no))));
                Ok(Node::Attribute(Box::new(Attribute { base, qualifiers: Vec::new(), test_only: false })))
            }
            ("_[_]", 2) => index(nodes, false),
            ("_?._" | "_[?_]", 2) => index(nodes, true),
            ("or" | "orValue", 2) => {
                let other = nodes.pop().unwrap_or(Node::Const(Value::Null));
                let optional = nodes.pop().unwrap_or(Node::Const(Value::Null));
                Ok(Node::OptionalOr { args: Box::new([optional, other]), unwrap: &*name == "orValue" })
            }
            ("@not_strictly_false", 1) => {
                Ok(Node::NotStrictlyFalse(Box::new(nodes.pop().unwrap_or(Node::Const(Value::Null)))))
            }
            _ => self.function(name, overload, nodes),
        }
    }

    fn function(&mut self, name: Arc<str>, overload: &str, mut nodes: Vec<Node>) -> Result<Node, EvalError> {
        if overload == "in_list"
            && let [_, Node::Const(Value::List(list))] = nodes.as_slice()
        {
            if list.is_empty() {
                return Ok(Node::Const(Value::Bool(false)));
            }
            let hashable = |item: Value<'_>| {
                matches!(
                    item,
                    Value::Bool(_)
                        | Value::Int(_)
                        | Value::Uint(_)
                        | Value::Double(_)
                        | Value::String(_)
                        | Value::Null
                )
            };
            if list.iter().all(hashable) {
                let list = Value::List(list.clone());
                let value = Box::new(nodes.swap_remove(0));
                return Ok(Node::Member { value, list });
            }
        }
        let pattern = match nodes.get(1) {
            Some(Node::Const(pattern)) => {
                functions::regex::Literal::compile(&name, Some(pattern)).transpose()?
            }
            _ => None,
        };
        // A function that must know the types of its arguments has entries for its overloads.
        let function = functions::find(overload).or_else(|| functions::find(&name));
        if function.is_none() && nodes.is_empty() {
            return Err(err!("no such overload: {name}()"));
        }
        // A function of one signature is bound to its count of arguments before it runs.
        if self.checked.is_none()
            && let Some([only]) = self.declarations.functions.get(&name).map(Vec::as_slice)
            && only.params.len() != nodes.len()
        {
            let args = match nodes.len() {
                1 => "arg",
                2 => "lhs, rhs",
                _ => "...",
            };
            return Err(err!("no such overload: {name}({args})"));
        }
        let call = Call { cost: runtime::rule(&name, overload), function, name, args: nodes, pattern };
        // A conversion of a constant is a constant.
        const CONVERSIONS: &[&str] =
            &["bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint"];
        if CONVERSIONS.contains(&&*call.name)
            && let [Node::Const(value)] = call.args.as_slice()
        {
            return eval::call_once(&call, vec![value.clone()]).map(Node::Const);
        }
        Ok(Node::Call(Box::new(call)))
    }

    fn fold(&mut self, fold: &Comprehension) -> Result<Node, EvalError> {
        let init = self.node(&fold.accu_init)?;
        let range = self.node(&fold.range)?;
        self.inits.push(init);
        let init = self.inits.len() - 1;
        let accu = self.locals.len();
        self.locals.push(fold.accu_var.clone());
        let first = self.locals.len();
        self.locals.push(fold.iter_var.clone());
        let second = fold.iter_var2.as_ref().map(|name| {
            self.locals.push(name.clone());
            self.locals.len() - 1
        });
        self.slots = self.slots.max(self.locals.len());
        let condition = self.node(&fold.condition)?;
        let mut step = self.node(&fold.step)?;
        take_in_tail(&mut step, accu);
        self.locals.truncate(first);
        // The variables of the loop keep their places while the result is computed, without their names.
        self.locals.push(Arc::from("#"));
        let result = self.node(&fold.result);
        self.locals.truncate(accu);
        Ok(Node::Fold(Box::new(Fold { range, accu, init, first, second, condition, step, result: result? })))
    }
}

fn constant(node: Node) -> Option<Value<'static>> {
    match node {
        Node::Const(value) => Some(value),
        _ => None,
    }
}

pub(crate) fn literal_value(literal: &Literal) -> Value<'static> {
    match literal {
        Literal::Null => Value::Null,
        Literal::Bool(value) => Value::Bool(*value),
        Literal::Int(value) => Value::Int(*value),
        Literal::Uint(value) => Value::Uint(*value),
        Literal::Double(value) => Value::Double(*value),
        Literal::String(text) => Value::string(text.clone()),
        Literal::Bytes(bytes) => Value::Bytes(bytes.clone()),
    }
}

/// The chain that a selection or an index of `operand` belongs to.
fn attribute_of(operand: Node) -> Attribute {
    match operand {
        // has() ends a chain: its result is a new value.
        Node::Attribute(attribute) if !attribute.test_only => *attribute,
        other => Attribute { base: Base::Value(other), qualifiers: Vec::new(), test_only: false },
    }
}

/// A branch of a conditional: as upstream, a chain is read without being charged for its variable.
fn branch(node: Node) -> Attribute {
    match node {
        Node::Attribute(attribute) => *attribute,
        other => Attribute { base: Base::Value(other), qualifiers: Vec::new(), test_only: false },
    }
}

fn index(mut nodes: Vec<Node>, optional: bool) -> Result<Node, EvalError> {
    let (Some(index), Some(operand)) = (nodes.pop(), nodes.pop()) else {
        return Err(EvalError::text("no such overload: _[_]"));
    };
    let mut attribute = attribute_of(operand);
    let by = match index {
        Node::Const(value) => {
            eval::check_qualifier(&value)?;
            By::Const(value)
        }
        Node::Attribute(attribute) => By::Attribute(*attribute),
        other => By::Value(other),
    };
    attribute.qualifiers.push(Qualifier { by, optional });
    Ok(Node::Attribute(Box::new(attribute)))
}

/// Marks the uses of the accumulator `slot` after which the step of a loop does not read it again, so that
/// collecting a list takes no time for the items that it has already.
fn take_in_tail(step: &mut Node, slot: usize) {
    match step {
        Node::Attribute(attribute) if attribute.qualifiers.is_empty() => {
            if let Base::Conditional(parts) = &mut attribute.base {
                for branch in [&mut parts.1, &mut parts.2] {
                    if let Base::Value(node) = &mut branch.base {
                        take_in_tail(node, slot);
                    }
                }
            }
        }
        Node::Call(call) if matches!(&*call.name, "_+_" | "cel.@mapInsert") => {
            let Some((Node::Attribute(first), rest)) = call.args.split_first_mut() else { return };
            if rest.iter().any(|arg| mentions(arg, slot)) || !first.qualifiers.is_empty() {
                return;
            }
            if let Base::Local { slot: own, take } = &mut first.base {
                *take = *own == slot;
            }
        }
        _ => {}
    }
}

fn mentions(node: &Node, slot: usize) -> bool {
    let attribute = |attribute: &Attribute| mentions_attribute(attribute, slot);
    match node {
        Node::Const(_) => false,
        Node::Attribute(of) => attribute(of),
        Node::And(args) | Node::Or(args) | Node::Equal { args, .. } | Node::OptionalOr { args, .. } => {
            args.iter().any(|arg| mentions(arg, slot))
        }
        Node::Call(call) => call.args.iter().any(|arg| mentions(arg, slot)),
        Node::List(items) => items.iter().any(|(item, _)| mentions(item, slot)),
        Node::Map(entries) => {
            entries.iter().any(|(key, value, _)| mentions(key, slot) || mentions(value, slot))
        }
        Node::Object(object) => object.fields.iter().any(|(_, value, _)| mentions(value, slot)),
        // The first value of an inner accumulator is elsewhere: it may mention anything.
        Node::Fold(_) => true,
        Node::Member { value, .. } | Node::NotStrictlyFalse(value) => mentions(value, slot),
    }
}

fn mentions_attribute(attribute: &Attribute, slot: usize) -> bool {
    let base = match &attribute.base {
        Base::Local { slot: own, .. } => *own == slot,
        Base::Variable(_) | Base::Names(_) => false,
        Base::Value(node) => mentions(node, slot),
        Base::Conditional(parts) => {
            mentions(&parts.0, slot)
                || mentions_attribute(&parts.1, slot)
                || mentions_attribute(&parts.2, slot)
        }
    };
    base || attribute.qualifiers.iter().any(|qualifier| match &qualifier.by {
        By::Const(_) => false,
        By::Attribute(of) => mentions_attribute(of, slot),
        By::Value(node) => mentions(node, slot),
    })
}
