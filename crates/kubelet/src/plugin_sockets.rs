//! Plugins that register themselves. The kubelet asks a socket in `<kubelet root>/plugins_registry` for its
//! plugin's type, and reports to it if it was accepted. A handler for each type of plugin does the rest.
//!
//! Every socket has a task of its own: one that hangs or lies holds up nobody else. A socket that is made
//! anew is a plugin that restarted, and is registered again; one that is removed is a plugin that is gone.

use async_trait::async_trait;
use ferrite_client::{Backoff, Scope};
use ferrite_component::Watcher;
use ferrite_csi::registration::PluginInfo;
use ferrite_csi::{CallError, Registrar};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// More sockets than this are left alone.
const MOST_SOCKETS: usize = 256;

#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistrationError {
    #[error("{0}")]
    Refused(String),
    #[error("no handler registered for plugin type: {0:?}")]
    NoHandler(String),
    #[error(transparent)]
    Call(#[from] CallError),
}

/// The kubelet's handling of plugins of one type.
#[async_trait]
pub(crate) trait PluginHandler: Send + Sync {
    fn plugin_type(&self) -> &'static str;

    /// Takes the plugin, which serves at `endpoint`. The same plugin may come again.
    async fn register(&self, info: &PluginInfo, endpoint: &Path) -> Result<(), RegistrationError>;

    async fn deregister(&self, name: &str);
}

/// Which file a socket is: a plugin that restarts makes a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    inode: u64,
    changed: (i64, i64),
}

/// A socket that is being registered, or is.
struct Followed {
    identity: Identity,
    scope: Scope,
    registered: Registered,
}

/// The plugin that a socket registered.
type Registered = Arc<Mutex<Option<(usize, String)>>>;

/// Follows the sockets in `dir` until the scope ends.
pub(crate) async fn run(dir: PathBuf, handlers: Arc<[Arc<dyn PluginHandler>]>, scope: Scope) {
    let mut followed: BTreeMap<PathBuf, Followed> = BTreeMap::new();
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60), 0.1);
    loop {
        let error = match follow(&dir, &handlers, &scope, &mut followed).await {
            Ok(()) => io::Error::other("the directory cannot be watched any longer"),
            Err(e) => e,
        };
        tracing::warn!(path = %dir.display(), %error, "could not follow the registration of plugins; will try again");
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

async fn follow(
    dir: &Path,
    handlers: &Arc<[Arc<dyn PluginHandler>]>,
    scope: &Scope,
    followed: &mut BTreeMap<PathBuf, Followed>,
) -> io::Result<()> {
    let path = dir.to_owned();
    let mut watcher = {
        let made = tokio::task::spawn_blocking(move || ferrite_hostfs::private_dir(&path)).await;
        made.unwrap_or_else(|e| Err(io::Error::other(e)))?;
        Watcher::directory(dir)?
    };
    loop {
        let path = dir.to_owned();
        let found = tokio::task::spawn_blocking(move || sockets(&path)).await;
        let found = found.unwrap_or_else(|e| Err(io::Error::other(e)))?;
        let gone: Vec<PathBuf> = followed
            .iter()
            .filter(|(path, one)| found.get(*path) != Some(&one.identity))
            .map(|(path, _)| path.clone())
            .collect();
        for path in gone {
            let Some(one) = followed.remove(&path) else { continue };
            one.scope.cancel();
            let registered = one.registered.lock().unwrap_or_else(PoisonError::into_inner).take();
            // A plugin that restarted registers again; until then its socket answers nobody.
            if let Some((handler, name)) = registered.filter(|_| !found.contains_key(&path)) {
                handlers[handler].deregister(&name).await;
            }
        }
        for (path, identity) in found {
            followed.entry(path.clone()).or_insert_with(|| {
                let scope = scope.child();
                let registered = Registered::default();
                scope.spawn(register(path, handlers.clone(), registered.clone()));
                Followed { identity, scope, registered }
            });
        }
        watcher.changed().await?;
    }
}

/// The sockets in the directory. Links, other files and hidden names are ignored, as upstream.
fn sockets(dir: &Path) -> io::Result<BTreeMap<PathBuf, Identity>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir)?.take(MOST_SOCKETS) {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        let metadata = match entry.path().symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        if metadata.file_type().is_socket() {
            let changed = (metadata.ctime(), metadata.ctime_nsec());
            found.insert(entry.path(), Identity { inode: metadata.ino(), changed });
        }
    }
    Ok(found)
}

/// Registers one plugin; tries again until that succeeds.
async fn register(path: PathBuf, handlers: Arc<[Arc<dyn PluginHandler>]>, registered: Registered) {
    let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(60), 0.1);
    loop {
        match attempt(&path, &handlers).await {
            Ok(plugin) => {
                *registered.lock().unwrap_or_else(PoisonError::into_inner) = Some(plugin);
                return;
            }
            Err(error) => {
                tracing::warn!(socket = %path.display(), %error, "could not register a plugin; will try again");
                tokio::time::sleep(backoff.next_delay()).await;
            }
        }
    }
}

async fn attempt(
    path: &Path,
    handlers: &[Arc<dyn PluginHandler>],
) -> Result<(usize, String), RegistrationError> {
    let registrar = Registrar::new(path);
    let info = registrar.info().await?;
    let handler = handlers.iter().position(|handler| handler.plugin_type() == info.r#type);
    let taken = match handler {
        None => Err(RegistrationError::NoHandler(info.r#type.clone())),
        Some(handler) => {
            let endpoint = match info.endpoint.as_str() {
                "" => path.to_owned(),
                endpoint => endpoint.strip_prefix("unix://").unwrap_or(endpoint).into(),
            };
            handlers[handler].register(&info, &endpoint).await.map(|()| handler)
        }
    };
    let told = registrar.notify(taken.as_ref().err().map(ToString::to_string)).await;
    let handler = taken?;
    if let Err(error) = told {
        // It is registered all the same, as upstream.
        tracing::warn!(plugin = info.name, %error, "a plugin could not be told that it is registered");
    }
    Ok((handler, info.name))
}
