//! The selinux-warning controller: says when pods that share a volume would have it labelled differently. It runs only where
//! somebody names it, as upstream: it makes sense only if nodes enforce SELinux.

mod controller;
mod decide;
mod volumes;

pub(crate) use controller::start;
