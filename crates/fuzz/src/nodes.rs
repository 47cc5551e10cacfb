//! Targets for inputs of nodes: streams, layers, image names, pages, DNS packets.

use crate::Target;
use ferrite_apiserver::fuzzing::page;
use ferrite_runtime::{fuzzing, image::Reference};

pub const SPDY: Target = Target {
    name: "spdy",
    run: |bytes| {
        let _ = fuzzing::spdy(bytes);
    },
};

pub const LAYER: Target = Target {
    name: "layer",
    run: |bytes| {
        let _ = fuzzing::layer(bytes);
    },
};

pub const REFERENCE: Target = Target {
    name: "reference",
    run: |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let Ok(reference) = text.parse::<Reference>() else { return };
        let again: Reference = reference.to_string().parse().expect("what we wrote reads");
        assert_eq!(again.to_string(), reference.to_string());
    },
};

pub const PAGE: Target = Target {
    name: "page",
    run: |bytes| {
        // Longer tags pass as they are as soon as they turn out to be, which depends on the pieces.
        if bytes.len() < 4096 {
            assert_eq!(page(bytes, 1), page(bytes, bytes.len()), "a page is rewritten differently in pieces");
        }
    },
};

pub const DNS: Target = Target { name: "dns", run: ferrite_dns::fuzzing::packet };
