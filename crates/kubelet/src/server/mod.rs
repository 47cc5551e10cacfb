//! The kubelet API.
use crate::config::Config;
use crate::pod::context::Context;
use ferrite_client::Scope;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

pub(crate) async fn start(
    _context: Arc<Context>,
    config: Arc<Config>,
    _tls: Arc<rustls::ServerConfig>,
    _scope: &Scope,
) -> io::Result<SocketAddr> {
    Ok(config.server_address)
}
