//! `cargo xtask bench`: numbers of the release build.

/// A benchmark: the name it is asked for by, its package, and its target there.
const BENCHMARKS: &[(&str, &str, &str)] = &[
    ("cluster", "ferrite", "cluster"),
    ("controllers", "ferrite-controllers", "controllers"),
    ("server", "ferrite-apiserver", "server"),
    ("scheduler", "ferrite-scheduler", "scheduling"),
    ("store", "ferrite-store", "store"),
    ("runtime", "ferrite", "runtime"),
    ("scale", "ferrite", "scale"),
    ("network", "ferrite-proxy", "services"),
    ("network", "ferrite-proxy", "connections"),
    ("network", "ferrite-dns", "names"),
    ("network", "ferrite-policy", "policies"),
];

/// Runs those that are named, or all.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if let Some(unknown) = arguments.iter().find(|name| BENCHMARKS.iter().all(|(known, ..)| known != name)) {
        let mut names: Vec<&str> = BENCHMARKS.iter().map(|(name, ..)| *name).collect();
        names.dedup();
        return Err(format!("no benchmark {unknown:?}: there are {}", names.join(", ")));
    }
    for (name, package, target) in BENCHMARKS {
        if arguments.is_empty() || arguments.iter().any(|wanted| wanted == name) {
            crate::test::cargo(&["bench", "--package", package, "--bench", target])?;
        }
    }
    Ok(())
}
