//! Estimates of costs before anything runs.

use std::collections::HashMap;
use std::sync::Arc;

use super::Range;
use super::calls::standard;
use crate::ast::{Comprehension, Expr, ExprKind, Id, Literal};
use crate::check::Checked;
use crate::macros::ACCUMULATOR;
use crate::types::Type;

/// Knows the sizes that variables and their parts can have.
pub trait SizeEstimator {
    /// The size of the value at `path`: a variable, then fields, `@items`, `@values`, `@keys`. `None` if unknown.
    fn size(&self, path: &[Arc<str>], of: &Type) -> Option<Range>;
}

/// Knows nothing.
pub(crate) struct NoSizes;

impl SizeEstimator for NoSizes {
    fn size(&self, _: &[Arc<str>], _: &Type) -> Option<Range> {
        None
    }
}

pub(crate) fn estimate(root: &Expr, checked: &Checked, sizes: &dyn SizeEstimator) -> Range {
    let mut estimator = Estimator {
        checked,
        sizes,
        paths: HashMap::new(),
        locals: HashMap::new(),
        computed: HashMap::new(),
        entries: HashMap::new(),
    };
    estimator.cost(root)
}

pub(super) type Path = Arc<[Arc<str>]>;

/// The sizes of the keys and values of a list or a map.
#[derive(Clone, Copy)]
struct EntrySize {
    is_list: bool,
    key: Range,
    value: Range,
}

impl EntrySize {
    fn union(self, other: Self) -> Self {
        Self { is_list: self.is_list, key: self.key.union(other.key), value: self.value.union(other.value) }
    }
}

struct Local {
    path: Path,
    size: Option<Range>,
    entries: Option<EntrySize>,
}

/// An argument of a call, as the rules for functions see it.
pub(super) struct Argument<'e> {
    pub path: Path,
    pub of: Type,
    pub size: Option<Range>,
    pub expr: &'e Expr,
}

/// The cost of a call without that of its arguments, and the size of its result if the rule has it.
pub(super) struct CallEstimate {
    pub cost: Range,
    pub result: Option<Range>,
}

pub(super) fn only(cost: Range) -> Option<CallEstimate> {
    Some(CallEstimate { cost, result: None })
}

pub(super) struct Estimator<'e> {
    checked: &'e Checked,
    pub sizes: &'e dyn SizeEstimator,
    paths: HashMap<Id, Path>,
    locals: HashMap<Arc<str>, Vec<Local>>,
    computed: HashMap<Id, Range>,
    entries: HashMap<Id, EntrySize>,
}

pub(super) fn extended(path: &[Arc<str>], step: &str) -> Path {
    path.iter().cloned().chain([Arc::from(step)]).collect()
}

pub(super) const ONE: Range = Range::fixed(1);
const EMPTY: Range = Range { min: u64::MAX, max: 0 };

impl<'e> Estimator<'e> {
    fn cost(&mut self, expr: &'e Expr) -> Range {
        match &expr.kind {
            ExprKind::Literal(_) => Range::fixed(0),
            ExprKind::Ident(name) => {
                let path = match self.local(name) {
                    Some(local) => local.path.clone(),
                    None => [name.clone()].into(),
                };
                self.paths.insert(expr.id, path);
                ONE
            }
            ExprKind::Select { operand, field, test_only } => {
                let sum = self.cost(operand);
                if *test_only {
                    return sum;
                }
                let path = extended(&self.path(operand), field);
                self.paths.insert(expr.id, path);
                match self.checked.type_of(operand.id) {
                    Type::Map(_) | Type::Struct(_) | Type::Param(_) => sum.plus(ONE),
                    _ => sum,
                }
            }
            ExprKind::Call { .. } => self.call(expr),
            ExprKind::List(elements) => {
                let mut sum = Range::default();
                let mut value = EMPTY;
                if elements.is_empty() {
                    value.min = 0;
                }
                for element in elements {
                    sum = sum.plus(self.cost(&element.value));
                    value = value.union(self.size_or_unknown(&element.value));
                }
                self.entries.insert(expr.id, EntrySize { is_list: true, key: ONE, value });
                sum.plus(Range::fixed(10))
            }
            ExprKind::Map(entries) => {
                let mut sum = Range::default();
                let (mut key, mut value) = (EMPTY, EMPTY);
                if entries.is_empty() {
                    (key.min, value.min) = (0, 0);
                }
                for entry in entries {
                    sum = sum.plus(self.cost(&entry.key)).plus(self.cost(&entry.value));
                    key = key.union(self.size_or_unknown(&entry.key));
                    value = value.union(self.size_or_unknown(&entry.value));
                }
                self.entries.insert(expr.id, EntrySize { is_list: false, key, value });
                sum.plus(Range::fixed(30))
            }
            ExprKind::Struct { fields, .. } => {
                let fields =
                    fields.iter().fold(Range::default(), |sum, field| sum.plus(self.cost(&field.value)));
                fields.plus(Range::fixed(40))
            }
            ExprKind::Comprehension(fold) => self.comprehension(expr.id, fold),
        }
    }

    fn local(&self, name: &str) -> Option<&Local> {
        self.locals.get(name).and_then(|stack| stack.last())
    }

    fn push(&mut self, name: &Arc<str>, local: Local) {
        self.locals.entry(name.clone()).or_default().push(local);
    }

    fn pop(&mut self, name: &str) {
        if let Some(stack) = self.locals.get_mut(name) {
            stack.pop();
        }
    }

    fn path(&self, expr: &Expr) -> Path {
        if let ExprKind::Ident(name) = &expr.kind
            && let Some(local) = self.local(name)
        {
            return local.path.clone();
        }
        self.paths.get(&expr.id).cloned().unwrap_or_else(|| [].into())
    }

    fn size(&mut self, expr: &Expr) -> Option<Range> {
        if let Some(size) = self.computed.get(&expr.id) {
            return Some(*size);
        }
        let of_literal = match &expr.kind {
            ExprKind::Literal(Literal::String(text)) => Some(text.chars().count()),
            ExprKind::Literal(Literal::Bytes(bytes)) => Some(bytes.len()),
            ExprKind::Literal(_) => Some(1),
            ExprKind::List(elements) => Some(elements.len()),
            ExprKind::Map(entries) => Some(entries.len()),
            _ => None,
        };
        if let Some(size) = of_literal {
            return Some(Range::fixed(size as u64));
        }
        let of = self.checked.type_of(expr.id);
        if let Some(size) = self.sizes.size(&self.path(expr), of) {
            self.computed.insert(expr.id, size);
            return Some(size);
        }
        if is_scalar(of) {
            return Some(ONE);
        }
        match &expr.kind {
            ExprKind::Ident(name) => self.local(name).and_then(|local| local.size),
            _ => None,
        }
    }

    fn size_or_unknown(&mut self, expr: &Expr) -> Range {
        self.size(expr).unwrap_or(Range::UNKNOWN)
    }

    fn entry_size(&self, expr: &Expr) -> Option<EntrySize> {
        self.entries.get(&expr.id).copied().or_else(|| match &expr.kind {
            ExprKind::Ident(name) => self.local(name).and_then(|local| local.entries),
            _ => None,
        })
    }

    fn comprehension(&mut self, id: Id, fold: &'e Comprehension) -> Range {
        let empty_range = matches!(&fold.range.kind, ExprKind::List(elements) if elements.is_empty());
        let never = matches!(fold.condition.kind, ExprKind::Literal(Literal::Bool(false)));
        let is_binding = empty_range && never && &*fold.accu_var != ACCUMULATOR;
        let mut sum = self.cost(&fold.range);
        sum = sum.plus(self.cost(&fold.accu_init));
        let accu = Local {
            path: self.path(&fold.accu_init),
            size: self.size(&fold.accu_init),
            entries: self.entry_size(&fold.accu_init),
        };
        self.push(&fold.accu_var, accu);
        if is_binding {
            sum = sum.plus(self.cost(&fold.result));
            self.pop(&fold.accu_var);
            if let Some(size) = self.size(&fold.result) {
                self.computed.insert(id, size);
            }
            if let Some(entries) = self.entry_size(&fold.result) {
                self.entries.insert(id, entries);
            }
            return sum;
        }
        self.push_iteration(fold);
        let turn = self.cost(&fold.condition);
        let turn = self.cost(&fold.step).plus(turn);
        self.pop(&fold.iter_var);
        if let Some(second) = &fold.iter_var2 {
            self.pop(second);
        }
        sum = sum.plus(self.cost(&fold.result));
        self.pop(&fold.accu_var);
        let count = self.size_or_unknown(&fold.range);
        match &fold.accu_init.kind {
            ExprKind::Literal(_) => {
                if let Some(size) = self.size(&fold.accu_init) {
                    self.computed.insert(id, size);
                }
            }
            ExprKind::List(_) | ExprKind::Map(_) => {
                self.computed.insert(id, count);
                if let Some(entries) = self.entry_size(&fold.step) {
                    self.entries.insert(id, entries);
                }
            }
            _ => {}
        }
        sum.plus(count.times(turn))
    }

    fn push_iteration(&mut self, fold: &'e Comprehension) {
        let entries = self.entry_size(&fold.range);
        let is_list = entries
            .map_or(matches!(self.checked.type_of(fold.range.id), Type::List(_)), |entries| entries.is_list);
        let path = self.path(&fold.range);
        let key = entries.map(|entries| entries.key);
        let value = entries.map(|entries| entries.value);
        let local = |step: &str, size| Local { path: extended(&path, step), size, entries: None };
        let (first, second) = match (&fold.iter_var2, is_list) {
            (Some(_), true) => (local("@indices", key), Some(local("@items", value))),
            (Some(_), false) => (local("@keys", key), Some(local("@values", value))),
            (None, true) => (local("@items", value), None),
            (None, false) => (local("@keys", key), None),
        };
        self.push(&fold.iter_var, first);
        if let (Some(name), Some(second)) = (&fold.iter_var2, second) {
            self.push(name, second);
        }
    }

    fn argument(&mut self, expr: &'e Expr) -> Argument<'e> {
        let path = self.path(expr);
        let path = if path.first().is_some_and(|first| &**first == ACCUMULATOR) { [].into() } else { path };
        Argument { path, of: self.checked.type_of(expr.id).clone(), size: self.size(expr), expr }
    }

    fn call(&mut self, expr: &'e Expr) -> Range {
        let ExprKind::Call { target, function, args } = &expr.kind else { return Range::default() };
        if let ("dyn", [arg]) = (&**function, args.as_slice()) {
            let cost = self.cost(arg).plus(ONE);
            if let Some(size) = self.size(arg) {
                self.computed.insert(expr.id, size);
            }
            if let Some(entries) = self.entry_size(arg) {
                self.entries.insert(expr.id, entries);
            }
            return cost;
        }
        let mut costs = Vec::with_capacity(args.len());
        let mut arguments = Vec::with_capacity(args.len());
        for arg in args {
            costs.push(self.cost(arg));
            arguments.push(self.argument(arg));
        }
        let overloads = self.checked.overloads(expr.id);
        if overloads.is_empty() {
            return Range::default();
        }
        let mut sum = Range::default();
        let mut receiver = None;
        if let Some(target) = target {
            sum = self.cost(target);
            receiver = Some(self.argument(target));
        }
        let mut cost = EMPTY;
        let mut result: Option<Range> = None;
        for overload in overloads {
            let estimate = self.overload(expr, function, overload, receiver.as_ref(), &arguments, &costs);
            cost = cost.union(estimate.cost);
            if let Some(size) = estimate.result {
                result = Some(result.map_or(size, |result| result.union(size)));
            }
            let step = match &**overload {
                "index_list" => Some("@items"),
                "index_map" => Some("@values"),
                _ => None,
            };
            if let (Some(step), Some(container)) = (step, args.first()) {
                result = self.entry_size(container).map(|entries| entries.value);
                let path = extended(&self.path(container), step);
                self.paths.insert(expr.id, path);
            }
            if result.is_none() {
                result = self.size(expr);
            }
        }
        if let Some(result) = result {
            self.computed.insert(expr.id, result);
        }
        sum.plus(cost)
    }

    pub fn size_of(&self, argument: &Argument<'_>) -> Range {
        argument.size.or_else(|| self.sizes.size(&argument.path, &argument.of)).unwrap_or(Range::UNKNOWN)
    }

    fn overload(
        &mut self,
        expr: &Expr,
        function: &str,
        overload: &str,
        target: Option<&Argument<'e>>,
        args: &[Argument<'e>],
        costs: &[Range],
    ) -> CallEstimate {
        let of_args = costs.iter().fold(Range::default(), |sum, cost| sum.plus(*cost));
        if let Some(estimate) = self
            .extension(overload, target, args)
            .or_else(|| self.kubernetes(function, overload, target, args))
        {
            return CallEstimate { cost: estimate.cost.plus(of_args), ..estimate };
        }
        match (overload, args) {
            ("logical_or" | "logical_and", [_, _]) => {
                let cost = Range { min: costs[0].min, max: costs[0].plus(costs[1]).max };
                return CallEstimate { cost, result: None };
            }
            ("conditional", [_, yes, no]) => {
                let size = self.size_or_unknown(yes.expr).union(self.size_or_unknown(no.expr));
                if let (Some(yes), Some(no)) = (self.entry_size(yes.expr), self.entry_size(no.expr)) {
                    self.entries.insert(expr.id, yes.union(no));
                }
                let cost = costs[0].plus(costs[1].union(costs[2]));
                return CallEstimate { cost, result: Some(size) };
            }
            ("add_string" | "add_bytes" | "add_list", [left, right]) => {
                if let (Some(left), Some(right)) = (self.entry_size(left.expr), self.entry_size(right.expr)) {
                    self.entries.insert(expr.id, left.union(right));
                }
            }
            _ => {}
        }
        let own = standard(overload, target, args).unwrap_or(CallEstimate { cost: ONE, result: None });
        CallEstimate { cost: own.cost.plus(of_args), ..own }
    }
}

fn is_scalar(of: &Type) -> bool {
    match of {
        Type::Bool | Type::Double | Type::Duration | Type::Int | Type::Timestamp | Type::Uint => true,
        Type::Wrapper(of) => is_scalar(of),
        other => other.unwrap_optional().is_some_and(is_scalar),
    }
}
