//! The memory manager's file `memory_manager_state`, in upstream's format.

use super::memory::{Block, MemoryTable, NumaState};
use crate::state_file::{self, go_list, go_map};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Blocks by UID of the pod and name of the container.
pub(super) type Assignments = BTreeMap<String, BTreeMap<String, Vec<Block>>>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Checkpoint {
    pub(super) policy_name: String,
    /// The numbers of nodes are texts in JSON.
    machine_state: BTreeMap<String, NumaState>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) entries: Assignments,
    checksum: u64,
}

/// A file is not used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryFileError {
    #[error("the state file is no JSON of a memory manager: {0}")]
    Form(String),
    #[error("the state file is corrupted: its checksum is wrong")]
    Checksum,
}

impl Checkpoint {
    pub(super) fn new(policy: &str, machine: &BTreeMap<u32, NumaState>, entries: &Assignments) -> Self {
        Self {
            policy_name: policy.to_owned(),
            machine_state: machine.iter().map(|(node, state)| (node.to_string(), state.clone())).collect(),
            entries: entries.clone(),
            checksum: 0,
        }
    }

    pub(super) fn read(bytes: &[u8]) -> Result<Self, MemoryFileError> {
        let found: Self =
            ferrite_json::from_slice(bytes).map_err(|error| MemoryFileError::Form(error.to_string()))?;
        if found.machine_state.keys().any(|node| node.parse::<u32>().is_err()) {
            return Err(MemoryFileError::Form("a NUMA node has no number".into()));
        }
        // As upstream: a file without a checksum is of an old kubelet.
        if found.checksum != 0 && found.checksum != found.sum() {
            return Err(MemoryFileError::Checksum);
        }
        Ok(found)
    }

    pub(super) fn machine(&self) -> BTreeMap<u32, NumaState> {
        let numbered = |(node, state): (&String, &NumaState)| Some((node.parse().ok()?, state.clone()));
        self.machine_state.iter().filter_map(numbered).collect()
    }

    pub(super) fn write(mut self) -> Vec<u8> {
        self.checksum = self.sum();
        ferrite_json::to_vec(&self).unwrap_or_default()
    }

    /// The checksum of the text that Go's spew prints.
    fn sum(&self) -> u64 {
        let table = |table: &MemoryTable| {
            format!(
                "<*>{{TotalMemSize:(uint64){} SystemReserved:(uint64){} Allocatable:(uint64){} Reserved:(uint64){} Free:(uint64){}}}",
                table.total, table.system_reserved, table.allocatable, table.reserved, table.free
            )
        };
        let node = |state: &NumaState| {
            format!(
                "<*>{{NumberOfAssignments:(int){} MemoryMap:(map[v1.ResourceName]*state.MemoryTable){} Cells:([]int){}}}",
                state.number_of_assignments,
                go_map(state.memory_map.iter().map(|(name, found)| (name, table(found)))),
                go_list(&state.cells)
            )
        };
        let block = |block: &Block| {
            format!(
                "{{NUMAAffinity:([]int){} Type:(v1.ResourceName){} Size:(uint64){}}}",
                go_list(&block.numa_affinity),
                block.kind,
                block.size
            )
        };
        let containers = |all: &BTreeMap<String, Vec<Block>>| {
            go_map(all.iter().map(|(name, blocks)| (name, go_list(blocks.iter().map(block)))))
        };
        state_file::checksum(&format!(
            "(*state.MemoryManagerCheckpoint){{PolicyName:(string){} MachineState:(state.NUMANodeMap){} \
             Entries:(state.ContainerMemoryAssignments){} Checksum:(checksum.Checksum)0}}",
            self.policy_name,
            go_map(self.machine().iter().map(|(number, state)| (number, node(state)))),
            go_map(self.entries.iter().map(|(pod, all)| (pod, containers(all))))
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of upstream's own tests, with its checksum.
    #[test]
    fn upstreams_files_are_read() {
        let text = r#"{"policyName":"static",
            "machineState":{"0":{"numberOfAssignments":0,"memoryMap":{"memory":{"total":2048,"systemReserved":512,"allocatable":1536,"reserved":512,"free":1024}},"cells":[]}},
            "entries":{"pod":{"container1":[{"numaAffinity":[0],"type":"memory","size":512}]}},
            "checksum": 4215593881}"#;
        let read = Checkpoint::read(text.as_bytes()).unwrap();
        assert_eq!(read.machine()[&0].memory_map["memory"].free, 1024);
        assert_eq!(
            Checkpoint::read(&read.clone().write()).unwrap(),
            Checkpoint { checksum: read.sum(), ..read }
        );
        let wrong = text.replace("4215593881", "101010");
        assert_eq!(Checkpoint::read(wrong.as_bytes()), Err(MemoryFileError::Checksum));
        for broken in [
            "{",
            "[]",
            r#"{"policyName":"Static","machineState":{"x":{"numberOfAssignments":0,"memoryMap":{},"cells":[]}},"checksum":0}"#,
        ] {
            assert!(matches!(Checkpoint::read(broken.as_bytes()), Err(MemoryFileError::Form(_))), "{broken}");
        }
    }
}
