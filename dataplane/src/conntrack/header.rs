//! The header of a table that outlasts its process, in a file or in a BPF array.

use std::io;

use super::hash::Seed;
use super::origin::UnusableFile;

/// Identifies memory as a table that this program can use. Words are in native byte order: they never leave the machine.
pub(super) struct FileHeader {
    words: [u64; Self::WORDS],
}

impl FileHeader {
    /// Magic, version, groups, boot id (2), seed, checksum.
    pub(super) const WORDS: usize = Self::SEED_AT + Seed::WORDS + 1;
    const SEED_AT: usize = 5;
    const CHECKSUM_AT: usize = Self::WORDS - 1;
    /// "penstock" in ASCII.
    const MAGIC: u64 = u64::from_be_bytes(*b"penstock");
    /// Version of the file format; increase it whenever the meaning of any bit changes.
    pub(super) const VERSION: u64 = 7;

    pub(super) fn new(groups: u32, seed: &Seed) -> io::Result<Self> {
        let mut words = [0; Self::WORDS];
        words[..3].copy_from_slice(&[Self::MAGIC, Self::VERSION, u64::from(groups)]);
        words[3..5].copy_from_slice(&boot()?);
        words[Self::SEED_AT..Self::CHECKSUM_AT].copy_from_slice(&seed.words());
        words[Self::CHECKSUM_AT] = Self::checksum(&words[..Self::CHECKSUM_AT]);
        Ok(Self { words })
    }

    pub(super) fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        let mut bytes = [0; size_of::<Self>()];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.words) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// The seed of the header at the start of `file`, whatever follows it.
    pub(super) fn seed_in(file: &[u8], groups: u32) -> Result<Seed, UnusableFile> {
        let bytes = file.get(..size_of::<Self>()).ok_or(UnusableFile::Torn)?;
        let mut words = [0u64; Self::WORDS];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(chunk.try_into().expect("chunks of eight"));
        }
        if words[0] != Self::MAGIC {
            return Err(UnusableFile::Foreign);
        }
        if words[1] != Self::VERSION {
            return Err(UnusableFile::Version { found: words[1], wanted: Self::VERSION });
        }
        if words[Self::CHECKSUM_AT] != Self::checksum(&words[..Self::CHECKSUM_AT]) {
            return Err(UnusableFile::Torn);
        }
        if words[2] != u64::from(groups) {
            return Err(UnusableFile::Size);
        }
        if boot().ok().is_none_or(|boot| words[3..5] != boot) {
            return Err(UnusableFile::OtherBoot);
        }
        Ok(Seed::from_words(words[Self::SEED_AT..Self::CHECKSUM_AT].try_into().expect("as many words")))
    }

    /// Detects accidental damage. It is no protection against someone who can write the file.
    fn checksum(words: &[u64]) -> u64 {
        const PRIME: u64 = 0x9e37_79b9_7f4a_7c15;
        words.iter().fold(PRIME, |sum, word| (sum.rotate_left(29) ^ word).wrapping_mul(PRIME))
    }
}

/// The kernel's boot id: the monotonic clock and the pods start again with each boot.
fn boot() -> io::Result<[u64; 2]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
    Ok([(id >> 64) as u64, id as u64])
}
