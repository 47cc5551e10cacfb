//! The syntax tree.

use std::sync::Arc;

/// Names a node within its tree. Ids are dense, so that facts about nodes are kept in vectors.
pub(crate) type Id = u32;

#[derive(Debug, Clone)]
pub(crate) struct Expr {
    pub id: Id,
    pub kind: ExprKind,
}

#[derive(Debug, Clone)]
pub(crate) enum ExprKind {
    Literal(Literal),
    Ident(Arc<str>),
    Select { operand: Box<Expr>, field: Arc<str>, test_only: bool },
    Call { target: Option<Box<Expr>>, function: Arc<str>, args: Vec<Expr> },
    List(Vec<Element>),
    Map(Vec<Entry>),
    Struct { name: Arc<str>, fields: Vec<Field> },
    Comprehension(Box<Comprehension>),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Literal {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Arc<str>),
    Bytes(Arc<[u8]>),
}

#[derive(Debug, Clone)]
pub(crate) struct Element {
    pub value: Expr,
    pub optional: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub key: Expr,
    pub value: Expr,
    pub optional: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Field {
    pub id: Id,
    pub name: Arc<str>,
    pub value: Expr,
    pub optional: bool,
}

/// A loop over a list or a map, into which the macros expand.
#[derive(Debug, Clone)]
pub(crate) struct Comprehension {
    pub iter_var: Arc<str>,
    pub iter_var2: Option<Arc<str>>,
    pub range: Expr,
    pub accu_var: Arc<str>,
    pub accu_init: Expr,
    pub condition: Expr,
    pub step: Expr,
    pub result: Expr,
}

/// A tree with the place of every node.
#[derive(Debug, Clone)]
pub(crate) struct Ast {
    pub root: Expr,
    /// Offsets in code points, by id.
    pub positions: Vec<u32>,
}

impl Expr {
    /// The dotted name that this expression spells, if it is one.
    pub fn qualified_name(&self) -> Option<String> {
        match &self.kind {
            ExprKind::Ident(name) => Some(name.to_string()),
            ExprKind::Select { operand, field, test_only: false } => {
                Some(format!("{}.{field}", operand.qualified_name()?))
            }
            _ => None,
        }
    }

    /// Calls `visit` for each direct part of this expression.
    pub fn children<'e>(&'e self, visit: &mut dyn FnMut(&'e Expr)) {
        match &self.kind {
            ExprKind::Literal(_) | ExprKind::Ident(_) => {}
            ExprKind::Select { operand, .. } => visit(operand),
            ExprKind::Call { target, args, .. } => {
                target.iter().for_each(|target| visit(target));
                args.iter().for_each(visit);
            }
            ExprKind::List(elements) => elements.iter().for_each(|element| visit(&element.value)),
            ExprKind::Map(entries) => entries.iter().for_each(|entry| {
                visit(&entry.key);
                visit(&entry.value);
            }),
            ExprKind::Struct { fields, .. } => fields.iter().for_each(|field| visit(&field.value)),
            ExprKind::Comprehension(fold) => {
                [&fold.range, &fold.accu_init, &fold.condition, &fold.step, &fold.result]
                    .into_iter()
                    .for_each(visit);
            }
        }
    }

    /// Levels of this tree, found without recursion.
    pub fn depth(&self) -> usize {
        let mut deepest = 0;
        let mut open = vec![(self, 1)];
        while let Some((expr, level)) = open.pop() {
            deepest = deepest.max(level);
            expr.children(&mut |child| open.push((child, level + 1)));
        }
        deepest
    }
}
