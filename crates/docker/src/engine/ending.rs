//! Actions after a container's end.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use ferrite_runtime::standalone::{Task, process_alive, process_identity};

use super::start::Shared;
use super::{Engine, EngineError, Result};
use crate::proxy;
use crate::record::{Container, LOST, State, Status};
use crate::restart::{self, Ended};
use crate::units;

impl Engine {
    /// Records that a container has ended, if it has: clears its traces, and decides what comes next. The
    /// first process that sees the end does it; for others nothing is left to do.
    pub(super) async fn settle(&self, id: &str) -> Result<Option<State>> {
        let (lock, mut view) = match self.locked(id).await {
            Ok(found) => found,
            Err(EngineError::NoSuchContainer(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        let ended = view.state.status.runs() && !view.state.task.as_ref().is_some_and(Task::runs);
        if !ended {
            return Ok(Some(view.state));
        }
        let exit = view.state.task.as_ref().and_then(Task::exit);
        let ran_ms =
            exit.as_ref().map_or(0, |exit| (exit.finished_at - exit.started_at).max(0) as u64 / 1_000_000);
        self.clear(&view.container, &mut view.state).await?;
        let state = &mut view.state;
        match exit {
            Some(exit) => state.note_exit(exit.code, exit.finished_at, exit.oom_killed),
            None => state.note_exit(LOST, units::now(), false),
        }
        if state.oom_killed {
            self.note(&view.container, "oom", &[]);
        }
        self.note(&view.container, "die", &[("exitCode", state.exit_code.to_string())]);
        let ended = Ended {
            code: state.exit_code,
            by_hand: state.by_hand,
            restarts: state.restart_count,
            last_delay_ms: state.restart_delay_ms,
            ran_ms,
        };
        match restart::next_start(view.container.host.restart, ended) {
            Some(delay) => {
                state.status = Status::Restarting;
                state.restart_delay_ms = delay;
                state.restart_at = units::now() + delay as i64 * 1_000_000;
            }
            None => state.status = Status::Exited,
        }
        self.save(id, state)?;
        if view.container.host.auto_remove {
            self.remove_locked(lock, &view.container, true)?;
            return Ok(None);
        }
        Ok(Some(view.state))
    }

    /// Removes an ended container's traces from the machine.
    async fn clear(&self, container: &Container, state: &mut State) -> Result<()> {
        if let Some(proxy) = state.proxy.take() {
            proxy::end(&proxy);
        }
        // Only whether there is one to leave alone matters now.
        let joined = container.host.network.starts_with("container:");
        let network = joined.then(|| PathBuf::from("/proc/self/ns/net"));
        let runtime = self.runtime(container, Shared { network, ..Default::default() }).await?;
        let cleared = runtime.stop_everything().await;
        runtime.close().await;
        cleared?;
        let _ = ferrite_hostfs::remove_tree(&self.paths.container_run(&container.id));
        state.task = None;
        state.ports.clear();
        Ok(())
    }

    /// A container's supervisor runs this when the container has ended: updates its record, and starts it
    /// again if its policy says so.
    pub async fn ended(&self, id: &str) -> Result<()> {
        let followed = self.follow_end(id).await;
        // A process that removed the container may have found this process still in its supervisor's group.
        self.clear_groups();
        followed
    }

    async fn follow_end(&self, id: &str) -> Result<()> {
        loop {
            if self.settle(id).await?.is_none_or(|state| state.status != Status::Restarting) {
                return Ok(());
            }
            let Some(due) = self.wait_for_restart(id).await? else { return Ok(()) };
            let (lock, view) = match self.locked(id).await {
                Ok(found) => found,
                Err(EngineError::NoSuchContainer(_)) => return Ok(()),
                Err(error) => return Err(error),
            };
            // Meanwhile somebody may have stopped it, or started it by hand.
            if view.state.status != Status::Restarting || view.state.restart_at != due {
                return Ok(());
            }
            let (policy, restarts) = (view.container.host.restart, view.state.restart_count + 1);
            if self.start_locked(&lock, view, None, restarts).await.is_ok() {
                return Ok(());
            }
            let mut view = self.view(id)?;
            let ended = Ended {
                code: view.state.exit_code,
                by_hand: false,
                restarts,
                last_delay_ms: view.state.restart_delay_ms,
                ran_ms: 0,
            };
            let Some(delay) = restart::next_start(policy, ended) else { return Ok(()) };
            view.state.status = Status::Restarting;
            view.state.restart_delay_ms = delay;
            view.state.restart_at = units::now() + delay as i64 * 1_000_000;
            self.save(id, &view.state)?;
        }
    }

    /// Sleeps until a restarting container is to be started, and answers when that was; `None` when somebody
    /// else does, or nobody has to.
    async fn wait_for_restart(&self, id: &str) -> Result<Option<i64>> {
        let own = i32::try_from(std::process::id()).ok().and_then(process_identity);
        let due = {
            let (_lock, mut view) = match self.locked(id).await {
                Ok(found) => found,
                Err(EngineError::NoSuchContainer(_)) => return Ok(None),
                Err(error) => return Err(error),
            };
            let state = &mut view.state;
            let other = state.waiter.as_deref().filter(|waiter| Some(*waiter) != own.as_deref());
            if state.status != Status::Restarting || other.is_some_and(|other| process_alive(other).is_some())
            {
                return Ok(None);
            }
            state.waiter = own;
            self.save(id, state)?;
            state.restart_at
        };
        let wait = Duration::from_nanos(u64::try_from(due - units::now()).unwrap_or(0));
        tokio::time::sleep(wait).await;
        Ok(Some(due))
    }

    /// Starts a new waiting process for containers that are to be started again and have lost theirs: a
    /// process that waits can be killed. A failure is reported and not returned.
    pub fn mend_restarts(&self) {
        for view in self.list().unwrap_or_default() {
            let waits = view.state.waiter.as_deref().is_some_and(|waiter| process_alive(waiter).is_some());
            if view.state.status == Status::Restarting
                && !waits
                && let Err(error) = self.spawn_waiter(&view.container.id)
            {
                tracing::warn!(container = view.container.name, %error, "nobody starts it again");
            }
        }
    }

    fn spawn_waiter(&self, id: &str) -> std::io::Result<()> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ferrite").args(["docker", "--data-dir"]).arg(self.paths.data_dir());
        command.args([crate::cli::ENDED, id]);
        command.env_clear().current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: one system call between fork and exec; a terminal's hangup is not for it.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                Ok(())
            });
        }
        command.spawn().map(drop)
    }
}
