//! hostPath volumes: checks and creation by type.

use super::plugins::{PersistentPlugin, PersistentSetUp, SetUp, VolumePlugin};
use super::{ReadyVolume, SourceError};
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::HostPathVolumeSource;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

#[derive(Debug, thiserror::Error)]
pub(crate) enum HostPathError {
    #[error("hostPath type check failed: {path} {problem}")]
    Check { path: String, problem: &'static str },
    #[error("{path}: {source}")]
    Io { path: String, source: io::Error },
}

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.host_path.is_some(),
    set_up: |request: SetUp<'_>| set_up(request.volume.host_path.as_ref()).boxed(),
};

pub(super) const PERSISTENT: PersistentPlugin = PersistentPlugin {
    matches: |spec| spec.host_path.is_some(),
    set_up: |request: PersistentSetUp<'_>| set_up(request.spec.host_path.as_ref()).boxed(),
};

async fn set_up(source: Option<&HostPathVolumeSource>) -> Result<ReadyVolume, SourceError> {
    let source = source.ok_or(SourceError::Unsupported)?;
    let (path, kind) = (source.path.clone(), source.type_.clone().unwrap_or_default());
    // The path may be on a file system that does not answer.
    tokio::task::spawn_blocking(move || ensure(&path, &kind))
        .await
        .map_err(|e| SourceError::Io { path: source.path.clone().into(), source: io::Error::other(e) })??;
    Ok(ReadyVolume::writable(source.path.clone().into()))
}

/// Makes sure that `path` is of type `kind`, creating it for the `…OrCreate` types.
pub(crate) fn ensure(path: &str, kind: &str) -> Result<(), HostPathError> {
    let at = Path::new(path);
    let check = |ok: bool, problem| {
        if ok { Ok(()) } else { Err(HostPathError::Check { path: path.into(), problem }) }
    };
    let io_error = |source| HostPathError::Io { path: path.into(), source };
    let meta = fs::metadata(at);
    let is = |test: &dyn Fn(&fs::FileType) -> bool| meta.as_ref().is_ok_and(|m| test(&m.file_type()));
    match kind {
        "DirectoryOrCreate" if meta.is_err() => {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(at).map_err(io_error)
        }
        "Directory" | "DirectoryOrCreate" => check(is(&|t| t.is_dir()), "is not a directory"),
        "FileOrCreate" if meta.is_err() => {
            fs::OpenOptions::new().create(true).append(true).mode(0o644).open(at).map(drop).map_err(io_error)
        }
        "File" | "FileOrCreate" => check(is(&|t| t.is_file()), "is not a file"),
        "Socket" => check(is(&|t| t.is_socket()), "is not a socket file"),
        "CharDevice" => check(is(&|t| t.is_char_device()), "is not a character device"),
        "BlockDevice" => check(is(&|t| t.is_block_device()), "is not a block device"),
        // No type: no check; a missing path becomes a directory, which the runtime binds.
        _ if meta.is_err() => fs::create_dir_all(at).map_err(io_error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        fs::write(path("file"), "").unwrap();
        for (name, kind, ok) in [
            ("file", "File", true),
            ("file", "Directory", false),
            ("none", "File", false),
            ("none", "Directory", false),
            ("made/dir", "DirectoryOrCreate", true),
            ("made/dir", "Directory", true),
            ("made-file", "FileOrCreate", true),
            ("file", "Socket", false),
            ("auto", "", true),
        ] {
            assert_eq!(ensure(&path(name), kind).is_ok(), ok, "{name} {kind}");
        }
        assert!(ensure("/dev/null", "CharDevice").is_ok());
        let message = ensure(&path("file"), "Directory").unwrap_err().to_string();
        assert!(
            message.starts_with("hostPath type check failed: ") && message.ends_with("is not a directory")
        );
    }
}
