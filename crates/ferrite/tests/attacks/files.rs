//! From inside a container: what it writes where a root process reads, follows or removes.
