//! `cargo xtask fuzz`: a coverage-guided fuzzer over one target of `crates/fuzz`.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Instrumentation that the stable compiler has; the fuzzer itself comes with `libfuzzer-sys`.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

const SEEDS: &str = "crates/fuzz/seeds";

/// Its own directory: other flags mean other artefacts.
const DIRECTORY: &str = "target/fuzz";

/// A target that needs more than this is out of proportion.
const MEMORY_MIB: u32 = 2048;

pub fn run(arguments: &[String]) -> Result<(), String> {
    let targets = targets()?;
    let (target, seconds) = match arguments {
        [target] => (target, "60"),
        [target, seconds] => (target, seconds.as_str()),
        _ => return Err(format!("a target is needed: {}", targets.join(", "))),
    };
    if !targets.contains(target) {
        return Err(format!("there is no target {target:?}: choose one of {}", targets.join(", ")));
    }
    let corpus = Path::new(DIRECTORY).join("corpus").join(target);
    fs::create_dir_all(&corpus).map_err(|e| format!("cannot make {}: {e}", corpus.display()))?;
    if !succeeds(&mut cargo("build"))? {
        return Err("the fuzzer cannot be built: it needs a C++ compiler".into());
    }
    let mut hunt = cargo("run");
    hunt.arg("--")
        .args([&corpus, &Path::new(SEEDS).join(target)])
        .args([format!("-max_total_time={seconds}"), format!("-rss_limit_mb={MEMORY_MIB}")])
        .args(["-timeout=10".to_owned(), format!("-artifact_prefix={DIRECTORY}/{target}-")])
        .env("FERRITE_FUZZ", target);
    if succeeds(&mut hunt)? {
        Ok(())
    } else {
        Err(format!("{target} broke: the input is {DIRECTORY}/{target}-…; keep it in {SEEDS}/{target}"))
    }
}

fn cargo(command: &str) -> Command {
    let mut cargo = Command::new("cargo");
    cargo
        .arg(command)
        .args(["--profile", "fuzz", "--package", "ferrite-fuzz", "--target-dir", DIRECTORY])
        .env("RUSTFLAGS", FLAGS);
    cargo
}

fn succeeds(command: &mut Command) -> Result<bool, String> {
    command.status().map(|status| status.success()).map_err(|e| format!("cannot run cargo: {e}"))
}

/// Every target has its seeds in a directory of its name.
fn targets() -> Result<Vec<String>, String> {
    let entries = fs::read_dir(SEEDS).map_err(|e| format!("cannot read {SEEDS}: {e}"))?;
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}
