package sctp

import (
	"net"
	"testing"
	"time"
)

// As root, on the loopback: a message each way, and an end.
func TestAMessageEachWay(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		to := &SCTPAddr{IPAddrs: []net.IPAddr{{IP: net.ParseIP(host)}}, Port: 9003}
		listener, err := ListenSCTP("sctp", &SCTPAddr{Port: 9003})
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			c, err := listener.AcceptSCTP()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("foo"))
			_ = c.Close()
		}()
		c, err := DialSCTP("sctp", nil, to)
		if err != nil {
			t.Fatal(host, err)
		}
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		buffer := make([]byte, 16)
		n, err := c.Read(buffer)
		if err != nil || string(buffer[:n]) != "foo" {
			t.Fatal(host, err, string(buffer[:n]))
		}
		_ = c.Close()
		_ = listener.Close()
	}
}

func TestWhatIsNoPacketIsNotParsed(t *testing.T) {
	whole := packet{1, 2, 3, []chunk{{chunkData, wholeMessage, words(1, 2, 3)}}}.bytes()
	if _, ok := parse(whole); !ok {
		t.Fatal("a packet")
	}
	for length := range whole {
		if _, ok := parse(whole[:length]); ok {
			t.Fatal(length)
		}
	}
}
