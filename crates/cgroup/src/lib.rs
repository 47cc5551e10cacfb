//! Control groups: one view of version 1 (one hierarchy per controller) and version 2 (the unified hierarchy).
//!
//! [`Layout`] is the hierarchies of this machine; [`Layout::detect`] finds them. A group is named by its path
//! below the mount points (`/ferrite/kubepods/pod…/<container>`), and the methods of `Layout` make it, limit it,
//! put processes into it, measure it and remove it. [`Limits`] has every limit in the kernel's numbers, whatever
//! the version: `limits.rs` makes control files of it, and the systemd crate makes properties of units of it.
//!
//! Nothing else in the project reads or writes control files. The calls do not wait, except [`Layout::kill`] and
//! [`Layout::remove`], which wait for the kernel: call those where waiting is allowed.

mod devices;
mod error;
mod groups;
mod layout;
mod limits;
mod stats;

pub use devices::{DeviceKind, DeviceRule};
pub use error::CgroupError;
pub use layout::{Hierarchy, Layout, Version};
pub use limits::{HugePages, Limits, cpu_weight};
pub use stats::{CpuStat, MemoryStat, SwapStat};
