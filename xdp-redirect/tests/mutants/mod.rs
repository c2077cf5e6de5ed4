//! A copy of the programs' source in which one condition at a time is broken. Tests include this file; what they run must be built with
//! the feature `replaceable-programs`, and loads the objects that the environment names.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use libbpf_rs::libbpf_sys::API_HEADERS;

const TCX: &str = "tcx.bpf.c";
const XDP: &str = "redirect.bpf.c";
/// Objects of the programs, the variables of the environment that name them, and arguments of the compiler, as in `xdp-redirect/build.rs`.
const OBJECTS: [(&str, &str, &[&str]); 2] = [(TCX, "TCX_OBJECT", &["-mcpu=v3"]), (XDP, "REDIRECT_OBJECT", &[])];

/// The folder of the programs' source.
pub(crate) fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../xdp-redirect/src/bpf")
}

/// Whether this text occurs exactly once in a file of the source.
pub(crate) fn occurs_once(file: &str, text: &str) -> bool {
    fs::read_to_string(sources().join(file)).expect("a file of the project").matches(text).count() == 1
}

/// A copy of the source with the headers that it includes.
pub(crate) struct Source {
    folder: PathBuf,
}

impl Source {
    /// In a folder of this name below the target directory.
    pub(crate) fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(folder.join("include/bpf")).expect("below the target directory");
        for (name, text) in API_HEADERS {
            fs::write(folder.join("include/bpf").join(name), text).expect("below the target directory");
        }
        let source = Self { folder };
        source.restore();
        source
    }

    /// Without a broken condition.
    pub(crate) fn restore(&self) {
        for entry in fs::read_dir(sources()).expect("a folder of the project") {
            let path = entry.expect("a readable folder").path();
            fs::copy(&path, self.folder.join(path.file_name().expect("an entry has a name")))
                .expect("it can be written");
        }
    }

    /// Replaces a part of a file.
    pub(crate) fn replace(&self, file: &str, from: &str, to: &str) {
        let file = self.folder.join(file);
        let text = fs::read_to_string(&file).expect("copied above");
        fs::write(&file, text.replacen(from, to, 1)).expect("below the target directory");
    }

    /// Compiles what a change of this file concerns, warnings apart: a mutant may leave something unused. Returns what to set in the
    /// environment. `what`: the mutant, for people.
    pub(crate) fn compile(&self, file: &str, what: &str) -> Vec<(&'static str, PathBuf)> {
        let objects = OBJECTS.iter().filter(|(source, ..)| self.includes(source, file));
        let compile = |&(source, variable, arguments): &(&'static str, &'static str, &[&str])| {
            (variable, self.object(source, variable, arguments, what))
        };
        objects.map(compile).collect()
    }

    /// Whether a file is this one, or includes it, or a header that does.
    fn includes(&self, from: &str, file: &str) -> bool {
        let text = fs::read_to_string(self.folder.join(from)).expect("copied above");
        let mut headers = text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
        from == file || headers.any(|header| self.includes(header, file))
    }

    fn object(&self, source: &str, name: &str, arguments: &[&str], what: &str) -> PathBuf {
        let object = self.folder.join(name).with_extension("o");
        let mut command = Command::new(std::env::var("CLANG").unwrap_or_else(|_| "clang".to_owned()));
        command.arg("-w").args(arguments).arg("-idirafter");
        command.arg(format!("/usr/include/{}-linux-gnu", std::env::consts::ARCH));
        command.arg("-I").arg(self.folder.join("include")).arg(format!("-D__TARGET_ARCH_{}", bpf_architecture()));
        command.args(["-g", "-O2", "-target", "bpf", "-c"]).arg(self.folder.join(source)).arg("-o").arg(&object);
        let output = command.output().expect("clang has compiled the programs");
        assert!(output.status.success(), "{what} does not compile:\n{}", String::from_utf8_lossy(&output.stderr));
        object
    }
}

fn bpf_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "x86",
        "aarch64" => "arm64",
        other => other,
    }
}
