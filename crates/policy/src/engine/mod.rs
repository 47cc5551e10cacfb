//! Computes the changes of the table from policies, pods and namespaces. No I/O.
//!
//! Everything that pods share is shared in the table: pods with the same rules have one class, equal rules one chain,
//! equal selectors one group. Each counts its users and goes with the last. The cost of a change depends on
//! its size: a pod costs its memberships, a policy the pods of its namespace on this node.

mod elements;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use ferrite_nft::{Cidr, IpFamily, Key, Protocol, Transaction, Value};

use self::elements::Elements;
use crate::layout::{
    Id, PolicyChain, PolicySet, RuleChains, RuleIds, base_chains, block_key, class_chain, class_rules,
    member_key, named_port_key, number_key, peers_chain, pods_set, port_key, rule_chain, rule_rules,
    themselves_key,
};
use crate::model::{
    Direction, Labels, Name, Peer, PodFacts, PodGroup, Policy, PolicyRule, Ports, address_ranges, port_ranges,
};

/// Something in the table that several have in common.
#[derive(Debug)]
struct Shared {
    id: Id,
    uses: usize,
}

/// The rules that apply to a pod in one direction. Without rules, nothing is allowed.
type ClassKey = (Direction, BTreeSet<PolicyRule>);
type NameKey = (Protocol, String);

/// A pod, and its entries in the table.
#[derive(Debug, Default)]
struct PodState {
    /// `None` for a pod that has a link before its object is known.
    facts: Option<PodFacts>,
    /// The addresses of its link on this node; they count for more than the object's status.
    attached: Vec<IpAddr>,
    /// True if this node enforces policies for the pod.
    local: bool,
    addresses: Vec<IpAddr>,
    groups: BTreeSet<Id>,
    /// Elements of named ports.
    ports: Vec<Key>,
    classes: BTreeMap<Direction, (ClassKey, Id)>,
}

/// The known objects, and the table as it is, or will be after the transactions that were taken from here.
#[derive(Debug)]
pub struct Engine {
    family: IpFamily,
    /// Addresses of this node's pods: only pods of the node are judged here.
    local: Vec<Cidr>,
    /// The node's name: networks of plugins give its pods addresses of ranges that nobody knows here.
    node: Option<String>,
    policies: BTreeMap<String, BTreeMap<String, Policy>>,
    namespaces: HashMap<String, Labels>,
    pods: BTreeMap<Name, PodState>,
    classes: HashMap<ClassKey, Shared>,
    rules: HashMap<(Direction, PolicyRule), (Shared, RuleIds)>,
    groups: HashMap<PodGroup, Shared>,
    names: HashMap<NameKey, Shared>,
    next_id: Id,
    elements: Elements,
    /// Chains of classes and rules.
    chains: BTreeMap<String, PolicyChain>,
    new_chains: BTreeSet<String>,
    /// Chains in the kernel that nothing needs, callers before the called.
    retired: Vec<String>,
}

impl Engine {
    /// For a node whose pods have addresses in these ranges. The first transaction must be [`rebuild`](Self::rebuild).
    pub fn new(family: IpFamily, local: Vec<Cidr>) -> Self {
        Self {
            family,
            local,
            node: None,
            policies: BTreeMap::new(),
            namespaces: HashMap::new(),
            pods: BTreeMap::new(),
            classes: HashMap::new(),
            rules: HashMap::new(),
            groups: HashMap::new(),
            names: HashMap::new(),
            next_id: 1,
            elements: Elements::default(),
            chains: BTreeMap::new(),
            new_chains: BTreeSet::new(),
            retired: Vec::new(),
        }
    }

    /// Pods of the node of this name are judged here, whatever addresses they have.
    pub fn of_node(mut self, name: Option<String>) -> Self {
        self.node = name;
        self
    }

    pub fn set_policy(&mut self, name: &Name, policy: Option<Policy>) {
        let known = self.policies.entry(name.namespace.clone()).or_default();
        match policy {
            Some(policy) => drop(known.insert(name.name.clone(), policy)),
            None => drop(known.remove(&name.name)),
        }
        if known.is_empty() {
            self.policies.remove(&name.namespace);
        }
        let of_node = |(_, pod): &(&Name, &PodState)| pod.local;
        let pods: Vec<Name> =
            self.pods_in(&name.namespace).filter(of_node).map(|(name, _)| name.clone()).collect();
        pods.iter().for_each(|name| self.refresh(name));
    }

    pub fn set_namespace(&mut self, name: &str, labels: Option<Labels>) {
        if self.namespaces.get(name) == labels.as_ref() {
            return;
        }
        match labels {
            Some(labels) => drop(self.namespaces.insert(name.to_owned(), labels)),
            None => drop(self.namespaces.remove(name)),
        }
        let pods: Vec<Name> = self.pods_in(name).map(|(name, _)| name.clone()).collect();
        pods.iter().for_each(|name| self.refresh(name));
    }

    pub fn set_pod(&mut self, name: &Name, facts: Option<PodFacts>) {
        let pod = self.pods.entry(name.clone()).or_default();
        if pod.facts == facts && facts.is_some() {
            return;
        }
        pod.facts = facts;
        self.refresh(name);
    }

    /// A pod has, or will have at once, a link with these addresses; none takes it back.
    pub fn set_attached(&mut self, name: &Name, addresses: &[IpAddr]) {
        self.pods.entry(name.clone()).or_default().attached = addresses.to_vec();
        self.refresh(name);
    }

    /// The changes since the last transaction.
    pub fn take_changes(&mut self) -> Transaction<PolicySet> {
        let (delete, add) = self.elements.take_changes();
        let new = std::mem::take(&mut self.new_chains);
        let chains = new.iter().filter_map(|name| self.chains.get(name)).cloned().collect();
        Transaction { rebuild: false, delete, chains, add }
    }

    /// The whole table.
    pub fn rebuild(&mut self) -> Transaction<PolicySet> {
        self.new_chains.clear();
        self.retired.clear();
        let chains = self.chains.values().cloned().chain(base_chains(self.family));
        Transaction { rebuild: true, delete: Vec::new(), chains: chains.collect(), add: self.elements.all() }
    }

    /// Chains to delete after the changes, callers before the called.
    pub fn take_retired(&mut self) -> Vec<String> {
        std::mem::take(&mut self.retired)
    }

    /// The policies that select a pod, by direction.
    pub fn policies_of(&self, name: &Name, direction: Direction) -> Vec<&Policy> {
        let Some(facts) = self.pods.get(name).and_then(|pod| pod.facts.as_ref()) else { return Vec::new() };
        self.selecting(facts, direction).collect()
    }

    fn selecting<'a>(
        &'a self,
        facts: &'a PodFacts,
        direction: Direction,
    ) -> impl Iterator<Item = &'a Policy> {
        let policies = self.policies.get(&facts.name.namespace).into_iter().flat_map(BTreeMap::values);
        policies.filter(move |policy| policy.rules(direction).is_some() && policy.selects(facts))
    }

    fn pods_in<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = (&'a Name, &'a PodState)> {
        let from = Name::new(namespace, "");
        self.pods.range(from..).take_while(move |(name, _)| name.namespace == namespace)
    }

    fn is_local(&self, pod: &PodState, facts: &PodFacts, addresses: &[IpAddr]) -> bool {
        let of_node = self.node.is_some() && facts.node == self.node;
        let attached = pod.attached.iter().any(|address| addresses.contains(address));
        attached
            || of_node
            || addresses.iter().any(|address| self.local.iter().any(|range| range.contains(*address)))
    }

    fn new_id(&mut self) -> Id {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1).max(1);
        id
    }

    /// Brings the table in line with the facts of a pod.
    fn refresh(&mut self, name: &Name) {
        let Some(mut pod) = self.pods.remove(name) else { return };
        if pod.facts.is_none() && pod.attached.is_empty() {
            self.withdraw(name, &pod);
            self.release_classes(std::mem::take(&mut pod.classes));
            return;
        }
        let stranger;
        let facts = match &pod.facts {
            Some(facts) => facts,
            // Policies that select by no label hold for it already.
            None => {
                stranger = PodFacts {
                    name: name.clone(),
                    labels: Labels::new(),
                    addresses: Vec::new(),
                    ports: Vec::new(),
                    node: None,
                };
                &stranger
            }
        };
        let addresses = match pod.attached.is_empty() {
            true => facts.addresses.clone(),
            false => pod.attached.clone(),
        };
        let addresses: Vec<IpAddr> =
            addresses.into_iter().filter(|address| IpFamily::of(*address) == self.family).collect();
        let mut classes = BTreeMap::new();
        let local = self.is_local(&pod, facts, &addresses);
        if local {
            for direction in Direction::BOTH {
                let mut policies = self.selecting(facts, direction).peekable();
                if policies.peek().is_none() {
                    continue;
                }
                let rules = policies.flat_map(|policy| policy.rules(direction).unwrap_or_default());
                let key = (direction, rules.cloned().collect::<BTreeSet<PolicyRule>>());
                classes.insert(direction, key);
            }
        }
        let labels = self.namespaces.get(&name.namespace);
        let member = |(group, _): &(&PodGroup, &Shared)| group.contains(facts, labels);
        let groups = self.groups.iter().filter(member).map(|(_, shared)| shared.id).collect();
        let ports = addresses
            .iter()
            .flat_map(|address| facts.ports.iter().map(move |port| (*address, port)))
            .filter_map(|(address, port)| {
                let name = self.names.get(&(port.protocol, port.name.clone()))?;
                Some(named_port_key(name.id, address, port))
            })
            .collect();
        self.withdraw(name, &pod);
        pod = PodState { addresses, groups, ports, local, ..pod };
        // The new classes come first, so that the common parts stay.
        let old = std::mem::take(&mut pod.classes);
        self.claim(name, &pod);
        self.pods.insert(name.clone(), pod);
        for (direction, key) in classes {
            let id = self.acquire_class(&key);
            if let Some(pod) = self.pods.get_mut(name) {
                pod.classes.insert(direction, (key, id));
                claim_class(&mut self.elements, name, pod, direction, id);
            }
        }
        self.release_classes(old);
    }

    /// Elements of a pod, except those of its classes.
    fn claim(&mut self, name: &Name, pod: &PodState) {
        for group in &pod.groups {
            for address in &pod.addresses {
                self.elements.claim(
                    PolicySet::Members,
                    member_key(*group, *address),
                    name,
                    Value::Member,
                    false,
                );
            }
        }
        for key in &pod.ports {
            self.elements.claim(PolicySet::NamedPorts, key.clone(), name, Value::Member, false);
        }
    }

    fn withdraw(&mut self, name: &Name, pod: &PodState) {
        for address in &pod.addresses {
            for group in &pod.groups {
                self.elements.withdraw(PolicySet::Members, member_key(*group, *address), name);
            }
            for direction in pod.classes.keys() {
                self.elements.withdraw(pods_set(*direction), Key::address(*address), name);
                self.elements.withdraw(PolicySet::Themselves, themselves_key(*address), name);
            }
        }
        for key in &pod.ports {
            self.elements.withdraw(PolicySet::NamedPorts, key.clone(), name);
        }
    }

    fn acquire_class(&mut self, key: &ClassKey) -> Id {
        if let Some(known) = self.classes.get_mut(key) {
            known.uses += 1;
            return known.id;
        }
        let rules: Vec<Id> = key.1.iter().map(|rule| self.acquire_rule(key.0, rule)).collect();
        let id = self.new_id();
        self.add_chain(class_chain(id), class_rules(&rules));
        self.elements.claim_shared(PolicySet::Classes, number_key(id), Value::Goto(class_chain(id)));
        self.classes.insert(key.clone(), Shared { id, uses: 1 });
        id
    }

    fn release_classes(&mut self, classes: BTreeMap<Direction, (ClassKey, Id)>) {
        for (key, id) in classes.into_values() {
            let Some(known) = self.classes.get_mut(&key) else { continue };
            known.uses -= 1;
            if known.uses > 0 {
                continue;
            }
            self.classes.remove(&key);
            self.elements.withdraw_shared(PolicySet::Classes, number_key(id));
            self.retire_chain(class_chain(id));
            key.1.iter().for_each(|rule| self.release_rule(key.0, rule));
        }
    }

    fn acquire_rule(&mut self, direction: Direction, rule: &PolicyRule) -> Id {
        let key = (direction, rule.clone());
        if let Some((known, _)) = self.rules.get_mut(&key) {
            known.uses += 1;
            return known.id;
        }
        let groups = groups_of(rule).into_iter().map(|group| self.acquire_group(group)).collect();
        let names = names_of(rule).into_iter().map(|name| self.acquire_name(name)).collect();
        let id = self.new_id();
        let (blocks, numbers) = ranges_of(rule, id, self.family);
        let ids =
            RuleIds { rule: id, groups, names, blocks: !blocks.is_empty(), numbers: !numbers.is_empty() };
        for key in blocks {
            self.elements.claim_shared(PolicySet::Blocks, key, Value::Member);
        }
        for key in numbers {
            self.elements.claim_shared(PolicySet::Ports, key, Value::Member);
        }
        let RuleChains { rule: own, peers } = rule_rules(rule, &ids, direction, self.family);
        self.add_chain(rule_chain(id), own);
        if let Some(peers) = peers {
            self.add_chain(peers_chain(id), peers);
        }
        self.rules.insert(key, (Shared { id, uses: 1 }, ids));
        id
    }

    fn release_rule(&mut self, direction: Direction, rule: &PolicyRule) {
        let key = (direction, rule.clone());
        let Some((known, _)) = self.rules.get_mut(&key) else { return };
        known.uses -= 1;
        if known.uses > 0 {
            return;
        }
        let id = known.id;
        self.rules.remove(&key);
        self.retire_chain(rule_chain(id));
        if self.chains.contains_key(&peers_chain(id)) {
            self.retire_chain(peers_chain(id));
        }
        let (blocks, numbers) = ranges_of(rule, id, self.family);
        blocks.into_iter().for_each(|key| self.elements.withdraw_shared(PolicySet::Blocks, key));
        numbers.into_iter().for_each(|key| self.elements.withdraw_shared(PolicySet::Ports, key));
        groups_of(rule).into_iter().for_each(|group| self.release_group(group));
        names_of(rule).into_iter().for_each(|name| self.release_name(&name));
    }

    fn acquire_group(&mut self, group: &PodGroup) -> Id {
        if let Some(known) = self.groups.get_mut(group) {
            known.uses += 1;
            return known.id;
        }
        let id = self.new_id();
        self.groups.insert(group.clone(), Shared { id, uses: 1 });
        for (name, pod) in &mut self.pods {
            let Some(facts) = &pod.facts else { continue };
            if !group.contains(facts, self.namespaces.get(&name.namespace)) {
                continue;
            }
            pod.groups.insert(id);
            for address in &pod.addresses {
                self.elements.claim(PolicySet::Members, member_key(id, *address), name, Value::Member, false);
            }
        }
        id
    }

    fn release_group(&mut self, group: &PodGroup) {
        let Some(known) = self.groups.get_mut(group) else { return };
        known.uses -= 1;
        if known.uses > 0 {
            return;
        }
        let id = known.id;
        self.groups.remove(group);
        for (name, pod) in &mut self.pods {
            if pod.groups.remove(&id) {
                for address in &pod.addresses {
                    self.elements.withdraw(PolicySet::Members, member_key(id, *address), name);
                }
            }
        }
    }

    fn acquire_name(&mut self, key: NameKey) -> Id {
        if let Some(known) = self.names.get_mut(&key) {
            known.uses += 1;
            return known.id;
        }
        let id = self.new_id();
        for (name, pod) in &mut self.pods {
            let ports = pod.facts.iter().flat_map(|facts| &facts.ports);
            for port in ports.filter(|port| (port.protocol, &port.name) == (key.0, &key.1)) {
                for address in &pod.addresses {
                    let element = named_port_key(id, *address, port);
                    self.elements.claim(PolicySet::NamedPorts, element.clone(), name, Value::Member, false);
                    pod.ports.push(element);
                }
            }
        }
        self.names.insert(key, Shared { id, uses: 1 });
        id
    }

    fn release_name(&mut self, key: &NameKey) {
        let Some(known) = self.names.get_mut(key) else { return };
        known.uses -= 1;
        if known.uses > 0 {
            return;
        }
        let prefix = known.id.to_ne_bytes();
        self.names.remove(key);
        for (name, pod) in &mut self.pods {
            let of_name = |key: &Key| key.first().starts_with(&prefix);
            let (gone, kept): (Vec<Key>, Vec<Key>) = pod.ports.drain(..).partition(of_name);
            pod.ports = kept;
            for key in gone {
                self.elements.withdraw(PolicySet::NamedPorts, key, name);
            }
        }
    }

    fn add_chain(&mut self, name: String, rules: Vec<ferrite_nft::Rule<PolicySet>>) {
        self.new_chains.insert(name.clone());
        self.chains.insert(name.clone(), PolicyChain { name, hook: None, rules });
    }

    fn retire_chain(&mut self, name: String) {
        self.chains.remove(&name);
        // A chain that the kernel has never seen needs no deletion.
        if !self.new_chains.remove(&name) {
            self.retired.push(name);
        }
    }
}

fn claim_class(elements: &mut Elements, name: &Name, pod: &PodState, direction: Direction, id: Id) {
    let class = Value::Bytes(id.to_ne_bytes().into());
    // The pod whose link has the address goes before one whose object still says so.
    let first = !pod.attached.is_empty();
    for address in &pod.addresses {
        elements.claim(pods_set(direction), Key::address(*address), name, class.clone(), first);
        elements.claim(PolicySet::Themselves, themselves_key(*address), name, Value::Member, first);
    }
}

fn groups_of(rule: &PolicyRule) -> BTreeSet<&PodGroup> {
    let peers = rule.peers.iter().flatten();
    let groups = peers.filter_map(|peer| match peer {
        Peer::Pods(group) => Some(group),
        Peer::Range { .. } => None,
    });
    groups.collect()
}

fn names_of(rule: &PolicyRule) -> BTreeSet<NameKey> {
    let ports = rule.ports.iter().flatten();
    let names = ports.filter_map(|ports| match ports {
        Ports::Named { protocol, name } => Some((*protocol, name.clone())),
        Ports::Numbers { .. } => None,
    });
    names.collect()
}

/// The elements of a rule in `blocks` and in `ports`.
fn ranges_of(rule: &PolicyRule, id: Id, family: IpFamily) -> (Vec<Key>, Vec<Key>) {
    let blocks = address_ranges(rule.peers.as_deref().unwrap_or_default(), family);
    let ports = port_ranges(rule.ports.as_deref().unwrap_or_default());
    (
        blocks.into_iter().map(|range| block_key(id, range)).collect(),
        ports.into_iter().map(|range| port_key(id, range)).collect(),
    )
}
