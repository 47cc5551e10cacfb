//! The queues by which packets leave a link.

use crate::message::flag;
use crate::{Connection, Error, Message, Messages};

const NEW: u16 = 36;
const DELETE: u16 = 37;
const GET: u16 = 38;
/// The length of `tcmsg`.
const FIXED: usize = 20;
const ROOT: u32 = u32::MAX;

const KIND: u16 = 1;
const OPTIONS: u16 = 2;

fn fixed(link: u32, parent: u32) -> [u8; FIXED] {
    let mut bytes = [0; FIXED];
    bytes[4..8].copy_from_slice(&link.to_ne_bytes());
    bytes[12..16].copy_from_slice(&parent.to_ne_bytes());
    bytes
}

/// A queue, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    /// The link's index.
    pub link: u32,
    pub kind: String,
}

impl Queue {
    pub(crate) fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != NEW {
            return None;
        }
        Some(Self { link: message.number(4)?, kind: message.attributes(FIXED).text(KIND)? })
    }
}

/// A queue that lets a number of bytes pass in a second (`tbf`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    pub bytes_per_second: u64,
    /// Bytes that may pass at once.
    pub burst: u32,
    /// Bytes that may wait. More is dropped.
    pub limit: u32,
}

impl TokenBucket {
    /// The time that a burst takes, in the kernel's ticks of 64 nanoseconds.
    fn burst_ticks(self) -> u32 {
        const TICKS_PER_SECOND: u64 = 1_000_000_000 / 64;
        let ticks = u64::from(self.burst) * TICKS_PER_SECOND / self.bytes_per_second.max(1);
        u32::try_from(ticks).unwrap_or(u32::MAX)
    }

    pub(crate) fn write(self, request: &mut Messages) {
        const PARAMETERS: u16 = 1;
        const RATE: u16 = 4;
        const BURST: u16 = 6;
        /// With it, the kernel calculates times by itself and needs no table of them.
        const ETHERNET: u8 = 1;
        let rate = u32::try_from(self.bytes_per_second).unwrap_or(u32::MAX);
        // Two rates, of which the second one is absent, then the limit and the burst.
        let mut parameters = [0; 36];
        parameters[1] = ETHERNET;
        parameters[8..12].copy_from_slice(&rate.to_ne_bytes());
        parameters[24..28].copy_from_slice(&self.limit.to_ne_bytes());
        parameters[28..32].copy_from_slice(&self.burst_ticks().to_ne_bytes());
        request.text(KIND, "tbf");
        request.nest(OPTIONS, |m| {
            m.attribute(PARAMETERS, &parameters);
            if u64::from(rate) != self.bytes_per_second {
                m.attribute(RATE, &self.bytes_per_second.to_ne_bytes());
            }
            m.number(BURST, self.burst);
        });
    }
}

impl Connection {
    /// The queues of a link.
    pub async fn get_queues(&self, link: &str) -> Result<Vec<Queue>, Error> {
        let index = self.index_of(link).await?;
        let all = self.list("list queues", GET, &[0; FIXED], Queue::parse).await?;
        Ok(all.into_iter().filter(|queue| queue.link == index).collect())
    }

    /// Makes the link's queue, or changes the one that is there.
    pub async fn replace_queue(&self, link: &str, queue: TokenBucket) -> Result<(), Error> {
        let index = self.index_of(link).await?;
        let mut request = Messages::request(NEW, flag::CREATE | flag::REPLACE);
        request.push(&fixed(index, ROOT));
        queue.write(&mut request);
        self.change("set a queue", request).await
    }

    /// Gives the link the queue that it has by default. Returns false if it has that one.
    pub async fn del_queue(&self, link: &str) -> Result<bool, Error> {
        let index = self.index_of(link).await?;
        let mut request = Messages::request(DELETE, 0);
        request.push(&fixed(index, ROOT));
        Error::existed(self.change("delete a queue", request).await)
    }
}
