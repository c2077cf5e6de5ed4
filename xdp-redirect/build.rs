//! Compiles the BPF programs with clang and generates their skeletons.

use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::{env, fs};

use libbpf_cargo::SkeletonBuilder;

const XDP: &str = "src/bpf/redirect.bpf.c";
const TCX: &str = "src/bpf/tcx.bpf.c";

fn main() {
    println!("cargo:rerun-if-changed=src/bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    if let Err(error) = Command::new(&clang).arg("--version").output() {
        fail(&format!("cannot run {clang} ({error}): install clang (Debian: apt-get install clang) or set CLANG"));
    }
    compile(&clang, XDP, "redirect", &[]);
    // Compare-and-swap: Linux 5.12.
    compile(&clang, TCX, "tcx", &["-mcpu=v3"]);
}

fn compile(clang: &str, source: &str, name: &str, arguments: &[&str]) {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(format!("{name}.skel.rs"));
    let arguments = ["-Wall", "-Werror"].iter().chain(arguments).map(ToString::to_string);
    let built = SkeletonBuilder::new()
        .source(source)
        .clang(clang)
        .clang_args(arguments.chain(multiarch_headers()))
        .build_and_generate(&out);
    if let Err(error) = built {
        fail(&format!("cannot compile {source}: {error:#} (its headers are in Debian's linux-libc-dev)"));
    }
    // The generated file has inner attributes, which only a module file may contain, hence the include by path.
    assert!(fs::metadata(&out).is_ok_and(|meta| meta.len() > 0), "{} is empty", out.display());
    if env::var_os("CARGO_FEATURE_REPLACEABLE_PROGRAMS").is_some() {
        make_replaceable(&out, name);
    }
}

/// Makes the skeleton ask for the object that it loads (`replaceable_object` in `lib.rs`).
fn make_replaceable(skeleton: &Path, name: &str) {
    let text = fs::read_to_string(skeleton).expect("it was just written");
    let variable = format!("PENSTOCK_{}_OBJECT", name.to_uppercase());
    let from = "ConfigBuilder::new(DATA)";
    let to = format!("ConfigBuilder::new(crate::replaceable_object(DATA, {variable:?}))");
    assert_eq!(text.matches(from).count(), 1, "{} opens one object", skeleton.display());
    fs::write(skeleton, text.replace(from, &to)).expect("it was just written");
}

/// Debian keeps `asm/` in a directory named after the host architecture, which clang's BPF target does not search.
fn multiarch_headers() -> Vec<String> {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets CARGO_CFG_TARGET_ARCH");
    vec!["-idirafter".to_owned(), format!("/usr/include/{arch}-linux-gnu")]
}

/// Ends the build with a one-line message.
fn fail(message: &str) -> ! {
    println!("cargo:warning=penstock-xdp-redirect: {message}");
    eprintln!("penstock-xdp-redirect: {message}");
    exit(1);
}
