//! `cargo xtask test`: everything that must hold before a change lands.

use std::path::Path;
use std::process::Command;

/// Tools that the tests need (a program by name, another file by path), and the Debian package of each.
const TOOLS: &[(&str, &str)] = &[
    ("kubectl", "kubernetes-client"),
    ("busybox", "busybox-static"),
    ("docker-registry", "docker-registry"),
    ("etcd", "etcd-server"),
    ("etcdctl", "etcd-client"),
    ("runc", "runc"),
    ("crun", "crun"),
    ("/lib/systemd/systemd", "systemd"),
    ("containerd", "containerd"),
    ("openssl", "openssl"),
    ("curl", "curl"),
    ("dig", "bind9-dnsutils"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("/usr/lib/python3/dist-packages/kubernetes/__init__.py", "python3-kubernetes"),
    ("jq", "jq"),
    ("nsenter", "util-linux"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
];

/// Links to private items are for readers of the source, whom they help.
const RUSTDOC_FLAGS: &str = "-D warnings -A rustdoc::private_intra_doc_links";

/// The crates that have examples in their documentation, which nextest does not run.
const DOC_TESTS: &[&str] = &["-p", "ferrite-cel", "-p", "ferrite-json", "-p", "ferrite-memory"];

pub fn run(arguments: &[String]) -> Result<(), String> {
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    install(has("--install"))?;
    cargo(&["fmt", "--all", "--check"])?;
    crate::policy::check()?;
    cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])?;
    document()?;
    cargo(&[&["test", "--doc", "--quiet"], DOC_TESTS].concat())?;
    let quick = has("--quick");
    let nextest = Command::new("cargo").args(["nextest", "--version"]).output();
    if nextest.is_ok_and(|o| o.status.success()) {
        let filter: &[&str] = if quick { &["-E", "not (binary(e2e) or binary(attacks))"] } else { &[] };
        cargo(&[&["nextest", "run", "--workspace", "--no-fail-fast"], filter].concat())
    } else {
        let filter: &[&str] = if quick { &["--lib", "--bins"] } else { &[] };
        cargo(&[&["test", "--workspace", "--no-fail-fast"], filter].concat())
    }
}

/// Documents every crate: a broken link is an error.
fn document() -> Result<(), String> {
    eprintln!("+ cargo doc --workspace --no-deps");
    let mut doc = Command::new("cargo");
    doc.args(["doc", "--workspace", "--no-deps", "--quiet"]).env("RUSTDOCFLAGS", RUSTDOC_FLAGS);
    let status = doc.status().map_err(|e| format!("cannot run cargo doc: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo doc failed: {status}")) }
}

/// Installs missing tools when asked to and possible; otherwise lists them.
fn install(allowed: bool) -> Result<(), String> {
    let missing: Vec<&str> =
        TOOLS.iter().filter(|(tool, _)| !is_installed(tool)).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !allowed {
        return Err(format!(
            "the tests need {missing:?}: run `apt-get install {}`, or `cargo xtask test --install`",
            missing.join(" ")
        ));
    }
    command("apt-get", &["update", "-q"])?;
    let arguments = [&["install", "-y", "-q", "--no-install-recommends"], missing.as_slice()].concat();
    command("apt-get", &arguments)
}

fn is_installed(tool: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(tool).is_file()))
        || Path::new("/bin").join(tool).is_file()
}

pub fn cargo(arguments: &[&str]) -> Result<(), String> {
    command("cargo", arguments)
}

pub fn command(program: &str, arguments: &[&str]) -> Result<(), String> {
    eprintln!("+ {program} {}", arguments.join(" "));
    let status = Command::new(program)
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()
        .map_err(|e| format!("cannot run {program}: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("{program} {} failed: {status}", arguments.join(" "))) }
}
