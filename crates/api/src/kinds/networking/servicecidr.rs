//! ServiceCIDRs: the ranges services get their addresses from.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, strings};
use crate::kinds::common::cell;
use crate::kinds::common::check::{Cidr, IMMUTABLE, NOT_A_CIDR};
use crate::kinds::common::row::{NAME, shown};
use crate::resource::{Column, StatusUse, Strategy};
use ferrite_json::{Value, json};
use jiff::Timestamp;

pub(in crate::kinds) struct ServiceCidrs;

impl Strategy for ServiceCidrs {
    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec").child("cidrs");
        let ranges = strings(&object["spec"], "cidrs");
        if ranges.is_empty() {
            return vec![FieldError::required(&path, "at least one CIDR required")];
        }
        if ranges.len() > 2 {
            let shown = json!({"CIDRs": ranges});
            return vec![FieldError::invalid(&path, shown, "may only hold up to 2 values")];
        }
        let parsed: Vec<Option<Cidr>> = ranges.iter().map(|r| Cidr::parse(r)).collect();
        let mut errors = Vec::new();
        if let [Some(first), Some(second)] = parsed.as_slice()
            && first.address.is_ipv4() == second.address.is_ipv4()
        {
            errors.push(FieldError::invalid(
                &path,
                ranges.clone(),
                "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64",
            ));
        }
        for (index, (range, parsed)) in ranges.iter().zip(parsed).enumerate() {
            let path = path.index(index);
            match parsed {
                None => errors.push(FieldError::invalid(&path, *range, NOT_A_CIDR)),
                Some(parsed) if !parsed.is_canonical() => errors.push(FieldError::invalid(
                    &path,
                    *range,
                    "must not have bits set beyond the prefix length",
                )),
                Some(parsed) => {
                    let canonical = parsed.to_string();
                    if canonical != *range {
                        errors.push(FieldError::invalid(
                            &path,
                            *range,
                            format!("must be in canonical form ({canonical:?})"),
                        ));
                    }
                }
            }
        }
        errors
    }

    /// Ranges stay; one of the other family may join.
    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("spec").child("cidrs");
        let (is, was) = (strings(&new["spec"], "cidrs"), strings(&old["spec"], "cidrs"));
        if is == was {
            return Vec::new();
        }
        if is.len() < was.len() {
            return vec![FieldError::invalid(&path, new["spec"]["cidrs"].clone(), IMMUTABLE)];
        }
        let changed: FieldErrors = is
            .iter()
            .zip(&was)
            .enumerate()
            .filter(|(_, (is, was))| is != was)
            .map(|(index, (is, _))| FieldError::invalid(&path.index(index), *is, IMMUTABLE))
            .collect();
        if changed.is_empty() { self.validate(new) } else { changed }
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("CIDRs"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![cell::name(object), strings(&object["spec"], "cidrs").join(",").into(), cell::age(object, now)]
    }
}
