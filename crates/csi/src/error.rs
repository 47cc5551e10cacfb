//! Why a call to a plugin failed.

use tonic::{Code, Status};

/// Of a plugin's text, so much is repeated in errors and events.
const TEXT: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The plugin may still be at work.
    #[error("rpc error: code = DeadlineExceeded desc = no answer to {call} in time")]
    Silent { call: &'static str },
    #[error("rpc error: code = {code:?} desc = {text}")]
    Refused { code: Code, text: String },
}

impl CallError {
    /// The plugin's complaint, cut to a length that fits an event.
    pub fn of(status: &Status) -> Self {
        Self::Refused { code: status.code(), text: status.message().chars().take(TEXT).collect() }
    }

    /// Returns true if the call has certainly ended without effect. As upstream: after any other error the
    /// driver may still be at work, or may have done it.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Silent { .. } => false,
            Self::Refused { code, .. } => !matches!(
                code,
                Code::Cancelled
                    | Code::DeadlineExceeded
                    | Code::Unavailable
                    | Code::ResourceExhausted
                    | Code::Aborted
            ),
        }
    }

    /// Returns true if the same call would be refused again. As upstream: a part of the final errors.
    pub fn is_infeasible(&self) -> bool {
        matches!(self, Self::Refused { code: Code::InvalidArgument | Code::OutOfRange | Code::NotFound, .. })
    }

    /// The code of the driver's answer.
    pub fn code(&self) -> Code {
        match self {
            Self::Silent { .. } => Code::DeadlineExceeded,
            Self::Refused { code, .. } => *code,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_certain_failures_are_final() {
        for (code, expected) in [
            (Code::InvalidArgument, true),
            (Code::NotFound, true),
            (Code::Internal, true),
            (Code::Unavailable, false),
            (Code::Aborted, false),
            (Code::DeadlineExceeded, false),
            (Code::ResourceExhausted, false),
            (Code::Cancelled, false),
        ] {
            assert_eq!(CallError::of(&Status::new(code, "x")).is_final(), expected, "{code:?}");
        }
        let long = CallError::of(&Status::internal("é".repeat(5000)));
        assert!(long.to_string().chars().count() < 1100, "a driver's text is bounded");
    }
}
