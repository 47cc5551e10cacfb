//! The routes that are no resource's: discovery, OpenAPI, health, metrics, keys.

use crate::aggregation::ApiServices;
use crate::http::{self, Response};
use crate::negotiate::{self, Shape};
use crate::options::Query;
use crate::registry::ResourceMap;
use crate::request::{Health, Route};
use crate::server::ApiServer;
use crate::zpages::{self, About};
use crate::{discovery, encode, health, metrics, profiling, version};
use ::http::{HeaderValue, header};
use ferrite_api::Status;
use jiff::Timestamp;

/// Everything that is not a resource.
pub(crate) async fn answer(
    server: &ApiServer,
    route: &Route,
    parts: &::http::request::Parts,
    query: &Query,
    accept: &str,
) -> Result<Response, Status> {
    let table = &*server.registry.tables.current();
    let services = &*server.aggregator.services();
    let schema_of = |resource: &ferrite_api::resource::Resource| {
        crate::extensions::openapi_schema(&server.registry, resource)
    };
    let unacceptable = || Status::not_acceptable(negotiate::ACCEPTED);
    let plain = || negotiate::accept(accept, |_, shape| shape == Shape::AsIs).ok_or_else(unacceptable);
    let address = server.config.external_address();
    match route {
        Route::Version => {
            negotiate::check_only(accept, "application/json")?;
            Ok(http::json(200, &version::info()))
        }
        Route::Health { endpoint, check } => Ok(health_of(server, *endpoint, check.as_deref(), query).await),
        Route::CoreVersions | Route::Groups => {
            let core = *route == Route::CoreVersions;
            if core {
                negotiate::check_route(accept, false)?;
            }
            // As upstream: with a slash at the end it is another handler, which knows no shapes.
            let aggregates = core || !parts.uri.path().ends_with('/');
            let as_ = negotiate::accept(accept, |_, shape| {
                shape == Shape::AsIs || aggregates && shape == Shape::AggregatedDiscovery
            })
            .ok_or_else(unacceptable)?;
            if as_.shape == Shape::AggregatedDiscovery {
                let mut answer =
                    encode::value(200, &discovery::aggregated(table, &server.aggregator, core), as_)?;
                let content_type = discovery::aggregated_type(as_.format);
                answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
                return Ok(answer);
            }
            let value = if core {
                discovery::core_versions(&address)
            } else {
                discovery::group_list(table, services)
            };
            encode::value(200, &value, as_)
        }
        Route::Group(name) => {
            let value = discovery::group(table, services, name);
            value.map_or_else(|| Ok(page_not_found()), |value| encode::value(200, &value, plain()?))
        }
        Route::Resources { group, version } => {
            if discovery::group(table, services, group).is_none() && !group.is_empty() {
                return Ok(page_not_found());
            }
            let listed = discovery::resources(table, group, version);
            let built_in = table.rows().iter().any(|row| row.group == *group && row.custom.is_none());
            if listed.is_none() && !built_in {
                return Ok(page_not_found());
            }
            let value = listed.ok_or_else(Status::no_such_path)?;
            negotiate::check_route(accept, false)?;
            encode::value(200, &value, plain()?)
        }
        Route::OpenApiV2 => Ok(server.openapi.v2(table, &schema_of, &parts.headers)),
        Route::OpenApiV3 => Ok(server.openapi.root(table, &schema_of, &server.aggregator.discovered())),
        Route::OpenApiV3Document(path) => {
            Ok(server.openapi.document(table, &schema_of, path, &parts.headers, query))
        }
        Route::Metrics => {
            server.registry.services.measure(&server.registry.view());
            let mut text = server.metrics.text(&server.in_flight);
            // Queues and clients of this process, and the gates.
            text.push_str(&ferrite_component::metrics::registry().text());
            server.registry.times.put(&mut text);
            server.registry.admission.times.put(&mut text);
            server.registry.admission.webhook_metrics.put(&mut text);
            let usage = server.registry.store.usage();
            metrics::put_storage(&mut text, table, &server.registry.view().snapshot, &usage);
            Ok(http::answer(200, metrics::CONTENT_TYPE, text))
        }
        Route::Slis => Ok(http::answer(200, metrics::CONTENT_TYPE, health::results())),
        Route::Page(page) => {
            let about = About { config: &server.config, started: server.started, now: Timestamp::now() };
            zpages::answer(*page, &about, accept)
        }
        Route::Steps => {
            let steps = ferrite_json::to_value(ferrite_component::steps::of(query.all("uid")));
            Ok(http::json(200, &steps.map_err(|error| Status::internal(error.to_string()))?))
        }
        Route::FlowControl(dump) => {
            let text = server.flow_control.as_ref().and_then(|flow| flow.dump(dump));
            Ok(text.map_or_else(page_not_found, |text| http::text(200, text)))
        }
        Route::Profile(profile) if server.config.serving.profiling => Ok(profiling::answer(profile)),
        Route::Root => {
            Ok(http::json(200, &ferrite_json::json!({"paths": root_paths(server, table, services)})))
        }
        Route::OpenIdConfiguration => Ok(server
            .tokens
            .as_ref()
            .map_or_else(page_not_found, |t| http::json(200, &t.configuration(&keys_url(server, &address))))),
        Route::JsonWebKeys => {
            negotiate::check_only(accept, "application/jwk-set+json")?;
            Ok(server.tokens.as_ref().map_or_else(page_not_found, |t| {
                http::answer(200, "application/jwk-set+json", t.keys().to_string())
            }))
        }
        Route::Profile(_) | Route::Tunnel | Route::Unknown | Route::Incomplete | Route::Resource(_) => {
            Ok(page_not_found())
        }
    }
}

/// Where clients find the keys that verify tokens.
fn keys_url(server: &ApiServer, address: &str) -> String {
    let own = || format!("https://{address}/openid/v1/jwks");
    server.config.keys_url.clone().unwrap_or_else(own)
}

/// Checks only the parts that the request names: a check of the store may take a while.
async fn health_of(server: &ApiServer, endpoint: Health, check: Option<&str>, query: &Query) -> Response {
    let store = match health::asks_store(check, query) {
        true => server.registry.store.check().await.map_err(|error| error.to_string()),
        false => Ok(()),
    };
    if let Err(error) = &store {
        tracing::warn!(%error, endpoint = endpoint.as_str(), "the store is not well");
    }
    let mut extra = Vec::new();
    for further in server.config.health_checks.iter().filter(|c| health::asks(c.name, check, query)) {
        let result = (further.check)().await;
        if let Err(error) = &result {
            tracing::warn!(%error, endpoint = endpoint.as_str(), check = further.name, "a health check failed");
        }
        extra.push((further.name, result));
    }
    let (started, draining) = (server.has_started(), server.is_draining());
    let registered = server.aggregator.is_registered();
    let state = health::State { started, registered, draining, store, extra };
    health::answer(endpoint, check, query, &state, &server.config.health_checks)
}

fn root_paths(server: &ApiServer, table: &ResourceMap, services: &ApiServices) -> Vec<String> {
    let mut paths: Vec<String> = [
        "/.well-known/openid-configuration",
        "/api",
        "/api/v1",
        "/apis",
        "/apis/",
        "/flagz",
        "/metrics",
        "/metrics/slis",
        "/openapi/v2",
        "/openapi/v3",
        "/openapi/v3/",
        "/openid/v1/jwks",
        "/statusz",
        "/version",
    ]
    .map(str::to_owned)
    .to_vec();
    for endpoint in [Health::Healthz, Health::Livez, Health::Readyz] {
        paths.push(format!("/{}", endpoint.as_str()));
        paths.extend(
            health::checks(endpoint, &server.config.health_checks)
                .iter()
                .map(|c| format!("/{}/{c}", endpoint.as_str())),
        );
    }
    let local = table.rows().iter().map(|row| (&*row.group, &*row.version));
    let registered = services.all().map(|api| (api.group.as_str(), api.version.as_str()));
    for (group, version) in local.chain(registered).filter(|(group, _)| !group.is_empty()) {
        paths.push(format!("/apis/{group}"));
        paths.push(format!("/apis/{group}/{version}"));
    }
    paths.sort();
    paths.dedup();
    paths
}

pub(crate) fn page_not_found() -> Response {
    http::text(404, "404 page not found\n")
}
