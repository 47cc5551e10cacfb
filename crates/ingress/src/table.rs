//! The table that requests are answered from. A change replaces it; a request keeps the one it began with.

use crate::backends::{Endpoints, Unreachable};
use crate::routes::{BackendRef, Routes, Target};
use ferrite_client::ObjectKey;
use rustls::sign::CertifiedKey;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// A port of a Service as requests see it.
#[derive(Debug)]
pub struct Backend {
    pub endpoints: Result<Endpoints, Unreachable>,
    turn: AtomicUsize,
}

impl Backend {
    pub fn new(endpoints: Result<Endpoints, Unreachable>) -> Self {
        Self { endpoints, turn: AtomicUsize::new(0) }
    }

    /// Counts requests, so that endpoints take turns.
    pub fn next_turn(&self) -> usize {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }
}

/// Everything that a response depends on. Copies share the parts that did not change.
#[derive(Debug, Clone, Default)]
pub struct Table {
    pub routes: Arc<Routes>,
    pub backends: imbl::HashMap<Arc<BackendRef>, Arc<Backend>>,
    /// By Secret.
    pub certificates: Arc<HashMap<ObjectKey, Arc<CertifiedKey>>>,
}

/// The end of a lookup.
#[derive(Debug, Clone)]
pub enum Found {
    Backend(Arc<Backend>),
    Unsupported,
    Nothing,
}

impl Table {
    pub fn find(&self, host: &str, path: &str) -> Found {
        match self.routes.find(host, path) {
            None => Found::Nothing,
            Some(Target::Unsupported) => Found::Unsupported,
            Some(Target::Service(reference)) => match self.backends.get(reference) {
                Some(backend) => Found::Backend(Arc::clone(backend)),
                None => Found::Unsupported,
            },
        }
    }

    pub fn certificate(&self, host: &str) -> Option<Arc<CertifiedKey>> {
        self.certificates.get(self.routes.certificate_of(host)?).cloned()
    }
}

/// The current table; None before the objects are known.
#[derive(Debug, Default)]
pub struct Tables(RwLock<Option<Arc<Table>>>);

impl Tables {
    pub fn current(&self) -> Option<Arc<Table>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn replace(&self, table: Table) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(table));
    }
}
