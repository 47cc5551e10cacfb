//! Our errors as gRPC statuses and back.

use tonic::{Code as Wire, Status};

use crate::{Code, Error};

const PAIRS: &[(Code, Wire)] = &[
    (Code::InvalidArgument, Wire::InvalidArgument),
    (Code::NotFound, Wire::NotFound),
    (Code::AlreadyExists, Wire::AlreadyExists),
    (Code::FailedPrecondition, Wire::FailedPrecondition),
    (Code::PermissionDenied, Wire::PermissionDenied),
    (Code::DeadlineExceeded, Wire::DeadlineExceeded),
    (Code::Unimplemented, Wire::Unimplemented),
    (Code::Unavailable, Wire::Unavailable),
    (Code::Internal, Wire::Internal),
];

pub(super) fn to_status(error: Error) -> Status {
    // containerd answers Unknown for "anything else"; Internal says the same and clients treat them alike.
    let wire = PAIRS.iter().find(|(ours, _)| *ours == error.code).map_or(Wire::Unknown, |(_, wire)| *wire);
    Status::new(wire, error.message)
}

pub(super) fn from_status(status: Status) -> Error {
    let code = match status.code() {
        // A call cut off by the end of the connection is none the runtime has answered.
        Wire::Unknown if broke_off(&status) => Code::Unavailable,
        Wire::Unauthenticated => Code::PermissionDenied,
        Wire::Cancelled | Wire::Aborted | Wire::ResourceExhausted => Code::Unavailable,
        wire => PAIRS.iter().find(|(_, known)| *known == wire).map_or(Code::Internal, |(ours, _)| *ours),
    };
    let mut message = status.message().to_owned();
    // A connection that failed says why only in its causes.
    let mut cause = std::error::Error::source(&status);
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message.push_str(&format!(": {text}"));
        }
        cause = error.source();
    }
    Error::new(code, message)
}

fn broke_off(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::transport::Error>() || error.is::<hyper::Error>() {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_wire() {
        for (code, _) in PAIRS {
            let error = Error::new(*code, "what happened");
            assert_eq!(from_status(to_status(error.clone())), error);
        }
        assert_eq!(from_status(Status::unknown("x")).code, Code::Internal);
        assert_eq!(from_status(Status::unauthenticated("x")).code, Code::PermissionDenied);
    }
}
