//! `ferrite store` and `ferrite snapshot`: looking after the embedded store.

use crate::apiserver::BoxError;
use crate::cli::DataDir;
use clap::Subcommand;
use ferrite_store::upkeep::{self, SnapshotInfo, UpkeepError};
use ferrite_store::{HistoryLimits, LogOptions, OpenError, Store};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Read everything and verify every checksum. Works while the cluster runs. Exits with 1 when something is damaged,
    /// and with 2 when the last write was cut off.
    Check {
        #[command(flatten)]
        data: DataDir,
    },
    /// Drop the damaged end of the last log, so that the store opens without it. The log is kept aside. The
    /// cluster must be stopped.
    Repair {
        #[command(flatten)]
        data: DataDir,
    },
    /// Write one compact checkpoint and drop the logs. A running cluster does this by itself.
    Compact {
        #[command(flatten)]
        data: DataDir,
    },
    /// Show the number of keys, by kind, and their size on disk.
    Stats {
        #[command(flatten)]
        data: DataDir,
    },
}

#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Save all objects to a file, consistently, also while the cluster runs.
    Save {
        #[command(flatten)]
        data: DataDir,
        /// Where to; `snapshots/<revision>.snapshot` in the data directory when not given.
        file: Option<PathBuf>,
    },
    /// Make the store out of a saved file. The cluster must be stopped.
    Restore {
        #[command(flatten)]
        data: DataDir,
        file: PathBuf,
        /// Move a store that exists out of the way instead of refusing.
        #[arg(long)]
        replace: bool,
        /// Number of revisions to skip, so that clients that have seen a later state list anew.
        #[arg(long, default_value_t = 1_000_000, value_name = "REVISIONS")]
        skip_revisions: u64,
    },
    /// List saved files and verify them.
    List {
        #[command(flatten)]
        data: DataDir,
    },
}

/// Exit code of a check that found a write that was cut off.
const TORN: u8 = 2;

impl StoreCommand {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        match self {
            Self::Check { data } => {
                let report = upkeep::inspect(&data.paths().store())?;
                println!("{} keys at revision {}: every checksum matches", report.keys, report.revision);
                if report.torn_bytes > 0 {
                    eprintln!(
                        "{} bytes at the end are no whole batch: a write that was cut off, unless the disk lost something. The next start keeps them aside in {}",
                        report.torn_bytes,
                        data.paths().store().display()
                    );
                    return Ok(ExitCode::from(TORN));
                }
            }
            Self::Repair { data } => match upkeep::repair(&data.paths().store()) {
                Ok(None) => println!("nothing is damaged"),
                Ok(Some(upkeep::Repaired { log, offset, kept })) => {
                    println!(
                        "{} was cut off at byte {offset}; it is kept as it was in {}",
                        log.display(),
                        kept.display()
                    );
                }
                Err(UpkeepError::Read(OpenError::Held { .. })) => return Err(RUNNING.into()),
                Err(error) => return Err(error.into()),
            },
            Self::Compact { data } => {
                let path = data.paths().store();
                let before = upkeep::inspect(&path)?;
                let store = match Store::open(&path, LogOptions::default(), HistoryLimits::default()) {
                    Err(OpenError::Held { .. }) => {
                        return Err(
                            "the cluster is running and compacts its store by itself; stop it first".into()
                        );
                    }
                    other => other?,
                };
                store.checkpoint().await?;
                drop(store);
                let after = upkeep::inspect(&path)?;
                let size = |r: &upkeep::Report| r.checkpoint_bytes + r.log_bytes;
                println!("{} bytes before, {} bytes now", size(&before), size(&after));
            }
            Self::Stats { data } => {
                let report = upkeep::inspect(&data.paths().store())?;
                println!("revision    {}", report.revision);
                println!("keys        {}", report.keys);
                println!("leases      {}", report.leases);
                println!("live bytes  {}", report.live_bytes);
                println!("checkpoint  {} bytes", report.checkpoint_bytes);
                println!("log         {} bytes in {} files", report.log_bytes, report.logs);
                println!();
                println!("{:>9}  {:>12}  prefix", "keys", "bytes");
                for (prefix, (keys, bytes)) in report.by_prefix {
                    println!("{keys:>9}  {bytes:>12}  {prefix}");
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl SnapshotCommand {
    pub fn run(self) -> Result<ExitCode, BoxError> {
        match self {
            Self::Save { data, file } => {
                let paths = data.paths();
                let file = match file {
                    Some(file) => file,
                    None => {
                        std::fs::create_dir_all(paths.snapshots())?;
                        let report = upkeep::inspect(&paths.store())?;
                        paths.snapshots().join(format!("{:012}.snapshot", report.revision.0))
                    }
                };
                println!("saved {}", line(&upkeep::save(&paths.store(), &file)?));
                Ok(ExitCode::SUCCESS)
            }
            Self::Restore { data, file, replace, skip_revisions } => {
                let store = data.paths().store();
                if replace && store.exists() {
                    return restore_in_place_of(&store, &file, skip_revisions);
                }
                let restored =
                    upkeep::restore(&file, &store, skip_revisions).map_err(|error| match error {
                        UpkeepError::Exists(path) => {
                            format!("{} holds a store; give --replace to move it away", path.display()).into()
                        }
                        UpkeepError::Read(OpenError::Held { .. }) => RUNNING.into(),
                        other => BoxError::from(other),
                    })?;
                println!("restored {}", line(&restored));
                Ok(ExitCode::SUCCESS)
            }
            Self::List { data } => {
                let Ok(entries) = std::fs::read_dir(data.paths().snapshots()) else {
                    return Ok(ExitCode::SUCCESS);
                };
                let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
                files.retain(|p| p.extension().is_some_and(|e| e == "snapshot"));
                files.sort();
                let mut code = ExitCode::SUCCESS;
                for file in files {
                    match upkeep::describe(&file) {
                        Ok(info) => println!("{}", line(&info)),
                        Err(error) => {
                            println!("{}: {error}", file.display());
                            code = ExitCode::FAILURE;
                        }
                    }
                }
                Ok(code)
            }
        }
    }
}

const RUNNING: &str = "the cluster is running; stop it first";

/// Makes the new store beside the old one and lets them change places at once: at no moment is there none.
fn restore_in_place_of(store: &Path, file: &Path, skip_revisions: u64) -> Result<ExitCode, BoxError> {
    // Held until the end, so that nobody begins to use files that are about to be moved.
    let held = match Store::open(store, LogOptions::default(), HistoryLimits::default()) {
        Ok(held) => Some(held),
        Err(OpenError::Held { .. }) => return Err(RUNNING.into()),
        Err(error @ OpenError::Io { .. }) => return Err(error.into()),
        // Damage is the best of reasons to replace it.
        Err(OpenError::Corrupt(_)) => None,
    };
    let aside = (1..u32::MAX).map(|n| store.with_extension(format!("replaced-{n}"))).find(|p| !p.exists());
    let aside = aside.ok_or("too many replaced stores")?;
    let restored = upkeep::restore(file, &aside, skip_revisions).inspect_err(|_| {
        // Nothing of value is in it; failing to remove it only takes room.
        let _ = std::fs::remove_dir_all(&aside);
    })?;
    renameat2(AT_FDCWD, &aside, AT_FDCWD, store, RenameFlags::RENAME_EXCHANGE)?;
    if let Some(parent) = store.parent() {
        std::fs::File::open(parent)?.sync_all()?;
    }
    drop(held);
    println!("the old store is in {}", aside.display());
    println!("restored {}", line(&SnapshotInfo { path: file.to_owned(), ..restored }));
    Ok(ExitCode::SUCCESS)
}

fn line(info: &SnapshotInfo) -> String {
    let SnapshotInfo { path, revision, keys, bytes } = info;
    format!("{}: revision {revision}, {keys} keys, {bytes} bytes", path.display())
}
