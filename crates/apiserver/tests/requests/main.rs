//! Requests of an in-process client to a server on a store in memory.

mod hook;
mod world;

mod admitting;
mod allowed;
mod asking;
mod auditing;
mod bounded;
mod certified;
mod compared;
mod compared_further;
mod compared_parts;
mod compared_shapes;
mod converting;
mod custom;
mod defining;
mod deleting;
mod granting;
mod jwt;
mod network;
mod parts;
mod policies;
mod reading;
mod refusing;
mod servers;
mod services;
mod slow_clients;
mod streams;
mod tunnels;
mod webhooks;
mod writing;
