//! Properties of a policy set that the packet path relies on: every worker can read it, and reading it allocates
//! nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::sync::Arc;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::policy::{
    AddressBlock, AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, PeerSpec, PolicySet, PortProtocol,
    PortRange, PortSpec, RuleName, RuleSpec, RuleTable,
};

thread_local! {
    /// Allocations of this thread.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: forwards every call to the system's allocator; counting only changes a thread-local number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's guarantees about `layout` satisfy the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above, so from the system's allocator, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn address(number: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0000 + number).into()
}

/// A hundred pods, each isolated by a table of 200 rules: identities, blocks with excepts, ranges.
fn set() -> PolicySet {
    let identity = |number: u32| Identity(NonZeroU32::new(1 + number % 7).expect("at least one"));
    let rule = |number: u16| RuleSpec {
        name: RuleName::new("test/policy", format!("rule {number}")),
        peers: PeerSpec::AnyOf {
            every_pod: number.is_multiple_of(50),
            blocks: vec![AddressBlock {
                cidr: "10.0.0.0/24".parse().expect("a prefix"),
                except: vec![format!("10.0.0.{}/32", number % 100).parse().expect("a prefix")],
            }],
        },
        ports: PortSpec::AnyOf(vec![PortRange { protocol: PortProtocol::Tcp, first: number, last: number * 3 }]),
    };
    let rules: Vec<RuleSpec> = (1..200).map(rule).collect();
    let members = (0..7).map(|number| (identity(number), (0..199).filter(|rule| rule % 7 == number).collect()));
    let table = Arc::new(RuleTable::new(&rules, members));
    let mut update = PolicySet::default().update();
    for number in 0..100 {
        let owner = AddressOwner::Pod { identity: identity(number), endpoint: Some(EndpointId(number)), node: None };
        let side = || EndpointPolicy::Isolated(table.clone());
        update.set_address(address(number).into(), Some(owner));
        update.set_endpoint(EndpointId(number), Some(Endpoint { egress: side(), ingress: side() }));
    }
    update.finish()
}

#[test]
fn evaluation_allocates_nothing() {
    let set = set();
    let (mut allowed, mut denied) = (0, 0);
    let before = ALLOCATIONS.get();
    for number in 0..40_000u32 {
        let protocol = if number.is_multiple_of(9) { Protocol::ICMP } else { Protocol::TCP };
        let (src, dst) = (address(number % 110).into(), address(number / 7 % 110).into());
        let flow = Flow { src, dst, protocol, src_port: 40000, dst_port: (number % 700) as u16 };
        let policy_verdict = std::hint::black_box(&set).evaluate(&flow);
        if policy_verdict.is_allowed() { allowed += 1 } else { denied += 1 }
    }
    assert_eq!(ALLOCATIONS.get(), before);
    assert!(allowed > 1_000 && denied > 1_000, "{allowed} allowed, {denied} denied");
    let _kept = Box::new([0u8; 100]);
    assert!(ALLOCATIONS.get() > before, "the allocator does count");
}

#[test]
fn workers_read_a_consistent_set_while_the_next_is_built() {
    fn shareable<T: Send + Sync + Clone + 'static>(value: &T) -> T {
        value.clone()
    }
    let set = shareable(&set());
    let flow = Flow {
        src: address(0).into(),
        dst: address(1).into(),
        protocol: Protocol::TCP,
        src_port: 40000,
        dst_port: 100,
    };
    let before = set.evaluate(&flow);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let set = set.clone();
                scope.spawn(move || (0..10_000).all(|_| set.evaluate(&flow) == before))
            })
            .collect();
        let mut next = set.clone();
        for number in 0..100 {
            let mut update = next.update();
            update.set_address(address(number).into(), None).set_endpoint(EndpointId(number), None);
            next = update.finish();
        }
        assert_ne!(next.evaluate(&flow), before);
        assert!(readers.into_iter().all(|reader| reader.join().expect("a reader does not panic")));
    });
}
