//! Status, snapshot and the like, and the one member there is.

use super::Service;
use super::bolt::Database;
use super::convert::{MEMBER_ID, RAFT_TERM, header, key_value, refused, revision, signed};
use crate::proto::etcdserverpb::cluster_server::Cluster;
use crate::proto::etcdserverpb::maintenance_server::Maintenance;
use crate::proto::etcdserverpb::{
    AlarmRequest, AlarmResponse, DefragmentRequest, DefragmentResponse, HashKvRequest, HashKvResponse,
    HashRequest, HashResponse, Member, MemberListRequest, MemberListResponse, SnapshotRequest,
    SnapshotResponse, StatusRequest, StatusResponse,
};
use ferrite_store::{Revision, Snapshot};
use prost::Message;
use std::path::Path;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// The version whose API this is: clients ask for it to choose the calls that they use.
const VERSION: &str = "3.5.13";
/// Bytes of a snapshot sent at once.
const PIECE: usize = 64 << 10;

#[tonic::async_trait]
impl Cluster for Service {
    async fn member_list(
        &self,
        _: Request<MemberListRequest>,
    ) -> Result<Response<MemberListResponse>, Status> {
        let member = Member {
            id: MEMBER_ID,
            name: "ferrite".into(),
            peer_ur_ls: Vec::new(),
            client_ur_ls: self.urls.clone(),
            is_learner: false,
        };
        let header = header(self.store.snapshot().revision());
        Ok(Response::new(MemberListResponse { header, members: vec![member] }))
    }
}

#[tonic::async_trait]
impl Maintenance for Service {
    /// There is nothing an alarm could be about: a store that cannot write says so with each answer.
    async fn alarm(&self, _: Request<AlarmRequest>) -> Result<Response<AlarmResponse>, Status> {
        let header = header(self.store.snapshot().revision());
        Ok(Response::new(AlarmResponse { header, alarms: Vec::new() }))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let now = self.store.snapshot();
        let revision = now.revision();
        let on_disk = self.dir.as_deref().map_or(0, disk_usage);
        let in_use: usize = now.range(b"", None).map(|(k, e)| k.as_bytes().len() + e.value.len()).sum();
        Ok(Response::new(StatusResponse {
            header: header(revision),
            version: VERSION.into(),
            db_size: signed(on_disk.max(in_use as u64)),
            leader: MEMBER_ID,
            raft_index: revision.0,
            raft_term: RAFT_TERM,
            raft_applied_index: revision.0,
            errors: Vec::new(),
            db_size_in_use: signed(in_use as u64),
            is_learner: false,
        }))
    }

    async fn defragment(
        &self,
        _: Request<DefragmentRequest>,
    ) -> Result<Response<DefragmentResponse>, Status> {
        self.store.checkpoint().await.map_err(|e| refused(&e))?;
        Ok(Response::new(DefragmentResponse { header: header(self.store.snapshot().revision()) }))
    }

    async fn hash(&self, _: Request<HashRequest>) -> Result<Response<HashResponse>, Status> {
        let now = self.store.snapshot();
        Ok(Response::new(HashResponse { header: header(now.revision()), hash: hash(&now) }))
    }

    async fn hash_kv(&self, request: Request<HashKvRequest>) -> Result<Response<HashKvResponse>, Status> {
        let now = self.store.snapshot();
        let wanted = revision(request.into_inner().revision).unwrap_or(now.revision());
        let past = self.store.snapshot_at(wanted).map_err(|e| refused(&e))?;
        Ok(Response::new(HashKvResponse {
            header: header(now.revision()),
            hash: hash(&past),
            compact_revision: signed(self.store.usage().compacted.0),
        }))
    }

    type SnapshotStream = ReceiverStream<Result<SnapshotResponse, Status>>;

    async fn snapshot(&self, _: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        let now = self.store.latest().await.map_err(|e| refused(&e))?;
        let leases: Vec<_> = self
            .store
            .leases()
            .into_iter()
            .filter_map(|lease| Some((lease.id, self.store.lease(lease.id)?)))
            .collect();
        let (out, responses) = mpsc::channel(4);
        self.spawn(async move {
            // Ends by itself once the client is gone: nobody takes the next piece.
            let made = tokio::task::spawn_blocking(move || {
                let database = Database::plan(&now, &leases);
                let at = header(Revision(database.revision()));
                let mut remaining_bytes = database.len();
                let mut blob = Vec::with_capacity(PIECE);
                let mut send = |blob: Vec<u8>| {
                    remaining_bytes -= blob.len() as u64;
                    let piece = SnapshotResponse { header: at, remaining_bytes, blob: blob.into() };
                    out.blocking_send(Ok(piece)).is_ok()
                };
                database.write(|page| {
                    blob.extend_from_slice(&page);
                    blob.len() < PIECE || send(std::mem::take(&mut blob))
                });
                if !blob.is_empty() {
                    send(blob);
                }
            });
            if made.await.is_err() {
                tracing::error!("a snapshot could not be made");
            }
        });
        Ok(Response::new(ReceiverStream::new(responses)))
    }
}

fn hash(snapshot: &Snapshot) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for (key, entry) in snapshot.range(b"", None) {
        hasher.update(&key_value(key, entry).encode_to_vec());
    }
    hasher.finalize()
}

fn disk_usage(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries.flatten().filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum()
}
