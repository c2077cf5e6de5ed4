//! Classic BPF: the programs that libpcap compiles filter expressions into.
//!
//! The instruction set is that of McCanne and Jacobson, "The BSD Packet Filter" (1993), as the kernel has it
//! (Documentation/networking/filter.rst, `bpf_check_classic` in net/core/filter.c), without its extensions, which need a
//! socket buffer. A program ends, because it only jumps forward.

use std::fmt;
use std::str::FromStr;

/// One instruction (`struct sock_filter` in linux/filter.h).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FilterInstruction {
    pub code: u16,
    /// Instructions to skip if the comparison holds.
    pub jump_if: u8,
    /// Instructions to skip if it does not.
    pub jump_else: u8,
    pub k: u32,
}

/// A checked program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FilterProgram(Vec<FilterInstruction>);

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FilterProgramError {
    #[error(
        "{0:?} is not a filter program: write the number of instructions, then each as `code jt jf k`, separated by commas"
    )]
    NotAProgram(String),
    #[error("the filter program has {0} instructions, and at most {max} are run: write a shorter expression", max = FilterProgram::LONGEST)]
    TooLong(usize),
    #[error("the filter program does not end with a return: compile it with libpcap (tcpdump -ddd)")]
    NoEnd,
    /// An operation that does not exist, or one of the kernel's extensions.
    #[error(
        "instruction {at} of the filter program has code {code:#x} and operand {k:#x}, which are not understood: compile it with libpcap for Ethernet (tcpdump -ddd -y EN10MB)"
    )]
    NotUnderstood { at: usize, code: u16, k: u32 },
    #[error("instruction {at} of the filter program jumps beyond its end: compile it with libpcap (tcpdump -ddd)")]
    Jump { at: usize },
}

const CELLS: usize = 16;

// The operations: class, then size and mode, or operation and source (linux/bpf_common.h).
const LD_IMM: u16 = 0x00;
const LD_ABS_W: u16 = 0x20;
const LD_ABS_H: u16 = 0x28;
const LD_ABS_B: u16 = 0x30;
const LD_IND_W: u16 = 0x40;
const LD_IND_H: u16 = 0x48;
const LD_IND_B: u16 = 0x50;
const LD_MEM: u16 = 0x60;
const LD_LEN: u16 = 0x80;
const LDX_IMM: u16 = 0x01;
const LDX_MEM: u16 = 0x61;
const LDX_LEN: u16 = 0x81;
const LDX_MSH: u16 = 0xb1;
const ST: u16 = 0x02;
const STX: u16 = 0x03;
const CLASS: u16 = 0x07;
const ALU: u16 = 0x04;
const JMP: u16 = 0x05;
const RET_K: u16 = 0x06;
const RET_A: u16 = 0x16;
const TAX: u16 = 0x07;
const TXA: u16 = 0x87;
/// The operand is X, not k.
const BY_X: u16 = 0x08;
const OPERATION: u16 = 0xf0;
const ADD: u16 = 0x00;
const SUB: u16 = 0x10;
const MUL: u16 = 0x20;
const DIV: u16 = 0x30;
const OR: u16 = 0x40;
const AND: u16 = 0x50;
const LSH: u16 = 0x60;
const RSH: u16 = 0x70;
const NEG: u16 = 0x80;
const MOD: u16 = 0x90;
const XOR: u16 = 0xa0;
const JA: u16 = 0x00;
const JEQ: u16 = 0x10;
const JGT: u16 = 0x20;
const JGE: u16 = 0x30;
const JSET: u16 = 0x40;

impl FilterProgram {
    pub const LONGEST: usize = 1024;

    /// Checks a program: it consists of known operations, ends with a return, and leads nowhere else.
    ///
    /// # Errors
    /// The first instruction that is not understood or jumps too far.
    pub fn new(instructions: Vec<FilterInstruction>) -> Result<Self, FilterProgramError> {
        let count = instructions.len();
        if count > Self::LONGEST {
            return Err(FilterProgramError::TooLong(count));
        }
        if !instructions.last().is_some_and(|last| [RET_K, RET_A].contains(&last.code)) {
            return Err(FilterProgramError::NoEnd);
        }
        for (at, instruction) in instructions.iter().enumerate() {
            let FilterInstruction { code, k, .. } = *instruction;
            if !instruction.is_known() {
                return Err(FilterProgramError::NotUnderstood { at, code, k });
            }
            if at + 1 + instruction.longest_jump() >= count && code & CLASS == JMP {
                return Err(FilterProgramError::Jump { at });
            }
        }
        Ok(Self(instructions))
    }

    /// Whether the program accepts a frame. A load from beyond the frame's end rejects it.
    pub fn accepts(&self, frame: &[u8]) -> bool {
        self.run(frame).is_some_and(|bytes| bytes > 0)
    }

    /// The result of the program: the bytes to keep of a frame. `None`: it ended early.
    fn run(&self, frame: &[u8]) -> Option<u32> {
        let (mut a, mut x, mut cells) = (0_u32, 0_u32, [0_u32; CELLS]);
        let mut at = 0;
        loop {
            let FilterInstruction { code, jump_if, jump_else, k } = *self.0.get(at)?;
            at += 1;
            let cell = k as usize % CELLS;
            match code {
                RET_K => return Some(k),
                RET_A => return Some(a),
                LD_IMM => a = k,
                LD_MEM => a = cells[cell],
                LD_LEN => a = frame.len() as u32,
                LDX_IMM => x = k,
                LDX_MEM => x = cells[cell],
                LDX_LEN => x = frame.len() as u32,
                LDX_MSH => x = 4 * (load(frame, k, 1)? & 0xf),
                LD_ABS_W | LD_IND_W => a = load(frame, place(code, k, x), 4)?,
                LD_ABS_H | LD_IND_H => a = load(frame, place(code, k, x), 2)?,
                LD_ABS_B | LD_IND_B => a = load(frame, place(code, k, x), 1)?,
                ST => cells[cell] = a,
                STX => cells[cell] = x,
                TAX => x = a,
                TXA => a = x,
                _ if code & CLASS == ALU => a = calculate(code, a, if code & BY_X == 0 { k } else { x })?,
                _ if code == JMP | JA => at += k as usize,
                _ => {
                    let holds = compare(code, a, if code & BY_X == 0 { k } else { x });
                    at += usize::from(if holds { jump_if } else { jump_else });
                }
            }
        }
    }
}

impl FilterInstruction {
    fn is_known(self) -> bool {
        let Self { code, k, .. } = self;
        match code {
            LD_IMM | LD_LEN | LDX_IMM | LDX_LEN | LD_IND_W | LD_IND_H | LD_IND_B | RET_K | RET_A | TAX | TXA => true,
            LD_MEM | LDX_MEM | ST | STX => (k as usize) < CELLS,
            // Negative places are the kernel's extensions.
            LD_ABS_W | LD_ABS_H | LD_ABS_B | LDX_MSH => k <= i32::MAX as u32,
            _ if code & !(OPERATION | BY_X | CLASS) != 0 => false,
            _ => match (code & CLASS, code & OPERATION, code & BY_X != 0) {
                (ALU, ADD | SUB | MUL | OR | AND | XOR, _) | (ALU, DIV | MOD | LSH | RSH, true) => true,
                (ALU, DIV | MOD, false) => k != 0,
                (ALU, LSH | RSH, false) => k < u32::BITS,
                (ALU, NEG, by_x) => !by_x,
                (JMP, JA, by_x) => !by_x,
                (JMP, JEQ | JGT | JGE | JSET, _) => true,
                _ => false,
            },
        }
    }

    fn longest_jump(self) -> usize {
        if self.code == JMP | JA { self.k as usize } else { self.jump_if.max(self.jump_else).into() }
    }
}

fn place(code: u16, k: u32, x: u32) -> u32 {
    if matches!(code, LD_IND_W | LD_IND_H | LD_IND_B) { x.wrapping_add(k) } else { k }
}

/// Some bytes of the frame as a number, in network byte order.
fn load(frame: &[u8], at: u32, bytes: usize) -> Option<u32> {
    let at = at as usize;
    let found = frame.get(at..at.checked_add(bytes)?)?;
    Some(found.iter().fold(0, |number, &byte| number << 8 | u32::from(byte)))
}

/// `None`: a division by zero, which ends the program.
fn calculate(code: u16, a: u32, operand: u32) -> Option<u32> {
    Some(match code & OPERATION {
        ADD => a.wrapping_add(operand),
        SUB => a.wrapping_sub(operand),
        MUL => a.wrapping_mul(operand),
        DIV => a.checked_div(operand)?,
        MOD => a.checked_rem(operand)?,
        OR => a | operand,
        AND => a & operand,
        XOR => a ^ operand,
        // By the low five bits, as the kernel does.
        LSH => a.wrapping_shl(operand),
        RSH => a.wrapping_shr(operand),
        _ => a.wrapping_neg(),
    })
}

fn compare(code: u16, a: u32, operand: u32) -> bool {
    match code & OPERATION {
        JEQ => a == operand,
        JGT => a > operand,
        JGE => a >= operand,
        _ => a & operand != 0,
    }
}

/// `2,48 0 0 9,6 0 0 1`: the number of instructions, then each, as `tcpdump -ddd` prints them on lines of their own and
/// iptables' match `bpf` takes them.
impl FromStr for FilterProgram {
    type Err = FilterProgramError;

    fn from_str(text: &str) -> Result<Self, FilterProgramError> {
        let shown = || FilterProgramError::NotAProgram(text.chars().take(60).collect());
        let mut parts = text.split([',', '\n']).map(str::trim).filter(|part| !part.is_empty());
        let count: usize = parts.next().and_then(|count| count.parse().ok()).ok_or_else(shown)?;
        let instructions: Option<Vec<FilterInstruction>> = parts.map(instruction).collect();
        let instructions = instructions.filter(|found| found.len() == count).ok_or_else(shown)?;
        Self::new(instructions)
    }
}

fn instruction(text: &str) -> Option<FilterInstruction> {
    let mut words = text.split_ascii_whitespace();
    let instruction = FilterInstruction {
        code: words.next()?.parse().ok()?,
        jump_if: words.next()?.parse().ok()?,
        jump_else: words.next()?.parse().ok()?,
        k: words.next()?.parse().ok()?,
    };
    words.next().is_none().then_some(instruction)
}

impl fmt::Display for FilterProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.len())?;
        self.0.iter().try_for_each(|FilterInstruction { code, jump_if, jump_else, k }| {
            write!(f, ",{code} {jump_if} {jump_else} {k}")
        })
    }
}

#[cfg(test)]
mod tests;
