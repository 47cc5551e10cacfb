//! Ways in for untrusted bytes.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::LazyLock;

use hickory_proto::op::Message;

use crate::answer::Zone;
use crate::forward::{Forwarder, Patience};
use crate::resolvers::Resolvers;
use crate::server::Server;
use crate::wire::{Case, parse_reply};

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let zone = Zone::new("cluster.local", Vec::new()).expect("a domain");
    let resolvers = Resolvers::new("/nonexistent".into(), Vec::new(), Vec::new());
    let server = Server::new(zone, Forwarder::new(resolvers, Patience::default()));
    server.update(1, |index| index.apply_namespace("default"));
    server.set_synced();
    server
});

/// A packet from a client, and the same bytes as the reply of a resolver. Every reply of ours must be a response to the
/// query, readable, and no larger than a datagram may be.
pub fn packet(bytes: &[u8]) {
    if let Some(reply) = SERVER.answer_now(bytes, IpAddr::V4(Ipv4Addr::LOCALHOST)) {
        assert!(reply.len() <= 4096, "a reply of {} bytes", reply.len());
        assert_eq!(reply[..2], bytes[..2], "another id");
        assert!(reply[2] & 0x80 != 0, "not a response");
        Message::from_vec(&reply).expect("a reply that can be read");
    }
    let Some(id) = bytes.first_chunk().map(|id| u16::from_be_bytes(*id)) else { return };
    if let Ok(message) = Message::from_vec(bytes)
        && let Some(question) = message.queries.first()
    {
        let _ = parse_reply(bytes, id, &question.name, question.query_type, Case::Exact);
    }
}

#[cfg(test)]
mod tests {
    use super::packet;
    use crate::wire::{Extension, QuestionFlags, encode_question};
    use hickory_proto::rr::{Name, RecordType};
    use proptest::prelude::*;

    fn query(labels: &[Vec<u8>], kind: u16) -> Option<Vec<u8>> {
        let mut name = Name::from_labels(labels.iter().map(Vec::as_slice)).ok()?;
        name.set_fqdn(true);
        let flags = QuestionFlags { recursion_desired: true, checking_disabled: false, dnssec_ok: true };
        encode_question(7, &name, RecordType::from(kind), flags, Extension::Edns)
    }

    proptest! {
        #[test]
        fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            packet(&bytes);
        }

        /// Bytes that are nearly a query get further than any others.
        #[test]
        fn damaged_queries(
            labels in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..12), 0..6),
            kind in 0u16..300,
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let mut labels = labels;
            labels.extend([b"svc".to_vec(), b"cluster".to_vec(), b"local".to_vec()]);
            let Some(mut bytes) = query(&labels, kind) else { return Ok(()) };
            packet(&bytes);
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            packet(&bytes);
        }
    }
}
