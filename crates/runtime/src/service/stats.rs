//! What containers use.

use std::sync::Arc;

use ferrite_cri::v1::*;
use ferrite_cri::{Error, Result};

use super::Inner;
use super::client::blocking;
use super::state::{Container, Status};
use crate::cgroup::Layout;
use crate::sys;

fn measure(cgroups: &Layout, container: &Container) -> ContainerStats {
    let timestamp = sys::now();
    let group = container.record().cgroup;
    let value = |value: u64| Some(UInt64Value { value });
    let cpu = cgroups.cpu(&group).map(|cpu| CpuUsage {
        timestamp,
        usage_core_nano_seconds: value(cpu.usage_nanoseconds),
        ..Default::default()
    });
    let memory = cgroups.memory(&group).map(|memory| MemoryUsage {
        timestamp,
        working_set_bytes: value(memory.working_set),
        available_bytes: memory.limit.and_then(|limit| value(limit.saturating_sub(memory.working_set))),
        usage_bytes: value(memory.usage),
        rss_bytes: value(memory.rss),
        page_faults: value(memory.page_faults),
        major_page_faults: value(memory.major_page_faults),
        psi: None,
    });
    ContainerStats {
        attributes: Some(ContainerAttributes {
            id: container.id.clone(),
            metadata: container.config.metadata.clone(),
            labels: container.config.labels.clone(),
            annotations: container.config.annotations.clone(),
        }),
        cpu,
        memory,
        ..Default::default()
    }
}

impl Inner {
    async fn measure_all(&self, containers: Vec<Arc<Container>>) -> Result<Vec<ContainerStats>> {
        let cgroups = self.cgroups.clone();
        blocking(move || Ok(containers.iter().map(|container| measure(&cgroups, container)).collect()))
            .await
            .map_err(|error| Error::internal(format!("read statistics: {error}")))
    }

    pub(super) async fn container_stats(&self, id: &str) -> Result<ContainerStatsResponse> {
        let container = self.index.container(id)?;
        Ok(ContainerStatsResponse { stats: self.measure_all(vec![container]).await?.pop() })
    }

    pub(super) async fn list_container_stats(
        &self,
        filter: &ContainerStatsFilter,
    ) -> Result<ListContainerStatsResponse> {
        let containers: Vec<_> = self
            .index
            .read()
            .containers
            .values()
            .filter(|c| matches!(c.status(), Status::Running { .. }))
            .filter(|c| filter.id.is_empty() || c.id.starts_with(&filter.id))
            .filter(|c| filter.pod_sandbox_id.is_empty() || c.sandbox.starts_with(&filter.pod_sandbox_id))
            .filter(|c| filter.label_selector.iter().all(|(k, v)| c.config.labels.get(k) == Some(v)))
            .cloned()
            .collect();
        Ok(ListContainerStatsResponse { stats: self.measure_all(containers).await? })
    }
}
