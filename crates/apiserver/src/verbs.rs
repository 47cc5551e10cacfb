//! The verbs of a resource: from a call to an answer.

use crate::admission::{Attributes, Operation};
use crate::call::Call;
use crate::encode;
use crate::encode::list::Pieces;
use crate::http::{Piece, Response};
use crate::negotiate::{Format, Representation, Shape};
use crate::options::{DeleteOptions, DistinctWarnings, ListOptions, VersionMatch, WriteOptions};
use crate::registry::stored::Written;
use crate::registry::{Deleted, Registry, Selectors, Update};
use crate::request::Verb;
use crate::{components, patch, subresource, watching};
use ::http::{HeaderValue, header};
use bytes::Bytes;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::resource::{Connect, Resource};
use ferrite_api::{Gvk, Status, meta};
use ferrite_component::metrics::{Family, Gauge, registry};
use ferrite_json::json;
use jiff::Timestamp;
use std::sync::{Arc, LazyLock};

/// Dispatches a call. Warnings gathered on the way end up in the answer's headers.
pub(crate) async fn handle(mut call: Call) -> Result<Response, Status> {
    let result = dispatch(&mut call).await;
    let mut warnings = DistinctWarnings::default();
    call.warnings.drain(..).chain(call.admission.take()).for_each(|warning| warnings.add(warning));
    let warnings = warnings.into_list();
    match result {
        Ok(answer) => Ok(warned(answer, warnings)),
        Err(status) if warnings.is_empty() => Err(status),
        Err(status) => {
            let plain = Representation { shape: Shape::AsIs, ..call.representation };
            Ok(refusal(&status, plain, warnings))
        }
    }
}

/// A refusal with warnings.
pub(crate) fn refusal(status: &Status, as_: Representation, warnings: Vec<String>) -> Response {
    warned(crate::server::error(status, as_), warnings)
}

fn warned(mut answer: Response, warnings: Vec<String>) -> Response {
    for value in Call::warning_headers(&limited(warnings)) {
        answer.headers_mut().append(header::WARNING, value);
    }
    answer
}

/// Deprecated resources.
static DEPRECATED_USED: LazyLock<Arc<Family<Gauge>>> = LazyLock::new(|| {
    let labels = &["group", "removed_release", "resource", "subresource", "version"];
    registry().gauge("apiserver_requested_deprecated_apis", "Deprecated resources that were used.", labels)
});

/// Upstream's limits of warnings: of all together, and of each once there are more.
const WARNINGS_CHARS: usize = 4 << 10;
const WARNING_CHARS: usize = 256;

/// As upstream: warnings that are too much together are cut short each, and those that are still too many dropped.
fn limited(warnings: Vec<String>) -> Vec<String> {
    let length = |text: &String| text.chars().count();
    if warnings.iter().map(length).sum::<usize>() <= WARNINGS_CHARS {
        return warnings;
    }
    let mut written = 0;
    let cut = warnings.into_iter().map(|text| text.chars().take(WARNING_CHARS).collect::<String>());
    cut.take_while(|text| {
        let fits = written < WARNINGS_CHARS;
        written += length(text);
        fits
    })
    .collect()
}

/// The release that has the resource no more, where the warning names one.
fn removed_release(warning: &str) -> &str {
    let removed = warning.split_once("unavailable in v").and_then(|(_, rest)| rest.split_once('+'));
    removed.map_or("", |(release, _)| release)
}

async fn dispatch(call: &mut Call) -> Result<Response, Status> {
    if let Some(warning) = call.resource.custom.as_ref().and_then(|c| c.version().deprecation.clone()) {
        call.warnings.push(warning);
    }
    if call.verb == Verb::Patch && call.target.subresource.as_deref() != Some("proxy") {
        let patchable = match call.target.subresource.as_deref() {
            Some(part) => call.resource.subresource(part).is_none_or(|part| part.verbs.contains(&"patch")),
            None => true,
        };
        // As upstream: a route that takes no patches does not look at their kind.
        if !patchable && call.resource.custom.is_none() {
            return Err(Status::not_allowed());
        }
        // A patch of no known kind finds no route upstream, and so gets no warning.
        patch::check_kind(&call.resource, call.header(header::CONTENT_TYPE))?;
    }
    if let Some(warning) = &call.resource.hooks.deprecation
        && (call.target.subresource.is_some() || call.resource.verbs.contains(&call.verb.as_str()))
        // A named object is not created: upstream has no route for that.
        && (call.target.subresource.is_some() || call.verb != Verb::Create || call.target.name.is_none())
    {
        call.warnings.push(warning.clone().into_owned());
        let removed = removed_release(warning);
        let part = call.target.subresource.as_deref().unwrap_or_default();
        let Resource { group, version, plural, .. } = &*call.resource;
        DEPRECATED_USED.with(&[group, removed, plural, part, version]).set(1);
        if let Some(record) = call.audit() {
            record.annotate("k8s.io/deprecated", "true");
            if !removed.is_empty() {
                record.annotate("k8s.io/removed-release", removed);
            }
        }
    }
    call.server.registry.catch_up(call.verb, &call.query).await?;
    // Rarer or larger futures are boxed, so that the future of a plain get stays small.
    if let Some(name) = call.target.subresource.clone() {
        return Box::pin(subresource::handle(call, &name)).await;
    }
    if !call.resource.verbs.contains(&call.verb.as_str()) {
        return Err(Status::not_allowed());
    }
    if call.resource.hooks.connect == Some(Connect::ComponentStatus) {
        return match call.verb {
            Verb::Get => Box::pin(components::get(call)).await,
            _ => Box::pin(components::list(call)).await,
        };
    }
    match call.verb {
        Verb::Get => get(call).await,
        Verb::List => Box::pin(list(call)).await,
        Verb::Watch => watching::answer(call),
        Verb::Create => Box::pin(create(call)).await,
        Verb::Update => Box::pin(update(call, None)).await,
        Verb::Patch => Box::pin(patch::handle(call, None)).await,
        Verb::Delete => Box::pin(delete(call)).await,
        Verb::DeleteCollection => Box::pin(delete_collection(call)).await,
    }
}

async fn get(call: &Call) -> Result<Response, Status> {
    if let Some(version) = call.query.get("resourceVersion").filter(|v| !v.is_empty()) {
        let version =
            crate::options::parse_version(version).map_err(|why| Status::new(500, "", why.to_string()))?;
        call.server.registry.check_reached(version)?;
    }
    let entry = call.server.registry.load(&call.resource, call.namespace(), call.name()).await?;
    encode::entry(&call.resource, &entry, call.representation, call.include_object()?)
}

async fn list(call: &Call) -> Result<Response, Status> {
    let options = ListOptions::parse(&call.query, false)?;
    let selectors = Selectors::parse(&call.resource, &options)?;
    let namespace = call.target.within();
    let page = call.server.registry.list(&call.resource, namespace, selectors, &options).await?;
    let include = call.include_object()?;
    let Some(representation) = Pieces::representation(&page, call.representation).await? else {
        return encode::list(&call.resource, page, call.representation, include);
    };
    let mut pieces = Pieces::new(&call.resource, page, representation, include).await?;
    let content_type = representation.format.media_type();
    let first = pieces.next().transpose()?.unwrap_or_default();
    if pieces.is_done() {
        return Ok(crate::http::answer(200, content_type, first));
    }
    let (sender, body) = crate::http::pipe(1, first.len() as u64, false);
    let deadline = call.deadline;
    let stopping = call.server.aborting();
    call.server.spawn(async move {
        // A client that does not read must not hold a snapshot for ever.
        tokio::select! {
            () = send_pieces(first, pieces, sender) => {}
            () = tokio::time::sleep_until(deadline) => {}
            () = stopping.cancelled() => {}
        }
    });
    let mut answer = ::http::Response::new(body);
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    Ok(answer)
}

async fn send_pieces(first: Bytes, mut pieces: Pieces, sender: tokio::sync::mpsc::Sender<Piece>) {
    let mut next = Some(Ok(first));
    while let Some(piece) = next {
        let Ok(bytes) = piece else { return };
        if !bytes.is_empty() && sender.send(Piece::Data(bytes)).await.is_err() {
            return;
        }
        // Others have their turn even when nothing is selected and so nothing is sent.
        tokio::task::yield_now().await;
        next = pieces.next();
    }
    let _ = sender.send(Piece::End).await;
}

async fn create(call: &mut Call) -> Result<Response, Status> {
    if call.target.name.is_some() {
        return Err(Status::not_allowed());
    }
    let options = call.write_options()?;
    let object = call.read_object(options.field_validation).await?;
    match call.resource.hooks.connect {
        Some(Connect::Binding) => return subresource::binding::create(call, &object, &options).await,
        Some(Connect::Review) => {
            let object = admit_review(call, object, &options).await?;
            return Box::pin(crate::reviews::answer(call, object, &options)).await;
        }
        Some(Connect::ComponentStatus) | None => {}
    }
    if call.resource.is_namespaced() && call.namespace().is_empty() {
        let path = Path::new("metadata");
        let mut missing = vec![FieldError::required(&path.child("namespace"), "")];
        if meta::name(&object).is_empty() && meta::str(&object, "generateName").is_empty() {
            let name = FieldError::required(&path.child("name"), "name or generateName is required");
            missing.insert(0, name);
        }
        let (group, kind) = (&call.resource.group, &call.resource.kind);
        return Err(Status::invalid(group, kind, meta::name(&object), &missing));
    }
    provide_namespace(call, &options).await?;
    let created = call.server.registry.create(&call.write(&options), object).await?;
    encode::written(201, &call.resource, &created, call.representation, call.include_object()?)
}

/// Asks webhooks about a review. As upstream: plugins and policies have no say in it.
async fn admit_review(
    call: &Call,
    mut review: ferrite_json::Value,
    options: &WriteOptions,
) -> Result<ferrite_json::Value, Status> {
    let registry = &call.server.registry;
    let name = meta::name(&review).to_owned();
    let attributes = Attributes {
        operation: Operation::Create,
        resource: &call.resource,
        subresource: None,
        namespace: call.namespace(),
        name: &name,
        unnamed: false,
        user: &call.user,
        old: None,
        options,
        rbac: &registry.rbac,
    };
    registry.admission.connect(&registry.view(), &attributes, &mut review).await?;
    Ok(review)
}

/// With `NamespaceAutoProvision`, makes the namespace of a create if it does not exist.
pub(crate) async fn provide_namespace(call: &Call, options: &WriteOptions) -> Result<(), Status> {
    let wanted = call.server.registry.admission.provisions_namespaces
        && call.resource.is_namespaced()
        && !options.dry_run;
    if wanted { crate::bootstrap::provide_namespace(&call.server, call.namespace()).await } else { Ok(()) }
}

pub(crate) async fn update(call: &mut Call, subresource: Option<&str>) -> Result<Response, Status> {
    let options = call.write_options()?;
    let object = call.read_object(options.field_validation).await?;
    call.check_place(&object)?;
    let update = Update {
        write: call.write(&options),
        name: call.name(),
        subresource,
        change: &|_| Ok(object.clone()),
        replaces: true,
        applied: None,
    };
    let registry = &call.server.registry;
    let mut code = 200;
    let result = match registry.update(&update).await {
        Err(status)
            if status.code == 404
                && matches!(subresource, None | Some("status"))
                && call.resource.strategy.create_on_update() =>
        {
            code = 201;
            call.authorize_create().await?;
            provide_namespace(call, &options).await?;
            // The version would protect a stored object, and there is none.
            let mut object = object.clone();
            meta::metadata_mut(&mut object).remove("resourceVersion");
            match subresource {
                None => registry.create(&update.write, object).await,
                Some(_) => registry.create_by_status(&update.write, object).await,
            }
        }
        other => other,
    }?;
    encode::written(code, &call.resource, &result, call.representation, call.include_object()?)
}

/// The scheme that upstream reads delete options with, as its errors name it.
const OPTIONS_SCHEME: &str = "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme/register.go:27";

/// The kind of delete options that a body says it is: of any group's version, by itself `meta.k8s.io/v1`.
fn options_gvk(api_version: &str, kind: &str) -> Result<Gvk, Status> {
    let kind = if kind.is_empty() { "DeleteOptions" } else { kind };
    let api_version = if api_version.is_empty() { "meta.k8s.io/v1" } else { api_version };
    if api_version.matches('/').count() > 1 {
        return Err(Status::bad_request(format!("unexpected GroupVersion string: {api_version}")));
    }
    let gvk = Gvk::from_api_version(api_version, kind).filter(|gvk| {
        // The options are of meta's version, which every group has.
        kind == "DeleteOptions" && (gvk.group == "meta.k8s.io" || ferrite_api::schema::of(gvk).is_some())
    });
    gvk.map(|gvk| if gvk.group == "meta.k8s.io" { Gvk::new("", "v1", "DeleteOptions") } else { gvk })
        .ok_or_else(|| {
            let why = match (api_version, kind) {
                ("v1" | "meta.k8s.io/v1", "Status") => {
                    "converting (v1.Status) to (v1.DeleteOptions): unknown conversion".to_owned()
                }
                _ => format!(
                    "no kind {kind:?} is registered for version {api_version:?} in scheme {OPTIONS_SCHEME:?}"
                ),
            };
            Status::bad_request(why)
        })
}

/// Reads delete options from the body.
async fn delete_options(call: &mut Call) -> Result<DeleteOptions, Status> {
    let bytes = call.read_body().await?;
    if bytes.is_empty() {
        return DeleteOptions::parse(&call.query, None);
    }
    let content_type = call.header(header::CONTENT_TYPE);
    let format = crate::negotiate::content_type(content_type)?;
    let gvk = match format {
        Format::Protobuf => {
            let envelope =
                ferrite_api::codec::protobuf::open(&bytes).map_err(|e| Status::bad_request(e.to_string()))?;
            options_gvk(&envelope.api_version, &envelope.kind)?
        }
        Format::Json => {
            let (api_version, kind) = ferrite_api::codec::json::type_meta(&bytes).map_err(unversioned)?;
            options_gvk(&api_version, &kind)?
        }
        Format::Yaml => {
            let document = ferrite_api::codec::yaml::read(&bytes).map_err(unversioned)?;
            let (api_version, kind) =
                ferrite_api::codec::json::type_meta(document.json().as_bytes()).map_err(unversioned)?;
            options_gvk(&api_version, &kind)?
        }
    };
    let decoded = crate::call::decode_options(format, &bytes, &gvk)?;
    if let Some(record) = call.audit() {
        record.request_options(&decoded.value);
    }
    DeleteOptions::parse(&call.query, Some(&decoded.value))
}

/// A body whose kind cannot be found out.
fn unversioned(why: ferrite_api::codec::DecodeError) -> Status {
    Status::bad_request(format!("couldn't get version/kind; json parse error: {why}"))
}

fn delete_write(call: &Call, options: &DeleteOptions) -> WriteOptions {
    WriteOptions {
        dry_run: options.dry_run,
        warnings: call.admission.clone(),
        delete: Some(Box::new(options.clone())),
        ..WriteOptions::default()
    }
}

async fn delete(call: &mut Call) -> Result<Response, Status> {
    let options = delete_options(call).await?;
    if let Some(why) = call.resource.strategy.undeletable(call.name()) {
        return Err(Status::forbidden(&call.resource.group, &call.resource.plural, call.name(), why));
    }
    let write_options = delete_write(call, &options);
    let deleted = call.server.registry.delete(&call.write(&write_options), call.name(), &options).await?;
    let accepted = options.waits_for_dependents && matches!(deleted, Deleted::Marked(_));
    let mut answer = answer_deleted(call, deleted)?;
    if accepted {
        *answer.status_mut() = ::http::StatusCode::ACCEPTED;
    }
    Ok(answer)
}

pub(crate) fn answer_deleted(call: &Call, deleted: Deleted) -> Result<Response, Status> {
    let include = call.include_object()?;
    match deleted {
        Deleted::Marked(written) => {
            encode::written(200, &call.resource, &written, call.representation, include)
        }
        Deleted::Gone(written) if call.resource.strategy.returns_deleted() => {
            encode::written(200, &call.resource, &written, call.representation, include)
        }
        Deleted::Gone(written) => {
            let object = written.object(&call.resource);
            let mut details = json!({
                "name": meta::name(&object),
                "kind": call.resource.plural,
                "uid": meta::uid(&object),
            });
            if !call.resource.group.is_empty() {
                details["group"] = (*call.resource.group).into();
            }
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details,
            });
            let plain = Representation { shape: Shape::AsIs, ..call.representation };
            encode::value(200, &status, plain)
        }
    }
}

async fn delete_collection(call: &mut Call) -> Result<Response, Status> {
    let options = delete_options(call).await?;
    let mut list_options = ListOptions::parse(&call.query, false)?;
    // As upstream, which deletes page by page: a version is that very version unless the client says otherwise.
    list_options.version_match = list_options.version_match.or(Some(VersionMatch::Exact));
    let selectors = Selectors::parse(&call.resource, &list_options)?;
    let registry = &call.server.registry;
    let namespace = call.target.within();
    let mut page = registry.list(&call.resource, namespace, selectors, &list_options).await?;
    let (continue_token, remaining) = (page.continue_token.take(), page.remaining);
    let write_options = delete_write(call, &options);
    if options.propagation.is_none()
        && let Some(warning) = call.resource.strategy.deletion_warning()
    {
        write_options.warnings.add(warning);
    }
    // As upstream: objects are deleted one by one, each in its namespace, and an empty one is none.
    let nowhere = call.resource.is_namespaced() && namespace.is_none();
    let mut objects = Vec::new();
    while let Some(entries) = page.items.take(encode::list::PIECE) {
        for entry in entries {
            let Some(object) = crate::registry::stored::decode(&call.resource, &entry) else { continue };
            if nowhere {
                return Err(Status::bad_request("Namespace parameter required."));
            }
            let mut write = call.write(&write_options);
            write.namespace = meta::namespace(&object);
            match registry.delete(&write, meta::name(&object), &options).await {
                // As upstream: the response has the object as it was found, not its later state.
                Ok(Deleted::Gone(_) | Deleted::Marked(_)) => objects.push(object),
                // Another client was faster, and the object is gone as wanted.
                Err(status) if status.code == 404 => {}
                Err(status) => return Err(status),
            }
        }
    }
    let mut metadata = encode::list_metadata(page.revision, continue_token.as_deref(), remaining);
    if call.representation.shape == Shape::AsIs {
        encode::say_continue(&call.resource, &mut metadata);
    }
    encode::values(&call.resource, objects, metadata, call.representation, call.include_object()?)
}

/// For subresources: the whole object, changed by `change` and answered as itself.
pub(crate) async fn modify(
    registry: &Registry,
    call: &Call,
    subresource: &str,
    options: &WriteOptions,
    change: crate::registry::Change<'_>,
) -> Result<Written, Status> {
    registry
        .update(&Update {
            write: call.write(options),
            name: call.name(),
            subresource: Some(subresource),
            change,
            replaces: false,
            applied: None,
        })
        .await
}

/// The time as the API writes it.
pub(crate) fn now() -> String {
    crate::registry::metadata::time(Timestamp::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_cut_short_where_they_are_too_many() {
        let few = vec!["x".repeat(4096)];
        assert_eq!(limited(few.clone()), few);
        let many: Vec<String> = (0..100).map(|n| format!("{n:03}{}", "ä".repeat(300))).collect();
        let got = limited(many);
        assert_eq!((got.len(), got[0].chars().count()), (16, 256));
    }

    #[test]
    fn delete_options_are_of_any_served_version() {
        let rows = [
            ("", "", None),
            ("", "DeleteOptions", None),
            ("v1", "DeleteOptions", None),
            ("meta.k8s.io/v1", "DeleteOptions", None),
            ("a/b/c", "DeleteOptions", Some("unexpected GroupVersion string: a/b/c")),
            ("v1", "Status", Some("converting (v1.Status) to (v1.DeleteOptions): unknown conversion")),
            (
                "",
                "Pod",
                Some(
                    "no kind \"Pod\" is registered for version \"meta.k8s.io/v1\" in scheme \"k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme/register.go:27\"",
                ),
            ),
        ];
        for (api_version, kind, refused) in rows {
            let got = options_gvk(api_version, kind).err().map(|status| status.message);
            assert_eq!(got.as_deref(), refused, "{api_version} {kind}");
        }
    }

    #[test]
    fn warnings_name_the_release_that_removes_a_resource() {
        for (warning, release) in [
            ("a/v1 B is deprecated in v1.36+, unavailable in v1.39+", "1.39"),
            ("a/v1 B is deprecated in v1.36+, unavailable in v1.39+; use c/v1 B", "1.39"),
            ("v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice", ""),
        ] {
            assert_eq!(removed_release(warning), release, "{warning}");
        }
    }
}
