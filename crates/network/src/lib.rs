//! Pod network: bridge, address management, routes.
