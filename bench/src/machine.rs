//! The machine that measures, as a report describes it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

/// The machine as described in the report.
#[derive(Clone, Debug)]
pub struct Machine {
    pub facts: Vec<(String, String)>,
    /// Load average at the start, by other processes.
    pub load: f64,
}

/// Load above which a machine of two cores is too busy for a benchmark.
pub const BUSY: f64 = 0.7;

impl Machine {
    pub fn look() -> Result<Self> {
        let kernel = nix::sys::utsname::uname()?;
        let load = fs::read_to_string("/proc/loadavg")?;
        let load: f64 = load.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(0.0);
        let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
        let cpu = |key: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(key));
            line.and_then(|line| line.split_once(": "))
                .map_or_else(|| "unknown".to_owned(), |(_, value)| value.to_owned())
        };
        let memory = fs::read_to_string("/proc/meminfo")?;
        let memory: u64 =
            memory.split_whitespace().nth(1).and_then(|kilobytes| kilobytes.parse().ok()).unwrap_or_default();
        let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
        let hypervisor = cpu("flags").split_whitespace().any(|flag| flag == "hypervisor");
        let fact = |name: &str, value: String| (name.to_owned(), value);
        let facts = vec![
            fact("Processor", format!("{}, {} MHz as the kernel tells it", cpu("model name"), cpu("cpu MHz"))),
            fact("Cores", format!("{cores}{}", if hypervisor { ", of a virtual machine" } else { "" })),
            fact("Memory", format!("{:.1} GiB", memory as f64 / f64::from(1 << 20))),
            fact("Kernel", format!("{} {}", kernel.sysname().to_string_lossy(), kernel.release().to_string_lossy())),
            fact("Mitigations", mitigations()),
            fact("Compiler", first_line(Command::new("rustc").arg("--version"))),
            fact("Revision", first_line(Command::new("git").args(["describe", "--always", "--dirty"]))),
            fact("Load at the start", format!("{load:.2}")),
        ];
        Ok(Self { facts, load })
    }
}

fn mitigations() -> String {
    let directory = Path::new("/sys/devices/system/cpu/vulnerabilities");
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let active =
        entries.filter(|entry| fs::read_to_string(entry.path()).is_ok_and(|text| text.starts_with("Mitigation")));
    let mut names: Vec<String> = active.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn first_line(command: &mut Command) -> String {
    let output = command.output().ok().filter(|output| output.status.success());
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().map_or_else(|| "unknown".to_owned(), str::to_owned)
}
