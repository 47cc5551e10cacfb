//! D-Bus as bytes: the part of its types that units' properties need, little-endian throughout.

/// A property of a unit, by systemd's name for it.
pub type Property = (&'static str, Value);

/// A value of one of the types properties have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Bool(bool),
    U64(u64),
    Text(String),
    Texts(Vec<String>),
    U32s(Vec<u32>),
    Bytes(Vec<u8>),
}

impl Value {
    fn signature(&self) -> &'static str {
        match self {
            Value::Bool(_) => "b",
            Value::U64(_) => "t",
            Value::Text(_) => "s",
            Value::Texts(_) => "as",
            Value::U32s(_) => "au",
            Value::Bytes(_) => "ay",
        }
    }
}

/// Writes values with the padding D-Bus wants; offsets count from where it begins.
#[derive(Debug, Default)]
pub struct Writer {
    pub bytes: Vec<u8>,
}

impl Writer {
    pub fn align(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
    }

    pub fn byte(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub fn u32(&mut self, value: u32) {
        self.align(4);
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.align(8);
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn text(&mut self, value: &str) {
        self.u32(value.len() as u32);
        self.bytes.extend(value.as_bytes());
        self.byte(0);
    }

    pub fn signature(&mut self, value: &str) {
        self.byte(value.len() as u8);
        self.bytes.extend(value.as_bytes());
        self.byte(0);
    }

    /// An array whose elements are aligned to `alignment`: its length does not count the padding before them.
    pub fn array(&mut self, alignment: usize, elements: impl FnOnce(&mut Self)) {
        self.u32(0);
        let length_at = self.bytes.len() - 4;
        self.align(alignment);
        let begin = self.bytes.len();
        elements(self);
        let length = (self.bytes.len() - begin) as u32;
        self.bytes[length_at..length_at + 4].copy_from_slice(&length.to_le_bytes());
    }

    pub fn variant(&mut self, value: &Value) {
        self.signature(value.signature());
        match value {
            Value::Bool(value) => self.u32(u32::from(*value)),
            Value::U64(value) => self.u64(*value),
            Value::Text(value) => self.text(value),
            Value::Texts(values) => self.array(4, |w| values.iter().for_each(|value| w.text(value))),
            Value::U32s(values) => self.array(4, |w| values.iter().for_each(|value| w.u32(*value))),
            Value::Bytes(values) => self.array(1, |w| w.bytes.extend(values)),
        }
    }

    /// `a(sv)`.
    pub fn properties(&mut self, properties: &[Property]) {
        self.array(8, |w| {
            for (name, value) in properties {
                w.align(8);
                w.text(name);
                w.variant(value);
            }
        });
    }
}

/// The data is not D-Bus, or not the part of it that systemd uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the answer is not a D-Bus message")]
pub struct Malformed;

/// Reads values; never beyond the end.
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub fn align(&mut self, to: usize) {
        self.at = self.at.next_multiple_of(to);
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at.checked_add(count).ok_or(Malformed)?;
        let taken = self.bytes.get(self.at..end).ok_or(Malformed)?;
        self.at = end;
        Ok(taken)
    }

    pub fn byte(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.align(4);
        let taken = self.take(4)?.try_into().map_err(|_| Malformed)?;
        Ok(u32::from_le_bytes(taken))
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.align(8);
        let taken = self.take(8)?.try_into().map_err(|_| Malformed)?;
        Ok(u64::from_le_bytes(taken))
    }

    pub fn text(&mut self) -> Result<&'a str, Malformed> {
        let length = self.u32()? as usize;
        self.ended(length)
    }

    pub fn signature(&mut self) -> Result<&'a str, Malformed> {
        let length = self.byte()? as usize;
        self.ended(length)
    }

    fn ended(&mut self, length: usize) -> Result<&'a str, Malformed> {
        let text = self.take(length)?;
        if self.byte()? != 0 {
            return Err(Malformed);
        }
        std::str::from_utf8(text).map_err(|_| Malformed)
    }

    /// A variant of one of the types we know.
    pub fn variant(&mut self) -> Result<Value, Malformed> {
        match self.signature()? {
            "b" => Ok(Value::Bool(self.u32()? != 0)),
            "t" => Ok(Value::U64(self.u64()?)),
            "s" | "o" => Ok(Value::Text(self.text()?.to_owned())),
            "u" => Ok(Value::U64(self.u32()?.into())),
            _ => Err(Malformed),
        }
    }
}

/// The type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Call = 1,
    Return = 2,
    Error = 3,
    Signal = 4,
}

/// A call to be sent.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    pub serial: u32,
    pub destination: &'a str,
    pub path: &'a str,
    pub interface: &'a str,
    pub member: &'a str,
    pub signature: &'a str,
    pub body: &'a [u8],
}

const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const ERROR_NAME: u8 = 4;
const REPLY_SERIAL: u8 = 5;
const DESTINATION: u8 = 6;
const SENDER: u8 = 7;
const SIGNATURE: u8 = 8;
const UNIX_FDS: u8 = 9;

/// The fixed beginning of every message, with the length of the header's fields.
pub const PROLOGUE: usize = 16;
/// Longest message we read; systemd's replies to our calls are far shorter.
const MAX_MESSAGE: usize = 1 << 20;

pub fn encode(call: &Call<'_>) -> Vec<u8> {
    let mut writer = Writer::default();
    for byte in [b'l', Kind::Call as u8, 0, 1] {
        writer.byte(byte);
    }
    writer.u32(call.body.len() as u32);
    writer.u32(call.serial);
    writer.array(8, |w| {
        let mut field = |code: u8, kind: &str, value: &str| {
            w.align(8);
            w.byte(code);
            w.signature(kind);
            if kind == "g" { w.signature(value) } else { w.text(value) }
        };
        field(PATH, "o", call.path);
        field(DESTINATION, "s", call.destination);
        field(INTERFACE, "s", call.interface);
        field(MEMBER, "s", call.member);
        if !call.signature.is_empty() {
            field(SIGNATURE, "g", call.signature);
        }
    });
    writer.align(8);
    writer.bytes.extend(call.body);
    writer.bytes
}

/// A message that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub kind: Kind,
    pub reply_serial: Option<u32>,
    pub member: String,
    pub error_name: String,
    /// The sender's unique name. The bus writes it.
    pub sender: String,
    pub body: Vec<u8>,
}

/// Number of bytes that follow a message's prologue.
pub fn remaining(prologue: &[u8; PROLOGUE]) -> Result<usize, Malformed> {
    if prologue[0] != b'l' || prologue[3] != 1 {
        return Err(Malformed);
    }
    let mut reader = Reader::new(prologue);
    reader.at = 4;
    let body = reader.u32()? as usize;
    reader.at = 12;
    let fields = reader.u32()? as usize;
    let all = fields.next_multiple_of(8).checked_add(body).ok_or(Malformed)?;
    if all > MAX_MESSAGE { Err(Malformed) } else { Ok(all) }
}

pub fn decode(bytes: &[u8]) -> Result<Message, Malformed> {
    let mut reader = Reader::new(bytes);
    reader.at = 1;
    let kind = match reader.byte()? {
        1 => Kind::Call,
        2 => Kind::Return,
        3 => Kind::Error,
        4 => Kind::Signal,
        _ => return Err(Malformed),
    };
    reader.at = 12;
    let end = PROLOGUE + reader.u32()? as usize;
    let mut message = Message {
        kind,
        reply_serial: None,
        member: String::new(),
        error_name: String::new(),
        sender: String::new(),
        body: bytes.get(end.next_multiple_of(8)..).ok_or(Malformed)?.to_vec(),
    };
    while reader.at < end {
        reader.align(8);
        let code = reader.byte()?;
        match (code, reader.signature()?) {
            (REPLY_SERIAL, "u") => message.reply_serial = Some(reader.u32()?),
            (MEMBER, "s") => message.member = reader.text()?.to_owned(),
            (ERROR_NAME, "s") => message.error_name = reader.text()?.to_owned(),
            (SENDER, "s") => message.sender = reader.text()?.to_owned(),
            (PATH | INTERFACE | DESTINATION, "s" | "o") => drop(reader.text()?),
            (SIGNATURE, "g") => drop(reader.signature()?),
            (UNIX_FDS, "u") => drop(reader.u32()?),
            _ => return Err(Malformed),
        }
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        for (value, expected) in [
            (Value::Bool(true), &b"\x01b\0\0\x01\0\0\0"[..]),
            (Value::U64(258), b"\x01t\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0"),
            (Value::Text("ab".into()), b"\x01s\0\0\x02\0\0\0ab\0"),
            (Value::Texts(vec!["a".into()]), b"\x02as\0\x06\0\0\0\x01\0\0\0a\0"),
            (Value::U32s(vec![7, 8]), b"\x02au\0\x08\0\0\0\x07\0\0\0\x08\0\0\0"),
            (Value::Bytes(vec![5]), b"\x02ay\0\x01\0\0\0\x05"),
        ] {
            let mut writer = Writer::default();
            writer.variant(&value);
            assert_eq!(writer.bytes, expected, "{value:?}");
        }
    }

    #[test]
    fn properties_are_aligned_structures() {
        let mut writer = Writer::default();
        writer.u32(9);
        writer.properties(&[("A", Value::Bool(false)), ("B", Value::U64(1))]);
        let expected = b"\x09\0\0\0\x2c\0\0\0\
            \x01\0\0\0A\0\x01b\0\0\0\0\0\0\0\0\
            \x01\0\0\0B\0\x01t\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0";
        // The first structure ends at 4 + 2 + 3 + padding + 4 bytes; the second begins at the next eight.
        assert_eq!(writer.bytes.len(), 8 + writer.bytes[4] as usize);
        assert_eq!(
            writer.bytes[..8],
            expected[..4].iter().chain(&[writer.bytes[4], 0, 0, 0]).copied().collect::<Vec<_>>()
        );
        assert_eq!(writer.bytes[8..24], expected[8..24]);
        assert_eq!(writer.bytes[24..], expected[24..]);
    }

    #[test]
    fn a_call_and_back() {
        let call = Call {
            serial: 3,
            destination: "org.freedesktop.systemd1",
            path: "/org/freedesktop/systemd1",
            interface: "org.freedesktop.systemd1.Manager",
            member: "ResetFailedUnit",
            signature: "s",
            body: b"\x01\0\0\0a\0",
        };
        let bytes = encode(&call);
        let prologue: [u8; PROLOGUE] = bytes[..PROLOGUE].try_into().unwrap();
        assert_eq!(remaining(&prologue).unwrap(), bytes.len() - PROLOGUE);
        let message = decode(&bytes).unwrap();
        assert_eq!((message.kind, message.member.as_str()), (Kind::Call, "ResetFailedUnit"));
        assert_eq!(message.body, call.body);
        // Whatever is cut off is noticed, and nothing is read beyond the end.
        for length in 0..bytes.len() - call.body.len() - 8 {
            assert!(decode(&bytes[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn what_is_no_message() {
        assert!(remaining(b"B\x02\0\x01\0\0\0\0\0\0\0\0\0\0\0\0").is_err(), "the other byte order");
        assert!(remaining(b"l\x02\0\x01\xff\xff\xff\xff\0\0\0\0\0\0\0\0").is_err(), "too long");
    }
}
