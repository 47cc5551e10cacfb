//! nfs volumes, through the node's own mount helper.

use super::plugins::{PersistentPlugin, PersistentSetUp, SetUp, VolumePlugin};
use super::stats::Measure;
use super::{ReadyVolume, SourceError, blocking};
use ferrite_hostfs::mounts;
use futures_util::FutureExt;
use k8s_openapi::api::core::v1::NFSVolumeSource;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;

/// Longest wait for a server that does not answer before the pod gets an error.
const PATIENCE: Duration = Duration::from_secs(120);
/// Length of the helper's output that is repeated in errors.
const OUTPUT: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum NfsError {
    #[error("mount failed: cannot run the node's mount program: {0}")]
    Helper(std::io::Error),
    #[error("mount failed: {status}\nMounting arguments: {arguments}\nOutput: {output}")]
    Failed { status: String, arguments: String, output: String },
    #[error("mount failed: no answer from {0} in time")]
    Silent(String),
}

pub(super) const PLUGIN: VolumePlugin = VolumePlugin {
    matches: |volume| volume.nfs.is_some(),
    set_up: |request: SetUp<'_>| {
        async move {
            let source = request.volume.nfs.as_ref().ok_or(SourceError::Unsupported)?;
            set_up(request.dir("nfs"), source, false, &[]).await
        }
        .boxed()
    },
};

pub(super) const PERSISTENT: PersistentPlugin = PersistentPlugin {
    matches: |spec| spec.nfs.is_some(),
    set_up: |request: PersistentSetUp<'_>| {
        async move {
            let source = request.spec.nfs.as_ref().ok_or(SourceError::Unsupported)?;
            let point = request.pod.place("nfs", request.name);
            let options = request.spec.mount_options.as_deref().unwrap_or_default();
            set_up(point, source, request.read_only, options).await
        }
        .boxed()
    },
};

async fn set_up(
    point: PathBuf,
    source: &NFSVolumeSource,
    read_only: bool,
    options: &[String],
) -> Result<ReadyVolume, SourceError> {
    let read_only = read_only || source.read_only == Some(true);
    let target = point.clone();
    let mounted = blocking(&point, move || {
        std::fs::create_dir_all(&target)?;
        mounts::is_mount_point(&target)
    })
    .await?;
    if !mounted {
        mount(&arguments(source, read_only, options, &point)).await?;
    }
    let measure = Some(Measure::FileSystem);
    Ok(ReadyVolume { read_only, settled: true, measure, ..ReadyVolume::writable(point) })
}

/// The arguments of the mount program. Nothing after `--` is an option, whatever the server's name is.
fn arguments(source: &NFSVolumeSource, read_only: bool, options: &[String], point: &Path) -> Vec<String> {
    let mut all: Vec<String> = options.to_vec();
    if read_only {
        all.push("ro".into());
    }
    let mut arguments = vec!["-t".to_owned(), "nfs".to_owned()];
    if !all.is_empty() {
        arguments.extend(["-o".to_owned(), all.join(",")]);
    }
    let from = format!("{}:{}", source.server, source.path);
    arguments.extend(["--".to_owned(), from, point.to_string_lossy().into_owned()]);
    arguments
}

async fn mount(arguments: &[String]) -> Result<(), NfsError> {
    let mut command = Command::new("mount");
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(PATIENCE, command.output()).await {
        Err(_) => {
            let server = arguments.get(arguments.len().saturating_sub(2)).cloned().unwrap_or_default();
            return Err(NfsError::Silent(server));
        }
        Ok(output) => output.map_err(NfsError::Helper)?,
    };
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(NfsError::Failed {
        status: output.status.to_string(),
        arguments: arguments.join(" "),
        output: said.chars().take(OUTPUT).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_never_an_option() {
        let source = |server: &str, read_only| NFSVolumeSource {
            server: server.into(),
            path: "/exports".into(),
            read_only,
        };
        for (server, read_only, options, expected) in [
            ("nas", None, vec![], "-t nfs -- nas:/exports /p"),
            ("nas", Some(true), vec![], "-t nfs -o ro -- nas:/exports /p"),
            (
                "nas",
                None,
                vec!["vers=4".to_owned(), "soft".to_owned()],
                "-t nfs -o vers=4,soft -- nas:/exports /p",
            ),
            ("--bind", None, vec![], "-t nfs -- --bind:/exports /p"),
        ] {
            let read_only_wanted = read_only == Some(true);
            let made = arguments(&source(server, read_only), read_only_wanted, &options, Path::new("/p"));
            assert_eq!(made.join(" "), expected);
        }
    }
}
