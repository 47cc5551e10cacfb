//! File operations of a root process on trees that a container may write.
//!
//! The author of a pod is an enemy: every name below a volume, a root file system or a log directory may be a
//! symbolic link, a FIFO, a device, a mount point, or ten thousand directories deep, and it may change between
//! two system calls. The operations here keep four promises:
//!
//! - They work on descriptors. A path is resolved beneath the directory it is given to ([`Dir`]), and links are
//!   not followed.
//! - They open regular files and directories and nothing else, so that no open blocks or drives a device.
//! - They do not recurse. [`remove_tree`] and [`walk`] need the same stack and the same number of descriptors for
//!   every tree.
//! - They stay on one mount. A mount point below a tree that is removed is an error, never a way into the host.

mod dir;
mod file;
pub mod mounts;
mod remove;
mod socket;
mod walk;

pub use dir::Dir;
pub use file::{open_regular, private_dir, read_head, read_tail};
pub use remove::remove_tree;
pub use socket::listen_private;
pub use walk::{Usage, Visit, usage, walk};
