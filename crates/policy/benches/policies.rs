//! Measures building the table for many policies and pods, and adding one more pod: `cargo xtask bench
//! network`.
//!
//! Needs root. It works in a network namespace of its own, which ends with it.

use std::error::Error;
use std::net::IpAddr;
use std::time::Instant;

use ferrite_nft::{IpFamily, OwnGenerations, Table};
use ferrite_policy::engine::Engine;
use ferrite_policy::model::{Name, PodFacts, Policy};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use serde_json::json;

const POLICIES: usize = 1_000;
const PODS: usize = 1_000;

fn pod(number: usize) -> Result<(Name, PodFacts), Box<dyn Error>> {
    let name = Name::new("ns", format!("pod-{number}"));
    let labels = json!({"app": format!("app-{}", number % 100), "all": "yes"});
    let facts = PodFacts {
        name: name.clone(),
        labels: serde_json::from_value(labels)?,
        addresses: vec![IpAddr::from([10, 244, u8::try_from(number >> 8)?, u8::try_from(number & 255)?])],
        ports: Vec::new(),
        node: None,
    };
    Ok((name, facts))
}

fn main() -> Result<(), Box<dyn Error>> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
    let mut engine = Engine::new(IpFamily::V4, vec!["10.244.0.0/16".parse()?]);
    let started = Instant::now();
    for number in 0..POLICIES {
        // Ten policies for each application, each with peers of its own, by labels and by addresses.
        let policy: NetworkPolicy = serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": format!("policy-{number}")},
            "spec": {
                "podSelector": {"matchLabels": {"app": format!("app-{}", number % 100)}},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": format!("app-{}", (number / 10) % 100)}}}],
                    "ports": [{"port": 1000 + number}]}],
                "egress": [{"to": [{"podSelector": {"matchLabels": {"all": "yes"}}},
                    {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}]}],
            },
        }))?;
        let name = Name::new("ns", format!("policy-{number}"));
        engine.set_policy(&name, Some(Policy::of(&policy)));
    }
    for number in 0..PODS {
        let (name, facts) = pod(number)?;
        engine.set_pod(&name, Some(facts));
    }
    println!("{POLICIES} policies and {PODS} pods on this node: decided in {:?}", started.elapsed());
    let mut table = Table::open(IpFamily::V4, "ferrite-policy-scale", None, OwnGenerations::default())?;
    let transaction = engine.rebuild();
    let (elements, chains) = (transaction.add.len(), transaction.chains.len());
    let started = Instant::now();
    table.apply(&transaction)?;
    println!("first transaction: {elements} elements, {chains} chains in {:?}", started.elapsed());
    for number in PODS..PODS + 5 {
        let (name, facts) = pod(number)?;
        let started = Instant::now();
        engine.set_pod(&name, Some(facts));
        let transaction = engine.take_changes();
        let decided = started.elapsed();
        table.apply(&transaction)?;
        println!(
            "one more pod: {} elements, {} chains; decided in {decided:?}, covered after {:?}",
            transaction.add.len(),
            transaction.chains.len(),
            started.elapsed()
        );
    }
    table.remove()?;
    Ok(())
}
