//! Errors of compilation and of evaluation.

use std::borrow::Cow;

use thiserror::Error;

use crate::source::{self, Issue};

/// An expression that does not compile.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CompileError {
    /// The text is no expression.
    #[error("{}", source::display(.0))]
    Parse(Vec<Issue>),
    /// The expression breaks a rule of its types, or a literal argument is invalid.
    #[error("{}", source::display(.0))]
    Check(Vec<Issue>),
    /// A part without variables was computed in advance and failed.
    #[error("{0}")]
    Program(EvalError),
}

impl CompileError {
    /// The issues, for the kinds of errors that have places in the text.
    pub fn issues(&self) -> &[Issue] {
        match self {
            Self::Parse(issues) | Self::Check(issues) => issues,
            Self::Program(_) => &[],
        }
    }
}

/// An evaluation that gave no value.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EvalError {
    /// An error of the expression itself. `&&`, `||` and the macros made of them can absorb it.
    #[error("{0}")]
    Message(Cow<'static, str>),
    #[error("operation cancelled: actual cost limit exceeded")]
    CostLimitExceeded,
    #[error("operation interrupted")]
    Interrupted,
    /// The strings and lists that the expression makes take more memory than an evaluation may have.
    #[error("operation cancelled: memory limit exceeded")]
    MemoryLimitExceeded,
    /// The expression is nested so deeply that it needs a thread of its own, and the system has none.
    #[error("operation cancelled: no thread for a deeply nested expression")]
    NoThread,
}

impl EvalError {
    pub fn new(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Message(message.into())
    }

    /// Ends the evaluation: no part of the expression may absorb it.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::Message(_))
    }

    pub(crate) const fn text(message: &'static str) -> Self {
        Self::Message(Cow::Borrowed(message))
    }
}

pub(crate) const NO_SUCH_OVERLOAD: EvalError = EvalError::text("no such overload");

/// Makes an [`EvalError`] from a format.
macro_rules! err {
    ($($arg:tt)*) => { $crate::error::EvalError::new(format!($($arg)*)) };
}
pub(crate) use err;
