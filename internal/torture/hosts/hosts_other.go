//go:build !linux

package hosts

import (
	"errors"
	"io"
	"net/netip"
)

// Host is a network namespace with one device.
type Host struct {
	// Addr is the address of the host.
	Addr netip.Addr

	// Port is its port of the switch.
	Port int
}

// Missing returns an error if this process may not make hosts.
func Missing() error { return errors.New("hosts need Linux, for network namespaces") }

// Apart starts the running program again in a network namespace of its own.
func Apart() error { return Missing() }

// Do runs f on the host.
func (h *Host) Do(f func() error) error { return errors.ErrUnsupported }

func newHost() (*Host, error) { return nil, errors.ErrUnsupported }

func (h *Host) close() {}

func (h *Host) device(string) (io.ReadWriteCloser, error) { return nil, errors.ErrUnsupported }

func (h *Host) also(string, netip.Addr) error { return errors.ErrUnsupported }
