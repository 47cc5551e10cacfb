//! Conversion webhooks: objects of a custom kind in the version that somebody asks for.
//!
//! Reads replace a stored entry by one that holds the object in the version of the request ([`Converter::entries`]);
//! everything after that treats it as if it had been stored so. Writes are converted to the stored version before they
//! are encoded ([`Converter::for_storage`]).

use super::converted::{Asking, ConvertedEntries, Found};
use super::metrics::{self, Failure};
use crate::outbound::{Call, Credentials, Destination, DestinationError, Outbound, until};
use crate::registry::{View, Viewer, stored};
use ferrite_api::custom::{ConversionWebhook, Custom};
use ferrite_api::field::Path;
use ferrite_api::resource::Resource;
use ferrite_api::{Gvk, Status, meta, meta_validation};
use ferrite_json::{Value, json};
use ferrite_store::{Change, Entry, Plain};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Upstream's timeout of its client.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Objects and about bytes that one question has.
const BATCH: usize = 500;
const BATCH_BYTES: usize = 2 << 20;
/// The largest answer.
const LIMIT: usize = 32 << 20;
/// Definitions whose destinations are kept.
const KEPT: usize = 256;

/// Why an answer cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum AnswerError {
    #[error("failed: {0}")]
    Failed(String),
    #[error("returned {got} objects, expected {expected}")]
    Count { got: usize, expected: usize },
    #[error("returned invalid converted object at index {index}: {why}")]
    Object { index: usize, why: String },
    #[error("returned invalid metadata in object at index {index}: {why}")]
    Metadata { index: usize, why: String },
}

impl AnswerError {
    fn failure(&self) -> Failure {
        match self {
            Self::Failed(_) => Failure::Malformed,
            Self::Count { .. } => Failure::Partial,
            Self::Object { .. } | Self::Metadata { .. } => Failure::InvalidObject,
        }
    }
}

/// Converts through webhooks.
pub(crate) struct Converter {
    outbound: Arc<Outbound>,
    viewer: Viewer,
    converted: ConvertedEntries,
    /// By the stamp of the definition.
    known: Mutex<HashMap<String, Arc<Result<Destination, DestinationError>>>>,
}

/// Objects for one question, and where they belong.
#[derive(Default)]
struct Batch<'a> {
    places: Vec<(usize, Asking<'a>)>,
    objects: Vec<Value>,
    bytes: usize,
}

impl<'a> Batch<'a> {
    fn add(&mut self, at: usize, asking: Asking<'a>, object: Value, bytes: usize) {
        self.places.push((at, asking));
        self.objects.push(object);
        self.bytes += bytes;
    }

    fn is_full(&self) -> bool {
        self.objects.len() >= BATCH || self.bytes >= BATCH_BYTES
    }
}

/// The object of an entry that is stored in another version; none of one that needs no conversion.
fn unconverted(custom: &Custom, entry: &Entry) -> Option<Value> {
    let mut object = ferrite_json::from_slice::<Value>(entry.plain()).ok()?;
    custom.conversion_from(object["apiVersion"].as_str().unwrap_or_default())?;
    custom.complete_stored(&mut object);
    stored::set_version(&mut object, entry.modified);
    Some(object)
}

/// Returns true if objects of a resource may need conversion by a webhook.
pub(crate) fn converts(resource: &Resource) -> bool {
    resource.custom.as_ref().is_some_and(|custom| custom.kind.conversion.is_some())
}

impl Converter {
    pub fn new(outbound: Arc<Outbound>, viewer: Viewer) -> Self {
        Self { outbound, viewer, converted: ConvertedEntries::default(), known: Mutex::default() }
    }

    /// An object of one version as another one.
    pub async fn convert(
        self: &Arc<Self>,
        from: &Resource,
        to: &Resource,
        object: &Value,
    ) -> Result<Value, Status> {
        let webhook = to.custom.as_ref().and_then(|custom| {
            let version = object["apiVersion"].as_str().unwrap_or_default();
            Some((custom, custom.conversion_from(version)?))
        });
        match webhook {
            None => Ok(crate::admission::matching::converted(from, to, object)),
            Some((custom, webhook)) => {
                let converted = self.ask(to, custom, webhook, vec![object.clone()]).await?;
                let mut object = converted.into_iter().next().unwrap_or_default();
                to.from_storage(&mut object);
                Ok(object)
            }
        }
    }

    /// An object of a resource in the version in which it is stored, with the resource of that version. None where it
    /// needs no webhook.
    pub async fn for_storage(
        self: &Arc<Self>,
        resource: &Resource,
        object: &Value,
    ) -> Result<Option<(Resource, Value)>, Status> {
        let Some(custom) =
            resource.custom.as_ref().filter(|c| c.kind.conversion.is_some() && !c.is_storage())
        else {
            return Ok(None);
        };
        let storage = custom.storage_resource();
        let converted = self.convert(resource, &storage, object).await?;
        Ok(Some((storage, converted)))
    }

    /// One entry as of the version of a resource.
    pub async fn entry(
        self: &Arc<Self>,
        resource: &Resource,
        entry: &Arc<Entry>,
    ) -> Result<Arc<Entry>, Status> {
        if !converts(resource) {
            return Ok(Arc::clone(entry));
        }
        // Boxed, so that requests for other kinds stay small.
        let converted = Box::pin(self.entries(resource, vec![Arc::clone(entry)])).await?;
        converted.into_iter().next().ok_or_else(|| Status::internal("nothing was converted"))
    }

    /// Entries as of the version of a resource. Those that are stored in it stay as they are. Entries that others have
    /// converted, or are converting, are shared with them.
    pub async fn entries(
        self: &Arc<Self>,
        resource: &Resource,
        mut entries: Vec<Arc<Entry>>,
    ) -> Result<Vec<Arc<Entry>>, Status> {
        let Some((custom, webhook)) =
            resource.custom.as_ref().and_then(|c| Some((c, c.kind.conversion.as_ref()?)))
        else {
            return Ok(entries);
        };
        let version: Arc<str> = format!("{}/{}", custom.kind.stamp, resource.version).into();
        let mut left: Vec<usize> = (0..entries.len()).collect();
        while !left.is_empty() {
            let mut batch = Batch::default();
            let mut waiting = Vec::new();
            for at in std::mem::take(&mut left) {
                let Some(object) = unconverted(custom, &entries[at]) else { continue };
                match self.converted.find(&version, &entries[at]) {
                    Found::Made(entry) => entries[at] = entry,
                    Found::Asked(outcome) => waiting.push((at, outcome)),
                    Found::Ask(asking) => batch.add(at, asking, object, entries[at].plain().len()),
                }
                if batch.is_full() {
                    self.convert_batch(resource, custom, webhook, &mut entries, std::mem::take(&mut batch))
                        .await?;
                }
            }
            // The own questions come first: nobody waits for a reader that waits.
            self.convert_batch(resource, custom, webhook, &mut entries, batch).await?;
            for (at, outcome) in waiting {
                match outcome.outcome().await {
                    Some(outcome) => entries[at] = outcome?,
                    // The other reader went away.
                    None => left.push(at),
                }
            }
        }
        Ok(entries)
    }

    /// Asks for the objects of a batch, and puts what they become in the place of their entries.
    async fn convert_batch(
        self: &Arc<Self>,
        resource: &Resource,
        custom: &Custom,
        webhook: &ConversionWebhook,
        entries: &mut [Arc<Entry>],
        batch: Batch<'_>,
    ) -> Result<(), Status> {
        if batch.objects.is_empty() {
            return Ok(());
        }
        match self.ask(resource, custom, webhook, batch.objects).await {
            Ok(converted) => {
                for ((at, asking), object) in batch.places.into_iter().zip(converted) {
                    let entry = Arc::new(Entry {
                        value: stored::encode_as_is(&object),
                        plain: Plain::default(),
                        ..(*entries[at]).clone()
                    });
                    asking.made(&entry);
                    entries[at] = entry;
                }
                Ok(())
            }
            Err(status) => {
                batch.places.into_iter().for_each(|(_, asking)| asking.failed(&status));
                Err(status)
            }
        }
    }

    /// Drops converted entries that are old, for as long as it is polled.
    pub async fn drop_old(&self) {
        self.converted.drop_old().await;
    }

    /// Changes as watchers of a version see them.
    pub async fn changes(
        self: &Arc<Self>,
        resource: &Resource,
        mut changes: Vec<Change>,
    ) -> Result<Vec<Change>, Status> {
        if !converts(resource) {
            return Ok(changes);
        }
        let all = changes.iter().flat_map(|c| c.entry.iter().chain(&c.previous)).cloned().collect();
        let mut converted = self.entries(resource, all).await?.into_iter();
        for change in &mut changes {
            for place in [&mut change.entry, &mut change.previous] {
                if place.is_some() {
                    *place = converted.next();
                }
            }
        }
        Ok(changes)
    }

    fn destination(
        &self,
        custom: &Custom,
        webhook: &ConversionWebhook,
    ) -> Arc<Result<Destination, DestinationError>> {
        let stamp = custom.kind.stamp.to_string();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(destination) = known.get(&stamp) {
            return Arc::clone(destination);
        }
        if known.len() >= KEPT {
            known.clear();
        }
        let made = Arc::new(Destination::parse(&webhook.client_config, &Credentials::default()));
        known.insert(stamp, Arc::clone(&made));
        made
    }

    /// Asks the webhook for objects in the version of a resource, and counts the call.
    async fn ask(
        self: &Arc<Self>,
        resource: &Resource,
        custom: &Custom,
        webhook: &ConversionWebhook,
        objects: Vec<Value>,
    ) -> Result<Vec<Value>, Status> {
        let from = objects.first().and_then(|object| object["apiVersion"].as_str()).unwrap_or_default();
        let from = from.rsplit('/').next().unwrap_or_default().to_owned();
        let started = Instant::now();
        let converted = self.post(resource, custom, webhook, objects).await;
        let failure = converted.as_ref().err().map(|(failure, _)| *failure);
        let versions = (from.as_str(), &*resource.version);
        metrics::converted(&custom.kind.definition, versions, failure, started.elapsed());
        converted.map_err(|(_, status)| status)
    }

    async fn post(
        self: &Arc<Self>,
        resource: &Resource,
        custom: &Custom,
        webhook: &ConversionWebhook,
        objects: Vec<Value>,
    ) -> Result<Vec<Value>, (Failure, Status)> {
        let text = |object: &Value, key: &str| object[key].as_str().unwrap_or_default().to_owned();
        let first = objects.first().map(|object| (text(object, "apiVersion"), text(object, "kind")));
        let (version, kind) = first.unwrap_or_default();
        let gvk = Gvk::from_api_version(&version, &kind);
        let named = gvk
            .map_or_else(|| kind.clone(), |gvk| format!("{}/{}, Kind={}", gvk.group, gvk.version, gvk.kind));
        let failed = |why: &dyn std::fmt::Display| {
            Status::new(500, "", format!("conversion webhook for {named} {why}"))
        };
        let uncalled = |why: &dyn std::fmt::Display| (Failure::Call, failed(why));
        let api_version = webhook.review_versions.iter().find_map(|version| match version.as_str() {
            "v1" => Some("apiextensions.k8s.io/v1"),
            "v1beta1" => Some("apiextensions.k8s.io/v1beta1"),
            _ => None,
        });
        let Some(api_version) = api_version else {
            return Err(uncalled(&"failed: it takes no version of ConversionReview that this server knows"));
        };
        let destination = self.destination(custom, webhook);
        let destination = match &*destination {
            Ok(destination) => destination,
            Err(error) => return Err(uncalled(&format_args!("failed: {error}"))),
        };
        let uid = uuid::Uuid::new_v4().to_string();
        let desired = resource.api_version();
        let question = json!({
            "kind": "ConversionReview", "apiVersion": api_version,
            "request": {"uid": uid, "desiredAPIVersion": desired, "objects": objects},
        });
        let query = format!("timeout={}s", TIMEOUT.as_secs());
        let call = Call {
            destination,
            body: question.to_string().into(),
            query: &query,
            deadline: until(TIMEOUT),
            limit: LIMIT,
        };
        drop(question);
        let view: View = self.viewer.view(self);
        let answered = self.outbound.call(&view, call).await.map_err(|error| {
            uncalled(&format_args!("failed: Post {:?}: {error}", destination.url(&query)))
        })?;
        if !(200..=206).contains(&answered.code) {
            return Err(uncalled(&format_args!(
                "failed: the webhook answered with status {}",
                answered.code
            )));
        }
        let checked = check(api_version, &uid, &desired, objects, &answered.body);
        checked.map_err(|error| (error.failure(), failed(&error)))
    }
}

/// Checks an answer: as many objects, in order, of the same names, and metadata that has not changed but for labels and
/// annotations.
fn check(
    api_version: &str,
    uid: &str,
    desired: &str,
    originals: Vec<Value>,
    body: &[u8],
) -> Result<Vec<Value>, AnswerError> {
    let fail = |why: String| Err(AnswerError::Failed(why));
    let review = ferrite_api::codec::json::decode_any(body)
        .map_err(|e| AnswerError::Failed(format!("couldn't get version/kind; json parse error: {e}")))?;
    let mut review = review.value;
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    if api_version == "apiextensions.k8s.io/v1" {
        let (version, kind) = (text(&review, "apiVersion"), text(&review, "kind"));
        if (version.as_str(), kind.as_str()) != (api_version, "ConversionReview") {
            let version = if version.is_empty() { "/".to_owned() } else { version };
            return fail(format!(
                "expected webhook response of apiextensions.k8s.io/v1, Kind=ConversionReview, got {version}, Kind={kind}"
            ));
        }
    }
    if !review["response"].is_object() {
        return fail("no response provided".to_owned());
    }
    let response = &mut review["response"];
    let answered = text(response, "uid");
    if api_version == "apiextensions.k8s.io/v1" && answered != uid {
        return fail(format!("expected response.uid={uid:?}, got {answered:?}"));
    }
    let status = text(&response["result"], "status");
    if status != "Success" {
        return fail(match text(&response["result"], "message") {
            message if message.is_empty() => format!("response.result.status was '{status}', not 'Success'"),
            message => message,
        });
    }
    let converted = match response["convertedObjects"].take() {
        Value::Array(objects) => objects,
        _ => Vec::new(),
    };
    if converted.len() != originals.len() {
        return Err(AnswerError::Count { got: converted.len(), expected: originals.len() });
    }
    let pairs = originals.into_iter().zip(converted).enumerate();
    pairs.map(|(index, (original, object))| check_object(index, desired, original, object)).collect()
}

fn check_object(
    index: usize,
    desired: &str,
    original: Value,
    mut object: Value,
) -> Result<Value, AnswerError> {
    let bad = |why: String| Err(AnswerError::Object { index, why });
    if !object.is_object() {
        return bad("it is no object".to_owned());
    }
    let version = object["apiVersion"].as_str().unwrap_or_default();
    if version != desired {
        return bad(format!("invalid groupVersion (expected {desired}, received {version})"));
    }
    if object["kind"] != original["kind"] {
        let kind = |value: &Value| value["kind"].as_str().unwrap_or_default().to_owned();
        return bad(format!("invalid kind (expected {}, received {})", kind(&original), kind(&object)));
    }
    for (field, name) in [("name", "name"), ("namespace", "namespace"), ("uid", "UID")] {
        let (expected, got) = (meta::str(&original, field), meta::str(&object, field));
        if expected != got {
            return bad(format!("must have the same {name}: {expected} != {got}"));
        }
    }
    let wrong = |why: String| Err(AnswerError::Metadata { index, why });
    let given = object["metadata"].take();
    if !given.is_object() {
        return wrong("missing metadata in converted object".to_owned());
    }
    let mut metadata = original["metadata"].clone();
    for field in ["labels", "annotations"] {
        let kept = &mut metadata[field];
        let value = given[field].clone();
        match &value {
            Value::Null => {}
            Value::Object(map) => {
                if let Some((key, _)) = map.iter().find(|(_, value)| value.as_str().is_none()) {
                    return wrong(format!("metadata.{field}[{key}] must be a string"));
                }
                if *kept != value {
                    let path = Path::new("metadata").child(field);
                    let errors = match field {
                        "labels" => meta_validation::validate_labels(&value, &path),
                        _ => meta_validation::validate_annotations(&value, &path),
                    };
                    if let Some(error) = errors.first() {
                        return wrong(error.to_string());
                    }
                }
            }
            _ => return wrong(format!("invalid metadata.{field} in converted object")),
        }
        *kept = value;
        if kept.is_null()
            && let Some(map) = metadata.as_object_mut()
        {
            map.remove(field);
        }
    }
    object["metadata"] = metadata;
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn original() -> Value {
        json!({
            "apiVersion": "g/v1", "kind": "K", "spec": {"a": 1},
            "metadata": {"name": "n", "namespace": "s", "uid": "u", "labels": {"a": "b"}, "finalizers": ["x/y"]},
        })
    }

    fn answer(objects: Value) -> Value {
        json!({
            "kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1",
            "response": {"uid": "q", "result": {"status": "Success"}, "convertedObjects": objects},
        })
    }

    fn converted(metadata: Value) -> Value {
        json!({"apiVersion": "g/v2", "kind": "K", "spec": {"b": 1}, "metadata": metadata})
    }

    fn checked(answer: &Value) -> Result<Vec<Value>, AnswerError> {
        check("apiextensions.k8s.io/v1", "q", "g/v2", vec![original()], answer.to_string().as_bytes())
    }

    #[test]
    fn only_labels_and_annotations_of_the_metadata_change() {
        let same = json!({"name": "n", "namespace": "s", "uid": "u"});
        let mut changed = same.clone();
        changed["labels"] = json!({"c": "d"});
        changed["annotations"] = json!({"e": "f"});
        changed["finalizers"] = json!([]);
        changed["generation"] = 9.into();
        let got = checked(&answer(json!([converted(changed)]))).expect("an object");
        let expected = json!({
            "name": "n", "namespace": "s", "uid": "u", "labels": {"c": "d"}, "annotations": {"e": "f"},
            "finalizers": ["x/y"],
        });
        assert_eq!((&got[0]["metadata"], &got[0]["spec"]), (&expected, &json!({"b": 1})));
        let got = checked(&answer(json!([converted(same)]))).expect("an object");
        assert_eq!(got[0]["metadata"].get("labels"), None);
    }

    #[test]
    fn answers_that_break_the_rules_are_refused() {
        let same = || json!({"name": "n", "namespace": "s", "uid": "u"});
        let with = |key: &str, value: Value| {
            let mut metadata = same();
            metadata[key] = value;
            answer(json!([converted(metadata)]))
        };
        let mut kind = converted(same());
        kind["kind"] = "L".into();
        let mut version = converted(same());
        version["apiVersion"] = "g/v3".into();
        let mut failed = answer(json!([]));
        failed["response"]["result"] = json!({"status": "Failure", "message": "no idea"});
        let mut unsaid = answer(json!([]));
        unsaid["response"]["result"] = json!({});
        let mut uid = answer(json!([]));
        uid["response"]["uid"] = "other".into();
        for (answer, why) in [
            (answer(json!([])), "returned 0 objects, expected 1"),
            (answer(json!([converted(same()), converted(same())])), "returned 2 objects, expected 1"),
            (answer(json!([1])), "at index 0: it is no object"),
            (answer(json!([kind])), "invalid kind (expected K, received L)"),
            (answer(json!([version])), "invalid groupVersion (expected g/v2, received g/v3)"),
            (with("name", "m".into()), "must have the same name: n != m"),
            (with("namespace", "t".into()), "must have the same namespace: s != t"),
            (with("uid", "v".into()), "must have the same UID: u != v"),
            (with("labels", json!({"a": 1})), "metadata.labels[a] must be a string"),
            (with("labels", json!({"no good": "x"})), "metadata.labels"),
            (with("annotations", json!([])), "invalid metadata.annotations"),
            (answer(json!([converted(Value::Null)])), "must have the same name"),
            (failed, "failed: no idea"),
            (unsaid, "response.result.status was '', not 'Success'"),
            (uid, "expected response.uid=\"q\", got \"other\""),
            (
                json!({}),
                "expected webhook response of apiextensions.k8s.io/v1, Kind=ConversionReview, got /, Kind=",
            ),
            (json!([]), "failed"),
        ] {
            let got = checked(&answer).expect_err("a refusal").to_string();
            assert!(got.contains(why), "{got}: {why}");
        }
    }
}
