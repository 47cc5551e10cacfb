//! The messages and services, as compiled from `proto/`.
#![allow(clippy::all, clippy::unwrap_used, reason = "generated")]

pub mod mvccpb {
    include!(concat!(env!("OUT_DIR"), "/mvccpb.rs"));
}

pub mod etcdserverpb {
    include!(concat!(env!("OUT_DIR"), "/etcdserverpb.rs"));
}
