//! The Common Expression Language (CEL) as Kubernetes v1.36 has it.
//!
//! An [`Environment`] has the names that expressions may use. It compiles an expression to a [`Program`],
//! once; the program is
//! evaluated many times, each time with an [`Activation`] that holds the variables. Nothing here does I/O, waits, or
//! takes time or memory out of proportion: every evaluation has a cost, counted as upstream counts it, and [`Limits`]
//! end it.
//!
//! ```
//! use ferrite_cel::{Activation, Environment, Limits, Type, Value};
//!
//! let environment = Environment::kubernetes(36).with_variable("replicas", Type::Int);
//! let program = environment.compile("replicas <= 5").unwrap();
//! let activation = Activation::new().with("replicas", 3_i64);
//! let evaluation = program.evaluate(&activation, Limits::cost(1_000_000));
//! assert_eq!(evaluation.result.unwrap().as_bool(), Some(true));
//! ```
//!
//! The way of an expression: `source` and `lexer` → `parser` with `macros` → `check` → `plan` → `eval` with `functions`.
//! Beside it, `cost` estimates before and counts while; `schema` turns structural schemas into types and sizes; `library`
//! has the tables of the environments' contents.

mod ast;
mod check;
mod cost;
mod device;
mod error;
mod escape;
mod eval;
mod functions;
mod lexer;
mod library;
pub mod limits;
mod literal;
mod macros;
mod parser;
mod plan;
mod print;
mod program;
mod rules;
mod schema;
mod source;
mod time;
mod types;
mod uses;
mod value;

pub use cost::Range;
pub use cost::estimate::SizeEstimator;
pub use device::{Attribute, Device, DeviceSelector, DeviceSelectorError};
pub use error::{CompileError, EvalError};
pub use escape::{escape, unescape};
pub use eval::Limits;
pub use functions::{
    AuthorizationDecision, Authorizer, AuthorizerValue, Check, Cidr, Ip, Quantity, Semver, Url,
};
pub use library::Library;
pub use parser::is_identifier;
pub use program::{Activation, DeclaredSizes, Environment, Evaluation, Program, with_stack};
pub use rules::{
    BadValue, CompiledRule, FieldError, FieldErrorKind, Outcome, RuleEnvironment, RuleInput, ValidationRules,
};
pub use schema::{DeclType, Kind, ListType, Schema, SchemaError};
pub use source::{Issue, Location};
pub use time::{Duration, Timestamp};
pub use types::{Declared, Type};
pub use value::{LazyObject, List, Map, Object, Opaque, Str, Value};
