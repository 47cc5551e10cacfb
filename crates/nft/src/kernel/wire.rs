//! Netlink messages of nftables, as bytes.

mod elements;

use ferrite_netlink::flag::{ACK, APPEND, CREATE, DUMP, EXCLUSIVE, REQUEST};
use ferrite_netlink::{NESTED, Open};

use super::ruleset::BaseChain;
use crate::{Chain, ChainType, Data, Expr, Field, Hook, IpFamily, SetId, TableFamily, Transaction, Verdict};

pub use elements::{ElementChange, ElementList};

pub const SUBSYSTEM: u16 = 10;
pub const NEW_TABLE: u8 = 0;
pub const GET_TABLE: u8 = 1;
pub const DEL_TABLE: u8 = 2;
pub const NEW_CHAIN: u8 = 3;
pub const GET_CHAIN: u8 = 4;
const DEL_CHAIN: u8 = 5;
pub const NEW_RULE: u8 = 6;
pub const GET_RULE: u8 = 7;
const DEL_RULE: u8 = 8;
const NEW_SET: u8 = 9;
pub const NEW_ELEMENT: u8 = 12;
pub const GET_ELEMENT: u8 = 13;
const DEL_ELEMENT: u8 = 14;
pub const NEW_GENERATION: u8 = 15;
const GET_GENERATION: u8 = 16;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// The kernel refuses longer comments.
const COMMENT_BYTES: usize = 127;
/// Elements that rules may add to one set.
const DYNAMIC_ELEMENTS: u32 = 1 << 18;

/// Messages about one table, one after the other in one buffer.
pub struct Messages {
    out: ferrite_netlink::Messages,
    family: u8,
    table: String,
    generation: Option<u32>,
}

impl Messages {
    pub fn new(family: TableFamily, table: &str, sequence: u32) -> Self {
        let out = ferrite_netlink::Messages::new(sequence);
        Self { out, family: family.number(), table: table.to_owned(), generation: None }
    }

    /// About the tables of all families.
    pub fn of_all(sequence: u32) -> Self {
        let out = ferrite_netlink::Messages::new(sequence);
        Self { out, family: 0, table: String::new(), generation: None }
    }

    pub fn into_all(self) -> ferrite_netlink::Messages {
        self.out
    }

    pub fn all(&self) -> &ferrite_netlink::Messages {
        &self.out
    }

    pub fn ip_family(&self) -> IpFamily {
        if self.family == TableFamily::Ipv6.number() { IpFamily::V6 } else { IpFamily::V4 }
    }

    fn raw(&mut self, kind: u16, flags: u16, family: u8, resource: u16, body: impl FnOnce(&mut Self)) {
        self.start(kind, flags, family, resource);
        body(self);
        self.finish();
    }

    fn start(&mut self, kind: u16, flags: u16, family: u8, resource: u16) {
        self.out.start(kind, flags);
        let [high, low] = resource.to_be_bytes();
        self.out.push(&[family, 0, high, low]);
    }

    /// Ends the message that was started last.
    fn finish(&mut self) {
        self.out.finish();
    }

    pub fn message(&mut self, kind: u8, flags: u16, body: impl FnOnce(&mut Self)) {
        self.raw(SUBSYSTEM << 8 | u16::from(kind), REQUEST | flags, self.family, 0, body);
    }

    /// Begins a transaction. It is refused unless the ruleset is at the expected generation.
    pub fn begin(&mut self) {
        let generation = self.generation.take();
        self.raw(BATCH_BEGIN, REQUEST, 0, SUBSYSTEM, |m| {
            if let Some(generation) = generation {
                m.number(1, generation);
            }
        });
    }

    pub fn expect_generation(&mut self, generation: u32) {
        self.generation = Some(generation);
    }

    /// Asks the kernel to answer the last message, which it does after the commit.
    pub fn acknowledge_last(&mut self) {
        self.out.add_flags(ACK);
    }

    pub fn get_generation(&mut self) {
        self.message(GET_GENERATION, ACK, |_| {});
    }

    pub fn end(&mut self) {
        self.raw(BATCH_END, REQUEST, 0, SUBSYSTEM, |_| {});
    }

    fn open(&mut self, kind: u16) -> Open {
        self.out.open(kind)
    }

    fn close(&mut self, open: &Open) {
        self.out.close(open);
    }

    pub fn attribute(&mut self, kind: u16, data: &[u8]) {
        self.out.attribute(kind, data);
    }

    pub fn text(&mut self, kind: u16, text: &str) {
        self.out.text(kind, text);
    }

    /// A comment as `nft` stores it: type, length, text with a zero.
    fn comment(&mut self, kind: u16, text: &str) {
        let mut end = text.len().min(COMMENT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let len = u8::try_from(end + 1).unwrap_or(u8::MAX);
        let open = self.open(kind);
        self.out.push(&[0, len]);
        self.out.push(text.get(..end).unwrap_or_default().as_bytes());
        self.out.push(&[0]);
        self.close(&open);
    }

    fn number(&mut self, kind: u16, number: u32) {
        self.attribute(kind, &number.to_be_bytes());
    }

    fn nest(&mut self, kind: u16, body: impl FnOnce(&mut Self)) {
        let open = self.open(kind | NESTED);
        body(self);
        self.close(&open);
    }

    fn table_name(&mut self) {
        let table = std::mem::take(&mut self.table);
        self.text(1, &table);
        self.table = table;
    }

    pub fn new_table(&mut self, purpose: &str) {
        self.table(CREATE, purpose);
    }

    /// The transaction fails if the table exists.
    pub fn table_that_is_new(&mut self, purpose: &str) {
        self.table(CREATE | EXCLUSIVE, purpose);
    }

    fn table(&mut self, flags: u16, purpose: &str) {
        self.message(NEW_TABLE, flags, |m| {
            m.table_name();
            if !purpose.is_empty() {
                m.comment(6, purpose);
            }
        });
    }

    pub fn delete_table(&mut self) {
        self.message(DEL_TABLE, 0, Self::table_name);
    }

    pub fn get_table(&mut self) {
        self.message(GET_TABLE, ACK, Self::table_name);
    }

    pub fn get_elements<S: SetId>(&mut self, set: S) {
        self.message(GET_ELEMENT, DUMP, |m| {
            m.table_name();
            m.text(2, set.shape().name);
        });
    }

    pub fn new_set<S: SetId>(&mut self, set: S, id: u32) {
        const INTERVAL: u32 = 4;
        const MAP: u32 = 8;
        const TIMEOUT: u32 = 0x10;
        const EVAL: u32 = 0x20;
        const CONCAT: u32 = 0x80;
        const VERDICT_TYPE: u32 = 0xffff_ff00;
        let (shape, family) = (set.shape(), self.ip_family());
        let mut flags = 0;
        flags |= if shape.ranges { INTERVAL | CONCAT } else { 0 };
        flags |= if shape.data == Data::Nothing { 0 } else { MAP };
        flags |= if shape.dynamic { TIMEOUT | EVAL } else { 0 };
        self.message(NEW_SET, CREATE, |m| {
            m.table_name();
            m.text(2, shape.name);
            m.number(3, flags);
            m.number(4, type_id(shape.key, family));
            m.number(5, length(shape.key, family));
            match shape.data {
                Data::Nothing => {}
                Data::Verdict => m.number(6, VERDICT_TYPE),
                Data::Fields(fields) => {
                    m.number(6, type_id(fields, family));
                    m.number(7, length(fields, family));
                }
            }
            if shape.dynamic || shape.ranges {
                m.nest(9, |m| {
                    if shape.dynamic {
                        m.number(1, DYNAMIC_ELEMENTS);
                    }
                    if shape.ranges {
                        m.nest(2, |m| {
                            for field in shape.key {
                                m.nest(1, |m| m.number(1, field.len(family)));
                            }
                        });
                    }
                });
            }
            m.number(10, id);
        });
    }

    pub fn new_chain<S>(&mut self, chain: &Chain<S>) {
        self.message(NEW_CHAIN, CREATE, |m| {
            m.table_name();
            m.text(3, &chain.name);
            if let Some((kind, hook, priority)) = chain.hook {
                m.hook(&BaseChain { kind, hook, priority, drops: None, link: None });
            }
        });
    }

    /// A chain that is called by a hook.
    pub fn base_chain(&mut self, name: &str, chain: &BaseChain<'_>) {
        self.message(NEW_CHAIN, CREATE, |m| {
            m.table_name();
            m.text(3, name);
            m.hook(chain);
        });
    }

    fn hook(&mut self, chain: &BaseChain<'_>) {
        self.nest(4, |m| {
            m.number(1, hook_number(chain.hook));
            m.attribute(2, &chain.priority.to_be_bytes());
            if let Some(link) = chain.link {
                m.text(3, link);
            }
        });
        if let Some(drops) = chain.drops {
            self.number(5, u32::from(!drops));
        }
        self.text(7, if chain.kind == ChainType::Nat { "nat" } else { "filter" });
    }

    pub fn delete_chain(&mut self, name: &str) {
        self.message(DEL_CHAIN, 0, |m| {
            m.table_name();
            m.text(3, name);
        });
    }

    pub fn new_rule<S: SetId>(&mut self, chain: &str, rule: &[Expr<S>], comment: Option<&str>) {
        self.message(NEW_RULE, CREATE | APPEND, |m| {
            m.table_name();
            m.text(2, chain);
            m.nest(4, |m| rule.iter().for_each(|expr| m.expression(expr)));
            if let Some(comment) = comment {
                m.comment(7, comment);
            }
        });
    }

    /// Deletes one rule of a chain, or all.
    pub fn delete_rules(&mut self, chain: &str, handle: Option<u64>) {
        self.message(DEL_RULE, 0, |m| {
            m.table_name();
            m.text(2, chain);
            if let Some(handle) = handle {
                m.attribute(3, &handle.to_be_bytes());
            }
        });
    }

    /// Lists objects of the family; all families' if it is none. `table` limits it to the table.
    pub fn list(&mut self, kind: u8, table: bool) {
        self.message(kind, DUMP, |m| {
            if table {
                m.table_name();
            }
        });
    }

    fn verdict(&mut self, verdict: &Verdict) {
        let (code, chain): (i32, _) = match verdict {
            Verdict::Drop => (0, None),
            Verdict::Accept => (1, None),
            Verdict::Jump(chain) => (-3, Some(chain)),
            Verdict::Goto(chain) => (-4, Some(chain)),
        };
        self.nest(2, |m| {
            m.attribute(1, &code.to_be_bytes());
            if let Some(chain) = chain {
                m.text(2, chain);
            }
        });
    }

    fn named(&mut self, name: &str, body: impl FnOnce(&mut Self)) {
        self.nest(1, |m| {
            m.text(1, name);
            m.nest(2, body);
        });
    }

    fn load(&mut self, name: &str, to: u8, rest: impl FnOnce(&mut Self)) {
        self.named(name, |m| {
            m.number(1, register(to));
            rest(m);
        });
    }

    fn expression<S: SetId>(&mut self, expr: &Expr<S>) {
        const META_ETHER_TYPE: u32 = 1;
        const META_MARK: u32 = 3;
        const META_INPUT_INTERFACE: u32 = 6;
        const META_OUTPUT_INTERFACE: u32 = 7;
        const META_FAMILY: u32 = 15;
        const META_PROTOCOL: u32 = 16;
        const LINK_HEADER: u32 = 0;
        const NETWORK_HEADER: u32 = 1;
        const TRANSPORT_HEADER: u32 = 2;
        const FIB_ADDRESS_TYPE: u32 = 3;
        const FIB_SOURCE: u32 = 1;
        const FIB_DESTINATION: u32 = 2;
        const VERDICT_REGISTER: u32 = 0;
        const FULLY_RANDOM: u32 = 1 << 4;
        const BYTES: u32 = 1;
        const INVERTED: u32 = 1;
        let payload = |m: &mut Self, to, base, offset, len| {
            m.load("payload", to, |m| {
                m.number(2, base);
                m.number(3, offset);
                m.number(4, len);
            });
        };
        let fib = |m: &mut Self, to, side| {
            m.load("fib", to, |m| {
                m.number(2, FIB_ADDRESS_TYPE);
                m.number(3, side);
            });
        };
        match expr {
            Expr::LoadMark { to } => self.load("meta", *to, |m| m.number(2, META_MARK)),
            Expr::StoreMark { from } => self.named("meta", |m| {
                m.number(2, META_MARK);
                m.number(3, register(*from));
            }),
            Expr::LoadProtocol { to } => self.load("meta", *to, |m| m.number(2, META_PROTOCOL)),
            Expr::LoadEtherType { to } => self.load("meta", *to, |m| m.number(2, META_ETHER_TYPE)),
            Expr::LoadFamily { to } => self.load("meta", *to, |m| m.number(2, META_FAMILY)),
            Expr::LoadLinkHeader { to, offset, len } => payload(self, *to, LINK_HEADER, *offset, *len),
            Expr::LoadTransportHeader { to, offset, len } => {
                payload(self, *to, TRANSPORT_HEADER, *offset, *len);
            }
            Expr::LoadInputInterface { to } => self.load("meta", *to, |m| m.number(2, META_INPUT_INTERFACE)),
            Expr::LoadOutputInterface { to } => {
                self.load("meta", *to, |m| m.number(2, META_OUTPUT_INTERFACE))
            }
            Expr::LoadNetworkHeader { to, offset, len } => payload(self, *to, NETWORK_HEADER, *offset, *len),
            Expr::LoadDestinationPort { to } => payload(self, *to, TRANSPORT_HEADER, 2, 2),
            Expr::LoadCtState { to } => self.load("ct", *to, |m| m.number(2, 0)),
            Expr::LoadCtStatus { to } => self.load("ct", *to, |m| m.number(2, 2)),
            Expr::LoadSourceType { to } => fib(self, *to, FIB_SOURCE),
            Expr::LoadDestinationType { to } => fib(self, *to, FIB_DESTINATION),
            Expr::LoadNumber { to, number } => {
                self.load("immediate", *to, |m| m.nest(2, |m| m.attribute(1, &number.to_ne_bytes())));
            }
            Expr::LoadRandom { to, modulus, offset } => self.load("numgen", *to, |m| {
                m.number(2, *modulus);
                m.number(3, 1);
                m.number(4, *offset);
            }),
            Expr::Bitwise { from, to, mask, xor } => self.named("bitwise", |m| {
                m.number(1, register(*from));
                m.number(2, register(*to));
                m.number(3, u32::try_from(mask.len()).unwrap_or(u32::MAX));
                m.nest(4, |m| m.attribute(1, mask));
                m.nest(5, |m| m.attribute(1, xor));
            }),
            Expr::Compare { with, equal, data } => self.load("cmp", *with, |m| {
                m.number(2, u32::from(!equal));
                m.nest(3, |m| m.attribute(1, data));
            }),
            Expr::InSet { set, key, inverted } => self.named("lookup", |m| {
                m.text(1, set.shape().name);
                m.number(2, register(*key));
                m.number(5, u32::from(*inverted));
            }),
            Expr::Map { set, key, to } => self.named("lookup", |m| {
                m.text(1, set.shape().name);
                m.number(2, register(*key));
                m.number(3, register(*to));
            }),
            Expr::VerdictMap { set, key } => self.named("lookup", |m| {
                m.text(1, set.shape().name);
                m.number(2, register(*key));
                m.number(3, VERDICT_REGISTER);
            }),
            Expr::Remember { set, key, data, seconds } => self.named("dynset", |m| {
                m.text(1, set.shape().name);
                m.number(3, 1);
                m.number(4, register(*key));
                m.number(5, register(*data));
                m.attribute(6, &(u64::from(*seconds) * 1000).to_be_bytes());
            }),
            Expr::Forget { set, key, data } => self.named("dynset", |m| {
                m.text(1, set.shape().name);
                m.number(3, 2);
                m.number(4, register(*key));
                m.number(5, register(*data));
            }),
            Expr::DestinationNat { address, port } => {
                let family = u32::from(self.family);
                self.named("nat", |m| {
                    m.number(1, 1);
                    m.number(2, family);
                    m.number(3, register(*address));
                    m.number(5, register(*port));
                });
            }
            Expr::Masquerade { random_ports } => self.named("masq", |m| {
                if *random_ports {
                    m.number(1, FULLY_RANDOM);
                }
            }),
            Expr::Exceeds { bytes_per_second, burst } => self.named("limit", |m| {
                m.attribute(1, &bytes_per_second.to_be_bytes());
                m.attribute(2, &1_u64.to_be_bytes());
                m.number(3, *burst);
                m.number(4, BYTES);
                m.number(5, INVERTED);
            }),
            Expr::Reject => {
                // Port unreachable, which a TCP client reports as refused.
                let code = if self.ip_family() == IpFamily::V4 { 3 } else { 4 };
                self.named("reject", |m| {
                    m.number(1, 0);
                    m.attribute(2, &[code]);
                });
            }
            Expr::Verdict(verdict) => self.named("immediate", |m| {
                m.number(1, VERDICT_REGISTER);
                m.nest(2, |m| m.verdict(verdict));
            }),
        }
    }

    /// The messages of a transaction, with its begin and end.
    pub fn transaction<S: SetId>(&mut self, purpose: &str, transaction: &Transaction<S>) {
        self.begin();
        if transaction.rebuild {
            // Deleting a table that is not there would be an error.
            self.new_table(purpose);
            self.delete_table();
            self.new_table(purpose);
            self.all_sets::<S>();
        }
        self.elements(ElementChange::Delete, &transaction.delete);
        self.chains_and_elements(transaction);
    }

    pub fn all_sets<S: SetId>(&mut self) {
        for (id, set) in (1..).zip(S::ALL.iter().copied()) {
            self.new_set(set, id);
        }
    }

    /// The parts of a transaction that add.
    pub fn chains_and_elements<S: SetId>(&mut self, transaction: &Transaction<S>) {
        transaction.chains.iter().for_each(|chain| self.new_chain(chain));
        for chain in &transaction.chains {
            chain.rules.iter().for_each(|rule| self.new_rule(&chain.name, rule, None));
        }
        self.elements(ElementChange::Add, &transaction.add);
    }
}

fn register(number: u8) -> u32 {
    const FIRST: u32 = 8;
    FIRST + u32::from(number)
}

fn hook_number(hook: Hook) -> u32 {
    match hook {
        Hook::Ingress | Hook::Prerouting => 0,
        Hook::Input => 1,
        Hook::Forward => 2,
        Hook::Output => 3,
        Hook::Postrouting => 4,
    }
}

fn type_id(fields: &[Field], family: IpFamily) -> u32 {
    const BITS: u32 = 6;
    fields.iter().fold(0, |id, field| id << BITS | field.type_id(family))
}

fn length(fields: &[Field], family: IpFamily) -> u32 {
    fields.iter().map(|field| field.len(family).next_multiple_of(4)).sum()
}
