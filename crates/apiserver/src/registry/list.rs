//! Lists and their selectors.

use super::{Registry, Selectors, store_status, stored, trigger};
use crate::options::{ListOptions, VersionMatch};
use base64::Engine;
use base64::alphabet;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, URL_SAFE_NO_PAD};
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use ferrite_component::metrics::{Counter, Family, registry};
use ferrite_store::{Entry, Revision, Snapshot};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, LazyLock};

/// A piece of a list: the objects and where the next piece begins.
pub(crate) struct ListPage {
    pub revision: Revision,
    pub items: Items,
    pub continue_token: Option<String>,
    /// Number of further objects, if it is known without reading them.
    pub remaining: Option<usize>,
}

/// The objects of a page in the order of their keys. Takes little memory however many there are: a page without a
/// limit is looked up in its snapshot piece by piece.
#[derive(Clone)]
pub(crate) enum Items {
    /// The objects of a page with a limit.
    Found(std::vec::IntoIter<Arc<Entry>>),
    Scan(Scan),
}

/// Everything selected from a position on.
#[derive(Clone)]
pub(crate) struct Scan {
    resource: Arc<Resource>,
    selectors: Selectors,
    snapshot: Snapshot,
    prefix: String,
    /// The first key not read yet; none at the end.
    next: Option<Vec<u8>>,
}

impl Items {
    /// All selected objects under a prefix, which is that of a namespace if the kind has them and `namespace` is given.
    pub fn all(
        resource: &Arc<Resource>,
        namespace: Option<&str>,
        selectors: Selectors,
        snapshot: Snapshot,
    ) -> Self {
        if let Some(mut found) = candidates(resource, namespace, &selectors, &snapshot) {
            let evaluated = found.len() as u64;
            found.retain(|entry| selectors.select(resource, entry));
            LISTED.add(resource, evaluated, found.len());
            return Self::Found(found.into_iter());
        }
        let prefix = stored::prefix_in(resource, namespace);
        let next = prefix.clone().into_bytes();
        Self::Scan(Scan { resource: Arc::clone(resource), selectors, snapshot, prefix, next: Some(next) })
    }

    /// Takes further objects, of about `bytes` together, selected or not. None when there are no more.
    pub fn take(&mut self, bytes: usize) -> Option<Vec<Arc<Entry>>> {
        let mut seen = 0;
        match self {
            Self::Found(entries) => {
                let mut taken = Vec::new();
                while seen < bytes
                    && let Some(entry) = entries.next()
                {
                    seen += entry.plain().len();
                    taken.push(entry);
                }
                (!taken.is_empty()).then_some(taken)
            }
            Self::Scan(scan) => scan.take(bytes),
        }
    }

    pub fn is_done(&self) -> bool {
        match self {
            Self::Found(entries) => entries.len() == 0,
            Self::Scan(scan) => scan.next.is_none(),
        }
    }
}

/// The few objects among which the selected ones are, where they can be found without reading all: one that is
/// selected by its name, and those with a value of an indexed field.
fn candidates(
    resource: &Resource,
    namespace: Option<&str>,
    selectors: &Selectors,
    snapshot: &Snapshot,
) -> Option<Vec<Arc<Entry>>> {
    if let Some(name) = selectors.exact("metadata.name")
        && (namespace.is_some() || !resource.is_namespaced())
    {
        let key = stored::key(resource, namespace.unwrap_or_default(), name);
        return Some(snapshot.get(key.as_bytes()).cloned().into_iter().collect());
    }
    let (field, value) = trigger::exact_field(resource, selectors)?;
    snapshot.find(stored::prefix_in(resource, namespace).as_bytes(), field, value.as_bytes())
}

impl Scan {
    fn take(&mut self, bytes: usize) -> Option<Vec<Arc<Entry>>> {
        let from = self.next.take()?;
        let mut taken = Vec::new();
        let mut seen = 0;
        let mut evaluated = 0;
        for (key, entry) in self.snapshot.range(self.prefix.as_bytes(), Some(&from)) {
            if seen >= bytes {
                self.next = Some(key.as_bytes().to_vec());
                break;
            }
            seen += entry.plain().len();
            evaluated += 1;
            if self.selectors.select(&self.resource, entry) {
                taken.push(Arc::clone(entry));
            }
        }
        LISTED.add(&self.resource, evaluated, taken.len());
        Some(taken)
    }
}

/// Objects that are converted before they are selected.
const CONVERTED: usize = 500;

/// Lists and the objects that they read, by group and resource.
struct Listed {
    total: Arc<Family<Counter>>,
    fetched: Arc<Family<Counter>>,
    evaluated: Arc<Family<Counter>>,
    returned: Arc<Family<Counter>>,
}

static LISTED: LazyLock<Listed> = LazyLock::new(|| {
    let counter = |name, help| registry().counter(name, help, &["group", "resource"]);
    Listed {
        total: counter("apiserver_storage_list_total", "Lists."),
        fetched: counter("apiserver_storage_list_fetched_objects_total", "Objects that lists have read."),
        evaluated: counter(
            "apiserver_storage_list_evaluated_objects_total",
            "Objects that lists have compared with their selectors.",
        ),
        returned: counter(
            "apiserver_storage_list_returned_objects_total",
            "Objects that lists have returned.",
        ),
    }
});

/// Drops the counters of a resource that is not served any more.
pub(super) fn forget(group: &str, plural: &str) {
    let Listed { total, fetched, evaluated, returned } = &*LISTED;
    [total, fetched, evaluated, returned].into_iter().for_each(|family| family.remove(&[group, plural]));
}

impl Listed {
    fn add(&self, resource: &Resource, evaluated: u64, returned: usize) {
        let labels = [&*resource.group, &*resource.plural];
        // Every object read is also compared: there is no cache between the store and the selectors.
        self.fetched.with(&labels).add(evaluated);
        self.evaluated.with(&labels).add(evaluated);
        self.returned.with(&labels).add(returned as u64);
    }
}

/// Where a list goes on. Opaque to clients.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Token {
    #[serde(rename = "v")]
    version: String,
    /// Negative: the latest, for a list that goes on though the state it began with is gone.
    #[serde(rename = "rv")]
    revision: i64,
    start: String,
}

impl Registry {
    pub async fn list(
        &self,
        resource: &Arc<Resource>,
        namespace: Option<&str>,
        selectors: Selectors,
        options: &ListOptions,
    ) -> Result<ListPage, Status> {
        let prefix = stored::prefix_in(resource, namespace);
        let token = parse_token(&options.continue_token)?;
        if token.is_some() && options.resource_version.is_some_and(|v| v != 0) {
            return Err(Status::bad_request(
                "specifying resource version is not allowed when using continue",
            ));
        }
        let snapshot = self.snapshot_for(&prefix, options, token.as_ref())?;
        self.check_all_readable(&snapshot, &prefix)?;
        LISTED.total.with(&[&resource.group, &resource.plural]).increment();
        let revision = snapshot.revision();
        // As upstream: a client that accepts any version is answered from the cache, which knows no pages.
        let limit = if options.resource_version == Some(0) { 0 } else { options.limit };
        let from = token.as_ref().map(|t| format!("{prefix}{}", t.start));
        if crate::extensions::converts(resource) {
            return self
                .list_converted(resource, &snapshot, &prefix, from.as_deref(), &selectors, limit)
                .await;
        }
        if limit == 0 {
            let items = match from {
                None => Items::all(resource, namespace, selectors, snapshot),
                Some(from) => {
                    let next = Some(from.into_bytes());
                    Items::Scan(Scan { resource: Arc::clone(resource), selectors, snapshot, prefix, next })
                }
            };
            return Ok(ListPage { revision, items, continue_token: None, remaining: None });
        }
        // As upstream: an object that is selected by its name is read by its key.
        let single =
            selectors.exact("metadata.name").is_some() && (namespace.is_some() || !resource.is_namespaced());
        let mut entries = Vec::new();
        let mut next = None;
        let mut rest = snapshot.range(prefix.as_bytes(), from.as_deref().map(str::as_bytes));
        let mut evaluated = 0;
        for (key, entry) in rest.by_ref() {
            // As upstream: a full page does not look whether what follows is selected.
            if entries.len() == limit {
                if !single {
                    next = Some(String::from_utf8_lossy(&key.as_bytes()[prefix.len()..]).into_owned());
                }
                break;
            }
            evaluated += 1;
            if selectors.select(resource, entry) {
                entries.push(Arc::clone(entry));
            }
        }
        LISTED.add(resource, evaluated, entries.len());
        let remaining = (next.is_some() && selectors.is_everything()).then(|| rest.count() + 1);
        let continue_token = next.map(|start| make_token(revision, start));
        Ok(ListPage { revision, items: Items::Found(entries.into_iter()), continue_token, remaining })
    }

    /// A list of a kind whose versions a webhook converts: it is asked for many objects at once, before they are
    /// selected, because selectors read the version of the request.
    async fn list_converted(
        &self,
        resource: &Arc<Resource>,
        snapshot: &Snapshot,
        prefix: &str,
        from: Option<&str>,
        selectors: &Selectors,
        limit: usize,
    ) -> Result<ListPage, Status> {
        let revision = snapshot.revision();
        let page = |found: Vec<Arc<Entry>>, next: Option<&[u8]>| {
            let start = next.map(|key| String::from_utf8_lossy(&key[prefix.len()..]).into_owned());
            ListPage {
                revision,
                items: Items::Found(found.into_iter()),
                continue_token: start.map(|start| make_token(revision, start)),
                remaining: None,
            }
        };
        let single = selectors.exact("metadata.name").is_some();
        let mut found = Vec::new();
        let mut rest = snapshot.range(prefix.as_bytes(), from.map(str::as_bytes)).peekable();
        while rest.peek().is_some() {
            let (keys, entries): (Vec<_>, Vec<_>) =
                rest.by_ref().take(CONVERTED).map(|(key, entry)| (key, Arc::clone(entry))).unzip();
            let converted = self.converter.entries(resource, entries).await?;
            for (key, entry) in keys.into_iter().zip(converted) {
                if limit > 0 && found.len() == limit {
                    let next = (!single).then_some(key.as_bytes());
                    return Ok(page(found, next));
                }
                if selectors.select(resource, &entry) {
                    found.push(entry);
                }
            }
        }
        Ok(page(found, None))
    }

    /// The state from which a list is answered. The published state is as new as the client asked for (the
    /// call has caught up), so only exact versions go back in history.
    fn snapshot_for(
        &self,
        prefix: &str,
        options: &ListOptions,
        token: Option<&Token>,
    ) -> Result<Snapshot, Status> {
        let past = |revision: u64| self.store.snapshot_under(prefix.as_bytes(), Revision(revision));
        if let Some(token) = token {
            let Ok(revision) = u64::try_from(token.revision) else { return Ok(self.store.snapshot()) };
            return past(revision).map_err(|error| inconsistent(store_status(error), token));
        }
        let current = self.store.snapshot();
        let Some(wanted) = options.resource_version.filter(|v| *v != 0) else { return Ok(current) };
        // As upstream: a page of a version is of that very version unless the client says otherwise.
        let exact = match options.version_match {
            Some(wanted) => wanted == VersionMatch::Exact,
            None => options.limit > 0,
        };
        if wanted > current.revision().0 {
            let mut status = too_large(wanted, current.revision());
            // An exact version is looked up in the store, which does not ask clients to come back.
            if let Some(details) = status.details.as_mut().filter(|_| exact) {
                details.remove("retryAfterSeconds");
            }
            return Err(status);
        }
        if exact {
            return past(wanted)
                .map_err(|_| Status::expired("The resourceVersion for the provided list is too old."));
        }
        Ok(current)
    }
}

impl Registry {
    /// Refuses to answer from a state that is older than the client has seen.
    pub fn check_reached(&self, version: u64) -> Result<(), Status> {
        let current = self.store.snapshot().revision();
        if version > current.0 { Err(too_large(version, current)) } else { Ok(()) }
    }
}

/// A client has seen a version we have not: it talks to another server or to one that lost data.
pub(super) fn too_large(wanted: u64, current: Revision) -> Status {
    let mut status = Status::timeout(format!("Too large resource version: {wanted}, current: {current}"));
    let mut details = ferrite_json::Map::new();
    details.insert(
        "causes",
        ferrite_json::json!([{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]),
    );
    details.insert("retryAfterSeconds", 1.into());
    status.details = Some(Box::new(details));
    status
}

fn make_token(revision: Revision, start: String) -> String {
    encode_token(i64::try_from(revision.0).unwrap_or(-1), start)
}

fn encode_token(revision: i64, start: String) -> String {
    let token = Token { version: "meta.k8s.io/v1".into(), revision, start };
    URL_SAFE_NO_PAD.encode(ferrite_json::to_vec(&token).unwrap_or_default())
}

/// Adds to the error of an expired list a token with which the client can continue anyway.
fn inconsistent(status: Status, token: &Token) -> Status {
    if status.code != 410 {
        return status;
    }
    let mut status = Status::expired(
        "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list.",
    );
    status.continue_token = Some(encode_token(-1, token.start.clone()).into());
    status
}

/// Why Go's decoder does not take a token's text.
fn base64_fault(text: &str, error: &base64::DecodeError) -> String {
    let at = match error {
        base64::DecodeError::InvalidByte(at, _) | base64::DecodeError::InvalidLastSymbol(at, _) => *at,
        base64::DecodeError::InvalidLength(length) => length.saturating_sub(1),
        base64::DecodeError::InvalidPadding => text.find('=').unwrap_or(0),
    };
    format!("illegal base64 data at input byte {at}")
}

fn parse_token(text: &str) -> Result<Option<Token>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    let bad =
        |why: &str| Status::bad_request(format!("invalid continue token: continue key is not valid: {why}"));
    // Go's decoder does not mind bits left over at the end.
    let lenient = GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(base64::engine::DecodePaddingMode::RequireNone);
    let bytes = GeneralPurpose::new(&alphabet::URL_SAFE, lenient)
        .decode(text)
        .map_err(|e| bad(&base64_fault(text, &e)))?;
    let token: Token = match ferrite_json::from_slice(&bytes) {
        Ok(token) => token,
        Err(_) => match std::str::from_utf8(&bytes).ok().and_then(|t| t.trim_start().chars().next()) {
            Some('{') => return Err(bad("unexpected end of JSON input")),
            _ => {
                let first = char::from(bytes.first().copied().unwrap_or_default());
                let shown = match first {
                    c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
                    c => c.to_string(),
                };
                return Err(bad(&format!("invalid character '{shown}' looking for beginning of value")));
            }
        },
    };
    if token.version != "meta.k8s.io/v1" {
        return Err(bad(&format!("server does not recognize this encoded version {}", token.version)));
    }
    if token.revision == 0 {
        return Err(bad("incorrect encoded start resourceVersion (version meta.k8s.io/v1)"));
    }
    if token.start.is_empty() || token.start.split('/').any(|segment| segment == "..") {
        return Err(bad(&token.start));
    }
    Ok(Some(token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_a_removed_resource_are_gone() {
        let (group, plural) = ("unlisted.example.com", "things");
        let shown = || registry().text().contains(group);
        LISTED.total.with(&[group, plural]).increment();
        LISTED.returned.with(&[group, plural]).increment();
        assert!(shown());
        forget(group, plural);
        assert!(!shown());
    }

    #[test]
    fn tokens_of_others_are_refused() {
        for text in ["x", "e30", "%%%", &URL_SAFE_NO_PAD.encode(r#"{"v":"v9","rv":1,"start":"a"}"#)] {
            assert!(parse_token(text).is_err(), "{text}");
        }
        let token = parse_token(&make_token(Revision(7), "ns/a".into())).unwrap().unwrap();
        assert_eq!((token.revision, token.start.as_str()), (7, "ns/a"));
    }

    #[test]
    fn a_token_that_is_no_base64_is_refused_in_gos_words() {
        for (text, at) in [("x", 0), ("e30=", 3), ("e3%0", 2), ("e30aa", 4)] {
            let message = parse_token(text).unwrap_err().message;
            assert!(
                message.ends_with(&format!("illegal base64 data at input byte {at}")),
                "{text}: {message}"
            );
        }
    }

    #[test]
    fn an_expired_token_comes_with_one_that_goes_on_from_the_same_key() {
        let old = Token { version: "meta.k8s.io/v1".into(), revision: 7, start: "ns/a".into() };
        let status = inconsistent(Status::expired("gone"), &old);
        let next = parse_token(status.continue_token.as_deref().unwrap()).unwrap().unwrap();
        assert_eq!((next.revision, next.start.as_str()), (-1, "ns/a"));
        assert!(inconsistent(Status::internal("x"), &old).continue_token.is_none());
    }

    /// Which way a list goes: by reading all objects, or those that an index or the name leads to.
    #[tokio::test]
    async fn few_objects_are_found_without_reading_all() {
        let registry = super::super::fixture::registry();
        let pods = Arc::clone(registry.table.find("", "v1", "pods").unwrap());
        let objects = [("a", "x", "n1"), ("a", "y", "n2"), ("b", "x", "n1"), ("b", "z", "")];
        for (namespace, name, node) in objects {
            let mut object = ferrite_json::json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "namespace": namespace}, "spec": {}});
            if !node.is_empty() {
                object["spec"]["nodeName"] = node.into();
            }
            let put =
                ferrite_store::Op::put(stored::key(&pods, namespace, name), stored::encode(&pods, &object));
            registry.store.commit(ferrite_store::Txn::default().then(put)).await.unwrap();
        }
        let rows = [
            (None, "spec.nodeName=n1", 2, Some(2)),
            (Some("a"), "spec.nodeName=n1", 1, Some(1)),
            (None, "spec.nodeName=", 1, Some(1)),
            (None, "spec.nodeName=n3", 0, Some(0)),
            (Some("a"), "metadata.name=y", 1, Some(1)),
            (Some("a"), "metadata.name=y,spec.nodeName=n1", 0, Some(1)),
            (Some("a"), "metadata.name=a/y", 0, Some(0)),
            (None, "metadata.name=x", 2, None),
            (None, "spec.nodeName!=n1", 2, None),
            (None, "", 4, None),
        ];
        for (namespace, fields, selected, read) in rows {
            let options = ListOptions { field_selector: fields.into(), ..ListOptions::default() };
            let selectors = Selectors::parse(&pods, &options).unwrap();
            let snapshot = registry.store.snapshot();
            let few = candidates(&pods, namespace, &selectors, &snapshot);
            assert_eq!(few.map(|few| few.len()), read, "{fields}");
            let page = registry.list(&pods, namespace, selectors, &options).await.unwrap();
            let mut items = page.items;
            assert_eq!(items.take(usize::MAX).unwrap_or_default().len(), selected, "{fields}");
        }
    }
}
