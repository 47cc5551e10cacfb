//! Which AppArmor profile confines a container, and our own one.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ferrite_cri::v1::{LinuxContainerSecurityContext, security_profile::ProfileType};
use ferrite_cri::{Error, Result};

use super::Inner;

/// The profile `RuntimeDefault` means.
const DEFAULT: &str = "ferrite-default";

#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    Nothing,
    Default,
    Named(String),
}

fn wanted(security: &LinuxContainerSecurityContext) -> Wanted {
    if security.privileged {
        return Wanted::Nothing;
    }
    if let Some(profile) = &security.apparmor {
        return match profile.profile_type() {
            ProfileType::RuntimeDefault => Wanted::Default,
            ProfileType::Unconfined => Wanted::Nothing,
            ProfileType::Localhost => Wanted::Named(profile.localhost_ref.clone()),
        };
    }
    // The older field, with the words annotations used.
    match security.apparmor_profile.as_str() {
        "" | "unconfined" => Wanted::Nothing,
        "runtime/default" => Wanted::Default,
        name => Wanted::Named(name.strip_prefix("localhost/").unwrap_or(name).to_owned()),
    }
}

fn is_loaded(name: &str, loaded: &str) -> bool {
    loaded.lines().any(|line| line.rsplit_once(" (").map_or(line, |(profile, _)| profile) == name)
}

/// `loaded` lists the kernel's profiles, one per line with its mode; `None` when it has no AppArmor. A
/// profile somebody named must be there, as upstream; our own one is done without.
fn choose(wanted: &Wanted, loaded: Option<&str>) -> Result<Option<String>> {
    match (wanted, loaded) {
        (Wanted::Nothing, _) | (Wanted::Default, None) => Ok(None),
        (Wanted::Default, Some(loaded)) => Ok(is_loaded(DEFAULT, loaded).then(|| DEFAULT.to_owned())),
        (Wanted::Named(name), None) => Err(Error::invalid(format!(
            "AppArmor profile {name:?} cannot be applied: this machine has no AppArmor"
        ))),
        (Wanted::Named(name), Some(loaded)) if is_loaded(name, loaded) => Ok(Some(name.clone())),
        (Wanted::Named(name), _) => Err(Error::invalid(format!("AppArmor profile {name:?} is not loaded"))),
    }
}

/// The kernel's profiles; `None` when it has no AppArmor.
fn loaded() -> Option<String> {
    let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    enabled
        .is_ok_and(|text| text.starts_with('Y'))
        .then(|| std::fs::read_to_string("/sys/kernel/security/apparmor/profiles").unwrap_or_default())
}

/// Our profile: capabilities, mounts and the system call filter limit a container's processes. Beyond that
/// they may not change the kernel's files, mount, or access processes outside.
fn text() -> String {
    const RULES: &str = "  network,
  capability,
  file,
  umount,
  signal (receive) peer=unconfined,
  signal (send, receive) peer=NAME,
  ptrace (trace, read, tracedby, readby) peer=NAME,
  deny @{PROC}/* w,
  deny @{PROC}/{[^1-9],[^1-9][^0-9],[^1-9s][^0-9y][^0-9s],[^1-9][^0-9][^0-9][^0-9]*}/** w,
  deny @{PROC}/sys/[^k]** w,
  deny @{PROC}/sys/kernel/{?,??,[^s][^h][^m]**} w,
  deny @{PROC}/sysrq-trigger rwklx,
  deny @{PROC}/mem rwklx,
  deny @{PROC}/kmem rwklx,
  deny @{PROC}/kcore rwklx,
  deny mount,
  deny /sys/[^f]*/** wklx,
  deny /sys/f[^s]*/** wklx,
  deny /sys/fs/[^c]*/** wklx,
  deny /sys/fs/c[^g]*/** wklx,
  deny /sys/fs/cg[^r]*/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/kernel/security/** rwklx,
";
    let head =
        format!("@{{PROC}}=/proc/\n\nprofile {DEFAULT} flags=(attach_disconnected,mediate_deleted) {{\n");
    format!("{head}{}}}\n", RULES.replace("NAME", DEFAULT))
}

/// Has the kernel load our profile, with the tool that compiles profiles.
fn load(directory: &Path) -> std::result::Result<(), String> {
    const PLACES: &[&str] = &["/usr/sbin/apparmor_parser", "/sbin/apparmor_parser"];
    let parser = PLACES.iter().map(PathBuf::from).find(|path| path.exists());
    let parser = parser.ok_or("apparmor_parser is not installed")?;
    let path = directory.join("apparmor");
    crate::sys::write_atomic(&path, text().as_bytes(), false).map_err(|error| error.to_string())?;
    let mut command = Command::new(parser);
    command.arg("-Kr").arg(&path).stdin(Stdio::null());
    let output = command.output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).chars().take(512).collect()),
    }
}

impl Inner {
    /// The AppArmor profile to apply. Ours is loaded when it is first needed; where it cannot be, and where
    /// the kernel has no AppArmor, containers run without, which is said once.
    pub(super) fn apparmor_profile(
        &self,
        security: &LinuxContainerSecurityContext,
    ) -> Result<Option<String>> {
        let wanted = wanted(security);
        if wanted == Wanted::Nothing {
            return Ok(None);
        }
        let mut known = loaded();
        if known.is_none() && wanted == Wanted::Default {
            self.warn_once("this machine has no AppArmor");
        }
        if wanted == Wanted::Default && known.as_deref().is_some_and(|known| !is_loaded(DEFAULT, known)) {
            match load(&self.config.root) {
                Ok(()) => known = loaded(),
                Err(why) => self.warn_once(&format!("AppArmor profile {DEFAULT} is not loaded ({why})")),
            }
        }
        choose(&wanted, known.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cri::v1::SecurityProfile;

    #[test]
    fn profiles() {
        let loaded = "ferrite-default (enforce)\nmy (odd) name (complain)\n";
        let named = |name: &str| Wanted::Named(name.to_owned());
        for (want, loaded, chosen) in [
            (Wanted::Default, Some(loaded), Some(Some("ferrite-default"))),
            (Wanted::Default, Some(""), Some(None)),
            (Wanted::Default, None, Some(None)),
            (Wanted::Nothing, None, Some(None)),
            (named("my (odd) name"), Some(loaded), Some(Some("my (odd) name"))),
            (named("other"), Some(loaded), None),
            (named("other"), None, None),
        ] {
            let got = choose(&want, loaded);
            let got = got.as_ref().ok().map(|profile| profile.as_deref());
            assert_eq!(got, chosen, "{want:?} with {loaded:?}");
        }
        let security = LinuxContainerSecurityContext {
            apparmor: Some(SecurityProfile { profile_type: 2, localhost_ref: "x".into() }),
            ..Default::default()
        };
        assert_eq!(wanted(&security), named("x"));
        assert_eq!(wanted(&LinuxContainerSecurityContext { privileged: true, ..security }), Wanted::Nothing);
        let old =
            LinuxContainerSecurityContext { apparmor_profile: "localhost/y".into(), ..Default::default() };
        assert_eq!(wanted(&old), named("y"));
    }

    #[test]
    fn our_profile_is_whole() {
        let text = text();
        assert!(text.contains("profile ferrite-default flags=") && text.ends_with("}\n"), "{text}");
        assert!(text.contains("peer=ferrite-default,") && !text.contains("NAME"), "{text}");
        assert_eq!(text.matches('{').count(), text.matches('}').count());
    }
}
