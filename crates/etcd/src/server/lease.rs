//! Leases.

use super::Service;
use super::convert::{header, lease, refused, signed, ttl_too_large};
use crate::proto::etcdserverpb::lease_server::Lease;
use crate::proto::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseLeasesRequest,
    LeaseLeasesResponse, LeaseRevokeRequest, LeaseRevokeResponse, LeaseStatus, LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse,
};
use bytes::Bytes;
use ferrite_store::{StoreError, now_seconds};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// As upstream.
const MAX_TTL: i64 = 9_000_000_000;

/// The end of a lease with this TTL that begins now: never too early, although the store counts in seconds.
fn end(ttl: u64) -> u64 {
    now_seconds() + ttl + 1
}

#[tonic::async_trait]
impl Lease for Service {
    async fn lease_grant(
        &self,
        request: Request<LeaseGrantRequest>,
    ) -> Result<Response<LeaseGrantResponse>, Status> {
        let LeaseGrantRequest { ttl, id } = request.into_inner();
        if ttl > MAX_TTL {
            return Err(ttl_too_large());
        }
        let ttl = u64::try_from(ttl).unwrap_or(0).max(1);
        let id = self.store.grant_for(lease(id), ttl, end(ttl)).await.map_err(|e| refused(&e))?;
        let header = header(self.store.snapshot().revision());
        Ok(Response::new(LeaseGrantResponse { header, id: id.0, ttl: signed(ttl), error: String::new() }))
    }

    async fn lease_revoke(
        &self,
        request: Request<LeaseRevokeRequest>,
    ) -> Result<Response<LeaseRevokeResponse>, Status> {
        let outcome = self.store.revoke(lease(request.into_inner().id)).await.map_err(|e| refused(&e))?;
        Ok(Response::new(LeaseRevokeResponse { header: header(outcome.revision()) }))
    }

    type LeaseKeepAliveStream = ReceiverStream<Result<LeaseKeepAliveResponse, Status>>;

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let (out, responses) = mpsc::channel(16);
        let store = Arc::clone(&self.store);
        let mut requests = request.into_inner();
        self.spawn(async move {
            while let Some(Ok(LeaseKeepAliveRequest { id })) = requests.next().await {
                let renewed = store.renew(lease(id), end).await;
                let header = header(store.snapshot().revision());
                let answer = match renewed {
                    Ok(ttl) => Ok(LeaseKeepAliveResponse { header, id, ttl: signed(ttl) }),
                    // As upstream: no time left says that it is gone.
                    Err(StoreError::NoSuchLease(_)) => Ok(LeaseKeepAliveResponse { header, id, ttl: 0 }),
                    Err(error) => Err(refused(&error)),
                };
                if out.send(answer).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(responses)))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<LeaseTimeToLiveRequest>,
    ) -> Result<Response<LeaseTimeToLiveResponse>, Status> {
        let LeaseTimeToLiveRequest { id, keys } = request.into_inner();
        let header = header(self.store.snapshot().revision());
        let mut response = LeaseTimeToLiveResponse { header, id, ttl: -1, ..Default::default() };
        if let Some(state) = self.store.lease(lease(id)) {
            response.ttl = signed(state.expires_at.saturating_sub(now_seconds()));
            response.granted_ttl = signed(state.ttl);
            if keys {
                response.keys = state.keys.iter().map(|k| Bytes::copy_from_slice(k.as_bytes())).collect();
            }
        }
        Ok(Response::new(response))
    }

    async fn lease_leases(
        &self,
        _: Request<LeaseLeasesRequest>,
    ) -> Result<Response<LeaseLeasesResponse>, Status> {
        let leases = self.store.leases().into_iter().map(|l| LeaseStatus { id: l.id.0 }).collect();
        let header = header(self.store.snapshot().revision());
        Ok(Response::new(LeaseLeasesResponse { header, leases }))
    }
}
