//! The pod resources API v1 at `<kubelet root>/pod-resources/kubelet.sock`: monitoring agents of the node ask which
//! container has which devices.

mod view;

use crate::pod::context::Context;
use crate::pod::model::{self, ContainerKind, PodId};
use ferrite_client::Scope;
use ferrite_component::{Rate, TokenBucket};
use ferrite_devices::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use ferrite_devices::podresources::*;
use ferrite_devices::{Request, Response, Status, async_trait};
use k8s_openapi::api::core::v1::Pod;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::net::UnixListener;
use tower::ServiceExt;

/// Requests in a second, and at once, as upstream.
const RATE: Rate = Rate { per_second: 100.0, burst: 10.0 };

/// Listens until the scope ends.
pub(crate) fn serve(dir: &Path, context: Arc<Context>, scope: &Scope) -> io::Result<()> {
    ferrite_hostfs::private_dir(dir)?;
    // Through a descriptor: the path of a socket may have 107 characters only.
    let held = std::fs::File::open(dir)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd())).join("kubelet.sock");
    let listener = UnixListener::from_std(ferrite_hostfs::listen_private(&path)?)?;
    let bucket = Arc::new(Mutex::new(TokenBucket::full(RATE, Instant::now())));
    let service = PodResourcesListerServer::new(Lister { context });
    let answer = move |request| {
        let (service, bucket) = (service.clone(), bucket.clone());
        async move {
            let is_taken = bucket.lock().unwrap_or_else(PoisonError::into_inner).take(RATE, Instant::now());
            match is_taken {
                true => service.oneshot(request).await,
                false => Ok(Status::resource_exhausted("rejected by rate limit").into_http()),
            }
        }
    };
    scope.spawn_graceful(ferrite_devices::serve(listener, answer, scope.token().clone()));
    Ok(())
}

struct Lister {
    context: Arc<Context>,
}

impl Lister {
    fn pod(&self, pod: &Pod) -> PodResources {
        let (id, devices) = (PodId::of(pod), &self.context.devices);
        // As upstream: init containers that run beside the others count, those that end do not.
        let shown = |c: &model::PodContainer| match c.kind {
            ContainerKind::Regular => true,
            ContainerKind::Init => c.is_sidecar(),
            ContainerKind::Ephemeral => false,
        };
        let containers =
            model::containers(pod).into_iter().filter(shown).map(|container| ContainerResources {
                cpu_ids: self.context.resources.exclusive(&id.uid, container.name()),
                devices: view::of_container(&devices.given(&id.uid, container.name())),
                dynamic_resources: self.context.claims.dynamic_resources(pod, &container),
                memory: view::memory(&self.context.resources.memory_blocks(&id.uid, container.name())),
                name: container.name().to_owned(),
            });
        PodResources { containers: containers.collect(), name: id.name, namespace: id.namespace }
    }
}

#[async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pods = self.context.pods.list();
        let active = pods.iter().filter(|pod| !model::is_finished(pod));
        let pod_resources = active.map(|pod| self.pod(pod)).collect();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        let devices = view::allocatable(&self.context.devices.allocatable());
        let cpu_ids = self.context.resources.allocatable_cpus();
        let memory = view::memory(&self.context.resources.allocatable_memory());
        Ok(Response::new(AllocatableResourcesResponse { devices, cpu_ids, memory }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        let GetPodResourcesRequest { pod_name, pod_namespace } = request.into_inner();
        let pods = self.context.pods.list();
        let named = |pod: &&Arc<Pod>| {
            let id = PodId::of(pod);
            id.name == pod_name && id.namespace == pod_namespace
        };
        let Some(pod) = pods.iter().find(named) else {
            return Err(Status::unknown(format!("pod {pod_name} in namespace {pod_namespace} not found")));
        };
        Ok(Response::new(GetPodResourcesResponse { pod_resources: Some(self.pod(pod)) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::tests::{Manner, asking, plugin};
    use crate::testing::Harness;
    use ferrite_devices::podresources::pod_resources_lister_client::PodResourcesListerClient;
    use hyper_util::rt::TokioIo;
    use tokio::net::UnixStream;
    use tonic::Code;
    use tonic::transport::{Channel, Endpoint};

    async fn client(socket: PathBuf) -> PodResourcesListerClient<Channel> {
        let connect = tower::service_fn(move |_: http::Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel =
            Endpoint::from_static("http://localhost").connect_with_connector(connect).await.unwrap();
        PodResourcesListerClient::new(channel)
    }

    #[tokio::test]
    async fn agents_see_who_has_which_devices() {
        let h = Harness::start().await;
        let scope = Scope::new();
        let dir = h.dir.path().join("pod-resources");
        serve(&dir, h.context.clone(), &scope).unwrap();
        let _plugin = plugin(&h, Manner::Good, "a b").await;
        h.create("p", asking("1"));
        h.until_phase("p", "Running").await;
        let mut client = client(dir.join("kubelet.sock")).await;
        let listed = client.list(ListPodResourcesRequest {}).await.unwrap().into_inner().pod_resources;
        assert_eq!(listed.len(), 1);
        assert_eq!((&*listed[0].name, &*listed[0].namespace), ("p", "default"));
        let container = &listed[0].containers[0];
        assert_eq!((&*container.name, &*container.devices[0].resource_name), ("c", "example.com/gpu"));
        assert_eq!(container.devices[0].device_ids, ["b"]);
        let one = GetPodResourcesRequest { pod_name: "p".into(), pod_namespace: "default".into() };
        let got = client.get(one).await.unwrap().into_inner().pod_resources.unwrap();
        assert_eq!(got, listed[0]);
        let other = GetPodResourcesRequest { pod_name: "x".into(), pod_namespace: "default".into() };
        let missing = client.get(other).await.unwrap_err();
        assert_eq!(missing.message(), "pod x in namespace default not found");
        let all =
            client.get_allocatable_resources(AllocatableResourcesRequest {}).await.unwrap().into_inner();
        let ids: Vec<&str> = all.devices.iter().map(|d| d.device_ids[0].as_str()).collect();
        assert_eq!(ids, ["a", "b"]);
        // A caller that asks without end is turned away.
        let refused = loop {
            if let Err(status) = client.list(ListPodResourcesRequest {}).await {
                break status;
            }
        };
        assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, "rejected by rate limit"));
        scope.shutdown().await;
    }
}
