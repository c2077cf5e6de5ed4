"""As much of scapy as the profiles use."""

import ipaddress
import struct


class Packet:
    """Layers and payload; `/` puts one into the other."""

    def __init__(self, **fields):
        unknown = set(fields) - set(self.FIELDS)
        if unknown:
            raise AttributeError(f'{type(self).__name__} has no {sorted(unknown)}')
        self.fields, self.inner = fields, None

    def __truediv__(self, other):
        layers = [*self.layers(), *(other.layers() if isinstance(other, Packet) else [other.encode()])]
        whole = type(self)(**self.fields)
        whole.inner = layers[1:]
        return whole

    def layers(self):
        return [type(self)(**self.fields), *(self.inner or [])]

    def __len__(self):
        return len(bytes(self))

    def __bytes__(self):
        built = b''
        for layer in reversed(self.layers()):
            built = (layer if isinstance(layer, bytes) else layer.header(built)) + built
        return built

    def offset(self, name):
        """Where a field such as `UDP.sport` begins."""
        layer_name, field = name.split('.')
        before = 0
        for layer in self.layers():
            if type(layer).__name__ == layer_name:
                return before + layer.FIELDS[field]
            before += layer.LENGTH
        raise KeyError(name)


class Ether(Packet):
    FIELDS, LENGTH = {'dst': 0, 'src': 6}, 14

    def header(self, payload):
        return bytes(12) + (b'\x08\x00' if payload[0] >> 4 == 4 else b'\x86\xdd')


class IP(Packet):
    FIELDS, LENGTH = {'src': 12, 'dst': 16}, 20

    def header(self, payload):
        src, dst = (ipaddress.IPv4Address(self.fields[end]).packed for end in ('src', 'dst'))
        start = struct.pack('!BBHHHBB', 0x45, 0, 20 + len(payload), 1, 0, 64, 17)
        total = sum(struct.unpack('!9H', start + src + dst))
        total = (total & 0xFFFF) + (total >> 16)
        return start + struct.pack('!H', ~(total + (total >> 16)) & 0xFFFF) + src + dst


class IPv6(Packet):
    FIELDS, LENGTH = {'src': 8, 'dst': 24}, 40

    def header(self, payload):
        src, dst = (ipaddress.IPv6Address(self.fields[end]).packed for end in ('src', 'dst'))
        return struct.pack('!IHBB', 6 << 28, len(payload), 17, 64) + src + dst


class UDP(Packet):
    FIELDS, LENGTH = {'sport': 0, 'dport': 2, 'chksum': 6}, 8

    def header(self, payload):
        return struct.pack('!HHHH', self.fields['sport'], self.fields['dport'], 8 + len(payload), self.fields['chksum'])
