//! From a client of the API: bodies, headers and roles that should not get through.
