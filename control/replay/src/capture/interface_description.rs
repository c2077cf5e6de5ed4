//! Interface descriptions of a pcapng file, to which packet blocks refer.

use pcap_parser::{InterfaceDescriptionBlock, OptionCode, PcapNGOption};

use super::error::Damage;
use super::{InterfaceId, LinkType, SECOND, Time};

/// The properties of an interface that decoding its packets needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct InterfaceDescription {
    pub(super) id: InterfaceId,
    pub(super) link: LinkType,
    pub(super) snap_length: u32,
    pub(super) clock: TimestampResolution,
}

/// An interface's timestamp resolution: units in a second, and an offset in seconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TimestampResolution {
    pub(super) units: u64,
    pub(super) offset: i64,
}

impl TimestampResolution {
    /// The time of a packet, clamped to 1970 and to the end of the type.
    #[inline]
    pub(super) fn time(self, stamp: u64) -> Time {
        let (seconds, fraction) = (stamp / self.units, stamp % self.units);
        let nanoseconds = u128::from(fraction) * u128::from(SECOND) / u128::from(self.units);
        let seconds = i128::from(seconds) + i128::from(self.offset);
        let total = seconds * i128::from(SECOND) + nanoseconds as i128;
        Time(total.clamp(0, i128::from(u64::MAX)) as u64)
    }

    /// Reads the interface's options `if_tsresol` and `if_tsoffset` directly: the parser decodes the binary form of the
    /// first wrongly and the second in one byte order only.
    pub(super) fn of(
        block: &InterfaceDescriptionBlock<'_>,
        big_endian: bool,
        interface: usize,
    ) -> Result<Self, Damage> {
        let resolution = find(&block.options, OptionCode::IfTsresol).and_then(|value| value.first().copied());
        let units = match resolution.unwrap_or(6) {
            power @ 0..=19 => 10u64.pow(u32::from(power)),
            power @ 0x80..=0xbf => 1 << (power & 0x7f),
            resolution => return Err(Damage::Resolution { interface, resolution }),
        };
        let offset = find(&block.options, OptionCode::IfTsoffset).and_then(|value| value.first_chunk::<8>().copied());
        let offset =
            offset.map_or(0, |bytes| if big_endian { i64::from_be_bytes(bytes) } else { i64::from_le_bytes(bytes) });
        Ok(Self { units, offset })
    }
}

/// The interface's name, if present and valid UTF-8.
pub(super) fn name(block: &InterfaceDescriptionBlock<'_>) -> Option<String> {
    let name = find(&block.options, OptionCode::IfName)?;
    let name = std::str::from_utf8(name).ok()?.trim_end_matches('\0');
    (!name.is_empty()).then(|| name.to_owned())
}

fn find<'a>(options: &'a [PcapNGOption<'_>], code: OptionCode) -> Option<&'a [u8]> {
    options.iter().find(|option| option.code == code).and_then(|option| option.as_bytes().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_of_every_resolution_become_nanoseconds() {
        for (units, offset, stamp, expected) in [
            (1_000_000, 0, 1_000_001, 1_000_001_000),
            (1_000_000_000, 0, 5, 5),
            (1, 7, 3, 10_000_000_000),
            (1 << 10, 0, 1536, 1_500_000_000),
            (10u64.pow(12), 0, 1_999, 1),
            (1_000_000, -10, 5_000_000, 0),
            (1, i64::MAX, u64::MAX, u64::MAX),
        ] {
            assert_eq!(TimestampResolution { units, offset }.time(stamp), Time(expected), "{stamp}/{units} + {offset}");
        }
    }
}
