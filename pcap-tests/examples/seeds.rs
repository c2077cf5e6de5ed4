//! Writes seeds for the fuzzer's frames target: one input for each case, with the frames of the case.

use std::path::PathBuf;

use penstock_pcap_tests::case::cases;
use penstock_pcap_tests::fuzz::frames_input;

fn main() -> std::io::Result<()> {
    let Some(directory) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("seeds: no directory to write to; give one");
        std::process::exit(2);
    };
    std::fs::create_dir_all(&directory)?;
    let cases = cases();
    for case in &cases {
        let frames: Vec<_> = case.packets().into_iter().map(|(_, packet)| packet.frame).collect();
        std::fs::write(directory.join(case.name.replace('/', "-")), frames_input(&frames))?;
    }
    println!("{} inputs in {}", cases.len(), directory.display());
    Ok(())
}
