//! `/logs/?query=`: the logs of the host's services, as the machine's `journalctl` shows them, or their files.

use super::system_logs::{relative, stream};
use super::{Answer, answer, full, text};
use ferrite_hostfs::Dir;
use hyper::StatusCode;
use jiff::Timestamp;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::sync::Semaphore;

const MAX_LINES: u32 = 100_000;
const MAX_NAME: usize = 256;
const MAX_SERVICES: usize = 4;
const MAX_PATTERN: usize = 4096;
/// No more of a log is shown.
const MAX_BYTES: u64 = 64 << 20;
const LIMIT: Duration = Duration::from_secs(30);
/// Queries at the same time: each is a process.
static QUERIES: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(4));

/// A query that makes no sense, with upstream's field and words.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum QueryError {
    #[error("query: Invalid value: may not be empty")]
    Empty,
    #[error("query: Required value: cannot be empty with options")]
    OptionsAlone,
    #[error("query: Invalid value: {0:?}: input contains unsupported characters")]
    Characters(String),
    #[error("query: Invalid value: length must be less than {MAX_NAME}")]
    TooLong,
    #[error("query: Too many: {0}: must have at most {MAX_SERVICES} items")]
    TooMany(usize),
    #[error("query: Invalid value: cannot specify a file and service")]
    FileAndService,
    #[error("query: Invalid value: cannot specify more than one file")]
    Files,
    #[error("query: Invalid value: cannot specify file with options")]
    FileWithOptions,
    #[error("{0}: Invalid value: {1:?}: invalid time format")]
    Time(&'static str, String),
    #[error("untilTime: Invalid value: must be after `sinceTime`")]
    Order,
    #[error("boot: Invalid value: {0:?}: must be less than 1")]
    Boot(String),
    #[error("tailLines: Invalid value: {0:?}: must be between 0 and {MAX_LINES}, inclusive")]
    Lines(String),
    #[error("pattern: Invalid value: it is too long or has a zero byte")]
    Pattern,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    since: Option<Timestamp>,
    until: Option<Timestamp>,
    lines: Option<u32>,
    boot: Option<i32>,
    pattern: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum LogQuery {
    File(String),
    Services(Vec<String>, Options),
}

const NAMES: &[&str] = &["query", "sinceTime", "untilTime", "boot", "tailLines", "pattern"];

/// True if the request asks for more than a file or a directory.
pub(super) fn is_query(pairs: &[(String, String)]) -> bool {
    pairs.iter().any(|(name, value)| name == "query" || NAMES.contains(&name.as_str()) && !value.is_empty())
}

fn parse(pairs: &[(String, String)]) -> Result<LogQuery, QueryError> {
    let first = |name: &str| {
        let value = pairs.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
        value.filter(|value| !value.is_empty())
    };
    let time = |name: &'static str| {
        let parse = |text: &str| text.parse().map_err(|_| QueryError::Time(name, text.to_owned()));
        first(name).map(parse).transpose()
    };
    let asked: Vec<&str> =
        pairs.iter().filter(|(name, _)| name == "query").map(|(_, v)| v.as_str()).collect();
    let (files, services): (Vec<&str>, Vec<&str>) =
        asked.iter().filter(|name| !name.trim().is_empty()).partition(|name| name.contains(['/', '\\']));
    if !asked.is_empty() && files.is_empty() && services.is_empty() {
        return Err(QueryError::Empty);
    }
    let options = Options {
        since: time("sinceTime")?,
        until: time("untilTime")?,
        lines: first("tailLines")
            .map(|text| text.parse().ok().filter(|n| *n <= MAX_LINES).ok_or(QueryError::Lines(text.into())))
            .transpose()?,
        boot: first("boot")
            .map(|text| text.parse().ok().filter(|n| *n < 1).ok_or(QueryError::Boot(text.into())))
            .transpose()?,
        pattern: first("pattern").map(str::to_owned),
    };
    if options.pattern.as_ref().is_some_and(|p| p.len() > MAX_PATTERN || p.contains('\0')) {
        return Err(QueryError::Pattern);
    }
    if let (Some(since), Some(until)) = (options.since, options.until)
        && since > until
    {
        return Err(QueryError::Order);
    }
    for service in &services {
        if service.len() > MAX_NAME {
            return Err(QueryError::TooLong);
        }
        // Nothing that a program could take for a flag, a path or a pattern.
        let fine = |c: char| c.is_ascii_alphanumeric() || "-_.:@".contains(c);
        if !service.chars().all(fine) {
            return Err(QueryError::Characters((*service).to_owned()));
        }
    }
    match (files.as_slice(), services.len()) {
        ([], 0) => Err(QueryError::OptionsAlone),
        ([], many) if many > MAX_SERVICES => Err(QueryError::TooMany(many)),
        ([], _) => Ok(LogQuery::Services(services.into_iter().map(str::to_owned).collect(), options)),
        (_, 1..) => Err(QueryError::FileAndService),
        ([_], 0) if options != Options::default() => Err(QueryError::FileWithOptions),
        ([file], 0) => Ok(LogQuery::File((*file).to_owned())),
        _ => Err(QueryError::Files),
    }
}

/// The arguments of `journalctl`.
fn arguments(services: &[String], options: &Options) -> Vec<String> {
    let day = |time: Timestamp| time.strftime("%Y-%m-%d %H:%M:%S").to_string();
    let mut list: Vec<String> = ["--utc", "--no-pager", "--output=short-precise"].map(str::to_owned).into();
    list.extend(options.since.map(|time| format!("--since={}", day(time))));
    list.extend(options.until.map(|time| format!("--until={}", day(time))));
    if let Some(lines) = options.lines {
        list.extend(["--pager-end".to_owned(), format!("--lines={lines}")]);
    }
    list.extend(services.iter().map(|service| format!("--unit={service}")));
    list.extend(options.pattern.iter().map(|pattern| format!("--grep={pattern}")));
    if let Some(boot) = options.boot {
        list.extend(["--boot".to_owned(), boot.to_string()]);
    }
    list
}

pub(super) async fn serve(root: PathBuf, pairs: &[(String, String)]) -> Answer {
    let query = match parse(pairs) {
        Ok(query) => query,
        Err(error) => return text(StatusCode::BAD_REQUEST, format!("{error}\n")),
    };
    let (services, options) = match query {
        LogQuery::File(file) => {
            let opened = tokio::task::spawn_blocking(move || open(&root, &file)).await.ok().flatten();
            return match opened {
                Some(file) => answer(StatusCode::OK, "text/plain; charset=utf-8", stream(file)),
                None => text(StatusCode::BAD_REQUEST, "query: Invalid value: there is no such file\n"),
            };
        }
        LogQuery::Services(services, options) => (services, options),
    };
    let Ok(_place) = QUERIES.try_acquire() else {
        return text(StatusCode::TOO_MANY_REQUESTS, "too many queries of logs at the same time\n");
    };
    let shown = tokio::time::timeout(LIMIT, collect(root, services, options)).await;
    let shown = shown.unwrap_or_else(|_| format!("\nthe query took longer than {LIMIT:?}\n").into_bytes());
    answer(StatusCode::OK, "text/plain;charset=UTF-8", full(shown))
}

async fn collect(root: PathBuf, services: Vec<String>, options: Options) -> Vec<u8> {
    let known = journal(&["--field".to_owned(), "_SYSTEMD_UNIT".to_owned()]).await.unwrap_or_default();
    let known = String::from_utf8_lossy(&known).into_owned();
    let is_native = |service: &String| known.contains(&format!("{service}.service"));
    let (native, other): (Vec<String>, Vec<String>) = services.into_iter().partition(is_native);
    let mut out = Vec::new();
    if !native.is_empty() {
        match journal(&arguments(&native, &options)).await {
            Ok(shown) => out.extend(shown),
            Err(_) => out.extend(b"\nerror: journal output not available\n"),
        }
    }
    if !other.is_empty() && options != Options::default() {
        let names = other.join(" ");
        let message = format!(
            "\noptions present and query resolved to log files for [{names}]\ntry without specifying options\n"
        );
        out.extend(message.into_bytes());
        return out;
    }
    for service in other {
        let (root, name) = (root.clone(), service.clone());
        let found = tokio::task::spawn_blocking(move || file_of(&root, &name)).await.ok().flatten();
        match found {
            Some(bytes) => out.extend(bytes),
            None => out.extend(format!("\nlog not found for {service}\n").into_bytes()),
        }
    }
    out
}

async fn journal(arguments: &[String]) -> std::io::Result<Vec<u8>> {
    let mut command = Command::new("journalctl");
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut child = command.spawn()?;
    let mut shown = Vec::new();
    if let Some(output) = child.stdout.take() {
        output.take(MAX_BYTES).read_to_end(&mut shown).await?;
    }
    Ok(shown)
}

fn open(root: &Path, name: &str) -> Option<std::fs::File> {
    Dir::open(root).ok()?.open_file(&relative(name)?).ok()
}

/// A service's own file: `name`, `name.log` or `name/name.log`.
fn file_of(root: &Path, service: &str) -> Option<Vec<u8>> {
    use std::io::Read;
    let names = [service.to_owned(), format!("{service}.log"), format!("{service}/{service}.log")];
    let file = names.iter().find_map(|name| open(root, name))?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    fn pairs(text: &str) -> Vec<(String, String)> {
        let pair = |pair: &str| pair.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()));
        text.split('&').filter_map(pair).collect()
    }

    #[test]
    fn queries() {
        let all = "query=kubelet&query=a@b.c&sinceTime=2026-01-02T03:04:05Z&untilTime=2026-01-03T03:04:05Z&tailLines=7&boot=-1&pattern=x.*y";
        let Ok(LogQuery::Services(services, options)) = parse(&pairs(all)) else { panic!("a query") };
        assert_eq!(
            arguments(&services, &options).join(" "),
            "--utc --no-pager --output=short-precise --since=2026-01-02 03:04:05 --until=2026-01-03 03:04:05 \
             --pager-end --lines=7 --unit=kubelet --unit=a@b.c --grep=x.*y --boot -1"
        );
        assert_eq!(parse(&pairs("query=/a/b.log")), Ok(LogQuery::File("/a/b.log".into())));
        for (text, part) in [
            ("query= ", "may not be empty"),
            ("tailLines=5", "cannot be empty with options"),
            ("query=a;b", "unsupported characters"),
            ("query=a&query=b&query=c&query=d&query=e", "at most 4"),
            ("query=a&query=/b", "file and service"),
            ("query=/a&query=/b", "more than one file"),
            ("query=/a&boot=0", "file with options"),
            ("query=a&sinceTime=soon", "invalid time format"),
            ("query=a&sinceTime=2026-01-02T03:04:05Z&untilTime=2026-01-01T03:04:05Z", "after"),
            ("query=a&boot=1", "less than 1"),
            ("query=a&tailLines=100001", "between 0 and 100000"),
            ("query=a&tailLines=-1", "between 0 and 100000"),
        ] {
            let said = parse(&pairs(text)).unwrap_err().to_string();
            assert!(said.contains(part), "{text}: {said}");
        }
        assert!(is_query(&pairs("query=")) && is_query(&pairs("boot=1")) && !is_query(&pairs("x=1&boot=")));
    }

    #[tokio::test]
    async fn services_that_write_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("svc-x")).unwrap();
        std::fs::write(dir.path().join("svc-x/svc-x.log"), "text of x").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("svc-link.log")).unwrap();
        for (query, status, part) in [
            ("query=svc-x", 200, "text of x"),
            ("query=/svc-x/svc-x.log", 200, "text of x"),
            ("query=svc-x&tailLines=1", 200, "try without specifying options"),
            ("query=svc-link", 200, "log not found for svc-link"),
            ("query=svc-none", 200, "log not found for svc-none"),
            ("query=/../etc/passwd", 400, "no such file"),
            ("query=/svc-link.log", 400, "no such file"),
        ] {
            let answer = serve(dir.path().to_owned(), &pairs(query)).await;
            assert_eq!(answer.status().as_u16(), status, "{query}");
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            assert!(String::from_utf8_lossy(&body).contains(part), "{query}: {body:?}");
        }
    }
}
