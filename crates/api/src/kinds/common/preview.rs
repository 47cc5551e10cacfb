//! Kinds that exist only in beta or alpha versions, served when asked for: their shape, the columns of
//! their tables, and the difference between specification and status.

use crate::kinds::common::access::text;
use crate::kinds::common::cell;
use crate::kinds::common::row::{NAME, number, shown};
use crate::resource::{Column, StatusUse, Strategy};
use crate::table::{NONE, since};
use ferrite_json::Value;
use jiff::Timestamp;

/// The content of a column.
pub(in crate::kinds) enum Cell {
    Age,
    /// The text at a JSON pointer.
    Text(&'static str),
    /// Number of entries of the list at a pointer.
    Count(&'static str),
    /// The word for the first condition that holds, or the last word when none does.
    Condition(&'static [(&'static str, &'static str)], &'static str),
    /// Two fields of every entry of a list, `a=b,c=d`.
    Joined(&'static str, &'static str, &'static str),
    /// The time at a pointer, as an age.
    Since(&'static str),
    /// The keys of the object at a pointer.
    Keys(&'static str),
}

/// A kind that is shape and table.
pub(in crate::kinds) struct Preview {
    pub columns: &'static [Column],
    pub cells: &'static [Cell],
    pub selectable: &'static [&'static str],
    pub generation: &'static [&'static str],
    /// Parts that a write of the status cannot set.
    pub status_resets: &'static [&'static str],
}

/// A write of the status sets nothing else.
const ALONE: &[&str] = &["spec", "metadata"];

impl Preview {
    const fn named(columns: &'static [Column], cells: &'static [Cell]) -> Self {
        Self { columns, cells, selectable: &[], generation: &["spec"], status_resets: ALONE }
    }
}

impl Strategy for Preview {
    fn reset_fields(&self, subresource: Option<&str>) -> Option<&'static [&'static str]> {
        (subresource == Some("status")).then_some(self.status_resets)
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        self.generation
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        self.selectable
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        text(&object["spec"], field.strip_prefix("spec.").unwrap_or_default()).to_owned()
    }

    fn columns(&self) -> &'static [Column] {
        self.columns
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let at = |pointer: &str| object.pointer(pointer).unwrap_or(&Value::Null);
        std::iter::once(cell::name(object))
            .chain(self.cells.iter().map(|cell| {
                match cell {
                    Cell::Age => cell::age(object, now),
                    Cell::Text(pointer) => cell::int_or_string(at(pointer), ""),
                    Cell::Count(pointer) => at(pointer).as_array().map_or(0, Vec::len).into(),
                    Cell::Condition(words, otherwise) => words
                        .iter()
                        .find(|(kind, _)| cell::has_condition(&object["status"], kind))
                        .map_or(*otherwise, |(_, word)| *word)
                        .into(),
                    Cell::Joined(pointer, key, value) => at(pointer)
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|entry| format!("{}={}", text(entry, key), text(entry, value)))
                        .collect::<Vec<_>>()
                        .join(",")
                        .into(),
                    Cell::Since(pointer) => match at(pointer).as_str() {
                        Some(time) => since(time, now).into(),
                        None => "".into(),
                    },
                    Cell::Keys(pointer) => {
                        let keys: Vec<&str> = at(pointer)
                            .as_object()
                            .into_iter()
                            .flatten()
                            .map(|(key, _)| key.as_str())
                            .collect();
                        if keys.is_empty() { NONE.into() } else { keys.join(",").into() }
                    }
                }
            }))
            .collect()
    }
}

pub(in crate::kinds) const LEASE_CANDIDATES: Preview = Preview {
    generation: &[],
    ..Preview::named(
        const { &[NAME, shown("LeaseName"), shown("BinaryVersion"), shown("EmulationVersion"), shown("Age")] },
        &[
            Cell::Text("/spec/leaseName"),
            Cell::Text("/spec/binaryVersion"),
            Cell::Text("/spec/emulationVersion"),
            Cell::Age,
        ],
    )
};

pub(in crate::kinds) const STORAGE_VERSIONS: Preview = Preview {
    generation: &[],
    ..Preview::named(
        const { &[NAME, shown("CommonEncodingVersion"), shown("StorageVersions"), shown("Age")] },
        &[
            Cell::Text("/status/commonEncodingVersion"),
            Cell::Joined("/status/storageVersions", "apiServerID", "encodingVersion"),
            Cell::Age,
        ],
    )
};

pub(in crate::kinds) const DEVICE_TAINT_RULES: Preview = Preview::named(
    const { &[NAME, shown("Key"), shown("Value"), shown("Effect"), shown("TimeAdded"), shown("Age")] },
    &[
        Cell::Text("/spec/taint/key"),
        Cell::Text("/spec/taint/value"),
        Cell::Text("/spec/taint/effect"),
        Cell::Since("/spec/taint/timeAdded"),
        Cell::Age,
    ],
);

pub(in crate::kinds) const RESOURCE_POOL_STATUS_REQUESTS: Preview = Preview {
    status_resets: &["spec"],
    ..Preview::named(
        const {
            &[
                NAME,
                shown("Driver"),
                shown("Total"),
                shown("Available"),
                shown("Allocated"),
                shown("Unavailable"),
                shown("Errors"),
                number("Pools"),
                shown("Status"),
                shown("Completed"),
            ]
        },
        &[
            Cell::Text("/spec/driver"),
            Cell::Text("/status/totalDevices"),
            Cell::Text("/status/availableDevices"),
            Cell::Text("/status/allocatedDevices"),
            Cell::Text("/status/unavailableDevices"),
            Cell::Text("/status/validationErrors"),
            Cell::Count("/status/pools"),
            Cell::Condition(&[("Complete", "Complete"), ("Failed", "Failed")], "Pending"),
            Cell::Since("/status/completionTime"),
        ],
    )
};

pub(in crate::kinds) const POD_GROUPS: Preview = Preview::named(
    const { &[NAME, shown("Policy"), shown("Workload"), shown("Status"), shown("Age")] },
    &[
        Cell::Keys("/spec/schedulingPolicy"),
        Cell::Text("/spec/podGroupTemplateRef/workload/workloadName"),
        Cell::Condition(&[("PodGroupScheduled", "Scheduled")], "Pending"),
        Cell::Age,
    ],
);

pub(in crate::kinds) const WORKLOADS: Preview = Preview::named(const { &[NAME, shown("Age")] }, &[Cell::Age]);
