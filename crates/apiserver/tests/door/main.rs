//! The server through its in-process door, on a store in memory: what a client sees.

mod world;

mod allowed;
mod deleting;
mod network;
mod reading;
mod servers;
mod streams;
mod writing;
