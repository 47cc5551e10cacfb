//! A machine of the control plane: a real etcd member and a server, kept running by one supervisor.
//!
//! The supervisor is the machine's counterpart of an agent: `ferrite node` starts, pauses and ends it. Its programs are in its
//! process group and end with it, however it ends.

use super::{read, write, write_private};
use crate::apiserver::BoxError;
use crate::cli::interrupted;
use crate::paths::Paths;
use crate::status::State;
use ferrite_client::Backoff;
use ferrite_pki::{ClusterPki, Purpose, SharedKeys, Subject};
use futures_util::StreamExt;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;
use tokio::io::AsyncRead;
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};
use tokio_util::codec::{FramedRead, LinesCodec};
use tokio_util::sync::CancellationToken;

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
/// Longer lines of a program are cut.
const MOST_LINE: usize = 16 << 10;
/// A program that ran so long is started again at once.
const GOOD: Duration = Duration::from_secs(20);
/// Time limits for the programs to end after SIGTERM. Together they are shorter than the supervisor's own.
const SERVER_ENDS: Duration = Duration::from_secs(6);
const ETCD_ENDS: Duration = Duration::from_secs(4);

/// A member of the etcd.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdMember {
    pub name: String,
    pub address: IpAddr,
}

impl EtcdMember {
    fn url(address: IpAddr, port: u16) -> String {
        format!("https://{}", SocketAddr::new(address, port))
    }

    fn peer_url(&self) -> String {
        Self::url(self.address, PEER_PORT)
    }

    fn client_url(&self) -> String {
        Self::url(self.address, CLIENT_PORT)
    }
}

/// The programs of a machine, as its file describes them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ControlPlaneConfig {
    /// The member on this machine.
    pub member: EtcdMember,
    /// All members, this one included.
    pub members: Vec<EtcdMember>,
    /// Keeps members of two clusters apart.
    pub cluster: String,
    /// The program.
    pub etcd: PathBuf,
    /// Port of the API.
    pub port: u16,
    /// Further arguments of `ferrite server`.
    pub server_arguments: Vec<String>,
    /// Relative paths among the arguments begin here.
    pub working_directory: PathBuf,
}

fn file(paths: &Paths) -> PathBuf {
    paths.data.join("control-plane.json")
}

/// The authority of the members, in the cluster's own directory.
pub struct EtcdAuthority(ClusterPki);

impl EtcdAuthority {
    pub fn open(paths: &Paths) -> Result<Self, BoxError> {
        Ok(Self(ClusterPki::open(&paths.etcd_pki())?))
    }

    /// Gives a machine its certificates. The authority's key stays.
    fn equip(&self, paths: &Paths, member: &EtcdMember) -> Result<(), BoxError> {
        let dir = paths.etcd_pki();
        ferrite_hostfs::private_dir(&dir)?;
        let names = vec![
            member.address.to_string(),
            IpAddr::from(Ipv4Addr::LOCALHOST).to_string(),
            "localhost".into(),
            member.name.clone(),
        ];
        let subject = Subject { common_name: member.name.clone(), organization: None, names };
        let own = self.0.ensure(&member.name, &subject, Purpose::Peer)?;
        let client = self.0.ensure("client", &Subject::client("ferrite-server", None), Purpose::Client)?;
        for (name, text) in [
            ("ca.crt", self.0.ca()),
            ("member.crt", &own.certificate),
            ("member.key", &own.key),
            ("client.crt", &client.certificate),
            ("client.key", &client.key),
        ] {
            write_private(&dir.join(name), text.as_bytes())?;
        }
        Ok(())
    }
}

impl ControlPlaneConfig {
    /// Leaves a machine everything that its programs need.
    pub fn install(&self, paths: &Paths, etcd: &EtcdAuthority, keys: &SharedKeys) -> Result<(), BoxError> {
        ferrite_hostfs::private_dir(&paths.data)?;
        // It claims its directory as ours, before anything is made in it.
        drop(crate::data_dir::DataDirectory::claim(paths)?);
        ClusterPki::install(&paths.pki(), keys)?;
        etcd.equip(paths, &self.member)?;
        write(&file(paths), self)
    }

    fn etcd_arguments(&self, paths: &Paths) -> Vec<String> {
        let at = |name: &str| paths.etcd_pki().join(name).display().to_string();
        let (own, loopback) = (&self.member, EtcdMember::url(Ipv4Addr::LOCALHOST.into(), CLIENT_PORT));
        let cluster: Vec<String> =
            self.members.iter().map(|member| format!("{}={}", member.name, member.peer_url())).collect();
        let valued = [
            ("name", own.name.clone()),
            ("data-dir", paths.data.join("etcd").display().to_string()),
            ("listen-client-urls", format!("{},{loopback}", own.client_url())),
            ("advertise-client-urls", own.client_url()),
            ("listen-peer-urls", own.peer_url()),
            ("initial-advertise-peer-urls", own.peer_url()),
            ("initial-cluster", cluster.join(",")),
            ("initial-cluster-token", self.cluster.clone()),
            ("initial-cluster-state", "new".into()),
            ("trusted-ca-file", at("ca.crt")),
            ("cert-file", at("member.crt")),
            ("key-file", at("member.key")),
            ("peer-trusted-ca-file", at("ca.crt")),
            ("peer-cert-file", at("member.crt")),
            ("peer-key-file", at("member.key")),
            // All members share the disk and the processors of one machine.
            ("heartbeat-interval", "200".into()),
            ("election-timeout", "2000".into()),
            ("logger", "zap".into()),
            ("log-level", "warn".into()),
        ];
        let flags = ["--client-cert-auth", "--peer-client-cert-auth"].map(str::to_owned);
        valued.into_iter().map(|(name, value)| format!("--{name}={value}")).chain(flags).collect()
    }

    fn server_arguments(&self, paths: &Paths) -> Vec<String> {
        let at = |name: &str| paths.etcd_pki().join(name).display().to_string();
        // The member on this machine comes first: the server uses it for as long as it answers.
        let others = self.members.iter().filter(|member| **member != self.member);
        let members: Vec<String> =
            std::iter::once(&self.member).chain(others).map(EtcdMember::client_url).collect();
        let own = [
            "server".to_owned(),
            "-v=2".to_owned(),
            format!("--data-dir={}", paths.data.display()),
            format!("--advertise-address={}", self.member.address),
            format!("--secure-port={}", self.port),
            format!("--etcd-servers={}", members.join(",")),
            format!("--etcd-cafile={}", at("ca.crt")),
            format!("--etcd-certfile={}", at("client.crt")),
            format!("--etcd-keyfile={}", at("client.key")),
        ];
        own.into_iter().chain(self.server_arguments.iter().cloned()).collect()
    }
}

/// The name under which the binary is started as a supervisor (`argv[0]`). Its argument is the machine's directory.
pub const NAME: &str = "ferrite-control-plane";

/// The supervisor's process.
pub fn main(arguments: &[OsString]) -> Result<ExitCode, BoxError> {
    let [_, data] = arguments else { return Err("the directory of the machine is missing".into()) };
    crate::logging::start(2);
    crate::cli::block_on(supervise(Paths::new(Path::new(data))))
}

/// Keeps the etcd member and the server running until a signal, and ends them in order.
async fn supervise(paths: Paths) -> Result<ExitCode, BoxError> {
    State::refuse_if_running(&paths)?;
    crate::logging::log_to(&paths.log())?;
    let config: ControlPlaneConfig = read(&file(&paths))
        .ok_or_else(|| format!("{} does not describe a control plane", file(&paths).display()))?;
    let url = format!("https://{}", SocketAddr::new(config.member.address, config.port));
    State::new(&paths, &url, &config.member.name).save(&paths)?;
    let ferrite = std::env::current_exe()?;
    let (etcd, server) = (CancellationToken::new(), CancellationToken::new());
    let programs = [
        Program {
            name: "etcd",
            path: config.etcd.clone(),
            arguments: config.etcd_arguments(&paths),
            directory: paths.data.clone(),
            ends: ETCD_ENDS,
        },
        Program {
            name: "server",
            path: ferrite,
            arguments: config.server_arguments(&paths),
            directory: config.working_directory.clone(),
            ends: SERVER_ENDS,
        },
    ];
    let [etcd_program, server_program] = programs;
    let ended = async {
        let signal = interrupted().await;
        server.cancel();
        signal
    };
    let served = async {
        server_program.keep(&server).await;
        // The server takes its leave through etcd.
        etcd.cancel();
    };
    let (signal, (), ()) = tokio::join!(ended, served, etcd_program.keep(&etcd));
    signal?;
    State::stopped(&paths)?;
    Ok(ExitCode::SUCCESS)
}

/// A program of the machine.
struct Program {
    name: &'static str,
    path: PathBuf,
    arguments: Vec<String>,
    directory: PathBuf,
    /// Time limit for its end after SIGTERM.
    ends: Duration,
}

impl Program {
    /// Starts the program, and again whenever it ends, until `stop`.
    async fn keep(&self, stop: &CancellationToken) {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5), 0.2);
        while !stop.is_cancelled() {
            let begun = Instant::now();
            match self.spawn() {
                Ok(child) => self.run(child, stop).await,
                Err(error) => {
                    tracing::error!(program = self.name, path = %self.path.display(), %error, "cannot start");
                }
            }
            if begun.elapsed() >= GOOD {
                backoff.reset();
            }
            tokio::select! {
                () = tokio::time::sleep(backoff.next_delay()) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments).current_dir(&self.directory);
        // etcd reads every flag from the environment, too.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"ETCD_"))
        {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: prctl is safe after a fork and touches no memory.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        command.spawn()
    }

    /// Logs the program's output until it ends. After `stop` it is asked to end, and killed when it does not.
    async fn run(&self, mut child: Child, stop: &CancellationToken) {
        tracing::info!(program = self.name, pid = child.id(), "started");
        let output = log_lines(self.name, child.stdout.take());
        let errors = log_lines(self.name, child.stderr.take());
        let end = async {
            tokio::select! {
                status = child.wait() => return status,
                () = stop.cancelled() => {}
            }
            if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
            match timeout(self.ends, child.wait()).await {
                Ok(status) => status,
                Err(_) => {
                    child.start_kill()?;
                    child.wait().await
                }
            }
        };
        let (status, (), ()) = tokio::join!(end, output, errors);
        match status {
            Ok(status) => tracing::warn!(program = self.name, %status, "ended"),
            Err(error) => tracing::warn!(program = self.name, %error, "ended"),
        }
    }
}

async fn log_lines(program: &'static str, source: Option<impl AsyncRead + Unpin>) {
    let Some(source) = source else { return };
    let mut lines = FramedRead::new(source, LinesCodec::new_with_max_length(MOST_LINE));
    while let Some(line) = lines.next().await {
        match line {
            Ok(line) => tracing::info!(program, "{line}"),
            Err(tokio_util::codec::LinesCodecError::MaxLineLengthExceeded) => {}
            Err(_) => return,
        }
    }
}

/// The etcd program of this machine.
pub fn find_etcd(path: Option<&OsStr>) -> Result<PathBuf, NoEtcd> {
    let is_program = |file: &PathBuf| {
        use std::os::unix::fs::PermissionsExt;
        file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    let dirs = path.map(std::env::split_paths).into_iter().flatten();
    let dirs = dirs.filter(|dir| dir.is_absolute());
    dirs.map(|dir| dir.join("etcd")).find(is_program).ok_or(NoEtcd)
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--control-planes runs real etcd members, and there is no program `etcd` on the PATH: install it, on Debian with `apt install etcd-server`"
)]
pub struct NoEtcd;

/// Ends all programs of a machine at once, as a power failure does.
pub fn end_at_once(supervisor: i32) {
    signal_group(supervisor, Signal::SIGKILL);
}

/// Sends a signal to the supervisor and its programs.
pub fn signal_group(supervisor: i32, signal: Signal) {
    // The supervisor leads the group; one that is gone has none.
    let _ = nix::sys::signal::killpg(Pid::from_raw(supervisor), signal);
}

/// The directory in which relative paths of the user's arguments begin.
pub fn working_directory() -> PathBuf {
    std::env::current_dir().unwrap_or_else(|_| Path::new("/").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_know_all_members_and_their_own_first() {
        let member = |n: u8| EtcdMember { name: format!("m{n}"), address: [10, 243, 0, n].into() };
        let config = ControlPlaneConfig {
            member: member(3),
            members: (2..=4).map(member).collect(),
            cluster: "c".into(),
            etcd: "/usr/bin/etcd".into(),
            port: 6443,
            server_arguments: vec!["--cluster-cidr=10.1.0.0/16".into()],
            working_directory: "/".into(),
        };
        let paths = Paths::new(Path::new("/d"));
        let etcd = config.etcd_arguments(&paths);
        let initial = "--initial-cluster=m2=https://10.243.0.2:2380,m3=https://10.243.0.3:2380,m4=https://10.243.0.4:2380";
        for wanted in [
            initial,
            "--listen-peer-urls=https://10.243.0.3:2380",
            "--listen-client-urls=https://10.243.0.3:2379,https://127.0.0.1:2379",
            "--client-cert-auth",
            "--peer-client-cert-auth",
            "--peer-trusted-ca-file=/d/pki/etcd/ca.crt",
        ] {
            assert!(etcd.iter().any(|argument| argument == wanted), "{wanted} in {etcd:?}");
        }
        let server = config.server_arguments(&paths);
        for wanted in [
            "--etcd-servers=https://10.243.0.3:2379,https://10.243.0.2:2379,https://10.243.0.4:2379",
            "--advertise-address=10.243.0.3",
            "--cluster-cidr=10.1.0.0/16",
        ] {
            assert!(server.iter().any(|argument| argument == wanted), "{wanted} in {server:?}");
        }
    }

    #[test]
    fn etcd_is_found_on_the_path_or_named_as_missing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(find_etcd(Some(dir.path().as_os_str())), Err(NoEtcd));
        assert_eq!(find_etcd(None), Err(NoEtcd));
        let program = dir.path().join("etcd");
        std::fs::write(&program, "").unwrap();
        assert_eq!(find_etcd(Some(dir.path().as_os_str())), Err(NoEtcd), "not executable");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).unwrap();
        assert_eq!(find_etcd(Some(dir.path().as_os_str())), Ok(program));
    }
}
