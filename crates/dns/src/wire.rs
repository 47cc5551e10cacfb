//! Messages: which ones are read, and how responses are written.

use hickory_proto::op::{Message, MessageType, Metadata, OpCode, Query as Question, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder, BinEncodable, BinEncoder};

const HEADER: usize = 12;
/// The shortest record: the root's name, type, class, TTL and an empty value.
const SHORTEST_RECORD: usize = 11;
/// The largest UDP response of any client, whatever it offers.
const MAX_UDP: u16 = 4096;
const MIN_UDP: u16 = 512;
/// An OPT record without options.
const OPT_LEN: u16 = 11;

/// A query that can be answered: one question of class IN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    pub id: u16,
    /// As the client wrote it, letter case included.
    pub name: Name,
    pub kind: RecordType,
    pub recursion_desired: bool,
    pub checking_disabled: bool,
    /// The client understands the AD bit.
    pub authentic_data: bool,
    pub edns: Option<Edns>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edns {
    pub size: u16,
    pub dnssec_ok: bool,
}

impl Query {
    pub fn dnssec_ok(&self) -> bool {
        self.edns.is_some_and(|edns| edns.dnssec_ok)
    }

    /// Largest UDP response that the client accepts.
    pub fn udp_limit(&self) -> u16 {
        self.edns.map_or(MIN_UDP, |edns| edns.size.clamp(MIN_UDP, MAX_UDP))
    }
}

/// Why a packet is no query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejected {
    /// No reply: a response, or too short to have an id. Replying to responses could loop.
    Drop,
    /// Reply with these bytes.
    Reply { code: ResponseCode, bytes: Vec<u8> },
}

impl Rejected {
    fn reply(packet: &[u8], code: ResponseCode) -> Self {
        Self::Reply { code, bytes: header_only(packet, code) }
    }
}

/// The header of a response without any section, for packets that cannot be understood further.
fn header_only(packet: &[u8], code: ResponseCode) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes[..2].copy_from_slice(&packet[..2]);
    // QR, and opcode and RD of the request.
    bytes[2] = 0x80 | (packet[2] & 0x79);
    bytes[3] = code.low();
    bytes
}

fn count(packet: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([packet[at], packet[at + 1]]))
}

/// Reads a client's packet. Counts are checked before anything is allocated for them.
pub fn parse(packet: &[u8]) -> Result<Query, Rejected> {
    if packet.len() < HEADER || packet[2] & 0x80 != 0 {
        return Err(Rejected::Drop);
    }
    if packet[2] & 0x78 != 0 {
        return Err(Rejected::reply(packet, ResponseCode::NotImp));
    }
    let form_error = || Rejected::reply(packet, ResponseCode::FormErr);
    // IXFR carries one authority; OPT and TSIG are the only additional records of a query.
    let counts = [count(packet, 4), count(packet, 6), count(packet, 8), count(packet, 10)];
    if counts[0] != 1 || counts[1] > 1 || counts[2] > 1 || counts[3] > 2 {
        return Err(form_error());
    }
    let mut message = Message::from_vec(packet).map_err(|_| form_error())?;
    let question = message.queries.pop().ok_or_else(form_error)?;
    let edns = message
        .edns
        .as_ref()
        .map(|edns| Edns { size: edns.max_payload(), dnssec_ok: edns.flags().dnssec_ok });
    let query = Query {
        id: message.metadata.id,
        name: question.name,
        kind: question.query_type,
        recursion_desired: message.metadata.recursion_desired,
        checking_disabled: message.metadata.checking_disabled,
        authentic_data: message.metadata.authentic_data,
        edns,
    };
    if message.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
        return Err(refusal(&query, ResponseCode::BADVERS));
    }
    if question.query_class != DNSClass::IN {
        let mut rejected = refusal(&query, ResponseCode::Refused);
        if let Rejected::Reply { bytes, .. } = &mut rejected {
            restore_class(bytes, &query.name, question.query_class);
        }
        return Err(rejected);
    }
    // Zone transfers reveal everything at once; nobody needs one.
    if matches!(query.kind, RecordType::AXFR | RecordType::IXFR) {
        return Err(refusal(&query, ResponseCode::Refused));
    }
    Ok(query)
}

fn refusal(query: &Query, code: ResponseCode) -> Rejected {
    Rejected::Reply { code, bytes: encode(query, &Response::code(code), u16::MAX) }
}

/// The question is written as class IN; a response repeats the class that was asked for.
fn restore_class(bytes: &mut [u8], name: &Name, class: DNSClass) {
    let labels: usize = name.iter().map(|label| label.len() + 1).sum();
    let at = HEADER + labels + 1 + 2;
    if let Some(place) = bytes.get_mut(at..at + 2) {
        place.copy_from_slice(&u16::from(class).to_be_bytes());
    }
}

/// A response, without the parts that it repeats from the query.
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    pub code: ResponseCode,
    pub authoritative: bool,
    /// Set for responses of resolvers.
    pub recursion_available: bool,
    pub authentic_data: bool,
    pub answers: Vec<Record>,
    pub authorities: Vec<Record>,
    pub additionals: Vec<Record>,
}

impl Response {
    pub fn code(code: ResponseCode) -> Self {
        Self {
            code,
            authoritative: false,
            recursion_available: false,
            authentic_data: false,
            answers: Vec::new(),
            authorities: Vec::new(),
            additionals: Vec::new(),
        }
    }
}

/// Writes a response of at most `limit` bytes. Records that do not fit are left out, and TC says so; additional records
/// are optional and go without it.
pub fn encode(query: &Query, response: &Response, limit: u16) -> Vec<u8> {
    let limit = limit.saturating_sub(if query.edns.is_some() { OPT_LEN } else { 0 });
    let mut bytes = write(query, response, true, limit);
    if bytes.get(2).is_some_and(|flags| flags & 0x02 != 0) && !response.additionals.is_empty() {
        bytes = write(query, response, false, limit);
    }
    if bytes.len() < HEADER {
        // Cannot happen for names that were read from a packet; a client must get something nevertheless.
        bytes = vec![0; HEADER];
        bytes[..2].copy_from_slice(&query.id.to_be_bytes());
        bytes[2] = 0x80;
        bytes[3] = ResponseCode::ServFail.low();
    }
    if let Some(edns) = query.edns {
        let [high, low] = query.udp_limit().to_be_bytes();
        let flags = if edns.dnssec_ok { 0x80 } else { 0 };
        bytes.extend_from_slice(&[0, 0, 41, high, low, response.code.high(), 0, flags, 0, 0, 0]);
        let additional = u16::from_be_bytes([bytes[10], bytes[11]]) + 1;
        bytes[10..12].copy_from_slice(&additional.to_be_bytes());
    }
    bytes
}

fn write(query: &Query, response: &Response, additionals: bool, limit: u16) -> Vec<u8> {
    let mut metadata = Metadata::new(query.id, MessageType::Response, OpCode::Query);
    metadata.recursion_desired = query.recursion_desired;
    metadata.checking_disabled = query.checking_disabled;
    metadata.authoritative = response.authoritative;
    metadata.recursion_available = response.recursion_available;
    metadata.authentic_data = response.authentic_data && (query.authentic_data || query.dnssec_ok());
    metadata.response_code = ResponseCode::from(0, response.code.low());
    let question = Question::query(query.name.clone(), query.kind);
    let additionals = if additionals { response.additionals.as_slice() } else { &[] };
    let mut bytes = Vec::with_capacity(512);
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(limit);
    let written = hickory_proto::op::emit_message_parts(
        &metadata,
        &mut std::iter::once(&question),
        &mut response.answers.iter(),
        &mut response.authorities.iter(),
        &mut additionals.iter(),
        None,
        None,
        &mut encoder,
    );
    // A record that did not fit is still in the buffer, behind the end.
    let end = encoder.offset();
    match written {
        Ok(_) => bytes.truncate(end),
        Err(error) => {
            tracing::debug!(%error, name = %query.name, "cannot write a response");
            bytes.clear();
        }
    }
    bytes
}

/// Tells if a question has an OPT record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extension {
    Edns,
    None,
}

/// A question to another resolver.
pub fn encode_question(
    id: u16,
    name: &Name,
    kind: RecordType,
    flags: QuestionFlags,
    extension: Extension,
) -> Option<Vec<u8>> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = flags.recursion_desired;
    message.metadata.checking_disabled = flags.checking_disabled;
    message.add_query(Question::query(name.clone(), kind));
    if extension == Extension::Edns {
        let mut edns = hickory_proto::op::Edns::new();
        edns.set_max_payload(UPSTREAM_UDP).set_dnssec_ok(flags.dnssec_ok);
        message.set_edns(edns);
    }
    message.to_bytes().ok()
}

/// Large enough for most, small enough never to be fragmented on the way.
pub const UPSTREAM_UDP: u16 = 1232;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuestionFlags {
    pub recursion_desired: bool,
    pub checking_disabled: bool,
    pub dnssec_ok: bool,
}

/// Why a resolver's packet is not the reply to our question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadReply {
    #[error("the reply is for another question")]
    Mismatch,
    #[error("the reply does not repeat the letter case of the question")]
    Case,
    #[error("the reply cannot be read")]
    Unreadable,
}

/// Tells if a reply must repeat the letter case of the question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Case {
    Exact,
    Any,
}

/// Reads a resolver's reply to the question `name`, `kind` with `id`.
pub fn parse_reply(
    packet: &[u8],
    id: u16,
    name: &Name,
    kind: RecordType,
    case: Case,
) -> Result<Message, BadReply> {
    let response = packet.len() >= HEADER && packet[2] & 0xf8 == 0x80;
    if !response || packet[..2] != id.to_be_bytes() {
        return Err(BadReply::Mismatch);
    }
    if count(packet, 4) != 1 {
        // A resolver that could not read the question does not repeat it. Without the name only TCP can be believed.
        let unread = packet.len() == HEADER && packet[4..12] == [0; 8];
        return match case {
            Case::Any if unread => Message::from_vec(packet).map_err(|_| BadReply::Unreadable),
            _ if unread => Err(BadReply::Unreadable),
            _ => Err(BadReply::Mismatch),
        };
    }
    let mut decoder = BinDecoder::new(&packet[HEADER..]);
    // The name of the first question is never compressed: there is nothing before it to point to.
    let question = Question::read(&mut decoder).map_err(|_| BadReply::Mismatch)?;
    if question.query_type != kind || question.query_class != DNSClass::IN || question.name != *name {
        return Err(BadReply::Mismatch);
    }
    if case == Case::Exact && !question.name.eq_case(name) {
        return Err(BadReply::Case);
    }
    let records = count(packet, 6) + count(packet, 8) + count(packet, 10);
    if records > packet.len() / SHORTEST_RECORD {
        return Err(BadReply::Unreadable);
    }
    Message::from_vec(packet).map_err(|_| BadReply::Unreadable)
}
