//! The features that the container runtime reports.

use ferrite_cri::v1::StatusResponse;
use k8s_openapi::api::core::v1::{NodeFeatures, NodeRuntimeHandler, NodeRuntimeHandlerFeatures};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HandlerFeatures {
    pub recursive_read_only: bool,
    pub user_namespaces: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RuntimeFeatures {
    /// By the name of the handler; the default one has none.
    pub handlers: BTreeMap<String, HandlerFeatures>,
    pub supplemental_groups_policy: bool,
}

impl RuntimeFeatures {
    pub(crate) fn from_cri(status: &StatusResponse) -> Self {
        let handlers = status.runtime_handlers.iter().map(|handler| {
            let features = handler.features.unwrap_or_default();
            let features = HandlerFeatures {
                recursive_read_only: features.recursive_read_only_mounts,
                user_namespaces: features.user_namespaces,
            };
            (handler.name.clone(), features)
        });
        Self {
            handlers: handlers.collect(),
            supplemental_groups_policy: status.features.is_some_and(|f| f.supplemental_groups_policy),
        }
    }

    /// Nothing for a handler the runtime does not name.
    pub(crate) fn of(&self, handler: &str) -> Option<HandlerFeatures> {
        self.handlers.get(handler).copied()
    }

    /// As the Node's status shows them.
    pub(crate) fn shown(&self) -> (Option<NodeFeatures>, Option<Vec<NodeRuntimeHandler>>) {
        let handlers: Vec<NodeRuntimeHandler> = self
            .handlers
            .iter()
            .map(|(name, features)| NodeRuntimeHandler {
                name: Some(name.clone()),
                features: Some(NodeRuntimeHandlerFeatures {
                    recursive_read_only_mounts: Some(features.recursive_read_only),
                    user_namespaces: Some(features.user_namespaces),
                }),
            })
            .collect();
        let features = NodeFeatures { supplemental_groups_policy: Some(self.supplemental_groups_policy) };
        (Some(features), (!handlers.is_empty()).then_some(handlers))
    }

    #[cfg(test)]
    pub(crate) fn everything() -> Self {
        let all = HandlerFeatures { recursive_read_only: true, user_namespaces: true };
        Self { handlers: [(String::new(), all)].into(), supplemental_groups_policy: true }
    }
}
