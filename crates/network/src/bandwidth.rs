//! Limits of a pod's traffic, as queues at both ends of its link. They go with the link.

use ferrite_netlink::{Connection, TokenBucket};

/// Limits in bits per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bandwidth {
    /// Of packets to the pod.
    pub ingress: Option<u64>,
    /// Of packets from the pod.
    pub egress: Option<u64>,
}

/// The annotations of a pod with its limits.
pub const INGRESS_ANNOTATION: &str = "kubernetes.io/ingress-bandwidth";
pub const EGRESS_ANNOTATION: &str = "kubernetes.io/egress-bandwidth";

/// An annotation that is no limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BandwidthError {
    #[error("{0:?} is not a quantity such as 10M")]
    NoQuantity(String),
    #[error("resource {0} is unreasonably small (< 1kbit)")]
    Small(String),
    #[error("resource {0} is unreasonably large (> 1Pbit)")]
    Large(String),
}

impl Bandwidth {
    /// The limits that a pod's annotations ask for, with upstream's bounds.
    pub fn of<'a>(get: impl Fn(&str) -> Option<&'a String>) -> Result<Self, BandwidthError> {
        let limit = |key| get(key).map(|text| parse(text)).transpose();
        Ok(Self { ingress: limit(INGRESS_ANNOTATION)?, egress: limit(EGRESS_ANNOTATION)? })
    }
}

/// A quantity of Kubernetes in whole bits, rounded up.
fn parse(text: &str) -> Result<u64, BandwidthError> {
    const KILO: u128 = 1_000;
    const PETA: u128 = 1_000_000_000_000_000;
    let bad = || BandwidthError::NoQuantity(text.to_owned());
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if number.len() > 20 || (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(bad());
    }
    let thousandth = suffix == "m";
    let factor: u128 = match suffix {
        "" | "m" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "P" => PETA,
        "E" => 1_000_000_000_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "Pi" => 1 << 50,
        "Ei" => 1 << 60,
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E']).ok_or_else(bad)?;
            10_u128.pow(exponent.parse::<u32>().ok().filter(|power| *power <= 18).ok_or_else(bad)?)
        }
    };
    let digits: u128 = format!("0{whole}{fraction}").parse().map_err(|_| bad())?;
    let places = u32::try_from(fraction.len()).map_err(|_| bad())? + if thousandth { 3 } else { 0 };
    let bits = digits.checked_mul(factor).ok_or_else(bad)?.div_ceil(10_u128.pow(places));
    match bits {
        bits if bits < KILO => Err(BandwidthError::Small(text.to_owned())),
        bits if bits > PETA => Err(BandwidthError::Large(text.to_owned())),
        bits => u64::try_from(bits).map_err(|_| bad()),
    }
}

/// Bytes that may go at once, and bytes that may wait. A tenth of a second may pass at once, and always a few packets of
/// full size; a fortieth of a second waits, as the plugin `bandwidth` has it. More is dropped.
pub(crate) fn burst_and_limit(bits_per_second: u64) -> (u64, u64) {
    const LEAST: u64 = 32 * 1024;
    let bytes = bits_per_second / 8;
    let burst = (bytes / 10).clamp(LEAST, u64::from(u32::MAX) / 4);
    (burst, (bytes / 40 + burst).min(u64::from(u32::MAX) / 2))
}

/// Limits the traffic that leaves by a link.
pub(crate) async fn limit(
    conn: &Connection,
    link: &str,
    bits_per_second: u64,
) -> Result<(), ferrite_netlink::Error> {
    limit_with_burst(conn, link, bits_per_second, None).await
}

/// The queue of a rate and the bits that may go at once.
fn bytes_at_once(bits_per_second: u64, burst_bits: Option<u64>) -> (u64, u64) {
    let (burst, waiting) = burst_and_limit(bits_per_second);
    match burst_bits {
        None => (burst, waiting),
        Some(bits) => {
            let own = (bits / 8).max(1);
            (own, waiting.saturating_sub(burst).saturating_add(own))
        }
    }
}

/// [`limit`], with the number of bits that may go at once.
pub(crate) async fn limit_with_burst(
    conn: &Connection,
    link: &str,
    bits_per_second: u64,
    burst_bits: Option<u64>,
) -> Result<(), ferrite_netlink::Error> {
    let (burst, waiting) = bytes_at_once(bits_per_second, burst_bits);
    let within = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
    let queue = TokenBucket {
        bytes_per_second: (bits_per_second / 8).max(1),
        burst: within(burst),
        limit: within(waiting),
    };
    conn.replace_queue(link, queue).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities() {
        let rows: [(&str, Option<u64>); 15] = [
            ("10M", Some(10_000_000)),
            ("1k", Some(1_000)),
            ("1Ki", Some(1_024)),
            ("1.5M", Some(1_500_000)),
            ("1e6", Some(1_000_000)),
            ("1000500m", Some(1_001)),
            ("1P", Some(1_000_000_000_000_000)),
            ("2P", None),
            ("999", None),
            ("", None),
            ("M", None),
            ("-1M", None),
            ("1.2.3M", None),
            ("1e99", None),
            ("10Q", None),
        ];
        for (text, want) in rows {
            assert_eq!(parse(text).ok(), want, "{text}");
        }
    }

    #[test]
    fn bursts_have_room_for_packets_and_fit_the_kernel() {
        for (rate, burst, waiting) in [
            (1_000, 32_768, 32_771),
            (8_000_000, 100_000, 125_000),
            (1_000_000_000_000_000, 1_073_741_823, 2_147_483_647),
        ] {
            assert_eq!(burst_and_limit(rate), (burst, waiting), "{rate}");
            assert_eq!(bytes_at_once(rate, None), (burst, waiting), "{rate}");
        }
        assert_eq!(bytes_at_once(8_000_000, Some(8_000)), (1_000, 26_000));
    }
}
