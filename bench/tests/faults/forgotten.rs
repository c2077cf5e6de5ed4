//! Connections that one end lost silently can be reopened from the same ports. A forged SYN in a live connection does
//! no harm.
//!
//! An end vanishes silently with `TCP_REPAIR`: the kernel sends nothing when a socket in that mode is closed
//! (net/ipv4/tcp.c, `tcp_disconnect`). For its peer and the node it is a machine that lost power.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use penstock_bench::probe::Site;
use penstock_bench::testbed::{Namespace, Outside};
use socket2::{Domain, Socket, Type};

use crate::fixture::{Fixture, pods, policy};
use crate::forger::Forger;

/// Connections that are lost at once.
const CONNECTIONS: u16 = 300;
const FIRST_PORT: u16 = 20_000;
const PORT: u16 = 7000;
/// Timeout until both ends have exchanged data on a busy machine, retransmissions included.
const TIMEOUT: Duration = Duration::from_secs(20);

type ConnectionEnds = (TcpStream, TcpStream);

/// Opens a connection from each of these ports concurrently; returns those that exchanged data both ways.
fn open(client: &Namespace, from: SocketAddr, server: &Namespace, to: SocketAddr) -> Vec<Option<ConnectionEnds>> {
    let listener = server.listen(to).unwrap();
    listener.set_nonblocking(true).unwrap();
    // Backlog for all of them.
    socket2::SockRef::from(&listener).listen(i32::from(CONNECTIONS)).unwrap();
    let begin = |number| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::new(from.ip(), FIRST_PORT + number).into())?;
        socket.set_nonblocking(true)?;
        // In progress.
        let _ = socket.connect(&to.into());
        std::io::Result::Ok(socket)
    };
    let clients: Vec<Socket> = client.run(|| (0..CONNECTIONS).map(|number| begin(number).unwrap()).collect());
    let mut servers: Vec<Option<TcpStream>> = (0..CONNECTIONS).map(|_| None).collect();
    let deadline = Instant::now() + TIMEOUT;
    while servers.iter().any(Option::is_none) && Instant::now() < deadline {
        match listener.accept() {
            Ok((stream, from)) => servers[usize::from(from.port() - FIRST_PORT)] = Some(stream),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
    let pair = |(client, server): (Socket, Option<TcpStream>)| {
        let mut ends = (TcpStream::from(client), server?);
        ends.0.set_nonblocking(false).ok()?;
        exchange(&mut ends).then_some(ends)
    };
    clients.into_iter().zip(servers).map(pair).collect()
}

/// Whether data gets there and back.
fn exchange((client, server): &mut ConnectionEnds) -> bool {
    let mut word = [0; 5];
    let mut there_and_back = || {
        for end in [&*client, &*server] {
            end.set_read_timeout(Some(TIMEOUT))?;
        }
        client.write_all(b"there")?;
        server.read_exact(&mut word)?;
        server.write_all(b"again")?;
        client.read_exact(&mut word)
    };
    there_and_back().is_ok() && &word == b"again"
}

/// Closes a socket without sending anything.
fn forget(end: TcpStream) {
    let on: libc::c_int = 1;
    let size = size_of_val(&on) as libc::socklen_t;
    // SAFETY: the option's value is an int, and lives through the call.
    let result =
        unsafe { libc::setsockopt(end.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, (&raw const on).cast(), size) };
    assert_eq!(result, 0, "TCP_REPAIR: {}", std::io::Error::last_os_error());
}

fn established(ends: &[Option<ConnectionEnds>]) -> usize {
    ends.iter().flatten().count()
}

#[test]
fn connections_lost_at_both_ends_reopen_from_the_same_ports() {
    let fixture = Fixture::of(&pods(2), |_, _| {});
    let [client, server] = ["test/pod-0", "test/pod-1"].map(|name| fixture.site(name));
    let [from, to] = [client, server].map(|site| SocketAddr::new(site.address(false).unwrap(), PORT));
    for turn in 0..3 {
        let ends = open(&client.namespace, from, &server.namespace, to);
        assert_eq!(
            established(&ends),
            usize::from(CONNECTIONS),
            "opened, turn {turn}: {:?}",
            fixture.port("test/pod-1").drops
        );
        // The ends of the last turn close normally: nothing of the earlier connections remains.
        if turn < 2 {
            ends.into_iter().flatten().for_each(|(client, server)| [client, server].into_iter().for_each(forget));
        }
    }
}

#[test]
fn a_recreated_machine_reopens_connections_from_its_ports() {
    let mut machine = None;
    let mut fixture = Fixture::of(&pods(1), |cluster, _| machine = Some(cluster.node.add_outside("outside").unwrap()));
    let server = fixture.site("test/pod-0").clone();
    let to = SocketAddr::new(server.address(false).unwrap(), PORT);
    for turn in 0..2 {
        let outside = machine.take().unwrap();
        let from = SocketAddr::new(outside.addresses()[0], PORT);
        let ends = open(outside.namespace(), from, &server.namespace, to);
        assert_eq!(
            established(&ends),
            usize::from(CONNECTIONS),
            "opened, turn {turn}: {:?}",
            fixture.port("test/pod-0").drops
        );
        if turn == 0 {
            for (client, server) in ends.into_iter().flatten() {
                forget(client);
                forget(server);
            }
            drop(outside);
            machine = Some(made_anew(&mut fixture));
        }
    }
}

/// Recreates the machine outside with the same addresses, once the kernel has removed the old interface.
fn made_anew(fixture: &mut Fixture) -> Outside {
    let deadline = Instant::now() + TIMEOUT;
    let gone =
        |fixture: &Fixture| !fixture.cluster.node.netlink().interface_names().unwrap().contains(&"eth1".to_owned());
    while !gone(fixture) {
        assert!(Instant::now() < deadline, "the old machine's interface stays");
        std::thread::sleep(Duration::from_millis(10));
    }
    fixture.cluster.node.add_outside("outside").unwrap()
}

#[test]
fn a_forged_syn_does_not_break_a_live_connection() {
    // Only the outside may open: a connection opened by a reply of the pod would be denied.
    let mut outside = None;
    let yaml = pods(1) + &policy("answers", "pod-0", "  policyTypes: [Egress]\n  egress: []\n");
    let fixture = Fixture::of(&yaml, |cluster, _| outside = Some(cluster.node.add_outside("outside").unwrap()));
    let (outside, server) = (outside.unwrap(), fixture.site("test/pod-0"));
    let client = Site::from(&outside);
    let (from, to) = (client.address(false).unwrap(), server.address(false).unwrap());
    let listener = server.namespace.listen((to, PORT)).unwrap();
    let stream = client.namespace.run(|| TcpStream::connect_timeout(&(to, PORT).into(), TIMEOUT)).unwrap();
    let port = stream.local_addr().unwrap().port();
    let mut ends = (stream, listener.accept().unwrap().0);
    assert!(exchange(&mut ends));
    let mut forger = Forger::outside(&fixture, &outside);
    for number in 0..200_u32 {
        let seq = number.wrapping_mul(0x9e37_79b1);
        let syn = forger.tcp((from, port), (to, PORT), |tcp| (tcp.syn, tcp.sequence_number) = (true, seq));
        forger.send(&syn);
        if number % 20 == 0 {
            assert!(exchange(&mut ends), "after {} forged SYNs: {:?}", number + 1, fixture.port("test/pod-0").drops);
        }
    }
    assert!(exchange(&mut ends), "after all of them: {:?}", fixture.port("test/pod-0").drops);
    // None of them was answered as on an unknown connection.
    drop(listener);
    assert!(exchange(&mut ends));
}
