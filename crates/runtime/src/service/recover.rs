//! Recovers from an earlier runtime: adopts live sandboxes, cleans up after dead ones, and removes
//! unfinished ones.

use std::path::Path;
use std::sync::Arc;

use ferrite_cri::v1::{ContainerConfig, PodSandboxConfig};

use super::Inner;
use super::client::blocking;
use super::container::ended_by_failure;
use super::records::{self, ContainerRecord, SandboxRecord};
use super::sandbox::{end_supervisor, remove_tree};
use super::state::{Container, Sandbox, Status};
use crate::supervisor::protocol::{EXIT_RECORD, Exit};
use crate::supervisor::sandbox::{IDENTITY, alive};
use crate::sys;

pub(super) fn read_exit(bundle: &Path) -> Option<Exit> {
    serde_json::from_slice(&std::fs::read(bundle.join(EXIT_RECORD)).ok()?).ok()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

impl Inner {
    pub(super) async fn recover(self: &Arc<Self>) {
        let inner = self.clone();
        let found = blocking(move || Ok(inner.read_directories())).await.unwrap_or_default();
        let mut waiting = Vec::new();
        for (sandbox, containers, finished) in found {
            if !finished {
                if let Err(error) = self.clear_sandbox(&sandbox).await {
                    tracing::warn!(sandbox = %sandbox.id, %error, "an unfinished sandbox could not be cleared");
                }
                continue;
            }
            {
                let mut tables = self.index.write();
                tables.sandboxes.insert(sandbox.id.clone(), sandbox.clone());
                for container in containers {
                    tables.containers.insert(container.id.clone(), container);
                }
            }
            let identity = std::fs::read_to_string(sandbox.run_dir.join(IDENTITY)).unwrap_or_default();
            if alive(&identity).is_some() {
                waiting.push((self.listen(&sandbox), sandbox));
            } else {
                self.bury_sandbox(&sandbox).await;
            }
        }
        for (synced, sandbox) in waiting {
            if synced.await.is_err() {
                // It died before it could report its containers.
                self.bury_sandbox(&sandbox).await;
            }
        }
    }

    /// A sandbox whose supervisor did not survive (a reboot, a crash).
    async fn bury_sandbox(&self, sandbox: &Arc<Sandbox>) {
        self.assume_ran(sandbox);
        self.lost(sandbox).await;
        if let Err(error) = self.release_remains(sandbox).await {
            tracing::warn!(sandbox = %sandbox.id, %error, "remains of a sandbox could not be cleared");
        }
    }

    /// A container that is neither known to have ended nor still there may have run: treat it so.
    fn assume_ran(&self, sandbox: &Sandbox) {
        for container in self.index.containers_of(&sandbox.id) {
            container.status.send_if_modified(|status| {
                let unknown = *status == Status::Created;
                if unknown {
                    *status = Status::Running { pid: 0, started_at: container.record().created_at };
                }
                unknown
            });
        }
    }

    async fn release_remains(&self, sandbox: &Sandbox) -> std::io::Result<()> {
        let run_dir = sandbox.run_dir.clone();
        blocking(move || end_supervisor(&run_dir)).await
    }

    fn read_directories(&self) -> Vec<(Arc<Sandbox>, Vec<Arc<Container>>, bool)> {
        let states = self.config.root.join(records::SANDBOXES);
        let runs = self.config.run.join(records::SANDBOXES);
        let mut ids = names(&states);
        // A run directory alone is the trace of a removal that was interrupted.
        ids.extend(names(&runs));
        ids.sort();
        ids.dedup();
        ids.into_iter()
            .map(|id| {
                let (state_dir, run_dir) = (states.join(&id), runs.join(&id));
                let read = records::read::<PodSandboxConfig, SandboxRecord>(&state_dir);
                let finished = read.is_some();
                let (config, record) = read.unwrap_or_else(|| {
                    let record = SandboxRecord {
                        created_at: sys::now(),
                        ready: false,
                        ips: Vec::new(),
                        runtime_handler: String::new(),
                    };
                    (PodSandboxConfig::default(), record)
                });
                let containers = if finished { self.read_containers(&id, &state_dir) } else { Vec::new() };
                let sandbox = Sandbox::new(id, config, state_dir, run_dir, record);
                (Arc::new(sandbox), containers, finished)
            })
            .collect()
    }

    fn read_containers(&self, sandbox: &str, state_dir: &Path) -> Vec<Arc<Container>> {
        let directory = state_dir.join(records::CONTAINERS);
        let mut found = Vec::new();
        for id in names(&directory) {
            let bundle = directory.join(&id);
            let Some((config, record)) = records::read::<ContainerConfig, ContainerRecord>(&bundle) else {
                if let Err(error) = remove_tree(&bundle) {
                    tracing::warn!(container = %id, %error, "an unfinished container could not be cleared");
                }
                continue;
            };
            let status = match (read_exit(&bundle), &record.start_failure) {
                (Some(exit), _) => Status::Exited(exit.into()),
                (None, Some(failure)) => Status::Exited(ended_by_failure(failure.clone())),
                (None, None) => Status::Created,
            };
            found.push(Arc::new(Container::new(id, sandbox.to_owned(), config, bundle, record, status)));
        }
        found
    }
}
