//! The drivers that are registered on this node.

use super::CsiError;
use ferrite_csi::Driver;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::watch;

/// A pod waits so long for a driver that is not registered before it says so; it goes on waiting afterwards.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Drivers {
    registered: watch::Sender<BTreeMap<String, Driver>>,
}

impl Default for Drivers {
    fn default() -> Self {
        Self { registered: watch::channel(BTreeMap::new()).0 }
    }
}

impl Drivers {
    pub(super) fn set(&self, name: &str, driver: Driver) {
        self.registered.send_modify(|all| {
            all.insert(name.to_owned(), driver);
        });
    }

    pub(super) fn remove(&self, name: &str) {
        self.registered.send_modify(|all| {
            all.remove(name);
        });
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.registered.borrow().contains_key(name)
    }

    pub(super) fn get(&self, name: &str) -> Option<Driver> {
        self.registered.borrow().get(name).cloned()
    }

    /// The driver, as soon as it is registered.
    pub(super) async fn wait(&self, name: &str) -> Result<Driver, CsiError> {
        let mut registered = self.registered.subscribe();
        let found = async {
            let all = registered.wait_for(|all| all.contains_key(name)).await.ok()?;
            all.get(name).cloned()
        };
        let found = tokio::time::timeout(PATIENCE, found).await.ok().flatten();
        found.ok_or_else(|| CsiError::NotRegistered(name.to_owned()))
    }

    /// Changes when a driver comes or goes.
    pub(super) fn changes(&self) -> watch::Receiver<BTreeMap<String, Driver>> {
        self.registered.subscribe()
    }
}
