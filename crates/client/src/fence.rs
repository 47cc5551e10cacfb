//! The end of a leadership, as its writes see it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::{Method, Request};
use kube::Client;
use kube::client::Body;

/// A write of somebody who does not lead any more.
#[derive(Debug, thiserror::Error)]
#[error("the client does not lead any more and may not write")]
struct NoLeader;

/// The time up to which a leader may act. Clones share it.
///
/// The clock goes on while the process is stopped or the machine sleeps.
#[derive(Debug, Clone, Default)]
pub struct Fence(Arc<AtomicU64>);

impl Fence {
    /// Returns true if the leadership lasts. A leader checks this before each write.
    pub fn is_open(&self) -> bool {
        uptime() < Duration::from_nanos(self.0.load(Ordering::Acquire))
    }

    /// A fence that stays open: nobody else can lead.
    pub fn unlimited() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }

    /// The same client for a leader: it refuses to write once the leadership is over. A process that was stopped for
    /// longer than its lease lasted writes nothing when it goes on.
    pub fn guard(&self, client: Client) -> Client {
        let fence = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let reads = matches!(*request.method(), Method::GET | Method::HEAD);
            let (fence, client) = (fence.clone(), client.clone());
            async move {
                match reads || fence.is_open() {
                    true => client.send(request).await,
                    false => Err(kube::Error::Service(NoLeader.into())),
                }
            }
        });
        Client::new(service, "default")
    }

    /// Lets the leader act until this time after the machine's start.
    pub(crate) fn open_until(&self, end: Duration) {
        self.0.store(u64::try_from(end.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
    }

    pub(crate) fn close(&self) {
        self.open_until(Duration::ZERO);
    }
}

/// Time since the machine's start, with the time that it slept.
pub(crate) fn uptime() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of this function. The clock exists since Linux 2.6.39; without it the time
    // stays zero and no lease expires.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
        + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::api::{ListParams, PostParams};

    use crate::Api;
    use k8s_openapi::api::core::v1::Pod;

    #[test]
    fn a_fence_opens_for_a_time() {
        let fence = Fence::default();
        assert!(!fence.is_open(), "nobody leads yet");
        fence.open_until(uptime() + Duration::from_secs(3600));
        assert!(fence.is_open() && fence.clone().is_open());
        fence.open_until(uptime());
        assert!(!fence.is_open(), "the time is over");
    }

    #[tokio::test]
    async fn a_leader_whose_time_is_over_reads_and_does_not_write() {
        let service = tower::service_fn(|request: Request<Body>| async move {
            let body: &[u8] = match *request.method() {
                Method::GET => br#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[]}"#,
                _ => br#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p"}}"#,
            };
            Ok::<_, kube::Error>(http::Response::new(http_body_util::Full::new(bytes::Bytes::from_static(
                body,
            ))))
        });
        let fence = Fence::default();
        let pods: Api<Pod> = Api::namespaced(fence.guard(Client::new(service, "default")), "default");
        for is_open in [true, false] {
            match is_open {
                true => fence.open_until(uptime() + Duration::from_secs(3600)),
                false => fence.close(),
            }
            assert!(pods.list(&ListParams::default()).await.is_ok());
            let written = pods.create(&PostParams::default(), &Pod::default()).await;
            assert_eq!(written.is_ok(), is_open, "{written:?}");
        }
        assert!(Fence::unlimited().is_open());
    }
}
