package redisstore

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/hasplock/hasp/backend"
)

// Params are the parameters that Open accepts:
//
//	ca           file of the certificate authorities to trust, in PEM   (rediss…)
//	cert, key    files of this client's certificate and key, in PEM     (rediss…)
//	server_name  name that the servers' certificates must bear          (rediss…)
//	db           number of the database                                 (unix)
//	replicas     how many replicas must confirm a hold and its renewals
//	allow_eviction  true: accept a server that may evict keys
//	sentinel_user, sentinel_password  credentials for the sentinels     (…-sentinel)
var Params = []string{"ca", "cert", "key", "server_name", "db", "replicas", "allow_eviction",
	"sentinel_user", "sentinel_password"}

// address is a URL with its parameters.
type address struct {
	scheme         string
	kind           kind     // the kind of the servers in addrs
	tls            bool     // the scheme begins with rediss
	addrs          []string // host:port, or the path of a socket
	user, password string
	db             int
	master         string // the master's name at the sentinels
	replicas       int    // how many replicas must confirm a hold
	mayEvict       bool   // servers may evict keys

	sentinelUser, sentinelPassword string
}

// kind is what a URL names: a server, a socket, sentinels or a cluster.
type kind int

const (
	aServer kind = iota
	aSocket
	theSentinels
	aCluster
)

// schemes maps each known scheme of a URL to the fields that the scheme sets.
var schemes = map[string]address{
	"redis":           {kind: aServer},
	"rediss":          {kind: aServer, tls: true},
	"unix":            {kind: aSocket},
	"redis-sentinel":  {kind: theSentinels},
	"rediss-sentinel": {kind: theSentinels, tls: true},
	"redis-cluster":   {kind: aCluster},
	"rediss-cluster":  {kind: aCluster, tls: true},
}

const (
	defaultPort         = "6379"
	defaultSentinelPort = "26379"
)

// forms lists the forms of a URL for the text of an error.
const forms = "redis://user:password@host:port/db, " +
	"redis-sentinel://host:port,host:port/master/db, redis-cluster://host:port,host:port, " +
	"the same with rediss for TLS, or unix:///path/to/socket"

// split cuts a URL into its scheme, the user with the password, the hosts, and the path with its
// leading slash. The result a has only the fields that the scheme sets. ok reports whether the
// scheme is known.
func split(node string) (a address, user, hosts, path string, ok bool) {
	scheme, rest, found := strings.Cut(node, "://")
	a, ok = schemes[scheme]
	a.scheme = scheme

	// A password may contain an @, so the last @ ends the password. But an @ in the path of a
	// socket is a part of the path.
	at := strings.LastIndexByte(rest, '@')
	if a.kind == aSocket {
		at = strings.Index(rest, "@/")
		if strings.HasPrefix(rest, "/") {
			at = -1 // there is only a path, and no password
		}
	}

	if at >= 0 {
		user = rest[:at]
		rest = rest[at+1:]
	}

	if i := strings.IndexByte(rest, '/'); i >= 0 {
		path = rest[i:]
		rest = rest[:i]
	}
	return a, user, rest, path, ok && found
}

// parse parses a node's URL. Its errors contain no part of the URL that may be a secret, so they do
// not wrap the errors of net/url, which quote the URL. A password may be percent-encoded. If it
// contains a % or a ?, it must be percent-encoded.
func parse(node string) (address, error) {
	a, user, hosts, path, ok := split(node)
	if !ok {
		return address{}, invalid("node: want %s", forms)
	}
	if err := a.parseUser(user); err != nil {
		return a, err
	}

	if a.kind == aSocket {
		if hosts != "" || path == "" {
			return a, invalid("node: want the absolute path of a socket, as in " +
				"unix:///run/redis/redis.sock")
		}
		a.addrs = []string{path}
		return a, nil
	}

	rest := hosts + path
	switch {
	case strings.ContainsAny(hosts, " \t\r\n"):
		return a, invalid("node: a space or a line break is among the hosts: want %s", a.form())
	case strings.Contains(rest, "://"):
		return a, invalid("node: write %s:// once, before the first host", a.scheme)
	case strings.Contains(rest, "?"):
		return a, invalid("node: put the parameters that follow the ? into params")
	}
	if err := a.parseHosts(hosts); err != nil {
		return a, err
	}
	return a, a.parsePath(strings.TrimPrefix(path, "/"))
}

// Nodes splits a URL of several independent servers, such as
// redis://user:password@host:port,host:port/db, into one URL for each. A URL of a socket has only
// one server.
func Nodes(list string) ([]string, error) {
	a, _, hosts, path, ok := split(list)
	switch {
	case !ok:
		return nil, invalid("node: want redis://user:password@host:port/db, rediss://…, or " +
			"unix:///path/to/socket")
	case a.kind == aSocket:
		return []string{list}, nil
	case a.kind != aServer:
		return nil, invalid("node: want independent servers, "+
			"redis://host:port,host:port,host:port, and not %s://", a.scheme)
	}

	before := strings.TrimSuffix(list, hosts+path) // the scheme, user and password
	var nodes []string
	for host := range strings.SplitSeq(hosts, ",") {
		if host == "" {
			return nil, invalid("node: a host is missing: want %s://host:port,host:port,host:port",
				a.scheme)
		}
		nodes = append(nodes, before+host+path)
	}

	return nodes, nil
}

// Address returns the address in a node's URL: host:port, or the path of a socket.
func Address(node string) (string, error) {
	a, err := parse(node)
	if err != nil {
		return "", err
	}
	return a.addrs[0], nil
}

// parseUser parses the part before the @, which is user:password. It may be empty.
func (a *address) parseUser(info string) error {
	user, password, _ := strings.Cut(info, ":")
	var err1, err2 error
	a.user, err1 = url.PathUnescape(user)
	a.password, err2 = url.PathUnescape(password)

	// Leave out the text and the errors of package url, because both show a part of the password.
	if err1 != nil || err2 != nil {
		return invalid("node: user or password is not percent-encoded as in a URL: write %%25 " +
			"for %%")
	}

	if a.user != "" && a.password == "" {
		return invalid("node: a user without a password: want redis://user:password@host, or " +
			"redis://:password@host for the default user")
	}
	return nil
}

// parsePath parses the part after the hosts: the number of the database, or the name of the master
// with the number after it.
func (a *address) parsePath(path string) error {
	switch a.kind {
	case theSentinels:
		name, db, _ := strings.Cut(path, "/")
		var err error
		if a.master, err = url.PathUnescape(name); err != nil || name == "" {
			return invalid("node: want the name of the master after the hosts, as in "+
				"%s://host:port,host:port/mymaster/0", a.scheme)
		}
		return a.parseDB(db)
	case aCluster:
		if path != "" && path != "0" {
			return invalid("node: a cluster has no databases but 0: want %s://host:port,host:port",
				a.scheme)
		}
		return nil
	}

	return a.parseDB(path)
}

// parseDB parses the number of the database. If it is missing, the number is 0.
func (a *address) parseDB(db string) error {
	if db == "" {
		return nil
	}
	n, err := strconv.Atoi(db)
	if err != nil || n < 0 {
		return invalid("want a number of a database such as 0, after the host or as the " +
			"parameter db")
	}
	a.db = n
	return nil
}

// parseHosts parses the list of hosts, each with or without a port.
func (a *address) parseHosts(hosts string) error {
	if a.kind == aServer && strings.Contains(hosts, ",") {
		return invalid("node: want one host, not a list, which is for %s-sentinel:// and "+
			"%s-cluster://", a.scheme, a.scheme)
	}
	for hostport := range strings.SplitSeq(hosts, ",") {
		if err := a.parseHost(hostport); err != nil {
			return err
		}
	}

	return nil
}

// parseHost parses one host, and appends it to a.addrs. If it has no port, it gets the usual port.
func (a *address) parseHost(hostport string) error {
	usualPort := defaultPort
	if a.kind == theSentinels {
		usualPort = defaultSentinelPort
	}

	host, port, err := net.SplitHostPort(hostport)
	if err != nil { // probably the port is missing
		host, port, err = net.SplitHostPort(hostport + ":" + usualPort)
	}
	if err != nil {
		return invalid("node: want host:port, with an IPv6 address in brackets, as in " +
			"redis://[::1]:6379")
	}

	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return invalid("node: want a port between 1 and 65535, as in redis://localhost:6379")
	}
	if host == "" {
		// Do not guess localhost, because the host may come from a variable that is not set.
		return invalid("node: a host is missing: want %s", a.form())
	}
	a.addrs = append(a.addrs, net.JoinHostPort(host, port))
	return nil
}

// form returns an example of a URL of the kind of a.
func (a *address) form() string {
	switch a.kind {
	case aServer:
		return a.scheme + "://localhost:" + defaultPort
	case theSentinels:
		return a.scheme + "://host:port,host:port/mymaster"
	}
	return a.scheme + "://host:port,host:port"
}

// setParams checks the parameters that Params lists, and stores their values in the address a.
func (a *address) setParams(params map[string]string) error {
	for _, name := range []string{"ca", "cert", "key", "server_name"} {
		if params[name] != "" && !a.tls {
			return invalid("parameter %s is for rediss://, which is Redis over TLS", name)
		}
	}

	if (params["cert"] == "") != (params["key"] == "") {
		return invalid("parameters cert and key go together")
	}

	a.sentinelUser = params["sentinel_user"]
	a.sentinelPassword = params["sentinel_password"]
	switch {
	case a.sentinelUser == "" && a.sentinelPassword == "": // the sentinels need no password
	case a.kind != theSentinels:
		return invalid("parameters sentinel_user and sentinel_password are for redis-sentinel:// " +
			"and rediss-sentinel://")
	case a.sentinelPassword == "":
		return invalid("parameter sentinel_user: a user without a password: want " +
			"sentinel_password as well")
	}

	var err error
	if text, ok := params["replicas"]; ok {
		if a.replicas, err = strconv.Atoi(text); err != nil || a.replicas < 0 {
			return invalid("parameter replicas: want 0 or more, such as 1")
		}
	}

	if text, ok := params["allow_eviction"]; ok {
		if a.mayEvict, err = strconv.ParseBool(text); err != nil {
			return invalid("parameter allow_eviction: want true or false")
		}
	}

	// Only the URL of a socket needs the parameter db. Other URLs have the number in their path.
	db, ok := params["db"]
	switch {
	case !ok:
		return nil
	case a.kind == aCluster:
		return invalid("parameter db is for unix://; a cluster has no databases but 0")
	case a.kind != aSocket:
		return invalid("parameter db is for unix://; write %s://…/%s", a.scheme, db)
	}

	return a.parseDB(db)
}

// secrets returns the passwords, which no error may contain.
func (a *address) secrets() []string { return []string{a.password, a.sentinelPassword} }

// invalid returns an error that wraps backend.ErrInvalid.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{backend.ErrInvalid}, args...)...)
}
