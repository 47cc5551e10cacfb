//! The node agent: pod workers, probes, volumes, status, kubelet API.
