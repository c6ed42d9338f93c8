// Package testhost names the place of a server that a test starts: the loopback interface,
// or a host of its own. It starts the server's process there.
package testhost

// Place is a host of its own, in which a server runs. A nil *Place is the loopback interface.
type Place struct {
	// IP is an IPv4 address that reaches the host.
	IP string

	// Do runs a function whose processes start on the host.
	Do func(func() error) error
}

// Where returns the place of one more server. A nil Where is the loopback interface.
type Where func() (*Place, error)

// Next returns the place of one more server.
func (w Where) Next() (*Place, error) {
	if w == nil {
		return nil, nil
	}
	return w()
}

// Addr is an address that reaches the place.
func (p *Place) Addr() string {
	if p == nil {
		return "127.0.0.1"
	}
	return p.IP
}

// Run runs a function whose processes start at the place.
func (p *Place) Run(f func() error) error {
	if p == nil {
		return f()
	}
	return p.Do(f)
}
