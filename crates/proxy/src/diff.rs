//! Computes one transaction from the present and the desired table. No I/O.
//!
//! A change of one service port costs elements in proportion to the change: an endpoint that comes or goes moves at
//! most one other endpoint to another index, and no rule is written unless a class appears for the first time.

mod owners;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::{self, Write as _};
use std::net::IpAddr;
use std::sync::Arc;

use self::owners::{Claimant, ClassNumber, HeldClaim, Owners};
use crate::layout::{
    BaseChain, Claim, ClaimValue, Class, DesiredPort, Frontend, Key, LayoutConfig, NodePortAddresses, Policy,
    SetName, base_chains, class_chains,
};
use crate::model::{EndpointAddress, ServicePortName};
use ferrite_nft::Bytes;
pub use ferrite_nft::Value;

pub type Element = ferrite_nft::Element<SetName>;
pub type Transaction = ferrite_nft::Transaction<SetName>;

/// Idle classes beyond this number (plus the number of used ones) are removed.
const IDLE_CLASSES: usize = 64;

struct ClassState {
    class: Class,
    /// Claims that have it.
    uses: usize,
}

/// A service port in the table.
#[derive(Default)]
struct PortState {
    id: u64,
    claims: Box<[HeldClaim]>,
    frontends: Box<[Frontend]>,
    cluster: Arc<[EndpointAddress]>,
    local: Arc<[EndpointAddress]>,
    affinity: bool,
}

/// The table as it is, or will be after the transactions that were taken from here.
///
/// A name is stored once; elements are not stored at all but made from the claims and endpoints of service ports.
pub struct Programmed {
    config: LayoutConfig,
    ports: BTreeMap<Arc<ServicePortName>, PortState>,
    owners: Owners,
    classes: BTreeMap<ClassNumber, ClassState>,
    class_numbers: HashMap<Class, ClassNumber>,
    next_class: ClassNumber,
    /// Chains in the kernel, with the number of classes that need each.
    chains: HashMap<String, usize>,
    /// Chains in the kernel that no class needs.
    retired: BTreeSet<String>,
    ids: HashMap<u64, Arc<ServicePortName>>,
    changes: Changes,
}

/// An element before and after the changes of the transaction that is being made.
struct ElementChange {
    before: Option<Value>,
    after: Option<Value>,
    comment: String,
}

/// The changes of the transaction that is being made.
#[derive(Default)]
struct Changes {
    /// False while the next transaction is one that makes the whole table: nobody needs single changes then.
    are_needed: bool,
    elements: HashMap<(SetName, Key), ElementChange>,
    chains: Vec<BaseChain>,
}

impl Changes {
    fn set(&mut self, set: SetName, key: Key, before: Option<Value>, after: Option<Value>, comment: &str) {
        if !self.are_needed {
            return;
        }
        let new = || ElementChange { before, after: None, comment: String::new() };
        let change = self.elements.entry((set, key)).or_insert_with(new);
        change.after = after;
        comment.clone_into(&mut change.comment);
    }
}

impl Programmed {
    /// A table that does not exist yet: the first transaction must be [`rebuild`](Self::rebuild).
    pub fn new(config: LayoutConfig) -> Self {
        Self {
            config,
            ports: BTreeMap::new(),
            owners: Owners::default(),
            classes: BTreeMap::new(),
            class_numbers: HashMap::new(),
            next_class: ClassNumber::MIN,
            chains: HashMap::new(),
            retired: BTreeSet::new(),
            ids: HashMap::new(),
            changes: Changes::default(),
        }
    }

    pub fn config(&self) -> &LayoutConfig {
        &self.config
    }

    /// The rules of the base chains change with it, so the table must be rebuilt.
    pub fn set_config(&mut self, config: LayoutConfig) {
        self.config = config;
    }

    /// Names of the service ports of one Service.
    pub fn ports_of(&self, namespace: &str, service: &str) -> Vec<Arc<ServicePortName>> {
        let first = ServicePortName {
            namespace: namespace.to_owned(),
            service: service.to_owned(),
            port: String::new(),
            protocol: crate::model::Protocol::Tcp,
        };
        let own = |name: &&Arc<ServicePortName>| name.namespace == namespace && name.service == service;
        self.ports
            .range::<ServicePortName, _>(&first..)
            .map(|(name, _)| name)
            .take_while(own)
            .cloned()
            .collect()
    }

    /// Records the needs of a service port; `None` if it is gone.
    pub fn update(&mut self, name: &Arc<ServicePortName>, desired: Option<DesiredPort>) {
        let before = self.ports.remove(name);
        let Some(desired) = desired else {
            if let Some(before) = before {
                let after = PortState { id: before.id, ..PortState::default() };
                self.change_claims(&before, &after);
                self.endpoints(name, &before, &after);
                self.ids.remove(&before.id);
            }
            return;
        };
        let before = before.unwrap_or_else(|| PortState { id: self.new_id(name), ..PortState::default() });
        let after = PortState {
            id: before.id,
            cluster: reslot(&before.cluster, &desired.cluster),
            local: reslot(&before.local, &desired.local),
            claims: without_repeats(desired.claims.into_iter().map(|claim| self.hold(claim)).collect()),
            frontends: desired.frontends.into(),
            affinity: desired.affinity,
        };
        self.change_claims(&before, &after);
        self.endpoints(name, &before, &after);
        self.ports.insert(Arc::clone(name), after);
    }

    /// The changes noted since the last transaction.
    pub fn take_changes(&mut self) -> Transaction {
        self.retire_idle_classes();
        let next = Changes { are_needed: true, ..Changes::default() };
        let changes = std::mem::replace(&mut self.changes, next);
        let mut transaction = Transaction { chains: changes.chains, ..Transaction::default() };
        for ((set, key), ElementChange { before, after, comment }) in changes.elements {
            if before == after {
                continue;
            }
            if let Some(value) = before {
                transaction.delete.push(Element { set, key: key.clone(), value, comment: None });
            }
            if let Some(value) = after {
                transaction.add.push(Element {
                    set,
                    key,
                    value,
                    comment: Some(comment).filter(|text| !text.is_empty()),
                });
            }
        }
        // Neighbours in a set go into one message.
        transaction.delete.sort_by(|a, b| (a.set, &a.key).cmp(&(b.set, &b.key)));
        transaction.add.sort_by(|a, b| (a.set, &a.key).cmp(&(b.set, &b.key)));
        transaction
    }

    /// The next transaction will be [`rebuild`](Self::rebuild).
    pub fn expect_rebuild(&mut self) {
        self.changes = Changes::default();
    }

    /// A transaction that makes the whole table, whatever the kernel has.
    pub fn rebuild(&mut self) -> Transaction {
        self.changes = Changes { are_needed: true, ..Changes::default() };
        self.retired.clear();
        self.chains.clear();
        self.classes.retain(|_, class| class.uses > 0);
        self.class_numbers.retain(|_, number| self.classes.contains_key(number));
        let mut transaction =
            Transaction { rebuild: true, chains: base_chains(&self.config), ..Transaction::default() };
        let mut add = |set, key, value| {
            transaction.add.push(Element { set, key, value, comment: None });
        };
        if let NodePortAddresses::Only(addresses) = &self.config.node_port_addresses {
            let own: BTreeSet<_> = addresses.iter().filter(|ip| !ip.is_loopback()).copied().collect();
            for address in own.into_iter().filter(|ip| crate::model::IpFamily::of(*ip) == self.config.family)
            {
                add(SetName::NodePortIps, Key::address(address), Value::Member);
            }
        }
        let mut chains = Vec::new();
        for (number, ClassState { class, .. }) in &self.classes {
            for chain in class_chains(*class, &self.config) {
                let uses = self.chains.entry(chain.name.clone()).or_insert(0);
                if *uses == 0 {
                    chains.push(chain);
                }
                *uses += 1;
            }
            add(SetName::Classes, class_key(*number), Value::Goto(class.chain()));
        }
        transaction.chains.extend(chains);
        transaction
    }

    /// The number of elements of [`each_element`](Self::each_element).
    pub fn element_count(&self) -> usize {
        let of_port =
            |port: &PortState| (port.cluster.len() + port.local.len()) * if port.affinity { 2 } else { 1 };
        self.owners.len() + self.ports.values().map(of_port).sum::<usize>()
    }

    /// Calls `each` with the elements that a table needs besides those of [`rebuild`](Self::rebuild): those of
    /// service ports. They are made for the call, and those of one set are neighbours.
    pub fn each_element(&self, each: &mut dyn FnMut(Element)) {
        for (set, key, claimant) in self.owners.iter() {
            let (value, comment) = (claimed_value(claimant), self.comment_of(set, claimant.id));
            each(Element { set, key: key.clone(), value, comment });
        }
        let policies = [Policy::Cluster, Policy::Local];
        for port in self.ports.values() {
            for policy in policies {
                for (index, endpoint) in port.of(policy).iter().enumerate() {
                    let (key, value) = (index_key(port.id, policy, index), endpoint_value(endpoint));
                    each(Element { set: SetName::Endpoints, key, value, comment: None });
                }
            }
        }
        for policy in policies {
            for port in self.ports.values().filter(|port| port.affinity) {
                for endpoint in port.of(policy).iter() {
                    let (set, key) = (policy.affinity_set(), affinity_key(port.id, endpoint));
                    each(Element { set, key, value: Value::Member, comment: None });
                }
            }
        }
    }

    /// Chains that no class needs, callers before called ones. They stay noted until [`chains_deleted`](Self::chains_deleted).
    pub fn retired_chains(&self) -> Vec<String> {
        // Callers begin with "external", called ones with "pick".
        self.retired.iter().cloned().collect()
    }

    pub fn chains_deleted(&mut self) {
        self.retired.clear();
    }

    fn new_id(&mut self, name: &Arc<ServicePortName>) -> u64 {
        let mut id = hash(name);
        while self.ids.contains_key(&id) {
            id = id.wrapping_add(1);
        }
        self.ids.insert(id, Arc::clone(name));
        id
    }

    /// Names of addresses are for people who list the table.
    fn comment_of(&self, set: SetName, id: u64) -> Option<String> {
        match set {
            SetName::ServiceIps | SetName::ServiceNodePorts => self.ids.get(&id).map(ToString::to_string),
            _ => None,
        }
    }

    fn hold(&mut self, claim: Claim) -> HeldClaim {
        let class = match claim.value {
            ClaimValue::Member => None,
            ClaimValue::Class(class) => Some(self.class_number(class)),
        };
        HeldClaim { key: claim.key, class, set: claim.set }
    }

    /// Makes the claims of `before` those of `after`, which are of the same service port. Claims that stay are neither
    /// released nor made, and neither does the port leave a frontend that it keeps: nobody gets it for a moment.
    fn change_claims(&mut self, before: &PortState, after: &PortState) {
        if before.claims == after.claims && before.frontends == after.frontends {
            return;
        }
        let id = after.id;
        for (claims, is_used) in [(&after.claims, true), (&before.claims, false)] {
            for number in claims.iter().filter_map(|claim| claim.class) {
                self.use_class(number, is_used);
            }
        }
        let had = effective(&self.owners, &before.claims, id);
        let moved = self.change_frontends(before, after);
        let has = effective(&self.owners, &after.claims, id);
        // Elements leave the table before others with the same key enter it.
        let lost = moved.iter().map(|(frontend, loser, _)| (*loser, frontend));
        self.each_claim_at(lost, id, Self::release);
        before
            .claims
            .iter()
            .filter(|c| had.contains(c) && !has.contains(c))
            .for_each(|c| self.release(c, id));
        after.claims.iter().filter(|c| has.contains(c) && !had.contains(c)).for_each(|c| self.claim(c, id));
        let won = moved.iter().map(|(frontend, _, winner)| (*winner, frontend));
        self.each_claim_at(won, id, Self::claim);
    }

    /// Enters and leaves frontends. Returns those that have another owner now, with the owners before and after.
    fn change_frontends(
        &mut self,
        before: &PortState,
        after: &PortState,
    ) -> Vec<(Key, Option<u64>, Option<u64>)> {
        let old: HashSet<&Frontend> = before.frontends.iter().collect();
        let new: HashSet<&Frontend> = after.frontends.iter().collect();
        let left = || before.frontends.iter().filter(|frontend| !new.contains(frontend));
        let entered = || after.frontends.iter().filter(|frontend| !old.contains(frontend));
        let changed = left().chain(entered()).map(|frontend| &frontend.key);
        let owned: HashMap<Key, Option<u64>> =
            changed.map(|key| (key.clone(), self.owners.owner(key))).collect();
        left().for_each(|frontend| self.owners.leave(frontend, before.id));
        entered().for_each(|frontend| self.owners.enter(frontend, after.id));
        self.warn_of_conflict(entered(), after.id, &owned);
        let moved = owned.into_iter().map(|(key, from)| {
            let to = self.owners.owner(&key);
            (key, from, to)
        });
        moved.filter(|(_, from, to)| from != to).collect()
    }

    /// Logs the first conflict and the number of all: the author of a Service decides how many there are.
    fn warn_of_conflict<'a>(
        &self,
        entered: impl Iterator<Item = &'a Frontend>,
        id: u64,
        owned: &HashMap<Key, Option<u64>>,
    ) {
        let mut conflicts = entered.filter_map(|frontend| {
            let before = owned.get(&frontend.key).copied().flatten().filter(|before| *before != id)?;
            let owner = self.owners.owner(&frontend.key)?;
            Some((owner, if owner == id { before } else { id }))
        });
        let Some((owner, loser)) = conflicts.next() else { return };
        let name = |id: u64| self.ids.get(&id).map(ToString::to_string).unwrap_or_default();
        tracing::warn!(
            port = name(loser),
            owner = name(owner),
            addresses = 1 + conflicts.count(),
            "two service ports have the same address; a ClusterIP comes before external addresses, then the older Service"
        );
    }

    /// Calls `change` with the claims on frontends of other service ports than `own`. The claims of each port are gone through
    /// once: the authors of two Services decide how many frontends they share.
    fn each_claim_at<'a>(
        &mut self,
        frontends: impl Iterator<Item = (Option<u64>, &'a Key)>,
        own: u64,
        change: fn(&mut Self, &HeldClaim, u64),
    ) {
        let mut of_port = BTreeMap::<u64, HashSet<&Key>>::new();
        for (port, frontend) in frontends {
            if let Some(id) = port.filter(|id| *id != own) {
                of_port.entry(id).or_default().insert(frontend);
            }
        }
        for (id, frontends) in of_port {
            let Some(state) = self.ids.get(&id).and_then(|name| self.ports.get(name)) else { continue };
            let is_at = |claim: &&HeldClaim| {
                claim.set.frontend(&claim.key).is_some_and(|key| frontends.contains(&key))
            };
            let claims: Vec<HeldClaim> = state.claims.iter().filter(is_at).cloned().collect();
            claims.iter().for_each(|claim| change(self, claim, id));
        }
    }

    fn claim(&mut self, claim: &HeldClaim, id: u64) {
        if self.owners.claim(claim, id) {
            let value = claimed_value(Claimant { id, class: claim.class });
            let comment = self.comment_of(claim.set, id).unwrap_or_default();
            self.changes.set(claim.set, claim.key.clone(), None, Some(value), &comment);
        }
    }

    fn release(&mut self, claim: &HeldClaim, id: u64) {
        if self.owners.release(claim, id) {
            let before = claimed_value(Claimant { id, class: claim.class });
            self.changes.set(claim.set, claim.key.clone(), Some(before), None, "");
        }
    }

    /// Returns true if packets to the address and port go to this service port.
    pub fn has_frontend(&self, name: &ServicePortName, address: IpAddr, port: u16) -> bool {
        let owner = self.owners.owner(&Key::service(address, name.protocol, port));
        owner.is_some() && owner == self.ports.get(name).map(|state| state.id)
    }

    /// The number of a class, which is in the table only when it is used.
    fn class_number(&mut self, class: Class) -> ClassNumber {
        if let Some(number) = self.class_numbers.get(&class) {
            return *number;
        }
        let mut number = self.next_class;
        while self.classes.contains_key(&number) {
            number = number.checked_add(1).unwrap_or(ClassNumber::MIN);
        }
        self.next_class = number.checked_add(1).unwrap_or(ClassNumber::MIN);
        self.classes.insert(number, ClassState { class, uses: 0 });
        self.class_numbers.insert(class, number);
        for chain in class_chains(class, &self.config) {
            let uses = self.chains.entry(chain.name.clone()).or_insert(0);
            *uses += 1;
            if *uses == 1 && !self.retired.remove(&chain.name) {
                self.changes.chains.push(chain);
            }
        }
        self.changes.set(SetName::Classes, class_key(number), None, Some(Value::Goto(class.chain())), "");
        number
    }

    fn use_class(&mut self, number: ClassNumber, is_used: bool) {
        if let Some(state) = self.classes.get_mut(&number) {
            state.uses = if is_used { state.uses + 1 } else { state.uses.saturating_sub(1) };
        }
    }

    fn retire_idle_classes(&mut self) {
        let idle: Vec<ClassNumber> =
            self.classes.iter().filter(|(_, state)| state.uses == 0).map(|(number, _)| *number).collect();
        if idle.len() <= IDLE_CLASSES + self.classes.len() - idle.len() {
            return;
        }
        for number in idle {
            let Some(ClassState { class, .. }) = self.classes.remove(&number) else { continue };
            self.class_numbers.remove(&class);
            let value = Value::Goto(class.chain());
            self.changes.set(SetName::Classes, class_key(number), Some(value), None, "");
            for chain in class_chains(class, &self.config) {
                if let Some(uses) = self.chains.get_mut(&chain.name) {
                    *uses -= 1;
                    if *uses == 0 {
                        self.chains.remove(&chain.name);
                        self.retired.insert(chain.name);
                    }
                }
            }
        }
    }

    fn endpoints(&mut self, name: &ServicePortName, before: &PortState, after: &PortState) {
        if !self.changes.are_needed {
            return;
        }
        for (policy, old, new) in
            [(Policy::Cluster, &before.cluster, &after.cluster), (Policy::Local, &before.local, &after.local)]
        {
            for index in 0..old.len().max(new.len()) {
                let (old, new) = (old.get(index), new.get(index));
                if old != new {
                    let key = index_key(after.id, policy, index);
                    let (old, new) = (old.map(endpoint_value), new.map(endpoint_value));
                    self.changes.set(SetName::Endpoints, key, old, new, "");
                }
            }
            if !before.affinity && !after.affinity {
                continue;
            }
            let comment = name.to_string();
            let old: HashSet<_> = old.iter().filter(|_| before.affinity).collect();
            let new: HashSet<_> = new.iter().filter(|_| after.affinity).collect();
            let member = |there: bool| there.then_some(Value::Member);
            for endpoint in old.symmetric_difference(&new) {
                let there = old.contains(*endpoint);
                let key = affinity_key(after.id, endpoint);
                self.changes.set(policy.affinity_set(), key, member(there), member(!there), &comment);
            }
        }
    }
}

/// The claims that have an effect, because the service port has their frontends.
fn effective<'a>(owners: &Owners, claims: &'a [HeldClaim], id: u64) -> HashSet<&'a HeldClaim> {
    claims.iter().filter(|claim| owners.is_effective(claim, id)).collect()
}

/// Two lists of a Service may name the same address.
fn without_repeats(mut claims: Vec<HeldClaim>) -> Box<[HeldClaim]> {
    let mut seen = HashSet::with_capacity(claims.len());
    let first: Vec<bool> = claims.iter().map(|claim| seen.insert(claim)).collect();
    let mut first = first.into_iter();
    claims.retain(|_| first.next().unwrap_or(true));
    claims.into()
}

/// Puts the wanted endpoints into slots so that as few as possible change their place. The list is shared with one of
/// the given ones if it has the same order.
fn reslot(old: &Arc<[EndpointAddress]>, want: &Arc<[EndpointAddress]>) -> Arc<[EndpointAddress]> {
    if old.is_empty() || old == want {
        return Arc::clone(want);
    }
    let wanted: HashSet<_> = want.iter().collect();
    let had: HashSet<_> = old.iter().collect();
    let mut fresh = want.iter().filter(|endpoint| !had.contains(endpoint)).copied();
    let mut slots: Vec<EndpointAddress> = old.to_vec();
    let mut index = 0;
    while index < slots.len() {
        if wanted.contains(&slots[index]) {
            index += 1;
        } else if let Some(endpoint) = fresh.next() {
            slots[index] = endpoint;
            index += 1;
        } else {
            slots.swap_remove(index);
        }
    }
    slots.extend(fresh);
    match slots {
        slots if *slots == **old => Arc::clone(old),
        slots if *slots == **want => Arc::clone(want),
        slots => slots.into(),
    }
}

impl PortState {
    fn of(&self, policy: Policy) -> &[EndpointAddress] {
        match policy {
            Policy::Cluster => &self.cluster,
            Policy::Local => &self.local,
        }
    }
}

fn class_key(number: ClassNumber) -> Key {
    Key::new(&[&number.get().to_ne_bytes()])
}

fn claimed_value(claimant: Claimant) -> Value {
    match claimant.class {
        None => Value::Member,
        Some(number) => {
            Value::Bytes(Bytes::fields(&[&number.get().to_ne_bytes(), &claimant.id.to_ne_bytes()]))
        }
    }
}

fn index_key(id: u64, policy: Policy, index: usize) -> Key {
    let index = policy.first_index().wrapping_add(u32::try_from(index).unwrap_or(u32::MAX));
    Key::new(&[&id.to_ne_bytes(), &index.to_ne_bytes()])
}

fn endpoint_value(endpoint: &EndpointAddress) -> Value {
    Value::Bytes(Bytes::fields(&[&ferrite_nft::octets(endpoint.ip), &endpoint.port.to_be_bytes()]))
}

fn affinity_key(id: u64, endpoint: &EndpointAddress) -> Key {
    Key::new(&[&id.to_ne_bytes(), &ferrite_nft::octets(endpoint.ip), &endpoint.port.to_be_bytes()])
}

/// FNV-1a: stable across versions and machines, which the standard hasher is not.
struct Fnv(u64);

impl fmt::Write for Fnv {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        self.0 = text.bytes().fold(self.0, step);
        Ok(())
    }
}

/// The hash of the name's text.
fn hash(name: &ServicePortName) -> u64 {
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    // Neither the name nor the hash refuses to be written.
    let _ = write!(hash, "{name}");
    hash.0
}

#[cfg(test)]
mod tests;
