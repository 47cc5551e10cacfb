//! Compiles `proto/cri.proto` in Rust alone: a plain build needs no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto/cri.proto");
    let descriptors = protox::compile(["proto/cri.proto"], ["proto"])?;
    prost_build::Config::new().btree_map(["."]).compile_fds(descriptors)?;
    Ok(())
}
