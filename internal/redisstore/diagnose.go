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

// hints contains advice for the user, which depends on the kind of the server that failed.
type hints struct {
	auth    string // if the server refuses the password
	scripts string // if the server does not know a command
}

var clientHints = hints{"check the user and the password of the client", noScripts}

var sentinelHints = hints{
	auth:    "check the parameters sentinel_user and sentinel_password",
	scripts: "that is a Redis and not a sentinel: the URL must name the sentinels",
}

// lockHints returns the hints for a server that stores locks.
func lockHints(a address) hints {
	return hints{
		auth:    "check user and password in the URL: " + a.scheme + "://user:password@…",
		scripts: noScripts,
	}
}

const noScripts = "this server runs no scripts: a sentinel, or a proxy?"

// diagnose returns an error that says in one line why a server cannot be used, and what to do about
// it. The argument took is how long the attempt lasted, or 0. Only the error of a timeout shows it. The
// hint contains no text that the server replied.
func diagnose(err error, h hints, took time.Duration) error {
	var (
		reply redis.Error
		dns   *net.DNSError
		op    *net.OpError
		hint  string
	)

	if done := (located{}); errors.As(err, &done) {
		return done // it has a hint already
	}
	if u := (unreached{}); errors.As(err, &u) {
		err = u.cause // that no connection could be made says more than the missing reply
	}

	within := "" // if it is not known how long the attempt lasted
	if took > 0 {
		within = fmt.Sprintf(" within %v", max(took, 10*time.Millisecond).Round(10*time.Millisecond))
	}

	// Check specific causes before general ones, because an error may have both. For example, a TLS
	// handshake that timed out is also a timeout.
	switch {
	case errors.Is(err, errNotMaster), errors.Is(err, errForeign): // the text has a hint
	case errors.As(err, &reply):
		err = said{firstSentence(reply.Error()), reply}
		hint = replyHint(reply.Error(), h)
	case errors.Is(err, errHandshake):
		hint = handshakeHint(err)
		if timedOut(err) {
			err = said{fmt.Sprintf("%v: no answer%s", errHandshake, within), err}
		}
	case errors.As(err, &dns):
		err = said{"the host was not found", dns}
		hint = "check the host in the URL"
	case timedOut(err):
		err = said{"no answer" + within, err}
		hint = "check host and port, and that no firewall is in between; a port that speaks TLS " +
			"needs rediss:// or TLSConfig, and any other port needs neither"
	case errors.Is(err, syscall.ECONNREFUSED):
		err = said{"connection refused", err}
		hint = "is Redis running there? check host and port, or the path of its socket"
	case errors.Is(err, fs.ErrNotExist):
		err = said{"no such socket", err}
		hint = "is Redis running, with unixsocket set to this path?"
	case errors.Is(err, fs.ErrPermission):
		err = said{"permission denied", err}
		hint = "see unixsocketperm in the configuration of Redis"
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		err = said{"the server closed the connection", err}
		hint = "is that a Redis? a port that speaks TLS wants rediss:// or TLSConfig, and " +
			"perhaps ?cert=…&key=…"
	case alerted(err):
		hint = certificateHint // with TLS 1.3 the alert comes after the handshake
	case errors.Is(err, redis.ErrClosed):
		err = redis.ErrClosed
		hint = "your program closed its Redis client: close the Client of hasp first"
	case errors.As(err, new(*net.AddrError)):
		hint = "Addr is host:port, without redis://"
	case errors.As(err, &op):
		err = fmt.Errorf("%s: %w", op.Op, op.Err) // without addresses, because the Store adds one
	default:
		hint = "is that a Redis?"
	}

	if hint == "" {
		return err
	}
	return fmt.Errorf("%w (%s)", err, hint)
}

const grantKeys = "grant the user ~PREFIX* for your keys, and ~hasp:*: docs/redis.md"

// replyHint returns the hint for an error that the server replied, or "" if there is none.
func replyHint(text string, h hints) string {
	const later = "try again later"
	for _, c := range []struct{ part, hint string }{
		{"WRONGPASS", h.auth}, {"invalid password", h.auth}, {"AUTH", h.auth},
		{"replicas confirmed", "are there as many replicas as the parameter replicas says, and " +
			"do they keep up?"},
		{"DENIED", "give Redis a password, or have it listen on the loopback only"},
		{"of the keys", grantKeys},
		{"access a key", grantKeys}, // from Redis 7.2 on
		{"NOPERM", "docs/redis.md lists the rights that the user needs"},
		{"DB index", "check the number of the database in the URL"},
		{"SELECT is not allowed", "check the number of the database in the URL"},
		{"unknown command", h.scripts},
		{"cluster support disabled", "that Redis is in no cluster: use redis://host:port"},
		{"No such master", "check the name after the sentinels: " +
			"redis-sentinel://host:port,host:port/NAME"},
		{"OOM", "the Redis is full: raise maxmemory, or free memory"},
		{"NOREPLICAS", "fewer replicas are connected than min-replicas-to-write says"},
		{"LOADING", later}, {"MASTERDOWN", later}, {"CLUSTERDOWN", later},
		{"max number of clients", later},
	} {
		if strings.Contains(text, c.part) {
			return c.hint
		}
	}

	return ""
}

// unfit returns why a server must not store locks, or nil. It reads the replies to INFO and CLUSTER
// INFO. A reply is nil if the user has no right to the command, or if the server does not know the
// command. Then unfit accepts what it cannot read. If mayEvict is true, it accepts a server that
// evicts keys.
func unfit(info, cluster any, mayEvict bool) error {
	policy := InfoField(info, "maxmemory_policy")
	hasPolicy := policy != "" && policy != "noeviction"
	evicts := hasPolicy && InfoField(info, "maxmemory") != "0" // with 0, the memory has no limit
	switch {
	case InfoField(info, "redis_mode") == "sentinel":
		return errors.New("it is a sentinel (write redis-sentinel://host:port,host:port/NAME)")
	case InfoField(info, "role") == "slave":
		master := net.JoinHostPort(InfoField(info, "master_host"),
			InfoField(info, "master_port"))
		// Return no ReplyError, because a demoted master of a cluster must not make Open fail.
		return fmt.Errorf("it is a replica of %s (name the master, or the sentinels: "+
			"redis-sentinel://host:port,host:port/NAME)", master)
	case InfoField(cluster, "cluster_state") == "fail":
		return resp.ReplyError("CLUSTERDOWN the cluster is down (try again later; CLUSTER INFO " +
			"has the details)")
	case !mayEvict && evicts:
		return resp.ReplyError("it may evict locks, its maxmemory-policy is " + policy + " (set " +
			"noeviction; or with a URL allow_eviction=true, if two holders at once do no harm)")
	}

	return nil
}

// InfoField returns a field of a reply to INFO, or "" if the reply lacks the field.
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

// handshakeHint returns the hint for a TLS handshake that failed, or "" if there is none.
func handshakeHint(err error) string {
	var (
		authority x509.UnknownAuthorityError
		name      x509.HostnameError
		record    tls.RecordHeaderError
		invalid   x509.CertificateInvalidError
	)

	switch {
	case errors.As(err, &authority):
		return "name the file of its certificate authority: ?ca=/path/to/ca.pem"
	case errors.As(err, &name):
		return "name the host that the certificate is for: ?server_name=…"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "renew the certificate of the server, or correct the clock"
	case errors.As(err, &record), timedOut(err),
		errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
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

// timedOut reports whether err means that something took too long.
func timedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) ||
		errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, syscall.ETIMEDOUT)
}

// firstSentence shortens a long reply. A Redis in protected mode replies with a page of advice, the
// reply to an unknown command repeats the arguments, and the error of a script names its line.
func firstSentence(text string) string {
	text, _, _ = strings.Cut(text, ". ")
	text, _, _ = strings.Cut(text, ", with args")
	return strings.TrimSuffix(text, ".")
}

// located is an error that names its server, and that needs no other hint.
type located struct{ error }

func (l located) Unwrap() error { return l.error }

// said is an error with a text of its own, which wraps another error.
type said struct {
	text string
	err  error
}

func (s said) Error() string { return s.text }
func (s said) Unwrap() error { return s.err }
