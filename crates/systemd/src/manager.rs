//! The calls: units made, changed and ended.

use crate::connection::{CallError, Connection, MANAGER, SYSTEMD, SYSTEMD_PATH};
use crate::limits;
use crate::names::Slice;
use crate::wire::{Property, Reader, Value, Writer};
use ferrite_cgroup::{Limits, Version};

const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// A job that is in the way of ours goes.
const MODE: &str = "replace";
/// Job results that count as success.
const GOOD_RESULTS: &[&str] = &["done", "skipped"];

/// systemd, asked by one caller at a time.
pub struct Manager {
    connection: Connection,
    cgroups: Version,
    version: u32,
}

/// A scope to be made.
#[derive(Debug, Clone)]
pub struct ScopeRequest<'a> {
    /// `something.scope`.
    pub unit: &'a str,
    pub slice: &'a Slice,
    pub description: &'a str,
    /// Its first process, as this process numbers it.
    pub pid: u32,
    pub limits: &'a Limits,
}

impl Manager {
    pub fn connect(cgroups: Version) -> Result<Self, CallError> {
        let mut connection = Connection::open()?;
        let version = version(&mut connection)?;
        Ok(Self { connection, cgroups, version })
    }

    /// The version of systemd that answers.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Makes a scope around a process. We manage the groups below it.
    pub fn start_scope(&mut self, request: &ScopeRequest<'_>) -> Result<(), CallError> {
        let mut properties = self.common(request.description);
        properties.push(("Slice", Value::Text(request.slice.to_string())));
        properties.push(("PIDs", Value::U32s(vec![request.pid])));
        properties.push(("Delegate", Value::Bool(true)));
        properties.extend(limits::properties(request.limits, self.cgroups, self.version));
        self.start(request.unit, &properties)
    }

    /// Makes a slice, or brings the limits of the one that is there up to date.
    pub fn ensure_slice(&mut self, slice: &Slice, limits: &Limits) -> Result<(), CallError> {
        let unit = slice.to_string();
        let limits = limits::properties(limits, self.cgroups, self.version);
        let mut properties = self.common(&format!("ferrite: {unit}"));
        if let Some(parent) = slice.parent() {
            properties.push(("Wants", Value::Texts(vec![parent.to_string()])));
        }
        properties.extend(limits.iter().cloned());
        match self.start(&unit, &properties) {
            Err(error) if error.is_unit_exists() && !limits.is_empty() => self.set_properties(&unit, &limits),
            Err(error) if error.is_unit_exists() => Ok(()),
            other => other,
        }
    }

    /// Changes limits until the unit ends.
    pub fn update(&mut self, unit: &str, limits: &Limits) -> Result<(), CallError> {
        let properties = limits::properties(limits, self.cgroups, self.version);
        if properties.is_empty() { Ok(()) } else { self.set_properties(unit, &properties) }
    }

    /// Ends a unit and its processes, and has systemd forget the result. A missing unit is fine.
    pub fn stop(&mut self, unit: &str) -> Result<(), CallError> {
        let mut body = Writer::default();
        body.text(unit);
        body.text(MODE);
        let stopped = match self.connection.manager("StopUnit", "ss", &body.bytes) {
            Ok(answer) => self.finish(&answer),
            Err(error) if error.is_no_such_unit() => Ok(()),
            Err(error) => Err(error),
        };
        let mut body = Writer::default();
        body.text(unit);
        match self.connection.manager("ResetFailedUnit", "s", &body.bytes) {
            Err(error) if !error.is_no_such_unit() => Err(error),
            _ => stopped,
        }
    }

    /// A property of a unit, such as `MemoryMax` of the interface `org.freedesktop.systemd1.Scope`. `None` when
    /// no such unit is loaded.
    pub fn property(&mut self, unit: &str, interface: &str, name: &str) -> Result<Option<Value>, CallError> {
        let mut body = Writer::default();
        body.text(unit);
        let answer = match self.connection.manager("GetUnit", "s", &body.bytes) {
            Ok(answer) => answer,
            Err(error) if error.is_no_such_unit() => return Ok(None),
            Err(error) => return Err(error),
        };
        let path = Reader::new(&answer).text()?.to_owned();
        get(&mut self.connection, &path, interface, name).map(Some)
    }

    fn common(&self, description: &str) -> Vec<Property> {
        let mut properties: Vec<Property> = vec![
            ("Description", Value::Text(description.to_owned())),
            ("DefaultDependencies", Value::Bool(false)),
        ];
        // Without accounting systemd makes no groups for the controllers.
        let io = if self.cgroups == Version::V1 { "BlockIOAccounting" } else { "IOAccounting" };
        for name in ["CPUAccounting", "MemoryAccounting", "TasksAccounting", io] {
            properties.push((name, Value::Bool(true)));
        }
        properties
    }

    fn start(&mut self, unit: &str, properties: &[Property]) -> Result<(), CallError> {
        let mut body = Writer::default();
        body.text(unit);
        body.text(MODE);
        body.properties(properties);
        // No units beside it.
        body.array(8, |_| {});
        let answer = self.connection.manager("StartTransientUnit", "ssa(sv)a(sa(sv))", &body.bytes)?;
        self.finish(&answer)
    }

    fn set_properties(&mut self, unit: &str, properties: &[Property]) -> Result<(), CallError> {
        let mut body = Writer::default();
        body.text(unit);
        // Until the next start of the machine.
        body.u32(1);
        body.properties(properties);
        self.connection.manager("SetUnitProperties", "sba(sv)", &body.bytes).map(drop)
    }

    /// Waits for the job an answer names.
    fn finish(&mut self, answer: &[u8]) -> Result<(), CallError> {
        let job = Reader::new(answer).text()?.to_owned();
        let (unit, result) = self.connection.job(&job)?;
        if GOOD_RESULTS.contains(&result.as_str()) { Ok(()) } else { Err(CallError::Job { unit, result }) }
    }
}

fn get(connection: &mut Connection, path: &str, interface: &str, name: &str) -> Result<Value, CallError> {
    let mut body = Writer::default();
    body.text(interface);
    body.text(name);
    let answer = connection.call(SYSTEMD, path, PROPERTIES, "Get", "ss", &body.bytes)?;
    Ok(Reader::new(&answer).variant()?)
}

/// `252.38-1~deb12u1` is 252.
fn version(connection: &mut Connection) -> Result<u32, CallError> {
    let text = match get(connection, SYSTEMD_PATH, MANAGER, "Version")? {
        Value::Text(text) => text,
        _ => return Ok(0),
    };
    Ok(number(&text))
}

fn number(version: &str) -> u32 {
    let digits = version.trim_start_matches(|c: char| !c.is_ascii_digit());
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        for (text, expected) in [
            ("252.38-1~deb12u1", 252),
            ("v245.4-4ubuntu3", 245),
            ("systemd 219", 219),
            ("257~rc1", 257),
            ("?", 0),
        ] {
            assert_eq!(number(text), expected, "{text}");
        }
    }
}
