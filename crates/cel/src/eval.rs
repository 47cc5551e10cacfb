//! The evaluator.
//!
//! Costs are charged as upstream charges them: 1 for each variable and each field or index that is read, the rule of
//! its function for each call, and fixed amounts for lists, maps and objects that are made.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::check::named_type;
use crate::error::{EvalError, NO_SUCH_OVERLOAD, err};
use crate::functions::{self, Memory};
use crate::plan::{Attribute, Base, By, Call, Fold, Name, Node, ObjectNode, Plan, Qualifier};
use crate::program::Activation;
use crate::value::{Entries, Map, Object, Value, equals};

/// Iterations of loops between checks of the interrupt.
const CHECK_FREQUENCY: u32 = 100;
/// Bytes that the strings and lists made by one evaluation may take, those included that are garbage by its end.
const MEMORY_LIMIT: usize = 256 * 1024 * 1024;

const LIST_COST: u64 = 10;
const MAP_COST: u64 = 30;
const OBJECT_COST: u64 = 40;

/// The most that an evaluation may cost, and a flag that stops it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits<'l> {
    /// `None` for any cost.
    pub cost: Option<u64>,
    /// The evaluation stops soon after this is set.
    pub interrupt: Option<&'l AtomicBool>,
}

impl Limits<'_> {
    pub fn cost(limit: u64) -> Self {
        Self { cost: Some(limit), interrupt: None }
    }
}

type Evaluated<'a> = Result<Value<'a>, EvalError>;

/// A variable of a loop.
enum Slot<'a> {
    /// An accumulator that was not read yet: where its first value is computed.
    Init(usize),
    Value(Evaluated<'a>),
}

pub(crate) fn evaluate<'a>(
    plan: &Plan,
    activation: &Activation<'a>,
    limits: Limits<'_>,
) -> (Evaluated<'a>, u64) {
    let mut evaluator = Evaluator {
        plan,
        activation,
        slots: Vec::with_capacity(plan.slots),
        cost: 0,
        limit: limits.cost.unwrap_or(u64::MAX),
        interrupt: limits.interrupt,
        iterations: 0,
        memory: Memory::new(MEMORY_LIMIT),
    };
    let value = evaluator.eval(&plan.root);
    (value, evaluator.cost)
}

/// Calls a function with arguments that are known before anything runs.
pub(crate) fn call_once<'a>(call: &Call, mut args: Vec<Value<'a>>) -> Evaluated<'a> {
    invoke(call, &mut Memory::new(MEMORY_LIMIT), &mut args)
}

fn invoke<'a>(call: &Call, memory: &mut Memory, args: &mut [Value<'a>]) -> Evaluated<'a> {
    if let Some(pattern) = &call.pattern {
        return match pattern.call(memory, args) {
            Err(error) if functions::is_no_match(&error) => {
                Err(functions::no_such_overload(&call.name, args))
            }
            result => result,
        };
    }
    let Some(function) = call.function else { return Err(err!("no such overload: {}", call.name)) };
    match function(memory, args) {
        Err(error) if functions::is_no_match(&error) => Err(functions::no_such_overload(&call.name, args)),
        result => result,
    }
}

struct Evaluator<'e, 'a> {
    plan: &'e Plan,
    activation: &'e Activation<'a>,
    slots: Vec<Slot<'a>>,
    cost: u64,
    limit: u64,
    interrupt: Option<&'e AtomicBool>,
    iterations: u32,
    memory: Memory,
}

impl<'e, 'a> Evaluator<'e, 'a> {
    fn charge(&mut self, cost: u64) -> Result<(), EvalError> {
        self.cost = self.cost.saturating_add(cost);
        if self.cost > self.limit { Err(EvalError::CostLimitExceeded) } else { Ok(()) }
    }

    fn eval(&mut self, node: &'e Node) -> Evaluated<'a> {
        match node {
            Node::Const(value) => Ok(value.clone()),
            Node::Attribute(attribute) => self.attribute(attribute),
            Node::And(args) => self.logical(args, false),
            Node::Or(args) => self.logical(args, true),
            Node::Equal { args, negated } => self.equal(args, *negated),
            Node::Call(call) => self.call(call),
            Node::List(items) => self.list(items),
            Node::Map(entries) => self.map(entries),
            Node::Object(object) => self.object(object),
            Node::Fold(fold) => self.fold(fold),
            Node::Member { value, list } => self.member(value, list),
            Node::NotStrictlyFalse(arg) => self.not_strictly_false(arg),
            Node::OptionalOr { args, unwrap } => self.optional_or(args, *unwrap),
        }
    }

    /// `&&` and `||`: the value `decisive` decides, whatever the other side is.
    fn logical(&mut self, args: &'e [Node; 2], decisive: bool) -> Evaluated<'a> {
        let mut error = None;
        for arg in args {
            match self.eval(arg) {
                Ok(Value::Bool(value)) if value == decisive => return Ok(Value::Bool(decisive)),
                Ok(Value::Bool(_)) => {}
                Ok(_) => error = error.or(Some(NO_SUCH_OVERLOAD)),
                Err(fatal) if fatal.is_fatal() => return Err(fatal),
                Err(found) => error = error.or(Some(found)),
            }
        }
        error.map_or(Ok(Value::Bool(!decisive)), Err)
    }

    fn not_strictly_false(&mut self, arg: &'e Node) -> Evaluated<'a> {
        let value = self.eval(arg);
        self.charge(1)?;
        match value {
            Ok(Value::Bool(value)) => Ok(Value::Bool(value)),
            Err(fatal) if fatal.is_fatal() => Err(fatal),
            Ok(_) | Err(_) => Ok(Value::Bool(true)),
        }
    }

    fn optional_or(&mut self, args: &'e [Node; 2], unwrap: bool) -> Evaluated<'a> {
        match self.eval(&args[0])? {
            Value::Optional(None) => self.eval(&args[1]),
            Value::Optional(Some(value)) if unwrap => Ok((*value).clone()),
            other => Ok(other),
        }
    }

    /// Both sides of a call are evaluated even if the first fails: both are charged.
    fn both(&mut self, args: &'e [Node; 2]) -> Result<(Evaluated<'a>, Evaluated<'a>), EvalError> {
        let left = self.eval(&args[0]);
        if let Err(fatal) = &left
            && fatal.is_fatal()
        {
            return Err(fatal.clone());
        }
        let right = self.eval(&args[1]);
        if let Err(fatal) = &right
            && fatal.is_fatal()
        {
            return Err(fatal.clone());
        }
        Ok((left, right))
    }

    fn equal(&mut self, args: &'e [Node; 2], negated: bool) -> Evaluated<'a> {
        let (left, right) = self.both(args)?;
        let size = |value: &Evaluated<'a>| value.as_ref().map_or(1, Value::cost_size);
        let cost = match &left {
            Ok(Value::Opaque(_)) if !negated => 1,
            _ => size(&left).min(size(&right)).div_ceil(10),
        };
        self.charge(cost)?;
        let (left, right) = (left?, right?);
        equals(&left, &right).map(|equal| Value::Bool(equal != negated))
    }

    fn member(&mut self, value: &'e Node, list: &'e Value<'static>) -> Evaluated<'a> {
        let value = self.eval(value)?;
        let Value::List(list) = list else { return Err(NO_SUCH_OVERLOAD) };
        list.contains(&value).map(Value::Bool)
    }

    fn call(&mut self, call: &'e Call) -> Evaluated<'a> {
        let mut args = functions::Args::with_capacity(call.args.len());
        let mut error = None;
        for arg in &call.args {
            match self.eval(arg) {
                Ok(value) => args.push(value),
                // Of one or two arguments both are evaluated, of more none after an error.
                Err(found) if found.is_fatal() || call.args.len() > 2 => return Err(found),
                Err(found) => {
                    error = error.or(Some(found));
                    args.push(Value::Null);
                }
            }
        }
        let args = args.as_mut_slice();
        let known = call.cost.of_args(args);
        if let Some(cost) = known {
            self.charge(cost)?;
        }
        let result = match error {
            Some(error) => Err(error),
            None => invoke(call, &mut self.memory, args),
        };
        if known.is_none() {
            self.charge(call.cost.of_result(args, result.as_ref().ok()))?;
        }
        result
    }

    fn list(&mut self, nodes: &'e [(Node, bool)]) -> Evaluated<'a> {
        let result = self.list_items(nodes);
        if let Err(fatal) = &result
            && fatal.is_fatal()
        {
            return result;
        }
        self.charge(LIST_COST)?;
        result
    }

    fn list_items(&mut self, nodes: &'e [(Node, bool)]) -> Evaluated<'a> {
        self.memory.take(nodes.len() * size_of::<Value<'_>>())?;
        let mut items = Vec::with_capacity(nodes.len());
        for (node, optional) in nodes {
            match self.eval(node)? {
                Value::Optional(None) if *optional => {}
                Value::Optional(Some(value)) if *optional => items.push((*value).clone()),
                value if *optional => {
                    let shown = functions::display(&value);
                    return Err(err!(
                        "cannot initialize optional list element from non-optional value {shown}"
                    ));
                }
                value => items.push(value),
            }
        }
        Ok(Value::list(items))
    }

    fn map(&mut self, nodes: &'e [(Node, Node, bool)]) -> Evaluated<'a> {
        let result = self.map_entries(nodes);
        if let Err(fatal) = &result
            && fatal.is_fatal()
        {
            return result;
        }
        self.charge(MAP_COST)?;
        result
    }

    fn map_entries(&mut self, nodes: &'e [(Node, Node, bool)]) -> Evaluated<'a> {
        self.memory.take(nodes.len() * 2 * size_of::<Value<'_>>())?;
        let mut entries = Entries::default();
        for (key, value, optional) in nodes {
            let key = self.eval(key)?;
            let value = match self.eval(value)? {
                Value::Optional(None) if *optional => continue,
                Value::Optional(Some(value)) if *optional => (*value).clone(),
                value if *optional => {
                    let (key, value) = (functions::display(&key), functions::display(&value));
                    return Err(err!(
                        "cannot initialize optional entry '{key}' from non-optional value {value}"
                    ));
                }
                value => value,
            };
            insert_entry(&mut entries, key, value)?;
        }
        Ok(Value::Map(Map::from_entries(entries)))
    }

    fn object(&mut self, node: &'e ObjectNode) -> Evaluated<'a> {
        let result = self.object_fields(node);
        if let Err(fatal) = &result
            && fatal.is_fatal()
        {
            return result;
        }
        self.charge(OBJECT_COST)?;
        result
    }

    fn object_fields(&mut self, node: &'e ObjectNode) -> Evaluated<'a> {
        let mut fields = Vec::with_capacity(node.fields.len());
        for (name, value, optional) in &node.fields {
            match self.eval(value)? {
                Value::Optional(None) if *optional => {}
                Value::Optional(Some(value)) if *optional => fields.push((name.clone(), (*value).clone())),
                value if *optional => {
                    let shown = functions::display(&value);
                    return Err(err!(
                        "cannot initialize optional entry '{name}' from non-optional value {shown}"
                    ));
                }
                value => fields.push((name.clone(), value)),
            }
        }
        Ok(Value::Object(Arc::new(Object { type_name: node.name.clone(), fields })))
    }

    fn attribute(&mut self, attribute: &'e Attribute) -> Evaluated<'a> {
        let value = self.resolve(attribute);
        if let Err(fatal) = &value
            && fatal.is_fatal()
        {
            return value;
        }
        let conditional = matches!(attribute.base, Base::Conditional(_));
        match (conditional, attribute.test_only) {
            (false, false) => self.charge(1)?,
            (true, true) => self.cost = self.cost.saturating_sub(1),
            _ => {}
        }
        value
    }

    /// The value of a chain, charged for its qualifiers alone.
    fn resolve(&mut self, attribute: &'e Attribute) -> Evaluated<'a> {
        let qualifiers = attribute.qualifiers.as_slice();
        match &attribute.base {
            Base::Variable(name) => match self.activation.get(name) {
                Some(value) => self.qualify(value?, qualifiers, attribute.test_only),
                None => Err(err!("no such attribute(s): {name}")),
            },
            Base::Local { slot, take } => {
                let value = self.local(*slot, *take)?;
                self.qualify(value, qualifiers, attribute.test_only)
            }
            Base::Value(node) => {
                let value = self.eval(node)?;
                self.qualify(value, qualifiers, attribute.test_only)
            }
            Base::Conditional(parts) => {
                let value = match self.eval(&parts.0)? {
                    Value::Bool(true) => self.resolve(&parts.1)?,
                    Value::Bool(false) => self.resolve(&parts.2)?,
                    _ => return Err(NO_SUCH_OVERLOAD),
                };
                self.qualify(value, qualifiers, attribute.test_only)
            }
            Base::Names(names) => self.resolve_names(names, qualifiers, attribute.test_only),
        }
    }

    /// Without the checker: the longest name that is a variable, then the qualifiers that are left.
    fn resolve_names(
        &mut self,
        names: &'e [Name],
        qualifiers: &'e [Qualifier],
        test_only: bool,
    ) -> Evaluated<'a> {
        let fields = qualifiers
            .iter()
            .map_while(|qualifier| match &qualifier.by {
                By::Const(Value::String(field)) if !qualifier.optional => Some(&**field),
                _ => None,
            })
            .collect::<Vec<_>>();
        let most = if test_only { fields.len().saturating_sub(1) } else { fields.len() };
        for count in (0..=most).rev() {
            for Name { name, slot } in names {
                if let (Some(slot), 0) = (slot, count) {
                    let value = self.local(*slot, false)?;
                    return self.qualify(value, qualifiers, test_only);
                }
                let full = [&[name.as_str()], &fields[..count]].concat().join(".");
                if let Some(value) = self.activation.get(&full) {
                    // Qualifiers that belong to the name are charged, too.
                    return self.qualify(value?, &qualifiers[count..], test_only);
                }
                if count == qualifiers.len()
                    && let Some(of) = named_type(&full)
                {
                    return Ok(Value::Type(of));
                }
            }
        }
        let full = |name: &Name| [&[name.name.as_str()], &fields[..most]].concat().join(".");
        Err(err!("no such attribute(s): {}", names.iter().map(full).collect::<Vec<_>>().join(", ")))
    }

    fn local(&mut self, slot: usize, take: bool) -> Evaluated<'a> {
        if let Slot::Init(init) = self.slots[slot] {
            // The first value is computed as if outside the loop, whose places it may use for its own loops.
            let inner = self.slots.split_off(slot);
            let value = self.eval(&self.plan.inits[init]);
            self.slots.truncate(slot);
            self.slots.extend(inner);
            self.slots[slot] = Slot::Value(value);
        }
        match &mut self.slots[slot] {
            Slot::Value(value) if take => std::mem::replace(value, Ok(Value::Null)),
            Slot::Value(value) => value.clone(),
            Slot::Init(_) => Err(EvalError::text("a loop variable has no value")),
        }
    }

    fn qualify(&mut self, value: Value<'a>, qualifiers: &'e [Qualifier], test_only: bool) -> Evaluated<'a> {
        if qualifiers.is_empty() {
            return Ok(value);
        }
        let mut optional = false;
        let mut value = value;
        if let Value::Optional(inner) = &value {
            optional = true;
            match inner {
                None if test_only => return Ok(Value::Bool(false)),
                None => return Ok(Value::NONE),
                Some(inner) => value = (**inner).clone(),
            }
        }
        for (at, qualifier) in qualifiers.iter().enumerate() {
            let last = test_only && at + 1 == qualifiers.len();
            optional |= qualifier.optional;
            // The cost of computing an index comes before that of reading it.
            let computed;
            let key = match &qualifier.by {
                By::Const(key) => key,
                By::Attribute(attribute) => {
                    computed = self.resolve(attribute)?;
                    check_qualifier(&computed)?;
                    &computed
                }
                By::Value(node) => {
                    computed = self.eval(node)?;
                    check_qualifier(&computed)?;
                    &computed
                }
            };
            let found = find(&value, key, optional || last);
            if last {
                if !optional || matches!(found, Ok(Some(_))) {
                    self.charge(1)?;
                }
                return found.map(|found| Value::Bool(found.is_some()));
            }
            match found {
                Ok(Some(found)) => {
                    self.charge(1)?;
                    value = found;
                }
                Ok(None) if optional && test_only => return Ok(Value::Bool(false)),
                Ok(None) if optional => return Ok(Value::NONE),
                Ok(None) => {
                    self.charge(1)?;
                    return Err(missing(&value, key));
                }
                Err(error) => {
                    if !optional {
                        self.charge(1)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(if optional { Value::some(value) } else { value })
    }

    fn fold(&mut self, fold: &'e Fold) -> Evaluated<'a> {
        let range = self.eval(&fold.range)?;
        self.slots.truncate(fold.accu);
        self.slots.push(Slot::Init(fold.init));
        self.slots.push(Slot::Value(Ok(Value::Null)));
        if fold.second.is_some() {
            self.slots.push(Slot::Value(Ok(Value::Null)));
        }
        match range {
            Value::List(list) => {
                for index in 0..list.len() {
                    let Some(item) = list.try_get(index) else { break };
                    let (first, second) = match fold.second {
                        Some(_) => (Ok(Value::Int(index as i64)), Some(item)),
                        None => (item, None),
                    };
                    if !self.iterate(fold, first, second)? {
                        break;
                    }
                }
            }
            Value::Map(map) => {
                for key in map.keys() {
                    let value = match fold.second {
                        Some(_) => map.get(&key).transpose(),
                        None => None,
                    };
                    if !self.iterate(fold, Ok(key), value)? {
                        break;
                    }
                }
            }
            other if fold.second.is_some() => {
                return Err(err!("unsupported comprehension range type: {}", other.go_type()));
            }
            other => return Err(err!("got '{}', expected iterable type", other.go_type())),
        }
        self.slots.truncate(fold.first + 1 + usize::from(fold.second.is_some()));
        let result = self.eval(&fold.result);
        self.slots.truncate(fold.accu);
        result
    }

    /// One turn of a loop; false if it was the last.
    fn iterate(
        &mut self,
        fold: &'e Fold,
        first: Evaluated<'a>,
        second: Option<Evaluated<'a>>,
    ) -> Result<bool, EvalError> {
        self.slots.truncate(fold.accu + 1);
        self.slots.push(Slot::Value(first));
        if fold.second.is_some() {
            self.slots.push(Slot::Value(second.unwrap_or(Ok(Value::Null))));
        }
        match self.eval(&fold.condition) {
            Ok(Value::Bool(false)) => return Ok(false),
            Err(fatal) if fatal.is_fatal() => return Err(fatal),
            Ok(_) | Err(_) => {}
        }
        let step = self.eval(&fold.step);
        if let Err(fatal) = &step
            && fatal.is_fatal()
        {
            return Err(fatal.clone());
        }
        self.slots.truncate(fold.accu + 1);
        self.slots[fold.accu] = Slot::Value(step);
        self.iterations += 1;
        if self.iterations.is_multiple_of(CHECK_FREQUENCY)
            && self.interrupt.is_some_and(|interrupt| interrupt.load(Ordering::Relaxed))
        {
            return Err(EvalError::Interrupted);
        }
        Ok(true)
    }
}

/// Adds an entry to a map that an expression makes.
pub(crate) fn insert_entry<'a>(
    entries: &mut Entries<'a>,
    key: Value<'a>,
    value: Value<'a>,
) -> Result<(), EvalError> {
    entries.set(key, value);
    Ok(())
}

/// May `key` be an index?
pub(crate) fn check_qualifier(key: &Value<'_>) -> Result<(), EvalError> {
    match key {
        Value::String(_) | Value::Int(_) | Value::Uint(_) | Value::Bool(_) | Value::Double(_) => Ok(()),
        other => Err(err!("invalid qualifier type: {}", other.go_type())),
    }
}

fn missing(value: &Value<'_>, key: &Value<'_>) -> EvalError {
    let key = functions::display(key);
    match value {
        Value::List(_) => err!("index out of bounds: {key}"),
        _ => err!("no such key: {key}"),
    }
}

/// The field or item `key` of `value`. `None` if there is none.
fn find<'a>(value: &Value<'a>, key: &Value<'_>, presence: bool) -> Result<Option<Value<'a>>, EvalError> {
    match value {
        Value::Map(map) => map.index(key),
        Value::List(list) => {
            let index = match key {
                Value::Int(index) => *index,
                Value::Uint(index) => i64::try_from(*index).unwrap_or(-1),
                Value::Double(index) if index.fract() == 0.0 && index.abs() < 9e18 => *index as i64,
                Value::Double(_) => {
                    return Err(err!("unsupported index value {} in list", functions::display(key)));
                }
                other => return Err(err!("unsupported index type '{}' in list", other.type_name())),
            };
            usize::try_from(index).ok().and_then(|index| list.try_get(index)).transpose()
        }
        Value::Object(object) => match key {
            Value::String(field) => match object.get(field) {
                Some(value) => Ok(Some(value.clone())),
                None if presence => Ok(None),
                None => Err(err!("no such field '{}'", &**field)),
            },
            _ => Ok(None),
        },
        Value::Lazy(object) => match key {
            Value::String(field) => object.get(field).transpose(),
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}
