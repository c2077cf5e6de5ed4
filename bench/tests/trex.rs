//! The TRex profiles and their runner (`bench/trex`): their Python tests, and the configurations for them.
//!
//! With `TREX_DIR` in the environment TRex's own library loads the profiles, otherwise a stand-in.

use std::path::{Path, PathBuf};
use std::process::Command;

use penstock_agent::config::Config;
use penstock_bench::testbed::penstock_binary;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn profiles_load_and_the_runners_tests_pass() {
    let with = match std::env::var_os("TREX_DIR") {
        Some(folder) => format!("with the TRex client in {}", folder.display()),
        None => "with a stand-in for the TRex client: TREX_DIR is not set".to_owned(),
    };
    let output = Command::new("python3")
        .args(["-W", "ignore", "-m", "unittest", "discover", "-v", "-t", "bench/trex", "-s", "bench/trex/tests"])
        .env("PENSTOCK_BIN", penstock_binary().unwrap())
        .current_dir(root())
        .output()
        .expect("python3 is needed: apt-get install python3");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{with}:\n{said}{}", String::from_utf8_lossy(&output.stdout));
    let ran = said.lines().find_map(|line| line.strip_prefix("Ran ")?.split(' ').next()?.parse::<u32>().ok()).unwrap();
    assert!(ran > 40, "only {ran} tests ran:\n{said}");
    eprintln!("{with}: {ran} tests ran");
    said.lines().filter(|line| line.contains("skipped")).for_each(|line| eprintln!("{line}"));
}

#[test]
fn trex_configurations_name_as_many_ports_as_they_describe() {
    for name in ["veth.yaml", "nics.yaml"] {
        let text = std::fs::read_to_string(root().join("configs/trex").join(name)).unwrap();
        let document: Value = serde_saphyr::from_str(&text).unwrap();
        let platform = &document.as_array().unwrap()[0];
        assert_eq!(platform["version"], 2, "{name}");
        let ports = platform["interfaces"].as_array().unwrap().len();
        assert_eq!((platform["port_limit"].as_u64(), ports), (Some(2), 2), "{name}");
        let described = platform["port_info"].as_array().unwrap();
        assert_eq!(described.len(), ports, "{name}");
        for port in described {
            for key in ["ip", "default_gw"] {
                port[key].as_str().unwrap().parse::<std::net::Ipv4Addr>().unwrap();
            }
        }
    }
}

#[test]
fn the_daemon_accepts_the_measured_nodes_configuration() {
    Config::load(&root().join("configs/trex/penstock.toml")).unwrap();
}
