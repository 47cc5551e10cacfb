//! OpenAPI: one v3 document per group and version, and one v2 document of everything, made from the schema when
//! somebody asks.

mod custom;
mod descriptions;
mod documents;
mod enums;
mod kept;
mod operations;
mod parameters;
mod paths;
mod proto;
mod proto_v3;
mod schemas;
mod v2;

pub(crate) use custom::SchemaOf;

use crate::aggregation::Discovered;
use crate::http::{self, JSON, Response};
use crate::options::Query;
use crate::registry::ResourceMap;
use ::http::{HeaderMap, HeaderValue, header};
use bytes::Bytes;
use ferrite_api::resource::Resource;
use ferrite_json::{Map, Value, json};
use kept::Kept;
use operations::PathItem;
use schemas::{Dialect, Schemas};
use std::collections::{BTreeMap, BTreeSet};

/// The documents of a server.
#[derive(Default)]
pub(crate) struct Documents(Kept);

#[derive(Clone)]
struct Document {
    hash: String,
    bytes: Bytes,
}

impl Documents {
    /// `/openapi/v3`: where the documents are. The hash in the address changes with the content.
    /// The documents of extension API servers are theirs, below the same address.
    pub fn root(
        &self,
        table: &ResourceMap,
        schema_of: SchemaOf<'_>,
        remote: &BTreeMap<(String, String), Discovered>,
    ) -> Response {
        let mut paths = Map::new();
        let known = paths_of(table);
        self.0.retain(&known);
        for path in known {
            let Some(hash) = self.hash_of(table, schema_of, &path) else { continue };
            let url = format!("/openapi/v3/{path}?hash={hash}");
            paths.insert(path, json!({"serverRelativeURL": url}));
        }
        for ((group, version), discovered) in remote {
            if let Some(url) = &discovered.openapi {
                paths.insert(format!("apis/{group}/{version}"), json!({"serverRelativeURL": url}));
            }
        }
        http::text(200, json!({"paths": paths}).to_string())
    }

    /// `/openapi/v2`: everything in one document, as JSON or protobuf.
    pub fn v2(&self, table: &ResourceMap, schema_of: SchemaOf<'_>, headers: &HeaderMap) -> Response {
        let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let protobuf = ["application/com.github.proto-openapi.spec.v2@v1.0+protobuf", PROTOBUF_V2];
        let Some(form) = Form::of(accept, protobuf) else { return bare(406) };
        let [json, protobuf] = self.0.whole(table.version).unwrap_or_else(|| {
            let document = v2::make(table, schema_of);
            let made = [document.to_string().into_bytes(), proto::encode(&document)].map(|bytes| {
                let bytes = Bytes::from(bytes);
                Document { hash: hash(&bytes), bytes }
            });
            self.0.put_whole(table.version, made.clone());
            made
        });
        match form {
            Form::Protobuf => tagged(&protobuf, PROTOBUF_V2, headers),
            Form::Json => tagged(&json, JSON, headers),
        }
    }

    /// `/openapi/v3/<path>`
    pub fn document(
        &self,
        table: &ResourceMap,
        schema_of: SchemaOf<'_>,
        path: &str,
        headers: &HeaderMap,
        query: &Query,
    ) -> Response {
        let Some(document) = self.get(table, schema_of, path) else { return bare(404) };
        let accept = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let protobuf = ["application/com.github.proto-openapi.spec.v3@v1.0+protobuf", PROTOBUF_V3];
        let mut answer = match Form::of(accept, protobuf) {
            None => return bare(406),
            Some(Form::Json) => tagged(&document, JSON, headers),
            // Few ask for it, so it is made from the JSON each time; the tag is the same for both.
            Some(Form::Protobuf) => {
                let made: Value = ferrite_json::from_slice(&document.bytes).unwrap_or_default();
                let bytes = Bytes::from(proto_v3::encode(&made));
                tagged(&Document { bytes, hash: document.hash.clone() }, PROTOBUF_V3, headers)
            }
        };
        answer.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept"));
        if let Some(asked) = query.get("hash") {
            if asked != document.hash {
                // The client has the hash of an older document: redirect it to the new one, as upstream
                // does.
                return redirect(&format!("/openapi/v3/{path}?hash={}", document.hash));
            }
            let forever = HeaderValue::from_static("public, immutable");
            answer.headers_mut().insert(header::CACHE_CONTROL, forever);
        }
        answer
    }

    /// Drops documents that nobody asks for, for as long as it is polled.
    pub async fn drop_unused(&self) {
        self.0.run().await;
    }

    fn hash_of(&self, table: &ResourceMap, schema_of: SchemaOf<'_>, path: &str) -> Option<String> {
        let known = self.0.hash(path, &stamp_of(table, path));
        known.or_else(|| self.get(table, schema_of, path).map(|document| document.hash))
    }

    fn get(&self, table: &ResourceMap, schema_of: SchemaOf<'_>, path: &str) -> Option<Document> {
        let stamp = stamp_of(table, path);
        if let Some(known) = self.0.get(path, &stamp) {
            return Some(known);
        }
        let bytes = Bytes::from(make_at(table, schema_of, path)?.to_string());
        let document = Document { hash: hash(&bytes), bytes };
        self.0.put(path, stamp, &document);
        Some(document)
    }
}

/// The definitions that a document is made of.
fn stamp_of(table: &ResourceMap, path: &str) -> String {
    let mut stamp = String::new();
    let Some((group, version)) = path.strip_prefix("apis/").and_then(|rest| rest.split_once('/')) else {
        return stamp;
    };
    for row in table.rows().iter().filter(|row| row.group == group && row.version == version) {
        if let Some(custom) = &row.custom {
            stamp.push_str(&custom.kind.stamp);
            stamp.push(' ');
        }
    }
    stamp
}

/// A document with its tag, or the word that the client has it already.
fn tagged(document: &Document, content_type: &'static str, headers: &HeaderMap) -> Response {
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

const PROTOBUF_V3: &str = "application/com.github.proto-openapi.spec.v3.v1.0+protobuf";

const PROTOBUF_V2: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// The forms a document has.
enum Form {
    Json,
    Protobuf,
}

impl Form {
    /// The first of an `Accept` header that there is. `protobuf` has the names of that form.
    fn of(accept: &str, protobuf: [&str; 2]) -> Option<Self> {
        if accept.trim().is_empty() {
            return Some(Self::Json);
        }
        accept.split(',').find_map(|clause| match clause.split(';').next().unwrap_or_default().trim() {
            "application/json" | "application/*" | "*/*" => Some(Self::Json),
            other => protobuf.contains(&other).then_some(Self::Protobuf),
        })
    }
}

fn redirect(to: &str) -> Response {
    let mut answer = bare(301);
    if let Ok(to) = HeaderValue::from_str(to) {
        answer.headers_mut().insert(header::LOCATION, to);
    }
    answer
}

/// An answer without a body, and so without a content type.
fn bare(code: u16) -> Response {
    let mut answer = http::text(code, "");
    answer.headers_mut().remove(header::CONTENT_TYPE);
    answer
}

/// Documents that are not of a version: they describe paths without a kind.
const PLAIN: &[&str] = &[".well-known/openid-configuration", "openid/v1/jwks", "version"];

fn paths_of(table: &ResourceMap) -> BTreeSet<String> {
    let mut paths: BTreeSet<String> = PLAIN.iter().chain(&["api", "apis"]).map(|p| (*p).to_owned()).collect();
    for resource in table.rows() {
        paths.insert(path_of(&resource.group, &resource.version));
        if !resource.group.is_empty() && resource.custom.is_none() {
            paths.insert(format!("apis/{}", resource.group));
        }
    }
    paths
}

fn make_at(table: &ResourceMap, schema_of: SchemaOf<'_>, path: &str) -> Option<Value> {
    let documented = |make: &dyn Fn(&mut Schemas) -> Option<PathItem>| {
        let mut schemas = Schemas::new(Dialect::V3);
        let mut paths = Map::new();
        if let Some(item) = make(&mut schemas) {
            paths::put(&mut paths, &item);
        }
        finish(schemas, paths, "", "v1")
    };
    let resources = |group: &str, version: &str| -> Vec<&Resource> {
        table.rows().iter().map(|r| &**r).filter(|r| r.group == group && r.version == version).collect()
    };
    let (group, version) = match path.split('/').collect::<Vec<_>>().as_slice() {
        ["apis", group] if table.rows().iter().any(|r| r.group == *group && r.custom.is_none()) => {
            return Some(documented(&|schemas| Some(documents::group(group, schemas))));
        }
        ["api"] | ["apis"] => return Some(documented(&|schemas| documents::plain(path, schemas))),
        _ if PLAIN.contains(&path) => return Some(documented(&|schemas| documents::plain(path, schemas))),
        ["api", version] => ("", *version),
        ["apis", group, version] => (*group, *version),
        _ => return None,
    };
    let resources = resources(group, version);
    (!resources.is_empty()).then(|| make(&resources, schema_of, group, version))
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

fn make(resources: &[&Resource], schema_of: SchemaOf<'_>, group: &str, version: &str) -> Value {
    let mut schemas = Schemas::new(Dialect::V3);
    let mut paths = Map::new();
    let built_in = resources.iter().any(|r| r.custom.is_none());
    if built_in {
        paths::put(&mut paths, &documents::version(group, version, &mut schemas));
    }
    for resource in resources {
        for item in operations::of(resource, &mut schemas, schema_of) {
            paths::put(&mut paths, &item);
        }
    }
    let mut document = finish(schemas, paths, group, version);
    let options = "/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions";
    if !built_in {
        if let Some(options) = document.pointer_mut(options) {
            options["x-kubernetes-group-version-kind"] = custom::delete_options();
        }
        // As upstream, where another server makes these documents.
        document["info"] = json!({"title": "Kubernetes CRD Swagger", "version": "v0.1.0"});
        if let Some(components) = document["components"].as_object_mut() {
            components.remove("securitySchemes");
        }
    }
    document
}

/// The version of the API that documents are of: without the patch level, as upstream.
fn api_version() -> &'static str {
    let version = crate::version::KUBERNETES_VERSION.trim_start_matches('v');
    version.rsplit_once('.').map_or(version, |(minor, _)| minor)
}

/// The authentication of clients, as far as the documents can express it.
fn security_schemes() -> Value {
    json!({"BearerToken": {
        "type": "apiKey",
        "description": "Bearer Token authentication",
        "name": "authorization",
        "in": "header",
    }})
}

fn finish(mut schemas: Schemas, paths: Map, group: &str, version: &str) -> Value {
    schemas.add_reachable(group, version);
    let mut components = json!({"securitySchemes": security_schemes()});
    if !schemas.done.is_empty() {
        components["schemas"] = schemas.done.into();
    }
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": api_version()},
        "paths": paths,
        "components": components,
    })
}
