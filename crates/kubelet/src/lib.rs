//! The node agent: it registers the node, runs the pods bound to it and reports their status to the API.
//!
//! [`Kubelet::start`] is the entry point. A pod enters through the watch on pods (`pod::manager`), gets a worker
//! (`pod::worker`) that observes the runtime (`pod::observe`), decides what to do next (`pod::decide`, a
//! pure
//! function), does it (`pod::start`, `pod::kill`) and publishes the result (`pod::status`, `pod::writer`).
//! Nothing is polled: the worker wakes for changes in the API, events of the runtime, verdicts of probes
//! (`probe`) and the timers the API speaks of. All state is on the API and in the runtime, so a kubelet that
//! was killed simply starts again.

mod cgroup;
mod claims;
mod clock;
mod config;
mod container;
mod devices;
mod eviction;
mod hooks;
mod images;
mod kubelet;
mod logs;
mod node;
mod objects;
mod oom;
mod plugin_sockets;
mod pod;
mod pod_resources;
mod probe;
mod quantity;
mod runtime_class;
mod server;
mod shutdown;
mod sources;
pub mod standalone;
mod state_file;
#[cfg(test)]
mod testing;
mod topology;
mod userns;
mod volumes;
mod watchdog;

pub use cgroup::{Enforcement, GroupLimits, ReservedGroup};
pub use config::{Authorization, Config, ExternalCloudProvider, KubeletAccess};
pub use container::resources::{CpuQuota, SwapBehavior};
pub use container::sysctl::{UnsafeSysctlError, UnsafeSysctls};
pub use eviction::{EvictionSettings, ThresholdError};
pub use images::{Allowlist, PullLimits, VerificationPolicy, VerificationPolicyError};
pub use images::{ConfigError as CredentialProviderError, Plugins as CredentialProviderPlugins};
pub use kubelet::{Kubelet, StartError};
pub use logs::LogLimits;
pub use shutdown::{ShutdownPeriod, shutdown_periods};
pub use topology::{
    CpuOptionError, CpuOptions, CpuPolicy, CpuSetError, CpuStartError, MemoryFileError, MemoryPolicy,
    MemoryStartError, NumaReservation, ResourceSettings, ResourceStartError, TopologyPolicy, TopologyScope,
    cpu_count,
};
pub use watchdog::WatchdogError;
