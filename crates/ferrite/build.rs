//! Links the optimised binary small: functions with the same machine code are kept once, and relocations are packed.
//!
//! Both are options of LLD, the linker that rustc brings along for this target.

use std::env;

const LINKER_ARGUMENTS: [&str; 2] = ["-Wl,--icf=all", "-Wl,-z,pack-relative-relocs"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |variable: &str, value: &str| env::var(variable).is_ok_and(|found| found == value);
    let has_lld = is("CARGO_CFG_TARGET_ARCH", "x86_64")
        && is("CARGO_CFG_TARGET_OS", "linux")
        && is("CARGO_CFG_TARGET_ENV", "gnu");
    if has_lld && !is("OPT_LEVEL", "0") {
        for argument in LINKER_ARGUMENTS {
            println!("cargo::rustc-link-arg-bins={argument}");
        }
    }
}
