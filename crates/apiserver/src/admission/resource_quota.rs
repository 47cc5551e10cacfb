//! Quotas: a write that would use more than its namespace may is refused; one that fits is charged in the same
//! transaction, so that usage is never behind what is stored.

use super::{Attributes, Charges, Operation, Plugin};
use crate::managed;
use crate::options::WriteOptions;
use crate::registry::{View, stored};
use ferrite_api::quota::{charge, evaluator};
use ferrite_api::{Status, meta};
use ferrite_store::{Compare, LeaseId, Op};
use jiff::Timestamp;
use serde_json::{Map, Value};

pub(super) struct ResourceQuota;

impl Plugin for ResourceQuota {
    fn name(&self) -> &'static str {
        "ResourceQuota"
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
            Operation::Update => evaluator.counts_updates(attributes.subresource),
            Operation::Delete => false,
        };
        if !counts {
            return Ok(charges);
        }
        let (revisions, quotas): (Vec<_>, Vec<Value>) =
            view.entries("", "resourcequotas", attributes.namespace).unzip();
        let Some(resource) = view.resource("", "resourcequotas").filter(|_| !quotas.is_empty()) else {
            return Ok(charges);
        };
        let changed = charge(&evaluator, &quotas, object, attributes.old)
            .map_err(|refused| attributes.forbid(refused.to_string()))?;
        for (index, used) in changed {
            let old = &quotas[index];
            let mut new = old.clone();
            let used: Map<String, Value> =
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
