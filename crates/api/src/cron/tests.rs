use super::*;
use proptest::prelude::*;

fn time(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn next(schedule: &str, after: &str) -> Option<Timestamp> {
    Schedule::parse(schedule).unwrap().next(time(after), &TimeZone::UTC)
}

#[test]
fn errors_are_upstreams() {
    for (schedule, wrong) in [
        ("*/5 * * * *", None),
        ("0 0 1 jan mon-fri", None),
        ("0 0 1 JAN Mon-FRI", None),
        ("@hourly", None),
        ("@every 1h30m", None),
        ("@every 1.5h", None),
        ("? ? ? ? ?", None),
        ("TZ=Europe/Berlin 0 0 * * *", None),
        ("CRON_TZ=Asia/Tokyo @daily", None),
        ("", Some("empty spec string")),
        ("@never", Some("unrecognized descriptor: @never")),
        ("@HOURLY", Some("unrecognized descriptor: @HOURLY")),
        ("@every", Some("unrecognized descriptor: @every")),
        ("@every x", Some("failed to parse duration @every x: time: invalid duration \"x\"")),
        ("@every 5", Some("failed to parse duration @every 5: time: missing unit in duration \"5\"")),
        (
            "@every 5d",
            Some("failed to parse duration @every 5d: time: unknown unit \"d\" in duration \"5d\""),
        ),
        ("bad", Some("expected exactly 5 fields, found 1: [bad]")),
        ("* * * * * *", Some("expected exactly 5 fields, found 6: [* * * * * *]")),
        ("60 * * * *", Some("end of range (60) above maximum (59): 60")),
        ("* * 0 * *", Some("beginning of range (0) below minimum (1): 0")),
        ("* * * * 7", Some("end of range (7) above maximum (6): 7")),
        ("5-1 * * * *", Some("beginning of range (5) beyond end of range (1): 5-1")),
        ("*/0 * * * *", Some("step of range should be a positive number: */0")),
        ("1-2-3 * * * *", Some("too many hyphens: 1-2-3")),
        ("1/2/3 * * * *", Some("too many slashes: 1/2/3")),
        ("x * * * *", Some("failed to parse int from x: strconv.Atoi: parsing \"x\": invalid syntax")),
        ("TZ=No/Where * * * * *", Some("provided bad location No/Where: unknown time zone No/Where")),
        ("TZ=UTC", Some("invalid schedule format: runtime error: slice bounds out of range [:-1]")),
    ] {
        let got = Schedule::parse(schedule).err().map(|error| error.to_string());
        assert_eq!(got.as_deref(), wrong, "{schedule}");
    }
}

#[test]
fn times_follow_the_fields() {
    for (schedule, after, expected) in [
        // Minutes, and steps.
        ("0/15 * * * *", "2012-07-09T14:45:00Z", Some("2012-07-09T15:00:00Z")),
        ("0/15 * * * *", "2012-07-09T14:59:59Z", Some("2012-07-09T15:00:00Z")),
        ("*/15 * * * *", "2012-07-09T14:45:00.5Z", Some("2012-07-09T15:00:00Z")),
        ("20-35/15 * * * *", "2012-07-09T23:35:51Z", Some("2012-07-10T00:20:00Z")),
        ("5/20 * * * *", "2012-07-09T14:45:00Z", Some("2012-07-09T15:05:00Z")),
        // Wrapping of hours, days, months and years.
        ("20-35/15 1/2 * * *", "2012-07-09T23:35:51Z", Some("2012-07-10T01:20:00Z")),
        ("20-35/15 10-12 * * *", "2012-07-09T23:35:51Z", Some("2012-07-10T10:20:00Z")),
        ("20-35/15 1/2 */2 * *", "2012-07-09T23:35:51Z", Some("2012-07-11T01:20:00Z")),
        ("20-35/15 * 9-20 * *", "2012-07-09T23:35:51Z", Some("2012-07-10T00:20:00Z")),
        ("20-35/15 * 9-20 jul *", "2012-07-09T23:35:51Z", Some("2012-07-10T00:20:00Z")),
        ("0 0 9 apr-oct ?", "2012-07-09T23:35:00Z", Some("2012-08-09T00:00:00Z")),
        ("0 0 */5 apr,aug,oct mon", "2012-07-09T23:35:00Z", Some("2012-08-01T00:00:00Z")),
        ("0 0 */5 oct mon", "2012-07-09T23:35:00Z", Some("2012-10-01T00:00:00Z")),
        ("0 0 * feb mon", "2012-07-09T23:35:00Z", Some("2013-02-04T00:00:00Z")),
        ("0 0 * feb mon/2", "2012-07-09T23:35:00Z", Some("2013-02-01T00:00:00Z")),
        // Either day field matches unless one is a star; a star with a step is none.
        ("0 0 1,15 * sun", "2012-07-15T00:00:00Z", Some("2012-07-22T00:00:00Z")),
        ("0 0 1,15 * *", "2012-07-15T00:00:00Z", Some("2012-08-01T00:00:00Z")),
        ("0 0 * * sun", "2012-07-15T00:00:00Z", Some("2012-07-22T00:00:00Z")),
        ("0 0 */10 * sun", "2012-07-15T00:00:00Z", Some("2012-07-21T00:00:00Z")),
        // Leap years, and days that no month has.
        ("0 0 29 feb ?", "2012-07-09T23:35:00Z", Some("2016-02-29T00:00:00Z")),
        ("0 0 30 feb ?", "2012-07-09T23:35:00Z", None),
        ("0 0 31 apr ?", "2012-07-09T23:35:00Z", None),
        (", * * * *", "2012-07-09T23:35:00Z", None),
        // Descriptors.
        ("@hourly", "2012-07-09T14:45:00Z", Some("2012-07-09T15:00:00Z")),
        ("@daily", "2012-07-09T14:45:00Z", Some("2012-07-10T00:00:00Z")),
        ("@midnight", "2012-07-09T14:45:00Z", Some("2012-07-10T00:00:00Z")),
        ("@weekly", "2012-07-09T14:45:00Z", Some("2012-07-15T00:00:00Z")),
        ("@monthly", "2012-07-09T14:45:00Z", Some("2012-08-01T00:00:00Z")),
        ("@yearly", "2012-07-09T14:45:00Z", Some("2013-01-01T00:00:00Z")),
        ("@annually", "2012-07-09T14:45:00Z", Some("2013-01-01T00:00:00Z")),
        ("@every 5m", "2012-07-09T14:45:00.25Z", Some("2012-07-09T14:50:00Z")),
        ("@every 1h30m15.7s", "2012-07-09T14:45:00Z", Some("2012-07-09T16:15:15Z")),
        ("@every 10ms", "2012-07-09T14:45:00Z", Some("2012-07-09T14:45:01Z")),
        ("@every -1h", "2012-07-09T14:45:00Z", Some("2012-07-09T14:45:01Z")),
        // Zones.
        ("TZ=Asia/Tokyo 0 9 * * *", "2012-07-09T14:45:00Z", Some("2012-07-10T00:00:00Z")),
        ("CRON_TZ=America/New_York @daily", "2012-07-09T14:45:00Z", Some("2012-07-10T04:00:00Z")),
    ] {
        assert_eq!(next(schedule, after), expected.map(time), "{schedule} after {after}");
    }
}

#[test]
fn clocks_that_jump_give_upstreams_times() {
    let new_york = |schedule: &str| format!("TZ=America/New_York {schedule}");
    for (schedule, after, expected) in [
        // 02:00 to 03:00 do not exist on 2012-03-11.
        ("30 2 11 mar ?", "2012-03-11T00:00:00-05:00", "2013-03-11T02:30:00-04:00"),
        ("0 * * * ?", "2012-03-11T00:00:00-05:00", "2012-03-11T01:00:00-05:00"),
        ("0 * * * ?", "2012-03-11T01:00:00-05:00", "2012-03-11T03:00:00-04:00"),
        ("0 * * * ?", "2012-03-11T03:00:00-04:00", "2012-03-11T04:00:00-04:00"),
        ("0 1 * * ?", "2012-03-11T00:00:00-05:00", "2012-03-11T01:00:00-05:00"),
        ("0 1 * * ?", "2012-03-11T01:00:00-05:00", "2012-03-12T01:00:00-04:00"),
        ("0 2 * * ?", "2012-03-11T00:00:00-05:00", "2012-03-12T02:00:00-04:00"),
        // 01:00 to 02:00 come twice on 2012-11-04.
        ("30 2 04 nov ?", "2012-11-04T00:00:00-04:00", "2012-11-04T02:30:00-05:00"),
        ("30 1 04 nov ?", "2012-11-04T01:45:00-04:00", "2012-11-04T01:30:00-05:00"),
        ("0 * * * ?", "2012-11-04T00:00:00-04:00", "2012-11-04T01:00:00-04:00"),
        ("0 * * * ?", "2012-11-04T01:00:00-04:00", "2012-11-04T01:00:00-05:00"),
        ("0 * * * ?", "2012-11-04T01:00:00-05:00", "2012-11-04T02:00:00-05:00"),
        ("0 1 * * ?", "2012-11-04T00:00:00-04:00", "2012-11-04T01:00:00-04:00"),
        ("0 1 * * ?", "2012-11-04T01:00:00-04:00", "2012-11-04T01:00:00-05:00"),
        ("0 1 * * ?", "2012-11-04T01:00:00-05:00", "2012-11-05T01:00:00-05:00"),
        ("0 3 * * ?", "2012-11-04T00:00:00-04:00", "2012-11-04T03:00:00-05:00"),
    ] {
        assert_eq!(next(&new_york(schedule), after), Some(time(expected)), "{schedule} after {after}");
    }
    // Midnight does not exist on 2018-11-04 in São Paulo.
    for (schedule, after, expected) in [
        ("0 9 10 * ?", "2018-10-17T05:00:00-04:00", "2018-11-10T06:00:00-05:00"),
        ("0 9 22 * ?", "2018-02-14T05:00:00-05:00", "2018-02-22T07:00:00-05:00"),
        ("0 1 4 nov ?", "2018-11-03T12:00:00-03:00", "2018-11-04T01:00:00-02:00"),
    ] {
        let schedule = format!("TZ=America/Sao_Paulo {schedule}");
        assert_eq!(next(&schedule, after), Some(time(expected)), "{schedule} after {after}");
    }
}

#[test]
fn the_local_zone_counts_unless_the_schedule_names_one() {
    let tokyo = TimeZone::get("Asia/Tokyo").unwrap();
    let noon = time("2024-05-01T12:00:00Z");
    let daily = Schedule::parse("0 0 * * *").unwrap();
    assert_eq!(daily.next(noon, &tokyo), Some(time("2024-05-01T15:00:00Z")));
    assert_eq!(daily.in_zone(TimeZone::UTC).next(noon, &tokyo), Some(time("2024-05-02T00:00:00Z")));
    let local = Schedule::parse("TZ=Local 0 0 * * *").unwrap();
    assert_eq!(local.next(noon, &tokyo), Some(time("2024-05-01T15:00:00Z")));
}

/// A field as text with the values it means.
fn field(min: u32, max: u32) -> impl Strategy<Value = (String, Vec<u32>, bool)> {
    let all = move || (min..=max).collect::<Vec<_>>();
    prop_oneof![
        Just(("*".to_owned(), all(), true)),
        (min..=max).prop_map(|n| (n.to_string(), vec![n], false)),
        (min..=max, min..=max).prop_map(|(a, b)| {
            let (a, b) = (a.min(b), a.max(b));
            (format!("{a}-{b}"), (a..=b).collect(), false)
        }),
        (min..=max, 2u32..9).prop_map(move |(a, step)| {
            (format!("{a}/{step}"), (a..=max).step_by(step as usize).collect(), false)
        }),
        (2u32..9).prop_map(move |step| {
            (format!("*/{step}"), (min..=max).step_by(step as usize).collect(), false)
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The next time is the first minute of all that follow whose fields match.
    #[test]
    fn next_is_the_first_match(
        minute in field(0, 59), hour in field(0, 23), day in field(1, 31), weekday in field(0, 6),
        start in 0i64..2_000_000_000,
    ) {
        let text = format!("{} {} {} * {}", minute.0, hour.0, day.0, weekday.0);
        let after = Timestamp::from_second(start).unwrap();
        let found = Schedule::parse(&text).unwrap().next(after, &TimeZone::UTC).unwrap();
        prop_assert!(found > after);
        let matches = |at: Timestamp| {
            let wall = TimeZone::UTC.to_datetime(at);
            let day_of = |field: &(String, Vec<u32>, bool), value: u32| field.1.contains(&value);
            let in_month = day_of(&day, u32::try_from(wall.day()).unwrap());
            let in_week = day_of(&weekday, u32::try_from(wall.weekday().to_sunday_zero_offset()).unwrap());
            let days = if day.2 || weekday.2 { in_month && in_week } else { in_month || in_week };
            days && minute.1.contains(&u32::try_from(wall.minute()).unwrap())
                && hour.1.contains(&u32::try_from(wall.hour()).unwrap())
        };
        let mut at = start - start % 60 + 60;
        while at < found.as_second() {
            prop_assert!(!matches(Timestamp::from_second(at).unwrap()), "{text}: {at} is earlier");
            at += 60;
        }
        prop_assert_eq!(at, found.as_second());
        prop_assert!(matches(found));
    }

    #[test]
    fn no_text_panics(text in "[-*?/,0-9a-z@ =A-Z]{0,24}", start in -1_000_000_000_000i64..200_000_000_000) {
        if let (Ok(schedule), Ok(after)) = (Schedule::parse(&text), Timestamp::from_second(start)) {
            let next = schedule.next(after, &TimeZone::UTC);
            prop_assert!(next.is_none_or(|next| next > after));
        }
    }
}
