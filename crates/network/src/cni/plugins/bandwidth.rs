//! `bandwidth`: limits the container's traffic.

use async_trait::async_trait;
use serde_json::Value;

use super::{Call, Failure, Plugin, code, links};
use crate::bandwidth::limit;

pub(super) struct Bandwidth;

/// A rate in bits per second, of the caller's capability or of the configuration.
fn rate(call: &Call, key: &str) -> Result<Option<u64>, Failure> {
    let value = call.capability("bandwidth").and_then(|all| all.get(key)).or_else(|| call.config.get(key));
    match value {
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
    async fn add(&self, call: &Call) -> Result<Value, Failure> {
        let previous = call.needs_previous()?;
        let (inside, outside) = (links::inside(call)?, links::outside()?);
        if let Some(bits) = rate(call, "egressRate")? {
            limit(&inside, call.interface(), bits).await.map_err(Failure::of("egress rate"))?;
        }
        if let Some(bits) = rate(call, "ingressRate")? {
            let link = links::find(&inside, call.interface()).await?;
            let peer = link.and_then(|link| link.peer);
            let all = outside.get_links().await.map_err(Failure::of("list links"))?;
            let Some(host_end) = all.iter().find(|link| Some(link.index) == peer) else {
                return Err(Failure::new(code::OTHER, "the node's end of the container's link is not there"));
            };
            limit(&outside, &host_end.name, bits).await.map_err(Failure::of("ingress rate"))?;
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
