//! Bad input is stderr in one line, and leaves nothing behind.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;

use crate::fixture::{Files, NAMESPACE, assert_restored, output, pod_manifest};
use crate::netns::{Pod, ip, node_state, on_a_node};

/// Takes these capabilities (numbers of linux/capability.h) from what the command starts.
fn without(command: &mut Command, capabilities: &'static [libc::c_ulong]) {
    let drop = move || {
        for &capability in capabilities {
            // SAFETY: prctl takes no pointer here; it changes this process alone, which is about to be replaced.
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls only; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(drop) };
}

fn assert_rejected(command: Command, line: &str) {
    let output = output(command);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{line}: {stderr}");
    assert!(stderr.lines().any(|stderr| stderr.contains(line)), "not said: {line}\n{stderr}");
}

#[test]
fn bad_input_is_one_line_with_exit_code_2_and_leaves_nothing() {
    on_a_node(|| {
        let pod = Pod::new(5);
        let before = node_state();
        let good = || NAMESPACE.to_owned() + &pod_manifest("web", pod.addresses());
        let cases = [
            ("on_mis = \"drop\"", good(), "penstock.toml:9: on_mis: unknown key; remove it, or use one of: node,"),
            (
                "workers.cores = [999]",
                good(),
                "workers.cores: core 999 does not exist or is not available to this process;",
            ),
            ("umem.memory = \"900GiB\"", good(), "MiB available; lower umem.memory or conntrack.entries"),
        ];
        for (keys, manifests, line) in cases {
            let files = Files::new(keys, &[("all.yaml", manifests)]);
            assert_rejected(files.command("run"), line);
            assert_eq!(node_state(), before, "{line}");
        }
        let files = Files::new("", &[("all.yaml", good())]);
        fs::remove_dir_all(files.path("manifests")).unwrap();
        assert_rejected(files.command("run"), ": not a directory; create it, or correct the path");

        let files = Files::new("", &[("all.yaml", good())]);
        for subcommand in ["run", "check"] {
            let mut command = files.command(subcommand);
            without(&mut command, &[12, 13, 21, 39]);
            assert_rejected(command, "capabilities: CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF missing");
        }
        // No pod stops a start.
        ip("link set veth5 mtu 9000");
        let output = output(files.command("check"));
        let stdout = String::from_utf8_lossy(&output.stdout);
        let line = "ok       pod shop/web: veth5, MTU 9000";
        assert!(output.status.success() && stdout.contains(line), "{stdout}");
        ip("link set veth5 mtu 1500");
        assert_restored(&before);
    });
}

#[test]
fn check_reports_every_problem_and_changes_nothing() {
    on_a_node(|| {
        // A new namespace begins with the machine's own setting.
        fs::write("/proc/sys/net/ipv4/ip_forward", "0").unwrap();
        let pod = Pod::new(5);
        let before = node_state();
        let files = Files::new("", &[("all.yaml", NAMESPACE.to_owned() + &pod_manifest("web", pod.addresses()))]);
        let output = output(files.command("check"));
        let stderr = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        for line in [
            "ok       capabilities: CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF",
            "ok       AF_XDP: supported",
            "ok       workers.cores: 0",
            "ok       source: 2 objects",
            "ok       pod shop/web: veth5, MTU 1500; tso on, gso on, gro ",
            "ok       kernel ",
            "ok       tc programs: the kernel accepts them",
            "ok       RLIMIT_MEMLOCK: ",
            "warning  net/ipv4/ip_forward = 0: pods reach neither Services nor other nodes; set it to 1",
        ] {
            assert!(stderr.lines().any(|stderr| stderr.starts_with(line)), "not stderr: {line}\n{stderr}");
        }
        assert_restored(&before);
    });
}
