//! `cargo xtask bench`: numbers of the release build.

/// A benchmark: its name and the package it is in.
const BENCHMARKS: &[(&str, &str)] = &[
    ("cluster", "ferrite"),
    ("controllers", "ferrite-controllers"),
    ("server", "ferrite-apiserver"),
    ("store", "ferrite-store"),
    ("runtime", "ferrite"),
];

/// Runs those that are named, or all.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if let Some(unknown) = arguments.iter().find(|name| BENCHMARKS.iter().all(|(known, _)| known != name)) {
        let names: Vec<&str> = BENCHMARKS.iter().map(|(name, _)| *name).collect();
        return Err(format!("no benchmark {unknown:?}: there are {}", names.join(", ")));
    }
    for (name, package) in BENCHMARKS {
        if arguments.is_empty() || arguments.iter().any(|wanted| wanted == name) {
            crate::test::cargo(&["bench", "--package", package, "--bench", name])?;
        }
    }
    Ok(())
}
