//! Checks of the machine before the kubelet starts, and the limits of its own process.

use super::settings::{Settings, SettingsError};
use super::{RefusedStart, registration};
use crate::apiserver::BoxError;
use ferrite_cgroup::Layout;
use std::path::{Path, PathBuf};

/// Settings of the kernel that upstream's kubelet relies on, and their files.
const KERNEL: &[(&str, i64)] = &[
    ("vm/overcommit_memory", 1),
    ("vm/panic_on_oom", 0),
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// The checks that upstream makes before it starts.
pub(super) fn check(settings: &Settings) -> Result<(), BoxError> {
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    if settings.bool("failSwapOn") && swaps.lines().skip(1).any(|line| !line.trim().is_empty()) {
        return Err(RefusedStart::Swap.into());
    }
    let v1 = !Layout::detect().is_ok_and(|layout| layout.is_v2());
    if v1 && settings.bool("failCgroupV1") {
        return Err(RefusedStart::CgroupV1.into());
    }
    if v1 && settings.is_set("singleProcessOOMKill") && !settings.bool("singleProcessOOMKill") {
        return Err(RefusedStart::OomGroup.into());
    }
    if settings.bool("protectKernelDefaults") {
        check_kernel(Path::new("/proc/sys"))?;
    }
    registration::raise_open_files(settings)?;
    let score = settings.int("oomScoreAdj");
    if !(-1000..=1000).contains(&score) {
        let problem = "it is not between -1000 and 1000".to_owned();
        return Err(SettingsError::Value { field: "oomScoreAdj", problem }.into());
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", score.to_string()) {
        tracing::warn!(%error, "cannot set oom_score_adj");
    }
    Ok(())
}

/// With `protectKernelDefaults` a kernel with other settings is refused.
fn check_kernel(root: &Path) -> Result<(), RefusedStart> {
    let mut wrong = Vec::new();
    for (file, expected) in KERNEL {
        let name = file.replace('/', ".");
        let found =
            std::fs::read_to_string(root.join(file)).ok().and_then(|text| text.trim().parse::<i64>().ok());
        match found {
            Some(value) if value == *expected => {}
            Some(value) => wrong.push(format!(
                "invalid kernel flag: {name}, expected value: {expected}, actual value: {value}"
            )),
            None => wrong.push(format!("kernel flag {name} cannot be read")),
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(RefusedStart::Kernel(wrong.join("; "))) }
}

/// The lock of `--lock-file`, while this lives: one kubelet at a time has it.
#[derive(Debug)]
pub(super) struct ProcessLock {
    _file: nix::fcntl::Flock<std::fs::File>,
}

impl ProcessLock {
    /// Waits for the lock, as upstream does.
    pub(super) async fn acquire(path: PathBuf) -> Result<Self, BoxError> {
        let shown = path.display().to_string();
        let locked = tokio::task::spawn_blocking(move || {
            let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
            nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusive)
                .map_err(|(_, errno)| std::io::Error::from(errno))
        });
        let file = locked.await?.map_err(|error| format!("cannot lock --lock-file {shown}: {error}"))?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protected_kernel_has_upstreams_settings() {
        let root = tempfile::tempdir().unwrap();
        for (file, value) in KERNEL {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{value}\n")).unwrap();
        }
        check_kernel(root.path()).unwrap();
        std::fs::write(root.path().join("kernel/panic"), "0\n").unwrap();
        std::fs::remove_file(root.path().join("vm/panic_on_oom")).unwrap();
        let said = check_kernel(root.path()).unwrap_err().to_string();
        assert!(said.contains("kernel.panic, expected value: 10, actual value: 0"), "{said}");
        assert!(said.contains("vm.panic_on_oom cannot be read"), "{said}");
    }

    #[tokio::test]
    async fn one_process_has_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = ProcessLock::acquire(path.clone()).await.unwrap();
        let waiting = tokio::spawn(ProcessLock::acquire(path));
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(held);
        assert!(waiting.await.unwrap().is_ok());
    }
}
