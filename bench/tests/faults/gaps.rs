//! A crash, a stop, a start and a takeover under steady connections that repeat: none of them is lost, and none passes that policy denies.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_bench::load::segments;
use penstock_bench::probe::{ProbeOutcome, Protocol, Site};
use socket2::{Domain, Socket, Type};

use crate::faults::repeated::{METRICS, NOBODY, ONLY_POD_0, manifests, outcome, repeated};
use crate::fixture::Fixture;

const LIMIT: Duration = Duration::from_secs(20);
/// Between two questions. A pod's credit without a daemon lasts for minutes of them.
const INTERVAL: Duration = Duration::from_millis(5);
/// Below those that the kernel chooses.
const FIRST_PORT: u16 = 2000;
/// How long something stays as it is.
const WHILE: Duration = Duration::from_millis(500);

/// Three pods, of which the second admits only the first.
fn fixture() -> Fixture {
    Fixture::of(&manifests(ONLY_POD_0), |_, config| {
        config.offload = true;
        config.metrics = Some(METRICS);
        let directory = config.manifests.parent().unwrap().display();
        config.conntrack = format!("mapping = \"{directory}/run/conntrack\"\nentries = 131072\n");
        config.sections += "[fail]\non_exit = \"keep\"\n";
    })
}

/// A datagram from a port of its own, and whether its answer came. Nobody sends one again.
#[derive(Debug)]
struct Question {
    asked: Instant,
    is_answered: bool,
}

/// Asks without end.
struct Questions {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Question>>,
}

impl Questions {
    fn start(from: &Site, to: SocketAddr) -> Self {
        let (ends, from_address) = (Arc::new(AtomicBool::new(false)), from.address(to.is_ipv6()).unwrap());
        let ended = Arc::clone(&ends);
        let ask = move || {
            let (mut asked, mut waiting): (Vec<Question>, Vec<(usize, UdpSocket)>) = (Vec::new(), Vec::new());
            let mut until = None;
            while until.is_none_or(|until| Instant::now() < until) {
                if !ended.load(Ordering::Relaxed) {
                    // Each of a port that was not used before: the entry of another one may need a worker.
                    let port = FIRST_PORT + u16::try_from(asked.len()).unwrap();
                    let socket = UdpSocket::bind(SocketAddr::new(from_address, port)).unwrap();
                    socket.set_nonblocking(true).unwrap();
                    socket.connect(to).unwrap();
                    socket.send(&[0; 16]).unwrap();
                    waiting.push((asked.len(), socket));
                    asked.push(Question { asked: Instant::now(), is_answered: false });
                } else if waiting.is_empty() {
                    break;
                } else {
                    // However busy the machine is.
                    until = until.or_else(|| Some(Instant::now() + Duration::from_secs(3)));
                }
                waiting.retain(|(number, socket)| {
                    asked[*number].is_answered = socket.recv(&mut [0; 64]).is_ok();
                    !asked[*number].is_answered
                });
                std::thread::sleep(INTERVAL);
            }
            asked
        };
        Self { ends, thread: from.namespace.spawn("questions", ask).unwrap() }
    }

    fn end(self) -> Vec<Question> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// Opens TCP connections one after another. Returns how many, and how long each took.
fn connect_until(from: &Site, to: SocketAddr, ends: &Arc<AtomicBool>) -> JoinHandle<Vec<Duration>> {
    let ended = Arc::clone(ends);
    let connect = move || {
        let mut took = Vec::new();
        while !ended.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let mut stream = TcpStream::connect_timeout(&to, LIMIT).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            stream.write_all(&[0; 16]).unwrap();
            stream.read_exact(&mut [0; 20]).unwrap();
            took.push(begun.elapsed());
            std::thread::sleep(INTERVAL);
        }
        took
    };
    from.namespace.spawn("connections", connect).unwrap()
}

fn address(fixture: &Fixture) -> SocketAddr {
    SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 53)
}

/// The first pod has asked, and programs repeat the answer.
fn let_repeat(fixture: &Fixture) {
    let deadline = Instant::now() + LIMIT;
    let before = repeated(fixture, 0);
    while repeated(fixture, 0) < before + 4 {
        assert!(Instant::now() < deadline, "no connection is repeated");
        for protocol in [Protocol::Udp(53), Protocol::Tcp(8080)] {
            assert_eq!(outcome(fixture, "test/pod-0", "test/pod-1", protocol), ProbeOutcome::Reached);
        }
    }
}

/// A part of a test: its name, and when it began.
type Part = (&'static str, Instant);

/// Which of the parts' questions had no answer, and how many there were.
fn unanswered(parts: &[Part], questions: &[Question]) -> Vec<(&'static str, usize, usize)> {
    let of_part = |number: usize| {
        let (name, from) = parts[number];
        let until = parts.get(number + 1).map(|(_, at)| *at);
        let within = || questions.iter().filter(|it| it.asked >= from && until.is_none_or(|until| it.asked < until));
        (name, within().filter(|it| !it.is_answered).count(), within().count())
    };
    (0..parts.len()).map(of_part).collect()
}

#[test]
fn a_crash_start_stop_or_takeover_loses_no_repeated_one() {
    let mut fixture = fixture();
    let_repeat(&fixture);
    let to = address(&fixture);
    let allowed = Questions::start(fixture.site("test/pod-0"), to);
    let denied = Questions::start(fixture.site("test/pod-2"), to);
    let ends = Arc::new(AtomicBool::new(false));
    let connections = connect_until(fixture.site("test/pod-0"), SocketAddr::new(to.ip(), 8080), &ends);
    let mut parts: Vec<Part> = vec![("before", Instant::now())];
    let mut next = |name| {
        std::thread::sleep(WHILE);
        parts.push((name, Instant::now()));
    };
    for (ends, end, start) in
        [(Signal::SIGKILL, "a crash", "the start after it"), (Signal::SIGTERM, "a stop", "the start after that")]
    {
        next(end);
        fixture.daemon.signal(ends).unwrap();
        fixture.daemon.wait_until_ended(Duration::from_secs(30)).unwrap();
        next(start);
        fixture.restart();
        // Also once programs repeat what workers of this daemon have answered.
        let_repeat(&fixture);
    }
    next("a takeover");
    let before = fixture.take_over();
    let_repeat(&fixture);
    next("after it");
    std::thread::sleep(WHILE);
    let (allowed, denied) = (allowed.end(), denied.end());
    drop(before);
    ends.store(true, Ordering::Relaxed);
    let connections = connections.join().expect("each TCP connection opens");
    let slow = connections.iter().filter(|took| **took >= Duration::from_secs(1)).count();
    println!("{} TCP connections, of which {slow} took a second or more", connections.len());
    let lost = unanswered(&parts, &allowed);
    println!("unanswered: {lost:?}");
    assert!(
        lost.iter().all(|(_, lost, all)| *lost == 0 && *all > 0),
        "{lost:?}\n{}",
        fixture.daemon.log().lines().join("\n")
    );
    assert!(denied.iter().all(|question| !question.is_answered), "{:?}", unanswered(&parts, &denied));
}

/// Ports that come back.
const FEW: usize = 40;

/// Opens TCP connections one after another, which end by a RST, each from the next of a few ports. Tells when each began, and whether neither its
/// SYN nor its question was sent again.
fn reset_until(
    from: &Site,
    to: SocketAddr,
    ends: &Arc<AtomicBool>,
    connections: &Arc<Mutex<Vec<Question>>>,
) -> JoinHandle<()> {
    let (ended, from_address) = (Arc::clone(ends), from.address(to.is_ipv6()).unwrap());
    let connections = Arc::clone(connections);
    let connect = move || {
        for number in 0.. {
            if ended.load(Ordering::Relaxed) {
                break;
            }
            let asked = Instant::now();
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
            socket.set_reuse_address(true).unwrap();
            socket.set_linger(Some(Duration::ZERO)).unwrap();
            let port = FIRST_PORT - 1 - (number % FEW) as u16;
            socket.bind(&SocketAddr::new(from_address, port).into()).unwrap();
            socket.connect_timeout(&to.into(), LIMIT).unwrap();
            let mut stream = TcpStream::from(socket);
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            stream.write_all(&[0; 16]).unwrap();
            stream.read_exact(&mut [0; 20]).unwrap();
            let (_, retransmitted) = segments(&stream).unwrap();
            connections.lock().unwrap().push(Question { asked, is_answered: retransmitted == 0 });
            std::thread::sleep(INTERVAL);
        }
    };
    from.namespace.spawn("connections", connect).unwrap()
}

/// A client that resets its connections, as load balancers and health checks do, has its ports back at once.
#[test]
fn without_a_daemon_a_port_comes_back_after_a_reset() {
    let mut fixture = fixture();
    let_repeat(&fixture);
    let ends = Arc::new(AtomicBool::new(false));
    let to = SocketAddr::new(address(&fixture).ip(), 8080);
    let connections = Arc::default();
    let thread = reset_until(fixture.site("test/pod-0"), to, &ends, &connections);
    // Each port comes back.
    let wait = || {
        let (before, deadline) = (connections.lock().unwrap().len(), Instant::now() + LIMIT);
        while connections.lock().unwrap().len() < before + 2 * FEW {
            assert!(Instant::now() < deadline, "{:?}", connections.lock().unwrap().last());
            std::thread::sleep(INTERVAL);
        }
    };
    wait();
    let mut parts: Vec<Part> = Vec::new();
    for ends in [Signal::SIGKILL, Signal::SIGTERM] {
        fixture.daemon.signal(ends).unwrap();
        fixture.daemon.wait_until_ended(Duration::from_secs(30)).unwrap();
        parts.push((if parts.is_empty() { "a crash" } else { "a stop" }, Instant::now()));
        wait();
        parts.push(("the start after it", Instant::now()));
        fixture.restart();
        let_repeat(&fixture);
    }
    ends.store(true, Ordering::Relaxed);
    thread.join().expect("each connection opens");
    let sent_again = unanswered(&parts, &connections.lock().unwrap());
    println!("with segments that were sent again: {sent_again:?}");
    // A RST that a worker has when it ends is lost, and this client has no more than one on its way. Where workers are there, a busy machine may
    // let them wait for a second.
    assert!(sent_again.iter().step_by(2).all(|(_, again, _)| *again <= 1), "{sent_again:?}");
}

/// Until the next daemon has the node the last policy stands, as documented; from then on its own.
#[test]
fn a_policy_that_changed_without_a_daemon_holds_from_its_start() {
    let mut fixture = fixture();
    let_repeat(&fixture);
    let to = address(&fixture);
    for takes_over in [false, true] {
        let questions = Questions::start(fixture.site("test/pod-0"), to);
        std::thread::sleep(WHILE);
        let from = match takes_over {
            false => {
                fixture.kill();
                fixture.save("all.yaml", &manifests(NOBODY));
                fixture.restart();
                Instant::now()
            }
            // The one that runs has it in effect before the next one begins.
            true => {
                fixture.enforce(&manifests(NOBODY));
                let from = Instant::now();
                drop(fixture.take_over());
                from
            }
        };
        std::thread::sleep(WHILE);
        let questions = questions.end();
        let passed = |question: &&Question| question.asked > from && question.is_answered;
        assert_eq!(questions.iter().filter(passed).count(), 0, "takes over: {takes_over}");
        assert!(questions.iter().any(|question| question.is_answered), "before");
        assert_eq!(outcome(&fixture, "test/pod-0", "test/pod-1", Protocol::Tcp(8080)), ProbeOutcome::Silent);
        fixture.enforce(&manifests(ONLY_POD_0));
        let_repeat(&fixture);
    }
}
