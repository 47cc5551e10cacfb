//! `loopback`: brings `lo` up.

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{Call, Failure, IpConfig, Plugin, code, ip_json, links};

pub(super) struct Loopback;

#[async_trait]
impl Plugin for Loopback {
    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        let conn = links::inside(call)?;
        conn.set_link_up("lo").await.map_err(Failure::of("lo"))?;
        if let Some(previous) = call.previous() {
            return Ok(previous.clone());
        }
        let own = IpConfig { address: std::net::Ipv4Addr::LOCALHOST.into(), prefix: 8, gateway: None };
        Ok(json!({
            "interfaces": [{"name": "lo", "mac": "00:00:00:00:00:00", "sandbox": call.netns()}],
            "ips": [ip_json(&own, Some(0), &call.version)],
        }))
    }

    async fn del(&self, call: &Call) -> Result<(), Failure> {
        // A namespace that is gone has no link.
        if let Ok(conn) = links::inside(call) {
            let _ = conn.set_link_down("lo").await;
        }
        Ok(())
    }

    async fn check(&self, call: &Call) -> Result<(), Failure> {
        let link = links::find(&links::inside(call)?, "lo").await?;
        match link.is_some_and(|link| link.is_up) {
            true => Ok(()),
            false => Err(Failure::new(code::OTHER, "loopback interface is down")),
        }
    }
}
