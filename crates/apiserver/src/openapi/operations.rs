//! The operations of each path, independent of the version of OpenAPI: the documents are written from this.

use super::parameters::{self, Parameter};
use super::schemas::Schemas;
use super::{SchemaOf, path_of};
use ferrite_api::resource::{Resource, Subresource};
use ferrite_api::schema;
use ferrite_json::{Value, json};

/// A path with its operations.
pub(super) struct PathItem {
    pub path: String,
    /// Parameters of all operations.
    pub parameters: Vec<&'static Parameter>,
    pub operations: Vec<Operation>,
}

pub(super) struct Operation {
    pub method: &'static str,
    pub id: String,
    pub tag: String,
    pub text: String,
    /// Action and kind; None for documents.
    pub about: Option<(&'static str, Value)>,
    pub parameters: Vec<&'static Parameter>,
    pub body: Body,
    /// Media types of the body; empty where the operation says nothing of it.
    pub consumes: &'static [&'static str],
    pub produces: &'static [&'static str],
    /// Codes with the schema of the response. 401 comes by itself.
    pub responses: Vec<(&'static str, Value)>,
}

pub(super) enum Body {
    None,
    Object(Value),
    DeleteOptions(Value),
    Patch(Value),
}

pub(super) const STANDARD: &[&str] =
    &["application/json", "application/yaml", "application/vnd.kubernetes.protobuf"];
const WATCHED: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
    "application/json;stream=watch",
    "application/vnd.kubernetes.protobuf;stream=watch",
];
const LOGGED: &[&str] =
    &["text/plain", "application/json", "application/yaml", "application/vnd.kubernetes.protobuf"];
const PATCHES: &[&str] = &[
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
];
const ANY: &[&str] = &["*/*"];
/// Custom objects have no protobuf form and no strategic merge.
const CUSTOM: &[&str] = &["application/json", "application/yaml"];
const CUSTOM_PATCHES: &[&str] =
    &["application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml"];

/// `rbacAuthorization` of `rbac.authorization.k8s.io`.
pub(super) fn group_word(group: &str) -> String {
    let mut parts = match group {
        "" => "core",
        group => group.trim_end_matches(".k8s.io"),
    }
    .split(['.', '-']);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |word, part| word + &capital(part))
}

pub(super) fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// The word of a group and version in the names of operations: `AppsV1`.
pub(super) fn version_word(group: &str, version: &str) -> String {
    capital(&group_word(group)) + &capital(version)
}

/// Moves the parameters that all operations share to the path.
fn shared_by_all(operations: &mut [Operation], path: Vec<&'static Parameter>) -> Vec<&'static Parameter> {
    let mut shared = path;
    if let [first, rest @ ..] = &*operations {
        let everywhere = first.parameters.iter().filter(|p| rest.iter().all(|o| o.parameters.contains(p)));
        shared.extend(everywhere);
    }
    for operation in operations {
        operation.parameters.retain(|parameter| !shared.contains(parameter));
    }
    shared.sort_by_key(|parameter| parameter.name);
    shared
}

fn path_parameters(path: &str) -> Vec<&'static Parameter> {
    let named = |parameter: &&Parameter| path.contains(&format!("{{{}}}", parameter.name));
    parameters::PATH.iter().filter(named).collect()
}

/// The paths of a resource and its subresources.
pub(super) fn of(resource: &Resource, schemas: &mut Schemas, schema_of: SchemaOf<'_>) -> Vec<PathItem> {
    let (object, list) = schemas.bodies(resource, schema_of);
    let deletes = resource.verbs.iter().any(|verb| verb.starts_with("delete"));
    let maker = Maker {
        resource,
        root: format!("/{}", path_of(&resource.group, &resource.version)),
        object: object.unwrap_or_else(|| json!({"type": "object"})),
        list: list.unwrap_or_else(|| json!({"type": "object"})),
        // Types that no operation uses are in no document.
        status: if deletes { schemas.meta("Status") } else { Value::Null },
        options: if deletes { schemas.meta("DeleteOptions") } else { Value::Null },
    };
    let mut items = maker.collections();
    items.extend(maker.objects(schemas));
    for sub in resource.subresources.iter() {
        items.extend(maker.part(sub, schemas));
    }
    if resource.custom.is_none() && resource.verbs.contains(&"watch") {
        items.extend(maker.watches(schemas));
    }
    items
}

struct Maker<'a> {
    resource: &'a Resource,
    root: String,
    object: Value,
    list: Value,
    status: Value,
    options: Value,
}

impl Maker<'_> {
    fn has(&self, verb: &str) -> bool {
        self.resource.verbs.contains(&verb)
    }

    fn kind(&self) -> Value {
        let Resource { group, version, kind, .. } = self.resource;
        json!({"group": group, "version": version, "kind": kind})
    }

    fn namespaced(&self) -> &'static str {
        if self.resource.is_namespaced() { "Namespaced" } else { "" }
    }

    fn collection(&self) -> String {
        let scope = if self.resource.is_namespaced() { "/namespaces/{namespace}" } else { "" };
        format!("{}{scope}/{}", self.root, self.resource.plural)
    }

    /// `listAppsV1NamespacedDeployment`.
    fn id(&self, verb: &str, middle: &str, end: &str) -> String {
        let Resource { group, version, kind, .. } = self.resource;
        format!("{verb}{}{middle}{kind}{end}", version_word(group, version))
    }

    fn operation(&self, method: &'static str, id: String, action: &'static str, text: String) -> Operation {
        let custom = self.resource.custom.is_some();
        Operation {
            method,
            id,
            tag: format!("{}_{}", group_word(&self.resource.group), self.resource.version),
            text,
            about: Some((action, self.kind())),
            parameters: Vec::new(),
            body: Body::None,
            consumes: if custom { CUSTOM } else { ANY },
            produces: if custom { CUSTOM } else { STANDARD },
            responses: vec![("200", self.object.clone())],
        }
    }

    /// Puts the operations of a path together. All but connections can be indented.
    fn item(&self, path: String, mut operations: Vec<Operation>) -> PathItem {
        let mut of_path = path_parameters(&path);
        let connects = |operation: &Operation| matches!(operation.about, Some(("connect", _)));
        if !operations.iter().any(connects) {
            of_path.extend(parameters::named(&["pretty"]));
        }
        let parameters = shared_by_all(&mut operations, of_path);
        PathItem { path, parameters, operations }
    }

    fn reading(&self, id: String, text: String) -> Operation {
        let options: &[&str] = if self.resource.custom.is_some() { &["resourceVersion"] } else { &[] };
        Operation { parameters: parameters::named(options), ..self.operation("get", id, "get", text) }
    }

    fn listing(&self, id: String) -> Operation {
        let text = format!("List or watch objects of kind {}.", self.resource.kind);
        Operation {
            parameters: parameters::named(parameters::LIST),
            produces: if self.resource.custom.is_some() { CUSTOM } else { WATCHED },
            responses: vec![("200", self.list.clone())],
            ..self.operation("get", id, "list", text)
        }
    }

    fn collections(&self) -> Vec<PathItem> {
        let (kind, namespaced) = (&self.resource.kind, self.namespaced());
        let mut operations = Vec::new();
        if self.has("list") {
            operations.push(self.listing(self.id("list", namespaced, "")));
        }
        if self.has("create") {
            operations.push(self.creation(self.id("create", namespaced, ""), format!("Create a {kind}.")));
        }
        if self.has("deletecollection") {
            let id = self.id("delete", &format!("Collection{namespaced}"), "");
            // As upstream: of a custom kind, the options of the delete itself are not described.
            let (options, body) = match self.resource.custom.is_some() {
                true => (parameters::LIST, Body::None),
                false => (parameters::DELETE_COLLECTION, Body::DeleteOptions(self.options.clone())),
            };
            operations.push(Operation {
                parameters: parameters::named(options),
                body,
                responses: vec![("200", self.status.clone())],
                ..self.operation("delete", id, "deletecollection", format!("Delete objects of kind {kind}."))
            });
        }
        let mut items = Vec::new();
        if !operations.is_empty() {
            items.push(self.item(self.collection(), operations));
        }
        if self.resource.is_namespaced() && self.has("list") {
            let everywhere = self.listing(self.id("list", "", "ForAllNamespaces"));
            items.push(self.item(format!("{}/{}", self.root, self.resource.plural), vec![everywhere]));
        }
        items
    }

    fn creation(&self, id: String, text: String) -> Operation {
        let sent = &self.object;
        Operation {
            parameters: parameters::named(parameters::WRITE),
            body: Body::Object(sent.clone()),
            responses: ["200", "201", "202"].map(|code| (code, sent.clone())).to_vec(),
            ..self.operation("post", id, "post", text)
        }
    }

    fn replacement(&self, id: String, text: String) -> Operation {
        Operation {
            parameters: parameters::named(parameters::WRITE),
            body: Body::Object(self.object.clone()),
            responses: ["200", "201"].map(|code| (code, self.object.clone())).to_vec(),
            ..self.operation("put", id, "put", text)
        }
    }

    fn change(&self, id: String, text: String, schemas: &mut Schemas) -> Operation {
        let custom = self.resource.custom.is_some();
        let codes: &[&str] = if custom { &["200"] } else { &["200", "201"] };
        Operation {
            parameters: parameters::of_patch(),
            body: Body::Patch(schemas.patch()),
            consumes: if custom { CUSTOM_PATCHES } else { PATCHES },
            responses: codes.iter().map(|code| (*code, self.object.clone())).collect(),
            ..self.operation("patch", id, "patch", text)
        }
    }

    fn objects(&self, schemas: &mut Schemas) -> Option<PathItem> {
        let (kind, namespaced) = (&self.resource.kind, self.namespaced());
        let mut operations = Vec::new();
        if self.has("get") {
            let id = self.id("read", namespaced, "");
            operations.push(self.reading(id, format!("Read a {kind}.")));
        }
        if self.has("update") {
            operations
                .push(self.replacement(self.id("replace", namespaced, ""), format!("Replace a {kind}.")));
        }
        if self.has("patch") {
            let id = self.id("patch", namespaced, "");
            operations.push(self.change(id, format!("Change parts of a {kind}."), schemas));
        }
        if self.has("delete") {
            let sent = match self.resource.strategy.returns_deleted() {
                true => &self.object,
                false => &self.status,
            };
            let id = self.id("delete", namespaced, "");
            operations.push(Operation {
                parameters: parameters::named(parameters::DELETE),
                body: Body::DeleteOptions(self.options.clone()),
                responses: ["200", "202"].map(|code| (code, sent.clone())).to_vec(),
                ..self.operation("delete", id, "delete", format!("Delete a {kind}."))
            });
        }
        let path = format!("{}/{{name}}", self.collection());
        (!operations.is_empty()).then(|| self.item(path, operations))
    }

    fn part(&self, sub: &Subresource, schemas: &mut Schemas) -> Vec<PathItem> {
        let Resource { group, version, kind, .. } = self.resource;
        let about = sub.body.unwrap_or((group, version, kind));
        let path = format!("{}/{{name}}/{}", self.collection(), sub.name);
        if let Some((options, methods)) = connection(&self.resource.plural, sub.name) {
            return self.connections(path, sub.name, options, methods);
        }
        let object = match (&self.resource.custom, sub.body) {
            (Some(_), None) => self.object.clone(),
            _ => schema::kind(about.0, about.1, about.2)
                .map_or_else(|| self.object.clone(), |type_| schemas.reference(type_)),
        };
        let own = Maker {
            object,
            root: self.root.clone(),
            resource: self.resource,
            list: Value::Null,
            status: Value::Null,
            options: Value::Null,
        };
        let (end, namespaced) = (capital(sub.name), self.namespaced());
        let mut operations = Vec::new();
        for verb in sub.verbs {
            let text = |what: &str| format!("{what} the {} of a {kind}.", sub.name);
            operations.push(match *verb {
                "get" => own.reading(own.id("read", namespaced, &end), text("Read")),
                "create" => own.creation(own.id("create", namespaced, &end), text("Create")),
                "update" => own.replacement(own.id("replace", namespaced, &end), text("Replace")),
                "patch" => own.change(own.id("patch", namespaced, &end), text("Change"), schemas),
                _ => continue,
            });
        }
        if sub.name == "log" {
            for operation in &mut operations {
                operation.parameters = parameters::LOG.iter().collect();
                operation.produces = LOGGED;
                operation.responses = vec![("200", json!({"type": "string"}))];
            }
        }
        if self.resource.custom.is_none() {
            let kind = json!({"group": about.0, "version": about.1, "kind": about.2});
            for operation in &mut operations {
                operation.about = operation.about.take().map(|(action, _)| (action, kind.clone()));
            }
        }
        vec![self.item(path, operations)]
    }

    fn connections(
        &self,
        path: String,
        name: &str,
        options: (&'static str, &'static [Parameter]),
        methods: &[&'static str],
    ) -> Vec<PathItem> {
        let kind = json!({"group": "", "version": "v1", "kind": options.0});
        let make = |method: &&'static str, end: &str| {
            let middle = format!("{}{}", capital(method), self.namespaced());
            let id = self.id("connect", &middle, &format!("{}{end}", capital(name)));
            let text = format!("Connect to the {name} of a {}.", self.resource.kind);
            Operation {
                about: Some(("connect", kind.clone())),
                parameters: options.1.iter().collect(),
                produces: ANY,
                responses: vec![("200", json!({"type": "string"}))],
                ..self.operation(method, id, "connect", text)
            }
        };
        let with_path = (name == "proxy").then(|| {
            let operations = methods.iter().map(|method| make(method, "WithPath")).collect();
            self.item(format!("{path}/{{path}}"), operations)
        });
        let own = self.item(path, methods.iter().map(|method| make(method, "")).collect());
        [Some(own), with_path].into_iter().flatten().collect()
    }

    /// The old paths for watches, which clients still find here.
    fn watches(&self, schemas: &mut Schemas) -> Vec<PathItem> {
        let event = schemas.meta("WatchEvent");
        let watch = |path: String, id: String, action: &'static str| {
            let text =
                format!("Watch objects of kind {}. Use the list with the option watch.", self.resource.kind);
            let operation = Operation {
                parameters: parameters::named(parameters::LIST),
                produces: WATCHED,
                responses: vec![("200", event.clone())],
                ..self.operation("get", id, action, text)
            };
            self.item(path, vec![operation])
        };
        let (root, plural, namespaced) = (&self.root, &self.resource.plural, self.namespaced());
        let scope = if namespaced.is_empty() { "" } else { "/namespaces/{namespace}" };
        let collection = format!("{root}/watch{scope}/{plural}");
        let mut items =
            vec![watch(format!("{collection}/{{name}}"), self.id("watch", namespaced, ""), "watch")];
        items.push(watch(collection, self.id("watch", namespaced, "List"), "watchlist"));
        if self.resource.is_namespaced() {
            let id = self.id("watch", "", "ListForAllNamespaces");
            items.push(watch(format!("{root}/watch/{plural}"), id, "watchlist"));
        }
        items
    }
}

type Connection = ((&'static str, &'static [Parameter]), &'static [&'static str]);

/// Subresources that are a connection rather than an object: their options, and the methods they take.
fn connection(plural: &str, part: &str) -> Option<Connection> {
    const STREAM: &[&str] = &["get", "post"];
    const PROXY: &[&str] = &["get", "put", "post", "delete", "options", "head", "patch"];
    Some(match (plural, part) {
        (_, "attach") => (("PodAttachOptions", parameters::ATTACH), STREAM),
        (_, "exec") => (("PodExecOptions", parameters::EXEC), STREAM),
        (_, "portforward") => (("PodPortForwardOptions", parameters::PORT_FORWARD), STREAM),
        ("pods", "proxy") => (("PodProxyOptions", parameters::POD_PROXY), PROXY),
        ("services", "proxy") => (("ServiceProxyOptions", parameters::SERVICE_PROXY), PROXY),
        ("nodes", "proxy") => (("NodeProxyOptions", parameters::NODE_PROXY), PROXY),
        _ => return None,
    })
}

/// A path that answers a document and takes no options.
pub(super) fn document(
    path: String,
    id: String,
    tag: &str,
    text: &str,
    types: (&'static [&'static str], &'static [&'static str]),
    sent: Value,
) -> PathItem {
    let operation = Operation {
        method: "get",
        id,
        tag: tag.to_owned(),
        text: text.to_owned(),
        about: None,
        parameters: Vec::new(),
        body: Body::None,
        consumes: types.0,
        produces: types.1,
        responses: vec![("200", sent)],
    };
    PathItem { path, parameters: Vec::new(), operations: vec![operation] }
}

/// The words for a code.
pub(super) fn reason(code: &str) -> &'static str {
    match code {
        "201" => "Created",
        "202" => "Accepted",
        "401" => "Unauthorized",
        _ => "OK",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_make_words() {
        let rows = [
            ("", "core"),
            ("apps", "apps"),
            ("rbac.authorization.k8s.io", "rbacAuthorization"),
            ("stable.example.com", "stableExampleCom"),
        ];
        for (group, word) in rows {
            assert_eq!(group_word(group), word);
        }
        assert_eq!(version_word("apps", "v1"), "AppsV1");
    }
}
