package redisstore

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/hasplock/hasp/backend"
)

// Params are the parameters that Open takes:
//
//	ca           file of the certificate authorities to trust, in PEM   (rediss)
//	cert, key    files of this client's certificate and key, in PEM     (rediss)
//	server_name  name that the server's certificate must bear           (rediss)
//	db           number of the database                                 (unix)
var Params = []string{"ca", "cert", "key", "server_name", "db"}

// address is where a server is and who we are to it.
type address struct {
	scheme         string // redis, rediss or unix
	addr           string // host:port, or the path of a socket
	host           string
	user, password string
	db             int
}

const defaultPort = "6379"

// forms is what an error tells to write.
const forms = "redis://user:password@host:port/db, rediss://… for TLS, or unix:///path/to/socket"

// parse takes a node's URL apart. Its errors repeat no part of the URL that
// may be a secret, and none of net/url's errors, which repeat all of it.
// A password may be percent-encoded, and must be where it holds a % or a ?.
func parse(node string) (address, error) {
	scheme, rest, ok := strings.Cut(node, "://")
	a := address{scheme: scheme}
	if !ok || scheme != "redis" && scheme != "rediss" && scheme != "unix" {
		return a, invalid("node: want %s", forms)
	}
	if scheme == "unix" {
		return a, a.parseSocket(rest)
	}
	user, rest := "", rest
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, rest = rest[:at], rest[at+1:]
	}
	if err := a.parseUser(user); err != nil {
		return a, err
	}
	hostport, db, _ := strings.Cut(rest, "/")
	if err := a.parseDB(db); err != nil {
		return a, err
	}
	return a, a.parseHost(hostport)
}

// parseSocket parses what follows "unix://".
func (a *address) parseSocket(rest string) error {
	user, path, ok := strings.Cut(rest, "@/")
	if ok && !strings.HasPrefix(rest, "/") {
		rest = "/" + path
		if err := a.parseUser(user); err != nil {
			return err
		}
	}
	if !strings.HasPrefix(rest, "/") {
		return invalid("node: want the absolute path of a socket, as in unix:///run/redis/redis.sock")
	}
	a.addr = rest
	return nil
}

func (a *address) parseUser(info string) error {
	user, password, _ := strings.Cut(info, ":")
	var err1, err2 error
	a.user, err1 = url.PathUnescape(user)
	a.password, err2 = url.PathUnescape(password)
	if err1 != nil || err2 != nil {
		return invalid("node: user or password is not percent-encoded as in a URL: write %%25 for %%")
	}
	if a.user != "" && a.password == "" {
		return invalid("node: a user without a password: want redis://user:password@host, or redis://:password@host for the default user")
	}
	return nil
}

func (a *address) parseDB(db string) error {
	if db == "" {
		return nil
	}
	n, err := strconv.Atoi(db)
	if err != nil || n < 0 {
		return invalid("node: what follows the host is the number of a database, such as /0")
	}
	a.db = n
	return nil
}

func (a *address) parseHost(hostport string) error {
	if strings.Contains(hostport, ",") {
		return invalid("node: want one host, not a list")
	}
	host, port, err := net.SplitHostPort(hostport)
	if err != nil {
		host, port, err = net.SplitHostPort(hostport + ":" + defaultPort)
	}
	if err != nil {
		return invalid("node: want host:port, an IPv6 address in brackets, as in redis://[::1]:6379")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return invalid("node: want a port between 1 and 65535, as in redis://localhost:6379")
	}
	if host == "" {
		host = "localhost"
	}
	a.host, a.addr = host, net.JoinHostPort(host, port)
	return nil
}

// setParams takes in what Params lists.
func (a *address) setParams(params map[string]string) error {
	for _, name := range []string{"ca", "cert", "key", "server_name"} {
		if params[name] != "" && a.scheme != "rediss" {
			return invalid("parameter %s is for rediss://, which is Redis over TLS", name)
		}
	}
	if (params["cert"] == "") != (params["key"] == "") {
		return invalid("parameters cert and key go together")
	}
	db, ok := params["db"]
	if !ok {
		return nil
	}
	if a.scheme != "unix" {
		return invalid("parameter db is for unix://; write %s://host:port/%s", a.scheme, db)
	}
	return a.parseDB(db)
}

func (a *address) network() string {
	if a.scheme == "unix" {
		return "unix"
	}
	return "tcp"
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{backend.ErrInvalid}, args...)...)
}
