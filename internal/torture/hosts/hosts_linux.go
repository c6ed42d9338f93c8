package hosts

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Host is a network namespace with one device.
type Host struct {
	// Addr is the address of the host.
	Addr netip.Addr

	// Port is its port of the switch.
	Port int

	space *os.File // of the namespace; nil is that of this process
}

// threadSpace is the network namespace of the thread that opens it.
const threadSpace = "/proc/thread-self/ns/net"

// retries is how often TCP sends a packet again, in the namespace of the thread. With 5, a
// connection to a host that is gone ends after some ten seconds. Linux has 15, which takes
// a quarter of an hour.
const retries = "/proc/sys/net/ipv4/tcp_retries2"

// apart is set in the environment of a process that has a namespace of its own.
const apart = "HASP_HOSTS_APART"

// Missing returns an error if this process may not make hosts.
func Missing() error {
	if os.Geteuid() != 0 {
		return errors.New("hosts need root, for network namespaces and TUN devices; run this as root")
	}
	h, err := newHost()
	if err == nil {
		var device io.Closer
		if device, err = h.open("hasp"); err == nil {
			err = device.Close()
		}
		h.close()
	}
	if err != nil {
		return fmt.Errorf("hosts need network namespaces and /dev/net/tun, which this machine refuses: %w; allow CAP_SYS_ADMIN and CAP_NET_ADMIN", err)
	}
	return nil
}

// Apart starts the running program again, with its arguments, in a network namespace of its
// own, in the place of this process. It returns nil if that has happened already.
func Apart() error {
	if os.Getenv(apart) != "" {
		return nil
	}
	if err := Missing(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	// exec ends all other threads, and the namespace of this one becomes that of the
	// process. If it fails, the thread must not run other goroutines: it stays locked.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := ioctls("lo", up); err != nil {
		return err
	}
	return os.NewSyscallError("exec", syscall.Exec(self, os.Args, append(os.Environ(), apart+"=1")))
}

// newHost makes a namespace.
func newHost() (*Host, error) {
	h := &Host{}
	err := onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if h.space, err = os.Open(threadSpace); err != nil {
			return err
		}
		if err := ioctls("lo", up); err != nil {
			return err
		}
		return os.WriteFile(retries, []byte("5"), 0)
	})
	if err != nil {
		h.close()
	}
	return h, err
}

// close lets go of the namespace.
func (h *Host) close() {
	if h.space != nil {
		h.space.Close()
	}
}

// Do runs f on a thread that is in the host's namespace. Sockets that f opens, and
// processes that it starts, are on the host. Goroutines that it starts are not.
func (h *Host) Do(f func() error) error {
	if h.space == nil {
		return f()
	}
	return onThread(func() error {
		if err := unix.Setns(int(h.space.Fd()), unix.CLONE_NEWNET); err != nil {
			return os.NewSyscallError("setns", err)
		}
		return f()
	})
}

// onThread runs f, which may change the namespace of its thread, and changes it back. It runs f on
// the caller's own thread: a process that f starts may be set to end with the thread that started
// it.
func onThread(f func() error) error {
	runtime.LockOSThread()
	old, err := os.Open(threadSpace)
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer old.Close()
	err = f()
	if back := unix.Setns(int(old.Fd()), unix.CLONE_NEWNET); back != nil {
		// The thread stays locked: the runtime ends it with the goroutine.
		return cmp.Or(err, os.NewSyscallError("setns", back))
	}
	runtime.UnlockOSThread()
	return err
}

// open makes a TUN device in the host's namespace.
func (h *Host) open(name string) (device *os.File, err error) {
	err = h.Do(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: "/dev/net/tun", Err: err}
		}
		r, err := unix.NewIfreq(name)
		if err == nil {
			r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
			err = os.NewSyscallError("TUNSETIFF", unix.IoctlIfreq(fd, unix.TUNSETIFF, r))
		}
		if err != nil {
			unix.Close(fd)
			return err
		}
		device = os.NewFile(uintptr(fd), name)
		return nil
	})
	return device, err
}

// device makes the host's device, with the host's address.
func (h *Host) device(name string) (io.ReadWriteCloser, error) {
	device, err := h.open(name)
	if err == nil {
		err = h.also(name, h.Addr)
	}
	return device, err
}

// also gives the host an address: its own, or one that it has besides.
func (h *Host) also(label string, addr netip.Addr) error {
	mask := []byte{255, 255, 255, 0} // makes the route to the net
	if addr != h.Addr {
		label, mask[3] = label+":1", 255
	}
	return h.Do(func() error {
		return ioctls(label, func(fd int, r *unix.Ifreq) error {
			ip := addr.As4()
			if err := r.SetInet4Addr(ip[:]); err != nil {
				return err
			}
			if err := unix.IoctlIfreq(fd, unix.SIOCSIFADDR, r); err != nil {
				return os.NewSyscallError("SIOCSIFADDR", err)
			}
			if err := r.SetInet4Addr(mask); err != nil {
				return err
			}
			if err := unix.IoctlIfreq(fd, unix.SIOCSIFNETMASK, r); err != nil {
				return os.NewSyscallError("SIOCSIFNETMASK", err)
			}
			return up(fd, r)
		})
	})
}

// up makes a device work.
func up(fd int, r *unix.Ifreq) error {
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return os.NewSyscallError("SIOCSIFFLAGS", unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r))
}

// ioctls runs f with a socket of this thread's namespace and a request for a device.
func ioctls(name string, f func(fd int, r *unix.Ifreq) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	return f(fd, r)
}
