//! A model of the kernel that evaluates the table, as far as our rules need it.

use std::collections::BTreeMap;

use ferrite_nft::{Expr, Hook, Key, Transaction, Value, Verdict, octets};

use crate::reference::Packet;
use ferrite_policy::layout::{PolicyChain, PolicySet};

#[derive(Debug, Default)]
pub(crate) struct Kernel {
    chains: BTreeMap<String, PolicyChain>,
    elements: BTreeMap<(PolicySet, Key), Value>,
}

enum Outcome {
    Accept,
    Drop,
    /// The chain came to its end.
    Return,
}

impl Kernel {
    /// As the kernel: an impossible change is an error.
    pub(crate) fn apply(&mut self, transaction: &Transaction<PolicySet>) {
        if transaction.rebuild {
            *self = Self::default();
        }
        for element in &transaction.delete {
            let gone = self.elements.remove(&(element.set, element.key.clone()));
            assert!(gone.is_some(), "deletes an element that is not there: {element:?}");
        }
        for chain in &transaction.chains {
            let known = self.chains.insert(chain.name.clone(), chain.clone());
            assert!(known.is_none(), "makes chain {} twice", chain.name);
        }
        for element in &transaction.add {
            let known = self.elements.insert((element.set, element.key.clone()), element.value.clone());
            assert!(known.is_none(), "adds an element twice: {element:?}");
        }
        for chain in self.chains.values() {
            for expr in chain.rules.iter().flatten() {
                if let Expr::Verdict(Verdict::Jump(target) | Verdict::Goto(target)) = expr {
                    assert!(self.chains.contains_key(target), "{} calls {target}", chain.name);
                }
            }
        }
        for value in self.elements.values() {
            if let Value::Goto(target) = value {
                assert!(self.chains.contains_key(target), "a class without its chain {target}");
            }
        }
    }

    pub(crate) fn delete_chain(&mut self, name: &str) {
        assert!(self.chains.remove(name).is_some(), "deletes chain {name} that is not there");
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.elements.is_empty() && self.chains.values().all(|chain| chain.hook.is_some())
    }

    pub(crate) fn allows(&self, packet: &Packet) -> bool {
        let mut hooked: Vec<_> =
            self.chains.values().filter_map(|chain| Some((chain.hook?, chain))).collect();
        hooked.sort_by_key(|((_, _, priority), _)| *priority);
        assert!(hooked.iter().all(|((_, hook, _), _)| *hook == Hook::Forward));
        hooked.into_iter().all(|(_, chain)| !matches!(self.run(chain, packet), Outcome::Drop))
    }

    fn run(&self, chain: &PolicyChain, packet: &Packet) -> Outcome {
        for rule in &chain.rules {
            let mut registers = vec![[0_u8; 4]; 16];
            let registers = &mut registers;
            let mut expressions = rule.iter();
            let outcome = loop {
                let Some(expr) = expressions.next() else { break None };
                match expr {
                    Expr::LoadCtState { .. } => break None,
                    Expr::LoadNetworkHeader { to, offset: 12, .. } => {
                        store(registers, *to, &octets(packet.source))
                    }
                    Expr::LoadNetworkHeader { to, offset: 16, .. } => {
                        store(registers, *to, &octets(packet.destination))
                    }
                    Expr::LoadProtocol { to } => store(registers, *to, &[packet.protocol]),
                    Expr::LoadDestinationPort { to } => store(registers, *to, &packet.port.to_be_bytes()),
                    Expr::LoadNumber { to, number } => store(registers, *to, &number.to_ne_bytes()),
                    Expr::InSet { set, key, inverted: false } => {
                        if self.find(*set, &registers_from(registers, *key)).is_none() {
                            break None;
                        }
                    }
                    Expr::Map { set, key, to } => {
                        let Some(Value::Bytes(bytes)) = self.find(*set, &registers_from(registers, *key))
                        else {
                            break None;
                        };
                        store(registers, *to, bytes);
                    }
                    Expr::VerdictMap { set, key } => {
                        let Some(Value::Goto(name)) = self.find(*set, &registers_from(registers, *key))
                        else {
                            break None;
                        };
                        break Some(self.run(&self.chains[name], packet));
                    }
                    Expr::Verdict(Verdict::Accept) => break Some(Outcome::Accept),
                    Expr::Verdict(Verdict::Drop) => break Some(Outcome::Drop),
                    Expr::Verdict(Verdict::Jump(name)) => match self.run(&self.chains[name], packet) {
                        Outcome::Return => break None,
                        end => break Some(end),
                    },
                    other => panic!("the table has {other:?}"),
                }
            };
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
        Outcome::Return
    }

    fn find(&self, set: PolicySet, key: &[u8]) -> Option<&Value> {
        let within = |known: &Key| {
            let key = &key[..known.first().len()];
            match known.last() {
                None => known.first() == key,
                Some(last) => words(known.first())
                    .zip(words(last))
                    .zip(words(key))
                    .all(|((first, last), word)| first <= word && word <= last),
            }
        };
        let found = self.elements.iter().find(|((known, key), _)| *known == set && within(key));
        found.map(|(_, value)| value)
    }
}

fn store(registers: &mut [[u8; 4]], to: u8, bytes: &[u8]) {
    for (index, word) in bytes.chunks(4).enumerate() {
        let register = &mut registers[usize::from(to) + index];
        *register = [0; 4];
        register[..word.len()].copy_from_slice(word);
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.chunks(4)
}

fn registers_from(registers: &[[u8; 4]], from: u8) -> Vec<u8> {
    registers[usize::from(from)..].concat()
}
