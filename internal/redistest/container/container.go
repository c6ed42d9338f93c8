// Package container starts a Redis in a container, for tests. Only internal/acceptance imports it,
// so that no other package needs its dependencies.
//
// HASP_TEST_REDIS_IMAGE names the image; the default is redis:7-alpine. If no registry can be
// reached, mkimage.sh in this directory makes an image.
package container

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/redistest"
)

// ImageEnv is the environment variable that names the image.
const ImageEnv = "HASP_TEST_REDIS_IMAGE"

const startTimeout = time.Minute

// Server is a Redis in a container. The end of the test removes it.
type Server struct {
	// Addr is host:port. Start does not change it.
	Addr string

	image string

	mu sync.Mutex // guards c; held while the container is replaced
	c  *testcontainers.DockerContainer
}

// Start starts a container for t. If Docker or the image is missing, the test fails.
func Start(t testing.TB) *Server {
	t.Helper()
	// Switch the reaper off, because its own image may be missing. The test's Cleanup removes the
	// container instead, unless the test binary is killed.
	os.Setenv("TESTCONTAINERS_RYUK_DISABLED", "true")

	addr, err := crew.FreeAddr()
	await.Must(t, err)
	s := &Server{Addr: addr, image: cmp.Or(os.Getenv(ImageEnv), "redis:7-alpine")}
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := s.remove(); err != nil {
			t.Logf("container: %v", err)
		}
	})

	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if err := s.run(ctx); err != nil {
		t.Fatalf("container: image %s (%s names another): %v", s.image, ImageEnv, err)
	}
	return s
}

// run starts a new container. The data of the Redis survives Kill.
func (s *Server) run(ctx context.Context) error {
	host, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		return err
	}

	s.c, err = testcontainers.Run(ctx, s.image,
		testcontainers.WithCmd("redis-server", "--bind", "0.0.0.0", "--protected-mode", "no",
			"--dir", "/data",
			"--save", "", "--appendonly", "yes", "--appendfsync", "always"),
		testcontainers.WithConfigModifier(func(c *container.Config) { c.StopSignal = "SIGKILL" }),
		testcontainers.WithExposedPorts("6379/tcp"),
		testcontainers.WithHostConfigModifier(func(c *container.HostConfig) {
			at := network.PortBinding{HostIP: netip.MustParseAddr(host), HostPort: port}
			c.PortBindings = network.PortMap{network.MustParsePort("6379/tcp"): {at}}
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

// Kill ends the server by SIGKILL.
func (s *Server) Kill(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.c.Stop(ctx, nil)
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
