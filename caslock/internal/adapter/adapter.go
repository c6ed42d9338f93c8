// Package adapter has what the adapters share: how they read a URL, and how they explain an error.
package adapter

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"strconv"
	"strings"
	"syscall"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Invalid returns a backend.ErrInvalid with a text.
func Invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{backend.ErrInvalid}, args...)...)
}

// IsNil reports whether an interface is nil, or contains a nil pointer.
func IsNil(v any) bool {
	r := reflect.ValueOf(v)
	return v == nil || r.Kind() == reflect.Pointer && r.IsNil()
}

// Node returns the only node of c. The text form says what a URL looks like.
func Node(c hasp.Config, form string) (string, error) {
	if len(c.Nodes) != 1 {
		return "", Invalid("nodes: want one node, not %d: %s", len(c.Nodes), form)
	}
	return c.Nodes[0], nil
}

// Params reads the parameters of a URL. If a value is wrong, the methods note that in Err and go
// on, so the caller checks Err once, after all of them.
type Params struct {
	Values map[string]string
	Err    error // the first error
}

// fail notes err, unless there was an error before.
func (p *Params) fail(err error) {
	if p.Err == nil {
		p.Err = err
	}
}

// Bool returns a parameter that is true or false. If the parameter is missing, Bool returns the
// argument otherwise.
func (p *Params) Bool(name string, otherwise bool) bool {
	text, ok := p.Values[name]
	if !ok {
		return otherwise
	}
	v, err := strconv.ParseBool(text)
	if err != nil {
		p.fail(Invalid("parameter %s=%q: want true or false", name, text))
	}
	return v
}

// Int returns a parameter that is a number from 1 to most, or otherwise if the parameter is
// missing.
func (p *Params) Int(name string, otherwise, most int) int {
	text, ok := p.Values[name]
	if !ok {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > most {
		p.fail(Invalid("parameter %s=%q: want a number from 1 to %d", name, text, most))
	}
	return n
}

// File returns a parameter that is the name of a file, or "" if the parameter is missing. File sets
// Err if the file cannot be read, because the libraries that read it later do not name the
// parameter in their errors.
func (p *Params) File(name string) string {
	file, ok := p.Values[name]
	if ok {
		if _, err := os.ReadFile(file); err != nil {
			p.fail(Invalid("parameter %s: %v", name, err))
		}
	}
	return file
}

// explanation is an error with another text.
type explanation struct {
	text string
	err  error
}

func (e *explanation) Error() string { return e.text }
func (e *explanation) Unwrap() error { return e.err }

// Explain returns an error that wraps err, with its text in one line. The text at, which says where
// the error is, comes before, and the hint after, unless it is "".
func Explain(at string, err error, hint string) error {
	const most = 500 // bytes; the text may contain a whole page of a proxy

	text := strings.Join(strings.Fields(err.Error()), " ")
	text = strings.ReplaceAll(text, context.DeadlineExceeded.Error(), "no answer")
	if len(text) > most {
		text = text[:most] + "…"
	}
	if hint != "" {
		text += " (" + hint + ")"
	}
	return &explanation{at + text, err}
}

// Hint says what to do about an error of a connection, or returns "" if there is no advice. The
// argument ca is the setting for a certificate authority, such as ca=FILE, and plain is the form of
// an address without TLS, such as http://.
func Hint(err error, ca, plain string) string {
	switch {
	case errors.As(err, new(x509.UnknownAuthorityError)):
		return "name the file of its certificate authority: " + ca
	case errors.As(err, new(x509.HostnameError)):
		return "name the host that the certificate is for, or set server_name in kube://"
	case errors.As(err, new(x509.CertificateInvalidError)):
		return "renew the certificate, or correct the clock of this host"
	case strings.Contains(err.Error(), "HTTP response to HTTPS client"),
		errors.As(err, new(tls.RecordHeaderError)):
		return "the server has no TLS: use " + plain
	case errors.Is(err, syscall.ECONNREFUSED):
		return "is the server running there? check host and port"
	case errors.As(err, new(*net.DNSError)):
		return "check the host in the URL"
	case errors.Is(err, io.EOF), strings.Contains(err.Error(), "malformed HTTP"):
		return "that is another kind of server, or it is ending: check host and port"
	case IsTimeout(err):
		return "is that the right kind of server? check host and port, and that no firewall is in between"
	}

	return ""
}

// IsTimeout reports whether err says that no answer came in time.
func IsTimeout(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
}
