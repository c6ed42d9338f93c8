package natskv

import (
	"errors"
	"io"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp/caslock/internal/adapter"
)

// Codes of JetStream that the library does not name.
const (
	codeMaximumStreams jetstream.ErrorCode = 10027
	codeNoPeers        jetstream.ErrorCode = 10005
	codeNoCluster      jetstream.ErrorCode = 10074
	codeNoLeader       jetstream.ErrorCode = 10008 // "temporarily unavailable": see the method last
)

// isForbidden reports whether err says that the user lacks the right to use a subject.
func isForbidden(err error) bool { return errors.Is(err, nats.ErrPermissionViolation) }

// codeOf returns the code of an error of JetStream, or 0.
func codeOf(err error) jetstream.ErrorCode {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.ErrorCode
	}
	return 0
}

const enable = "switch JetStream on: put jetstream {} into the server's configuration, " +
	"and jetstream: enabled into the account"

// hint returns what to do about an error of opening a driver, or "" if there is no advice. If
// several cases apply, the first one counts.
func hint(err error) string {
	switch {
	case isForbidden(err):
		return "grant the user this subject; the README of natskv has all that are needed"
	case errors.Is(err, nats.ErrNoServers): // the library's error if a host refuses the connection
		return "nobody listens: is NATS running there? check hosts and ports"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired),
		errors.Is(err, nats.ErrAuthRevoked), errors.Is(err, nats.ErrAccountAuthExpired):
		return "check user and password in the URL, or the parameter creds"
	case errors.Is(err, jetstream.ErrBucketNotFound):
		return "create it, as with nats kv add, or leave out create=false"
	case errors.Is(err, nats.ErrSecureConnWanted):
		return "the server has no TLS: use nats:// without ca, cert and key"
	case errors.Is(err, nats.ErrNoResponders): // no server that is reached has JetStream
		return enable
	case errors.Is(err, nats.ErrNoInfoReceived), errors.Is(err, io.EOF): // no greeting of NATS
		return "that is no NATS server: check the port, which is usually 4222"
	case adapter.IsTimeout(err), errors.Is(err, nats.ErrTimeout):
		return "no answer: check that the port is the one for clients, usually 4222, and that " +
			"no firewall is in between; JetStream answers only if most servers run"
	}

	switch codeOf(err) {
	case jetstream.JSErrCodeJetStreamNotEnabled, jetstream.JSErrCodeJetStreamNotEnabledForAccount:
		return enable
	case codeMaximumStreams:
		return "raise the account's limit of streams, or name a bucket that exists"
	case codeNoPeers, codeNoCluster:
		return "the cluster has fewer servers than replicas: lower the parameter replicas"
	}

	text := adapter.Hint(err, "ca=/path/to/ca.pem", "nats:// without ca, cert and key")
	if text != "" {
		return text // it is about the server's certificate, or not about TLS
	}

	// If a server gets no certificate, or one that it does not accept, it ends the connection with
	// an alert of TLS. The library makes that an ErrTLS during the handshake. With TLS 1.3, the
	// alert comes after the client's handshake, as the error of a read.
	isTLS := errors.Is(err, nats.ErrTLS) || strings.Contains(err.Error(), "remote error: tls:")
	if isTLS {
		return "the server may want a certificate: set the parameters cert and key"
	}
	return ""
}
