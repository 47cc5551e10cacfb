//! Reads back from the kernel which packets of a pod its table allows.

use std::net::IpAddr;
use std::path::Path;

use ferrite_nft::{IpFamily, KernelError, Key, OwnGenerations, Table};

use crate::layout::{PolicySet, pods_set};
use crate::model::Direction;

/// The chains that judge a pod's packets; `None` lets all of a direction pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodView {
    pub ingress: Option<String>,
    pub egress: Option<String>,
}

impl PodView {
    /// Reads the table in the network namespace at `netns`, else in that of the calling thread; `None` if there is none.
    pub fn read(table: &str, netns: Option<&Path>, address: IpAddr) -> Result<Option<Self>, KernelError> {
        let mut table = Table::open(IpFamily::of(address), table, netns, OwnGenerations::default())?;
        if !table.exists()? {
            return Ok(None);
        }
        let classes = table.elements(PolicySet::Classes)?;
        let key = Key::address(address);
        let mut chain = |direction: Direction| -> Result<Option<String>, KernelError> {
            let pods = table.elements(pods_set(direction))?;
            let Some(pod) = pods.into_iter().find(|element| element.key == key.first()) else {
                return Ok(None);
            };
            let class = classes.iter().find(|class| class.key == pod.value);
            Ok(class.and_then(|class| class.chain.clone()))
        };
        Ok(Some(Self { ingress: chain(Direction::Ingress)?, egress: chain(Direction::Egress)? }))
    }
}
