//! Quotas: a write that would use more than its namespace may is refused; one that fits is charged in the
//! same transaction, so that usage is never behind the stored objects.

use super::config::check_kind;
use super::{Attributes, Charges, Operation, Plugin};
use crate::managed;
use crate::options::WriteOptions;
use crate::registry::{View, stored};
use ferrite_api::quota::{Limited, QuotaError, charge, evaluator};
use ferrite_api::{Status, meta};
use ferrite_json::{Map, Value};
use ferrite_store::{Compare, LeaseId, Op};
use jiff::Timestamp;

pub(super) const NAME: &str = "ResourceQuota";

#[derive(Default)]
struct ResourceQuota {
    /// Resources that may only be used where a quota covers them.
    limited: Vec<Limited>,
}

pub(super) fn make(configuration: Option<&Value>) -> Result<Box<dyn Plugin>, String> {
    let Some(configuration) = configuration else { return Ok(Box::new(ResourceQuota::default())) };
    check_kind(configuration, "apiserver.config.k8s.io", "ResourceQuotaConfiguration").or_else(|why| {
        check_kind(configuration, "resourcequota.admission.k8s.io", "Configuration").map_err(|_| why)
    })?;
    let entries = configuration["limitedResources"].as_array().into_iter().flatten().enumerate();
    let limited = entries
        .map(|(n, entry)| Limited::parse(entry).map_err(|why| format!("limitedResources[{n}].{why}")))
        .collect::<Result<_, _>>()?;
    Ok(Box::new(ResourceQuota { limited }))
}

impl Plugin for ResourceQuota {
    fn name(&self) -> &'static str {
        NAME
    }

    fn charge(&self, view: &View, attributes: &Attributes<'_>, object: &Value) -> Result<Charges, Status> {
        let mut charges = Charges::default();
        if !attributes.resource.is_namespaced() {
            return Ok(charges);
        }
        let Some(evaluator) = evaluator(&attributes.resource.group, &attributes.resource.plural) else {
            return Ok(charges);
        };
        let counts = match attributes.operation {
            Operation::Create => attributes.subresource.is_none(),
            Operation::Update => evaluator.counts_update(attributes.subresource, attributes.old, object),
            Operation::Delete | Operation::Connect => false,
        };
        if !counts {
            return Ok(charges);
        }
        let (revisions, quotas): (Vec<_>, Vec<Value>) =
            view.entries("", "resourcequotas", attributes.namespace).unzip();
        if quotas.is_empty() && self.limited.is_empty() {
            return Ok(charges);
        }
        let Some(resource) = view.resource("", "resourcequotas") else { return Ok(charges) };
        let changed =
            charge(&evaluator, &self.limited, &quotas, object, attributes.old).map_err(|refused| {
                match refused {
                    // As upstream: this one is no refusal but a bare error.
                    QuotaError::UncoveredScopes(_) => Status::new(500, "", refused.to_string()),
                    _ => attributes.forbid(refused.to_string()),
                }
            })?;
        for (index, used) in changed {
            let old = &quotas[index];
            let mut new = old.clone();
            let used: Map =
                used.into_iter().map(|(name, amount)| (name, amount.to_string().into())).collect();
            new["status"]["used"] = used.into();
            let options = WriteOptions { field_manager: "kube-apiserver".into(), ..WriteOptions::default() };
            managed::on_write(resource, Some(old), &mut new, &options, Some("status"), Timestamp::now());
            let key = stored::key(resource, attributes.namespace, meta::name(old));
            charges.compares.push(Compare::ModifiedAt(key.clone(), revisions[index]));
            let value = stored::encode(resource, &new);
            charges.ops.push(Op::Put { key, value, lease: LeaseId::NONE });
        }
        Ok(charges)
    }
}
