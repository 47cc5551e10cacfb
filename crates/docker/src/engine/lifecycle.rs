//! Stopping, killing, pausing, renaming, waiting and removing.

use std::fs;
use std::time::Duration;

use ferrite_runtime::standalone::{Ending, Exit, Task, signal_from_name};

use super::{Engine, EngineError, Result, View};
use crate::names;
use crate::record::{Container, LOST, Lock, Status};

/// Seconds between SIGTERM and SIGKILL by default.
const GRACE: u64 = 10;
/// Longest wait for the kernel to end a killed container.
const KILL_PATIENCE: Duration = Duration::from_secs(30);

impl Engine {
    /// The running container's task.
    pub fn task(&self, name: &str) -> Result<(View, Task)> {
        let view = self.find(name)?;
        let task = view.state.task.clone().filter(|_| view.state.status.runs());
        match task {
            Some(task) => Ok((view, task)),
            None => Err(EngineError::Conflict(format!("Container {} is not running", view.container.id))),
        }
    }

    /// Marks a container as to be ended; answers its task if it runs.
    async fn will_end(&self, id: &str) -> Result<(View, Option<Task>)> {
        let (_lock, mut view) = self.locked(id).await?;
        if view.state.status == Status::Restarting {
            view.state.status = Status::Exited;
        }
        view.state.by_hand = true;
        self.save(id, &view.state)?;
        let task = view.state.task.clone().filter(Task::runs);
        if view.state.status == Status::Paused
            && let Some(task) = &task
        {
            // A frozen process does not even die.
            task.freeze(false).map_err(EngineError::io("unpause container"))?;
        }
        Ok((view, task))
    }

    /// Asks a container to end, and kills it after `seconds` seconds (negative: waits for ever).
    pub async fn stop(&self, name: &str, seconds: Option<i64>) -> Result<()> {
        let id = self.find(name)?.container.id;
        let (view, task) = self.will_end(&id).await?;
        if let Some(task) = task {
            let config = &view.container.config;
            let signal = signal_from_name(&config.stop_signal).unwrap_or(libc::SIGTERM);
            let default = i64::try_from(config.stop_timeout.unwrap_or(GRACE)).unwrap_or(i64::MAX);
            let seconds = seconds.unwrap_or(default);
            let _ = task.signal(signal).await;
            let ended = match u64::try_from(seconds) {
                Ok(seconds) => tokio::time::timeout(Duration::from_secs(seconds), task.wait()).await.is_ok(),
                Err(_) => task.wait().await.is_some(),
            };
            if !ended {
                self.end(&id, &task).await?;
            }
        }
        self.settle(&id).await?;
        self.note(&view.container, "stop", &[]);
        Ok(())
    }

    async fn end(&self, id: &str, task: &Task) -> Result<()> {
        let _ = task.signal(libc::SIGKILL).await;
        if tokio::time::timeout(KILL_PATIENCE, task.wait()).await.is_err() {
            return Err(EngineError::Internal(format!("container {id} does not end after SIGKILL")));
        }
        Ok(())
    }

    /// Sends a signal; SIGKILL ends the container for good.
    pub async fn kill(&self, name: &str, signal: &str) -> Result<()> {
        let number = signal_from_name(signal)
            .ok_or_else(|| EngineError::Invalid(format!("Invalid signal: {signal}")))?;
        let view = self.find(name)?;
        let id = view.container.id.clone();
        let not_running =
            || EngineError::Conflict(format!("Cannot kill container: {name}: Container {id} is not running"));
        let (_, task) = self.task(&id).map_err(|_| not_running())?;
        if number == libc::SIGKILL {
            self.will_end(&id).await?;
            self.end(&id, &task).await?;
            self.settle(&id).await?;
        } else {
            task.signal(number).await?;
        }
        self.note(&view.container, "kill", &[("signal", number.to_string())]);
        Ok(())
    }

    pub async fn restart(&self, name: &str, seconds: Option<i64>) -> Result<()> {
        let view = self.find(name)?;
        self.stop(&view.container.id, seconds).await?;
        self.start(&view.container.id, None).await?;
        self.note(&view.container, "restart", &[]);
        Ok(())
    }

    /// Halts or resumes every process of a container.
    pub async fn pause(&self, name: &str, paused: bool) -> Result<()> {
        let id = self.find(name)?.container.id;
        let (_lock, mut view) = self.locked(&id).await?;
        let task = view.state.task.clone().filter(Task::runs);
        let Some(task) = task else {
            return Err(EngineError::Conflict(format!("Container {id} is not running")));
        };
        match (view.state.status, paused) {
            (Status::Paused, true) => {
                return Err(EngineError::Conflict(format!("Container {id} is already paused")));
            }
            (Status::Running, false) => {
                return Err(EngineError::Conflict(format!("Container {id} is not paused")));
            }
            _ => {}
        }
        task.freeze(paused).map_err(EngineError::io("freeze container"))?;
        view.state.status = if paused { Status::Paused } else { Status::Running };
        self.save(&id, &view.state)?;
        self.note(&view.container, if paused { "pause" } else { "unpause" }, &[]);
        Ok(())
    }

    pub async fn rename(&self, name: &str, new: &str) -> Result<()> {
        if !names::is_valid(new) {
            return Err(EngineError::Invalid(format!(
                "Error when allocating new name: Invalid container name ({new}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are \
                 allowed"
            )));
        }
        let _registry = self.registry_lock().await?;
        let id = self.find(name)?.container.id;
        if let Some(view) = self.list()?.into_iter().find(|view| view.container.name == new) {
            return Err(EngineError::Conflict(format!(
                "Error when allocating new name: Conflict. The container name \"/{new}\" is already in use by \
                 container \"{}\". You have to remove (or rename) that container to be able to reuse that name.",
                view.container.id
            )));
        }
        let (_lock, mut view) = self.locked(&id).await?;
        let old = std::mem::replace(&mut view.container.name, new.to_owned());
        view.container.write(&self.directory(&id)).map_err(EngineError::io("record container"))?;
        let turn = self.turn().await?;
        let networks: Vec<_> = self.endpoints_of(&id)?.into_iter().map(|(network, _)| network).collect();
        self.refresh_hosts(&turn, &networks)?;
        self.note(&view.container, "rename", &[("oldName", format!("/{old}"))]);
        Ok(())
    }

    /// Waits until a container does not run; answers its exit code.
    pub async fn wait(&self, name: &str) -> Result<i32> {
        let id = self.find(name)?.container.id;
        // While it is locked nobody clears away how it ended.
        let (lock, view) = match self.locked(&id).await {
            Ok(locked) => locked,
            // Gone since: it ended without anybody having asked for its code in time.
            Err(EngineError::NoSuchContainer(_)) => return Ok(0),
            Err(error) => return Err(error),
        };
        match (view.state.status, view.state.task) {
            (Status::Running | Status::Paused, Some(task)) => {
                let ending = task.ending().await;
                drop(lock);
                Ok(ending.wait().await.map_or(LOST, |exit| exit.code))
            }
            _ => Ok(view.state.exit_code),
        }
    }

    /// Waits for the end of this very run and until everything that follows from it is done. Returns how
    /// it ended.
    pub async fn wait_settled(&self, id: &str, ending: Ending) -> Result<Option<Exit>> {
        let exit = ending.wait().await;
        self.settle(id).await?;
        Ok(exit)
    }

    /// Removes a container; with `force` also one that runs, with `volumes` also its anonymous volumes.
    pub async fn remove(&self, name: &str, force: bool, volumes: bool) -> Result<()> {
        let id = self.find(name)?.container.id;
        self.settle(&id).await?;
        let view = match self.view(&id) {
            Err(EngineError::NoSuchContainer(_)) => return Ok(()),
            view => view?,
        };
        let status = view.state.effective().status;
        if status.runs() || status == Status::Restarting {
            if !force {
                let hint = match status {
                    Status::Paused => {
                        "Unpause and then stop the container before attempting removal or force remove"
                    }
                    _ => "Stop the container before attempting removal or force remove",
                };
                return Err(EngineError::Conflict(format!(
                    "You cannot remove a {} container {id}. {hint}",
                    status.name()
                )));
            }
            let (_, task) = self.will_end(&id).await?;
            if let Some(task) = task {
                self.end(&id, &task).await?;
            }
            self.settle(&id).await?;
        }
        match self.locked(&id).await {
            Ok((lock, view)) => self.remove_locked(lock, &view.container, volumes),
            // It removed itself.
            Err(EngineError::NoSuchContainer(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    pub(super) fn remove_locked(&self, lock: Lock, container: &Container, volumes: bool) -> Result<()> {
        let fail = || EngineError::io(format!("remove container {}", container.id));
        let doomed = self.paths.containers().join(format!("removing-{}", container.id));
        // From here on there is no such container, whatever happens to the rest.
        fs::rename(self.directory(&container.id), &doomed).map_err(fail())?;
        drop(lock);
        self.note(container, "destroy", &[]);
        ferrite_hostfs::remove_tree(&doomed).map_err(fail())?;
        let _ = ferrite_hostfs::remove_tree(&self.paths.container_run(&container.id));
        if volumes {
            for mount in container.mounts.iter().filter(|mount| mount.anonymous) {
                let _ = self.remove_volume(&mount.name);
            }
        }
        self.clear_doomed();
        self.clear_groups();
        Ok(())
    }

    /// Without containers there are no control groups.
    pub(super) fn clear_groups(&self) {
        if self.list().is_ok_and(|all| all.is_empty()) {
            ferrite_runtime::standalone::remove_empty_groups(&self.paths.cgroup());
        }
    }

    /// Finishes removals that were interrupted.
    fn clear_doomed(&self) {
        for entry in fs::read_dir(self.paths.containers()).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with("removing-")
                && let Err(error) = ferrite_hostfs::remove_tree(&entry.path())
            {
                tracing::warn!(path = %entry.path().display(), %error,
                    "a removed container's files stay; the next removal tries again. See what is mounted there with `findmnt -R`");
            }
        }
    }

    /// Starts containers that were running when the machine went down and are to run always.
    pub async fn restore(&self) -> Result<Vec<String>> {
        use crate::restart::RestartPolicy::{Always, UnlessStopped};
        let mut started = Vec::new();
        for view in self.list()? {
            let recorded = self.view(&view.container.id)?.state;
            let wanted = match view.container.host.restart {
                Always => true,
                UnlessStopped => !recorded.by_hand,
                _ => false,
            };
            if wanted && !view.state.status.runs() && recorded.started_at != 0 {
                self.settle(&view.container.id).await?;
                self.start(&view.container.id, None).await?;
                started.push(view.container.name);
            }
        }
        Ok(started)
    }
}
