//! The CPU manager, the memory manager and the topology manager: processors of a container's own, memory of some NUMA
//! nodes, and resources near to one another.
//!
//! `machine.rs` reads where processors are; `assign.rs`, `cpu.rs`, `hint.rs` and `device_hints.rs` decide and are pure;
//! `memory.rs` decides which NUMA nodes memory comes from, and is pure. `manager.rs` holds the state, keeps it in the files
//! `cpu_manager_state` and `memory_manager_state` and updates the runtime.

mod assign;
mod cpu;
mod cpuset;
mod device_hints;
mod hint;
mod machine;
mod manager;
mod mask;
mod memory;
mod memory_file;

pub use cpu::{CpuOptionError, CpuOptions, CpuPolicy, CpuStartError};
pub use cpuset::{CpuSetError, cpu_count};
pub(crate) use device_hints::DeviceView;
pub use hint::{TopologyPolicy, TopologyScope};
pub(crate) use machine::CpuTopology;
#[cfg(test)]
pub(crate) use machine::tests::machine as test_machine;
pub(crate) use manager::{ContainerCpus, NodeReserve, ResourceManager, at_once};
pub use manager::{ResourceSettings, ResourceStartError};
pub(crate) use memory::{Block as MemoryBlock, read_nodes as read_memory_nodes};
pub use memory::{MemoryPolicy, MemoryStartError, NumaReservation};
pub use memory_file::MemoryFileError;
