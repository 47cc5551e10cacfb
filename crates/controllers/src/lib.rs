//! The controllers of kube-controller-manager.
