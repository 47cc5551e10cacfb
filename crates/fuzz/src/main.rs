//! One binary for all targets: `FERRITE_FUZZ` names the target.
//!
//! Built by `cargo xtask fuzz` it is a coverage-guided fuzzer; built plainly it runs the target once on
//! each given file, for example to debug a finding.

#![cfg_attr(fuzzing, no_main)]

use ferrite_fuzz::{TARGETS, Target};

fn chosen() -> &'static Target {
    let name = std::env::var("FERRITE_FUZZ").unwrap_or_default();
    TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("FERRITE_FUZZ must be one of {}", names.join(", "));
        std::process::exit(2)
    })
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static TARGET: std::sync::OnceLock<&Target> = std::sync::OnceLock::new();
    (TARGET.get_or_init(chosen).run)(data);
});

#[cfg(not(fuzzing))]
fn main() -> std::io::Result<()> {
    let target = chosen();
    for file in std::env::args_os().skip(1) {
        (target.run)(&std::fs::read(file)?);
    }
    Ok(())
}
