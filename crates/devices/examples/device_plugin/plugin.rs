//! The service of the plugin.

use ferrite_devices::deviceplugin::device_plugin_server::DevicePlugin;
use ferrite_devices::deviceplugin::*;
use ferrite_devices::{Request, Response, Status, async_trait};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{mpsc, watch};

#[derive(Clone)]
pub struct Plugin {
    devices: Arc<BTreeMap<String, PathBuf>>,
    sick: watch::Sender<BTreeSet<String>>,
}

impl Plugin {
    pub fn new(devices: Vec<(String, PathBuf)>) -> Self {
        Self { devices: Arc::new(devices.into_iter().collect()), sick: watch::Sender::default() }
    }

    pub fn set_health(&self, device: &str, well: bool) {
        self.sick.send_modify(|sick| match well {
            true => drop(sick.remove(device)),
            false => drop(sick.insert(device.to_owned())),
        });
    }

    fn list(&self) -> ListAndWatchResponse {
        let sick = self.sick.borrow();
        let health = |name: &String| if sick.contains(name) { "Unhealthy" } else { "Healthy" };
        let device = |name: &String| Device { id: name.clone(), health: health(name).into(), topology: None };
        ListAndWatchResponse { devices: self.devices.keys().map(device).collect() }
    }
}

/// Lists, one after the other.
pub struct Lists(mpsc::Receiver<Result<ListAndWatchResponse, Status>>);

impl futures_util::Stream for Lists {
    type Item = Result<ListAndWatchResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}

#[async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = Lists;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        }))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Lists>, Status> {
        let (sender, receiver) = mpsc::channel(1);
        let (plugin, mut changes) = (self.clone(), self.sick.subscribe());
        tokio::spawn(async move {
            // Until the kubelet is gone.
            while sender.send(Ok(plugin.list())).await.is_ok() && changes.changed().await.is_ok() {}
        });
        Ok(Response::new(Lists(receiver)))
    }

    /// The last names first, to show that somebody chose.
    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let choose = |one: &ContainerPreferredAllocationRequest| {
            let mut chosen = one.must_include_device_i_ds.clone();
            let mut others = one.available_device_i_ds.clone();
            others.sort();
            others.retain(|device| !chosen.contains(device));
            chosen.extend(others.into_iter().rev());
            chosen.truncate(usize::try_from(one.allocation_size).unwrap_or_default());
            ContainerPreferredAllocationResponse { device_i_ds: chosen }
        };
        let container_responses = request.get_ref().container_requests.iter().map(choose).collect();
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for one in &request.get_ref().container_requests {
            let mut devices = Vec::new();
            for name in &one.devices_ids {
                let path = self.devices.get(name);
                let path = path.ok_or_else(|| Status::not_found(format!("there is no device {name}")))?;
                devices.push(DeviceSpec {
                    container_path: format!("/dev/{name}"),
                    host_path: path.to_string_lossy().into_owned(),
                    permissions: "rw".into(),
                });
            }
            container_responses.push(ContainerAllocateResponse {
                envs: [("DEVICES".to_owned(), one.devices_ids.join(","))].into(),
                annotations: [("example.com/devices".to_owned(), one.devices_ids.join(","))].into(),
                devices,
                ..ContainerAllocateResponse::default()
            });
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        println!("a container starts with {}", request.get_ref().devices_ids.join(","));
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
