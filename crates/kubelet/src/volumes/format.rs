//! File systems on block devices: found, made and mounted with the host's own programs, as upstream does.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;
use tokio::process::Command;

/// A disk may be large and slow.
const PATIENCE: Duration = Duration::from_secs(600);
/// Length of a program's output that is repeated in errors.
const OUTPUT: usize = 1024;
const DEFAULT: &str = "ext4";

#[derive(Debug, thiserror::Error)]
pub(crate) enum FormatError {
    #[error("cannot run {program}: {source}; install it on the node")]
    Missing { program: String, source: io::Error },
    #[error("{program} did not end within {PATIENCE:?}")]
    Silent { program: String },
    #[error("{program} failed for {device:?}: {status}: {output}")]
    Failed { program: String, device: PathBuf, status: String, output: String },
    #[error("{0:?} is no name of a file system")]
    Kind(String),
    #[error("cannot mount unformatted disk {0:?} as we are manipulating it in read-only mode")]
    ReadOnly(PathBuf),
    #[error("the device {device:?} is formatted with {found:?}, and the volume has fsType {wanted:?}")]
    Other { device: PathBuf, found: String, wanted: String },
}

/// A file system to be mounted.
#[derive(Debug, Clone)]
pub(super) struct DeviceMount<'a> {
    pub device: &'a Path,
    pub point: &'a Path,
    /// Empty: the one that is there, or the usual one.
    pub kind: &'a str,
    pub read_only: bool,
    pub options: &'a [String],
}

/// The contents of a device.
#[derive(Debug, PartialEq, Eq)]
enum Contents {
    Nothing,
    FileSystem(String),
    /// Partitions, or something that is no file system.
    Other(String),
}

/// Reads the answer of `blkid -p -o export`. Its exit code 2 means that it found nothing.
fn contents(code: Option<i32>, output: &str) -> Option<Contents> {
    if code == Some(2) {
        return Some(Contents::Nothing);
    }
    if code != Some(0) {
        return None;
    }
    let field = |name: &str| output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    Some(match (field("TYPE"), field("PTTYPE")) {
        (_, Some(table)) if !table.is_empty() => Contents::Other(format!("{table} partition table")),
        (Some(kind), _) if !kind.is_empty() => Contents::FileSystem(kind.to_owned()),
        _ => Contents::Nothing,
    })
}

/// The arguments of the program that makes a file system.
fn mkfs_arguments(kind: &str, device: &Path) -> Vec<String> {
    let device = device.to_string_lossy().into_owned();
    match kind {
        "ext3" | "ext4" => vec!["-F".into(), "-m0".into(), device],
        "xfs" => vec!["-f".into(), device],
        _ => vec![device],
    }
}

fn mount_arguments(wanted: &DeviceMount<'_>, kind: &str) -> Vec<String> {
    let mut options = wanted.options.to_vec();
    options.push(if wanted.read_only { "ro" } else { "rw" }.to_owned());
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let arguments = ["-t", kind, "-o", &options.join(","), "--", &text(wanted.device), &text(wanted.point)];
    arguments.map(str::to_owned).into()
}

/// Mounts the file system of a device; one that has none gets one first.
pub(super) async fn format_and_mount(wanted: &DeviceMount<'_>) -> Result<(), FormatError> {
    let plain =
        |kind: &str| kind.len() <= 16 && kind.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    if !plain(wanted.kind) || wanted.kind.starts_with(['-', '.']) {
        return Err(FormatError::Kind(wanted.kind.to_owned()));
    }
    let device = wanted.device.to_string_lossy().into_owned();
    let probe = ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", &device].map(str::to_owned);
    let found = run("blkid", &probe).await?;
    let text = String::from_utf8_lossy(&found.stdout);
    let found = contents(found.status.code(), &text).ok_or_else(|| failed("blkid", wanted.device, &found))?;
    let usual = if wanted.kind.is_empty() { DEFAULT } else { wanted.kind };
    let kind = match found {
        Contents::Nothing if wanted.read_only => return Err(FormatError::ReadOnly(wanted.device.to_owned())),
        Contents::Nothing => {
            let program = format!("mkfs.{usual}");
            tracing::info!(device, kind = usual, "making a file system on an empty device");
            let made = run(&program, &mkfs_arguments(usual, wanted.device)).await?;
            if !made.status.success() {
                return Err(failed(&program, wanted.device, &made));
            }
            usual.to_owned()
        }
        Contents::Other(found) => {
            let wanted_kind = usual.to_owned();
            return Err(FormatError::Other { device: wanted.device.to_owned(), found, wanted: wanted_kind });
        }
        Contents::FileSystem(found) => {
            if !wanted.kind.is_empty() && found != wanted.kind {
                let wanted_kind = wanted.kind.to_owned();
                return Err(FormatError::Other {
                    device: wanted.device.to_owned(),
                    found,
                    wanted: wanted_kind,
                });
            }
            if !wanted.read_only {
                check(wanted.device, &device).await?;
            }
            found
        }
    };
    let mounted = run("mount", &mount_arguments(wanted, &kind)).await?;
    match mounted.status.success() {
        true => Ok(()),
        false => Err(failed("mount", wanted.device, &mounted)),
    }
}

/// Repairs what can be repaired without a person. As upstream, errors that are left stop the mount.
async fn check(device: &Path, name: &str) -> Result<(), FormatError> {
    let checked = match run("fsck", &["-a".to_owned(), name.to_owned()]).await {
        // As upstream: without the program nothing is checked.
        Err(FormatError::Missing { .. }) => return Ok(()),
        other => other?,
    };
    match checked.status.code() {
        Some(4) => Err(failed("fsck", device, &checked)),
        _ => Ok(()),
    }
}

async fn run(program: &str, arguments: &[String]) -> Result<Output, FormatError> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(PATIENCE, command.output()).await {
        Err(_) => Err(FormatError::Silent { program: program.to_owned() }),
        Ok(output) => output.map_err(|source| FormatError::Missing { program: program.to_owned(), source }),
    }
}

fn failed(program: &str, device: &Path, output: &Output) -> FormatError {
    let said =
        String::from_utf8_lossy(if output.stderr.is_empty() { &output.stdout } else { &output.stderr });
    FormatError::Failed {
        program: program.to_owned(),
        device: device.to_owned(),
        status: output.status.to_string(),
        output: said.trim().chars().take(OUTPUT).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_their_answers() {
        for (code, output, expected) in [
            (Some(2), "", Some(Contents::Nothing)),
            (Some(0), "DEVNAME=/dev/x\nTYPE=ext4\n", Some(Contents::FileSystem("ext4".into()))),
            (Some(0), "PTTYPE=gpt\n", Some(Contents::Other("gpt partition table".into()))),
            (Some(0), "DEVNAME=/dev/x\n", Some(Contents::Nothing)),
            (Some(4), "", None),
            (None, "", None),
        ] {
            assert_eq!(contents(code, output), expected, "{code:?} {output}");
        }
        assert_eq!(mkfs_arguments("ext4", Path::new("/dev/x")), ["-F", "-m0", "/dev/x"]);
        assert_eq!(mkfs_arguments("xfs", Path::new("/dev/x")), ["-f", "/dev/x"]);
        assert_eq!(mkfs_arguments("btrfs", Path::new("/dev/x")), ["/dev/x"]);
        let options = ["noatime".to_owned()];
        let wanted = DeviceMount {
            device: Path::new("/dev/x"),
            point: Path::new("/p"),
            kind: "ext4",
            read_only: true,
            options: &options,
        };
        assert_eq!(mount_arguments(&wanted, "ext4").join(" "), "-t ext4 -o noatime,ro -- /dev/x /p");
    }

    #[tokio::test]
    async fn names_are_checked_and_missing_programs_are_named() {
        let wanted = |kind: &'static str| DeviceMount {
            device: Path::new("/nonexistent"),
            point: Path::new("/nonexistent"),
            kind,
            read_only: false,
            options: &[],
        };
        for kind in ["../../bin/sh", "-x", "ext4;reboot", "a b"] {
            let said = format_and_mount(&wanted(kind)).await.unwrap_err();
            assert!(matches!(said, FormatError::Kind(_)), "{kind}: {said}");
        }
        let said = run("mkfs.nosuchfs", &[]).await.unwrap_err().to_string();
        assert!(
            said.contains("cannot run mkfs.nosuchfs") && said.contains("install it on the node"),
            "{said}"
        );
    }
}
