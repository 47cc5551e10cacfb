//! Our errors as gRPC statuses and back.

use std::path::Path;

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

/// The error of the runtime behind `socket`, or of the connection to it.
pub(super) fn from_status(status: Status, socket: &Path) -> Error {
    if broke_off(&status) {
        // None the runtime has answered. A connection that failed says why only in its causes.
        let mut message = format!("container runtime at {}: {}", socket.display(), status.message());
        for error in causes(&status) {
            let text = error.to_string();
            if !message.contains(&text) {
                message.push_str(&format!(": {text}"));
            }
        }
        return Error::new(Code::Unavailable, message);
    }
    let code = match status.code() {
        Wire::Unauthenticated => Code::PermissionDenied,
        Wire::Cancelled | Wire::Aborted | Wire::ResourceExhausted => Code::Unavailable,
        wire => PAIRS.iter().find(|(_, known)| *known == wire).map_or(Code::Internal, |(ours, _)| *ours),
    };
    Error::new(code, status.message())
}

fn broke_off(status: &Status) -> bool {
    causes(status).any(|error| error.is::<tonic::transport::Error>() || error.is::<hyper::Error>())
}

/// Returns true if the connection ended before the request went out: a retry cannot repeat an action.
pub(super) fn never_sent(status: &Status) -> bool {
    causes(status).any(|error| error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled))
}

fn causes(status: &Status) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(std::error::Error::source(status), |error| error.source())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_the_wire() {
        let socket = Path::new("/run/x.sock");
        for (code, _) in PAIRS {
            let error = Error::new(*code, "what happened");
            assert_eq!(from_status(to_status(error.clone()), socket), error);
        }
        assert_eq!(from_status(Status::unknown("x"), socket).code, Code::Internal);
        assert_eq!(from_status(Status::unauthenticated("x"), socket).code, Code::PermissionDenied);
    }
}
