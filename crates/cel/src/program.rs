//! Environments, and the programs that are compiled in them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::ast::{Ast, Expr, ExprKind};
use crate::check::{self, Checked, Declarations, Fields, Validators};
use crate::cost::Range;
use crate::cost::estimate::{self, NoSizes, SizeEstimator};
use crate::error::{CompileError, EvalError};
use crate::eval::{self, Limits};
use crate::library::{self, Library, Overload};
use crate::macros::Macros;
use crate::parser::{self, Syntax};
use crate::plan::{self, Plan};
use crate::schema::DeclType;
use crate::source::Source;
use crate::types::Type;
use crate::value::Value;

/// Trees deeper than this are compiled and evaluated on a thread with a stack of their own size.
const DEEP: usize = 96;
/// Levels of the tree to which a level of brackets compares, in the stack that it takes.
const PARSER_LEVELS: usize = 3;
/// Bytes of stack for each level of a deep tree.
const STACK_PER_LEVEL: usize = 24 * 1024;

/// The things that an expression may use: libraries, variables, types, syntax.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    declarations: Declarations,
    syntax: Syntax,
    validators: Validators,
}

impl Environment {
    /// The base environment of Kubernetes 1.`minor`, without variables.
    ///
    /// Expressions that are stored already are compiled with the current version, new ones with the one before it, so
    /// that a server of that version can still read them.
    pub fn kubernetes(minor: u32) -> Self {
        let mut environment = Self::default();
        environment.declarations.keyword_fields = minor >= 31;
        environment.validators = Validators { literals: minor >= 29, homogeneous: true, format: minor >= 29 };
        for library in library::base(minor) {
            environment = environment.with_library(library);
        }
        environment
    }

    /// An environment of the specification alone, with the standard library.
    pub fn standard() -> Self {
        Self::default().with_library(Library::Standard).with_library(Library::MixedComparisons)
    }

    pub fn with_library(mut self, library: Library) -> Self {
        self.declarations.add_library(library);
        self.syntax.macros.add(library.macros());
        self.syntax.optional |= library == Library::Optional;
        self
    }

    /// Looks names up in the namespace `container` first.
    pub fn with_container(mut self, container: &str) -> Self {
        container.clone_into(&mut self.declarations.container);
        self
    }

    pub fn with_variable(mut self, name: &str, of: Type) -> Self {
        self.declarations.variables.insert(name.into(), of);
        self
    }

    /// Adds a variable of a type with named objects, and these objects.
    pub fn with_typed_variable(self, name: &str, of: &DeclType) -> Self {
        let environment = self.with_variable(name, of.cel.clone());
        environment.with_types(of)
    }

    /// Adds the object types within `of`.
    pub fn with_types(mut self, of: &DeclType) -> Self {
        of.objects(&mut |name, fields| {
            let fields: BTreeMap<String, Type> =
                fields.iter().map(|(field, of)| (field.clone(), of.cel.clone())).collect();
            self.declarations.objects.insert(name.into(), Fields::Named(fields));
        });
        self
    }

    /// Adds a field to an object type that has named ones.
    pub(crate) fn add_field(&mut self, object: &str, field: &str, of: Type) {
        if let Some(Fields::Named(fields)) = self.declarations.objects.get_mut(object) {
            fields.insert(field.to_owned(), of);
        }
    }

    /// Adds a type whose objects have any field, and with it the types of its fields: `Object`, `Object.spec`, ...
    pub fn with_dynamic_object(mut self, name: &str) -> Self {
        self.declarations.objects.insert(name.into(), Fields::Any);
        self
    }

    /// Declares an overload of a function. A function that this crate does not have is an error when it is called.
    pub fn with_function(
        mut self,
        name: &str,
        id: &str,
        receiver: bool,
        params: Vec<Type>,
        result: Type,
    ) -> Self {
        let overload = Arc::new(Overload::new(id, receiver, params, result));
        self.declarations.functions.entry(name.into()).or_default().push(overload);
        self
    }

    /// Lets lists and maps have elements of several types.
    pub fn with_mixed_literals(mut self) -> Self {
        self.validators.homogeneous = false;
        self
    }

    /// Switches macros off.
    pub fn without_macros(mut self) -> Self {
        self.syntax.macros = Macros::default();
        self
    }

    /// Lets field names stand in backticks.
    pub fn with_escaped_identifiers(mut self) -> Self {
        self.syntax.escaped_identifiers = true;
        self
    }

    /// Compiles an expression, with all its types checked.
    pub fn compile(&self, expression: &str) -> Result<Program, CompileError> {
        self.compile_sized(expression, &NoSizes)
    }

    /// As [`Environment::compile`]; the estimate of the cost knows sizes of variables.
    pub fn compile_sized(
        &self,
        expression: &str,
        sizes: &(dyn SizeEstimator + Sync),
    ) -> Result<Program, CompileError> {
        self.with_ast(expression, |source, mut ast| {
            let checked = check::check(&mut ast, source, &self.declarations).map_err(CompileError::Check)?;
            let issues = check::validate(&ast, source, &checked, self.validators);
            if !issues.is_empty() {
                return Err(CompileError::Check(issues));
            }
            self.program(&ast, Some(&checked), sizes)
        })
    }

    /// Compiles an expression without checking its types.
    pub fn compile_unchecked(&self, expression: &str) -> Result<Program, CompileError> {
        self.with_ast(expression, |_, ast| self.program(&ast, None, &NoSizes))
    }

    /// Checks the types of an expression and finds its own, without preparing it to run.
    pub fn check(&self, expression: &str) -> Result<Type, CompileError> {
        self.with_ast(expression, |source, mut ast| {
            let checked = check::check(&mut ast, source, &self.declarations).map_err(CompileError::Check)?;
            Ok(checked.type_of(ast.root.id).clone())
        })
    }

    /// Parses an expression and writes it again, with its macros expanded.
    #[doc(hidden)]
    pub fn reprint(&self, expression: &str) -> Result<String, CompileError> {
        self.with_ast(expression, |_, ast| Ok(crate::print::print(&ast.root)))
    }

    fn with_ast<T: Send>(
        &self,
        expression: &str,
        then: impl FnOnce(&Source, Ast) -> Result<T, CompileError> + Send,
    ) -> Result<T, CompileError> {
        let source = Source::new(expression);
        let nesting = PARSER_LEVELS * parser::nesting(&source);
        let ast = on_stack(nesting, || parser::parse(&source, &self.syntax))
            .map_err(CompileError::Program)?
            .map_err(CompileError::Parse)?;
        let depth = ast.root.depth();
        on_stack(depth, || then(&source, ast)).map_err(CompileError::Program)?
    }

    fn program(
        &self,
        ast: &Ast,
        checked: Option<&Checked>,
        sizes: &dyn SizeEstimator,
    ) -> Result<Program, CompileError> {
        let plan = plan::plan(&ast.root, checked, &self.declarations).map_err(CompileError::Program)?;
        let mut variables = Vec::new();
        let mut composed = Composed::default();
        let mut open = vec![&ast.root];
        while let Some(expr) = open.pop() {
            if let ExprKind::Ident(name) = &expr.kind {
                composed.whole |= &**name == POLICY_VARIABLES;
                if !variables.contains(name) && variables.len() < MAX_VARIABLES {
                    variables.push(name.clone());
                }
            }
            if let Some(field) = composed_variable(expr) {
                composed.fields.insert(field.clone());
                continue;
            }
            expr.children(&mut |child| open.push(child));
        }
        if !composed.fields.is_empty() && variables.len() < MAX_VARIABLES {
            variables.push(POLICY_VARIABLES.into());
        }
        Ok(Program {
            plan: Arc::new(plan),
            result_type: checked.map_or(Type::Dyn, |checked| checked.type_of(ast.root.id).clone()),
            estimated_cost: checked.map(|checked| estimate::estimate(&ast.root, checked, sizes)),
            variables,
            composed,
            depth: ast.root.depth(),
        })
    }
}

/// Names that a program remembers to have used.
const MAX_VARIABLES: usize = 64;

/// The variable that holds the composed variables of an admission policy.
pub(crate) const POLICY_VARIABLES: &str = "variables";

/// The composed variables of a policy that a program reads.
#[derive(Debug, Clone, Default)]
struct Composed {
    fields: BTreeSet<Arc<str>>,
    /// Is the variable used other than to read one of its fields?
    whole: bool,
}

/// The field of `variables` that `expr` reads, if it is such an expression.
fn composed_variable(expr: &Expr) -> Option<&Arc<str>> {
    match &expr.kind {
        ExprKind::Select { operand, field, .. } => match &operand.kind {
            ExprKind::Ident(name) if &**name == POLICY_VARIABLES => Some(field),
            _ => None,
        },
        _ => None,
    }
}

/// Runs `work` with a stack that suffices for expressions which are nested `levels` deep together: an expression may
/// evaluate another one on its way. `None` if the system has no thread for it.
pub fn with_stack<T: Send>(levels: usize, work: impl FnOnce() -> T + Send) -> Option<T> {
    on_stack(levels, work).ok()
}

/// Runs `work` with enough stack for a tree of `depth` levels. An error if the system has no thread for it.
fn on_stack<T: Send>(depth: usize, work: impl FnOnce() -> T + Send) -> Result<T, EvalError> {
    if depth <= DEEP {
        return Ok(work());
    }
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().stack_size(depth * STACK_PER_LEVEL);
        let Ok(handle) = builder.spawn_scoped(scope, work) else { return Err(EvalError::NoThread) };
        Ok(handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// A compiled expression. It can be shared and evaluated by many threads at once.
#[derive(Clone)]
pub struct Program {
    plan: Arc<Plan>,
    result_type: Type,
    estimated_cost: Option<Range>,
    variables: Vec<Arc<str>>,
    composed: Composed,
    depth: usize,
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program")
            .field("result_type", &self.result_type)
            .field("estimated_cost", &self.estimated_cost)
            .finish_non_exhaustive()
    }
}

/// The outcome of an evaluation. The cost counts also if there is no value.
#[derive(Debug)]
pub struct Evaluation<'a> {
    pub result: Result<Value<'a>, EvalError>,
    pub cost: u64,
}

impl Program {
    pub fn result_type(&self) -> &Type {
        &self.result_type
    }

    /// The least and the most that an evaluation costs; `None` if the types were not checked.
    pub fn estimated_cost(&self) -> Option<Range> {
        self.estimated_cost
    }

    /// Does the expression mention the variable `name`? True also where it mentions too many to remember.
    pub fn uses_variable(&self, name: &str) -> bool {
        self.variables.len() >= MAX_VARIABLES || self.variables.iter().any(|own| &**own == name)
    }

    /// The levels of the expression, to which its need of stack is proportional.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The variables of its policy that the expression reads by name, and whether it may read others as well.
    pub fn policy_variables(&self) -> (impl Iterator<Item = &str>, bool) {
        (self.composed.fields.iter().map(|name| &**name), self.composed.whole)
    }

    pub fn evaluate<'a>(&self, activation: &Activation<'a>, limits: Limits<'_>) -> Evaluation<'a> {
        match on_stack(self.depth, || eval::evaluate(&self.plan, activation, limits)) {
            Ok((result, cost)) => Evaluation { result, cost },
            Err(error) => Evaluation { result: Err(error), cost: 0 },
        }
    }
}

/// The values of variables.
#[derive(Debug, Clone, Default)]
pub struct Activation<'a> {
    variables: Vec<(&'a str, Result<Value<'a>, EvalError>)>,
}

impl<'a> Activation<'a> {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn with(mut self, name: &'a str, value: impl Into<Value<'a>>) -> Self {
        self.set(name, Ok(value.into()));
        self
    }

    /// Sets a variable, or the error that reading it gives.
    pub fn set(&mut self, name: &'a str, value: Result<Value<'a>, EvalError>) {
        self.variables.push((name, value));
    }

    pub(crate) fn get(&self, name: &str) -> Option<Result<Value<'a>, EvalError>> {
        self.variables.iter().rev().find(|(own, _)| *own == name).map(|(_, value)| value.clone())
    }
}

/// Estimates the sizes of variables from their declared types.
#[derive(Debug, Clone)]
pub struct DeclaredSizes {
    variables: Vec<(String, DeclType)>,
    /// Do unknown variables have the sizes of the first one?
    any: bool,
}

impl DeclaredSizes {
    /// Every variable has the sizes of `of`: for validation rules, where `self` and `oldSelf` are of one type.
    pub fn of_any(of: DeclType) -> Self {
        Self { variables: vec![(String::new(), of)], any: true }
    }

    /// The sizes of each variable by its name.
    pub fn of_variables(variables: impl IntoIterator<Item = (String, DeclType)>) -> Self {
        Self { variables: variables.into_iter().collect(), any: false }
    }
}

impl SizeEstimator for DeclaredSizes {
    fn size(&self, path: &[Arc<str>], _: &Type) -> Option<Range> {
        let (variable, path) = path.split_first()?;
        let (_, of) = self.variables.iter().find(|(name, _)| self.any || **name == **variable)?;
        let max = of.max_at(path.iter().map(|step| &**step))?;
        Some(Range { min: 0, max })
    }
}
