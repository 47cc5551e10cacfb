//! The etcd v3 API, both ways: [`server`] answers it over the embedded store, so that `etcdctl` and other tools
//! read the stored objects; [`client`] makes a store out of a real etcd cluster.

pub mod client;
pub mod proto;
pub mod server;
