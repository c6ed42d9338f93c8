package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hasplock/hasp/backend"
)

var (
	errClosed = errors.New("etcdlock: driver is closed")

	// errNoSpace says that etcd's disk quota is used up. etcd also answers so to the call that uses
	// up the quota, which it has carried out.
	errNoSpace = errors.New("its disk quota is used up: compact and defragment it, " +
		"then run etcdctl alarm disarm")

	// errDoubtful says that a keep-alive proves nothing (see beat.outcome).
	errDoubtful = errors.New("etcd: the leader has changed, or the lease has ended, during the call")

	// errReconnected is the error of a call on a second connection, which may lead to another etcd.
	errReconnected = status.Error(codes.Unavailable, "the connection has ended during the call")

	errNoAnswer = errors.New("etcd: no answer")

	// errGone says that the lease has ended or the entry has changed. The call changed nothing.
	errGone = errors.New("the lease has ended")
)

// noChange is the error of a call that was not sent, or that has changed nothing for another
// reason.
type noChange struct{ error }

func (n *noChange) Unwrap() error { return n.error }

// unchanged reports whether a call that returned err has certainly changed nothing, because etcd
// has refused the call, or the call was not sent.
func unchanged(err error) bool {
	return backend.Definite(err) || errors.Is(err, errGone) || errors.As(err, new(*noChange))
}

// codeOf returns the code of a gRPC error, or of the error that the etcd client made from it.
func codeOf(err error) codes.Code {
	if e := (rpctypes.EtcdError{}); errors.As(err, &e) {
		return e.Code()
	}
	return status.Code(err)
}

// isUnavailable reports whether the connection has failed, or the member has no leader.
func isUnavailable(err error) bool { return codeOf(err) == codes.Unavailable }

// The function is reports whether err is one of the errors of etcd in targets.
func is(err error, targets ...error) bool {
	var n *noChange
	if errors.As(err, &n) {
		err = n.error // rpctypes knows an error by its text, which a wrapper changes
	}
	known := rpctypes.Error(err) // the error of etcd that err stands for
	return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(known, t) })
}

// isRefused reports whether etcd has refused the password.
func isRefused(err error) bool { return is(err, rpctypes.ErrAuthFailed) }

// isUnsent reports whether a call found no connection, so that it was not sent.
func isUnsent(err error) bool {
	return isUnavailable(err) && strings.Contains(status.Convert(err).Message(), "Error while dialing")
}

// isContextEnd reports whether err says that a context has ended, here or at the server. A server
// may report the end of its context with the code Unknown, so that only the text shows it.
func isContextEnd(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	code := codeOf(err)
	return code == codes.Canceled || code == codes.DeadlineExceeded ||
		code == codes.Unknown && strings.Contains(status.Convert(err).Message(), "context ")
}

// isAnswer reports whether err shows that the member and its leader work.
func isAnswer(err error) bool { return err == nil || !isUnavailable(err) && !isContextEnd(err) }

// isGone reports whether err is errGone, or says that a lease does not exist.
func isGone(err error) bool {
	return errors.Is(err, errGone) || is(err, rpctypes.ErrLeaseNotFound)
}

// explain returns the error to report for err, the error of a call to endpoint. If ctx has ended,
// that is ctx.Err(). If the lease has ended, it is errGone. For other errors, it says what to do.
func explain(ctx context.Context, endpoint string, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if isGone(err) {
		return errGone
	}
	if errors.Is(err, backend.ErrInvalid) {
		return err // its text says what to do already
	}
	if isContextEnd(err) { // but ctx has not ended, so another time limit has passed
		return fmt.Errorf("etcd at %s: no answer: %w", shown(endpoint), os.ErrDeadlineExceeded)
	}

	text := rpctypes.ErrorDesc(err)
	hint := ""
	isTooLarge := codeOf(err) == codes.ResourceExhausted && strings.Contains(text, "larger than max")
	switch {
	// The message that is too large is a request, because the driver accepts answers of any size.
	case is(err, rpctypes.ErrRequestTooLarge), isTooLarge:
		return fmt.Errorf("%w: the key or the owner is too long for etcd: "+
			"use a shorter one, of 1,000 bytes at most", backend.ErrInvalid)
	case is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("etcd at %s: %s (%w)", shown(endpoint), plain(text), errNoSpace)
	case is(err, rpctypes.ErrAuthFailed):
		hint = "check user and password in the URL"
	case is(err, rpctypes.ErrUserEmpty, rpctypes.ErrInvalidAuthToken, rpctypes.ErrInvalidAuthMgmt):
		hint = "it wants a user and a password: put them into the URL, as in etcd://user:password@host:2379"
	case is(err, rpctypes.ErrPermissionDenied):
		hint = "grant the user's role readwrite on the prefix " + root +
			": etcdctl role grant-permission ROLE readwrite --prefix " + root
	case strings.HasPrefix(endpoint, "https:") && hintTLS(text) != "":
		hint = hintTLS(text)
	case strings.Contains(text, "server preface"):
		hint = "it wants TLS, is no etcd, or is ending: check the port, or use etcds://"
	case strings.Contains(text, "connection refused"):
		hint = "is etcd running there? check host and port"
	case strings.Contains(text, "no such host"):
		hint = "check the host"
	}

	text = plain(text)
	if hint != "" {
		text += " (" + hint + ")"
	}
	return fmt.Errorf("etcd at %s: %s", shown(endpoint), text)
}

// hintTLS returns what to do about the error of a connection with TLS, or "" if there is no advice.
func hintTLS(text string) string {
	// The server ends the connection if it speaks no TLS, or if it wants a certificate and gets
	// none. In the second case it sends an alert first, but the client may fail to write before it
	// reads the alert. So the error may not show which case it is.
	const ended = "use etcd:// if it speaks no TLS; if it wants a client's certificate, set cert and key"
	for _, advice := range []struct{ sign, hint string }{
		{"unknown authority", "name the file of its certificate authority: ca"},
		{"certificate is valid for", "set server_name to a name in its certificate"},
		{"IP SANs", "set server_name to a name in its certificate"},
		{"has expired", "renew its certificate, or correct the clock of this host"},
		{"certificate is not valid", "set server_name to a name in its certificate"},
		{"like a TLS handshake", "it speaks no TLS: use etcd://"},
		{"remote error: tls", "check the client's certificate: cert and key"},
		{"broken pipe", ended},
		{"reset by peer", ended},
		{"EOF", ended},
	} {
		if strings.Contains(text, advice.sign) {
			return advice.hint
		}
	}
	return ""
}

// plain returns the last part of a gRPC error's text, which names the cause.
func plain(text string) string {
	for _, before := range []string{"Error while dialing: ", "authentication handshake failed: ", "desc = "} {
		if i := strings.LastIndex(text, before); i >= 0 {
			text = text[i+len(before):]
		}
	}

	return strings.TrimPrefix(strings.Trim(text, `"`), "etcdserver: ")
}

// shown returns an endpoint without its scheme.
func shown(endpoint string) string {
	return strings.TrimPrefix(strings.TrimPrefix(endpoint, "http://"), "https://")
}
