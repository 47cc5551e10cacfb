//! The last word of a stream: the `Status` object clients read from the error channel.

use serde_json::{Value, json};

/// The result of an exec or attach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Ended(i32),
    Failed(String),
}

impl Outcome {
    /// As upstream words it.
    pub fn status(&self) -> Value {
        match self {
            Self::Ended(0) => json!({ "metadata": {}, "status": "Success" }),
            Self::Ended(code) => json!({
                "metadata": {},
                "status": "Failure",
                "message": format!("command terminated with non-zero exit code: exit status {code}"),
                "reason": "NonZeroExitCode",
                "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
            }),
            Self::Failed(message) => json!({
                "metadata": {},
                "status": "Failure",
                "message": message,
                "reason": "InternalError",
                "details": { "causes": [{ "message": message }] },
                "code": 500,
            }),
        }
    }

    /// For clients older than the Status object: text, and nothing on success.
    pub fn text(&self) -> String {
        match self {
            Self::Ended(0) => String::new(),
            Self::Ended(code) => format!("command terminated with non-zero exit code: exit status {code}"),
            Self::Failed(message) => message.clone(),
        }
    }
}
