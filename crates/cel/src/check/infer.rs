//! Type inference: compatibility of types, and the types of unknowns.

use std::collections::HashMap;
use std::sync::Arc;

use crate::types::Type;

/// Steps that the inference for one expression may take. Types that double with each nesting end here.
const MAX_STEPS: usize = 2_000_000;

/// The knowledge about types that were not known at first.
#[derive(Debug, Default)]
pub(super) struct Inference {
    known: HashMap<Arc<str>, Type>,
    /// Changes since a comparison began, to undo them if it fails.
    journal: Vec<(Arc<str>, Option<Type>)>,
    variables: usize,
    steps: usize,
}

impl Inference {
    pub fn variable(&mut self) -> Type {
        self.variables += 1;
        Type::Param(format!("_var{}", self.variables - 1).into())
    }

    /// Were too many steps taken to trust the outcome?
    pub fn is_exhausted(&self) -> bool {
        self.steps >= MAX_STEPS
    }

    fn step(&mut self) -> bool {
        self.steps += 1;
        self.steps < MAX_STEPS
    }

    fn learn(&mut self, name: &Arc<str>, of: Type) {
        let before = self.known.insert(name.clone(), of);
        self.journal.push((name.clone(), before));
    }

    /// Returns true if a value of `b` is good where `a` is expected. Then the inferred types of unknowns
    /// are kept.
    pub fn assignable(&mut self, a: &Type, b: &Type) -> bool {
        self.attempt(|inference| inference.compare(a, b))
    }

    pub fn assignable_all(&mut self, a: &[Type], b: &[Type]) -> bool {
        self.attempt(|inference| inference.compare_all(a, b))
    }

    fn attempt(&mut self, compare: impl FnOnce(&mut Self) -> bool) -> bool {
        self.journal.clear();
        let fits = compare(self);
        if !fits {
            while let Some((name, before)) = self.journal.pop() {
                match before {
                    Some(before) => self.known.insert(name, before),
                    None => self.known.remove(&name),
                };
            }
        }
        fits
    }

    fn compare_all(&mut self, a: &[Type], b: &[Type]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.compare(a, b))
    }

    fn compare(&mut self, a: &Type, b: &Type) -> bool {
        if !self.step() {
            return false;
        }
        if let Type::Param(name) = b {
            match self.substitution(a, b, name) {
                (true, _) => return true,
                (false, true) => return false,
                (false, false) => {}
            }
        }
        if let Type::Param(name) = a {
            return self.substitution(b, a, name).0;
        }
        if a.is_dyn_or_error() || b.is_dyn_or_error() {
            return true;
        }
        let nullable = |of: &Type| {
            matches!(
                of,
                Type::Null
                    | Type::Opaque(..)
                    | Type::Struct(_)
                    | Type::Duration
                    | Type::Timestamp
                    | Type::Wrapper(_)
            )
        };
        match (a, b) {
            (Type::Null, other) | (other, Type::Null) => nullable(other),
            (Type::Wrapper(a), Type::Wrapper(b)) => a == b,
            (Type::Wrapper(a), b) | (b, Type::Wrapper(a)) => **a == *b,
            (Type::Type(_), Type::Type(_)) => true,
            (Type::List(a), Type::List(b)) => self.compare(a, b),
            (Type::Map(a), Type::Map(b)) => self.compare(&a.0, &b.0) && self.compare(&a.1, &b.1),
            (Type::Opaque(a, params), Type::Opaque(b, others)) => a == b && self.compare_all(params, others),
            (a, b) => a == b,
        }
    }

    /// Returns true if the unknown `name`, which is `variable`, may be `of`, and true if it was known
    /// before.
    fn substitution(&mut self, of: &Type, variable: &Type, name: &Arc<str>) -> (bool, bool) {
        if of == variable {
            return (true, true);
        }
        if let Some(known) = self.known.get(name).cloned() {
            if *of == known {
                return (true, true);
            }
            if !self.compare(of, &known) {
                return (false, true);
            }
            let general = if less_specific(of, &known) { of.clone() } else { known };
            if self.is_free_of(name, &general) {
                self.learn(name, general);
            }
            return (true, true);
        }
        if self.is_free_of(name, of) {
            self.learn(name, of.clone());
            return (true, false);
        }
        (false, false)
    }

    /// Does `within` not mention the unknown `name`?
    fn is_free_of(&mut self, name: &Arc<str>, within: &Type) -> bool {
        if !self.step() {
            return false;
        }
        match within {
            Type::Param(other) if other == name => false,
            Type::Param(other) => match self.known.get(other).cloned() {
                Some(known) => self.is_free_of(name, &known),
                None => true,
            },
            Type::List(of) | Type::Type(Some(of)) => self.is_free_of(name, of),
            Type::Map(of) => self.is_free_of(name, &of.0) && self.is_free_of(name, &of.1),
            Type::Opaque(_, params) => params.iter().all(|param| self.is_free_of(name, param)),
            _ => true,
        }
    }

    /// `of` with all that is known; types that stay unknown become `dyn` if `finish`.
    pub fn substitute(&mut self, of: &Type, finish: bool) -> Type {
        if !self.step() {
            return Type::Dyn;
        }
        match of {
            Type::Param(name) => match self.known.get(name).cloned() {
                Some(known) => self.substitute(&known, finish),
                None if finish => Type::Dyn,
                None => of.clone(),
            },
            Type::List(item) => Type::list(self.substitute(item, finish)),
            Type::Map(of) => Type::map(self.substitute(&of.0, finish), self.substitute(&of.1, finish)),
            Type::Type(Some(of)) => Type::type_of(self.substitute(of, finish)),
            Type::Opaque(name, params) if !params.is_empty() => {
                let params = params.iter().map(|param| self.substitute(param, finish)).collect();
                Type::Opaque(name.clone(), params)
            }
            simple => simple.clone(),
        }
    }
}

/// `of` with its parameters replaced by the types in `by`.
pub(super) fn instantiate(of: &Type, by: &HashMap<Arc<str>, Type>) -> Type {
    match of {
        Type::Param(name) => by.get(name).cloned().unwrap_or_else(|| of.clone()),
        Type::List(item) => Type::list(instantiate(item, by)),
        Type::Map(of) => Type::map(instantiate(&of.0, by), instantiate(&of.1, by)),
        Type::Type(Some(of)) => Type::type_of(instantiate(of, by)),
        Type::Opaque(name, params) if !params.is_empty() => {
            Type::Opaque(name.clone(), params.iter().map(|param| instantiate(param, by)).collect())
        }
        simple => simple.clone(),
    }
}

/// The one of two types that go together that says less.
pub(super) fn most_general(a: &Type, b: &Type) -> Type {
    if less_specific(a, b) { a.clone() } else { b.clone() }
}

fn less_specific(a: &Type, b: &Type) -> bool {
    match (a, b) {
        (Type::Dyn | Type::Any | Type::Param(_), _) => true,
        (_, Type::Dyn | Type::Any | Type::Param(_)) => false,
        (Type::Opaque(a, params), Type::Opaque(b, others)) => {
            a == b
                && params.len() == others.len()
                && params.iter().zip(others.iter()).all(|(a, b)| less_specific(a, b))
        }
        (Type::List(a), Type::List(b)) => less_specific(a, b),
        (Type::Map(a), Type::Map(b)) => less_specific(&a.0, &b.0) && less_specific(&a.1, &b.1),
        (Type::Type(_), Type::Type(_)) => true,
        (a, b) => a == b,
    }
}
