//! A revoked connection does not come back by a SYN on its ports.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::fixture::{Fixture, pods, policy};
use crate::forger::Forger;

const PORT: u16 = 7000;
/// Timeout for the server's retransmissions on a busy machine: they begin after 0.2 s and double each time.
const TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn a_syn_does_not_restore_a_revoked_connection() {
    let allowed = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
    let fixture = Fixture::of(&(pods(2) + &policy("of-1", "pod-1", allowed)), |_, _| {});
    let [from, to] = ["test/pod-0", "test/pod-1"].map(|name| fixture.site(name));
    let (own, there) = (from.address(false).unwrap(), to.address(false).unwrap());
    let listener = to.namespace.listen((there, PORT)).unwrap();
    let mut client = from.namespace.run(|| TcpStream::connect_timeout(&(there, PORT).into(), TIMEOUT)).unwrap();
    let port = client.local_addr().unwrap().port();
    let mut server = listener.accept().unwrap().0;
    client.write_all(b"x").unwrap();
    server.read_exact(&mut [0]).unwrap();
    // pod-1 admits nobody any more and may still open connections.
    let closed = policy("of-1", "pod-1", "  policyTypes: [Ingress]\n  ingress: []\n");
    fixture.enforce(&(pods(2) + &closed));
    // The server's stack retransmits this from now on.
    server.write_all(b"secret").unwrap();
    let dropped = |pod: &str, reason: &str| fixture.port(pod).drops.get(reason).copied().unwrap_or(0);
    wait(|| dropped("test/pod-1", "connection_revoked") > 0, "the server's data is dropped");
    let mut forger = Forger::of(&fixture, "test/pod-0");
    let syn = forger.tcp((own, port), (there, PORT), |tcp| tcp.syn = true);
    forger.send(&syn);
    wait(|| dropped("test/pod-0", "ingress_denied") > 0, "the SYN is evaluated and denied");
    let before = dropped("test/pod-1", "connection_revoked");
    client.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    let mut data = [0; 16];
    wait(
        || {
            let read = client.read(&mut data);
            let none =
                matches!(&read, Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut));
            assert!(none, "the connection came back: {read:?}, {:?}", fixture.port("test/pod-1").drops);
            dropped("test/pod-1", "connection_revoked") >= before + 2
        },
        "what the server sends again is dropped as well",
    );
}

fn wait(mut until: impl FnMut() -> bool, what: &str) {
    let deadline = Instant::now() + TIMEOUT;
    while !until() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
