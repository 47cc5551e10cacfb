//! Seccomp profiles: which one a container gets, and the files of Localhost profiles.

use ferrite_cri::v1::{SecurityProfile, security_profile::ProfileType};
use ferrite_hostfs::Dir;
use k8s_openapi::api::core::v1::SeccompProfile;
use std::io;
use std::path::{Component, Path, PathBuf};

/// Largest profile that is accepted; the runtime's default has about 20 KiB.
const MAX_PROFILE: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum SeccompError {
    #[error("localhostProfile must be set if seccompProfile type is Localhost.")]
    NoProfile,
    #[error("cannot load seccomp profile {path:?}: {source}")]
    Load { path: PathBuf, source: io::Error },
}

/// The node's profiles.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Profiles<'a> {
    /// Localhost profiles are files beneath it.
    pub root: &'a Path,
    /// Without a profile there is the runtime's, not none.
    pub runtime_default: bool,
}

/// A profile in the runtime's terms.
pub(crate) fn profile(
    profile: Option<&SeccompProfile>,
    profiles: Profiles<'_>,
) -> Result<SecurityProfile, SeccompError> {
    let of = |kind: ProfileType, path: String| {
        Ok(SecurityProfile { profile_type: kind.into(), localhost_ref: path })
    };
    let Some(profile) = profile else {
        let usual =
            if profiles.runtime_default { ProfileType::RuntimeDefault } else { ProfileType::Unconfined };
        return of(usual, String::new());
    };
    match profile.type_.as_str() {
        "RuntimeDefault" => of(ProfileType::RuntimeDefault, String::new()),
        "Localhost" => {
            let name = profile.localhost_profile.as_deref().filter(|name| !name.is_empty());
            let name = Path::new(name.ok_or(SeccompError::NoProfile)?);
            if !name.components().all(|part| matches!(part, Component::Normal(_))) {
                let text = "localhostProfile must be relative and without \"..\"";
                let source = io::Error::new(io::ErrorKind::InvalidInput, text);
                return Err(SeccompError::Load { path: name.to_owned(), source });
            }
            of(ProfileType::Localhost, profiles.root.join(name).to_string_lossy().into_owned())
        }
        _ => of(ProfileType::Unconfined, String::new()),
    }
}

/// Makes sure that the file of a Localhost profile is a regular one beneath `root`, reached without a link, and
/// of a sensible size. The runtime reads it by its path.
pub(crate) fn check(profile: &SecurityProfile, root: &Path) -> Result<(), SeccompError> {
    if profile.profile_type() != ProfileType::Localhost {
        return Ok(());
    }
    let path = Path::new(&profile.localhost_ref);
    let fail = |source| SeccompError::Load { path: path.to_owned(), source };
    let name = path.strip_prefix(root).map_err(|e| fail(io::Error::other(e)))?;
    let file = Dir::open(root).and_then(|root| root.open_file(name)).map_err(fail)?;
    let size = file.metadata().map_err(fail)?.len();
    if size > MAX_PROFILE {
        return Err(fail(io::Error::other(format!("{size} bytes are more than {MAX_PROFILE}"))));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn wanted(type_: &str, path: Option<&str>) -> SeccompProfile {
        SeccompProfile { type_: type_.into(), localhost_profile: path.map(Into::into) }
    }

    #[test]
    fn profiles() {
        let root = Path::new("/var/lib/kubelet/seccomp");
        let usual = Profiles { root, runtime_default: false };
        for (type_, path, expected) in [
            ("Unconfined", None, Ok((ProfileType::Unconfined, ""))),
            ("RuntimeDefault", None, Ok((ProfileType::RuntimeDefault, ""))),
            ("Localhost", Some("p.json"), Ok((ProfileType::Localhost, "/var/lib/kubelet/seccomp/p.json"))),
            (
                "Localhost",
                Some("a/p.json"),
                Ok((ProfileType::Localhost, "/var/lib/kubelet/seccomp/a/p.json")),
            ),
            ("Localhost", None, Err("localhostProfile must be set if seccompProfile type is Localhost.")),
            ("Localhost", Some(""), Err("localhostProfile must be set if seccompProfile type is Localhost.")),
            (
                "Localhost",
                Some("../p.json"),
                Err(
                    "cannot load seccomp profile \"../p.json\": localhostProfile must be relative and without \"..\"",
                ),
            ),
            (
                "Localhost",
                Some("/etc/p.json"),
                Err(
                    "cannot load seccomp profile \"/etc/p.json\": localhostProfile must be relative and without \"..\"",
                ),
            ),
        ] {
            let got = profile(Some(&wanted(type_, path)), usual).map_err(|e| e.to_string());
            let got = got.map(|p| (p.profile_type(), p.localhost_ref));
            let expected = expected.map(|(t, p)| (t, p.to_owned())).map_err(str::to_owned);
            assert_eq!(got, expected, "{type_} {path:?}");
        }
        assert_eq!(profile(None, usual).unwrap().profile_type(), ProfileType::Unconfined);
        let defaulted = Profiles { runtime_default: true, ..usual };
        assert_eq!(profile(None, defaulted).unwrap().profile_type(), ProfileType::RuntimeDefault);
        let unconfined = profile(Some(&wanted("Unconfined", None)), defaulted).unwrap();
        assert_eq!(unconfined.profile_type(), ProfileType::Unconfined, "a pod's own choice counts");
    }

    #[test]
    fn only_regular_files_beneath_the_root_are_profiles() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("seccomp");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(root.join("sub/good.json"), "{}").unwrap();
        fs::write(root.join("large.json"), vec![b' '; 2 << 20]).unwrap();
        fs::write(dir.path().join("outside.json"), "{}").unwrap();
        std::os::unix::fs::symlink(dir.path().join("outside.json"), root.join("link.json")).unwrap();
        std::os::unix::fs::symlink(dir.path(), root.join("out")).unwrap();
        nix::unistd::mkfifo(&root.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for (name, good) in [
            ("sub/good.json", true),
            ("none.json", false),
            ("link.json", false),
            ("out/outside.json", false),
            ("pipe", false),
            ("sub", false),
            ("large.json", false),
        ] {
            let profile = profile(
                Some(&wanted("Localhost", Some(name))),
                Profiles { root: &root, runtime_default: false },
            )
            .unwrap();
            assert_eq!(check(&profile, &root).is_ok(), good, "{name}");
        }
    }
}
