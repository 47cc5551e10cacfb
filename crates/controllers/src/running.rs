//! The metric of the controllers that run, with upstream's name.

use std::sync::{Arc, LazyLock};

use ferrite_client::Scope;
use ferrite_component::metrics::{Family, Gauge, registry};

const MANAGER: &str = "kube-controller-manager";

static RUNNING: LazyLock<Arc<Family<Gauge>>> = LazyLock::new(|| {
    registry().gauge(
        "running_managed_controllers",
        "1 for each controller that runs in this process, 0 for one that has stopped.",
        &["name", "manager"],
    )
});

/// Shows the controllers as running until the scope ends.
pub(crate) fn show(names: Vec<&'static str>, scope: &Scope) {
    let set = |names: &[&str], value| names.iter().for_each(|name| RUNNING.with(&[name, MANAGER]).set(value));
    set(&names, 1);
    let ended = scope.token().clone();
    scope.spawn_graceful(async move {
        ended.cancelled().await;
        set(&names, 0);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn controllers_run_until_their_scope_ends() {
        let scope = Scope::new();
        show(vec!["test-controller"], &scope);
        let running = || RUNNING.with(&["test-controller", MANAGER]).get();
        assert_eq!(running(), 1);
        scope.shutdown().await;
        assert_eq!(running(), 0);
    }
}
