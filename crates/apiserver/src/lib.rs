//! The API server: serve → filters → authentication → authorization → admission → registry → store.
//!
//! A reader who follows a request opens [`serve`] (and `gather`), `server`, `request`, `filters`, `auth`, `dispatch`, `negotiate`, `call`, `verbs`,
//! then `registry` and its modules, and at last `encode`.

mod admission;
mod aggregation;
mod audit;
mod auth;
mod bootstrap;
mod call;
mod certificates;
mod coalescing;
mod components;
mod connections;
mod discovery;
mod dispatch;
mod documents;
mod encode;
mod endpoints;
mod extensions;
mod filters;
mod flowcontrol;
#[doc(hidden)]
pub mod fuzzing;
mod health;
mod http;
mod identity_lease;
mod idle;
mod ids;
mod inert;
mod managed;
mod metrics;
mod negotiate;
mod openapi;
mod options;
mod outbound;
mod patch;
mod profiling;
mod registry;
mod request;
mod retries;
mod review_webhook;
mod reviews;
mod serve;
mod server;
mod stream;
mod subresource;
mod traffic;
pub mod tunnel;
mod verbs;
mod version;
mod watching;
mod websocket;
mod zpages;

pub use admission::{AdmissionPlugins, ConfigError, Configurations, read_admission_config};
pub use aggregation::{MountedGroup, MountedRequest, MountedResource};
pub use audit::{
    AuditBatch, AuditConfig, AuditFormat, AuditLog, AuditMode, AuditPolicy, AuditSender, AuditThrottle,
    AuditTruncate, AuditWebhook, PolicyError,
};
pub use auth::{
    AbacPolicy, AuthenticationConfig, AuthenticationConfigError, Authorization, AuthorizationConfig,
    AuthorizationConfigError, AuthorizationError, AuthorizerWebhook, JwtAuthentication, Mode, OidcFlags,
    PolicyFileError, RequestHeader, StaticTokens, TokenFileError, TokenWebhook, User, WebhookAuthorizer,
};
pub use certificates::{Certificates, ServingTls};
pub use components::Component;
pub use connections::ConnectionLimits;
pub use endpoints::EndpointReconciler;
pub use filters::{CorsOrigins, CorsOriginsError, TransportSecurity, TransportSecurityError};
pub use health::HealthCheck;
pub use http::{Body, BoxError, Response};
pub use options::{DurationError, go_duration};
pub use registry::{StorageMedia, storage_places};
pub use review_webhook::{WebhookReply, WebhookSender, WebhookSenders};
pub use server::{ApiServer, Config, InProcessClient, Serving, WriteGuard};
pub use version::KUBERNETES_VERSION;
