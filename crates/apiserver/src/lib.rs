//! The API server: serve, filters, authentication, authorization, admission, registry.
