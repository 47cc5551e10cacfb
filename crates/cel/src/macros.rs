//! Macros: calls that are rewritten while the expression is parsed.

use std::collections::HashMap;
use std::sync::Arc;

use crate::ast::{Comprehension, Element, Expr, ExprKind, Id, Literal};
use crate::parser::Builder;

/// The variable that a loop collects its result in.
pub(crate) const ACCUMULATOR: &str = "__result__";
/// The variable of loops that run over nothing.
const UNUSED: &str = "#unused";

/// The outcome of looking for a macro.
pub(crate) enum Expansion {
    /// The call is no macro.
    None(Option<Expr>, Vec<Expr>),
    Expr(Expr),
    Error {
        offset: usize,
        message: String,
    },
}

type Expand = fn(&mut Maker<'_>, Option<Expr>, Vec<Expr>) -> Expansion;

/// One macro: its name, the count of its arguments, its style, and its rewriting.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Macro {
    name: &'static str,
    args: usize,
    receiver: bool,
    expand: Expand,
}

const fn receiver(name: &'static str, args: usize, expand: Expand) -> Macro {
    Macro { name, args, receiver: true, expand }
}

pub(crate) const STANDARD: &[Macro] = &[
    Macro { name: "has", args: 1, receiver: false, expand: has },
    receiver("all", 2, |m, t, a| quantifier(m, t, a, Quantifier::All)),
    receiver("exists", 2, |m, t, a| quantifier(m, t, a, Quantifier::Exists)),
    receiver("exists_one", 2, |m, t, a| quantifier(m, t, a, Quantifier::One)),
    receiver("map", 2, |m, t, a| transform(m, t, a, 1, Transform::List)),
    receiver("map", 3, |m, t, a| transform(m, t, a, 1, Transform::List)),
    receiver("filter", 2, filter),
];

pub(crate) const OPTIONAL: &[Macro] = &[
    receiver("optMap", 2, |m, t, a| opt_map(m, t, a, "optMap", true)),
    receiver("optFlatMap", 2, |m, t, a| opt_map(m, t, a, "optFlatMap", false)),
];

pub(crate) const TWO_VARIABLES: &[Macro] = &[
    receiver("all", 3, |m, t, a| quantifier(m, t, a, Quantifier::All)),
    receiver("exists", 3, |m, t, a| quantifier(m, t, a, Quantifier::Exists)),
    receiver("existsOne", 3, |m, t, a| quantifier(m, t, a, Quantifier::One)),
    receiver("exists_one", 3, |m, t, a| quantifier(m, t, a, Quantifier::One)),
    receiver("transformList", 3, |m, t, a| transform(m, t, a, 2, Transform::List)),
    receiver("transformList", 4, |m, t, a| transform(m, t, a, 2, Transform::List)),
    receiver("transformMap", 3, |m, t, a| transform(m, t, a, 2, Transform::Map)),
    receiver("transformMap", 4, |m, t, a| transform(m, t, a, 2, Transform::Map)),
    receiver("transformMapEntry", 3, |m, t, a| transform(m, t, a, 2, Transform::MapEntry)),
    receiver("transformMapEntry", 4, |m, t, a| transform(m, t, a, 2, Transform::MapEntry)),
];

pub(crate) const SORT_BY: &[Macro] = &[receiver("sortBy", 2, sort_by)];

pub(crate) const BINDINGS: &[Macro] = &[receiver("bind", 3, bind)];

/// `math.greatest` and `math.least` of any count of arguments.
pub(crate) const MATH: &[Macro] = &[
    receiver("greatest", VARIADIC, |m, t, a| extremum(m, t, a, "greatest", "math.@max")),
    receiver("least", VARIADIC, |m, t, a| extremum(m, t, a, "least", "math.@min")),
];

const VARIADIC: usize = usize::MAX;

/// The macros of an environment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Macros {
    by_call: HashMap<(&'static str, usize, bool), Expand>,
}

impl Macros {
    pub fn add(&mut self, macros: &[Macro]) {
        self.by_call.extend(macros.iter().map(|m| ((m.name, m.args, m.receiver), m.expand)));
    }

    pub fn expand(
        &self,
        tree: &mut Builder,
        id: Id,
        function: &str,
        target: Option<Expr>,
        args: Vec<Expr>,
    ) -> Expansion {
        let find = |count| self.by_call.get(&(function, count, target.is_some()));
        match find(args.len()).or_else(|| find(VARIADIC)) {
            Some(expand) => {
                let offset = tree.position(id);
                expand(&mut Maker { tree, offset }, target, args)
            }
            None => Expansion::None(target, args),
        }
    }
}

/// Makes the nodes of an expansion; all have the place of the macro's call.
struct Maker<'t> {
    tree: &'t mut Builder,
    offset: usize,
}

impl Maker<'_> {
    fn node(&mut self, kind: ExprKind) -> Expr {
        self.tree.node(self.offset, kind)
    }

    fn literal(&mut self, literal: Literal) -> Expr {
        self.node(ExprKind::Literal(literal))
    }

    fn ident(&mut self, name: &str) -> Expr {
        self.node(ExprKind::Ident(name.into()))
    }

    fn accu(&mut self) -> Expr {
        self.ident(ACCUMULATOR)
    }

    fn call(&mut self, function: &str, args: Vec<Expr>) -> Expr {
        self.node(ExprKind::Call { target: None, function: function.into(), args })
    }

    fn member_call(&mut self, function: &str, target: Expr, args: Vec<Expr>) -> Expr {
        self.node(ExprKind::Call { target: Some(Box::new(target)), function: function.into(), args })
    }

    fn list(&mut self, elements: Vec<Expr>) -> Expr {
        let elements = elements.into_iter().map(|value| Element { value, optional: false }).collect();
        self.node(ExprKind::List(elements))
    }

    fn error(&self, at: &Expr, message: impl Into<String>) -> Expansion {
        Expansion::Error { offset: self.tree.position(at.id), message: message.into() }
    }

    /// `name` means `value` within `result`; `value` is evaluated at most once, and only if it is needed.
    fn binding(&mut self, name: Arc<str>, value: Expr, result: Expr) -> Expr {
        let range = self.list(Vec::new());
        let condition = self.literal(Literal::Bool(false));
        let step = self.ident(&name);
        self.node(ExprKind::Comprehension(Box::new(Comprehension {
            iter_var: UNUSED.into(),
            iter_var2: None,
            range,
            accu_var: name,
            accu_init: value,
            condition,
            step,
            result,
        })))
    }

    /// A copy of `expr` with ids of its own, so that each copy has its own facts.
    fn copy(&mut self, expr: &Expr) -> Expr {
        let mut copy = expr.clone();
        self.renumber(&mut copy);
        copy
    }

    fn renumber(&mut self, expr: &mut Expr) {
        if self.tree.is_full() {
            return;
        }
        expr.id = self.tree.id(self.tree.position(expr.id));
        match &mut expr.kind {
            ExprKind::Literal(_) | ExprKind::Ident(_) => {}
            ExprKind::Select { operand, .. } => self.renumber(operand),
            ExprKind::Call { target, args, .. } => {
                target.iter_mut().for_each(|target| self.renumber(target));
                args.iter_mut().for_each(|arg| self.renumber(arg));
            }
            ExprKind::List(elements) => elements.iter_mut().for_each(|e| self.renumber(&mut e.value)),
            ExprKind::Map(entries) => entries.iter_mut().for_each(|entry| {
                self.renumber(&mut entry.key);
                self.renumber(&mut entry.value);
            }),
            ExprKind::Struct { fields, .. } => fields.iter_mut().for_each(|field| {
                field.id = self.tree.id(self.tree.position(field.id));
                self.renumber(&mut field.value);
            }),
            ExprKind::Comprehension(fold) => {
                for part in [
                    &mut fold.range,
                    &mut fold.accu_init,
                    &mut fold.condition,
                    &mut fold.step,
                    &mut fold.result,
                ] {
                    self.renumber(part);
                }
            }
        }
    }
}

/// Stands for a receiver; the table above gives each macro that needs one a receiver.
fn required(maker: &mut Maker<'_>, target: Option<Expr>) -> Expr {
    target.unwrap_or_else(|| maker.literal(Literal::Null))
}

fn has(maker: &mut Maker<'_>, _: Option<Expr>, mut args: Vec<Expr>) -> Expansion {
    let arg = args.remove(0);
    match arg.kind {
        ExprKind::Select { operand, field, .. } => {
            Expansion::Expr(maker.node(ExprKind::Select { operand, field, test_only: true }))
        }
        _ => maker.error(&arg, "invalid argument to has() macro"),
    }
}

fn variable(maker: &Maker<'_>, arg: &Expr, not_a_name: &str) -> Result<Arc<str>, Box<Expansion>> {
    match &arg.kind {
        ExprKind::Ident(name) if &**name == ACCUMULATOR => {
            Err(Box::new(maker.error(arg, "iteration variable overwrites accumulator variable")))
        }
        ExprKind::Ident(name) => Ok(name.clone()),
        _ => Err(Box::new(maker.error(arg, not_a_name))),
    }
}

/// The variable of a loop, and the second one of a loop of two.
type Variables = (Arc<str>, Option<Arc<str>>);

/// The variables of a loop: the first `count` arguments.
fn variables(
    maker: &Maker<'_>,
    args: &[Expr],
    count: usize,
    not_a_name: &str,
) -> Result<Variables, Box<Expansion>> {
    if count == 1 {
        return Ok((variable(maker, &args[0], not_a_name)?, None));
    }
    let names = args[..2]
        .iter()
        .map(|arg| match &arg.kind {
            ExprKind::Ident(name) => Ok(name.clone()),
            _ => Err(Box::new(maker.error(arg, "argument must be a simple name"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    if names[0] == names[1] {
        return Err(Box::new(maker.error(&args[1], format!("duplicate variable name: {}", names[0]))));
    }
    let first = variable(maker, &args[0], not_a_name)?;
    let second = variable(maker, &args[1], not_a_name)?;
    Ok((first, Some(second)))
}

#[derive(Clone, Copy)]
enum Quantifier {
    All,
    Exists,
    One,
}

fn quantifier(
    maker: &mut Maker<'_>,
    target: Option<Expr>,
    mut args: Vec<Expr>,
    kind: Quantifier,
) -> Expansion {
    let count = args.len() - 1;
    let (iter_var, iter_var2) = match variables(maker, &args, count, "argument must be a simple name") {
        Ok(names) => names,
        Err(error) => return *error,
    };
    let predicate = args.remove(count);
    let range = required(maker, target);
    let (accu_init, condition, step, result) = match kind {
        Quantifier::All => {
            let accu = maker.accu();
            let init = maker.literal(Literal::Bool(true));
            let condition = maker.call("@not_strictly_false", vec![accu]);
            let accu = maker.accu();
            (init, condition, maker.call("_&&_", vec![accu, predicate]), maker.accu())
        }
        Quantifier::Exists => {
            let init = maker.literal(Literal::Bool(false));
            let accu = maker.accu();
            let not = maker.call("!_", vec![accu]);
            let condition = maker.call("@not_strictly_false", vec![not]);
            let accu = maker.accu();
            (init, condition, maker.call("_||_", vec![accu, predicate]), maker.accu())
        }
        Quantifier::One => {
            let init = maker.literal(Literal::Int(0));
            let condition = maker.literal(Literal::Bool(true));
            let (accu, one) = (maker.accu(), maker.literal(Literal::Int(1)));
            let more = maker.call("_+_", vec![accu, one]);
            let same = maker.accu();
            let step = maker.call("_?_:_", vec![predicate, more, same]);
            let (accu, one) = (maker.accu(), maker.literal(Literal::Int(1)));
            (init, condition, step, maker.call("_==_", vec![accu, one]))
        }
    };
    let fold = Comprehension {
        iter_var,
        iter_var2,
        range,
        accu_var: ACCUMULATOR.into(),
        accu_init,
        condition,
        step,
        result,
    };
    Expansion::Expr(maker.node(ExprKind::Comprehension(Box::new(fold))))
}

#[derive(Clone, Copy, PartialEq)]
enum Transform {
    List,
    Map,
    MapEntry,
}

fn transform(
    maker: &mut Maker<'_>,
    target: Option<Expr>,
    mut args: Vec<Expr>,
    variable_count: usize,
    kind: Transform,
) -> Expansion {
    let not_a_name =
        if variable_count == 1 { "argument is not an identifier" } else { "argument must be a simple name" };
    let (iter_var, iter_var2) = match variables(maker, &args, variable_count, not_a_name) {
        Ok(names) => names,
        Err(error) => return *error,
    };
    let value = args.remove(args.len() - 1);
    let filter = (args.len() > variable_count).then(|| args.remove(variable_count));
    let range = required(maker, target);
    let accu_init = match kind {
        Transform::List => maker.list(Vec::new()),
        Transform::Map | Transform::MapEntry => maker.node(ExprKind::Map(Vec::new())),
    };
    let condition = maker.literal(Literal::Bool(true));
    let accu = maker.accu();
    let step = match kind {
        Transform::List => {
            let item = maker.list(vec![value]);
            maker.call("_+_", vec![accu, item])
        }
        Transform::Map => {
            let key = maker.ident(&iter_var);
            maker.call("cel.@mapInsert", vec![accu, key, value])
        }
        Transform::MapEntry => maker.call("cel.@mapInsert", vec![accu, value]),
    };
    finish_transform(maker, (iter_var, iter_var2), range, accu_init, condition, filter, step)
}

fn finish_transform(
    maker: &mut Maker<'_>,
    (iter_var, iter_var2): Variables,
    range: Expr,
    accu_init: Expr,
    condition: Expr,
    filter: Option<Expr>,
    step: Expr,
) -> Expansion {
    let step = match filter {
        None => step,
        Some(filter) => {
            let same = maker.accu();
            maker.call("_?_:_", vec![filter, step, same])
        }
    };
    let result = maker.accu();
    let fold = Comprehension {
        iter_var,
        iter_var2,
        range,
        accu_var: ACCUMULATOR.into(),
        accu_init,
        condition,
        step,
        result,
    };
    Expansion::Expr(maker.node(ExprKind::Comprehension(Box::new(fold))))
}

fn filter(maker: &mut Maker<'_>, target: Option<Expr>, mut args: Vec<Expr>) -> Expansion {
    let name = match variable(maker, &args[0], "argument is not an identifier") {
        Ok(name) => name,
        Err(error) => return *error,
    };
    let predicate = args.remove(1);
    let item = args.remove(0);
    let range = required(maker, target);
    let accu_init = maker.list(Vec::new());
    let condition = maker.literal(Literal::Bool(true));
    let accu = maker.accu();
    let list = maker.list(vec![item]);
    let step = maker.call("_+_", vec![accu, list]);
    finish_transform(maker, (name, None), range, accu_init, condition, Some(predicate), step)
}

fn opt_map(
    maker: &mut Maker<'_>,
    target: Option<Expr>,
    mut args: Vec<Expr>,
    macro_name: &str,
    wrap: bool,
) -> Expansion {
    let ExprKind::Ident(name) = args[0].kind.clone() else {
        return maker.error(&args[0], format!("{macro_name}() variable name must be a simple identifier"));
    };
    let body = args.remove(1);
    let target = required(maker, target);
    let again = maker.copy(&target);
    let has_value = maker.member_call("hasValue", target, Vec::new());
    let value = maker.member_call("value", again, Vec::new());
    let bound = maker.binding(name, value, body);
    let yes = if wrap { maker.call("optional.of", vec![bound]) } else { bound };
    let no = maker.call("optional.none", Vec::new());
    Expansion::Expr(maker.call("_?_:_", vec![has_value, yes, no]))
}

fn sort_by(maker: &mut Maker<'_>, target: Option<Expr>, args: Vec<Expr>) -> Expansion {
    const INPUT: &str = "@__sortBy_input__";
    let target = required(maker, target);
    if matches!(target.kind, ExprKind::Literal(_) | ExprKind::Map(_) | ExprKind::Struct { .. }) {
        let message =
            "sortBy can only be applied to a list, identifier, comprehension, call or select expression";
        return maker.error(&target, message);
    }
    let input = maker.ident(INPUT);
    let keys = match transform(maker, Some(input), args, 1, Transform::List) {
        Expansion::Expr(keys) => keys,
        other => return other,
    };
    let input = maker.ident(INPUT);
    let sorted = maker.member_call("@sortByAssociatedKeys", input, vec![keys]);
    Expansion::Expr(maker.binding(INPUT.into(), target, sorted))
}

fn in_namespace(target: &Option<Expr>, namespace: &str) -> bool {
    matches!(target, Some(Expr { kind: ExprKind::Ident(name), .. }) if &**name == namespace)
}

fn bind(maker: &mut Maker<'_>, target: Option<Expr>, mut args: Vec<Expr>) -> Expansion {
    if !in_namespace(&target, "cel") {
        return Expansion::None(target, args);
    }
    let ExprKind::Ident(name) = args[0].kind.clone() else {
        return maker.error(&args[0], "cel.bind() variable names must be simple identifiers");
    };
    let result = args.remove(2);
    let value = args.remove(1);
    Expansion::Expr(maker.binding(name, value, result))
}

fn extremum(
    maker: &mut Maker<'_>,
    target: Option<Expr>,
    mut args: Vec<Expr>,
    name: &str,
    function: &str,
) -> Expansion {
    if !in_namespace(&target, "math") {
        return Expansion::None(target, args);
    }
    let Some(target) = target else { return Expansion::None(target, args) };
    match args.len() {
        0 => maker.error(&target, format!("math.{name}() requires at least one argument")),
        1 => match &args[0].kind {
            ExprKind::List(elements) if elements.is_empty() => {
                maker.error(&args[0], format!("math.{name}() invalid single argument value"))
            }
            ExprKind::Literal(Literal::Bool(_) | Literal::String(_) | Literal::Bytes(_) | Literal::Null)
            | ExprKind::Map(_)
            | ExprKind::Struct { .. } => {
                maker.error(&args[0], format!("math.{name}() invalid single argument value"))
            }
            _ => Expansion::Expr(maker.call(function, args)),
        },
        2 => Expansion::Expr(maker.call(function, args)),
        _ => {
            let list = maker.list(std::mem::take(&mut args));
            Expansion::Expr(maker.call(function, vec![list]))
        }
    }
}
