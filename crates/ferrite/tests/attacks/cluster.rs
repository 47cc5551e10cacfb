//! From beside the cluster: local users, other processes, damaged files, floods of connections.

mod directory;
