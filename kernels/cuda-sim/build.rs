//! Compiles the kernels of `kernels/cuda`, unchanged, and those of `selftest`, with the host's C++ compiler.

use std::path::{Path, PathBuf};
use std::process::exit;

const FAMILIES: [&str; 4] = ["../cuda/copy.cu", "../cuda/store.cu", "../cuda/attention.cu", "selftest/selftest.cu"];

fn main() {
    for path in ["../cuda", "selftest", "shim"] {
        println!("cargo:rerun-if-changed={path}");
    }
    let mut place = compiler();
    place.file("shim/place.cc");
    compile(&place, "kvferry_sim_place");
    for source in FAMILIES {
        let family =
            Path::new(source).file_stem().and_then(|stem| stem.to_str()).expect("sources are files named in ASCII");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
        let mut build = compiler();
        // A copy of the shim in a file of its own name, since one library cannot hold two objects made of one file.
        let unit = out_dir().join(format!("{family}.cc"));
        if let Err(error) = std::fs::copy("shim/family.cc", &unit) {
            fail(&format!("{} cannot be written: {error}", unit.display()));
        }
        build
            .file(unit)
            .define("KVFERRY_SIM_SOURCE", Some(format!("\"{}\"", source.display()).as_str()))
            .define("KVFERRY_SIM_LIST", Some(format!("kvferry_sim_{family}").as_str()));
        compile(&build, &format!("kvferry_sim_{family}"));
    }
}

fn compiler() -> cc::Build {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        // Kernels run in every test run: without optimisation it would take ten times as long.
        .opt_level(2)
        .include("shim")
        .include("../cuda")
        .define("KVFERRY_SIM", None)
        .flag("-fno-exceptions")
        // As written: no fused operation where the source has none, as nvcc is told, too.
        .flag("-ffp-contract=off")
        .flag("-Wall")
        .flag("-Wextra")
        .flag("-Werror")
        .flag("-Wno-unknown-pragmas")
        .flag("-Wno-unused-function");
    build
}

fn compile(build: &cc::Build, library: &str) {
    if let Err(error) = build.try_get_compiler().and_then(|_| build.try_compile(library)) {
        match error.to_string() {
            missing if missing.contains("ToolNotFound") || missing.contains("ailed to find tool") => fail(
                "no C++ compiler was found: install g++ (apt-get install g++) or clang; only kvferry's tests need it, which run its CUDA kernels on the CPU",
            ),
            other => fail(&other),
        }
    }
}

fn out_dir() -> PathBuf {
    std::env::var_os("OUT_DIR").map(PathBuf::from).expect("cargo sets OUT_DIR")
}

fn fail(problem: &str) -> ! {
    eprintln!("{problem}");
    exit(1)
}
