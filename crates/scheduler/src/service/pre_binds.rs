//! Pods whose PreBind plugins run, or will run as soon as the pods have permission.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrite_client::ObjectKey;
use ferrite_json::Text;
use tokio::sync::oneshot;

use crate::snapshot::PodInfo;

#[derive(Debug)]
struct Entry {
    uid: Option<Text>,
    cancel: oneshot::Sender<&'static str>,
}

#[derive(Debug, Default)]
pub(super) struct PreBinds(Mutex<HashMap<ObjectKey, Entry>>);

/// A pod's place among them, until it is dropped.
#[derive(Debug)]
pub(super) struct PreBind<'a> {
    all: &'a PreBinds,
    key: ObjectKey,
    cancelled: oneshot::Receiver<&'static str>,
}

impl PreBinds {
    fn entries(&self) -> MutexGuard<'_, HashMap<ObjectKey, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, pod: &PodInfo) -> PreBind<'_> {
        let (cancel, cancelled) = oneshot::channel();
        self.entries().insert(pod.key.clone(), Entry { uid: pod.uid.clone(), cancel });
        PreBind { all: self, key: pod.key.clone(), cancelled }
    }

    /// Stops the pod's plugins: it is not bound. False if they have done their work, or if there is none.
    pub(super) fn cancel(&self, pod: &PodInfo, cause: &'static str) -> bool {
        let mut entries = self.entries();
        if entries.get(&pod.key).is_none_or(|entry| entry.uid != pod.uid) {
            return false;
        }
        entries.remove(&pod.key).is_some_and(|entry| entry.cancel.send(cause).is_ok())
    }
}

impl PreBind<'_> {
    /// Does `work`, unless it is cancelled. Once it is done it cannot be cancelled any more.
    pub(super) async fn run<T, E>(
        mut self,
        work: impl Future<Output = Result<T, E>>,
        error: impl Fn(&'static str) -> E,
    ) -> Result<T, E> {
        let done = tokio::select! {
            biased;
            Ok(cause) = &mut self.cancelled => return Err(error(cause)),
            done = work => done?,
        };
        // Both hold the lock when they take the entry out: either the cause is there, or nobody cancels.
        self.all.entries().remove(&self.key);
        match self.cancelled.try_recv() {
            Ok(cause) => Err(error(cause)),
            Err(_) => Ok(done),
        }
    }
}

impl Drop for PreBind<'_> {
    fn drop(&mut self) {
        self.all.entries().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;
    use futures_util::FutureExt;

    use super::*;

    fn pod(uid: &str) -> PodInfo {
        let pod = json!({"metadata": {"name": "a", "namespace": "ns", "uid": uid}});
        PodInfo::new(&ferrite_json::from_value(pod).unwrap())
    }

    #[test]
    fn work_is_cancelled_until_it_is_done() {
        let (all, one) = (PreBinds::default(), pod("1"));
        let never = std::future::pending::<Result<(), &'static str>>;
        let mut running = Box::pin(all.begin(&one).run(never(), |cause| cause));
        assert_eq!((&mut running).now_or_never(), None);
        assert!(!all.cancel(&pod("2"), "another pod of that name"));
        assert!(all.cancel(&one, "deleted"));
        assert!(!all.cancel(&one, "again"));
        assert_eq!(running.now_or_never(), Some(Err("deleted")));

        let early = all.begin(&one);
        assert!(all.cancel(&one, "before it began"));
        assert_eq!(early.run(never(), |cause| cause).now_or_never(), Some(Err("before it began")));

        let late =
            all.begin(&one).run(async { Ok::<_, &'static str>(all.cancel(&one, "at the end")) }, |c| c);
        assert_eq!(late.now_or_never(), Some(Err("at the end")));

        let done = all.begin(&one).run(async { Ok::<_, &'static str>(()) }, |cause| cause);
        assert_eq!(done.now_or_never(), Some(Ok(())));
        assert!(!all.cancel(&one, "too late"));

        drop(all.begin(&one));
        assert!(all.entries().is_empty());
    }
}
