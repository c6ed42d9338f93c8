package pglock

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/hasplock/hasp/backend"
)

// rewordedError wraps an error and replaces the error's text.
type rewordedError struct {
	text string
	err  error
}

func (e *rewordedError) Error() string { return e.text }
func (e *rewordedError) Unwrap() error { return e.err }

// oneLine returns err with a text of one line. It returns nil if err is nil.
func oneLine(err error) error {
	if err != nil && err.Error() == "closed pool" {
		return &rewordedError{"your pool was closed: close the Client of hasp first", err}
	}
	if err == nil || !strings.ContainsAny(err.Error(), "\n\r") {
		return err
	}
	return &rewordedError{flat(err), err}
}

// flat returns the text of an error in one line, without repeated lines. An error about connections
// has a line for each attempt, and has the same line twice if pgx has tried a host with TLS and
// without.
func flat(err error) string {
	text := ""
	for line := range strings.Lines(err.Error()) {
		line = strings.Join(strings.Fields(line), " ")
		if !strings.Contains(text, line) {
			text += " " + line
		}
	}
	return strings.TrimSpace(text)
}

// badConfig returns the error of a URL or a parameter that pgx cannot use. The argument err is
// pgx's error. Its text begins with the URL, between backquotes, and the URL may contain a
// password. So badConfig shows only the text after the URL, and only if that text contains no
// secret.
func badConfig(err error, secrets ...string) error {
	var path *fs.PathError // a file such as that of sslrootcert cannot be read
	if errors.As(err, &path) {
		return fmt.Errorf("%w: sslrootcert, sslcert, sslkey or passfile: %s %s: %w",
			backend.ErrInvalid, path.Op, path.Path, path.Err)
	}

	text := flat(err)
	text = text[strings.LastIndex(text, "`")+1:]
	for _, secret := range secrets {
		if secret != "" && strings.Contains(text, secret) {
			text = ""
		}
	}
	return invalid("the address of the PostgreSQL or one of its parameters is wrong%s (want %s; "+
		"percent-encode the password: %%2F for /)", text, form)
}

// diagnose returns err, the error of opening a driver, in one line with advice. If the server has
// replied, the line has the server's message instead of pgx's text. It returns nil if err is nil.
func diagnose(err error) error {
	if err == nil {
		return nil
	}
	text := oneLine(err).Error()
	var reply *pgconn.PgError
	if errors.As(err, &reply) {
		text = reply.Message
	} else if errors.As(err, new(*pgconn.ConnectError)) {
		text = strings.TrimPrefix(text, "failed to connect to ")
	}
	text = strings.ReplaceAll(text, context.DeadlineExceeded.Error(), "no answer")
	if advice := hint(err); advice != "" {
		text += " (" + advice + ")"
	}
	return &rewordedError{"postgresql: " + text, err}
}

// hints maps the codes of PostgreSQL's errors to advice about these errors.
var hints = map[string]string{
	"28P01":            "check user and password in the URL: postgres://user:password@host/database",
	"28000":            "check the user in the URL, sslmode, and pg_hba.conf of the server",
	"3D000":            "check the database in the URL, or create it: createdb",
	insufficientRights: "grant the user the right to connect, and the use of the schema",
	tooManyConnections: "the server has no connection left: lower pool_size, or raise max_connections",
	readOnlyTransaction: "this server is a replica: name all servers in the URL, or the address of the " +
		"primary; or default_transaction_read_only is on for this user: switch it off",
}

// hint returns what to do about the error of a connection, or "" if there is no advice.
func hint(err error) string {
	switch {
	case code(err) != "":
		return hints[code(err)]
	case errors.As(err, new(x509.UnknownAuthorityError)):
		return "name the file of its certificate authority: sslrootcert=/path/to/ca.pem"
	case errors.As(err, new(x509.HostnameError)):
		return "name the host that the certificate is for"
	case errors.As(err, new(x509.CertificateInvalidError)):
		return "renew the certificate, or correct the clock of this host"
	case strings.Contains(err.Error(), "server refused TLS"):
		return "the server has no TLS: sslmode=disable, or switch on ssl in postgresql.conf"
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return "is PostgreSQL running there? check host and port"
	case errors.As(err, new(*net.DNSError)):
		return "check the host"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return "is that a PostgreSQL? check host and port, and that no firewall is in between"
	}
	return ""
}
