//! Network namespaces and their settings.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;

use nix::sched::{CloneFlags, setns};

use crate::Error;

nix::ioctl_none_bad!(namespace_kind, nix::request_code_none!(0xb7, 3));

/// The kind of a namespace; none if the file is something else.
fn kind_of(file: &File) -> Option<i32> {
    // SAFETY: the descriptor is open, and the request takes no pointer.
    unsafe { namespace_kind(file.as_raw_fd()) }.ok()
}

/// A network namespace. It exists as long as the value.
#[derive(Debug)]
pub struct Netns(OwnedFd);

impl Netns {
    /// The network namespace of the calling thread.
    pub fn current() -> Result<Self, Error> {
        let path = "/proc/thread-self/ns/net";
        File::open(path).map(|file| Self(file.into())).map_err(Error::io(format!("open {path}")))
    }

    /// The network namespace at a path, such as `/run/netns/x`.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io(format!("open {}", path.display())))?;
        match kind_of(&file) == Some(CloneFlags::CLONE_NEWNET.bits()) {
            true => Ok(Self(file.into())),
            false => Err(Error::NotANamespace(path.to_owned())),
        }
    }

    /// Runs `work` in the namespace, on a thread that ends with it: no other thread changes its namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        let entered = move || {
            setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET).map_err(io::Error::from)?;
            Ok(work())
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("netns".into()).spawn_scoped(scope, entered)?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
        .map_err(Error::io("enter the network namespace"))
    }

    /// The settings of the namespace below `/proc/sys/net`.
    pub fn sysctl(&self) -> Sysctl<'_> {
        Sysctl(self)
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The settings of a network namespace, by names such as `net.ipv4.ip_forward` or `net/ipv4/ip_forward`. The first
/// separator decides: with slashes, a dot is part of a name.
#[derive(Debug)]
pub struct Sysctl<'a>(&'a Netns);

impl Sysctl<'_> {
    /// The setting's value, without the line's end.
    pub fn get(&self, name: &str) -> Result<String, Error> {
        let path = path_of(name)?;
        let value = self.0.run(|| std::fs::read_to_string(path))?;
        value.map(|value| value.trim_end().to_owned()).map_err(Error::io(format!("read {name}")))
    }

    pub fn set(&self, name: &str, value: &str) -> Result<(), Error> {
        let path = path_of(name)?;
        self.0.run(|| std::fs::write(path, value))?.map_err(Error::io(format!("write {name}")))
    }
}

fn path_of(name: &str) -> Result<PathBuf, Error> {
    let dots = name.find(['.', '/']).is_some_and(|at| name.as_bytes().get(at) == Some(&b'.'));
    let path = if dots { name.replace('.', "/") } else { name.to_owned() };
    let honest = |part: &str| !part.is_empty() && part != "." && part != "..";
    if !path.starts_with("net/") || !path.split('/').all(honest) {
        let bad = io::Error::new(io::ErrorKind::InvalidInput, "not the name of a setting below net");
        return Err(Error::io(format!("{name:?}"))(bad));
    }
    Ok(Path::new("/proc/sys").join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_settings() {
        for (name, path) in [
            ("net.ipv4.ip_forward", Some("/proc/sys/net/ipv4/ip_forward")),
            ("net/ipv4/ip_forward", Some("/proc/sys/net/ipv4/ip_forward")),
            ("net/ipv6/conf/eth0.7/accept_ra", Some("/proc/sys/net/ipv6/conf/eth0.7/accept_ra")),
            ("kernel.hostname", None),
            ("net/../kernel/hostname", None),
            ("net..ipv4", None),
            ("/net/ipv4", None),
            ("", None),
        ] {
            assert_eq!(path_of(name).ok().as_deref(), path.map(Path::new), "{name}");
        }
    }

    #[test]
    fn only_network_namespaces() {
        for path in ["/proc/self/ns/mnt", "/dev/null"] {
            assert!(matches!(Netns::from_path(path), Err(Error::NotANamespace(_))), "{path}");
        }
        assert!(Netns::from_path("/nonexistent").unwrap_err().is_not_found());
    }
}
