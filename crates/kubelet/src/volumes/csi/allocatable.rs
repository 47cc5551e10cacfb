//! The number of volumes that a driver can have on this node: asked anew as often as its CSIDriver says.

use super::Csi;
use super::ledger::VolumeId;
use ferrite_client::csi::attachment_name;
use ferrite_client::{Api, Informer, ListSelector, ObjectKey};
use ferrite_csi::v1::NodeGetInfoRequest;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// gRPC's code of a controller that has no room for one more volume.
const RESOURCE_EXHAUSTED: i32 = 8;

/// When a driver is asked next, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Turn {
    period: Duration,
    at: Instant,
}

/// The turns of drivers with these periods. One whose period stays keeps its turn.
fn turns(
    before: &BTreeMap<String, Turn>,
    periods: BTreeMap<String, Duration>,
    now: Instant,
) -> BTreeMap<String, Turn> {
    let turn = |(name, period): (String, Duration)| {
        let known = before.get(&name).filter(|turn| turn.period == period);
        let turn = known.copied().unwrap_or(Turn { period, at: now + period });
        (name, turn)
    };
    periods.into_iter().map(turn).collect()
}

/// Clocks have no room for a much longer time.
const LONGEST_PERIOD: u64 = 365 * 24 * 3600;

fn period(driver: &CSIDriver) -> Option<Duration> {
    let seconds = driver.spec.node_allocatable_update_period_seconds?;
    let seconds = u64::try_from(seconds).ok().filter(|seconds| *seconds > 0)?;
    Some(Duration::from_secs(seconds.min(LONGEST_PERIOD)))
}

impl Csi {
    /// Keeps the limits in the CSINode until the kubelet ends. Without a driver nothing is read from the API.
    pub(crate) async fn follow_limits(self) {
        let mut drivers = self.shared.drivers.changes();
        if drivers.wait_for(|all| !all.is_empty()).await.is_err() {
            return;
        }
        let all = Api::<CSIDriver>::all(self.shared.client.clone());
        let objects = Informer::start(all, ListSelector::everything(), &self.shared.scope);
        let (told, mut seen) = watch::channel(());
        objects.subscribe(move |_| told.send_replace(()));
        objects.synced().await;
        let mut due = BTreeMap::new();
        loop {
            seen.mark_unchanged();
            let registered: Vec<String> = drivers.borrow_and_update().keys().cloned().collect();
            let periods = registered.into_iter().filter_map(|name| {
                let object = objects.get(&ObjectKey::cluster(&name))?;
                period(&object).map(|period| (name, period))
            });
            due = turns(&due, periods.collect(), Instant::now());
            let next = due.values().map(|turn| turn.at).min();
            tokio::select! {
                () = tokio::time::sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
                changed = drivers.changed() => if changed.is_err() { return },
                changed = seen.changed() => if changed.is_err() { return },
            }
            let now = Instant::now();
            for (name, turn) in due.iter_mut().filter(|(_, turn)| turn.at <= now) {
                self.refresh(name).await;
                turn.at = Instant::now() + turn.period;
            }
        }
    }

    /// Asks a driver for its facts about this node, and publishes them.
    async fn refresh(&self, name: &str) {
        let _alone = self.exclusive(&VolumeId::new(name, "")).await;
        let Some(driver) = self.shared.drivers.get(name) else { return };
        match driver.node_get_info(NodeGetInfoRequest {}).await {
            Ok(info) => {
                if let Err(problem) = self.install(name, &info).await {
                    tracing::warn!(driver = name, %problem, "could not publish what a CSI driver says of this node");
                }
            }
            Err(error) => {
                tracing::warn!(driver = name, %error, "a CSI driver does not say what this node can have")
            }
        }
    }

    /// A volume was not attached in time. If the controller had no room, the scheduler should know of it.
    pub(super) async fn refresh_after_refusal(&self, id: &VolumeId) {
        let drivers = Api::<CSIDriver>::all(self.shared.client.clone());
        let object = drivers.get_opt(&id.driver).await.ok().flatten();
        if object.as_ref().and_then(period).is_none() {
            return;
        }
        let attachments = Api::<VolumeAttachment>::all(self.shared.client.clone());
        let name = attachment_name(&id.handle, &id.driver, &self.shared.node_name);
        let attachment = attachments.get_opt(&name).await.ok().flatten();
        if attachment.as_ref().is_some_and(is_exhausted) {
            self.refresh(&id.driver).await;
        }
    }
}

fn is_exhausted(attachment: &VolumeAttachment) -> bool {
    let error = attachment.status.as_ref().and_then(|status| status.attach_error.as_ref());
    error.is_some_and(|error| error.error_code == Some(RESOURCE_EXHAUSTED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn drivers_have_turns_as_their_objects_say() {
        let (now, seconds) = (Instant::now(), Duration::from_secs);
        let periods = |all: &[(&str, u64)]| -> BTreeMap<String, Duration> {
            all.iter().map(|(name, period)| ((*name).to_owned(), seconds(*period))).collect()
        };
        let first = turns(&BTreeMap::new(), periods(&[("a", 10), ("b", 20)]), now);
        assert_eq!(first["a"], Turn { period: seconds(10), at: now + seconds(10) });
        let later = now + seconds(5);
        let second = turns(&first, periods(&[("a", 10), ("b", 30)]), later);
        assert_eq!(second["a"].at, now + seconds(10), "it keeps its turn");
        assert_eq!(second["b"].at, later + seconds(30));
        assert!(turns(&second, periods(&[]), later).is_empty());
    }

    #[test]
    fn a_controller_without_room_says_so() {
        for (code, expected) in [(json!(8), true), (json!(9), false), (json!(null), false)] {
            let attachment = json!({"metadata": {}, "spec": {"attacher": "d", "nodeName": "n", "source": {}},
                "status": {"attached": false, "attachError": {"errorCode": code}}});
            assert_eq!(is_exhausted(&ferrite_json::from_value(attachment).unwrap()), expected, "{code}");
        }
    }
}
