// Package hosts makes hosts on one machine that only a network joins.
//
// A [Host] is a network namespace with a TUN device. A [Switch] in this process carries
// the packets between the devices, and delays, drops, reorders, repeats and throttles them
// by pair and direction. For a pair that is cut it answers nothing, so nobody gets an error
// before a timeout, as on a real network.
//
// The namespaces have no names: the kernel removes them, and their devices, when this
// process and those that it started in them have ended, also after SIGKILL. So no run
// finds anything that another one has left. To look into one, run
//
//	nsenter --net --target PID ss -tn
//
// with the PID of a process in it. [Apart] moves this process into a namespace of its own,
// so that nothing in that of the machine changes. All this needs Linux and root; [Missing]
// says what is missing.
package hosts

import (
	"fmt"
	"net/netip"
	"sync/atomic"
)

// Net is some hosts and the switch that joins them. This process is one of them.
type Net struct {
	*Switch
	number int     // in the process; part of all addresses
	hosts  []*Host // by port of the switch
}

// nets counts the nets of this process.
var nets atomic.Int32

// Start makes a net. Its only host is this process, at port 0 of the switch. The seed
// decides which packets are lost. The caller calls Close.
func Start(seed uint64) (*Net, error) {
	if err := Missing(); err != nil {
		return nil, err
	}
	n := &Net{Switch: NewSwitch(seed), number: int(nets.Add(1)-1) % 200}
	if err := n.join(&Host{}); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// Host adds a host.
func (n *Net) Host() (*Host, error) {
	h, err := newHost()
	if err == nil {
		err = n.join(h)
	}
	return h, err
}

// Own returns the host of this process.
func (n *Net) Own() *Host { return n.hosts[0] }

// join gives a host its address and joins it to the switch.
func (n *Net) join(h *Host) error {
	h.Port, h.Addr = len(n.hosts), n.addr(len(n.hosts)+1)
	n.hosts = append(n.hosts, h)
	device, err := h.device(n.name())
	if err != nil {
		return fmt.Errorf("host %s: %w", h.Addr, err)
	}
	n.Attach(device, h.Addr)
	return nil
}

// addr returns an address of the net. The network is for measurements (RFC 2544), so no
// host of the world has it.
func (n *Net) addr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18, byte(n.number), byte(i)})
}

// name is the name of the devices. This process may be on several nets.
func (n *Net) name() string { return fmt.Sprint("hasp", n.number) }

// Shared returns an address that all of some hosts have, in addition to their own. It leads
// to the first of them until Route changes that.
func (n *Net) Shared(all ...*Host) (netip.Addr, error) {
	addr := n.addr(254)
	for _, h := range all {
		if err := h.also(n.name(), addr); err != nil {
			return addr, fmt.Errorf("host %s: %w", h.Addr, err)
		}
	}
	n.Route(addr, all[0].Port)
	return addr, nil
}

// Between returns both directions between each host of some and each of others. A host is
// in no pair with itself.
func Between(some, others []*Host) (all []Pair) {
	for _, a := range some {
		for _, b := range others {
			if a != b {
				all = append(all, Both(a.Port, b.Port)...)
			}
		}
	}
	return all
}

// From returns the direction from each host of some to each of others.
func From(some, to []*Host) (all []Pair) {
	for _, a := range some {
		for _, b := range to {
			if a != b {
				all = append(all, Pair{a.Port, b.Port})
			}
		}
	}
	return all
}

// Close ends the switch and lets go of the namespaces. They end with their processes.
func (n *Net) Close() {
	n.Switch.Close()
	for _, h := range n.hosts {
		h.close()
	}
}
