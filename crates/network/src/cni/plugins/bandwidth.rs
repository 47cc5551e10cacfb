//! `bandwidth`: limits the container's traffic.

use async_trait::async_trait;
use serde_json::Value;

use super::refused::{Refused, key};
use super::{Call, Failure, Plugin, code, links};
use crate::bandwidth::limit_with_burst;

pub(super) struct Bandwidth;

/// A value of the caller's capability, else of the configuration.
fn setting<'a>(call: &'a Call, key: &str) -> Option<&'a Value> {
    call.capability("bandwidth").and_then(|all| all.get(key)).or_else(|| call.config.get(key))
}

/// The bits that may go at once; `None` leaves the choice here.
fn burst(call: &Call, key: &str) -> Result<Option<u64>, Failure> {
    match setting(call, key) {
        None => Ok(None),
        Some(value) => match value.as_u64() {
            Some(0) => Ok(None),
            Some(bits) if (8..=u64::from(u32::MAX)).contains(&bits) => Ok(Some(bits)),
            _ => Err(Failure::config(format!("{key} {value} is no number of bits from 8 to {}", u32::MAX))),
        },
    }
}

/// A rate in bits per second.
fn rate(call: &Call, key: &str) -> Result<Option<u64>, Failure> {
    match setting(call, key) {
        None => Ok(None),
        Some(value) => match value.as_u64() {
            Some(0) => Ok(None),
            Some(bits) if bits >= 1_000 => Ok(Some(bits)),
            _ => Err(Failure::config(format!("{key} {value} is no rate of at least 1000 bits per second"))),
        },
    }
}

#[async_trait]
impl Plugin for Bandwidth {
    fn refused(&self) -> &'static [Refused] {
        const KEYS: &[Refused] = &[
            key("shapedSubnets"),
            key("unshapedSubnets"),
            key("runtimeConfig.bandwidth.shapedSubnets"),
            key("runtimeConfig.bandwidth.unshapedSubnets"),
        ];
        KEYS
    }

    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        let previous = call.needs_previous()?;
        let (inside, outside) = (links::inside(call)?, links::outside()?);
        if let Some(bits) = rate(call, "egressRate")? {
            let burst = burst(call, "egressBurst")?;
            let limited = limit_with_burst(&inside, call.interface(), bits, burst).await;
            limited.map_err(Failure::of("egress rate"))?;
        }
        if let Some(bits) = rate(call, "ingressRate")? {
            let link = links::find(&inside, call.interface()).await?;
            let peer = link.and_then(|link| link.peer);
            let all = outside.get_links().await.map_err(Failure::of("list links"))?;
            let Some(host_end) = all.iter().find(|link| Some(link.index) == peer) else {
                return Err(Failure::new(code::OTHER, "the node's end of the container's link is not there"));
            };
            let burst = burst(call, "ingressBurst")?;
            let limited = limit_with_burst(&outside, &host_end.name, bits, burst).await;
            limited.map_err(Failure::of("ingress rate"))?;
        }
        Ok(previous.clone())
    }

    async fn del(&self, _: &Call) -> Result<(), Failure> {
        // The queues go with the link.
        Ok(())
    }

    async fn check(&self, call: &Call) -> Result<(), Failure> {
        if rate(call, "egressRate")?.is_none() {
            return Ok(());
        }
        let queues = links::inside(call)?.get_queues(call.interface()).await;
        let queues = queues.map_err(Failure::of("list queues"))?;
        match queues.iter().any(|queue| queue.kind == "tbf") {
            true => Ok(()),
            false => Err(Failure::new(code::OTHER, "the limit of egress traffic is gone")),
        }
    }
}
