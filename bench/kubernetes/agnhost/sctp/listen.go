package sctp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
)

// SCTPListener takes associations on a port, of both address families.
type SCTPListener struct {
	port     uint16
	sockets  []*net.IPConn
	accepted chan *SCTPConn
	closed   chan struct{}
	close    sync.Once
	lock     sync.Mutex
	open     map[string]*SCTPConn
}

// ListenSCTP listens on the address's port; other pods' addresses are not ours anyway.
func ListenSCTP(_ string, at *SCTPAddr) (*SCTPListener, error) {
	l := &SCTPListener{port: uint16(at.Port), accepted: make(chan *SCTPConn, 64), closed: make(chan struct{}),
		open: map[string]*SCTPConn{}}
	var failed error
	for _, family := range []string{"ip4", "ip6"} {
		socket, err := net.ListenIP(family+protocol, nil)
		if err != nil {
			failed = err
			continue
		}
		l.sockets = append(l.sockets, socket)
	}
	// A pod without an address of a family has no socket of it.
	if len(l.sockets) == 0 {
		return nil, failed
	}
	for _, socket := range l.sockets {
		go l.receive(socket)
	}
	return l, nil
}

// AcceptSCTP returns the next association.
func (l *SCTPListener) AcceptSCTP() (*SCTPConn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.closed:
		return nil, errors.New("sctp: the listener is closed")
	}
}

// Close ends the listener and its associations.
func (l *SCTPListener) Close() error {
	l.close.Do(func() { close(l.closed) })
	for _, socket := range l.sockets {
		socket.Close()
	}
	return nil
}

func (l *SCTPListener) receive(socket *net.IPConn) {
	raw := make([]byte, window)
	for {
		length, from, err := socket.ReadFromIP(raw)
		if err != nil {
			return
		}
		if got, ok := parse(raw[:length]); ok && got.to == l.port {
			l.handle(socket, from, got)
		}
	}
}

// The cookie is all that is known of an association before its third packet: no state is kept for a first one (section 5.1.3).
func (l *SCTPListener) handle(socket *net.IPConn, from *net.IPAddr, got packet) {
	key, first := fmt.Sprintf("%s %d", from, got.from), got.chunks[0]
	switch {
	case first.kind == chunkInit && len(first.value) >= 16:
		peerTag, peerTsn := binary.BigEndian.Uint32(first.value), binary.BigEndian.Uint32(first.value[12:])
		tag, tsn := random(), random()
		answer := chunk{chunkInitAck, 0, initValue(tag, tsn, words(tag, tsn, peerTag, peerTsn))}
		_, _ = socket.WriteToIP(packet{l.port, got.from, peerTag, []chunk{answer}}.bytes(), from)
	case first.kind == chunkCookieEcho && len(first.value) == 16:
		l.accept(socket, from, got, key)
	default:
		l.lock.Lock()
		c := l.open[key]
		l.lock.Unlock()
		if c != nil && c.tag == got.tag {
			c.handle(got.chunks)
			select {
			case <-c.ended:
				l.forget(key)
			default:
			}
		}
	}
}

func (l *SCTPListener) accept(socket *net.IPConn, from *net.IPAddr, got packet, key string) {
	cookie := got.chunks[0].value
	word := func(at int) uint32 { return binary.BigEndian.Uint32(cookie[4*at:]) }
	if word(0) != got.tag {
		return
	}
	l.lock.Lock()
	c := l.open[key]
	isNew := c == nil || c.tag != got.tag
	if isNew {
		c = newConn(socket, &net.IPAddr{IP: append(net.IP(nil), from.IP...), Zone: from.Zone}, l.port, got.from)
		c.tag, c.next, c.peerTag, c.lastOfPeer = word(0), word(1), word(2), word(3)-1
		l.open[key] = c
	}
	l.lock.Unlock()
	_ = c.send(c.peerTag, chunk{chunkCookieAck, 0, nil})
	c.handle(got.chunks[1:])
	if isNew {
		select {
		case l.accepted <- c:
		default:
			l.forget(key)
		}
	}
}

func (l *SCTPListener) forget(key string) {
	l.lock.Lock()
	delete(l.open, key)
	l.lock.Unlock()
}
