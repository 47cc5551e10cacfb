//! The node's part: bind mounts of the volumes' directories. Every call may come twice.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use ferrite_csi::v1::node_server::Node;
use ferrite_csi::v1::node_service_capability::{Rpc, Type, rpc};
use ferrite_csi::v1::volume_capability::AccessType;
use ferrite_csi::v1::volume_usage::Unit;
use ferrite_csi::v1::*;
use ferrite_hostfs::mounts;
use nix::mount::{MsFlags, mount};
use tonic::{Request, Response, Status};

use crate::TOPOLOGY;
use crate::volumes::Volumes;

/// Volumes that are written into pods begin so; they go with their pod.
const EPHEMERAL: &str = "csi-";
const IS_EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";
/// The size of a volume that is written into a pod.
const EPHEMERAL_SIZE: i64 = 1 << 30;
const MOST_VOLUMES: i64 = 100;
/// Files of a volume that are counted at most.
const MOST_FILES: u64 = 1_000_000;

pub struct HostPath {
    node: String,
    volumes: Arc<Volumes>,
}

impl HostPath {
    pub fn new(node: String, volumes: Arc<Volumes>) -> Self {
        Self { node, volumes }
    }

    fn directory(&self, id: &str) -> Result<std::path::PathBuf, Status> {
        let missing = || Status::not_found(format!("there is no volume {id:?}"));
        self.volumes.path(id).filter(|_| self.volumes.exists(id)).ok_or_else(missing)
    }
}

fn failed(error: io::Error) -> Status {
    Status::internal(error.to_string())
}

/// Fails for capabilities that directories lack.
fn check(capability: Option<&VolumeCapability>) -> Result<(), Status> {
    match capability.and_then(|capability| capability.access_type.as_ref()) {
        Some(AccessType::Mount(_)) => Ok(()),
        Some(AccessType::Block(_)) => Err(Status::invalid_argument("directories are no block devices")),
        None => Err(Status::invalid_argument("a volume capability is needed")),
    }
}

/// Mounts `from` at `to`, which is made when it is missing. An existing mount stays.
fn bind(from: &Path, to: &Path, read_only: bool) -> io::Result<()> {
    fs::create_dir_all(to)?;
    if mounts::is_mounted_at(to)? {
        return Ok(());
    }
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    if read_only {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(None::<&str>, to, None::<&str>, flags, None::<&str>)?;
    }
    Ok(())
}

fn unbind(at: &Path) -> io::Result<()> {
    mounts::unmount_at(at)?;
    match fs::remove_dir(at) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[tonic::async_trait]
impl Node for HostPath {
    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.node.clone(),
            max_volumes_per_node: MOST_VOLUMES,
            accessible_topology: Some(Topology {
                segments: [(TOPOLOGY.to_owned(), self.node.clone())].into(),
            }),
        }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let able = [rpc::Type::StageUnstageVolume, rpc::Type::ExpandVolume, rpc::Type::GetVolumeStats];
        let capability =
            |kind: rpc::Type| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })) };
        let capabilities = able.into_iter().map(capability).collect();
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        check(request.volume_capability.as_ref())?;
        let directory = self.directory(&request.volume_id)?;
        if !request.publish_context.contains_key("attached") {
            return Err(Status::failed_precondition("the volume is not attached to this node"));
        }
        bind(&directory, Path::new(&request.staging_target_path), false).map_err(failed)?;
        Ok(Response::new(NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        unbind(Path::new(&request.into_inner().staging_target_path)).map_err(failed)?;
        Ok(Response::new(NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        check(request.volume_capability.as_ref())?;
        let ephemeral = request.volume_context.get(IS_EPHEMERAL).is_some_and(|text| text == "true");
        let source = match ephemeral {
            false if request.staging_target_path.is_empty() => {
                return Err(Status::invalid_argument("a staging path is needed"));
            }
            false => request.staging_target_path.clone().into(),
            true => {
                self.volumes.create(&request.volume_id, EPHEMERAL_SIZE).map_err(failed)?;
                self.directory(&request.volume_id)?
            }
        };
        bind(&source, Path::new(&request.target_path), request.readonly).map_err(failed)?;
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        unbind(Path::new(&request.target_path)).map_err(failed)?;
        if request.volume_id.starts_with(EPHEMERAL) {
            self.volumes.remove(&request.volume_id).map_err(failed)?;
        }
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        self.directory(&request.volume_id)?;
        let size = request.capacity_range.map_or(0, |range| range.required_bytes);
        self.volumes.grown(&request.volume_id, size).map_err(failed)?;
        Ok(Response::new(NodeExpandVolumeResponse { capacity_bytes: size }))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        let directory = self.directory(&request.volume_id)?;
        let used = ferrite_hostfs::usage(&directory, MOST_FILES).map_err(failed)?;
        let total = self.volumes.size(&request.volume_id);
        let bytes = i64::try_from(used.bytes).unwrap_or(i64::MAX);
        let usage =
            VolumeUsage { available: (total - bytes).max(0), total, used: bytes, unit: Unit::Bytes.into() };
        Ok(Response::new(NodeGetVolumeStatsResponse { usage: vec![usage], volume_condition: None }))
    }
}
