//! What reaches a node: streams, layers, image names.

use crate::Target;
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
