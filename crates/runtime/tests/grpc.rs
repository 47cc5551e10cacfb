//! CRI through the socket: the runtime behind our server, driven by our client.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use ferrite_cri::grpc::{Client, Server};
use ferrite_cri::v1::*;
use ferrite_cri::{Code, ImageService, RuntimeService};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;
use world::{LIMIT, World, shell};

/// A runtime on a socket, until the test closes it.
struct Served {
    path: PathBuf,
    client: Client,
    closing: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Served {
    fn new(world: &World) -> Self {
        let path = world.directory.path().join("cri.sock");
        let server = Server::bind(&path, world.runtime().clone(), world.runtime().clone()).unwrap();
        let closing = CancellationToken::new();
        let task = tokio::spawn(server.serve(closing.clone()));
        let client = Client::new(&format!("unix://{}", path.display())).unwrap();
        Self { path, client, closing, task }
    }

    async fn close(self) {
        self.closing.cancel();
        tokio::time::timeout(LIMIT, self.task).await.expect("the server ends").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_through_the_socket() {
    let world = World::new().await;
    let served = Served::new(&world);
    let cri = &served.client;
    assert_eq!(std::fs::metadata(&served.path).unwrap().permissions().mode() & 0o777, 0o600);
    let version = cri.version(VersionRequest { version: "v1".into() }).await.unwrap();
    assert_eq!((version.runtime_name.as_str(), version.runtime_api_version.as_str()), ("ferrite", "v1"));
    let mut events = cri.get_container_events(GetEventsRequest {}).await.unwrap();

    let request =
        RunPodSandboxRequest { config: Some(world.sandbox_config()), runtime_handler: String::new() };
    let sandbox = cri.run_pod_sandbox(request).await.unwrap().pod_sandbox_id;
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(shell("a", "echo hello; exec sleep 1000")),
        sandbox_config: Some(world.sandbox_config()),
    };
    let id = cri.create_container(request).await.unwrap().container_id;
    cri.start_container(StartContainerRequest { container_id: id.clone() }).await.unwrap();
    let request = ExecSyncRequest { container_id: id.clone(), cmd: vec!["hostname".into()], timeout: 10 };
    assert_eq!(cri.exec_sync(request).await.unwrap().stdout, b"pod-host\n");
    let listed = cri.list_containers(ListContainersRequest::default()).await.unwrap().containers;
    assert_eq!(listed.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), [id.as_str()]);
    let stats = cri.pod_sandbox_stats(PodSandboxStatsRequest { pod_sandbox_id: sandbox.clone() }).await;
    assert_eq!(stats.unwrap().stats.unwrap().linux.unwrap().containers.len(), 1);
    cri.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 }).await.unwrap();
    let ended = tokio::time::timeout(LIMIT, async {
        loop {
            let event = events.next().await.expect("the stream goes on");
            if event.container_event_type() == ContainerEventType::ContainerStoppedEvent {
                return event.container_id;
            }
        }
    });
    assert_eq!(ended.await.unwrap(), id);
    cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();
    served.close().await;
    let rest = tokio::time::timeout(LIMIT, events.count()).await;
    assert!(rest.is_ok(), "the stream ends with the server");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_keep_their_code() {
    let world = World::new().await;
    let served = Served::new(&world);
    let cri = &served.client;
    let missing = cri
        .container_status(ContainerStatusRequest { container_id: "nope".into(), verbose: false })
        .await
        .unwrap_err();
    assert_eq!(missing.code, Code::NotFound, "{missing}");
    assert!(missing.message.contains("nope"));
    let bad = cri.run_pod_sandbox(RunPodSandboxRequest::default()).await.unwrap_err();
    assert_eq!(bad.code, Code::InvalidArgument, "{bad}");
    let checkpoint = cri.checkpoint_container(CheckpointContainerRequest::default()).await.unwrap_err();
    assert_eq!(checkpoint.code, Code::Unimplemented, "{checkpoint}");
    let image = cri.image_status(ImageStatusRequest::default()).await.unwrap();
    assert!(image.image.is_none());
    // A runtime that went away is unavailable, not broken.
    let (client, path) = (served.client.clone(), served.path.clone());
    served.close().await;
    // The call finds nobody, even if the client has not yet noticed the end of the old connection.
    let away = client.version(VersionRequest::default()).await.unwrap_err();
    assert_eq!(away.code, Code::Unavailable, "{away}");
    assert!(away.message.contains(&path.display().to_string()), "{away}");
    // The socket file of a dead server does not keep a new one away; the same client goes on.
    let server = Server::bind(&path, world.runtime().clone(), world.runtime().clone()).unwrap();
    let second = Server::bind(&path, world.runtime().clone(), world.runtime().clone());
    assert_eq!(second.err().unwrap().kind(), std::io::ErrorKind::AddrInUse);
    let closing = CancellationToken::new();
    let task = tokio::spawn(server.serve(closing.clone()));
    client.version(VersionRequest::default()).await.unwrap();
    closing.cancel();
    task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_lists() {
    use ferrite_cri::v1::runtime_service_client::RuntimeServiceClient;
    let world = World::new().await;
    let served = Served::new(&world);
    let sandbox = world.sandbox().await;
    let path = served.path.clone();
    let channel = tonic::transport::Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_: http::Uri| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(hyper_util::rt::TokioIo::new) }
        }))
        .await
        .unwrap();
    let mut client = RuntimeServiceClient::new(channel);
    let mut stream =
        client.stream_pod_sandboxes(StreamPodSandboxesRequest::default()).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert_eq!(first.pod_sandboxes[0].id, sandbox);
    assert!(stream.message().await.unwrap().is_none());
    drop(client);
    served.close().await;
}
