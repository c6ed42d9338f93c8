package hosts

import (
	"encoding/binary"
	"io"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// wire is a device of a test.
type wire struct {
	in, out chan []byte // what the host sends and gets
	done    chan struct{}
}

func newWire() *wire {
	return &wire{make(chan []byte), make(chan []byte, 1000), make(chan struct{})}
}

func (w *wire) Read(b []byte) (int, error) {
	select {
	case p := <-w.in:
		return copy(b, p), nil
	case <-w.done:
		return 0, io.EOF
	}
}

func (w *wire) Write(b []byte) (int, error) { w.out <- b; return len(b), nil }
func (w *wire) Close() error                { close(w.done); return nil }

// got returns the last bytes of the packets that have arrived.
func (w *wire) got() (marks []byte) {
	synctest.Wait()
	for {
		select {
		case p := <-w.out:
			marks = append(marks, p[len(p)-1])
		default:
			return marks
		}
	}
}

const plain, opening, reset = 16, 2, 4 // flags of TCP packets

// tcp returns a TCP packet of 100 bytes that ends with mark.
func tcp(from, to netip.AddrPort, flags, mark byte) []byte {
	b := make([]byte, 100)
	b[0], b[9] = 0x45, 6
	src, dst := from.Addr().As4(), to.Addr().As4()
	copy(b[12:], src[:])
	copy(b[16:], dst[:])
	binary.BigEndian.PutUint16(b[20:], from.Port())
	binary.BigEndian.PutUint16(b[22:], to.Port())
	b[33], b[99] = flags, mark
	return b
}

// testSwitch runs f with two wires that have addresses, and an open connection.
func testSwitch(t *testing.T, f func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte)) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSwitch(1)
		defer s.Close()
		a, b := newWire(), newWire()
		addrA, addrB := netip.MustParseAddrPort("198.18.0.1:1000"), netip.MustParseAddrPort("198.18.0.2:2000")
		s.Attach(a, addrA.Addr())
		s.Attach(b, addrB.Addr())
		ab := func(flags, mark byte) []byte { return tcp(addrA, addrB, flags, mark) }
		ba := func(flags, mark byte) []byte { return tcp(addrB, addrA, flags, mark) }
		a.in <- ab(opening, 0)
		if got := b.got(); !slices.Equal(got, []byte{0}) {
			t.Fatalf("opening a connection: got %v", got)
		}
		f(t, s, a, b, ab, ba)
	})
}

func TestSwitchCutsOneDirection(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		lift := s.Impose(Fault{Cut: true}, Pair{0, 1})
		a.in <- ab(plain, 1)
		b.in <- ba(plain, 2)
		if toB, toA := b.got(), a.got(); toB != nil || !slices.Equal(toA, []byte{2}) {
			t.Errorf("cut to b: b got %v, a got %v; a cut link must answer nothing", toB, toA)
		}
		lift()
		lift()
		a.in <- ab(plain, 3)
		if got := b.got(); !slices.Equal(got, []byte{3}) {
			t.Errorf("after lift: %v", got)
		}
	})
}

func TestSwitchDelaysInOrder(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		s.Impose(Fault{Delay: time.Second}, Pair{0, 1})
		s.Impose(Fault{Delay: time.Second}, Pair{0, 1})
		for i := range 50 {
			a.in <- ab(plain, byte(i))
		}
		time.Sleep(2*time.Second - 1)
		if got := b.got(); got != nil {
			t.Errorf("too early: %v", got)
		}
		time.Sleep(time.Nanosecond)
		if got := b.got(); len(got) != 50 || !slices.IsSorted(got) {
			t.Errorf("after the delay: %v", got)
		}
	})
}

func TestSwitchLosesRepeatsAndReorders(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		count := func(f Fault) []byte {
			defer s.Impose(f, Both(0, 1)...)()
			for i := range 200 {
				a.in <- ab(plain, byte(i))
			}
			time.Sleep(time.Minute)
			return b.got()
		}
		if got := len(count(Fault{Loss: 0.2})); got < 130 || got > 190 {
			t.Errorf("a fifth lost: %d of 200 arrived", got)
		}
		if got := len(count(Fault{Twice: 0.2})); got < 210 || got > 270 {
			t.Errorf("a fifth twice: %d arrived of 200", got)
		}
		if got := count(Fault{Jitter: time.Second}); len(got) != 200 || slices.IsSorted(got) {
			t.Errorf("jitter: %d of 200 arrived, in order: %v", len(got), slices.IsSorted(got))
		}
	})
}

func TestSwitchThrottles(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		s.Impose(Fault{Rate: 1000}, Pair{0, 1}) // ten packets in a second
		for i := range 50 {
			a.in <- ab(plain, byte(i))
		}
		time.Sleep(550 * time.Millisecond)
		if got := len(b.got()); got != 5 {
			t.Errorf("%d packets in 550 ms, want 5", got)
		}
		time.Sleep(time.Minute)
		if got := len(b.got()); got != 6 {
			t.Errorf("%d packets later, want 6: what waits for more than a second is lost", got)
		}
	})
}

func TestSwitchFlaps(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		s.Impose(Fault{Flap: time.Second}, Pair{0, 1})
		time.Sleep(500 * time.Millisecond)
		for i := range 6 {
			a.in <- ab(plain, byte(i))
			synctest.Wait()
			time.Sleep(time.Second)
		}
		if got := b.got(); !slices.Equal(got, []byte{1, 3, 5}) {
			t.Errorf("got %v, want those of the seconds without loss", got)
		}
	})
}

func TestSwitchForgetsIdleConnections(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		time.Sleep(time.Second)
		if n := s.Forget(2 * time.Second); n != 0 {
			t.Errorf("%d connections forgotten that were not idle", n)
		}
		if n := s.Forget(time.Second, netip.MustParseAddr("198.18.0.2")); n != 0 {
			t.Errorf("%d connections of a spared address forgotten", n)
		}
		if n := s.Forget(time.Second); n != 1 {
			t.Errorf("%d connections forgotten, want 1", n)
		}
		a.in <- ab(plain, 1)
		b.in <- ba(plain, 2)
		b.in <- ba(opening|plain, 3) // a late answer to a SYN opens nothing
		if toB, toA := b.got(), a.got(); toB != nil || toA != nil {
			t.Errorf("packets of a forgotten connection: b got %v, a got %v", toB, toA)
		}
		a.in <- ab(opening, 4)
		toB := b.got()
		b.in <- ba(plain, 5)
		if toA := a.got(); !slices.Equal(toB, []byte{4}) || !slices.Equal(toA, []byte{5}) {
			t.Errorf("a new connection: b got %v, a got %v", toB, toA)
		}
		a.in <- ab(reset, 6)
		if got := b.got(); !slices.Equal(got, []byte{6}) || s.Forget(0) != 0 {
			t.Errorf("a reset: b got %v, and the connection must be gone", got)
		}
	})
}

func TestSwitchMutesAPort(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		s.Mute(1)
		a.in <- ab(plain, 1)
		b.in <- ba(plain, 2)
		if toB, toA := b.got(), a.got(); !slices.Equal(toB, []byte{1}) || toA != nil {
			t.Errorf("b got %v, a got %v; b must lose what it sends, and nothing else", toB, toA)
		}
		b.in <- ba(reset, 3)
		if toA := a.got(); !slices.Equal(toA, []byte{3}) {
			t.Errorf("a reset: a got %v", toA)
		}
		a.in <- ab(opening, 4)
		toB := b.got()
		b.in <- ba(plain, 5)
		if toA := a.got(); !slices.Equal(toB, []byte{4}) || !slices.Equal(toA, []byte{5}) {
			t.Errorf("a new connection: b got %v, a got %v", toB, toA)
		}
	})
}

// A connection that is opened anew, with the ports of one that is muted, is not muted.
func TestSwitchHearsANewConnection(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		s.Mute(1)
		a.in <- ab(opening, 1)
		toB := b.got()
		b.in <- ba(plain, 2)
		if toA := a.got(); !slices.Equal(toB, []byte{1}) || !slices.Equal(toA, []byte{2}) {
			t.Errorf("b got %v, a got %v", toB, toA)
		}
	})
}

func TestSwitchMovesAnAddress(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		s.Route(netip.MustParseAddr("198.18.0.2"), 0)
		a.in <- ab(plain, 1)
		if toB, toA := b.got(), a.got(); toB != nil || !slices.Equal(toA, []byte{1}) {
			t.Errorf("b got %v, a got %v", toB, toA)
		}
	})
}

// What is no IPv4 packet, or leads nowhere, gets no answer and does no harm.
func TestSwitchIgnoresOtherPackets(t *testing.T) {
	testSwitch(t, func(t *testing.T, s *Switch, a, b *wire, ab, ba func(flags, mark byte) []byte) {
		away := ab(opening, 1)
		away[16] = 10
		long := ab(plain, 1)
		long[0] = 0x4f
		for _, p := range [][]byte{{}, {0x45}, make([]byte, 40), away, long[:40]} {
			a.in <- p
		}
		if toB, toA := b.got(), a.got(); len(toB) > 1 || toA != nil {
			t.Errorf("b got %v, a got %v", toB, toA)
		}
	})
}
