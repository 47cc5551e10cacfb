//! Every target on its seeds, cut short and damaged in every place: the first attempts of a fuzzer.

use ferrite_fuzz::{TARGETS, Target};
use std::fs;
use std::path::Path;

/// Values that tend to be a boundary somewhere.
const DAMAGE: &[u8] = &[0, 0x7f, 0x80, 0xff, b'"', b'{', b'%'];

#[test]
fn damaged_seeds_are_survived() {
    for target in TARGETS {
        for seed in seeds(target) {
            (target.run)(&seed);
            for at in 0..seed.len() {
                (target.run)(&seed[..at]);
                let mut damaged = seed.clone();
                damaged[at] = DAMAGE[at % DAMAGE.len()];
                (target.run)(&damaged);
            }
        }
    }
}

fn seeds(target: &Target) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target.name);
    let files = fs::read_dir(directory).expect("a target has seeds");
    files.map(|file| fs::read(file.expect("a file").path()).expect("a seed")).collect()
}
