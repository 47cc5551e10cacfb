//! Kinds of the core group.

pub(super) mod binding;
pub(super) mod componentstatus;
pub(super) mod configmap;
pub(super) mod endpoints;
pub(super) mod event;
pub(super) mod limitrange;
pub(super) mod namespace;
pub(super) mod node;
pub(super) mod persistentvolume;
pub(super) mod persistentvolumeclaim;
pub mod pod;
pub(super) mod podtemplate;
pub(super) mod replicationcontroller;
pub(super) mod resourcequota;
pub(super) mod secret;
pub(super) mod service;
pub(super) mod serviceaccount;
