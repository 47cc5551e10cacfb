//! OpenAPI: one v3 document per group and version, and one v2 document of everything, made from the schema when
//! somebody asks.

mod paths;
mod proto;
mod schemas;
mod v2;

use crate::http::{self, Answer, JSON};
use crate::options::Query;
use crate::registry::Table;
use ::http::{HeaderMap, HeaderValue, header};
use bytes::Bytes;
use ferrite_api::resource::Resource;
use schemas::{Dialect, Schemas};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Documents made so far, by group and version.
#[derive(Default)]
pub(crate) struct Documents {
    made: Mutex<BTreeMap<(String, String), Document>>,
    whole: OnceLock<[Document; 2]>,
}

#[derive(Clone)]
struct Document {
    hash: String,
    bytes: Bytes,
}

impl Documents {
    /// `/openapi/v3`: where the documents are. The hash in the address changes with the content.
    pub fn root(&self, table: &Table) -> Answer {
        let mut paths = Map::new();
        for (group, version) in group_versions(table) {
            let Some(document) = self.get(table, &group, &version) else { continue };
            let path = path_of(&group, &version);
            let url = format!("/openapi/v3/{path}?hash={}", document.hash);
            paths.insert(path, json!({"serverRelativeURL": url}));
        }
        http::json(200, &json!({"paths": paths}))
    }

    /// `/openapi/v2`: everything in one document, as JSON or protobuf.
    pub fn v2(&self, table: &Table, headers: &HeaderMap) -> Answer {
        let [json, protobuf] = self.whole.get_or_init(|| {
            let document = v2::make(table);
            [document.to_string().into_bytes(), proto::encode(&document)].map(|bytes| {
                let bytes = Bytes::from(bytes);
                Document { hash: hash(&bytes), bytes }
            })
        });
        let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let (document, content_type) = if accept.contains("proto-openapi.spec.v2@v1.0+protobuf") {
            (protobuf, "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
        } else {
            (json, JSON)
        };
        tagged(document, content_type, headers)
    }

    pub fn document(
        &self,
        table: &Table,
        group: &str,
        version: &str,
        headers: &HeaderMap,
        query: &Query,
    ) -> Answer {
        let Some(document) = self.get(table, group, version) else {
            return http::text(404, "404 page not found\n");
        };
        let mut answer = tagged(&document, JSON, headers);
        if query.get("hash").is_some_and(|h| h == document.hash) {
            let forever = HeaderValue::from_static("public, immutable");
            answer.headers_mut().insert(header::CACHE_CONTROL, forever);
        }
        answer
    }

    fn get(&self, table: &Table, group: &str, version: &str) -> Option<Document> {
        let key = (group.to_owned(), version.to_owned());
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(document) = made.get(&key) {
            return Some(document.clone());
        }
        let resources: Vec<&Resource> =
            table.rows().iter().map(|r| &**r).filter(|r| r.group == group && r.version == version).collect();
        if resources.is_empty() {
            return None;
        }
        let bytes = Bytes::from(make(&resources, group, version).to_string());
        let document = Document { hash: hash(&bytes), bytes };
        made.insert(key, document.clone());
        Some(document)
    }
}

/// A document with its tag, or the word that the client has it already.
fn tagged(document: &Document, content_type: &str, headers: &HeaderMap) -> Answer {
    let tag = format!("\"{}\"", document.hash);
    let known = headers.get(header::IF_NONE_MATCH).is_some_and(|v| v.as_bytes() == tag.as_bytes());
    let mut answer = if known {
        http::answer(304, content_type, Bytes::new())
    } else {
        http::answer(200, content_type, document.bytes.clone())
    };
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        answer.headers_mut().insert(header::ETAG, tag);
    }
    answer
}

fn group_versions(table: &Table) -> BTreeSet<(String, String)> {
    table.rows().iter().map(|r| (r.group.to_string(), r.version.to_string())).collect()
}

fn path_of(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

fn hash(bytes: &[u8]) -> String {
    let digest = bytes.iter().fold([0xcbf2_9ce4_8422_2325u64, 0x8422_2325_cbf2_9ce4], |[a, b], byte| {
        [(a ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3), (b ^ a).wrapping_mul(0x100_0000_01b3)]
    });
    format!("{:016X}{:016X}", digest[0], digest[1])
}

fn make(resources: &[&Resource], group: &str, version: &str) -> Value {
    let mut schemas = Schemas::new(Dialect::V3);
    let mut paths = Map::new();
    for resource in resources {
        paths::add_paths(&mut paths, &mut schemas, resource);
    }
    schemas.add_reachable();
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": crate::version::KUBERNETES_VERSION},
        "paths": paths,
        "components": {"schemas": schemas.done},
        "x-group-version": ferrite_api::gvk::api_version(group, version),
    })
}
