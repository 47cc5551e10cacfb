//! Lists and watch events taken apart without decoding the objects in them.

use std::borrow::Cow;

use kube::core::ListMeta;
use serde::Deserialize;
use serde_json::value::RawValue;

/// A list whose items are still text.
#[derive(Deserialize)]
pub(crate) struct Page<'a> {
    #[serde(default)]
    pub(crate) metadata: ListMeta,
    #[serde(borrow, default, deserialize_with = "or_empty")]
    pub(crate) items: Vec<&'a RawValue>,
}

/// Go writes an empty list as null in places.
fn or_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<&'de RawValue>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl<'a> Page<'a> {
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, kube::Error> {
        serde_json::from_slice(body).map_err(kube::Error::SerdeError)
    }
}

/// A watch event whose object is still text.
pub(crate) struct Event<'a> {
    pub(crate) kind: Cow<'a, str>,
    pub(crate) object: &'a str,
}

impl<'a> Event<'a> {
    /// None if the text is no event.
    pub(crate) fn parse(text: &'a str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Raw<'a> {
            #[serde(rename = "type", borrow)]
            kind: Cow<'a, str>,
            #[serde(borrow)]
            object: &'a RawValue,
        }
        let Raw { kind, object } = serde_json::from_str(text).ok()?;
        Some(Self { kind, object: object.get() })
    }
}

/// The members of an object that decide where and how it is kept.
#[derive(Deserialize)]
pub(crate) struct Head<'a> {
    #[serde(borrow)]
    pub(crate) metadata: HeadMeta<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HeadMeta<'a> {
    #[serde(borrow, default)]
    pub(crate) name: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub(crate) namespace: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub(crate) uid: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub(crate) resource_version: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub(crate) managed_fields: Option<&'a RawValue>,
}
