//! Decides if a container that has ended starts again.

use serde::{Deserialize, Serialize};

/// `--restart`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    #[default]
    No,
    /// After a failure, at most `retries` times in a row; 0 is without end.
    OnFailure {
        retries: u32,
    },
    Always,
    UnlessStopped,
}

impl RestartPolicy {
    /// The policy's name in `inspect`.
    pub fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::OnFailure { .. } => "on-failure",
            Self::Always => "always",
            Self::UnlessStopped => "unless-stopped",
        }
    }

    pub fn retries(self) -> u32 {
        if let Self::OnFailure { retries } = self { retries } else { 0 }
    }
}

impl std::str::FromStr for RestartPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, count) = match text.split_once(':') {
            Some((name, count)) => (name, Some(count)),
            None => (text, None),
        };
        let policy = match name {
            "" | "no" => Self::No,
            "always" => Self::Always,
            "unless-stopped" => Self::UnlessStopped,
            "on-failure" => {
                let retries = count.map_or(Ok(0), str::parse).map_err(|_| {
                    "invalid restart policy format: maximum retry count must be an integer".to_owned()
                })?;
                return Ok(Self::OnFailure { retries });
            }
            _ => return Err(format!("invalid restart policy '{name}'")),
        };
        match count {
            Some(_) => {
                Err("maximum retry count cannot be used with restart policy ".to_owned()
                    + &format!("'{name}'"))
            }
            None => Ok(policy),
        }
    }
}

/// Facts about the end of a container.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    pub code: i32,
    /// `stop`, `kill` or `rm` came before.
    pub by_hand: bool,
    /// Restarts so far.
    pub restarts: u32,
    /// The wait before the start that has now ended; 0 for a start by hand.
    pub last_delay_ms: u64,
    pub ran_ms: u64,
}

const FIRST_DELAY_MS: u64 = 100;
const LONGEST_DELAY_MS: u64 = 60_000;
/// A container that ran this long starts over with the shortest wait.
const STABLE_MS: u64 = 10_000;

/// Milliseconds until the next start; `None` if there is none.
pub fn next_start(policy: RestartPolicy, ended: Ended) -> Option<u64> {
    let again = match policy {
        RestartPolicy::No => false,
        RestartPolicy::Always | RestartPolicy::UnlessStopped => true,
        RestartPolicy::OnFailure { retries } => ended.code != 0 && (retries == 0 || ended.restarts < retries),
    };
    if ended.by_hand || !again {
        return None;
    }
    let doubled = ended.last_delay_ms.saturating_mul(2).clamp(FIRST_DELAY_MS, LONGEST_DELAY_MS);
    Some(if ended.ran_ms >= STABLE_MS { FIRST_DELAY_MS } else { doubled })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies() {
        for (text, want) in [
            ("no", Ok(RestartPolicy::No)),
            ("always", Ok(RestartPolicy::Always)),
            ("on-failure", Ok(RestartPolicy::OnFailure { retries: 0 })),
            ("on-failure:3", Ok(RestartPolicy::OnFailure { retries: 3 })),
            ("unless-stopped", Ok(RestartPolicy::UnlessStopped)),
            ("always:3", Err(())),
            ("on-failure:x", Err(())),
            ("sometimes", Err(())),
        ] {
            assert_eq!(text.parse::<RestartPolicy>().map_err(drop), want, "{text}");
        }
    }

    #[test]
    fn starts() {
        let ended = Ended { code: 1, by_hand: false, restarts: 0, last_delay_ms: 0, ran_ms: 5 };
        let three = RestartPolicy::OnFailure { retries: 3 };
        let rows: &[(&str, RestartPolicy, Ended, Option<u64>)] = &[
            ("never", RestartPolicy::No, ended, None),
            ("first", RestartPolicy::Always, ended, Some(100)),
            ("doubled", RestartPolicy::Always, Ended { last_delay_ms: 400, ..ended }, Some(800)),
            ("bounded", RestartPolicy::Always, Ended { last_delay_ms: 60_000, ..ended }, Some(60_000)),
            (
                "stable",
                RestartPolicy::Always,
                Ended { last_delay_ms: 60_000, ran_ms: 10_000, ..ended },
                Some(100),
            ),
            ("by hand", RestartPolicy::Always, Ended { by_hand: true, ..ended }, None),
            ("success", three, Ended { code: 0, ..ended }, None),
            ("failure", three, ended, Some(100)),
            ("enough", three, Ended { restarts: 3, ..ended }, None),
            ("success, always", RestartPolicy::UnlessStopped, Ended { code: 0, ..ended }, Some(100)),
        ];
        for (name, policy, ended, want) in rows {
            assert_eq!(next_start(*policy, *ended), *want, "{name}");
        }
    }
}
