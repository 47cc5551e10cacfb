//! systemd's watchdog: a unit with `WatchdogSec=` is restarted unless its process says regularly that it is well.

use crate::pod::context::Context;
use crate::server;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

/// As upstream: a watchdog that waits no longer than this cannot be served.
const LEAST: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WatchdogError {
    #[error("WATCHDOG_USEC={0:?} is not a positive number of microseconds")]
    Time(String),
    #[error("WATCHDOG_PID={0:?} is not the number of a process")]
    Process(String),
    #[error("the watchdog waits for {0:?} only; set WatchdogSec= of the unit to more than a second")]
    TooShort(Duration),
}

/// The interval between messages to systemd. None when it expects none of this process.
fn interval(
    microseconds: Option<&str>,
    process: Option<&str>,
    own: u32,
) -> Result<Option<Duration>, WatchdogError> {
    let Some(text) = microseconds else { return Ok(None) };
    let time = text.parse().ok().filter(|time: &u64| *time > 0);
    let time = Duration::from_micros(time.ok_or_else(|| WatchdogError::Time(text.to_owned()))?);
    if let Some(process) = process {
        let expected: u32 = process.parse().map_err(|_| WatchdogError::Process(process.to_owned()))?;
        if expected != own {
            return Ok(None);
        }
    }
    if time <= LEAST { Err(WatchdogError::TooShort(time)) } else { Ok(Some(time / 2)) }
}

/// The interval and the socket, from the environment of this process.
pub(crate) fn settings() -> Result<Option<(Duration, OsString)>, WatchdogError> {
    let text = |name: &str| std::env::var(name).ok();
    let (time, process) = (text("WATCHDOG_USEC"), text("WATCHDOG_PID"));
    let interval = interval(time.as_deref(), process.as_deref(), std::process::id())?;
    Ok(interval.zip(std::env::var_os("NOTIFY_SOCKET")))
}

/// Tells systemd that the kubelet is well, for as long as it is.
pub(crate) async fn run(context: Arc<Context>, interval: Duration, socket: OsString) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !server::is_well(&context) {
            tracing::error!("the kubelet is not healthy: systemd's watchdog is not told otherwise");
            continue;
        }
        if let Err(error) = notify(&socket) {
            tracing::warn!(%error, "cannot reach systemd's watchdog; will try again");
        }
    }
}

fn notify(socket: &OsStr) -> io::Result<()> {
    // A name that begins with @ is no path.
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    // A full queue must not hold up the kubelet.
    sender.set_nonblocking(true)?;
    sender.send_to_addr(b"WATCHDOG=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Harness;

    #[test]
    fn the_environment_says_how_often() {
        use WatchdogError::*;
        let half = |seconds: u64| Ok(Some(Duration::from_millis(seconds * 500)));
        for (time, process, expected) in [
            (None, None, Ok(None)),
            (None, Some("7"), Ok(None)),
            (Some("30000000"), None, half(30)),
            (Some("30000000"), Some("7"), half(30)),
            (Some("30000000"), Some("8"), Ok(None)),
            (Some("30000000"), Some("x"), Err(Process("x".into()))),
            (Some("0"), None, Err(Time("0".into()))),
            (Some("x"), None, Err(Time("x".into()))),
            (Some("1000000"), None, Err(TooShort(LEAST))),
        ] {
            assert_eq!(interval(time, process, 7), expected, "{time:?} {process:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn systemd_hears_of_a_kubelet_that_is_well() {
        let h = Harness::start().await;
        let path = h.dir.path().join("notify");
        let abstract_name = format!("@ferrite-watchdog-{}", std::process::id());
        let systemd = tokio::net::UnixDatagram::bind(&path).unwrap();
        let address = SocketAddr::from_abstract_name(&abstract_name.as_bytes()[1..]).unwrap();
        let other = UnixDatagram::bind_addr(&address).unwrap();
        notify(OsStr::new(&abstract_name)).unwrap();
        let mut text = [0; 32];
        let count = other.recv(&mut text).unwrap();
        assert_eq!(&text[..count], b"WATCHDOG=1");
        let telling = tokio::spawn(run(h.context.clone(), Duration::from_secs(15), path.into()));
        for _ in 0..3 {
            let count = systemd.recv(&mut text).await.unwrap();
            assert_eq!(&text[..count], b"WATCHDOG=1");
        }
        // Its manager shows no life any more.
        h.stop().await;
        tokio::time::advance(Duration::from_secs(400)).await;
        tokio::task::yield_now().await;
        while systemd.try_recv(&mut text).is_ok() {}
        tokio::time::advance(Duration::from_secs(60)).await;
        tokio::task::yield_now().await;
        assert!(systemd.try_recv(&mut text).is_err());
        telling.abort();
    }
}
