//! The type checker: finds the type of every part of an expression and the overloads that its calls may mean.

mod infer;
mod scope;
mod validate;

use std::collections::HashMap;
use std::sync::Arc;

use infer::{Inference, instantiate, most_general};
pub(crate) use scope::{Declarations, Fields, named_type};
pub(crate) use validate::{Validators, validate};

use crate::ast::{Ast, Comprehension, Entry, Expr, ExprKind, Field, Id, Literal};
use crate::library::Overload;
use crate::source::{Issue, Source};
use crate::types::Type;

/// The findings of the checker about an expression.
#[derive(Debug, Default)]
pub(crate) struct Checked {
    types: Vec<Option<Type>>,
    references: HashMap<Id, Reference>,
}

/// The thing that a name or a call refers to.
#[derive(Debug, Clone)]
pub(crate) enum Reference {
    /// A variable.
    Variable,
    /// A type as a value.
    Type(Type),
    /// The overloads that a call may mean.
    Overloads(Vec<Arc<str>>),
}

impl Checked {
    pub fn type_of(&self, id: Id) -> &Type {
        self.types.get(id as usize).and_then(Option::as_ref).unwrap_or(&Type::Dyn)
    }

    pub fn reference(&self, id: Id) -> Option<&Reference> {
        self.references.get(&id)
    }

    pub fn overloads(&self, id: Id) -> &[Arc<str>] {
        match self.references.get(&id) {
            Some(Reference::Overloads(ids)) => ids,
            _ => &[],
        }
    }
}

/// Checks `ast`. Names that stand for qualified ones are replaced by these.
pub(crate) fn check(
    ast: &mut Ast,
    source: &Source,
    declarations: &Declarations,
) -> Result<Checked, Vec<Issue>> {
    let mut checker = Checker {
        source,
        positions: &ast.positions,
        declarations,
        locals: Vec::new(),
        inference: Inference::default(),
        types: vec![None; ast.positions.len()],
        references: HashMap::new(),
        issues: Vec::new(),
    };
    checker.check(&mut ast.root);
    let Checker { mut inference, mut types, references, mut issues, .. } = checker;
    for of in types.iter_mut().flatten() {
        *of = inference.substitute(of, true);
    }
    if inference.is_exhausted() {
        issues.push(source.issue(source.location(0), "the types of the expression are too complex"));
    }
    if issues.is_empty() { Ok(Checked { types, references }) } else { Err(issues) }
}

struct Checker<'e> {
    source: &'e Source,
    positions: &'e [u32],
    declarations: &'e Declarations,
    /// The variables of loops, the innermost last.
    locals: Vec<(Arc<str>, Type)>,
    inference: Inference,
    types: Vec<Option<Type>>,
    references: HashMap<Id, Reference>,
    issues: Vec<Issue>,
}

impl Checker<'_> {
    fn report(&mut self, id: Id, message: String) {
        let location = self.source.location(self.positions[id as usize] as usize);
        self.issues.push(self.source.issue(location, message));
    }

    fn undeclared(&mut self, id: Id, name: &str) {
        let container = &self.declarations.container;
        self.report(id, format!("undeclared reference to '{name}' (in container '{container}')"));
        self.set(id, Type::Error);
    }

    fn mismatch(&mut self, id: Id, expected: &Type, found: &Type) {
        self.report(id, format!("expected type '{expected}' but found '{found}'"));
    }

    fn set(&mut self, id: Id, of: Type) {
        self.types[id as usize] = Some(of);
    }

    fn type_of(&self, expr: &Expr) -> Type {
        self.types[expr.id as usize].clone().unwrap_or(Type::Error)
    }

    fn check(&mut self, expr: &mut Expr) {
        let id = expr.id;
        match &mut expr.kind {
            ExprKind::Literal(literal) => {
                let of = match literal {
                    Literal::Null => Type::Null,
                    Literal::Bool(_) => Type::Bool,
                    Literal::Int(_) => Type::Int,
                    Literal::Uint(_) => Type::Uint,
                    Literal::Double(_) => Type::Double,
                    Literal::String(_) => Type::String,
                    Literal::Bytes(_) => Type::Bytes,
                };
                self.set(id, of);
            }
            ExprKind::Ident(name) => {
                let name = name.clone();
                if !self.resolve(expr, &name) {
                    self.undeclared(id, &name);
                }
            }
            ExprKind::Select { .. } => self.select(expr),
            ExprKind::Call { .. } => self.call(expr),
            ExprKind::List(elements) => {
                let mut item = None;
                for element in elements {
                    self.check(&mut element.value);
                    let of = self.element_type(&element.value, element.optional);
                    item = Some(self.join(item, of));
                }
                let item = item.unwrap_or_else(|| self.inference.variable());
                self.set(id, Type::list(item));
            }
            ExprKind::Map(entries) => self.map(id, entries),
            ExprKind::Struct { .. } => self.object(expr),
            ExprKind::Comprehension(fold) => self.comprehension(id, fold),
        }
    }

    /// Takes `expr` for the name `name`, if there is one.
    fn resolve(&mut self, expr: &mut Expr, name: &str) -> bool {
        let Some(ident) = self.declarations.ident(&self.locals, name) else { return false };
        self.set(expr.id, ident.type_);
        let reference = ident.denotes.map_or(Reference::Variable, Reference::Type);
        self.references.insert(expr.id, reference);
        expr.kind = ExprKind::Ident(ident.name);
        true
    }

    fn select(&mut self, expr: &mut Expr) {
        if let Some(name) = expr.qualified_name()
            && self.resolve(expr, &name)
        {
            return;
        }
        let id = expr.id;
        let ExprKind::Select { operand, field, test_only } = &mut expr.kind else { return };
        let of = self.field_of(id, operand, field, false);
        let of = if *test_only { Type::Bool } else { of };
        let of = self.inference.substitute(&of, false);
        self.set(id, of);
    }

    fn optional_select(&mut self, id: Id, args: &mut [Expr]) {
        let [operand, field] = args else { return };
        let ExprKind::Literal(Literal::String(field)) = &field.kind else { return };
        let of = self.field_of(id, operand, field, true);
        let of = self.inference.substitute(&of, false);
        self.set(id, of);
        self.references.insert(id, Reference::Overloads(vec!["select_optional_field".into()]));
    }

    fn field_of(&mut self, id: Id, operand: &mut Expr, field: &str, optional: bool) -> Type {
        self.check(operand);
        let operand = self.type_of(operand);
        let operand = self.inference.substitute(&operand, false);
        let (target, is_optional) = match operand.unwrap_optional() {
            Some(of) => (of.clone(), true),
            None => (operand, false),
        };
        let found = match &target {
            Type::Map(of) => of.1.clone(),
            Type::Struct(name) => match self.declarations.field(name, field) {
                Ok(Some(of)) => of,
                Ok(None) => {
                    self.report(id, format!("undefined field '{field}'"));
                    Type::Error
                }
                Err(()) => {
                    self.report(id, format!("unexpected failed resolution of '{name}'"));
                    Type::Error
                }
            },
            Type::Param(_) => {
                self.inference.assignable(&Type::Dyn, &target);
                Type::Dyn
            }
            other => {
                if !other.is_dyn_or_error() {
                    self.report(id, format!("type '{other}' does not support field selection"));
                }
                Type::Dyn
            }
        };
        if is_optional || optional { Type::optional(found) } else { found }
    }

    fn call(&mut self, expr: &mut Expr) {
        let id = expr.id;
        let ExprKind::Call { target, function, args } = &mut expr.kind else { return };
        if &**function == "_?._" {
            return self.optional_select(id, args);
        }
        for arg in args.iter_mut() {
            self.check(arg);
        }
        let declarations = self.declarations;
        let Some(receiver) = target else {
            match declarations.function(function) {
                None => self.undeclared(id, &function.clone()),
                Some((name, overloads)) => {
                    *function = name;
                    self.overload(id, function, overloads, None, args);
                }
            }
            return;
        };
        // A receiver may be the namespace of the function.
        let qualified = receiver.qualified_name().map(|prefix| format!("{prefix}.{function}"));
        if let Some((name, overloads)) = qualified.and_then(|name| declarations.function(&name)) {
            *function = name;
            *target = None;
            self.overload(id, function, overloads, None, args);
            return;
        }
        self.check(receiver);
        match declarations.function(function) {
            None => self.undeclared(id, &function.clone()),
            Some((_, overloads)) => self.overload(id, function, overloads, Some(receiver), args),
        }
    }

    /// Finds the overloads that fit the arguments.
    fn overload(
        &mut self,
        id: Id,
        function: &str,
        overloads: &[Arc<Overload>],
        target: Option<&Expr>,
        args: &[Expr],
    ) {
        let arg_types: Vec<Type> = target.into_iter().chain(args).map(|arg| self.type_of(arg)).collect();
        if matches!(function, "_&&_" | "_||_")
            && let Some(overload) = overloads.first()
        {
            return self.logical(id, overload, &arg_types, args);
        }
        let mut result: Option<Type> = None;
        let mut ids = Vec::new();
        for overload in overloads.iter().filter(|overload| overload.receiver == target.is_some()) {
            if overload.params.len() != arg_types.len() {
                continue;
            }
            let by: HashMap<Arc<str>, Type> =
                overload.type_params.iter().map(|param| (param.clone(), self.inference.variable())).collect();
            let params: Vec<Type> = overload.params.iter().map(|param| instantiate(param, &by)).collect();
            if !self.inference.assignable_all(&arg_types, &params) {
                continue;
            }
            ids.push(overload.id.clone());
            let of = self.inference.substitute(&instantiate(&overload.result, &by), false);
            result = Some(match result {
                None => of,
                Some(result) if result.is_dyn() || result == of => result,
                Some(_) => Type::Dyn,
            });
        }
        let Some(result) = result else {
            let mut shown: Vec<String> =
                arg_types.iter().map(|of| self.inference.substitute(of, true).to_string()).collect();
            let receiver = if target.is_some() { format!("{}.", shown.remove(0)) } else { String::new() };
            let signature = format!("{receiver}({})", shown.join(", "));
            self.report(id, format!("found no matching overload for '{function}' applied to '{signature}'"));
            self.set(id, Type::Error);
            return;
        };
        self.set(id, result);
        self.references.insert(id, Reference::Overloads(ids));
    }

    fn logical(&mut self, id: Id, overload: &Overload, arg_types: &[Type], args: &[Expr]) {
        let mut fits = true;
        for (arg, of) in args.iter().zip(arg_types) {
            if !self.inference.assignable(of, &Type::Bool) {
                self.mismatch(arg.id, &Type::Bool, of);
                fits = false;
            }
        }
        self.set(id, if fits { Type::Bool } else { Type::Error });
        if fits {
            self.references.insert(id, Reference::Overloads(vec![overload.id.clone()]));
        }
    }

    /// The type that an element adds to its list or map; one marked optional must be an optional.
    fn element_type(&mut self, value: &Expr, optional: bool) -> Type {
        let of = self.type_of(value);
        if !optional {
            return of;
        }
        match of.unwrap_optional() {
            Some(inner) => inner.clone(),
            None => {
                if !of.is_dyn() {
                    self.mismatch(value.id, &Type::optional(of.clone()), &of);
                }
                of
            }
        }
    }

    fn join(&mut self, before: Option<Type>, of: Type) -> Type {
        let Some(before) = before else { return of };
        if self.inference.assignable(&before, &of) {
            return most_general(&before, &of);
        }
        Type::Dyn
    }

    fn map(&mut self, id: Id, entries: &mut [Entry]) {
        let (mut keys, mut values) = (None, None);
        for entry in entries {
            self.check(&mut entry.key);
            let of = self.type_of(&entry.key);
            keys = Some(self.join(keys, of));
            self.check(&mut entry.value);
            let of = self.element_type(&entry.value, entry.optional);
            values = Some(self.join(values, of));
        }
        let keys = keys.unwrap_or_else(|| self.inference.variable());
        let values = values.unwrap_or_else(|| self.inference.variable());
        self.set(id, Type::map(keys, values));
    }

    fn object(&mut self, expr: &mut Expr) {
        let id = expr.id;
        let ExprKind::Struct { name, fields } = &mut expr.kind else { return };
        let Some(ident) = self.declarations.ident(&[], name) else {
            let name = name.clone();
            return self.undeclared(id, &name);
        };
        *name = ident.name;
        let name = name.clone();
        let of = match ident.denotes {
            None => {
                self.report(id, format!("'{}' is not a type", ident.type_));
                Type::Error
            }
            Some(of @ Type::Struct(_)) if self.declarations.object(&name).is_some() => of,
            Some(of) => {
                self.report(id, format!("'{of}' is not a message type"));
                Type::Error
            }
        };
        self.references.insert(id, Reference::Variable);
        self.set(id, of);
        for field in fields {
            self.object_field(&name, field);
        }
    }

    fn object_field(&mut self, object: &str, field: &mut Field) {
        self.check(&mut field.value);
        let expected = match self.declarations.field(object, &field.name) {
            Ok(Some(of)) => of,
            Ok(None) => {
                self.report(field.id, format!("undefined field '{}'", field.name));
                Type::Error
            }
            Err(()) => {
                self.report(field.id, format!("unexpected failed resolution of '{object}'"));
                Type::Error
            }
        };
        let found = self.element_type(&field.value, field.optional);
        if !self.inference.assignable(&expected, &found) {
            let message = format!(
                "expected type of field '{}' is '{expected}' but provided type is '{found}'",
                field.name
            );
            self.report(field.id, message);
        }
    }

    fn comprehension(&mut self, id: Id, fold: &mut Comprehension) {
        self.check(&mut fold.range);
        self.check(&mut fold.accu_init);
        let range = self.type_of(&fold.range);
        let range = self.inference.substitute(&range, false);
        let accu = self.type_of(&fold.accu_init);
        let two = fold.iter_var2.is_some();
        let (first, second) = match &range {
            Type::List(item) if two => (Type::Int, (**item).clone()),
            Type::List(item) => ((**item).clone(), Type::Error),
            Type::Map(of) => of.as_ref().clone(),
            Type::Dyn | Type::Any | Type::Error | Type::Param(_) => {
                self.inference.assignable(&Type::Dyn, &range);
                (Type::Dyn, Type::Dyn)
            }
            other => {
                let message = format!(
                    "expression of type '{other}' cannot be range of a comprehension (must be list, map, or dynamic)"
                );
                self.report(fold.range.id, message);
                (Type::Error, Type::Error)
            }
        };
        self.locals.push((fold.accu_var.clone(), accu.clone()));
        let outer = self.locals.len();
        self.locals.push((fold.iter_var.clone(), first));
        if let Some(name) = &fold.iter_var2 {
            self.locals.push((name.clone(), second));
        }
        self.check(&mut fold.condition);
        self.require(&fold.condition, &Type::Bool);
        self.check(&mut fold.step);
        self.require(&fold.step, &accu);
        self.locals.truncate(outer);
        self.check(&mut fold.result);
        self.locals.truncate(outer - 1);
        let of = self.type_of(&fold.result);
        let of = self.inference.substitute(&of, false);
        self.set(id, of);
    }

    fn require(&mut self, expr: &Expr, expected: &Type) {
        let found = self.type_of(expr);
        if !self.inference.assignable(expected, &found) {
            self.mismatch(expr.id, expected, &found);
        }
    }
}
