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

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// hints are the hints for the errors of servers of one kind.
type hints struct {
	auth    string // if the server refuses the password
	scripts string // if the server does not know a command
	closed  string // if the server closes the connection
}

// lockHints returns the hints for a server that stores locks.
func lockHints(a address) hints {
	h := hints{"check user and password in the URL: " + a.scheme + "://user:password@…", "this server runs no scripts: a sentinel, or a proxy?", certificateHint}
	switch {
	case a.network() != "tcp":
		h.closed = "" // no certificate is used
	case !a.tls:
		h.closed = "is that a Redis? a port that speaks TLS wants " + strings.Replace(a.scheme, "redis", "rediss", 1) + "://"
	}
	return h
}

func sentinelHints(a address) hints {
	return hints{"check the parameters sentinel_user and sentinel_password", "that is a Redis and not a sentinel: the URL must name the sentinels", lockHints(a).closed}
}

// diagnose returns an error that says in one line why a server cannot be used, and what to do about
// it. took is how long the attempt lasted. Only the error of a timeout shows took, so a search may
// pass its timeout instead.
func diagnose(err error, h hints, took time.Duration) error {
	hint, reason := findReason(err, h, took)
	return withHint(reason, hint)
}

// withHint adds a hint, which may be empty, to an error.
func withHint(err error, hint string) error {
	if hint == "" {
		return err
	}
	return fmt.Errorf("%w (%s)", err, hint)
}

// findReason returns the hint and the reason for the error of a server. The hint contains no
// password, and nothing of the server's replies.
func findReason(err error, h hints, took time.Duration) (hint string, reason error) {
	var (
		reply     redis.Error
		handshake *handshakeError
	)
	// The order matters, from the most specific cause to the least: a TLS handshake
	// that timed out is also a timeout.
	switch {
	case errors.Is(err, errNotMaster): // its text has a hint
	case errors.As(err, &reply):
		err, hint = firstSentence(reply), replyHint(reply.Error(), h)
	case errors.As(err, &handshake) && timedOut(err):
		err, hint = said{fmt.Sprintf("TLS handshake: no answer within %v", round(took)), err}, handshakeHint(handshake.err)
	case errors.As(err, &handshake):
		err, hint = handshake, handshakeHint(handshake.err)
	default:
		hint, err = diagnoseNetwork(err, h, took)
	}
	return hint, err
}

// diagnoseNetwork returns the hint and the reason for an error of a connection.
func diagnoseNetwork(err error, h hints, took time.Duration) (hint string, reason error) {
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.As(err, &dns):
		return "check the host in the URL", said{"the host was not found", dns}
	case timedOut(err):
		return "check host and port, and that no firewall is in between", said{fmt.Sprintf("no answer within %v", round(took)), err}
	case errors.Is(err, syscall.ECONNREFUSED):
		return "is Redis running there? check host and port", said{"connection refused", err}
	case errors.Is(err, fs.ErrNotExist):
		return "is Redis running, with unixsocket set to this path?", said{"no such socket", err}
	case errors.Is(err, fs.ErrPermission):
		return "see unixsocketperm in the configuration of Redis", said{"permission denied", err}
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return h.closed, said{"the server closed the connection", err}
	case alerted(err):
		return certificateHint, err // with TLS 1.3 the alert comes after the handshake
	case errors.As(err, &op):
		return "", fmt.Errorf("%s: %w", op.Op, op.Err) // without the addresses: the Store adds the server's
	}
	return "is that a Redis?", err
}

// replyHint returns the hint for an error that the server replied.
func replyHint(text string, h hints) string {
	word, _, _ := strings.Cut(text, " ")

	switch {
	case word == "WRONGPASS", strings.Contains(text, "invalid password"), strings.Contains(text, "AUTH"):
		return h.auth
	case strings.Contains(text, "replicas confirmed"):
		return "are there as many replicas as the parameter replicas says, and do they keep up?"
	case word == "DENIED":
		return "give Redis a password, or have it listen on the loopback only"
	case word == "NOPERM":
		return "docs/redis.md lists the rights that the user needs"
	case strings.Contains(text, "DB index"), strings.Contains(text, "SELECT is not allowed"):
		return "check the number of the database in the URL"
	case strings.Contains(text, "unknown command"):
		return h.scripts
	case strings.Contains(text, "cluster support disabled"):
		return "that Redis is in no cluster: use redis://host:port"
	case strings.Contains(text, "No such master"):
		return "check the name after the sentinels: redis-sentinel://host:port,host:port/NAME"
	case word == "LOADING", word == "MASTERDOWN", word == "CLUSTERDOWN", strings.Contains(text, "max number of clients"):
		return "try again later"
	}
	return ""
}

// unfit returns why a server must not store locks, or nil. It reads the replies to INFO
// replication, INFO memory and CLUSTER INFO. A reply is missing if the user may not ask, or if the
// server does not know the command.
func unfit(replication, memory, cluster any, mayEvict bool) error {
	policy := InfoField(memory, "maxmemory_policy")
	switch {
	case InfoField(replication, "role") == "slave":
		master := net.JoinHostPort(InfoField(replication, "master_host"), InfoField(replication, "master_port"))
		// This is no ReplyError: a master of a cluster that was demoted just now must not end Open.
		return fmt.Errorf("it is a replica of %s (name the master in the URL, or the sentinels: redis-sentinel://host:port,host:port/NAME)", master)
	case InfoField(cluster, "cluster_state") == "fail":
		return resp.ReplyError("CLUSTERDOWN the cluster is down (try again later; CLUSTER INFO has the details)")
	case !mayEvict && policy != "" && policy != "noeviction" && InfoField(memory, "maxmemory") != "0":
		return resp.ReplyError("it may evict locks, its maxmemory-policy is " + policy + " (set noeviction; or allow_eviction=true, if two holders at once do no harm)")
	}
	return nil
}

// InfoField returns a field of a reply to INFO, or "" if there is none.
func InfoField(reply any, name string) string {
	text, _ := reply.(string)
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+":"); ok {
			return value
		}
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
		return "does this port speak TLS? if not, use redis://"
	case alerted(err):
		return certificateHint
	}
	return ""
}

// alerted reports whether the server refused the TLS connection by an alert.
func alerted(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

func round(d time.Duration) time.Duration {
	if r := d.Round(10 * time.Millisecond); r > 0 {
		return r
	}
	return d.Round(10 * time.Microsecond)
}

func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) ||
		errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, syscall.ETIMEDOUT)
}

// firstSentence shortens a long reply. A Redis in protected mode replies with a page of advice, and
// the reply to an unknown command repeats the arguments.
func firstSentence(err redis.Error) error {
	text, _, _ := strings.Cut(err.Error(), ". ")
	text, _, _ = strings.Cut(text, ", with args")
	return said{strings.TrimSuffix(text, "."), err}
}

// said shows another text in place of an error's own.
type said struct {
	text string
	err  error
}

func (s said) Error() string { return s.text }
func (s said) Unwrap() error { return s.err }
