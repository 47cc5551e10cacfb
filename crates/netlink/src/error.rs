//! Why the kernel did not do what it was asked for.

use std::io;
use std::path::PathBuf;

use nix::libc;

/// Why a request failed. The text names the cause as the kernel gives it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused a request.
    #[error("{request}: {}{}", io::Error::from_raw_os_error(*errno), .explanation.as_ref().map(|text| format!(": {text}")).unwrap_or_default())]
    Refused {
        request: &'static str,
        errno: i32,
        /// The kernel's own words, if it has any.
        explanation: Option<String>,
    },
    /// A socket, a namespace or a setting failed.
    #[error("{what}: {error}")]
    Io { what: String, error: io::Error },
    /// The file is something else, or a namespace of another kind.
    #[error("{} is no network namespace", .0.display())]
    NotANamespace(PathBuf),
    /// The request names a link that does not exist.
    #[error("no link has the name {0}")]
    NoLink(String),
    /// Every list was inconsistent, because somebody changed what was being listed.
    #[error("{request}: it changed each time while the kernel listed it")]
    Interrupted { request: &'static str },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |error| Self::Io { what, error }
    }

    /// The kernel's error number.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            Self::Io { error, .. } => error.raw_os_error(),
            Self::NoLink(_) => Some(libc::ENODEV),
            Self::NotANamespace(_) => Some(libc::EINVAL),
            Self::Interrupted { .. } => None,
        }
    }

    /// The object that the request would make exists.
    pub fn is_already_exists(&self) -> bool {
        self.errno() == Some(libc::EEXIST)
    }

    /// The object of the request does not exist. The kernel has a number of its own for routes and one for addresses.
    pub fn is_not_found(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOENT | libc::ENODEV | libc::ESRCH | libc::EADDRNOTAVAIL))
    }

    /// The outcome of a deletion; `false` if there was nothing to delete.
    pub fn existed(result: Result<(), Self>) -> Result<bool, Self> {
        match result {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error.errno() {
            Some(errno) => Self::from_raw_os_error(errno),
            None => Self::other(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_texts() {
        let refused = |errno, text: Option<&str>| Error::Refused {
            request: "add a route",
            errno,
            explanation: text.map(str::to_owned),
        };
        let file = Error::io("open x")(io::Error::from_raw_os_error(libc::ENOENT));
        for (error, exists, missing, text) in [
            (refused(libc::EEXIST, None), true, false, "add a route: File exists (os error 17)"),
            (refused(libc::ENOENT, None), false, true, "add a route: No such file or directory (os error 2)"),
            (refused(libc::ENODEV, None), false, true, "add a route: No such device (os error 19)"),
            (refused(libc::ESRCH, None), false, true, "add a route: No such process (os error 3)"),
            (
                refused(libc::EADDRNOTAVAIL, None),
                false,
                true,
                "add a route: Cannot assign requested address (os error 99)",
            ),
            (
                refused(libc::EINVAL, Some("Invalid prefix")),
                false,
                false,
                "add a route: Invalid argument (os error 22): Invalid prefix",
            ),
            (Error::NoLink("eth9".into()), false, true, "no link has the name eth9"),
            (file, false, true, "open x: No such file or directory (os error 2)"),
        ] {
            assert_eq!((error.is_already_exists(), error.is_not_found()), (exists, missing), "{error}");
            assert_eq!(error.to_string(), text);
        }
        assert_eq!(Error::existed(Err(refused(libc::ESRCH, None))).ok(), Some(false));
        assert!(Error::existed(Err(refused(libc::EPERM, None))).is_err());
        assert_eq!(io::Error::from(refused(libc::EPERM, None)).raw_os_error(), Some(libc::EPERM));
    }
}
