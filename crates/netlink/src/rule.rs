//! Rules that choose a routing table.

use std::net::IpAddr;

use crate::message::{family_of, flag};
use crate::{Connection, Error, Message, Messages};

pub(crate) const NEW: u16 = 32;
pub(crate) const DELETE: u16 = 33;
const GET: u16 = 34;
/// The length of `fib_rule_hdr`.
const FIXED: usize = 12;
const TO_TABLE: u8 = 1;

const DESTINATION: u16 = 1;
const INPUT_LINK: u16 = 3;
const PRIORITY: u16 = 6;
const TABLE: u16 = 15;

/// Sends packets that come in by a link, to a range, to a routing table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Rules with a lower number come first.
    pub priority: u32,
    pub table: u32,
    pub to: Option<(IpAddr, u8)>,
    /// Packets of the node's own processes come in by `lo`.
    pub input_link: Option<String>,
}

impl Rule {
    pub(crate) fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != NEW {
            return None;
        }
        let attributes = message.attributes(FIXED);
        let prefix = message.byte(1)?;
        Some(Self {
            // The kernel leaves out a zero.
            priority: attributes.number(PRIORITY).unwrap_or(0),
            table: attributes.number(TABLE).or_else(|| message.byte(4).map(u32::from))?,
            to: attributes.ip(DESTINATION).map(|address| (address, prefix)),
            input_link: attributes.text(INPUT_LINK),
        })
    }

    pub(crate) fn write(&self, request: &mut Messages) {
        let (family, prefix) =
            self.to.map_or((crate::parse::INET, 0), |(address, prefix)| (family_of(address), prefix));
        let short_table = u8::try_from(self.table).unwrap_or(0);
        request.push(&[family, prefix, 0, 0, short_table, 0, 0, TO_TABLE, 0, 0, 0, 0]);
        request.number(PRIORITY, self.priority);
        if let Some((address, _)) = self.to {
            request.ip(DESTINATION, address);
        }
        if let Some(link) = &self.input_link {
            request.text(INPUT_LINK, link);
        }
        if short_table == 0 {
            request.number(TABLE, self.table);
        }
    }
}

impl Connection {
    /// The rules of both families.
    pub async fn get_rules(&self) -> Result<Vec<Rule>, Error> {
        self.list("list rules", GET, &[0; FIXED], Rule::parse).await
    }

    /// Fails if there is such a rule.
    pub async fn add_rule(&self, rule: &Rule) -> Result<(), Error> {
        let mut request = Messages::request(NEW, flag::CREATE | flag::EXCLUSIVE);
        rule.write(&mut request);
        self.change("add a rule", request).await
    }

    /// Returns false if there was no such rule.
    pub async fn del_rule_if_exists(&self, rule: &Rule) -> Result<bool, Error> {
        let mut request = Messages::request(DELETE, 0);
        rule.write(&mut request);
        Error::existed(self.change("delete a rule", request).await)
    }
}
