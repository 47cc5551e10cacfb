//! The kinds that clients read and write, and their one JSON codec.
//!
//! `k8s-openapi` types decode through generic code that every crate would compile anew. The bodies of
//! [`Object::decode`] and [`Object::encode`] are not generic, so that the decoder of a kind is compiled here, once.

use std::fmt;

use ferrite_json::{Value, json};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A kind that clients read and write: named by metadata, sharable between threads, with a JSON form.
///
/// A new kind is a row of the table at the end of this file.
pub trait Object: kube::Resource + Clone + fmt::Debug + Send + Sync + 'static {
    /// True for a type that holds metadata only: requests ask the server for no more.
    const METADATA_ONLY: bool = false;

    /// Decodes `json` as Go would: unknown fields are ignored, and null means the zero value.
    fn decode(json: &[u8]) -> Result<Self, DecodeError>;

    /// Encodes the object for a request body.
    fn encode(&self) -> Result<Vec<u8>, kube::Error>;
}

/// An object that does not have the form of its kind. The message never quotes the object, which may be a Secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("column {column}: {problem}")]
pub struct DecodeError {
    column: usize,
    problem: String,
}

impl DecodeError {
    fn new(error: &ferrite_json::Error) -> Self {
        let text = error.to_string();
        // `invalid type: string "…", expected i32 at line 1 column 7`: only the part after the quoted value is safe.
        let problem = match text.rfind(", expected ") {
            Some(at) => {
                let expected = &text[at + 2..];
                expected.rfind(" at line ").map_or(expected, |end| &expected[..end]).to_owned()
            }
            None if error.is_data() => "a value has the wrong form".to_owned(),
            None => "not JSON".to_owned(),
        };
        Self { column: error.column(), problem }
    }
}

impl From<DecodeError> for kube::Error {
    fn from(error: DecodeError) -> Self {
        Self::SerdeError(serde::de::Error::custom(error))
    }
}

pub(crate) fn decode<T: DeserializeOwned>(json: &[u8]) -> Result<T, DecodeError> {
    ferrite_json::from_slice(json).or_else(|error| {
        // Only an object that the type refuses is repaired: the repair costs more than the decoding.
        with_zero_values(json)
            .and_then(|repaired| ferrite_json::from_slice(&repaired).ok())
            .ok_or_else(|| DecodeError::new(&error))
    })
}

/// As [`decode`] for a type that borrows from the text, without the repair.
pub(crate) fn decode_borrowed<'a, T: serde::Deserialize<'a>>(text: &'a str) -> Result<T, DecodeError> {
    ferrite_json::from_str(text).map_err(|error| DecodeError::new(&error))
}

pub(crate) fn encode<T: Serialize>(object: &T) -> Result<Vec<u8>, kube::Error> {
    ferrite_json::to_vec(object).map_err(kube::Error::SerdeError)
}

/// The times that `k8s-openapi` insists on and Go does not, with the lists whose items have them.
const ZERO_TIMES: &[(&str, &str)] = &[("conditions", "lastTransitionTime"), ("series", "lastObservedTime")];
const ZERO_TIME: &str = "0001-01-01T00:00:00Z";

/// The object without nulls, which Go's decoder takes for zero values.
fn with_zero_values(json: &[u8]) -> Option<Vec<u8>> {
    let mut value: Value = ferrite_json::from_slice(json).ok()?;
    drop_nulls(&mut value);
    ferrite_json::to_vec(&value).ok()
}

/// Recursion is bounded by the parser's limit of 128 levels.
fn drop_nulls(value: &mut Value) {
    match value {
        Value::Array(items) => {
            items.retain(|item| !item.is_null());
            items.iter_mut().for_each(drop_nulls);
        }
        Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            for (list, time) in ZERO_TIMES {
                let Some(found) = members.get_mut(*list) else { continue };
                let items = match found {
                    Value::Array(items) => items.as_mut_slice(),
                    single => std::slice::from_mut(single),
                };
                for item in items.iter_mut().filter_map(Value::as_object_mut) {
                    if item.get(*time).is_none_or(Value::is_null) {
                        item.insert(*time, json!(ZERO_TIME));
                    }
                }
            }
            // Go takes any text for the type of an object within another; `k8s-openapi` insists on the right one.
            if let Some(Value::Array(templates)) = members.get_mut("volumeClaimTemplates") {
                for template in templates.iter_mut().filter_map(Value::as_object_mut) {
                    template.remove("apiVersion");
                    template.remove("kind");
                }
            }
            members.values_mut().for_each(drop_nulls);
        }
        _ => {}
    }
}

macro_rules! objects {
    ($($kind:ty $(: $metadata_only:literal)?),* $(,)?) => {$(
        impl Object for $kind {
            $(const METADATA_ONLY: bool = $metadata_only;)?

            fn decode(json: &[u8]) -> Result<Self, DecodeError> {
                decode(json)
            }

            fn encode(&self) -> Result<Vec<u8>, kube::Error> {
                encode(self)
            }
        }
    )*};
}

macro_rules! kinds {
    ($($kind:ty),* $(,)?) => {
        objects! { $($kind),* }

        /// Every kind of the table with its decoder.
        #[cfg(test)]
        fn decoders() -> Vec<(kube::core::GroupVersionKind, fn(&[u8]) -> Result<(), DecodeError>)> {
            vec![$((gvk::<$kind>(), |json| <$kind>::decode(json).map(drop))),*]
        }
    };
}

#[cfg(test)]
fn gvk<K: kube::Resource<DynamicType = ()>>() -> kube::core::GroupVersionKind {
    kube::core::GroupVersionKind::gvk(&K::group(&()), &K::version(&()), &K::kind(&()))
}

kinds! {
    k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy,
    k8s_openapi::api::apps::v1::ControllerRevision,
    k8s_openapi::api::apps::v1::DaemonSet,
    k8s_openapi::api::apps::v1::Deployment,
    k8s_openapi::api::apps::v1::ReplicaSet,
    k8s_openapi::api::apps::v1::StatefulSet,
    k8s_openapi::api::authentication::v1::SelfSubjectReview,
    k8s_openapi::api::authentication::v1::TokenRequest,
    k8s_openapi::api::authentication::v1::TokenReview,
    k8s_openapi::api::authorization::v1::SubjectAccessReview,
    k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler,
    k8s_openapi::api::batch::v1::CronJob,
    k8s_openapi::api::batch::v1::Job,
    k8s_openapi::api::certificates::v1::CertificateSigningRequest,
    k8s_openapi::api::certificates::v1alpha1::ClusterTrustBundle,
    k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle,
    k8s_openapi::api::certificates::v1beta1::PodCertificateRequest,
    k8s_openapi::api::coordination::v1::Lease,
    k8s_openapi::api::core::v1::Binding,
    k8s_openapi::api::core::v1::ConfigMap,
    k8s_openapi::api::core::v1::Endpoints,
    k8s_openapi::api::core::v1::Event,
    k8s_openapi::api::core::v1::Namespace,
    k8s_openapi::api::core::v1::Node,
    k8s_openapi::api::core::v1::PersistentVolume,
    k8s_openapi::api::core::v1::PersistentVolumeClaim,
    k8s_openapi::api::core::v1::Pod,
    k8s_openapi::api::core::v1::ReplicationController,
    k8s_openapi::api::core::v1::ResourceQuota,
    k8s_openapi::api::core::v1::Secret,
    k8s_openapi::api::core::v1::Service,
    k8s_openapi::api::core::v1::ServiceAccount,
    k8s_openapi::api::discovery::v1::EndpointSlice,
    k8s_openapi::api::events::v1::Event,
    k8s_openapi::api::flowcontrol::v1::FlowSchema,
    k8s_openapi::api::flowcontrol::v1::PriorityLevelConfiguration,
    k8s_openapi::api::networking::v1::IPAddress,
    k8s_openapi::api::networking::v1::Ingress,
    k8s_openapi::api::networking::v1::IngressClass,
    k8s_openapi::api::networking::v1::NetworkPolicy,
    k8s_openapi::api::networking::v1::ServiceCIDR,
    k8s_openapi::api::node::v1::RuntimeClass,
    k8s_openapi::api::policy::v1::PodDisruptionBudget,
    k8s_openapi::api::rbac::v1::ClusterRole,
    k8s_openapi::api::rbac::v1::ClusterRoleBinding,
    k8s_openapi::api::rbac::v1::Role,
    k8s_openapi::api::rbac::v1::RoleBinding,
    k8s_openapi::api::resource::v1::DeviceClass,
    k8s_openapi::api::resource::v1::ResourceClaim,
    k8s_openapi::api::resource::v1::ResourceClaimTemplate,
    k8s_openapi::api::resource::v1::ResourceSlice,
    k8s_openapi::api::scheduling::v1::PriorityClass,
    k8s_openapi::api::storage::v1::CSIDriver,
    k8s_openapi::api::storage::v1::CSINode,
    k8s_openapi::api::storage::v1::CSIStorageCapacity,
    k8s_openapi::api::storage::v1::StorageClass,
    k8s_openapi::api::storage::v1::VolumeAttachment,
    k8s_openapi::api::storage::v1::VolumeAttributesClass,
    k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration,
    k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService,
}

objects! {
    kube::core::DynamicObject,
    kube::core::PartialObjectMeta<kube::core::DynamicObject>: true,
}

#[cfg(test)]
mod tests {
    use ferrite_api::schema::{self, Kind, TypeRef};
    use ferrite_json::Map;
    use k8s_openapi::api::core::v1::{Pod, Secret, Service};

    use super::*;

    /// The contents of a generated object's members.
    #[derive(Clone, Copy, PartialEq)]
    enum Fill {
        Everything,
        /// Structs are there, and everything in them is null; lists and maps have a null beside a struct.
        Nulls,
    }

    /// `within` are the types around this one: schemas of definitions refer to themselves.
    fn object(type_: TypeRef, fill: Fill, within: &[&str]) -> Value {
        if within.contains(&type_.name) {
            return Value::Null;
        }
        let inner = [within, &[type_.name]].concat();
        let fields = type_
            .fields
            .iter()
            .filter(|field| !matches!(field.name, "apiVersion" | "kind") || !within.is_empty());
        let members: Map =
            fields.map(|field| (field.name.to_owned(), value(field.kind, fill, &inner))).collect();
        members.into()
    }

    fn value(kind: Kind, fill: Fill, within: &[&str]) -> Value {
        let scalar = |value: Value| if fill == Fill::Everything { value } else { Value::Null };
        match kind {
            Kind::String => scalar(json!("x")),
            Kind::Bool => scalar(json!(true)),
            Kind::Int32 | Kind::Int64 => scalar(json!(7)),
            Kind::Double => scalar(json!(1.5)),
            Kind::Bytes => scalar(json!("eA==")),
            Kind::Quantity => scalar(json!("1Gi")),
            Kind::IntOrString => scalar(json!("25%")),
            Kind::Time => scalar(json!("2026-01-02T03:04:05Z")),
            Kind::MicroTime => scalar(json!("2026-01-02T03:04:05.000006Z")),
            Kind::Duration => scalar(json!("1m0s")),
            Kind::Raw => scalar(json!({"a": 1})),
            Kind::Strings => scalar(json!(["x"])),
            Kind::Struct(type_) | Kind::SchemaOrArray(type_) => object(type_, fill, within),
            Kind::SchemaOrBool(_) => scalar(json!(true)),
            Kind::SchemaOrStrings(_) => scalar(json!(["x"])),
            Kind::List(item) => match fill {
                Fill::Everything => json!([value(*item, fill, within)]),
                Fill::Nulls => json!([Value::Null, value(*item, fill, within)]),
            },
            Kind::Map(item) => match fill {
                Fill::Everything => json!({"k": value(*item, fill, within)}),
                Fill::Nulls => json!({"n": Value::Null, "k": value(*item, fill, within)}),
            },
        }
    }

    #[test]
    fn every_kind_is_decoded_whole_and_full_of_nulls() {
        for (gvk, decode) in decoders() {
            let type_ = schema::kind(&gvk.group, &gvk.version, &gvk.kind).unwrap();
            for fill in [Fill::Everything, Fill::Nulls] {
                let json = object(type_, fill, &[]).to_string();
                assert_eq!(decode(json.as_bytes()), Ok(()), "{} of {}: {json}", gvk.kind, gvk.group);
            }
        }
    }

    #[test]
    fn null_is_the_zero_value_wherever_it_stands() {
        let service = Service::decode(
            br#"{"metadata":{"name":"a","labels":null,"finalizers":[null,"x"]},"spec":{"type":null,"ports":null},
                "status":{"conditions":[{"type":"T","status":"True","lastTransitionTime":null},{"type":"U"}]}}"#,
        )
        .unwrap();
        assert_eq!(service.metadata.finalizers.as_deref(), Some(&["x".to_owned()][..]));
        let conditions = service.status.unwrap().conditions.unwrap();
        assert_eq!(conditions.len(), 2);
        assert!(conditions.iter().all(|condition| condition.last_transition_time.0.to_string() == ZERO_TIME));
    }

    #[test]
    fn an_error_says_where_and_what_was_expected_without_the_content() {
        let error = Secret::decode(br#"{"metadata":{"name":"a"},"immutable":"hunter2"}"#).unwrap_err();
        assert_eq!(error.to_string(), "column 46: expected a boolean");
        let error = Pod::decode(b"{\"hunter2\":").unwrap_err();
        assert_eq!(error.to_string(), "column 11: not JSON");
    }
}
