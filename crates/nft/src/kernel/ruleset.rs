//! Tables of any family with a few rules, also those of others. The calls block for as long as the kernel works on them.

use ferrite_netlink::{Error, Message, Netns, Protocol, Socket};

use super::wire::{ElementChange, GET_CHAIN, GET_RULE, GET_TABLE, Messages, NEW_CHAIN, NEW_RULE, NEW_TABLE};
use super::{FIXED, send_batch};
use crate::{ChainType, Element, Expr, Hook, SetId, TableFamily};

/// The priority of chains that filter.
const FILTER: i32 = 0;
/// The priority of chains that translate sources.
const SOURCE_NAT: i32 = 100;

/// A chain that is called by a hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseChain<'a> {
    pub kind: ChainType,
    pub hook: Hook,
    pub priority: i32,
    /// True if it drops packets on which no rule decides; accepts them when absent.
    pub drops: Option<bool>,
    /// The link of [`Hook::Ingress`].
    pub link: Option<&'a str>,
}

impl<'a> BaseChain<'a> {
    pub fn filter(hook: Hook) -> Self {
        Self { kind: ChainType::Filter, hook, priority: FILTER, drops: None, link: None }
    }

    /// Filters what comes in by a link.
    pub fn ingress(link: &'a str) -> Self {
        Self { link: Some(link), ..Self::filter(Hook::Ingress) }
    }

    /// Translates sources of packets that leave.
    pub fn source_nat() -> Self {
        let (kind, hook) = (ChainType::Nat, Hook::Postrouting);
        Self { kind, hook, priority: SOURCE_NAT, drops: None, link: None }
    }

    /// Drops packets on which no rule decides.
    #[must_use]
    pub fn dropping(self) -> Self {
        Self { drops: Some(true), ..self }
    }
}

/// Changes of one table that the kernel makes together or not at all, in this order. [`Ruleset::commit`] makes them.
pub struct Batch {
    first: u32,
    messages: Messages,
}

impl Batch {
    /// Nothing happens if the table exists.
    pub fn add_table(&mut self) {
        self.messages.new_table("");
    }

    pub fn delete_table(&mut self) {
        self.messages.delete_table();
    }

    /// Makes the table anew, without what it has.
    pub fn replace_table(&mut self) {
        // To delete a table that is not there would be an error.
        self.add_table();
        self.delete_table();
        self.add_table();
    }

    /// Makes all sets of the table.
    pub fn add_sets<S: SetId>(&mut self) {
        self.messages.all_sets::<S>();
    }

    pub fn add_elements<S: SetId>(&mut self, elements: &[Element<S>]) {
        self.messages.elements(ElementChange::Add, elements);
    }

    pub fn add_chain(&mut self, name: &str, chain: &BaseChain<'_>) {
        self.messages.base_chain(name, chain);
    }

    pub fn delete_chain(&mut self, name: &str) {
        self.messages.delete_chain(name);
    }

    /// Deletes the rules of a chain.
    pub fn flush_chain(&mut self, name: &str) {
        self.messages.delete_rules(name, None);
    }

    /// Adds a rule behind those of the chain.
    pub fn add_rule<S: SetId>(&mut self, chain: &str, rule: &[Expr<S>]) {
        self.messages.new_rule(chain, rule, None);
    }

    /// [`add_rule`](Self::add_rule), with a comment for people, by which the rule is found again.
    pub fn add_rule_with_comment<S: SetId>(&mut self, chain: &str, rule: &[Expr<S>], comment: &str) {
        self.messages.new_rule(chain, rule, Some(comment));
    }

    pub fn delete_rule(&mut self, chain: &str, handle: u64) {
        self.messages.delete_rules(chain, Some(handle));
    }
}

/// A table, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableEntry {
    pub family: TableFamily,
    pub name: String,
}

/// A chain, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainEntry {
    pub family: TableFamily,
    pub table: String,
    pub name: String,
    /// The kernel's number of the hook that calls it; none if only other chains do.
    pub hook: Option<u32>,
    /// It drops packets on which no rule decides.
    pub drops: bool,
}

/// A rule, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleEntry {
    pub chain: String,
    pub handle: u64,
    pub comment: Option<String>,
}

fn is(message: &Message<'_>, kind: u8) -> bool {
    message.kind & 0xff == u16::from(kind)
}

fn family(message: &Message<'_>) -> Option<TableFamily> {
    TableFamily::of(*message.body.first()?)
}

impl TableEntry {
    fn parse(message: &Message<'_>) -> Option<Self> {
        let name = message.attributes(FIXED).text(1).filter(|_| is(message, NEW_TABLE))?;
        Some(Self { family: family(message)?, name })
    }
}

impl ChainEntry {
    fn parse(message: &Message<'_>) -> Option<Self> {
        let attributes = message.attributes(FIXED);
        let table = attributes.text(1).filter(|_| is(message, NEW_CHAIN))?;
        Some(Self {
            family: family(message)?,
            table,
            name: attributes.text(3)?,
            hook: attributes.nested(4).and_then(|hook| hook.network_number(1)),
            drops: attributes.network_number(5) == Some(0),
        })
    }
}

impl RuleEntry {
    /// A rule with the name of its table.
    fn parse(message: &Message<'_>) -> Option<(String, Self)> {
        let attributes = message.attributes(FIXED);
        let table = attributes.text(1).filter(|_| is(message, NEW_RULE))?;
        let handle = u64::from_be_bytes(attributes.get(3)?.try_into().ok()?);
        let comment = attributes.get(7).and_then(comment);
        Some((table, Self { chain: attributes.text(2)?, handle, comment }))
    }
}

/// The comment in the data that `nft` keeps with a rule: entries of a type, a length and bytes.
fn comment(mut data: &[u8]) -> Option<String> {
    const COMMENT: u8 = 0;
    loop {
        let (kind, len) = (*data.first()?, usize::from(*data.get(1)?));
        let text = data.get(2..2 + len)?;
        if kind == COMMENT {
            let text = text.strip_suffix(&[0]).unwrap_or(text);
            return Some(String::from_utf8_lossy(text).into_owned());
        }
        data = data.get(2 + len..)?;
    }
}

/// The tables of a network namespace.
#[derive(Debug)]
pub struct Ruleset(Socket);

impl Ruleset {
    /// Of a network namespace, else of that of the calling thread. Fails on kernels without nftables.
    pub fn open(netns: Option<&Netns>) -> Result<Self, Error> {
        Socket::open(Protocol::Netfilter, netns).map(Self)
    }

    /// Changes of a table, which need not exist yet.
    pub fn batch(&self, family: TableFamily, table: &str) -> Batch {
        let first = self.0.sequence();
        let mut messages = Messages::new(family, table, first);
        messages.begin();
        Batch { first, messages }
    }

    /// Makes all changes, or none.
    pub fn commit(&mut self, mut batch: Batch) -> Result<(), Error> {
        batch.messages.acknowledge_last();
        batch.messages.end();
        send_batch(&mut self.0, batch.first, batch.messages.all())
    }

    /// Returns false if there was no such table.
    pub fn delete_table(&mut self, family: TableFamily, name: &str) -> Result<bool, Error> {
        let mut batch = self.batch(family, name);
        batch.delete_table();
        Error::existed(self.commit(batch))
    }

    /// Returns false if there was no such chain.
    pub fn delete_chain(&mut self, family: TableFamily, table: &str, name: &str) -> Result<bool, Error> {
        let mut batch = self.batch(family, table);
        batch.delete_chain(name);
        Error::existed(self.commit(batch))
    }

    /// The tables of all families that have a [`TableFamily`].
    pub fn tables(&mut self) -> Result<Vec<TableEntry>, Error> {
        let mut request = Messages::of_all(0);
        request.list(GET_TABLE, false);
        self.0.request("list tables", request.into_all(), TableEntry::parse)
    }

    pub fn has_table(&mut self, family: TableFamily, name: &str) -> Result<bool, Error> {
        Ok(self.tables()?.iter().any(|table| table.family == family && table.name == name))
    }

    /// The chains of all tables.
    pub fn chains(&mut self) -> Result<Vec<ChainEntry>, Error> {
        let mut request = Messages::of_all(0);
        request.list(GET_CHAIN, false);
        self.0.request("list chains", request.into_all(), ChainEntry::parse)
    }

    /// The rules of a table; none if there is no table.
    pub fn rules(&mut self, family: TableFamily, table: &str) -> Result<Vec<RuleEntry>, Error> {
        let mut request = Messages::new(family, table, 0);
        request.list(GET_RULE, true);
        let found = self.0.request("list rules", request.into_all(), RuleEntry::parse)?;
        Ok(found.into_iter().filter(|(of, _)| of == table).map(|(_, rule)| rule).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_of_rules() {
        for (data, want) in [
            (&[0, 3, b'h', b'i', 0][..], Some("hi")),
            (&[1, 2, 9, 9, 0, 3, b'h', b'i', 0], Some("hi")),
            (&[0, 2, b'h', b'i'], Some("hi")),
            (&[0, 0], Some("")),
            (&[0, 4, b'h', b'i', 0], None),
            (&[1, 2, 9, 9], None),
            (&[1, 255], None),
            (&[0], None),
            (&[], None),
        ] {
            assert_eq!(comment(data).as_deref(), want, "{data:?}");
        }
    }

    #[test]
    fn a_chain_of_a_link() {
        use crate::NoSets;
        use ferrite_netlink::{flag, messages};
        let mut messages_of_batch = Messages::new(TableFamily::Netdev, "t", 5);
        messages_of_batch.begin();
        let mut batch = Batch { first: 5, messages: messages_of_batch };
        batch.add_chain("veth1", &BaseChain::ingress("veth1").dropping());
        let limit = Expr::<NoSets>::Exceeds { bytes_per_second: 1000, burst: 2000 };
        batch.add_rule_with_comment("veth1", &[limit], "why");
        batch.messages.acknowledge_last();
        batch.messages.end();
        let sent: Vec<_> = messages(batch.messages.all().bytes()).collect();
        assert_eq!(
            sent.iter().map(|m| (m.kind, m.sequence)).collect::<Vec<_>>(),
            [(0x10, 5), (0xa03, 6), (0xa06, 7), (0x11, 8)]
        );
        assert_eq!(sent[1].flags, flag::REQUEST | flag::CREATE);
        assert_eq!(sent[2].flags, flag::REQUEST | flag::CREATE | flag::APPEND | flag::ACK);
        let chain = ChainEntry::parse(&sent[1]).unwrap();
        let want = ChainEntry {
            family: TableFamily::Netdev,
            table: "t".into(),
            name: "veth1".into(),
            hook: Some(0),
            drops: true,
        };
        assert_eq!(chain, want);
        let hook = sent[1].attributes(FIXED).nested(4).unwrap();
        assert_eq!((hook.network_number(2), hook.text(3)), (Some(0), Some("veth1".into())));
        let rule = sent[2].attributes(FIXED);
        assert_eq!(rule.get(7).and_then(comment).as_deref(), Some("why"));
        let expression = rule.nested(4).and_then(|all| all.nested(1)).unwrap();
        assert_eq!(expression.text(1).as_deref(), Some("limit"));
        let data = expression.nested(2).unwrap();
        assert_eq!(data.get(1), Some(&1000_u64.to_be_bytes()[..]));
        assert_eq!(
            (data.network_number(3), data.network_number(4), data.network_number(5)),
            (Some(2000), Some(1), Some(1))
        );
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(kind in 0_u16..32, body in proptest::collection::vec(0_u8..64, 0..200)) {
            let message = Message { kind: 10 << 8 | kind, flags: 0, sequence: 0, body: &body };
            let _ = (TableEntry::parse(&message), ChainEntry::parse(&message), RuleEntry::parse(&message));
            let _ = comment(&body);
            let attributes = message.attributes(FIXED);
            let _ = (super::super::raw(attributes), super::super::expiring((), attributes));
            let _ = super::super::generation_of(attributes);
        }
    }
}
