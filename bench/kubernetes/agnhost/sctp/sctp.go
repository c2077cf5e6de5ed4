// Package sctp stands for github.com/ishidawataru/sctp in the image of the tests' clients and servers, on kernels without SCTP: as much
// of the protocol (RFC 9260) as these programs use, on raw sockets. One path, short messages, one at a time.
package sctp

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"strconv"
	"sync"
	"time"
)

const (
	protocol = ":132"
	// How often something is sent before it counts as unanswered, and how long each waits (RFC 9260, section 16: RTO.Initial).
	tries = 8
	pause = time.Second
)

// SCTPAddr is an address and a port.
type SCTPAddr struct {
	IPAddrs []net.IPAddr
	Port    int
}

func (a *SCTPAddr) Network() string { return "sctp" }

func (a *SCTPAddr) String() string {
	host := ""
	if len(a.IPAddrs) > 0 {
		host = a.IPAddrs[0].String()
	}
	return net.JoinHostPort(host, strconv.Itoa(a.Port))
}

// ResolveSCTPAddr resolves HOST:PORT; without a host it is any address.
func ResolveSCTPAddr(_, address string) (*SCTPAddr, error) {
	resolved, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		return nil, err
	}
	to := &SCTPAddr{Port: resolved.Port}
	if resolved.IP != nil && !resolved.IP.IsUnspecified() {
		to.IPAddrs = []net.IPAddr{{IP: resolved.IP, Zone: resolved.Zone}}
	}
	return to, nil
}

func random() uint32 {
	var raw [4]byte
	_, _ = rand.Read(raw[:])
	// A tag is not zero (section 3.3.2).
	return binary.BigEndian.Uint32(raw[:]) | 1
}

// SCTPConn is an association.
type SCTPConn struct {
	socket           *net.IPConn
	peer             *net.IPAddr
	port, peerPort   uint16
	tag, peerTag     uint32
	ownsSocket       bool
	messages         chan []byte
	acknowledged     chan uint32
	ended            chan struct{}
	end              sync.Once
	lock             sync.Mutex
	next, lastOfPeer uint32
	sequence         uint16
	deadline         time.Time
}

func (c *SCTPConn) send(tag uint32, chunks ...chunk) error {
	_, err := c.socket.WriteToIP(packet{c.port, c.peerPort, tag, chunks}.bytes(), c.peer)
	return err
}

func newConn(socket *net.IPConn, peer *net.IPAddr, port, peerPort uint16) *SCTPConn {
	return &SCTPConn{socket: socket, peer: peer, port: port, peerPort: peerPort, messages: make(chan []byte, 64),
		acknowledged: make(chan uint32, 64), ended: make(chan struct{})}
}

// DialSCTP opens an association.
func DialSCTP(_ string, _, to *SCTPAddr) (*SCTPConn, error) {
	if len(to.IPAddrs) == 0 {
		return nil, errors.New("sctp: no address")
	}
	peer, family := &to.IPAddrs[0], "ip6"
	if peer.IP.To4() != nil {
		family = "ip4"
	}
	socket, err := net.ListenIP(family+protocol, nil)
	if err != nil {
		return nil, err
	}
	c := newConn(socket, peer, uint16(32768+random()%28000), uint16(to.Port))
	c.tag, c.next, c.ownsSocket = random(), random(), true
	if err := c.open(); err != nil {
		socket.Close()
		return nil, err
	}
	go c.receive()
	return c, nil
}

// open exchanges the four packets with which an association begins (section 5.1).
func (c *SCTPConn) open() error {
	ask, tag := chunk{chunkInit, 0, initValue(c.tag, c.next, nil)}, uint32(0)
	for try := 0; try < tries; {
		if err := c.send(tag, ask); err != nil {
			return err
		}
		try++
		for deadline := time.Now().Add(pause); time.Now().Before(deadline); {
			got, ok := c.receiveUntil(deadline)
			if !ok {
				break
			}
			first := got.chunks[0]
			if got.tag != c.tag {
				continue
			}
			switch first.kind {
			case chunkInitAck:
				if cookie := cookieOf(first.value); cookie != nil && tag == 0 {
					c.peerTag = binary.BigEndian.Uint32(first.value)
					c.lastOfPeer = binary.BigEndian.Uint32(first.value[12:]) - 1
					ask, tag = chunk{chunkCookieEcho, 0, append([]byte(nil), cookie...)}, c.peerTag
					deadline = time.Now()
				}
			case chunkCookieAck:
				c.handle(got.chunks[1:])
				return nil
			case chunkAbort:
				return errors.New("sctp: connection refused")
			}
		}
	}
	return errors.New("sctp: no answer")
}

// receiveUntil waits for a packet of this association.
func (c *SCTPConn) receiveUntil(deadline time.Time) (packet, bool) {
	raw := make([]byte, window)
	_ = c.socket.SetReadDeadline(deadline)
	for {
		length, from, err := c.socket.ReadFromIP(raw)
		if err != nil {
			return packet{}, false
		}
		if got, ok := parse(raw[:length]); ok && from.IP.Equal(c.peer.IP) && got.from == c.peerPort && got.to == c.port {
			return got, true
		}
	}
}

// receive handles what comes for an association that has a socket of its own, until that is closed.
func (c *SCTPConn) receive() {
	for {
		got, ok := c.receiveUntil(time.Time{})
		if !ok {
			return
		}
		if got.tag == c.tag {
			c.handle(got.chunks)
		}
	}
}

func (c *SCTPConn) handle(chunks []chunk) {
	for _, got := range chunks {
		switch {
		case got.kind == chunkData && len(got.value) > 12:
			c.handleData(got.value)
		case got.kind == chunkSack && len(got.value) >= 4:
			select {
			case c.acknowledged <- binary.BigEndian.Uint32(got.value):
			default:
			}
		case got.kind == chunkShutdown:
			_ = c.send(c.peerTag, chunk{chunkShutdownAck, 0, nil})
			c.finish()
		case got.kind == chunkShutdownAck:
			_ = c.send(c.peerTag, chunk{chunkShutdownComplete, 0, nil})
			c.finish()
		case got.kind == chunkAbort || got.kind == chunkShutdownComplete:
			c.finish()
		}
	}
}

// handleData takes the message that is next, and acknowledges what it has.
func (c *SCTPConn) handleData(value []byte) {
	c.lock.Lock()
	isNext := binary.BigEndian.Uint32(value) == c.lastOfPeer+1
	if isNext {
		c.lastOfPeer++
	}
	last := c.lastOfPeer
	c.lock.Unlock()
	if isNext {
		select {
		case c.messages <- append([]byte(nil), value[12:]...):
		default:
		}
	}
	_ = c.send(c.peerTag, chunk{chunkSack, 0, words(last, window, 0)})
}

func (c *SCTPConn) finish() { c.end.Do(func() { close(c.ended) }) }

// Read returns the next message.
func (c *SCTPConn) Read(buffer []byte) (int, error) {
	var timeout <-chan time.Time
	if !c.deadline.IsZero() {
		timeout = time.After(time.Until(c.deadline))
	}
	select {
	case message := <-c.messages:
		return copy(buffer, message), nil
	default:
	}
	select {
	case message := <-c.messages:
		return copy(buffer, message), nil
	case <-c.ended:
		// Both may be there: what was sent before the end comes first.
		select {
		case message := <-c.messages:
			return copy(buffer, message), nil
		default:
			return 0, errors.New("sctp: closed")
		}
	case <-timeout:
		return 0, os.ErrDeadlineExceeded
	}
}

// Write sends a message and waits until it is acknowledged.
func (c *SCTPConn) Write(message []byte) (int, error) {
	if len(message) == 0 {
		return 0, nil
	}
	tsn := c.next
	c.next++
	value := append(words(tsn, uint32(c.sequence), 0), message...)
	c.sequence++
	for range tries {
		if err := c.send(c.peerTag, chunk{chunkData, wholeMessage, value}); err != nil {
			return 0, err
		}
		for timeout := time.After(pause); ; {
			select {
			case last := <-c.acknowledged:
				if int32(last-tsn) >= 0 {
					return len(message), nil
				}
				continue
			case <-c.ended:
				// The peer may have said all that it had to say. Who reads finds out.
				return len(message), nil
			case <-timeout:
			}
			break
		}
	}
	return 0, errors.New("sctp: a message is not acknowledged")
}

// Close ends the association; it waits for the peer as long as for one answer.
func (c *SCTPConn) Close() error {
	c.lock.Lock()
	last := c.lastOfPeer
	c.lock.Unlock()
	err := c.send(c.peerTag, chunk{chunkShutdown, 0, words(last)})
	select {
	case <-c.ended:
	case <-time.After(pause):
		c.finish()
	}
	if c.ownsSocket {
		c.socket.Close()
	}
	return err
}

func (c *SCTPConn) SetReadDeadline(deadline time.Time) error {
	c.deadline = deadline
	return nil
}

// SCTPRemoteAddr is the peer's address.
func (c *SCTPConn) SCTPRemoteAddr(int) (*SCTPAddr, error) {
	return &SCTPAddr{IPAddrs: []net.IPAddr{*c.peer}, Port: int(c.peerPort)}, nil
}
