package rig

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/hasplock/hasp/internal/torture/hosts"
)

// Go's resolver gets from the name server what the run wants it to get.
func TestNameLeadsWhereTheRunSays(t *testing.T) {
	t.Parallel()
	old, next := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	n := &nameserver{name: "redis.test.", current: old, stale: map[netip.Addr]netip.Addr{}}
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		serveNames(conn, n.answer)
	}()
	defer func() {
		conn.Close()
		<-ended
	}()

	r := resolver(func() (string, error) { return conn.LocalAddr().String(), nil })
	leads := func(when, name string, want ...string) {
		t.Helper()
		got, err := r.LookupHost(context.Background(), name)
		var failure *net.DNSError
		if !slices.Equal(got, want) || (err == nil) != (len(want) > 0) || err != nil && !errors.As(err, &failure) {
			t.Errorf("%s: %s leads to %v, %v, want %v", when, name, got, err, want)
		}
	}
	leads("at first", n.name, old.String())
	leads("at first", "other.test.")

	drop := n.keep([]*hosts.Host{{Addr: netip.MustParseAddr("127.0.0.1")}})
	n.lead(next)
	leads("kept", n.name, old.String())
	drop()
	leads("dropped", n.name, next.String())

	for _, code := range []dnsmessage.RCode{dnsmessage.RCodeNameError, dnsmessage.RCodeServerFailure} {
		lift := n.fail(code, 0)
		leads(code.String(), n.name)
		lift()
		leads("after "+code.String(), n.name, next.String())
	}
}
