//! The health of devices, as their drivers report it: a stream of lists, which a driver may end, leave silent or lie in.

use super::Claims;
use crate::pod::model::{self, PodId};
use ferrite_client::resource_claims::{self, Named};
use ferrite_devices::DraPlugin;
use ferrite_devices::dra_health::{DeviceHealth, HealthStatus};
use k8s_openapi::api::core::v1::{Pod, ResourceHealth, ResourceStatus};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::Instant;

/// The service that a driver registers beside its own if it reports health.
pub(super) const SERVICE: &str = "v1alpha1.DRAResourceHealth";
/// A report is true for so long, as upstream, unless the driver says otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Devices of one driver that are remembered.
const MOST_DEVICES: usize = 4096;
/// As upstream: longer messages are cut.
const MOST_MESSAGE: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Health {
    healthy: Option<bool>,
    message: String,
    at: Instant,
    timeout: Duration,
}

/// The last reports, by driver, then by pool and name of the device.
#[derive(Debug, Default)]
pub(super) struct HealthCache(BTreeMap<String, BTreeMap<(String, String), Health>>);

impl HealthCache {
    /// A driver's list. Returns true if a device's health differs from the last report.
    fn update(&mut self, driver: &str, devices: Vec<DeviceHealth>, now: Instant) -> bool {
        let known = self.0.entry(driver.to_owned()).or_default();
        known.retain(|_, health| now.saturating_duration_since(health.at) <= health.timeout);
        let mut changed = false;
        for report in devices {
            let healthy = match report.health() {
                HealthStatus::Healthy => Some(true),
                HealthStatus::Unhealthy => Some(false),
                HealthStatus::Unknown => None,
            };
            let Some(device) = report.device else { continue };
            let key = (device.pool_name, device.device_name);
            if known.len() >= MOST_DEVICES && !known.contains_key(&key) {
                continue;
            }
            let seconds =
                u64::try_from(report.health_check_timeout_seconds).ok().filter(|seconds| *seconds > 0);
            let health = Health {
                healthy,
                message: shortened(report.message),
                at: now,
                timeout: seconds.map_or(TIMEOUT, |seconds| Duration::from_secs(seconds.min(86_400))),
            };
            let same =
                known.get(&key).is_some_and(|old| old.healthy == healthy && old.message == health.message);
            changed |= !same;
            known.insert(key, health);
        }
        changed
    }

    /// When the first report of a driver is no longer true.
    fn expires(&self, driver: &str) -> Option<Instant> {
        let devices = self.0.get(driver)?.values().filter(|health| health.healthy.is_some());
        devices.map(|health| health.at + health.timeout).min()
    }

    /// The state of a device in the API's words, and the driver's message.
    fn of(&self, driver: &str, pool: &str, device: &str, now: Instant) -> (&'static str, Option<String>) {
        let known = self.0.get(driver).and_then(|all| all.get(&(pool.to_owned(), device.to_owned())));
        let fresh = known.filter(|health| now.saturating_duration_since(health.at) <= health.timeout);
        let message = fresh.map(|health| health.message.clone()).filter(|message| !message.is_empty());
        let state = match fresh.and_then(|health| health.healthy) {
            Some(true) => "Healthy",
            Some(false) => "Unhealthy",
            None => "Unknown",
        };
        (state, message)
    }
}

fn shortened(message: String) -> String {
    if message.chars().count() <= MOST_MESSAGE {
        return message;
    }
    message.chars().take(MOST_MESSAGE - 3).chain("...".chars()).collect()
}

impl Claims {
    /// Follows the health that one instance of a driver reports, until that instance is gone.
    pub(super) async fn watch_health(self, driver: String, plugin: DraPlugin) {
        let mut backoff = super::registration::backoff();
        while self.has_instance(&driver, &plugin) {
            match plugin.watch_health().await {
                Ok(mut updates) => loop {
                    let expiry = self.lock().health.expires(&driver);
                    let expired = async {
                        match expiry {
                            Some(at) => tokio::time::sleep_until(at + Duration::from_millis(1)).await,
                            None => std::future::pending().await,
                        }
                    };
                    let next = tokio::select! {
                        next = updates.next() => next,
                        // A report is no longer true: the device counts as unknown.
                        () = expired => {
                            self.lock().health.update(&driver, Vec::new(), Instant::now());
                            self.wake_users(&driver);
                            continue;
                        }
                    };
                    match next {
                        Ok(Some(devices)) => {
                            backoff.reset();
                            let changed = self.lock().health.update(&driver, devices, Instant::now());
                            if changed {
                                self.wake_users(&driver);
                            }
                        }
                        Ok(None) => break,
                        Err(error) => {
                            tracing::debug!(driver, %error, "the stream of a driver's health broke");
                            break;
                        }
                    }
                },
                Err(error) => {
                    tracing::debug!(driver, %error, "a driver does not report the health of its devices")
                }
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    fn has_instance(&self, driver: &str, plugin: &DraPlugin) -> bool {
        let inner = self.lock();
        inner.drivers.get(driver).is_some_and(|all| all.iter().any(|known| known.socket() == plugin.socket()))
    }

    /// Has the pods that use a driver's devices show the change.
    fn wake_users(&self, driver: &str) {
        let users: BTreeSet<String> = {
            let inner = self.lock();
            let of_driver = inner.state.0.values().filter(|claim| claim.drivers.contains_key(driver));
            of_driver.flat_map(|claim| claim.pods.iter().cloned()).collect()
        };
        users.iter().for_each(|pod| (self.0.wake)(pod));
    }

    /// The health of a container's devices, as the pod's status shows it.
    pub(crate) fn statuses(&self, pod: &Pod, container: &str) -> Vec<ResourceStatus> {
        let namespace = PodId::of(pod).namespace;
        let spec = model::spec(pod).containers.iter().find(|c| c.name == container);
        let claims = spec.and_then(|c| c.resources.as_ref()?.claims.as_ref());
        let (inner, now) = (self.lock(), Instant::now());
        let mut shown = Vec::new();
        for claim in claims.into_iter().flatten() {
            let entry = resource_claims::entries(pod).iter().find(|entry| entry.name == claim.name);
            let Some(name) = entry.and_then(|entry| Named::of(pod, entry).name()) else { continue };
            let Some(info) = inner.state.0.get(&(namespace.clone(), name.to_owned())) else { continue };
            let request = claim.request.as_deref().filter(|request| !request.is_empty());
            let base = request.map(|request| request.split('/').next().unwrap_or(request));
            let mut resources: Vec<ResourceHealth> = Vec::new();
            for (driver, devices) in &info.drivers {
                for device in devices {
                    let wanted = base.is_none_or(|base| {
                        device.requests.is_empty() || device.requests.iter().any(|request| request == base)
                    });
                    let id = device.cdi_devices.first().cloned();
                    let id = id.unwrap_or_else(|| format!("{driver}/{}/{}", device.pool, device.device));
                    if !wanted || resources.iter().any(|known| known.resource_id == id) {
                        continue;
                    }
                    let (health, message) = inner.health.of(driver, &device.pool, &device.device, now);
                    resources.push(ResourceHealth { health: Some(health.into()), message, resource_id: id });
                }
            }
            if !resources.is_empty() {
                let name = match request {
                    Some(request) => format!("claim:{}/{request}", claim.name),
                    None => format!("claim:{}", claim.name),
                };
                shown.push(ResourceStatus { name, resources: Some(resources) });
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_devices::dra_health::DeviceIdentifier;

    fn report(device: &str, health: HealthStatus, timeout: i64, message: &str) -> DeviceHealth {
        DeviceHealth {
            device: Some(DeviceIdentifier { pool_name: "p".into(), device_name: device.into() }),
            health: health.into(),
            last_updated_time: 0,
            health_check_timeout_seconds: timeout,
            message: message.into(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn reports_are_true_for_a_time() {
        let mut cache = HealthCache::default();
        let now = Instant::now();
        assert!(cache.update(
            "d",
            vec![report("a", HealthStatus::Healthy, 0, ""), report("b", HealthStatus::Unhealthy, 60, "hot")],
            now
        ));
        assert!(!cache.update("d", vec![report("a", HealthStatus::Healthy, 0, "")], now), "nothing changed");
        assert_eq!(cache.of("d", "p", "a", now), ("Healthy", None));
        assert_eq!(cache.of("d", "p", "b", now), ("Unhealthy", Some("hot".into())));
        assert_eq!(cache.of("d", "p", "c", now), ("Unknown", None));
        assert_eq!(cache.expires("d"), Some(now + TIMEOUT));
        let later = now + Duration::from_secs(31);
        assert_eq!(cache.of("d", "p", "a", later), ("Unknown", None));
        assert_eq!(cache.of("d", "p", "b", later).0, "Unhealthy");
        assert!(cache.update("d", vec![report("a", HealthStatus::Healthy, -5, &"x".repeat(5000))], later));
        let (_, message) = cache.of("d", "p", "a", later);
        let message = message.unwrap();
        assert!(message.len() == MOST_MESSAGE && message.ends_with("..."));
        let many =
            (0..2 * MOST_DEVICES).map(|n| report(&n.to_string(), HealthStatus::Healthy, 0, "")).collect();
        cache.update("d", many, later);
        assert!(cache.0["d"].len() <= MOST_DEVICES);
    }
}
