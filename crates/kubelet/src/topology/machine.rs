//! Where the machine's processors are: threads of cores, sockets, shared caches, NUMA nodes.

use super::cpuset::CpuSet;
use super::mask::NumaMask;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// One processor (a thread of a core).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cpu {
    pub numa: u32,
    pub socket: u32,
    /// The lowest thread of the core stands for it.
    pub core: u32,
    /// The last cache that several cores share; the socket where there is none.
    pub uncore: u32,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CpuTopology {
    pub cpus: BTreeMap<u32, Cpu>,
    /// From each NUMA node to each, in the order of their numbers.
    pub distances: BTreeMap<u32, Vec<u32>>,
}

impl CpuTopology {
    /// Reads the kernel's files below `/sys/devices/system`. A machine without them has one socket and one
    /// node.
    pub(crate) fn read(system: &Path, count: u32) -> Self {
        let text = |path: String| std::fs::read_to_string(system.join(path)).unwrap_or_default();
        let online: CpuSet = text("cpu/online".into()).parse().unwrap_or_default();
        let online = if online.is_empty() { (0..count.max(1)).collect() } else { online };
        let nodes: CpuSet = text("node/online".into()).parse().unwrap_or_default();
        let mut topology = Self::default();
        for cpu in online.iter() {
            let of = |file: &str| text(format!("cpu/cpu{cpu}/topology/{file}"));
            let socket = of("physical_package_id").trim().parse().unwrap_or(0);
            let siblings: CpuSet = of("thread_siblings_list").parse().unwrap_or_default();
            let core = siblings.iter().find(|sibling| online.contains(*sibling)).unwrap_or(cpu);
            let uncore = text(format!("cpu/cpu{cpu}/cache/index3/id")).trim().parse().unwrap_or(socket);
            topology.cpus.insert(cpu, Cpu { numa: 0, socket, core, uncore });
        }
        for node in nodes.iter() {
            let members: CpuSet = text(format!("node/node{node}/cpulist")).parse().unwrap_or_default();
            for cpu in members.iter() {
                if let Some(cpu) = topology.cpus.get_mut(&cpu) {
                    cpu.numa = node;
                }
            }
            let distances = text(format!("node/node{node}/distance"));
            let distances = distances.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            topology.distances.insert(node, distances);
        }
        topology
    }

    pub(crate) fn all(&self) -> CpuSet {
        self.cpus.keys().copied().collect()
    }

    pub(crate) fn numa_nodes(&self) -> BTreeSet<u32> {
        self.cpus.values().map(|cpu| cpu.numa).collect()
    }

    pub(crate) fn sockets(&self) -> BTreeSet<u32> {
        self.cpus.values().map(|cpu| cpu.socket).collect()
    }

    /// Threads of a core, on a machine whose cores are alike.
    pub(crate) fn cpus_per_core(&self) -> usize {
        let cores: BTreeSet<u32> = self.cpus.values().map(|cpu| cpu.core).collect();
        if cores.is_empty() { 1 } else { (self.cpus.len() / cores.len()).max(1) }
    }

    pub(crate) fn cpus_per_socket(&self) -> usize {
        self.cpus.len() / self.sockets().len().max(1)
    }

    pub(crate) fn cpus_per_uncore(&self) -> usize {
        let caches: BTreeSet<u32> = self.cpus.values().map(|cpu| cpu.uncore).collect();
        self.cpus.len() / caches.len().max(1)
    }

    /// The processors for which the test holds.
    pub(crate) fn select(&self, test: impl Fn(u32, &Cpu) -> bool) -> CpuSet {
        self.cpus.iter().filter(|(id, cpu)| test(**id, cpu)).map(|(id, _)| *id).collect()
    }

    /// The processors of these nodes.
    pub(crate) fn in_mask(&self, mask: NumaMask) -> CpuSet {
        self.select(|_, cpu| mask.has(cpu.numa))
    }

    pub(crate) fn sockets_in(&self, mask: NumaMask) -> BTreeSet<u32> {
        self.cpus.values().filter(|cpu| mask.has(cpu.numa)).map(|cpu| cpu.socket).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine of sockets with NUMA nodes, cores and threads; threads of one core are far apart, as Linux numbers
    /// them.
    pub(crate) fn machine(sockets: u32, nodes: u32, cores: u32, threads: u32) -> CpuTopology {
        let all = sockets * nodes * cores;
        let mut topology = CpuTopology::default();
        for thread in 0..threads {
            for core in 0..all {
                let node = core / cores;
                let cpu = Cpu { numa: node, socket: node / nodes, core, uncore: node };
                topology.cpus.insert(thread * all + core, cpu);
            }
        }
        for node in 0..sockets * nodes {
            let far = |other: u32| if other == node { 10 } else { 20 };
            topology.distances.insert(node, (0..sockets * nodes).map(far).collect());
        }
        topology
    }

    #[test]
    fn the_kernels_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("cpu/online", "0-3\n");
        put("node/online", "0-1\n");
        put("node/node0/cpulist", "0,2\n");
        put("node/node1/cpulist", "1,3\n");
        put("node/node0/distance", "10 21\n");
        for cpu in 0..4 {
            put(&format!("cpu/cpu{cpu}/topology/physical_package_id"), &format!("{}\n", cpu % 2));
            put(
                &format!("cpu/cpu{cpu}/topology/thread_siblings_list"),
                &format!("{},{}\n", cpu % 2, cpu % 2 + 2),
            );
        }
        let topology = CpuTopology::read(dir.path(), 9);
        assert_eq!(topology.cpus[&3], Cpu { numa: 1, socket: 1, core: 1, uncore: 1 });
        assert_eq!((topology.cpus_per_core(), topology.cpus_per_socket()), (2, 2));
        assert_eq!(topology.distances[&0], [10, 21]);
        let unknown = CpuTopology::read(&dir.path().join("none"), 2);
        assert_eq!(unknown.cpus[&1], Cpu { numa: 0, socket: 0, core: 1, uncore: 0 });
        assert!(!CpuTopology::read(Path::new("/sys/devices/system"), 1).cpus.is_empty());
    }
}
