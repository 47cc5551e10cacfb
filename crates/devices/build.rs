//! Compiles the definitions in Rust alone: a plain build needs no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(
        ["proto/deviceplugin.proto", "proto/dra.proto", "proto/dra_health.proto", "proto/podresources.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure()
        .btree_map(".")
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)?;
    Ok(())
}
