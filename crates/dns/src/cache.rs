//! Replies of other resolvers, kept for as long as CoreDNS's `cache 30` keeps them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::{Name, RData, Record, RecordType};

use crate::wire::{QuestionFlags, Response};

/// Replies live at least and at most this long, whatever their TTL.
const MIN_TTL: u32 = 5;
const MAX_TTL: u32 = 30;
/// Seconds for which a resolver's failure is cached.
const FAILURE_TTL: u32 = 5;
/// Entries of one half of the cache; CoreDNS has as many.
const MAX_ENTRIES: usize = 9984;
/// Bytes of one half of the cache, as the replies were on the wire.
const MAX_BYTES: usize = 4 << 20;
/// Estimated bytes of an entry besides its reply.
const ENTRY_COST: usize = 256;

/// The question that a reply belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Question {
    /// Lower case.
    pub name: Name,
    pub kind: RecordType,
    pub flags: QuestionFlags,
}

/// A reply and the time it has left.
#[derive(Debug, Clone)]
pub struct Reply {
    pub response: Arc<Response>,
    pub ttl: u32,
}

/// The time for which a reply may be cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    Answer(u32),
    /// The name does not exist, or not with this type, or the resolver failed.
    Denial(u32),
    /// Shown once with this TTL, never kept.
    None(u32),
}

impl Lifetime {
    pub fn of(response: &Response) -> Self {
        let clamp = |ttl: u32| ttl.clamp(MIN_TTL, MAX_TTL);
        let soa = response.authorities.iter().find_map(|record| match &record.data {
            RData::SOA(soa) => Some(record.ttl.min(soa.minimum)),
            _ => None,
        });
        match response.code {
            ResponseCode::NoError if !response.answers.is_empty() => {
                let all = response.answers.iter().chain(&response.authorities).chain(&response.additionals);
                Self::Answer(clamp(all.map(|record: &Record| record.ttl).min().unwrap_or(0)))
            }
            ResponseCode::NoError => soa.map_or(Self::None(MIN_TTL), |ttl| Self::Denial(clamp(ttl))),
            ResponseCode::NXDomain => Self::Denial(clamp(soa.unwrap_or(0))),
            ResponseCode::ServFail => Self::Denial(FAILURE_TTL),
            _ => Self::None(MIN_TTL),
        }
    }

    pub fn ttl(self) -> u32 {
        match self {
            Self::Answer(ttl) | Self::Denial(ttl) | Self::None(ttl) => ttl,
        }
    }
}

#[derive(Debug)]
struct Entry {
    response: Arc<Response>,
    size: usize,
    expires: (Instant, u64),
}

#[derive(Debug, Default)]
struct Half {
    entries: HashMap<Arc<Question>, Entry>,
    /// By the time they expire: the first one goes when there is no room.
    order: BTreeMap<(Instant, u64), Arc<Question>>,
    bytes: usize,
}

impl Half {
    fn remove(&mut self, question: &Question) {
        if let Some(entry) = self.entries.remove(question) {
            self.order.remove(&entry.expires);
            self.bytes -= entry.size;
        }
    }

    fn insert(&mut self, question: Arc<Question>, entry: Entry, now: Instant) {
        self.remove(&question);
        while let Some((expires, oldest)) = self.order.first_key_value() {
            let full = self.entries.len() >= MAX_ENTRIES || self.bytes + entry.size > MAX_BYTES;
            if expires.0 > now && !full {
                break;
            }
            let oldest = Arc::clone(oldest);
            self.remove(&oldest);
        }
        self.bytes += entry.size;
        self.order.insert(entry.expires, Arc::clone(&question));
        self.entries.insert(question, entry);
    }

    fn get(&self, question: &Question, now: Instant) -> Option<Reply> {
        let entry = self.entries.get(question)?;
        let left = entry.expires.0.checked_duration_since(now).filter(|left| !left.is_zero())?;
        // Rounded up: a reply with a TTL of nothing would never be shown.
        let ttl = u32::try_from(left.as_millis().div_ceil(1000)).unwrap_or(MAX_TTL);
        Some(Reply { response: Arc::clone(&entry.response), ttl })
    }
}

/// A bounded cache. A flood of denials does not displace answers.
#[derive(Debug, Default)]
pub struct Cache {
    answers: Half,
    denials: Half,
    inserted: u64,
}

impl Cache {
    pub fn get(&self, question: &Question, now: Instant) -> Option<Reply> {
        self.answers.get(question, now).or_else(|| self.denials.get(question, now))
    }

    /// Keeps a reply that had `size` bytes, if it may be kept.
    pub fn insert(&mut self, question: Question, response: Arc<Response>, size: usize, now: Instant) {
        let lifetime = Lifetime::of(&response);
        let (half, other, ttl) = match lifetime {
            Lifetime::Answer(ttl) => (&mut self.answers, &mut self.denials, ttl),
            Lifetime::Denial(ttl) => (&mut self.denials, &mut self.answers, ttl),
            Lifetime::None(_) => return,
        };
        self.inserted += 1;
        other.remove(&question);
        let expires = (now + Duration::from_secs(ttl.into()), self.inserted);
        half.insert(Arc::new(question), Entry { response, size: size + ENTRY_COST, expires }, now);
    }

    /// Number of cached answers and denials.
    pub fn len(&self) -> (usize, usize) {
        (self.answers.entries.len(), self.denials.entries.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::rr::rdata::{A, SOA};
    use std::net::Ipv4Addr;

    fn question(name: &str) -> Question {
        let flags = QuestionFlags { recursion_desired: true, checking_disabled: false, dnssec_ok: false };
        Question { name: Name::from_ascii(name).unwrap(), kind: RecordType::A, flags }
    }

    fn address(ttl: u32) -> Response {
        let mut response = Response::code(ResponseCode::NoError);
        response.answers = vec![Record::from_rdata(Name::root(), ttl, RData::A(A(Ipv4Addr::LOCALHOST)))];
        response
    }

    fn denied(code: ResponseCode, ttl: u32, minimum: u32) -> Response {
        let soa = SOA::new(Name::root(), Name::root(), 1, 1, 1, 1, minimum);
        let mut response = Response::code(code);
        response.authorities = vec![Record::from_rdata(Name::root(), ttl, RData::SOA(soa))];
        response
    }

    #[test]
    fn lifetimes() {
        use Lifetime::*;
        for (name, response, want) in [
            ("as it is", address(12), Answer(12)),
            ("no shorter than five seconds", address(0), Answer(5)),
            ("no longer than thirty seconds", address(86_400), Answer(30)),
            ("the SOA's TTL", denied(ResponseCode::NXDomain, 10, 3600), Denial(10)),
            ("the SOA's minimum", denied(ResponseCode::NoError, 3600, 11), Denial(11)),
            ("nothing says how long", Response::code(ResponseCode::NXDomain), Denial(5)),
            ("no data without an SOA is a referral", Response::code(ResponseCode::NoError), None(5)),
            ("failures", Response::code(ResponseCode::ServFail), Denial(5)),
            ("refusals", Response::code(ResponseCode::Refused), None(5)),
        ] {
            assert_eq!(Lifetime::of(&response), want, "{name}");
        }
    }

    #[test]
    fn replies_age_and_expire() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        cache.insert(question("a."), Arc::new(address(20)), 50, now);
        let ttl = |cache: &Cache, seconds| {
            cache.get(&question("a."), now + Duration::from_secs(seconds)).map(|reply| reply.ttl)
        };
        assert_eq!((ttl(&cache, 0), ttl(&cache, 15), ttl(&cache, 20)), (Some(20), Some(5), None));
        assert!(cache.get(&question("b."), now).is_none());
        let mut other = question("a.");
        other.flags.dnssec_ok = true;
        assert!(cache.get(&other, now).is_none());
        cache.insert(question("a."), Arc::new(denied(ResponseCode::NXDomain, 30, 30)), 50, now);
        assert_eq!(cache.get(&question("a."), now).unwrap().response.code, ResponseCode::NXDomain);
        assert_eq!(cache.len(), (0, 1));
    }

    #[test]
    fn memory_is_bounded_and_denials_displace_no_answers() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        cache.insert(question("kept."), Arc::new(address(30)), 50, now);
        for n in 0..MAX_ENTRIES + 100 {
            let response = Arc::new(denied(ResponseCode::NXDomain, 30, 30));
            cache.insert(question(&format!("n{n}.")), response, 50, now);
        }
        assert_eq!(cache.len(), (1, MAX_ENTRIES));
        assert_eq!(cache.denials.order.len(), MAX_ENTRIES);
        for n in 0..200 {
            cache.insert(question(&format!("large{n}.")), Arc::new(address(30)), 60_000, now);
            assert!(cache.answers.bytes <= MAX_BYTES);
        }
        let later = now + Duration::from_secs(31);
        cache.insert(question("later."), Arc::new(address(30)), 50, later);
        assert_eq!(cache.len(), (1, MAX_ENTRIES), "expired answers are dropped when one is added");
    }
}
