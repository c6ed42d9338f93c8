package hosts

import (
	"container/heap"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Switch carries IPv4 packets between its ports. It answers nothing for a packet that it
// drops. Use [NewSwitch]. Several goroutines may call its methods.
type Switch struct {
	wg sync.WaitGroup // the goroutines of the ports

	mu     sync.Mutex // guards all below
	rand   *rand.Rand
	ports  []*port
	routes map[netip.Addr]int // the port of an address
	links  map[Pair][]*fault  // what is imposed on the packets of a pair
	flows  map[flow]*known    // the TCP connections
	sent   int64              // packets, for their order
	closed bool
}

// Pair are two ports, and one direction between them.
type Pair struct{ From, To int }

// Both returns the two directions between two ports.
func Both(a, b int) []Pair { return []Pair{{a, b}, {b, a}} }

// Fault says what happens to the packets of a pair. The zero Fault does nothing.
type Fault struct {
	Cut    bool          // all packets are lost
	Flap   time.Duration // if positive, all packets are lost during this time, then none, and so on
	Loss   float64       // share of the packets that are lost
	Twice  float64       // share of the packets that arrive twice
	Delay  time.Duration // of every packet
	Jitter time.Duration // a further delay of up to this, drawn for each packet; it reorders packets
	Rate   int           // bytes in a second, if positive; packets that would wait longer than a second are lost
}

// fault is a Fault that is imposed on a pair.
type fault struct {
	Fault
	since time.Time
	free  time.Time // when the link has sent what it has taken, for Rate
}

// flow is a TCP connection. The lesser address is first.
type flow [2]netip.AddrPort

// known is what the switch knows of a TCP connection.
type known struct {
	last  time.Time    // when a packet passed
	muted map[int]bool // the ports whose packets are lost
}

// NewSwitch returns a switch without ports. The seed decides which packets are lost.
func NewSwitch(seed uint64) *Switch {
	return &Switch{rand: rand.New(rand.NewPCG(seed, 0)), routes: map[netip.Addr]int{}, links: map[Pair][]*fault{}, flows: map[flow]*known{}}
}

// Attach adds a port for a device, whose Read and Write take one packet each, and returns
// its number. Numbers count from 0. Close closes the device.
func (s *Switch) Attach(device io.ReadWriteCloser, addr netip.Addr) int {
	p := &port{device: device, wake: make(chan struct{}, 1), done: make(chan struct{})}
	s.mu.Lock()
	n := len(s.ports)
	s.ports = append(s.ports, p)
	s.routes[addr] = n
	s.mu.Unlock()

	s.wg.Go(func() { s.read(n, p) })
	s.wg.Go(func() { s.write(p) })
	return n
}

// Route makes an address lead to a port. Connections to the port that had the address
// before get no more packets at that address.
func (s *Switch) Route(addr netip.Addr, port int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.routes[addr] = port
}

// Impose imposes a fault on pairs, in addition to those that are imposed already. Lift
// ends it; it may be called more than once. Packets on their way arrive nevertheless.
func (s *Switch) Impose(f Fault, pairs ...Pair) (lift func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	imposed := make([]*fault, len(pairs))
	for i, p := range pairs {
		imposed[i] = &fault{Fault: f, since: time.Now()}
		s.links[p] = append(s.links[p], imposed[i])
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for i, p := range pairs {
			s.links[p] = slices.DeleteFunc(s.links[p], func(f *fault) bool { return f == imposed[i] })
		}
	}
}

// Forget makes the switch forget the TCP connections that were idle for a time, as a
// firewall does. From then on all their packets are lost, and neither side learns of it.
// It returns how many these are. The connections of spared addresses are kept.
func (s *Switch) Forget(idle time.Duration, spared ...netip.Addr) (forgotten int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for f, k := range s.flows {
		kept := slices.Contains(spared, f[0].Addr()) || slices.Contains(spared, f[1].Addr())
		if !kept && time.Since(k.last) >= idle {
			delete(s.flows, f)
			forgotten++
		}
	}
	return forgotten
}

// Mute makes the switch drop what a port sends on the TCP connections that are open now, except
// resets. After a loss of power a host only resets them. The
// kernel of a namespace would: it repeats the end of a connection whose process was killed.
func (s *Switch) Mute(port int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.flows {
		if k.muted == nil {
			k.muted = map[int]bool{}
		}
		k.muted[port] = true
	}
}

// Close closes all devices, and waits until the switch no longer uses them.
func (s *Switch) Close() {
	s.mu.Lock()
	s.closed = true
	for _, p := range s.ports {
		p.close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// port is a device of the switch, with the packets that it gets.
type port struct {
	device io.ReadWriteCloser
	queue  queue         // guarded by mu of the switch
	wake   chan struct{} // gets a value when the queue has changed
	done   chan struct{} // closed by close
	once   sync.Once
}

func (p *port) close() {
	p.once.Do(func() {
		close(p.done)
		_ = p.device.Close()
	})
}

// read takes packets from a device until it is closed.
func (s *Switch) read(from int, p *port) {
	for b := make([]byte, 1<<16); ; {
		n, err := p.device.Read(b)
		if err != nil {
			return
		}
		s.forward(from, b[:n])
	}
}

// write sends the queue of a port to its device, until it is closed.
func (s *Switch) write(p *port) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		b, wait := s.next(p)
		if b != nil {
			_, _ = p.device.Write(b) // a device that refuses a packet loses it, as networks do
			continue
		}
		timer.Reset(wait)
		select {
		case <-p.wake:
		case <-timer.C:
		case <-p.done:
			return
		}
	}
}

// next returns the packet that is due at a port, or how long to wait for one.
func (s *Switch) next(p *port) ([]byte, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(p.queue) == 0 {
		return nil, time.Hour
	}
	if wait := time.Until(p.queue[0].due); wait > 0 {
		return nil, wait
	}
	return heap.Pop(&p.queue).(packet).bytes, 0
}

// forward takes a packet from a port.
func (s *Switch) forward(from int, b []byte) {
	h, ok := parse(b)
	if !ok {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	to, ok := s.routes[h.dst.Addr()]
	if !ok || s.closed {
		return
	}
	delays := s.passLocked(Pair{from, to}, len(b))
	if len(delays) == 0 || !s.knownLocked(from, h) {
		return
	}

	p := s.ports[to]
	now := time.Now()
	for _, d := range delays {
		s.sent++
		heap.Push(&p.queue, packet{now.Add(d), s.sent, slices.Clone(b)})
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// passLocked returns the delays of a packet, one for each time it arrives. None means that
// it is lost. The caller holds mu.
func (s *Switch) passLocked(p Pair, size int) (delays []time.Duration) {
	now := time.Now()
	times, delay := 1, time.Duration(0)
	for _, f := range s.links[p] {
		switch {
		case f.Cut, f.Flap > 0 && now.Sub(f.since)/f.Flap%2 == 0:
			return nil
		case f.Loss > 0 && s.rand.Float64() < f.Loss:
			return nil
		}
		if f.Twice > 0 && s.rand.Float64() < f.Twice {
			times = 2
		}
		delay += f.Delay
		if f.Rate > 0 {
			if f.free.Before(now) {
				f.free = now
			}
			if f.free.Sub(now) > time.Second {
				return nil
			}
			f.free = f.free.Add(time.Duration(size) * time.Second / time.Duration(f.Rate))
			delay += f.free.Sub(now)
		}
	}
	for range times {
		d := delay
		for _, f := range s.links[p] {
			if f.Jitter > 0 {
				d += time.Duration(s.rand.Int64N(int64(f.Jitter)))
			}
		}
		delays = append(delays, d)
	}
	return delays
}

// knownLocked reports whether the packet may pass as far as its connection is concerned: it
// belongs to one that the switch knows, or it opens one. The caller holds mu.
func (s *Switch) knownLocked(from int, h header) bool {
	if !h.tcp {
		return true
	}
	f := flow{h.src, h.dst}
	if f[1].Compare(f[0]) < 0 {
		f[0], f[1] = f[1], f[0]
	}
	k := s.flows[f]
	switch {
	case h.opens && (k == nil || k.muted != nil):
		k = &known{}
		s.flows[f] = k
	case k == nil, k.muted[from] && !h.resets:
		return false
	}
	if k.last = time.Now(); h.resets {
		delete(s.flows, f)
	}
	return true
}

// header is what the switch needs of a packet.
type header struct {
	src, dst      netip.AddrPort // ports only of TCP
	tcp           bool
	opens, resets bool // the TCP packet is a SYN without ACK, or a RST
}

// parse reads the header of an IPv4 packet.
func parse(b []byte) (h header, ok bool) {
	if len(b) < 20 || b[0]>>4 != 4 {
		return h, false
	}
	src, dst := netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	var from, to uint16

	// The ports are in the first fragment only. Devices of one MTU make no others.
	const tcp = 6
	if at := int(b[0]&15) * 4; b[9] == tcp && len(b) >= at+14 {
		h.tcp = true
		from, to = binary.BigEndian.Uint16(b[at:]), binary.BigEndian.Uint16(b[at+2:])
		flags := b[at+13]
		const syn, rst, ack = 2, 4, 16
		h.opens, h.resets = flags&(syn|ack) == syn, flags&rst != 0
	}
	h.src, h.dst = netip.AddrPortFrom(src, from), netip.AddrPortFrom(dst, to)
	return h, true
}

// packet is a packet that arrives at a time.
type packet struct {
	due   time.Time
	order int64
	bytes []byte
}

// queue is a heap of packets, the next one first.
type queue []packet

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	if c := q[i].due.Compare(q[j].due); c != 0 {
		return c < 0
	}
	return q[i].order < q[j].order
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(packet)) }
func (q *queue) Pop() any {
	old := *q
	last := old[len(old)-1]
	*q = old[:len(old)-1]
	return last
}
