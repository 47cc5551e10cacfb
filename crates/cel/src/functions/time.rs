//! Parts of times and durations.

use super::{Entry, NO_MATCH};
use crate::error::EvalError;
use crate::time::Civil;
use crate::value::Value;

const SECOND: i64 = 1_000_000_000;

pub(super) const TABLE: &[Entry] = &[
    ("getFullYear", |_, args| part(args, None, |at| at.year)),
    ("getMonth", |_, args| part(args, None, |at| at.month - 1)),
    ("getDayOfYear", |_, args| part(args, None, |at| at.day_of_year - 1)),
    ("getDayOfMonth", |_, args| part(args, None, |at| at.day - 1)),
    ("getDate", |_, args| part(args, None, |at| at.day)),
    ("getDayOfWeek", |_, args| part(args, None, |at| at.weekday)),
    ("getHours", |_, args| part(args, Some(3600 * SECOND), |at| at.hour)),
    ("getMinutes", |_, args| part(args, Some(60 * SECOND), |at| at.minute)),
    ("getSeconds", |_, args| part(args, Some(SECOND), |at| at.second)),
    ("getMilliseconds", |_, args| part(args, Some(SECOND / 1000), |at| at.nanos / 1_000_000)),
];

/// A part of a time, or a whole duration in the unit `nanos`.
fn part<'a>(args: &[Value<'a>], nanos: Option<i64>, of: fn(&Civil) -> i64) -> Result<Value<'a>, EvalError> {
    Ok(Value::Int(match (args, nanos) {
        ([Value::Timestamp(time)], _) => of(&time.utc()),
        ([Value::Timestamp(time), Value::String(zone)], _) => of(&time.in_zone(zone)?),
        ([Value::Duration(duration)], Some(unit)) => duration.nanos / unit,
        _ => return Err(NO_MATCH),
    }))
}
