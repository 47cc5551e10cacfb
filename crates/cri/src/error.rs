use std::fmt;

/// The gRPC codes that the kubelet distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// The request itself is wrong; repeating it will not help.
    InvalidArgument,
    /// The sandbox, container or image does not exist.
    NotFound,
    /// The name or identity is taken.
    AlreadyExists,
    /// The object is not in the state the call needs (exec in a container that has ended).
    FailedPrecondition,
    /// A registry refused the credentials.
    PermissionDenied,
    /// The call took longer than the caller allowed.
    DeadlineExceeded,
    /// The runtime does not offer this call.
    Unimplemented,
    /// The runtime cannot answer at present; the call may be repeated.
    Unavailable,
    /// Anything else.
    Internal,
}

/// The error of a failed call: a code for the program, a message for the person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    pub code: Code,
    pub message: String,
}

impl Error {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    pub fn unimplemented(call: &str) -> Self {
        Self::new(Code::Unimplemented, format!("the runtime does not implement {call}"))
    }

    pub fn is_not_found(&self) -> bool {
        self.code == Code::NotFound
    }

    /// True if the runtime does not know the call. containerd 2.2 answers some calls with another code and this message.
    pub fn is_unimplemented(&self) -> bool {
        self.code == Code::Unimplemented
            || (self.code == Code::Internal && self.message.contains("not implemented"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// An error with its causes, for a message that leaves the process.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(&format!(": {source}"));
        next = source.source();
    }
    text
}
