//! Watch: many watches on one stream.

use super::Service;
use super::convert::{Keys, event, header, revision, signed};
use crate::proto::etcdserverpb::watch_create_request::FilterType;
use crate::proto::etcdserverpb::watch_request::RequestUnion;
use crate::proto::etcdserverpb::watch_server::Watch as WatchService;
use crate::proto::etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse};
use crate::proto::mvccpb::Event;
use bytes::Bytes;
use ferrite_store::{Change, Revision, Store, Watch, WatchEnd};
use prost::Message;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

/// Responses that wait for the client. A client that does not read holds these, and its place in the history.
const WAITING: usize = 16;
/// Watches on one stream.
const MAX_WATCHES: usize = 10_000;
/// A response is split where it gets larger than this, as upstream.
const MAX_RESPONSE: usize = 1 << 20;
/// Idle time after which a watch reports its progress, if the client asked for it.
const PROGRESS: Duration = Duration::from_secs(10);
/// The watch a progress answer for the whole stream carries.
const ALL: i64 = -1;

type Out = mpsc::Sender<Result<WatchResponse, Status>>;

#[tonic::async_trait]
impl WatchService for Service {
    type WatchStream = ReceiverStream<Result<WatchResponse, Status>>;

    async fn watch(
        &self,
        request: Request<Streaming<WatchRequest>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let (out, responses) = mpsc::channel(WAITING);
        let stream = Stream::new(Arc::clone(&self.store), out);
        self.spawn(stream.run(request.into_inner()));
        Ok(Response::new(ReceiverStream::new(responses)))
    }
}

/// One stream and its watches, which end with it.
struct Stream {
    store: Arc<Store>,
    out: Out,
    tasks: JoinSet<()>,
    watches: HashMap<i64, Running>,
    next_id: i64,
    /// Asks every watch to check its progress.
    nudge: watch::Sender<u64>,
}

struct Running {
    abort: AbortHandle,
    position: watch::Receiver<Revision>,
}

impl Stream {
    fn new(store: Arc<Store>, out: Out) -> Self {
        let nudge = watch::Sender::new(0);
        Self { store, out, tasks: JoinSet::new(), watches: HashMap::new(), next_id: 0, nudge }
    }

    /// Follows the client's requests until it goes away. A send fails when it has.
    async fn run(mut self, mut requests: Streaming<WatchRequest>) {
        loop {
            let request = tokio::select! {
                request = requests.next() => request,
                () = self.out.closed() => return,
            };
            let Some(Ok(request)) = request else { return };
            while self.tasks.try_join_next().is_some() {}
            let sent = match request.request_union {
                Some(RequestUnion::CreateRequest(create)) => self.create(create).await,
                Some(RequestUnion::CancelRequest(cancel)) => self.cancel(cancel.watch_id).await,
                Some(RequestUnion::ProgressRequest(_)) => self.progress().await,
                None => true,
            };
            if !sent {
                return;
            }
        }
    }

    fn response(&self, watch_id: i64) -> WatchResponse {
        WatchResponse { header: header(self.store.snapshot().revision()), watch_id, ..Default::default() }
    }

    async fn create(&mut self, request: WatchCreateRequest) -> bool {
        self.watches.retain(|_, w| !w.abort.is_finished());
        let taken = self.watches.contains_key(&request.watch_id);
        let reason = match request.watch_id {
            _ if self.watches.len() >= MAX_WATCHES => Some("etcdserver: too many watches on one stream"),
            id if id != 0 && taken => Some("etcdserver: mvcc: watcher duplicate ID provided"),
            _ => None,
        };
        if let Some(reason) = reason {
            let refusal = WatchResponse {
                created: true,
                canceled: true,
                cancel_reason: reason.into(),
                ..self.response(ALL)
            };
            return self.out.send(Ok(refusal)).await.is_ok();
        }
        let id = if request.watch_id != 0 { request.watch_id } else { self.free_id() };
        let now = self.store.snapshot().revision();
        let after = revision(request.start_revision).map_or(now, |r| Revision(r.0 - 1));
        if self.out.send(Ok(WatchResponse { created: true, ..self.response(id) })).await.is_err() {
            return false;
        }
        let key = if request.key.is_empty() { Bytes::from_static(&[0]) } else { request.key };
        let keys = Keys::new(key, request.range_end);
        let watch = match self.store.watch(keys.common_prefix(), after) {
            Ok(watch) => watch,
            Err(end) => return self.out.send(Ok(ended(self.response(id), end))).await.is_ok(),
        };
        let (told, position) = watch::channel(after);
        let watcher = Watcher {
            id,
            keys,
            no_puts: request.filters.contains(&FilterType::Noput.into()),
            no_deletes: request.filters.contains(&FilterType::Nodelete.into()),
            with_previous: request.prev_kv,
            fragment: request.fragment,
            progress: request.progress_notify,
            watch,
            told,
            nudged: self.nudge.subscribe(),
            out: self.out.clone(),
        };
        let abort = self.tasks.spawn(watcher.run());
        self.watches.insert(id, Running { abort, position });
        true
    }

    fn free_id(&mut self) -> i64 {
        while self.watches.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        self.next_id - 1
    }

    async fn cancel(&mut self, id: i64) -> bool {
        let Some(running) = self.watches.remove(&id) else { return true };
        running.abort.abort();
        self.out.send(Ok(WatchResponse { canceled: true, ..self.response(id) })).await.is_ok()
    }

    /// Tells a revision up to which every watch of the stream has been sent everything.
    async fn progress(&mut self) -> bool {
        let now = self.store.snapshot().revision();
        self.nudge.send_modify(|n| *n += 1);
        for running in self.watches.values_mut() {
            // A watch that has ended in the meantime has nothing more to say.
            let _ = running.position.wait_for(|p| *p >= now).await;
        }
        let response = WatchResponse { header: header(now), watch_id: ALL, ..Default::default() };
        self.out.send(Ok(response)).await.is_ok()
    }
}

fn ended(response: WatchResponse, end: WatchEnd) -> WatchResponse {
    let compact_revision = match end {
        WatchEnd::Compacted { oldest, .. } => signed(oldest.0),
        WatchEnd::Closed => 0,
    };
    let cancel_reason = match end {
        WatchEnd::Compacted { .. } => "etcdserver: mvcc: required revision has been compacted".to_owned(),
        WatchEnd::Closed => "etcdserver: server stopped".to_owned(),
    };
    WatchResponse { canceled: true, compact_revision, cancel_reason, ..response }
}

/// One watch.
struct Watcher {
    id: i64,
    keys: Keys,
    no_puts: bool,
    no_deletes: bool,
    with_previous: bool,
    fragment: bool,
    progress: bool,
    watch: Watch,
    told: watch::Sender<Revision>,
    nudged: watch::Receiver<u64>,
    out: Out,
}

impl Watcher {
    async fn run(mut self) {
        loop {
            let mut silent = false;
            let changes = tokio::select! {
                changes = self.watch.next() => changes,
                _ = self.nudged.changed() => self.watch.ready(),
                () = tokio::time::sleep(PROGRESS), if self.progress => {
                    silent = true;
                    self.watch.ready()
                }
            };
            let response = WatchResponse { watch_id: self.id, ..Default::default() };
            let changes = match changes {
                Ok(changes) => changes,
                Err(end) => {
                    let header = header(self.watch.position());
                    let _ = self.out.send(Ok(ended(WatchResponse { header, ..response }, end))).await;
                    return;
                }
            };
            let position = self.watch.position();
            let mut events = self.events(&changes);
            if silent && events.is_empty() {
                // No events: progress.
                events.push(Vec::new());
            }
            let last = events.len();
            for (at, events) in events.into_iter().enumerate() {
                let unfinished = self.fragment && at + 1 < last;
                let header = header(position);
                let part = WatchResponse { header, events, fragment: unfinished, ..response.clone() };
                if self.out.send(Ok(part)).await.is_err() {
                    return;
                }
            }
            self.told.send_replace(position);
        }
    }

    /// The events of one or more responses. Without fragments, those of one revision stay together.
    fn events(&self, changes: &[Change]) -> Vec<Vec<Event>> {
        let mut parts: Vec<Vec<Event>> = Vec::new();
        let (mut size, mut last) = (0, Revision(0));
        for change in changes {
            let filtered = if change.entry.is_some() { self.no_puts } else { self.no_deletes };
            if filtered || !self.keys.contain(change.key.as_bytes()) {
                continue;
            }
            let event = event(change, self.with_previous);
            let length = event.encoded_len();
            let may_split = self.fragment || change.revision != last;
            match parts.last_mut() {
                Some(part) if size + length <= MAX_RESPONSE || !may_split => {
                    part.push(event);
                    size += length;
                }
                _ => {
                    parts.push(vec![event]);
                    size = length;
                }
            }
            last = change.revision;
        }
        parts
    }
}
