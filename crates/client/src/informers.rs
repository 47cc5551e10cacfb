//! The informers of a process, one per kind.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kube::{Client, Resource};
use tokio_util::sync::CancellationToken;

use crate::{Api, Informer, ListSelector, Object, Scope};

type Started = HashMap<(TypeId, ListSelector), Box<dyn Any + Send + Sync>>;

/// Gives all readers of a kind the same [`Informer`], started at the first request. Clones share.
#[derive(Clone)]
pub struct Informers {
    client: Client,
    scope: Scope,
    started: Arc<Mutex<Started>>,
    /// Ends subscriptions made through this value; without it handlers stay as long as the informers.
    session: Option<CancellationToken>,
}

impl std::fmt::Debug for Informers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informers").finish_non_exhaustive()
    }
}

impl Informers {
    /// The tasks of all informers belong to `scope`.
    pub fn new(client: Client, scope: Scope) -> Self {
        Self { client, scope, started: Arc::default(), session: None }
    }

    /// The same informers for a user that ends earlier than they do: its handlers are dropped when `scope` ends.
    pub fn session(&self, scope: &Scope) -> Self {
        Self { session: Some(scope.token().clone()), ..self.clone() }
    }

    /// The shared informer of `K` in all namespaces.
    pub fn get<K>(&self) -> Informer<K>
    where
        K: Object + Resource<DynamicType = ()>,
    {
        self.get_selected(ListSelector::everything())
    }

    /// The shared informer of those `K` that `selector` matches.
    pub fn get_selected<K>(&self, selector: ListSelector) -> Informer<K>
    where
        K: Object + Resource<DynamicType = ()>,
    {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        started
            .entry((TypeId::of::<K>(), selector.clone()))
            .or_insert_with(|| {
                Box::new(Informer::<K>::start(Api::all(self.client.clone()), selector, &self.scope))
            })
            .downcast_ref::<Informer<K>>()
            .expect("the entry is keyed by the type of what it holds")
            .in_session(self.session.clone())
    }
}
