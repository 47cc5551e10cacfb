//! The streams of one tunnel, divided among those who ask for them.
//!
//! A stream lasts as long as its client likes. Users must not keep the kubelet out of reach with streams to pods, nor the
//! server's own calls (webhooks, extension servers, figures of nodes) with streams of any kind, nor one another.

use crate::traffic::{Account, TooManyConnections};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most streams of one tunnel at once.
pub const STREAMS: u32 = 256;
/// Most of them that users ask for. The rest is for the server itself and for administrators.
const OF_USERS: u32 = 192;
/// Most of those of users that lead to pods.
const OF_USERS_TO_PODS: u32 = 96;
/// Most streams to pods that the server itself and administrators ask for.
pub const POD_STREAMS: u32 = 128;
/// Most streams of one user.
const OF_ONE_USER: usize = 64;

/// The far side of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Kubelet,
    Pod,
}

#[derive(Debug)]
pub(super) struct Room {
    all: Arc<Semaphore>,
    of_users: Arc<Semaphore>,
    of_users_to_pods: Arc<Semaphore>,
    of_server_to_pods: Arc<Semaphore>,
    /// Streams of each user, by the name of its account.
    users: Mutex<HashMap<Arc<str>, usize>>,
}

/// The place of one stream, until dropped.
#[derive(Debug)]
pub(crate) struct StreamPlace {
    _permits: [Option<OwnedSemaphorePermit>; 3],
    _share: Option<Share>,
}

/// One stream of a user.
#[derive(Debug)]
struct Share {
    room: Arc<Room>,
    name: Arc<str>,
}

impl Room {
    pub fn new() -> Arc<Self> {
        let semaphore = |streams: u32| Arc::new(Semaphore::new(streams as usize));
        Arc::new(Self {
            all: semaphore(STREAMS),
            of_users: semaphore(OF_USERS),
            of_users_to_pods: semaphore(OF_USERS_TO_PODS),
            of_server_to_pods: semaphore(POD_STREAMS),
            users: Mutex::default(),
        })
    }

    fn users(&self) -> MutexGuard<'_, HashMap<Arc<str>, usize>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place. A user that has its share is refused at once. Without an account it is the server or an
    /// administrator that asks.
    pub async fn enter(
        self: &Arc<Self>,
        account: Option<&Account>,
        target: Target,
    ) -> Result<StreamPlace, TooManyConnections> {
        let share = account.map(|account| self.share(account.name())).transpose()?;
        let to_pods = match (target, account) {
            (Target::Kubelet, _) => None,
            (Target::Pod, Some(_)) => Some(&self.of_users_to_pods),
            (Target::Pod, None) => Some(&self.of_server_to_pods),
        };
        // The narrowest limit first: a place in a wider one is not taken from others while waiting.
        let mut permits = [None, None, None];
        let limits = [to_pods, account.map(|_| &self.of_users), Some(&self.all)];
        for (permit, limit) in permits.iter_mut().zip(limits) {
            if let Some(limit) = limit {
                let taken = Arc::clone(limit).acquire_owned().await;
                *permit = Some(taken.expect("the semaphore is never closed"));
            }
        }
        Ok(StreamPlace { _permits: permits, _share: share })
    }

    fn share(self: &Arc<Self>, name: &Arc<str>) -> Result<Share, TooManyConnections> {
        let mut users = self.users();
        let held = users.entry(Arc::clone(name)).or_default();
        if *held >= OF_ONE_USER {
            return Err(TooManyConnections);
        }
        *held += 1;
        Ok(Share { room: Arc::clone(self), name: Arc::clone(name) })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut users = self.room.users();
        if let Some(held) = users.get_mut(&self.name) {
            *held -= 1;
            if *held == 0 {
                users.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::User;
    use crate::connections::ConnectionLimits;
    use crate::traffic::Traffic;
    use futures_util::FutureExt;

    /// As many places as can be had at once, up to `most`.
    fn take(room: &Arc<Room>, account: Option<&Account>, target: Target, most: usize) -> Vec<StreamPlace> {
        let places = std::iter::from_fn(|| room.enter(account, target).now_or_never()?.ok());
        places.take(most).collect()
    }

    fn accounts(count: usize) -> Vec<Account> {
        let traffic = Arc::new(Traffic::new(ConnectionLimits::default()));
        let account = |n: usize| traffic.account(&User::new(format!("user-{n}"), ["group"]));
        (0..count).filter_map(account).collect()
    }

    #[test]
    fn nobody_takes_the_places_of_others() {
        const ALL: usize = 1000;
        for (first, left_to_user, left_to_server, left_to_kubelet) in
            [(Target::Pod, 0, 128, 96), (Target::Kubelet, 0, 64, 0)]
        {
            let (room, users) = (Room::new(), accounts(8));
            let held: Vec<_> =
                users[..7].iter().flat_map(|user| take(&room, Some(user), first, ALL)).collect();
            assert!(held.len() <= OF_USERS as usize, "{first:?}");
            let last = users.last();
            assert_eq!(take(&room, last, first, ALL).len(), left_to_user, "{first:?}");
            assert_eq!(take(&room, None, Target::Pod, ALL).len(), left_to_server, "{first:?}");
            let kubelet = take(&room, last, Target::Kubelet, OF_ONE_USER);
            assert_eq!(kubelet.len(), left_to_kubelet.min(OF_ONE_USER), "{first:?}");
            assert!(!take(&room, None, Target::Kubelet, 1).is_empty(), "{first:?}");
        }
    }

    #[test]
    fn a_user_has_a_share_and_gets_it_back() {
        let (room, users) = (Room::new(), accounts(2));
        let held = take(&room, users.first(), Target::Pod, 1000);
        assert_eq!(held.len(), OF_ONE_USER);
        assert!(matches!(room.enter(users.first(), Target::Kubelet).now_or_never(), Some(Err(_))));
        assert_eq!(take(&room, users.last(), Target::Pod, 1000).len(), 32);
        drop(held);
        assert!(room.users().is_empty());
        assert_eq!(take(&room, users.first(), Target::Kubelet, 1000).len(), OF_ONE_USER);
    }

    #[test]
    fn the_server_leaves_the_kubelet_in_reach() {
        let room = Room::new();
        let held = take(&room, None, Target::Pod, 1000);
        assert_eq!(held.len(), POD_STREAMS as usize);
        assert_eq!(take(&room, None, Target::Kubelet, 1000).len(), (STREAMS - POD_STREAMS) as usize);
    }
}
