//! `ferrite store` and `ferrite snapshot`: looking after the embedded store.

use crate::apiserver::BoxError;
use crate::cli::DataDir;
use clap::Subcommand;
use ferrite_store::upkeep::{self, SnapshotInfo, UpkeepError};
use ferrite_store::{HistoryLimits, LogOptions, OpenError, Store};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Read everything and verify every checksum. Works while the cluster runs.
    Check {
        #[command(flatten)]
        data: DataDir,
    },
    /// Write one compact checkpoint and drop the logs. A running cluster does this by itself.
    Compact {
        #[command(flatten)]
        data: DataDir,
    },
    /// Show how many keys there are, of which kinds, and what they take on disk.
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
        /// How far to move the revision on, so that clients that have seen a later state list anew.
        #[arg(long, default_value_t = 1_000_000, value_name = "REVISIONS")]
        skip_revisions: u64,
    },
    /// List saved files and verify them.
    List {
        #[command(flatten)]
        data: DataDir,
    },
}

impl StoreCommand {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        match self {
            Self::Check { data } => {
                let report = upkeep::inspect(&data.paths().store())?;
                println!("{} keys at revision {}: every checksum matches", report.keys, report.revision);
                if report.torn_bytes > 0 {
                    println!("{} bytes at the end were never acknowledged", report.torn_bytes);
                }
            }
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
                // Nothing is moved away for a file that turns out to be damaged.
                upkeep::describe(&file)?;
                if replace && store.exists() {
                    drop(
                        Store::open(&store, LogOptions::default(), HistoryLimits::default())
                            .or_else(still_held)?,
                    );
                    let aside =
                        (1..).map(|n| store.with_extension(format!("replaced-{n}"))).find(|p| !p.exists());
                    let aside = aside.unwrap_or_else(|| store.with_extension("replaced"));
                    std::fs::rename(&store, &aside)?;
                    println!("the old store is in {}", aside.display());
                }
                match upkeep::restore(&file, &store, skip_revisions) {
                    Err(UpkeepError::Exists(path)) => {
                        Err(format!("{} holds a store; give --replace to move it away", path.display())
                            .into())
                    }
                    other => {
                        println!("restored {}", line(&other?));
                        Ok(ExitCode::SUCCESS)
                    }
                }
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

/// A damaged store may be replaced; one that is in use may not.
fn still_held(error: OpenError) -> Result<Store, BoxError> {
    match error {
        OpenError::Held { .. } => Err("the cluster is running; stop it first".into()),
        OpenError::Io { .. } => Err(error.into()),
        OpenError::Corrupt(_) => Ok(Store::memory()),
    }
}

fn line(info: &SnapshotInfo) -> String {
    let SnapshotInfo { path, revision, keys, bytes } = info;
    format!("{}: revision {revision}, {keys} keys, {bytes} bytes", path.display())
}
