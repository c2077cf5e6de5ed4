use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use proptest::prelude::*;

use super::*;

const fn op(code: u16, k: u32) -> FilterInstruction {
    FilterInstruction { code, jump_if: 0, jump_else: 0, k }
}

const fn jump(code: u16, jump_if: u8, jump_else: u8, k: u32) -> FilterInstruction {
    FilterInstruction { code, jump_if, jump_else, k }
}

/// The kernel's own interpreter: a datagram is cut to what the socket's filter returns, and is gone for 0.
struct Kernel([OwnedFd; 2]);

impl Kernel {
    /// `None`: the kernel refuses the program.
    fn run(program: &[FilterInstruction], frame: &[u8]) -> Option<usize> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (one, other) = socketpair(AddressFamily::Unix, SockType::Datagram, None, flags).unwrap();
        let Self([from, to]) = Self([one, other]);
        let mut filter: Vec<libc::sock_filter> = program
            .iter()
            .map(|it| libc::sock_filter { code: it.code, jt: it.jump_if, jf: it.jump_else, k: it.k })
            .collect();
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: the program and its instructions live across the call, and have the lengths that are passed.
        let set = unsafe {
            libc::setsockopt(
                to.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const program).cast(),
                size_of::<libc::sock_fprog>() as libc::socklen_t,
            )
        };
        if set != 0 {
            return None;
        }
        send(from.as_raw_fd(), frame, MsgFlags::empty()).unwrap();
        let mut bytes = vec![0; frame.len() + 1];
        match recv(to.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
            Ok(length) => Some(length),
            Err(Errno::EAGAIN) => Some(0),
            Err(error) => panic!("{error}"),
        }
    }
}

fn operand() -> impl Strategy<Value = u32> {
    prop_oneof![0..70_u32, Just(0xffff), any::<u32>()]
}

/// One instruction, or several of which the last loads from behind X, which is kept small.
fn instructions() -> impl Strategy<Value = Vec<FilterInstruction>> {
    let one = |strategy: BoxedStrategy<FilterInstruction>| strategy.prop_map(|it| vec![it]).boxed();
    let code = |codes: &'static [u16]| proptest::sample::select(codes);
    const LOADS: &[u16] = &[LD_ABS_W, LD_ABS_H, LD_ABS_B, LDX_MSH];
    const PLAIN: &[u16] = &[LD_IMM, LD_LEN, LDX_IMM, LDX_LEN, TAX, TXA];
    const CELLS: &[u16] = &[LD_MEM, LDX_MEM, ST, STX];
    const CALCULATIONS: &[u16] = &[ADD, SUB, MUL, DIV, OR, AND, LSH, RSH, MOD, XOR];
    const COMPARISONS: &[u16] = &[JEQ, JGT, JGE, JSET];
    const INDIRECT: &[u16] = &[LD_IND_W, LD_IND_H, LD_IND_B];
    let calculation = (code(CALCULATIONS), any::<bool>(), operand());
    let comparison = (code(COMPARISONS), any::<bool>(), 0..6_u8, 0..6_u8, operand());
    prop_oneof![
        3 => one((code(LOADS), 0..40_u32).prop_map(|(code, k)| op(code, k)).boxed()),
        1 => one((code(PLAIN), operand()).prop_map(|(code, k)| op(code, k)).boxed()),
        2 => one((code(CELLS), 0..18_u32).prop_map(|(code, k)| op(code, k)).boxed()),
        3 => one(calculation.prop_map(|(of, x, k)| op(ALU | of | if x { BY_X } else { 0 }, k)).boxed()),
        1 => one(Just(op(ALU | NEG, 0)).boxed()),
        3 => one(comparison
            .prop_map(|(of, x, one, other, k)| jump(JMP | of | if x { BY_X } else { 0 }, one, other, k))
            .boxed()),
        1 => one((0..4_u32).prop_map(|k| op(JMP | JA, k)).boxed()),
        2 => (code(INDIRECT), 0..30_u32)
            .prop_map(|(code, k)| vec![op(ALU | AND, 31), op(TAX, 0), op(code, k)]),
        1 => one((code(&[RET_A, RET_K]), operand()).prop_map(|(code, k)| op(code, k)).boxed()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, max_global_rejects: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn programs_that_the_kernel_runs_return_what_they_return_there(
        body in prop::collection::vec(instructions(), 0..12),
        end in prop_oneof![Just(op(RET_A, 0)), operand().prop_map(|k| op(RET_K, k))],
        frame in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        let mut program: Vec<FilterInstruction> = body.into_iter().flatten().collect();
        program.push(end);
        // The kernel refuses what is wrong, and programs that read a cell before they write it, which here is 0.
        let expected = Kernel::run(&program, &frame);
        prop_assume!(expected.is_some());
        let checked = FilterProgram::new(program.clone());
        prop_assert!(checked.is_ok(), "{program:?}: {checked:?}");
        let checked = checked.unwrap();
        let kept = checked.run(&frame).map_or(0, |bytes| (bytes as usize).min(frame.len()));
        prop_assert_eq!(Some(kept), expected, "{:?}", &program);
        prop_assert_eq!(checked.accepts(&frame), kept > 0);
        prop_assert_eq!(checked.to_string().parse(), Ok(checked));
    }

    #[test]
    fn no_program_of_any_instructions_panics_or_runs_for_ever(
        program in prop::collection::vec((any::<u16>(), any::<u8>(), any::<u8>(), any::<u32>()), 0..40),
        frame in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let program = program.into_iter().map(|(code, jump_if, jump_else, k)| jump(code % 0xb8, jump_if % 8, jump_else % 8, k));
        if let Ok(program) = FilterProgram::new(program.chain([op(RET_K, 1)]).collect()) {
            program.accepts(&frame);
        }
    }
}

#[test]
fn a_program_that_is_not_understood_is_refused_with_the_place() {
    let end = op(RET_K, 1);
    let refused = |program: &[FilterInstruction]| FilterProgram::new(program.to_vec()).unwrap_err();
    let not_understood = |it: FilterInstruction| {
        assert_eq!(refused(&[it, end]), FilterProgramError::NotUnderstood { at: 0, code: it.code, k: it.k });
    };
    // The kernel's extensions, unknown codes, cells and shifts that do not exist, a division by zero.
    not_understood(op(LD_ABS_W, (-0x1000_i32) as u32));
    not_understood(op(0xffff, 0));
    not_understood(op(LD_MEM, CELLS as u32));
    not_understood(op(ST, CELLS as u32));
    not_understood(op(ALU | LSH, 32));
    not_understood(op(ALU | DIV, 0));
    not_understood(op(ALU | NEG | BY_X, 0));
    not_understood(op(ALU | 0xb0, 1));
    assert_eq!(refused(&[]), FilterProgramError::NoEnd);
    assert_eq!(refused(&[op(LD_LEN, 0)]), FilterProgramError::NoEnd);
    for far in [op(JMP | JA, 1), op(JMP | JA, u32::MAX), jump(JMP | JEQ, 1, 0, 0), jump(JMP | JEQ, 0, 255, 0)] {
        assert_eq!(refused(&[far, end]), FilterProgramError::Jump { at: 0 }, "{far:?}");
    }
    let long = vec![end; FilterProgram::LONGEST + 1];
    assert_eq!(refused(&long), FilterProgramError::TooLong(FilterProgram::LONGEST + 1));
    assert!(FilterProgram::new(long[1..].to_vec()).is_ok());
}

#[test]
fn the_text_of_a_program_is_that_of_tcpdump_or_iptables() {
    let expected = FilterProgram::new(vec![jump(LD_ABS_H, 0, 0, 12), op(RET_K, 9)]).unwrap();
    for text in ["2\n40 0 0 12\n6 0 0 9\n", "2,40 0 0 12,6 0 0 9", " 2 , 40 0  0 12,6 0 0 9,"] {
        assert_eq!(text.parse(), Ok(expected.clone()), "{text:?}");
    }
    for text in ["", "x", "1", "2,6 0 0 9", "1,6 0 0", "1,6 0 0 9 9", "1,6 0 0 -1", "1,6 256 0 1"] {
        let error = text.parse::<FilterProgram>().unwrap_err();
        assert!(matches!(error, FilterProgramError::NotAProgram(_)), "{text:?}: {error}");
    }
}
