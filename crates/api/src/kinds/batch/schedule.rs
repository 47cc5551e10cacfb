//! Schedules in the five fields of cron, and the errors upstream's parser makes of bad ones.

struct Bounds {
    min: u32,
    max: u32,
    names: &'static [&'static str],
}

const MONTHS: &[&str] = &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const DAYS: &[&str] = &["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
const FIELDS: [Bounds; 5] = [
    Bounds { min: 0, max: 59, names: &[] },
    Bounds { min: 0, max: 23, names: &[] },
    Bounds { min: 1, max: 31, names: &[] },
    Bounds { min: 1, max: 12, names: MONTHS },
    Bounds { min: 0, max: 6, names: DAYS },
];

/// What is wrong with a schedule.
pub(super) fn problem(schedule: &str) -> Option<String> {
    check(schedule).err()
}

fn check(schedule: &str) -> Result<(), String> {
    if schedule.is_empty() {
        return Err("empty spec string".to_owned());
    }
    let schedule = match schedule.strip_prefix("TZ=").or_else(|| schedule.strip_prefix("CRON_TZ=")) {
        Some(rest) => {
            let (zone, rest) = rest.split_once(' ').unwrap_or((rest, ""));
            if jiff::tz::TimeZone::get(zone).is_err() {
                return Err(format!("provided bad location {zone}: unknown time zone {zone}"));
            }
            rest.trim()
        }
        None => schedule,
    };
    if let Some(descriptor) = schedule.strip_prefix('@') {
        return check_descriptor(schedule, descriptor);
    }
    let fields: Vec<&str> = schedule.split_whitespace().collect();
    if fields.len() != FIELDS.len() {
        return Err(format!(
            "expected exactly 5 fields, found {}: {fields}",
            fields.len(),
            fields = go_list(&fields)
        ));
    }
    for (field, bounds) in fields.iter().zip(&FIELDS) {
        for range in field.split(',').filter(|r| !r.is_empty()) {
            check_range(range, bounds)?;
        }
    }
    Ok(())
}

fn go_list(fields: &[&str]) -> String {
    format!("[{}]", fields.join(" "))
}

fn check_descriptor(schedule: &str, descriptor: &str) -> Result<(), String> {
    match descriptor {
        "yearly" | "annually" | "monthly" | "weekly" | "daily" | "midnight" | "hourly" => Ok(()),
        _ => match descriptor.strip_prefix("every ") {
            Some(duration) if is_duration(duration) => Ok(()),
            Some(duration) => {
                Err(format!("failed to parse duration {schedule}: time: invalid duration {duration:?}"))
            }
            None => Err(format!("unrecognized descriptor: {schedule}")),
        },
    }
}

/// Whether a text is one of Go's durations: numbers with units, `1h30m`.
fn is_duration(text: &str) -> bool {
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    if text == "0" {
        return true;
    }
    let mut rest = text;
    while !rest.is_empty() {
        let number = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        if number == 0 || rest[..number].parse::<f64>().is_err() {
            return false;
        }
        rest = &rest[number..];
        let Some(unit) = ["ns", "us", "µs", "ms", "s", "m", "h"].iter().find(|u| {
            rest.strip_prefix(**u)
                .is_some_and(|r| r.is_empty() || r.starts_with(|c: char| c.is_ascii_digit() || c == '.'))
        }) else {
            return false;
        };
        rest = &rest[unit.len()..];
    }
    !text.is_empty()
}

fn check_range(text: &str, bounds: &Bounds) -> Result<(), String> {
    let with_step: Vec<&str> = text.split('/').collect();
    let ends: Vec<&str> = with_step[0].split('-').collect();
    let (start, mut end);
    if matches!(ends[0], "*" | "?") {
        (start, end) = (bounds.min, bounds.max);
    } else {
        start = number(ends[0], bounds)?;
        end = match ends.len() {
            1 => start,
            2 => number(ends[1], bounds)?,
            _ => return Err(format!("too many hyphens: {text}")),
        };
    }
    match with_step.len() {
        1 => {}
        2 => {
            let step = plain_number(with_step[1])?;
            // `N/step` means from N to the end.
            if ends.len() == 1 && !matches!(ends[0], "*" | "?") {
                end = bounds.max;
            }
            if step == 0 {
                return Err(format!("step of range should be a positive number: {text}"));
            }
        }
        _ => return Err(format!("too many slashes: {text}")),
    }
    if start < bounds.min {
        return Err(format!("beginning of range ({start}) below minimum ({}): {text}", bounds.min));
    }
    if end > bounds.max {
        return Err(format!("end of range ({end}) above maximum ({}): {text}", bounds.max));
    }
    if start > end {
        return Err(format!("beginning of range ({start}) beyond end of range ({end}): {text}"));
    }
    Ok(())
}

fn number(text: &str, bounds: &Bounds) -> Result<u32, String> {
    let lower = text.to_lowercase();
    match bounds.names.iter().position(|n| *n == lower) {
        Some(index) => Ok(u32::try_from(index).unwrap_or(0) + if bounds.names.len() == 12 { 1 } else { 0 }),
        None => plain_number(text),
    }
}

fn plain_number(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Ok(number) if number < 0 => Err(format!("negative number ({number}) not allowed: {text}")),
        Ok(number) => Ok(u32::try_from(number).unwrap_or(u32::MAX)),
        Err(_) => {
            Err(format!("failed to parse int from {text}: strconv.Atoi: parsing {text:?}: invalid syntax"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::problem;

    #[test]
    fn schedules() {
        for (schedule, wrong) in [
            ("*/5 * * * *", None),
            ("0 0 1 jan mon-fri", None),
            ("@hourly", None),
            ("@every 1h30m", None),
            ("@never", Some("unrecognized descriptor: @never")),
            ("bad", Some("expected exactly 5 fields, found 1: [bad]")),
            ("60 * * * *", Some("end of range (60) above maximum (59): 60")),
            ("* * 0 * *", Some("beginning of range (0) below minimum (1): 0")),
            ("5-1 * * * *", Some("beginning of range (5) beyond end of range (1): 5-1")),
            ("*/0 * * * *", Some("step of range should be a positive number: */0")),
            ("x * * * *", Some("failed to parse int from x: strconv.Atoi: parsing \"x\": invalid syntax")),
        ] {
            assert_eq!(problem(schedule).as_deref(), wrong, "{schedule}");
        }
    }
}
