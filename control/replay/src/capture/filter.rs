//! Filter expressions of libpcap.
//!
//! tcpdump compiles them (`tcpdump -ddd`): who looks at packets has it, and a command that links libpcap would need it
//! everywhere else too. The daemon gets instructions and checks them.

use std::io;
use std::process::{Command, Stdio};

#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error(
        "--filter {expression:?}: tcpdump, which compiles it, cannot be run ({source}); install it, or use --host, --port and --protocol"
    )]
    NoCompiler { expression: String, source: io::Error },
    #[error("--filter {expression:?}: {message}; write an expression as in pcap-filter(7)")]
    Wrong { expression: String, message: String },
}

/// The program that was given, or that of an expression.
///
/// # Errors
/// The expression is wrong, or there is no tcpdump.
pub fn program(expression: Option<&str>, program: Option<&str>) -> Result<Option<String>, FilterError> {
    expression.map(compile).transpose().map(|compiled| compiled.or_else(|| program.map(in_one_line)))
}

/// An expression as a program: the number of instructions, then each as `code jt jf k`, separated by commas.
///
/// # Errors
/// The expression is wrong, or there is no tcpdump.
fn compile(expression: &str) -> Result<String, FilterError> {
    compile_by("tcpdump", expression)
}

fn compile_by(tcpdump: &str, expression: &str) -> Result<String, FilterError> {
    let named = || expression.to_owned();
    // Behind `--`, so that no expression is an option.
    let output = Command::new(tcpdump)
        .args(["-ddd", "-y", "EN10MB", "--", expression])
        .stdin(Stdio::null())
        .output()
        .map_err(|source| FilterError::NoCompiler { expression: named(), source })?;
    if output.status.success() {
        return Ok(in_one_line(&String::from_utf8_lossy(&output.stdout)));
    }
    let message = String::from_utf8_lossy(&output.stderr);
    let last = message.lines().last().unwrap_or("it does not compile");
    let message = last.trim_start_matches("tcpdump: ").to_owned();
    Err(FilterError::Wrong { expression: named(), message })
}

/// A program as tcpdump prints it, in one line.
fn in_one_line(program: &str) -> String {
    program.trim().lines().map(str::trim).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use penstock_dataplane::filter_program::FilterProgram;

    use super::*;

    /// An IPv4 TCP segment or UDP datagram with these ports, in an Ethernet frame.
    fn frame(protocol: etherparse::IpNumber, from: u16, to: u16) -> Vec<u8> {
        let builder = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        let mut bytes = Vec::new();
        match protocol {
            etherparse::IpNumber::TCP => builder.tcp(from, to, 1, 1).write(&mut bytes, b"payload").unwrap(),
            _ => builder.udp(from, to).write(&mut bytes, b"payload").unwrap(),
        }
        bytes
    }

    #[test]
    fn an_expression_accepts_what_libpcap_says() {
        use etherparse::IpNumber;
        for (expression, frame, expected) in [
            ("tcp port 80", frame(IpNumber::TCP, 1000, 80), true),
            ("tcp port 80", frame(IpNumber::TCP, 80, 1000), true),
            ("tcp port 80", frame(IpNumber::UDP, 1000, 80), false),
            ("tcp dst port 80", frame(IpNumber::TCP, 80, 1000), false),
            ("udp and src host 10.0.0.1", frame(IpNumber::UDP, 1, 2), true),
            ("ip6", frame(IpNumber::UDP, 1, 2), false),
            ("not (udp portrange 1-9) or less 10", frame(IpNumber::UDP, 1, 2), false),
            ("", frame(IpNumber::UDP, 1, 2), true),
        ] {
            let program: FilterProgram = compile(expression).unwrap().parse().unwrap();
            assert_eq!(program.accepts(&frame), expected, "{expression}");
        }
    }

    #[test]
    fn an_expression_that_is_wrong_is_refused_with_its_text() {
        for expression in ["tcp prot 80", "-w", "host"] {
            let error = compile(expression).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--filter {expression:?}: ")) && !error.contains('\n'), "{error}");
        }
        let error = compile_by("no-such-tcpdump", "ip").unwrap_err().to_string();
        assert!(error.contains("tcpdump, which compiles it, cannot be run"), "{error}");
    }
}
