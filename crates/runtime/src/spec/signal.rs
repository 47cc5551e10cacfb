//! Signal names of images and of CRI.

use ferrite_cri::v1::Signal;

/// A signal by number or by name with or without `SIG`; `None` when there is no such signal.
pub fn signal_from_name(name: &str) -> Option<i32> {
    let name = name.trim();
    if let Ok(number) = name.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let upper = name.to_ascii_uppercase();
    let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
    // Real-time signals count from both ends; the C library keeps two below RTMIN for itself.
    let (first, last) = (34, 64);
    let offset = |rest: &str, sign: char| rest.strip_prefix(sign).and_then(|n| n.parse::<i32>().ok());
    if let Some(rest) = bare.strip_prefix("RTMIN") {
        let number = if rest.is_empty() { first } else { first + offset(rest, '+')? };
        return (first..=last).contains(&number).then_some(number);
    }
    if let Some(rest) = bare.strip_prefix("RTMAX") {
        let number = if rest.is_empty() { last } else { last - offset(rest, '-')? };
        return (first..=last).contains(&number).then_some(number);
    }
    let bare = match bare {
        "CLD" => "CHLD",
        "POLL" => "IO",
        "IOT" => "ABRT",
        other => other,
    };
    format!("SIG{bare}").parse::<nix::sys::signal::Signal>().ok().map(|signal| signal as i32)
}

/// CRI's enumeration; `None` for "as the runtime sees fit".
pub fn signal_from_cri(signal: Signal) -> Option<i32> {
    if signal == Signal::RuntimeDefault {
        return None;
    }
    let name = signal.as_str_name().replace("PLUS", "+").replace("MINUS", "-");
    signal_from_name(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, expected) in [
            ("SIGTERM", Some(15)),
            ("term", Some(15)),
            ("9", Some(9)),
            ("SIGRTMIN+3", Some(37)),
            ("RTMAX-1", Some(63)),
            ("SIGPOLL", Some(29)),
            ("0", None),
            ("SIGNOPE", None),
            ("SIGRTMIN+99", None),
        ] {
            assert_eq!(signal_from_name(name), expected, "{name}");
        }
    }

    #[test]
    fn every_cri_signal_has_a_number() {
        for value in 1..=65 {
            let signal = Signal::try_from(value).unwrap();
            assert!(signal_from_cri(signal).is_some(), "{signal:?}");
        }
        assert_eq!(signal_from_cri(Signal::Sigrtminplus3), Some(37));
        assert_eq!(signal_from_cri(Signal::RuntimeDefault), None);
    }
}
