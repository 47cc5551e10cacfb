//! Where a cluster keeps its things.

use std::path::{Path, PathBuf};

/// The directories of one cluster. With `--data-dir` everything lives below it, so that several clusters stand
/// side by side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    pub data: PathBuf,
    pub run: PathBuf,
    pub config: PathBuf,
    /// Short and unique on this machine: names of links, cgroups and contexts are made from it.
    pub cluster: String,
}

pub const DEFAULT_DATA: &str = "/var/lib/ferrite";

impl Paths {
    pub fn new(data: &Path) -> Self {
        if data == Path::new(DEFAULT_DATA) {
            return Self {
                data: data.to_owned(),
                run: "/run/ferrite".into(),
                config: "/etc/ferrite".into(),
                cluster: "ferrite".into(),
            };
        }
        let data = std::path::absolute(data).unwrap_or_else(|_| data.to_owned());
        let hash = data
            .as_os_str()
            .as_encoded_bytes()
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
        Self {
            run: data.join("run"),
            config: data.join("config"),
            cluster: format!("ferrite-{:06x}", hash & 0xff_ffff),
            data,
        }
    }

    pub fn pki(&self) -> PathBuf {
        self.data.join("pki")
    }

    /// The authority whose certificates open the store's etcd API.
    pub fn etcd_pki(&self) -> PathBuf {
        self.pki().join("etcd")
    }

    pub fn store(&self) -> PathBuf {
        self.data.join("store")
    }

    /// Where the embedded store answers etcd's tools.
    pub fn etcd_socket(&self) -> PathBuf {
        self.run.join("etcd.sock")
    }

    pub fn snapshots(&self) -> PathBuf {
        self.data.join("snapshots")
    }

    pub fn runtime(&self) -> PathBuf {
        self.data.join("runtime")
    }

    /// Where the runtime answers crictl and kubelets.
    pub fn cri_socket(&self) -> PathBuf {
        self.run.join("cri.sock")
    }

    pub fn images(&self) -> PathBuf {
        self.data.join("images")
    }

    pub fn kubelet(&self) -> PathBuf {
        self.data.join("kubelet")
    }

    /// The node's local volumes.
    pub fn volumes(&self) -> PathBuf {
        self.data.join("volumes")
    }

    pub fn pod_logs(&self) -> PathBuf {
        self.data.join("logs/pods")
    }

    /// Results of CNI plugins.
    pub fn cni_results(&self) -> PathBuf {
        self.network().join("cni")
    }

    pub fn network(&self) -> PathBuf {
        self.data.join("network")
    }

    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.config.join("admin.kubeconfig")
    }

    /// Mirrors and settings of registries, written by the user.
    pub fn registries(&self) -> PathBuf {
        self.config.join("registries.yaml")
    }

    /// The file with the cluster's process and start options.
    pub fn state(&self) -> PathBuf {
        self.data.join("cluster.json")
    }

    pub fn log(&self) -> PathBuf {
        self.data.join("ferrite.log")
    }

    /// Name of the bridge: at most 15 bytes, as the kernel wants it.
    pub fn bridge(&self) -> String {
        match self.cluster.strip_prefix("ferrite-") {
            None => "ferrite0".into(),
            Some(hash) => format!("fe-{hash}"),
        }
    }

    /// Nodes of this cluster on this machine, beside the one of the cluster's own process.
    pub fn nodes(&self) -> PathBuf {
        self.data.join("nodes")
    }

    /// Short enough to be a part of a link's name.
    fn short(&self) -> &str {
        self.cluster.strip_prefix("ferrite-").unwrap_or(&self.cluster)
    }

    /// Name of the bridge that connects nodes on this machine.
    pub fn segment(&self) -> String {
        format!("fs-{}", self.short())
    }

    /// Name of this machine's end of a node's link.
    pub fn node_port(&self, index: u8) -> String {
        format!("fn-{}-{index}", self.short())
    }

    /// The nftables table of Services.
    pub fn proxy_table(&self) -> String {
        format!("kube-proxy-{}", self.bridge())
    }

    /// The cgroup under which everything of the cluster runs.
    pub fn cgroup(&self) -> String {
        format!("/{}", self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_do_not_share_names() {
        let (a, b) = (Paths::new(Path::new("/tmp/a")), Paths::new(Path::new("/tmp/b")));
        assert_ne!(a.cluster, b.cluster);
        assert_ne!(a.bridge(), b.bridge());
        for name in [a.bridge(), a.segment(), a.node_port(255)] {
            assert!(name.len() <= 15, "{name}");
        }
        assert!(a.run.starts_with("/tmp/a"));
        let default = Paths::new(Path::new(DEFAULT_DATA));
        assert!(default.node_port(255).len() <= 15);
        assert_eq!((default.bridge().as_str(), default.cgroup().as_str()), ("ferrite0", "/ferrite"));
    }
}
