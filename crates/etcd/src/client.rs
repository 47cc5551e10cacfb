//! A store out of a real etcd cluster.
