//! Commands for existing containers.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::{Failure, Outcome, each, say, table};
use crate::engine::{ChangeKind, Engine, EngineError, LogLine};
use crate::files;
use crate::units;

#[derive(Debug, Args)]
pub struct Names {
    #[arg(required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub struct OneName {
    container: String,
}

#[derive(Debug, Args)]
pub struct Stop {
    /// Seconds to wait for stop before killing it
    #[arg(short, long, visible_alias = "timeout", allow_hyphen_values = true)]
    time: Option<i64>,
    #[arg(required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Restart {
    /// Seconds to wait for stop before killing the container
    #[arg(short, long, visible_alias = "timeout", allow_hyphen_values = true)]
    time: Option<i64>,
    #[arg(required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Kill {
    /// Signal to send to the container
    #[arg(short, long, default_value = "KILL")]
    signal: String,
    #[arg(required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// Force the removal of a running container (uses SIGKILL)
    #[arg(short, long)]
    force: bool,
    /// Remove anonymous volumes associated with the container
    #[arg(short, long)]
    volumes: bool,
    #[arg(required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Rename {
    container: String,
    new_name: String,
}

#[derive(Debug, Args)]
pub struct Logs {
    /// Follow log output
    #[arg(short, long)]
    follow: bool,
    /// Show timestamps
    #[arg(short, long)]
    timestamps: bool,
    /// Number of lines to show from the end of the logs
    #[arg(short = 'n', long, default_value = "all")]
    tail: String,
    /// Show logs since timestamp or relative (e.g. 42m)
    #[arg(long)]
    since: Option<String>,
    /// Show logs before a timestamp or relative (e.g. 42m)
    #[arg(long)]
    until: Option<String>,
    container: String,
}

#[derive(Debug, Args)]
pub struct Top {
    container: String,
    /// Options of ps; the output does not depend on them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Port {
    container: String,
    /// PORT[/PROTO]
    private_port: Option<String>,
}

#[derive(Debug, Args)]
pub struct Cp {
    /// Archive mode (owners are always kept)
    #[arg(short, long)]
    archive: bool,
    /// Always follow symbol link in SRC_PATH
    #[arg(short = 'L', long)]
    follow_link: bool,
    /// CONTAINER:PATH, a path here, or - for an archive on standard input
    source: String,
    /// CONTAINER:PATH, a path here, or - for an archive on standard output
    destination: String,
}

#[derive(Debug, Args)]
pub struct Export {
    /// Write to a file, instead of STDOUT
    #[arg(short, long)]
    output: Option<PathBuf>,
    container: String,
}

impl Names {
    pub async fn pause(self, engine: &Engine, paused: bool) -> Outcome {
        each(&self.containers, async |name| engine.pause(name, paused).await.map(|()| name.clone())).await
    }

    pub async fn wait(self, engine: &Engine) -> Outcome {
        each(&self.containers, async |name| engine.wait(name).await.map(|code| code.to_string())).await
    }
}

impl OneName {
    pub fn diff(self, engine: &Engine) -> Outcome {
        for change in engine.changes(&self.container)? {
            let kind = match change.kind {
                ChangeKind::Added => 'A',
                ChangeKind::Changed => 'C',
                ChangeKind::Deleted => 'D',
            };
            say(&format!("{kind} {}", change.path))?;
        }
        Ok(0)
    }
}

impl Stop {
    pub async fn run(self, engine: &Engine) -> Outcome {
        each(&self.containers, async |name| engine.stop(name, self.time).await.map(|()| name.clone())).await
    }
}

impl Restart {
    pub async fn run(self, engine: &Engine) -> Outcome {
        each(&self.containers, async |name| engine.restart(name, self.time).await.map(|()| name.clone()))
            .await
    }
}

impl Kill {
    pub async fn run(self, engine: &Engine) -> Outcome {
        each(&self.containers, async |name| engine.kill(name, &self.signal).await.map(|()| name.clone()))
            .await
    }
}

impl Rm {
    pub async fn run(self, engine: &Engine) -> Outcome {
        each(&self.containers, async |name| match engine.remove(name, self.force, self.volumes).await {
            Err(EngineError::NoSuchContainer(_)) if self.force => Ok(String::new()),
            result => result.map(|()| name.clone()),
        })
        .await
    }
}

impl Rename {
    pub async fn run(self, engine: &Engine) -> Outcome {
        engine.rename(&self.container, &self.new_name).await?;
        Ok(0)
    }
}

impl Logs {
    pub fn run(self, engine: &Engine) -> Outcome {
        let now = units::now();
        let moment =
            |text: &Option<String>| text.as_deref().map(|text| units::parse_moment(text, now)).transpose();
        let (since, until) = (moment(&self.since)?, moment(&self.until)?);
        let tail = match self.tail.as_str() {
            "all" => None,
            text => Some(text.parse::<usize>().map_err(|_| format!("invalid value for --tail: {text}"))?),
        };
        let mut reader = engine.logs(&self.container)?;
        let wanted = |line: &LogLine| {
            let Ok(time) = line.time.parse::<jiff::Timestamp>() else { return true };
            let time = i64::try_from(time.as_nanosecond()).unwrap_or(0);
            since.is_none_or(|since| time >= since) && until.is_none_or(|until| time <= until)
        };
        let mut at_start = true;
        match tail {
            None => loop {
                let lines = reader.available()?;
                if lines.is_empty() {
                    break;
                }
                for line in lines.iter().filter(|line| wanted(line)) {
                    self.print(line, &mut at_start)?;
                }
            },
            Some(count) => {
                // Only the last ones are kept on the way; a line counts once, however many pieces it has.
                let mut kept: std::collections::VecDeque<LogLine> = Default::default();
                let mut lines = 0;
                loop {
                    let more = reader.available()?;
                    if more.is_empty() {
                        break;
                    }
                    for line in more.into_iter().filter(&wanted) {
                        lines += usize::from(line.bytes.ends_with(b"\n"));
                        kept.push_back(line);
                        while lines > count {
                            lines -= kept
                                .pop_front()
                                .map_or(lines, |line| usize::from(line.bytes.ends_with(b"\n")));
                        }
                    }
                }
                for line in kept {
                    self.print(&line, &mut at_start)?;
                }
            }
        }
        if self.follow {
            while let Some(lines) = reader.next()? {
                for line in lines.iter().filter(|line| wanted(line)) {
                    self.print(line, &mut at_start)?;
                }
            }
        }
        Ok(0)
    }

    fn print(&self, line: &LogLine, at_start: &mut bool) -> Result<(), Failure> {
        let write = |out: &mut dyn Write| -> io::Result<()> {
            if self.timestamps && *at_start {
                write!(out, "{} ", line.time)?;
            }
            out.write_all(&line.bytes)?;
            out.flush()
        };
        let result = if line.stderr { write(&mut io::stderr()) } else { write(&mut io::stdout()) };
        *at_start = line.bytes.ends_with(b"\n");
        match result {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                Err(Failure { message: String::new(), code: 0 })
            }
            result => Ok(result?),
        }
    }
}

/// One process as `ps -ef` shows it.
fn process_row(pid: i32, boot: i64, ticks: i64) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let directory = PathBuf::from(format!("/proc/{pid}"));
    let uid = directory.metadata().ok()?.uid();
    let stat = std::fs::read_to_string(directory.join("stat")).ok()?;
    let (head, rest) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |index: usize| fields.get(index).and_then(|field| field.parse::<i64>().ok());
    let (parent, terminal) = (number(1)?, number(4)?);
    let cpu = (number(11)? + number(12)?) / ticks;
    let started = boot + number(19)? / ticks;
    let alive = (units::now() / 1_000_000_000 - started).max(1);
    let stime = jiff::Timestamp::from_second(started).ok()?.strftime("%H:%M").to_string();
    let line = std::fs::read(directory.join("cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned();
    let line = if line.is_empty() { format!("[{name}]") } else { line };
    let user =
        nix::unistd::User::from_uid(uid.into()).ok().flatten().map_or(uid.to_string(), |user| user.name);
    let tty = if terminal == 0 { "?".to_owned() } else { format!("pts/{}", terminal & 0xff) };
    let time = format!("{:02}:{:02}:{:02}", cpu / 3600, cpu / 60 % 60, cpu % 60);
    Some(format!("{user}\t{pid}\t{parent}\t{}\t{stime}\t{tty}\t{time}\t{line}", cpu * 100 / alive))
}

impl Top {
    pub fn run(self, engine: &Engine) -> Outcome {
        let (_, task) = engine.task(&self.container)?;
        let boot = std::fs::read_to_string("/proc/stat")?;
        let boot: i64 =
            boot.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok()).unwrap_or(0);
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
        let mut lines = vec!["UID\tPID\tPPID\tC\tSTIME\tTTY\tTIME\tCMD".to_owned()];
        lines.extend(task.processes().into_iter().filter_map(|pid| process_row(pid, boot, ticks)));
        for line in table::align(&lines) {
            say(&line)?;
        }
        Ok(0)
    }
}

impl Port {
    pub fn run(self, engine: &Engine) -> Outcome {
        let view = engine.find(&self.container)?;
        let mut found = false;
        for port in &view.state.ports {
            let private = format!("{}/{}", port.container, port.protocol);
            let public = format!("{}:{}", port.host_ip, port.host_port);
            match &self.private_port {
                None => say(&format!("{private} -> {public}"))?,
                Some(wanted) if *wanted == private || format!("{wanted}/tcp") == private => {
                    found = true;
                    say(&public)?;
                }
                Some(_) => {}
            }
        }
        match self.private_port {
            Some(wanted) if !found => {
                let wanted = if wanted.contains('/') { wanted } else { format!("{wanted}/tcp") };
                Err(format!("Error: No public port '{wanted}' published for {}", self.container).into())
            }
            _ => Ok(0),
        }
    }
}

/// `name:path`; a path here begins with `.` or `/`.
fn split_place(text: &str) -> Option<(&str, &str)> {
    if text.starts_with('/') || text.starts_with('.') {
        return None;
    }
    text.split_once(':').filter(|(name, _)| !name.contains('/'))
}

impl Cp {
    pub fn run(self, engine: &Engine) -> Outcome {
        match (split_place(&self.source), split_place(&self.destination)) {
            (Some(_), Some(_)) => Err("copying between containers is not supported".into()),
            (None, None) => Err("must specify at least one container source".into()),
            (Some((container, path)), None) => copy_out(engine, container, path, &self.destination),
            (None, Some((container, path))) => copy_in(engine, &self.source, container, path),
        }
    }
}

/// The target of a copy: the directory and the name. `is_directory` is the type of the destination.
fn target(
    destination: &str,
    name: &str,
    is_directory: Option<bool>,
    source_is_directory: bool,
) -> Result<(String, String), String> {
    let trimmed = destination.trim_end_matches('/');
    let (parent, last) = match trimmed.rsplit_once('/') {
        Some((parent, last)) => (if parent.is_empty() { "/" } else { parent }, last),
        None if trimmed.is_empty() => ("/", ""),
        None => (".", trimmed),
    };
    match is_directory {
        Some(true) => Ok((if trimmed.is_empty() { "/".into() } else { trimmed.to_owned() }, name.to_owned())),
        Some(false) if source_is_directory => Err("cannot copy directory".into()),
        None if destination.ends_with('/') && !source_is_directory => {
            Err(format!("destination directory {destination:?} must exist"))
        }
        _ => Ok((parent.to_owned(), last.to_owned())),
    }
}

/// Copies an archive of one tree, giving its top another name; `None` puts its content in place.
fn renamed(from: impl io::Read, to: impl Write, name: Option<&str>) -> io::Result<()> {
    let mut archive = tar::Archive::new(from);
    let mut out = tar::Builder::new(to);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let below: PathBuf =
            path.components().filter(|c| matches!(c, std::path::Component::Normal(_))).skip(1).collect();
        let path = match name {
            Some(name) if below.as_os_str().is_empty() => PathBuf::from(name),
            Some(name) => Path::new(name).join(&below),
            None if below.as_os_str().is_empty() => continue,
            None => below,
        };
        let mut header = entry.header().clone();
        match header.entry_type() {
            tar::EntryType::Symlink | tar::EntryType::Link => {
                let link = entry.link_name()?.map(std::borrow::Cow::into_owned).unwrap_or_default();
                out.append_link(&mut header, path, link)?;
            }
            _ => out.append_data(&mut header, path, &mut entry)?,
        }
    }
    out.into_inner()?.flush()
}

fn copy_out(engine: &Engine, container: &str, path: &str, destination: &str) -> Outcome {
    if destination == "-" {
        engine.copy_out(container, path, io::stdout())?;
        return Ok(0);
    }
    let content_only = path.ends_with("/.");
    let is_directory = engine.stat(container, path)?;
    let Some(source_is_directory) = is_directory else {
        let name = engine.find(container)?.container.name;
        return Err(
            EngineError::Invalid(format!("Could not find the file {path} in container {name}")).into()
        );
    };
    let here = Path::new(destination);
    let here_is = here.metadata().ok().map(|metadata| metadata.is_dir());
    let name = Path::new(path)
        .file_name()
        .map_or_else(|| "rootfs".into(), |name| name.to_string_lossy().into_owned());
    let (directory, name) = target(destination, &name, here_is, source_is_directory)?;
    let name = if content_only && here_is == Some(true) { None } else { Some(name) };
    let (reader, writer) = io::pipe()?;
    let (second_reader, second_writer) = io::pipe()?;
    let (engine, container, path) = (engine.clone(), container.to_owned(), path.to_owned());
    let out = std::thread::spawn(move || engine.copy_out(&container, &path, writer));
    let middle = std::thread::spawn(move || renamed(reader, second_writer, name.as_deref()));
    let unpacked = files::unpack(second_reader, Path::new(&directory));
    let copied = out.join().map_err(|_| "the copy ended badly")?;
    let _ = middle.join();
    copied?;
    unpacked?;
    Ok(0)
}

fn copy_in(engine: &Engine, source: &str, container: &str, path: &str) -> Outcome {
    if source == "-" {
        engine.copy_in(container, path, io::stdin())?;
        return Ok(0);
    }
    let from = PathBuf::from(source);
    let metadata = from.symlink_metadata().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("lstat {source}: no such file or directory"),
        _ => format!("lstat {source}: {error}"),
    })?;
    let there = engine.stat(container, path)?;
    let name =
        from.canonicalize()?.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let (directory, name) = target(path, &name, there, metadata.is_dir())?;
    let name = if source.ends_with("/.") && there == Some(true) { None } else { Some(name) };
    let (reader, writer) = io::pipe()?;
    let (second_reader, second_writer) = io::pipe()?;
    let from = if metadata.is_dir() { from.canonicalize()? } else { from };
    let packing = std::thread::spawn(move || files::write_tree(&from, writer));
    let middle = std::thread::spawn(move || renamed(reader, second_writer, name.as_deref()));
    let directory = if directory == "." { "/".to_owned() } else { directory };
    let copied = engine.copy_in(container, &directory, second_reader);
    let packed = packing.join().map_err(|_| "the copy ended badly")?;
    let _ = middle.join();
    copied?;
    packed?;
    Ok(0)
}

impl Export {
    pub fn run(self, engine: &Engine) -> Outcome {
        use std::io::IsTerminal;
        match self.output {
            Some(path) => engine.export(&self.container, std::fs::File::create(path)?)?,
            None if io::stdout().is_terminal() => {
                return Err("cowardly refusing to save to a terminal. Use the -o flag or redirect".into());
            }
            None => engine.export(&self.container, io::stdout())?,
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        for (text, want) in [
            ("web:/a", Some(("web", "/a"))),
            ("/a:b", None),
            ("./a:b", None),
            ("a/b", None),
            ("web:", Some(("web", ""))),
        ] {
            assert_eq!(split_place(text), want, "{text}");
        }
    }

    #[test]
    fn targets() {
        type Row = (&'static str, Option<bool>, bool, Option<(&'static str, &'static str)>);
        let rows: &[Row] = &[
            ("/tmp", Some(true), false, Some(("/tmp", "f"))),
            ("/tmp/x", None, false, Some(("/tmp", "x"))),
            ("/tmp/x", Some(false), false, Some(("/tmp", "x"))),
            ("/tmp/x/", None, false, None),
            ("/tmp/x/", None, true, Some(("/tmp", "x"))),
            ("/tmp/x", Some(false), true, None),
            ("/", Some(true), false, Some(("/", "f"))),
            ("x", None, false, Some((".", "x"))),
        ];
        for (destination, is_directory, source, want) in rows {
            let got = target(destination, "f", *is_directory, *source).ok();
            let want = want.map(|(directory, name)| (directory.to_owned(), name.to_owned()));
            assert_eq!(got, want, "{destination}");
        }
    }
}
