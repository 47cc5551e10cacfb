//! The metrics of the node lifecycle controller, with upstream's names.

use std::sync::{Arc, LazyLock};

use ferrite_component::metrics::{Counter, Family, registry};

pub(super) static EVICTIONS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "node_collector_evictions_total",
        "Nodes from which pods began to be evicted since this controller started.",
        &["zone"],
    )
});
