//! The present moment, as the API writes it.

use jiff::Timestamp;
use std::time::Duration;

/// Where the kubelet reads the time. Decisions take the moment as an argument; only the edges hold a clock.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Clock {
    /// The machine's clock.
    System,
    /// Moves with tokio's clock, so a test that pauses the one pauses the other.
    #[cfg(test)]
    Paused { base: Timestamp, since: tokio::time::Instant },
}

impl Clock {
    #[cfg(test)]
    pub(crate) fn paused() -> Self {
        let base = Timestamp::from_second(1_700_000_000).expect("a valid time");
        Clock::Paused { base, since: tokio::time::Instant::now() }
    }

    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Clock::System => Timestamp::now(),
            #[cfg(test)]
            Clock::Paused { base, since } => add(*base, since.elapsed()),
        }
    }
}

/// `at + by`, held at the end of representable time.
pub(crate) fn add(at: Timestamp, by: Duration) -> Timestamp {
    at.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// Time from `earlier` to `later`; zero if `later` is before.
pub(crate) fn since(earlier: Timestamp, later: Timestamp) -> Duration {
    let nanos = later.as_nanosecond().saturating_sub(earlier.as_nanosecond());
    Duration::from_nanos(u64::try_from(nanos.max(0)).unwrap_or(u64::MAX))
}

/// A CRI time: nanoseconds since the epoch, zero for "not yet".
pub(crate) fn from_nanos(nanos: i64) -> Option<Timestamp> {
    if nanos <= 0 {
        return None;
    }
    Timestamp::from_nanosecond(i128::from(nanos)).ok()
}

/// A duration in Go's notation ("10s", "1m20s", "5m0s"), which messages of the kubelet use.
pub(crate) fn go_duration(d: Duration) -> String {
    let total = d.as_secs();
    let (hours, minutes, seconds) = (total / 3600, total / 60 % 60, total % 60);
    let millis = d.subsec_millis();
    let seconds = if millis == 0 {
        format!("{seconds}s")
    } else if total == 0 {
        return format!("{millis}ms");
    } else {
        format!("{seconds}.{}s", format!("{millis:03}").trim_end_matches('0'))
    };
    match (hours, minutes) {
        (0, 0) => seconds,
        (0, m) => format!("{m}m{seconds}"),
        (h, m) => format!("{h}h{m}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_go_writes_them() {
        for (millis, text) in [
            (0, "0s"),
            (10_000, "10s"),
            (80_000, "1m20s"),
            (300_000, "5m0s"),
            (3_600_000, "1h0m0s"),
            (250, "250ms"),
            (1_500, "1.5s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(millis)), text);
        }
    }
}
