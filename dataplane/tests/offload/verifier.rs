//! How much work the kernel has before it accepts the programs.

use std::fs;

use super::{Node, in_namespace};

/// Instructions that the kernel verifies of a program, counted on each of its paths. At a million it refuses the program
/// (BPF_COMPLEXITY_LIMIT_INSNS in include/linux/bpf.h), and a version of the kernel may follow several times as many paths as another.
const MOST: u64 = 120_000;

/// For each program that this process has open: fdinfo shows it since Linux 5.16.
fn verified_instructions() -> Vec<u64> {
    let files = fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    // Another test's file may be gone by now.
    let texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    texts
        .filter_map(|text| text.lines().find_map(|line| line.strip_prefix("verified_insns:")?.trim().parse().ok()))
        .collect()
}

#[test]
fn programs_stay_far_below_what_a_kernel_verifies_at_most() {
    in_namespace(|| {
        let _node = Node::new();
        let counts = verified_instructions();
        let long = counts.iter().filter(|&&count| count > 10_000).count();
        assert!(long >= 2, "those of a pod's two directions are among {counts:?}");
        assert!(counts.iter().all(|&count| count < MOST), "{counts:?}");
    });
}
