//! Keeps the number of pods of a ReplicaSet or ReplicationController at the desired one.

mod decide;
mod kinds;
mod manager;

use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::ReplicationController;

use crate::Context;

pub(crate) fn start_replica_sets(context: &Context) {
    manager::start::<ReplicaSet>(context);
}

pub(crate) fn start_replication_controllers(context: &Context) {
    manager::start::<ReplicationController>(context);
}
