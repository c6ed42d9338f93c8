package redistest

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/alicebob/miniredis/v2"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/redis/go-redis/v9"
)

// inProcess is a miniredis behind a proxy. The proxy keeps the address when the
// server restarts.
type inProcess struct {
	s     *Server
	proxy *faultproxy.Proxy
	mini  *miniredis.Miniredis
	addr  atomic.Value // of mini, as string
	tls   *tls.Config
	id    identity
}

func (s *Server) startInProcess() error {
	p := &inProcess{s: s}
	network, address, err := p.place()
	if err != nil {
		return err
	}
	if err := p.run(miniredis.NewMiniRedis()); err != nil {
		return err
	}
	p.proxy = faultproxy.New(func() (net.Conn, error) { return net.Dial("tcp", p.addr.Load().(string)) })
	s.t.Cleanup(func() {
		p.proxy.Close()
		p.mini.Close()
	})
	ln, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	p.proxy.Serve(ln)
	s.Addr, s.flav = p.proxy.Addr(), p
	return s.ready(startTimeout)
}

// place returns the address to listen on. It makes the directory and the
// certificate if they are needed.
func (p *inProcess) place() (network, address string, err error) {
	s := p.s
	if !s.o.TLS && !s.o.Unix {
		return "tcp", "127.0.0.1:0", nil
	}
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		return "", "", err
	}
	s.t.Cleanup(func() { os.RemoveAll(dir) })
	if s.o.Unix {
		return "unix", filepath.Join(dir, "redis.sock"), nil
	}
	if s.Certificate, err = certify(dir); err != nil {
		return "", "", err
	}
	if p.tls, err = s.config(true); err == nil && s.o.Mutual {
		p.tls.ClientCAs, p.tls.ClientAuth = p.tls.RootCAs, tls.RequireAndVerifyClientCert
	}
	return "tcp", "127.0.0.1:0", err
}

// run starts m.
func (p *inProcess) run(m *miniredis.Miniredis) error {
	var err error
	if p.tls == nil {
		err = m.Start()
	} else {
		err = m.StartTLS(p.tls)
	}
	if err != nil {
		return err
	}
	m.ClockTTL(true)
	p.id.renew()
	m.Server().SetPreHook(p.id.answer)
	switch o := p.s.o; {
	case o.User != "":
		m.RequireUserAuth(o.User, o.Password)
	case o.Password != "":
		m.RequireAuth(o.Password)
	}
	p.mini = m
	p.addr.Store(m.Addr())
	return nil
}

func (p *inProcess) pause() error  { p.proxy.Stall(); return nil }
func (p *inProcess) resume() error { p.proxy.Flow(); return nil }

func (p *inProcess) kill() error {
	p.proxy.Down()
	p.mini.Close()
	return nil
}

func (p *inProcess) wipe() error { p.mini.FlushAll(); return nil }

func (p *inProcess) restart() error {
	m := p.mini
	if !p.s.o.Keep {
		m = miniredis.NewMiniRedis()
	}
	if err := p.run(m); err != nil {
		return err
	}
	p.proxy.Up()
	// A real server forgets its scripts.
	rdb := redis.NewClient(p.s.ClientOptions())
	defer rdb.Close()
	return rdb.ScriptFlush(context.Background()).Err()
}
