//! One binary, many names: `ferrite <component>`, or a symlink named like the component.

mod accepted;
mod addresses;
mod agent;
mod alone;
mod apiserver;
mod apiserver_flags;
mod auditing;
mod authority;
mod authorizing;
mod bursts;
mod certificate_files;
mod certificates;
mod cli;
mod cluster;
mod component;
mod control;
mod control_plane;
mod control_planes;
mod data_dir;
mod dns;
mod docker;
mod down;
mod explain_schedule;
mod extras;
mod front_proxies;
mod image;
mod joining;
mod kube_controller_manager;
mod kube_proxy;
mod kube_scheduler;
mod kube_scheduler_flags;
mod kubeconfig;
mod kubelet;
mod local_storage;
mod logging;
mod machines;
mod network_cmd;
mod node;
mod node_routes;
mod own_certificates;
mod paths;
mod progress;
mod readiness;
mod runtime;
mod server;
mod serving;
mod standalone;
mod status;
mod storage;
mod store_cmd;
mod timeline;
mod tools;
mod up;
mod watchdog;
mod webhook_client;

use clap::Parser;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: ferrite_memory::Allocator = ferrite_memory::Allocator;

fn main() -> ExitCode {
    let mut arguments: Vec<std::ffi::OsString> = std::env::args_os().collect();
    // The supervisor of a pod must stay tiny: it leaves before anything else is set up.
    if component::is(&arguments, ferrite_runtime::supervisor::NAME) {
        return ferrite_runtime::supervisor::main(arguments.into_iter());
    }
    // A machine of a virtual node does nothing and must stay tiny, too.
    if component::is(&arguments, machines::holder::NAME) {
        return machines::holder::main();
    }
    if component::is(&arguments, machines::control_plane::NAME) {
        return ended(machines::control_plane::main(&arguments));
    }
    if let Some(plugin) = component::cni_plugin(&arguments) {
        return ferrite_network::cni::plugins::main(plugin);
    }
    component::expand(&mut arguments);
    // docker's options are its own: a `-v` there is a volume.
    if let Some(code) = docker::run(&arguments) {
        return code;
    }
    if component::as_pflag(&mut arguments) {
        println!("Kubernetes {}", ferrite_apiserver::KUBERNETES_VERSION);
        return ExitCode::SUCCESS;
    }
    ended(cli::Cli::parse_from(arguments).run())
}

fn ended(result: Result<ExitCode, apiserver::BoxError>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("ferrite: {}", chain(&*error));
        ExitCode::FAILURE
    })
}

/// An error with everything that led to it, in one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
