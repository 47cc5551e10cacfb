//! A plugin's word against a pod or a node.

use std::borrow::Cow;
use std::error::Error;
use std::sync::Arc;

/// The reason for a rejection, as people read it.
pub type Reason = Cow<'static, str>;

/// The name under which extenders reject nodes.
pub(crate) const EXTENDER: &str = "Extender";

/// A plugin could not do its work. The pod is tried again after its back-off.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}{source}", prefix(point, plugin))]
pub struct PluginError {
    /// The extension point, as upstream names it: `Filter`, `PreBind`, …
    pub point: &'static str,
    pub plugin: &'static str,
    #[source]
    pub source: Arc<dyn Error + Send + Sync>,
}

/// The beginning of the message, worded as upstream's.
fn prefix(point: &str, plugin: &str) -> String {
    match (point, plugin) {
        (_, EXTENDER) => String::new(),
        ("Filter", plugin) => format!("running {plugin:?} filter plugin: "),
        (point, plugin) => format!("running {point} plugin {plugin:?}: "),
    }
}

/// Equal only to itself: the sources of two errors cannot be compared.
impl PartialEq for PluginError {
    fn eq(&self, other: &Self) -> bool {
        self.point == other.point && self.plugin == other.plugin && Arc::ptr_eq(&self.source, &other.source)
    }
}

impl PluginError {
    pub fn new(
        point: &'static str,
        plugin: &'static str,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { point, plugin, source: Arc::from(source.into()) }
    }
}

/// The answer of a plugin that does not accept a pod, or a node for a pod.
#[derive(Debug, Clone, PartialEq)]
pub enum Rejection {
    /// Removing other pods could change it.
    Unschedulable(Vec<Reason>),
    /// Removing other pods cannot change it: preemption skips the node.
    UnschedulableAndUnresolvable(Vec<Reason>),
    /// The plugin failed. This says nothing about the pod.
    Error(PluginError),
}

impl Rejection {
    pub fn unschedulable(reason: impl Into<Reason>) -> Self {
        Self::Unschedulable(vec![reason.into()])
    }

    pub fn unresolvable(reason: impl Into<Reason>) -> Self {
        Self::UnschedulableAndUnresolvable(vec![reason.into()])
    }

    /// The reasons; none for an error.
    pub fn reasons(&self) -> &[Reason] {
        match self {
            Self::Unschedulable(reasons) | Self::UnschedulableAndUnresolvable(reasons) => reasons,
            Self::Error(_) => &[],
        }
    }

    /// The name of the status in metrics.
    pub(crate) fn status(&self) -> &'static str {
        match self {
            Self::Unschedulable(_) => "Unschedulable",
            Self::UnschedulableAndUnresolvable(_) => "UnschedulableAndUnresolvable",
            Self::Error(_) => "Error",
        }
    }

    /// True if removing pods from the node could help.
    pub fn is_resolvable(&self) -> bool {
        matches!(self, Self::Unschedulable(_))
    }
}

impl std::fmt::Display for Rejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Error(error) => error.fmt(f),
            rejection => f.write_str(&rejection.reasons().join(", ")),
        }
    }
}

impl From<PluginError> for Rejection {
    fn from(error: PluginError) -> Self {
        Self::Error(error)
    }
}

/// The plugin that rejected, and its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct RejectedBy {
    pub plugin: &'static str,
    pub rejection: Rejection,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_worded_as_upstream_words_them() {
        for (point, plugin, expected) in [
            ("PreFilter", "X", "running PreFilter plugin \"X\": no luck"),
            ("Filter", "X", "running \"X\" filter plugin: no luck"),
            ("Filter", EXTENDER, "no luck"),
            ("Bind", "X", "running Bind plugin \"X\": no luck"),
        ] {
            assert_eq!(PluginError::new(point, plugin, "no luck").to_string(), expected);
        }
    }
}
