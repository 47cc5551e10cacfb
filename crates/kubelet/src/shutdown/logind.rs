//! Shutdowns as logind tells of them.

use super::{ShutdownDelay, ShutdownSource};
use async_trait::async_trait;
use ferrite_systemd::{CallError, Logind};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::unix::AsyncFd;

/// Where logind reads changes to its configuration, as upstream's kubelet writes them.
const CONFIGURATION: &str = "/etc/systemd/logind.conf.d";
const FILE: &str = "99-kubelet.conf";
/// Looks after a change until logind has read it, each after twice the time.
const LOOKS: u32 = 5;

/// A connection to logind, made anew by each [`ShutdownSource::delay`].
pub(crate) struct LogindSource {
    configuration: PathBuf,
    following: Option<Following>,
    /// The shutdown that was under way when the connection was made was reported.
    reported: bool,
}

struct Following {
    logind: Option<Logind>,
    readable: AsyncFd<OwnedFd>,
}

impl Default for LogindSource {
    fn default() -> Self {
        Self { configuration: CONFIGURATION.into(), following: None, reported: false }
    }
}

/// Tells logind to wait for as long as all pods may need. True if it allows that already.
fn allow(logind: &mut Logind, configuration: &Path, most: Duration) -> Result<bool, CallError> {
    if logind.inhibit_delay_max()? >= most {
        return Ok(true);
    }
    std::fs::create_dir_all(configuration)?;
    let path = configuration.join(FILE);
    let text = format!("# Kubelet logind override\n[Login]\nInhibitDelayMaxSec={}\n", most.as_secs());
    std::fs::write(&path, text)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644))?;
    logind.reload()?;
    Ok(false)
}

/// Waits until logind has read its configuration: nothing tells of that.
async fn allowed(mut logind: Logind, most: Duration) -> io::Result<Logind> {
    for look in 0..LOOKS {
        tokio::time::sleep(Duration::from_millis(100) * 2u32.pow(look)).await;
        let (asked, now) = blocking(move || {
            let now = logind.inhibit_delay_max()?;
            Ok((logind, now))
        })
        .await?;
        if now >= most {
            return Ok(asked);
        }
        logind = asked;
    }
    let problem = format!("logind does not wait for {}s, as {CONFIGURATION}/{FILE} says", most.as_secs());
    Err(io::Error::other(problem))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CallError> + Send + 'static,
) -> io::Result<T> {
    Ok(tokio::task::spawn_blocking(work).await.map_err(io::Error::other)??)
}

fn has_bytes(descriptor: &OwnedFd) -> io::Result<bool> {
    let mut polled = [PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)];
    Ok(nix::poll::poll(&mut polled, PollTimeout::ZERO)? > 0)
}

#[async_trait]
impl ShutdownSource for LogindSource {
    async fn delay(&mut self, most: Duration) -> io::Result<ShutdownDelay> {
        self.following = None;
        let configuration = self.configuration.clone();
        let (mut logind, is_allowed) = blocking(move || {
            let mut logind = Logind::connect()?;
            let is_allowed = allow(&mut logind, &configuration, most)?;
            Ok((logind, is_allowed))
        })
        .await?;
        if !is_allowed {
            logind = allowed(logind, most).await?;
        }
        let (logind, lock) = blocking(move || {
            let lock = logind.inhibit("kubelet", "Kubelet needs time to handle node shutdown")?;
            Ok((logind, lock))
        })
        .await?;
        let descriptor = logind.descriptor().try_clone_to_owned()?;
        // SAFETY: the descriptor is this value's own and stays open for as long as it is registered.
        let readable = unsafe { AsyncFd::register(descriptor)? };
        self.following = Some(Following { logind: Some(logind), readable });
        Ok(Box::new(lock))
    }

    async fn next(&mut self) -> io::Result<bool> {
        let not_connected = || io::Error::from(io::ErrorKind::NotConnected);
        let following = self.following.as_mut().ok_or_else(not_connected)?;
        if !self.reported {
            // The kubelet may have started in the midst of it.
            let mut logind = following.logind.take().ok_or_else(not_connected)?;
            let (logind, preparing) = blocking(move || {
                let preparing = logind.is_preparing()?;
                Ok((logind, preparing))
            })
            .await?;
            following.logind = Some(logind);
            self.reported = true;
            if preparing {
                return Ok(true);
            }
        }
        loop {
            let logind = following.logind.as_ref().ok_or_else(not_connected)?;
            if !logind.has_signal() && !has_bytes(following.readable.get_ref())? {
                let mut ready = following.readable.readable().await?;
                if !has_bytes(following.readable.get_ref())? {
                    ready.clear_ready();
                    continue;
                }
            }
            let mut logind = following.logind.take().ok_or_else(not_connected)?;
            let (logind, said) = blocking(move || {
                let said = logind.next_event()?;
                Ok((logind, said))
            })
            .await?;
            following.logind = Some(logind);
            if let Some(shutting_down) = said {
                return Ok(shutting_down);
            }
        }
    }
}
