// Package container starts a Redis in a container, for tests. Only internal/acceptance imports it,
// so that no other package needs its dependencies.
//
// HASP_TEST_REDIS_IMAGE names the image; the default is redis:7-alpine. If no registry can be
// reached, mkimage.sh in this directory makes an image.
package container

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/hasplock/hasp/internal/redistest"
)

// ImageEnv is the environment variable that names the image.
const ImageEnv = "HASP_TEST_REDIS_IMAGE"

const startTimeout = time.Minute

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// Server is a Redis in a container. The end of the test removes it.
type Server struct {
	// Addr is host:port. Start does not change it.
	Addr string

	image string
	port  int
	api   *testcontainers.DockerClient

	mu sync.Mutex // guards c; held while the container is replaced
	c  *testcontainers.DockerContainer
}

// Start starts a container for t. If Docker or the image is missing, the test fails.
func Start(t testing.TB) *Server {
	t.Helper()
	// Switch the reaper off, because its own image may be missing. The test's Cleanup removes the
	// container instead, unless the test binary is killed.
	if _, set := os.LookupEnv("TESTCONTAINERS_RYUK_DISABLED"); !set {
		os.Setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
	}

	s := &Server{image: cmp.Or(os.Getenv(ImageEnv), "redis:7-alpine")}
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	var err error
	if s.api, err = testcontainers.NewDockerClientWithOpts(ctx); err != nil {
		t.Fatalf("container: no Docker: %v", err)
	}

	t.Cleanup(func() { s.api.Close() })
	if s.port, err = freePort(); err != nil {
		t.Fatalf("container: %v", err)
	}

	s.Addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port))
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := s.remove(); err != nil {
			t.Logf("container: %v", err)
		}
	})

	if err := s.run(ctx); err != nil {
		t.Fatalf("container: image %s (%s names another): %v", s.image, ImageEnv, err)
	}

	return s
}

// run starts a new container. The data of the Redis survives Kill.
func (s *Server) run(ctx context.Context) error {
	var err error
	s.c, err = testcontainers.Run(ctx, s.image,
		testcontainers.WithCmd("redis-server", "--bind", "0.0.0.0", "--protected-mode", "no",
			"--dir", "/data",
			"--save", "", "--appendonly", "yes", "--appendfsync", "always"),
		testcontainers.WithExposedPorts("6379/tcp"),
		testcontainers.WithHostConfigModifier(func(c *container.HostConfig) {
			c.PortBindings = network.PortMap{network.MustParsePort("6379/tcp"): {{HostIP: loopback,
				HostPort: strconv.Itoa(s.port)}}}
		}),
		testcontainers.WithWaitStrategyAndDeadline(startTimeout,
			wait.ForLog("Ready to accept connections")))
	if err != nil {
		return err
	}

	return redistest.Ready(s.Addr) // Docker accepts connections before the Redis does
}

// removing is locked while a container is removed. If several containers are removed at the same
// time, some Docker engines deadlock in their networks and no longer answer.
var removing sync.Mutex

// remove removes the container. It gives up if the engine hangs.
func (s *Server) remove() error {
	removing.Lock()
	defer removing.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return testcontainers.TerminateContainer(s.c, testcontainers.StopTimeout(0),
		testcontainers.StopContext(ctx))
}

// Kill ends the server as SIGKILL does.
func (s *Server) Kill(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.api.ContainerKill(ctx, s.c.GetContainerID(),
		client.ContainerKillOptions{Signal: "KILL"})
	return err
}

// Start starts a killed server again. If data is false, the server has lost its data.
func (s *Server) Start(ctx context.Context, data bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !data {
		if err := s.remove(); err != nil {
			return err
		}
		return s.run(ctx)
	}
	if err := s.c.Start(ctx); err != nil {
		return err
	}

	return redistest.Ready(s.Addr)
}

// Each container has a different port, counted from firstPort.
var (
	firstPort = rand.Uint32N(6000)
	drawn     atomic.Uint32
)

// freePort returns a free port. Because it must also be free at each later start of the container,
// it is below the ports that most systems give to connections, and below the ports of other tests.
func freePort() (int, error) {
	for range 100 {
		p := 4000 + int(firstPort+drawn.Add(1))%6000
		if l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p))); err == nil {
			return p, l.Close()
		}
	}

	return 0, errors.New("no free port")
}
