package sctp

import (
	"encoding/binary"
	"hash/crc32"
)

// Types of chunks (RFC 9260, section 3.2).
const (
	chunkData             = 0
	chunkInit             = 1
	chunkInitAck          = 2
	chunkSack             = 3
	chunkAbort            = 6
	chunkShutdown         = 7
	chunkShutdownAck      = 8
	chunkCookieEcho       = 10
	chunkCookieAck        = 11
	chunkShutdownComplete = 14
)

// The parameter of an INIT ACK that has the cookie (section 3.3.3.1).
const parameterCookie = 7

// All bits that say that a chunk of data is whole (section 3.3.1).
const wholeMessage = 3

const headerLength = 12

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type chunk struct {
	kind, flags byte
	value       []byte
}

// packet is a common header and its chunks.
type packet struct {
	from, to uint16
	tag      uint32
	chunks   []chunk
}

func (p packet) bytes() []byte {
	raw := make([]byte, headerLength)
	binary.BigEndian.PutUint16(raw, p.from)
	binary.BigEndian.PutUint16(raw[2:], p.to)
	binary.BigEndian.PutUint32(raw[4:], p.tag)
	for _, c := range p.chunks {
		raw = append(raw, c.kind, c.flags)
		raw = binary.BigEndian.AppendUint16(raw, uint16(4+len(c.value)))
		raw = append(raw, c.value...)
		raw = append(raw, make([]byte, (4-len(raw)%4)%4)...)
	}
	binary.LittleEndian.PutUint32(raw[8:], crc32.Checksum(raw, castagnoli))
	return raw
}

// parse returns false for what is no packet of this protocol. Connection tracking checks the checksum; raw sockets do not.
func parse(raw []byte) (packet, bool) {
	if len(raw) < headerLength {
		return packet{}, false
	}
	unsummed := append([]byte(nil), raw...)
	copy(unsummed[8:12], make([]byte, 4))
	if crc32.Checksum(unsummed, castagnoli) != binary.LittleEndian.Uint32(raw[8:]) {
		return packet{}, false
	}
	p := packet{from: binary.BigEndian.Uint16(raw), to: binary.BigEndian.Uint16(raw[2:]), tag: binary.BigEndian.Uint32(raw[4:])}
	for rest := unsummed[headerLength:]; len(rest) >= 4; {
		length := int(binary.BigEndian.Uint16(rest[2:]))
		if length < 4 || length > len(rest) {
			return packet{}, false
		}
		p.chunks = append(p.chunks, chunk{rest[0], rest[1], rest[4:length]})
		rest = rest[min((length+3)&^3, len(rest)):]
	}
	return p, len(p.chunks) > 0
}

func words(values ...uint32) []byte {
	var raw []byte
	for _, value := range values {
		raw = binary.BigEndian.AppendUint32(raw, value)
	}
	return raw
}

// A window of 64 KiB, and ten streams each way: more than these tests send.
const (
	window  = 1 << 16
	streams = 10<<16 | 10
)

// initValue is that of an INIT, or of an INIT ACK with a cookie.
func initValue(tag, tsn uint32, cookie []byte) []byte {
	value := words(tag, window, streams, tsn)
	if cookie != nil {
		value = binary.BigEndian.AppendUint16(value, parameterCookie)
		value = binary.BigEndian.AppendUint16(value, uint16(4+len(cookie)))
		value = append(value, cookie...)
	}
	return value
}

// cookieOf finds the cookie of an INIT ACK.
func cookieOf(value []byte) []byte {
	for rest := value[min(16, len(value)):]; len(rest) >= 4; {
		length := int(binary.BigEndian.Uint16(rest[2:]))
		if length < 4 || length > len(rest) {
			return nil
		}
		if binary.BigEndian.Uint16(rest) == parameterCookie {
			return rest[4:length]
		}
		rest = rest[min((length+3)&^3, len(rest)):]
	}
	return nil
}
