//! Computes one transaction from the present and the desired table. No I/O.
//!
//! A change of one service port costs elements in proportion to the change: an endpoint that comes or goes moves at
//! most one other endpoint to another index, and no rule is written unless a class appears for the first time.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::layout::{
    BaseChain, Claim, ClaimValue, Class, DesiredPort, Key, LayoutConfig, NodePortAddresses, Policy, SetName,
    base_chains, class_chains,
};
use crate::model::{EndpointAddress, ServicePortName};
pub use ferrite_nft::Value;

pub type Element = ferrite_nft::Element<SetName>;
pub type Transaction = ferrite_nft::Transaction<SetName>;

/// Idle classes beyond this number (plus the number of used ones) are removed.
const IDLE_CLASSES: usize = 64;

struct ClassState {
    number: u32,
    /// Claims that have it.
    uses: usize,
}

/// A service port in the table.
struct PortState {
    id: u64,
    claims: Vec<Claim>,
    cluster: Vec<EndpointAddress>,
    local: Vec<EndpointAddress>,
    affinity: bool,
}

/// The claimants of an element; the first one has it. Two Services with one external address are a mistake
/// of their owners; the second gets the address when the first gives it up.
type Claimants = Vec<(ServicePortName, Value)>;

/// The table as it is, or will be after the transactions that were taken from here.
pub struct Programmed {
    config: LayoutConfig,
    ports: BTreeMap<ServicePortName, PortState>,
    claims: HashMap<(SetName, Key), Claimants>,
    classes: HashMap<Class, ClassState>,
    next_class: u32,
    /// Chains in the kernel, with the number of classes that need each.
    chains: HashMap<String, usize>,
    /// Chains in the kernel that no class needs.
    retired: BTreeSet<String>,
    ids: HashMap<u64, ServicePortName>,
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
    elements: HashMap<(SetName, Key), ElementChange>,
    chains: Vec<BaseChain>,
}

impl Changes {
    fn set(&mut self, set: SetName, key: Key, before: Option<Value>, after: Option<Value>, comment: &str) {
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
            claims: HashMap::new(),
            classes: HashMap::new(),
            next_class: 1,
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
    pub fn ports_of(&self, namespace: &str, service: &str) -> Vec<ServicePortName> {
        let first = ServicePortName {
            namespace: namespace.to_owned(),
            service: service.to_owned(),
            port: String::new(),
            protocol: crate::model::Protocol::Tcp,
        };
        let own = |name: &&ServicePortName| name.namespace == namespace && name.service == service;
        self.ports.range(first..).map(|(name, _)| name).take_while(own).cloned().collect()
    }

    /// Records the needs of a service port; `None` if it is gone.
    pub fn update(&mut self, name: &ServicePortName, desired: Option<DesiredPort>) {
        let before = self.ports.remove(name);
        let Some(desired) = desired else {
            if let Some(before) = before {
                self.release(name, &before.claims);
                self.endpoints(
                    name,
                    &before,
                    &PortState { claims: Vec::new(), cluster: Vec::new(), local: Vec::new(), ..before },
                );
                self.ids.remove(&before.id);
            }
            return;
        };
        let id = match &before {
            Some(before) => before.id,
            None => self.new_id(name),
        };
        let before = before.unwrap_or(PortState {
            id,
            claims: Vec::new(),
            cluster: Vec::new(),
            local: Vec::new(),
            affinity: false,
        });
        let after = PortState {
            id,
            cluster: reslot(&before.cluster, &desired.cluster),
            local: reslot(&before.local, &desired.local),
            claims: desired.claims,
            affinity: desired.affinity,
        };
        if before.claims != after.claims {
            // Claims of a port change as a whole, except the many that stay: those are neither released nor made.
            let stay = |ours: &[Claim], theirs: &[Claim]| -> Vec<Claim> {
                ours.iter().filter(|claim| !theirs.contains(claim)).cloned().collect()
            };
            let (gone, fresh) = (stay(&before.claims, &after.claims), stay(&after.claims, &before.claims));
            self.release(name, &gone);
            self.claim(name, id, &fresh);
        }
        self.endpoints(name, &before, &after);
        self.ports.insert(name.clone(), after);
    }

    /// The changes noted since the last transaction.
    pub fn take_changes(&mut self) -> Transaction {
        self.retire_idle_classes();
        let changes = std::mem::take(&mut self.changes);
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

    /// A transaction that makes the whole table, whatever the kernel has.
    pub fn rebuild(&mut self) -> Transaction {
        self.changes = Changes::default();
        self.retired.clear();
        self.chains.clear();
        self.classes.retain(|_, class| class.uses > 0);
        let mut transaction =
            Transaction { rebuild: true, chains: base_chains(&self.config), ..Transaction::default() };
        let mut add = |set, key, value, comment: &str| {
            let comment = Some(comment.to_owned()).filter(|text| !text.is_empty());
            transaction.add.push(Element { set, key, value, comment });
        };
        if let NodePortAddresses::Only(addresses) = &self.config.node_port_addresses {
            let own: BTreeSet<_> = addresses.iter().filter(|ip| !ip.is_loopback()).copied().collect();
            for address in own.into_iter().filter(|ip| crate::model::IpFamily::of(*ip) == self.config.family)
            {
                add(SetName::NodePortIps, Key::address(address), Value::Member, "");
            }
        }
        let mut classes: Vec<_> = self.classes.iter().collect();
        classes.sort_by_key(|(_, state)| state.number);
        let mut chains = Vec::new();
        for (class, state) in classes {
            for chain in class_chains(*class, &self.config) {
                let uses = self.chains.entry(chain.name.clone()).or_insert(0);
                if *uses == 0 {
                    chains.push(chain);
                }
                *uses += 1;
            }
            add(SetName::Classes, class_key(state.number), Value::Goto(class.chain()), "");
        }
        for ((set, key), claimants) in &self.claims {
            if let Some((owner, value)) = claimants.first() {
                add(*set, key.clone(), value.clone(), &comment_of(*set, owner));
            }
        }
        for port in self.ports.values() {
            for (policy, endpoints) in [(Policy::Cluster, &port.cluster), (Policy::Local, &port.local)] {
                for (index, endpoint) in endpoints.iter().enumerate() {
                    add(
                        SetName::Endpoints,
                        index_key(port.id, policy, index),
                        Value::Bytes(endpoint_value(endpoint)),
                        "",
                    );
                    if port.affinity {
                        add(policy.affinity_set(), affinity_key(port.id, endpoint), Value::Member, "");
                    }
                }
            }
        }
        transaction.chains.extend(chains);
        transaction.add.sort_by(|a, b| (a.set, &a.key).cmp(&(b.set, &b.key)));
        transaction
    }

    /// Chains that no class needs, callers before called ones. They stay noted until [`chains_deleted`](Self::chains_deleted).
    pub fn retired_chains(&self) -> Vec<String> {
        // Callers begin with "external", called ones with "pick".
        self.retired.iter().cloned().collect()
    }

    pub fn chains_deleted(&mut self) {
        self.retired.clear();
    }

    fn new_id(&mut self, name: &ServicePortName) -> u64 {
        let mut id = hash(&name.to_string());
        while self.ids.contains_key(&id) {
            id = id.wrapping_add(1);
        }
        self.ids.insert(id, name.clone());
        id
    }

    fn claim(&mut self, name: &ServicePortName, id: u64, claims: &[Claim]) {
        for claim in claims {
            let value = match claim.value {
                ClaimValue::Member => Value::Member,
                ClaimValue::Class(class) => Value::Bytes(class_value(self.use_class(class), id)),
            };
            let claimants = self.claims.entry((claim.set, claim.key.clone())).or_default();
            claimants.push((name.clone(), value));
            if let [(owner, value)] = claimants.as_slice() {
                let comment = comment_of(claim.set, owner);
                self.changes.set(claim.set, claim.key.clone(), None, Some(value.clone()), &comment);
            } else if claim.set == SetName::ServiceIps || claim.set == SetName::ServiceNodePorts {
                tracing::warn!(port = %name, owner = %claimants[0].0, "two service ports have the same address; the first keeps it");
            }
        }
    }

    fn release(&mut self, name: &ServicePortName, claims: &[Claim]) {
        for claim in claims {
            if let ClaimValue::Class(class) = claim.value
                && let Some(state) = self.classes.get_mut(&class)
            {
                state.uses -= 1;
            }
            let entry = (claim.set, claim.key.clone());
            let Some(claimants) = self.claims.get_mut(&entry) else { continue };
            let Some(position) = claimants.iter().position(|(owner, _)| owner == name) else { continue };
            let (_, before) = claimants.remove(position);
            if position == 0 {
                let after = claimants.first();
                let comment = after.map(|(owner, _)| comment_of(claim.set, owner)).unwrap_or_default();
                self.changes.set(
                    claim.set,
                    claim.key.clone(),
                    Some(before),
                    after.map(|(_, value)| value.clone()),
                    &comment,
                );
            }
            if claimants.is_empty() {
                self.claims.remove(&entry);
            }
        }
    }

    fn use_class(&mut self, class: Class) -> u32 {
        if let Some(state) = self.classes.get_mut(&class) {
            state.uses += 1;
            return state.number;
        }
        let number = self.next_class;
        self.next_class += 1;
        self.classes.insert(class, ClassState { number, uses: 1 });
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

    fn retire_idle_classes(&mut self) {
        let idle: Vec<Class> =
            self.classes.iter().filter(|(_, state)| state.uses == 0).map(|(class, _)| *class).collect();
        if idle.len() <= IDLE_CLASSES + self.classes.len() - idle.len() {
            return;
        }
        for class in idle {
            let Some(state) = self.classes.remove(&class) else { continue };
            let value = Value::Goto(class.chain());
            self.changes.set(SetName::Classes, class_key(state.number), Some(value), None, "");
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
        let comment = name.to_string();
        for (policy, old, new) in
            [(Policy::Cluster, &before.cluster, &after.cluster), (Policy::Local, &before.local, &after.local)]
        {
            for index in 0..old.len().max(new.len()) {
                let (old, new) = (old.get(index), new.get(index));
                if old != new {
                    let value = |endpoint: Option<&EndpointAddress>| {
                        endpoint.map(|e| Value::Bytes(endpoint_value(e)))
                    };
                    let key = index_key(after.id, policy, index);
                    self.changes.set(SetName::Endpoints, key, value(old), value(new), "");
                }
            }
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

/// Puts the wanted endpoints into slots so that as few as possible change their place.
fn reslot(old: &[EndpointAddress], want: &[EndpointAddress]) -> Vec<EndpointAddress> {
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
    slots
}

fn comment_of(set: SetName, owner: &ServicePortName) -> String {
    match set {
        SetName::ServiceIps | SetName::ServiceNodePorts => owner.to_string(),
        _ => String::new(),
    }
}

fn class_key(number: u32) -> Key {
    Key::new(&[&number.to_ne_bytes()])
}

fn class_value(number: u32, id: u64) -> Vec<u8> {
    [number.to_ne_bytes().as_slice(), &id.to_ne_bytes()].concat()
}

fn index_key(id: u64, policy: Policy, index: usize) -> Key {
    let index = policy.first_index().wrapping_add(u32::try_from(index).unwrap_or(u32::MAX));
    Key::new(&[&id.to_ne_bytes(), &index.to_ne_bytes()])
}

fn endpoint_value(endpoint: &EndpointAddress) -> Vec<u8> {
    Key::new(&[&ferrite_nft::octets(endpoint.ip), &endpoint.port.to_be_bytes()]).first
}

fn affinity_key(id: u64, endpoint: &EndpointAddress) -> Key {
    Key::new(&[&id.to_ne_bytes(), &endpoint_value(endpoint)])
}

/// FNV-1a: stable across versions and machines, which the standard hasher is not.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
