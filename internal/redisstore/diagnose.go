package redisstore

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// hints are the hints for the errors of servers of one kind.
type hints struct {
	auth    string // if the server refuses the password
	scripts string // if it does not know a command
	closed  string // if it closes the connection
}

// lockHints returns the hints for a server that has locks.
func lockHints(a address) hints {
	return hints{"check user and password in the URL: " + a.scheme + "://user:password@…", "this server runs no scripts: a sentinel, or a proxy?", closedHint(a)}
}

func sentinelHints(a address) hints {
	return hints{"check the parameters sentinel_user and sentinel_password", "that is a Redis and no sentinel: the URL names the sentinels", closedHint(a)}
}

func closedHint(a address) string {
	if a.tls {
		return certificateHint
	}
	return "a port that speaks TLS wants " + strings.Replace(a.scheme, "redis", "rediss", 1) + "://"
}

// diagnose returns an error of one line with the reason why a server cannot be used,
// and a hint. took is how long the attempt lasted.
func diagnose(err error, h hints, took time.Duration) error {
	var (
		reply     redis.Error
		handshake *handshakeError
		dns       *net.DNSError
		op        *net.OpError
	)
	hint := ""
	// The order matters, from the most specific cause to the least: a TLS handshake
	// that timed out is also a timeout.
	switch {
	case errors.As(err, new(shortfall)):
		hint = "the parameter replicas wants more than there are"
	case errors.As(err, new(notMaster)):
	case errors.As(err, &reply):
		err, hint = firstSentence(reply), replyHint(reply.Error(), h)
	case errors.As(err, &handshake) && timedOut(err):
		err, hint = said{fmt.Sprintf("TLS handshake: no answer within %v", round(took)), err}, handshakeHint(handshake.err)
	case errors.As(err, &handshake):
		err, hint = handshake, handshakeHint(handshake.err)
	case errors.As(err, &dns):
		err, hint = said{"no such host", dns}, "check the host in the URL"
	case timedOut(err):
		err = said{fmt.Sprintf("no answer within %v", round(took)), err}
		hint = "check host and port, and that no firewall is in between"
	case errors.Is(err, syscall.ECONNREFUSED):
		err, hint = said{"connection refused", err}, "is Redis running there? check host and port"
	case errors.Is(err, fs.ErrNotExist):
		err, hint = said{"no such socket", err}, "is Redis running, with unixsocket set to this path?"
	case errors.Is(err, fs.ErrPermission):
		err, hint = said{"permission denied", err}, "see unixsocketperm in the configuration of Redis"
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		err, hint = said{"the server closed the connection", err}, h.closed
	case alerted(err):
		hint = certificateHint // TLS 1.3 reports it after the handshake
	case errors.As(err, &op):
		err = fmt.Errorf("%s: %w", op.Op, op.Err) // without the addresses: the server's is named already
	default:
		hint = "is that a Redis?"
	}

	if hint == "" {
		return err
	}
	return fmt.Errorf("%w (%s)", err, hint)
}

// replyHint returns the hint for an error that the server replied.
func replyHint(text string, h hints) string {
	word, _, _ := strings.Cut(text, " ")

	switch {
	case word == "WRONGPASS", strings.Contains(text, "invalid password"), strings.Contains(text, "AUTH"):
		return h.auth
	case word == "DENIED":
		return "give Redis a password, or have it listen on the loopback only"
	case word == "NOPERM":
		return "docs/redis.md lists what the user must be allowed"
	case strings.Contains(text, "DB index"), strings.Contains(text, "SELECT is not allowed"):
		return "check the number of the database in the URL"
	case strings.Contains(text, "unknown command"):
		return h.scripts
	case strings.Contains(text, "cluster support disabled"):
		return "that is a Redis without a cluster: redis://host:port"
	case strings.Contains(text, "No such master"):
		return "check the name after the sentinels: redis-sentinel://host:port,host:port/NAME"
	case word == "LOADING", word == "MASTERDOWN", word == "CLUSTERDOWN", strings.Contains(text, "max number of clients"):
		return "try again later"
	}
	return ""
}

const certificateHint = "the server may want a certificate of this client: ?cert=…&key=…"

// handshakeHint returns the hint for a TLS handshake that failed.
func handshakeHint(err error) string {
	var (
		authority x509.UnknownAuthorityError
		name      x509.HostnameError
		record    tls.RecordHeaderError
	)
	switch {
	case errors.As(err, &authority):
		return "name the file of its certificate authority: ?ca=/path/to/ca.pem"
	case errors.As(err, &name):
		return "name the host that the certificate is for: ?server_name=…"
	case errors.As(err, &record), errors.Is(err, io.EOF), timedOut(err), errors.Is(err, syscall.ECONNRESET):
		return "does this port speak TLS? one that does not wants redis://"
	case alerted(err):
		return certificateHint
	}
	return ""
}

// alerted reports whether the other side of a TLS connection refused it.
func alerted(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }

func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) ||
		errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, syscall.ETIMEDOUT)
}

// firstSentence shortens a long reply. The reply of the protected mode is a page, and
// the one to an unknown command repeats the arguments.
func firstSentence(err redis.Error) error {
	text, _, _ := strings.Cut(err.Error(), ". ")
	text, _, _ = strings.Cut(text, ", with args")
	return said{strings.TrimSuffix(text, "."), err}
}

// said is an error with another text.
type said struct {
	text string
	err  error
}

func (s said) Error() string { return s.text }
func (s said) Unwrap() error { return s.err }
