//! The address of the proxy in the status of Ingresses.

use crate::class::{Standing, standing};
use ferrite_client::{Api, Controller, Informer, ObjectKey, Scope, is_not_found};
use ferrite_json::json;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass, IngressLoadBalancerIngress};
use kube::api::{Patch, PatchParams};
use std::net::IpAddr;
use std::sync::Arc;

/// The addresses to write, or None to leave the status alone. An Ingress that has become another's loses our addresses,
/// and no others.
fn decide(ingress: &Ingress, standing: Standing, own: &[IpAddr]) -> Option<Vec<String>> {
    let written: Vec<String> = ingress
        .status
        .iter()
        .filter_map(|status| status.load_balancer.as_ref()?.ingress.as_ref())
        .flatten()
        .map(|IngressLoadBalancerIngress { ip, hostname, .. }| {
            ip.clone().or_else(|| hostname.clone()).unwrap_or_default()
        })
        .collect();
    let own: Vec<String> = own.iter().map(ToString::to_string).collect();
    match standing {
        Standing::Ours => (written != own).then_some(own),
        Standing::Foreign | Standing::WithParameters => (!own.is_empty() && written == own).then(Vec::new),
    }
}

/// Keeps the status of Ingresses. The client may write it.
pub(crate) fn start(
    ingresses: &Informer<Ingress>,
    classes: &Informer<IngressClass>,
    client: kube::Client,
    own: Arc<[IpAddr]>,
    scope: &Scope,
) {
    let all = ingresses.clone();
    let (read, of_class) = (ingresses.clone(), classes.clone());
    Controller::new("ingress-status", 2, scope)
        .reconciles(ingresses)
        // A class decides about Ingresses whose names are not known here: there are few classes, and they rarely change.
        .watches(classes, move |_, queue| {
            for key in all.keys() {
                queue.add((*key).clone());
            }
        })
        .run(move |key: ObjectKey| {
            let wanted = read.get(&key).and_then(|ingress| {
                let addresses = decide(&ingress, standing(&ingress, &of_class.list()), &own)?;
                Some(json!(addresses.into_iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>()))
            });
            let api = Api::<Ingress>::namespaced(client.clone(), &key.namespace);
            async move {
                let Some(addresses) = wanted else { return Ok(None) };
                let patch = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": addresses}}}));
                match api.patch_status(&key.name, &PatchParams::default(), &patch).await {
                    Ok(_) => Ok(None),
                    Err(error) if is_not_found(&error) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        });
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn addresses_are_written_once_and_taken_back() {
        let with = |ips: &[&str]| -> Ingress {
            let ips: Vec<_> = ips.iter().map(|ip| json!({"ip": ip})).collect();
            serde_json::from_value(
                json!({"metadata": {"name": "x"}, "status": {"loadBalancer": {"ingress": ips}}}),
            )
            .unwrap()
        };
        let own: Vec<IpAddr> = vec!["10.0.0.1".parse().unwrap()];
        let written = Some(vec!["10.0.0.1".to_owned()]);
        for (what, ingress, standing, want) in [
            ("new", Ingress::default(), Standing::Ours, written.clone()),
            ("written", with(&["10.0.0.1"]), Standing::Ours, None),
            ("an old address", with(&["10.0.0.9"]), Standing::Ours, written),
            ("given away", with(&["10.0.0.1"]), Standing::Foreign, Some(vec![])),
            ("another's", with(&["192.0.2.1"]), Standing::Foreign, None),
            ("nobody's", Ingress::default(), Standing::Foreign, None),
        ] {
            assert_eq!(decide(&ingress, standing, &own), want, "{what}");
        }
    }
}
