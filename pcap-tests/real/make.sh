#!/bin/bash
# Makes the captures beside it with real tools between two network namespaces that have the addresses of the cases' pods
# shop/web and shop/db. Needs root, tcpdump, curl, iperf3, openssl, nghttpd, ping and python3. Segmentation offloads are
# off, so that packets are captured as they would be on a wire. ONLY=curl-http2 makes that one alone.
set -euo pipefail
cd "$(dirname "$0")"
WEB=penstock-real-web-$$ DB=penstock-real-db-$$
SERVERS=()
cleanup() {
	for pid in "${SERVERS[@]}"; do kill "$pid" 2>/dev/null || true; done
	ip netns del "$WEB" 2>/dev/null || true
	ip netns del "$DB" 2>/dev/null || true
	rm -rf "$SCRATCH"
}
SCRATCH=$(mktemp -d)
trap cleanup EXIT
ip netns add "$WEB"
ip netns add "$DB"
ip -n "$WEB" link add eth0 type veth peer name eth0 netns "$DB"
setup() { # namespace, IPv4, IPv6, other's IPv4
	ip -n "$1" link set lo up
	ip -n "$1" link set eth0 up
	ip -n "$1" addr add "$2/24" dev eth0
	ip -n "$1" addr add "$3/64" dev eth0 nodad
	ip netns exec "$1" ethtool -K eth0 tso off gso off gro off >/dev/null 2>&1 || true
}
setup "$WEB" 10.0.1.1 fd00:1::1
setup "$DB" 10.0.1.2 fd00:1::2
sleep 1
in_db() { ip netns exec "$DB" "$@" >/dev/null 2>&1 & SERVERS+=($!); sleep 0.7; }
record() { # name, command in web
	[ "${ONLY:-$1}" = "$1" ] || return 0
	ip netns exec "$WEB" tcpdump -q -U --immediate-mode -Z root -i eth0 -w "$1.pcap" 'not ip6 multicast' 2>/dev/null &
	local tcpdump=$!
	sleep 1.5
	shift
	ip netns exec "$WEB" timeout 10 "$@" >/dev/null 2>&1 || true
	sleep 1
	kill -INT "$tcpdump"
	wait "$tcpdump" || true
}
echo "a page" >"$SCRATCH/page.txt"
in_db python3 -m http.server -d "$SCRATCH" --bind 10.0.1.2 5432
record curl-http curl -s http://10.0.1.2:5432/page.txt
record curl-denied curl -s --max-time 2 http://10.0.1.2:80/
in_db iperf3 -s -B fd00:1::2 -p 9100
record iperf3-tcp6 iperf3 -c fd00:1::2 -p 9100 -n 40K
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=db \
	-keyout "$SCRATCH/key.pem" -out "$SCRATCH/cert.pem" 2>/dev/null
kill "${SERVERS[0]}"; sleep 0.5
in_db openssl s_server -accept 10.0.1.2:5432 -key "$SCRATCH/key.pem" -cert "$SCRATCH/cert.pem" -www
record openssl-tls bash -c 'echo "GET / HTTP/1.0" | openssl s_client -connect 10.0.1.2:5432 -quiet'
in_db python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("10.0.1.2", 53))
while True:
    query, asker = s.recvfrom(512)
    s.sendto(query[:2] + b"\x81\x80" + query[4:6] + b"\0\1\0\0\0\0" + query[12:] + b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4\x0a\0\1\3", asker)
'
record dns python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2)
s.sendto(b"\x12\x34\1\0\0\1\0\0\0\0\0\0\3api\4shop\0\0\1\0\1", ("10.0.1.2", 53))
s.recv(512)
'
record udp-closed-port python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1)
s.connect(("10.0.1.2", 54))
s.send(b"anybody there?")
s.recv(512)
'
record ping ping -c 2 -i 0.3 10.0.1.2
kill "${SERVERS[2]}"; sleep 0.5
in_db nghttpd --no-tls -a 10.0.1.2 -d "$SCRATCH" 5432
record curl-http2 curl -s --http2-prior-knowledge http://10.0.1.2:5432/page.txt
chmod 644 ./*.pcap
