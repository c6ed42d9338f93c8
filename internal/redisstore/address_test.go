package redisstore

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestParse(t *testing.T) {
	server := func(addr string) address { return address{scheme: "redis", kind: aServer, addrs: []string{addr}} }
	with := func(a address, set func(a *address)) address { set(&a); return a }
	for node, want := range map[string]address{
		"redis://host":                    server("host:6379"),
		"redis://":                        server("localhost:6379"),
		"redis://:7000":                   server("localhost:7000"),
		"redis://host:1/":                 server("host:1"),
		"rediss://host:1/12":              with(server("host:1"), func(a *address) { a.scheme, a.tls, a.db = "rediss", true, 12 }),
		"redis://[::1]":                   server("[::1]:6379"),
		"redis://[fe80::1%eth0]:7/1":      with(server("[fe80::1%eth0]:7"), func(a *address) { a.db = 1 }),
		"redis://:pw@host":                with(server("host:6379"), func(a *address) { a.password = "pw" }),
		"redis://ann:p%40%3F%25@host":     with(server("host:6379"), func(a *address) { a.user, a.password = "ann", "p@?%" }),
		"redis://ann:p@/:#w@[::1]:7/0":    with(server("[::1]:7"), func(a *address) { a.user, a.password = "ann", "p@/:#w" }),
		"unix:///run/redis.sock":          {scheme: "unix", kind: aSocket, addrs: []string{"/run/redis.sock"}},
		"unix:///run/a@/b.sock":           {scheme: "unix", kind: aSocket, addrs: []string{"/run/a@/b.sock"}},
		"unix://ann:p%40w@/run/a@/b.sock": {scheme: "unix", kind: aSocket, addrs: []string{"/run/a@/b.sock"}, user: "ann", password: "p@w"},
		"redis-sentinel://s1/mymaster":    {scheme: "redis-sentinel", kind: theSentinels, addrs: []string{"s1:26379"}, master: "mymaster"},
		"rediss-sentinel://ann:p@/w@s1:1,[::1],s3/my%2Fmaster/2": {scheme: "rediss-sentinel", kind: theSentinels, tls: true,
			addrs: []string{"s1:1", "[::1]:26379", "s3:26379"}, user: "ann", password: "p@/w", master: "my/master", db: 2},
		"redis-cluster://a":               {scheme: "redis-cluster", kind: aCluster, addrs: []string{"a:6379"}},
		"rediss-cluster://:pw@a:7000,b/0": {scheme: "rediss-cluster", kind: aCluster, tls: true, addrs: []string{"a:7000", "b:6379"}, password: "pw"},
	} {
		got, err := parse(node)
		if !reflect.DeepEqual(got, want) || err != nil {
			t.Errorf("%s: got %+v, %v; want %+v", node, got, err, want)
		}
		if addr, err := Address(node); addr != want.addrs[0] || err != nil {
			t.Errorf("%s: the address: got %q, %v", node, addr, err)
		}
	}
}

func TestParseRefusesWithoutShowingSecrets(t *testing.T) {
	for node, want := range map[string]string{
		"":                                       "want redis://",
		"ann:hunter2@host:6379":                  "want redis://",
		"http://ann:hunter2@host":                "want redis://",
		"redis://ann:hunter2%zz@host":            "percent",
		"redis://ann@host":                       "user without a password",
		"redis://ann:hunter2@::1":                "brackets",
		"redis://ann:hunter2@[::1":               "brackets",
		"redis://ann:hunter2@h:x":                "port between",
		"redis://ann:hunter2@h:0":                "port between",
		"redis://ann:hunter2@h:70000":            "port between",
		"redis://ann:hunter2@a:1,b:2":            "one host",
		"redis://ann:hunter2@h/zero":             "number of a database",
		"redis://ann:hunter2@h/-1":               "number of a database",
		"redis://h/ann:hunter2":                  "number of a database",
		"redis://ann:hunter2@h/x?password=more":  "number of a database",
		"unix://ann:hunter2@run/redis.sock":      "absolute path",
		"unix://ann:hunter2%@/redis.sock":        "percent",
		"unix://":                                "absolute path",
		"redis-sentinel://ann:hunter2@s1":        "name of the master",
		"redis-sentinel://ann:hunter2@s1//0":     "name of the master",
		"redis-sentinel://ann:hunter2@s1/m%z":    "name of the master",
		"redis-sentinel://ann:hunter2@s1/m/x":    "number of a database",
		"redis-sentinel://ann:hunter2@s1,/m":     "host:port,host:port",
		"redis-sentinel://ann:hunter2@/m":        "host:port,host:port",
		"redis-sentinel://ann:hunter2@s1,s2:x/m": "port between",
		"redis-cluster://ann:hunter2@a,b/1":      "no databases",
		"redis-cluster://ann:hunter2@":           "host:port,host:port",
		"redis-sentinels://ann:hunter2@s1/m":     "want redis://",
	} {
		_, err := Address(node)
		refuses(t, node, err, want)
	}
}

// refuses fails the test unless err is ErrInvalid, names what is wanted, and has neither
// the user nor the password of the URL.
func refuses(t *testing.T, url string, err error, want string) {
	t.Helper()
	if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(fmt.Sprint(err), want) {
		t.Errorf("%s: got %v, want ErrInvalid about %q", url, err, want)
	}
	if strings.Contains(fmt.Sprint(err), "hunter2") || strings.Contains(fmt.Sprint(err), "ann") {
		t.Errorf("%s: %v tells a secret", url, err)
	}
}

func TestParamsMustFitTheirScheme(t *testing.T) {
	for _, c := range []struct {
		node   string
		params map[string]string
		want   string // "" for none
	}{
		{"redis://h", nil, ""},
		{"rediss://h", map[string]string{"ca": "f", "cert": "c", "key": "k", "server_name": "n"}, ""},
		{"unix:///s", map[string]string{"db": "2"}, ""},
		{"redis://h", map[string]string{"ca": "f"}, "rediss://"},
		{"unix:///s", map[string]string{"server_name": "f"}, "rediss://"},
		{"rediss://h", map[string]string{"key": "k"}, "go together"},
		{"redis://h", map[string]string{"db": "2"}, "redis://…/2"},
		{"redis-sentinel://h/m", map[string]string{"db": "2"}, "redis-sentinel://…/2"},
		{"redis-cluster://h", map[string]string{"db": "2"}, "no databases"},
		{"rediss-sentinel://h/m", map[string]string{"ca": "f", "sentinel_user": "u", "sentinel_password": "p", "replicas": "2"}, ""},
		{"rediss-cluster://h", map[string]string{"ca": "f", "replicas": "0"}, ""},
		{"redis-cluster://h", map[string]string{"ca": "f"}, "rediss://"},
		{"redis-cluster://h", map[string]string{"sentinel_password": "p"}, "redis-sentinel://"},
		{"redis-sentinel://h/m", map[string]string{"sentinel_user": "u"}, "sentinel_password"},
		{"redis://h", map[string]string{"replicas": "-1"}, "replicas"},
		{"redis://h", map[string]string{"replicas": "some"}, "replicas"},
		{"redis://h", map[string]string{"allow_eviction": "some"}, "allow_eviction"},
		{"unix:///s", map[string]string{"db": "two"}, "number of a database"},
	} {
		a, err := parse(c.node)
		if err == nil {
			err = a.setParams(c.params)
		}
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s %v: got %v, want %q", c.node, c.params, err, c.want)
		}
	}
}

func TestNodesSplitsLists(t *testing.T) {
	for list, want := range map[string][]string{
		"redis://a":                         {"redis://a"},
		"redis://":                          {"redis://"},
		"redis://a:1,b:2,c:3":               {"redis://a:1", "redis://b:2", "redis://c:3"},
		"redis://a,b/7":                     {"redis://a/7", "redis://b/7"},
		"rediss://:pw@a,[::1]:7,c/0":        {"rediss://:pw@a/0", "rediss://:pw@[::1]:7/0", "rediss://:pw@c/0"},
		"redis://ann:p@,/:#w@a:1,b:2/3":     {"redis://ann:p@,/:#w@a:1/3", "redis://ann:p@,/:#w@b:2/3"},
		"unix:///run/a,b.sock":              {"unix:///run/a,b.sock"},
		"unix://ann:p%40w@/run/a,b@/c.sock": {"unix://ann:p%40w@/run/a,b@/c.sock"},
	} {
		got, err := Nodes(list)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: got %q, %v; want %q", list, got, err, want)
		}
		for _, node := range got {
			if _, err := Address(node); err != nil {
				t.Errorf("%s: %s: %v", list, node, err)
			}
		}
	}
}

func TestNodesRefusesWithoutShowingSecrets(t *testing.T) {
	for list, want := range map[string]string{
		"":                                   "want redis://",
		"ann:hunter2@a,b,c":                  "want redis://",
		"http://ann:hunter2@a,b":             "want redis://",
		"redis://ann:hunter2@a,,b":           "a host is missing",
		"redis://ann:hunter2@a,b,":           "a host is missing",
		"redis://ann:hunter2@,a":             "a host is missing",
		"redis-sentinel://ann:hunter2@a,b/m": "independent servers",
		"rediss-cluster://ann:hunter2@a,b":   "independent servers",
	} {
		got, err := Nodes(list)
		if got != nil {
			t.Errorf("%s: got %q", list, got)
		}
		refuses(t, list, err, want)
	}
}

// A server may be down when its URL is parsed, and up when it is used.
func TestPrepareCallsNoServer(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true, Password: "hunter2"})
	await.Must(t, srv.Stop())
	s, probe := prepared(t, srv.URL(), nil, 0)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := probe(ctx); err == nil || !strings.HasPrefix(err.Error(), s.Name()) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a node that is away: %v", err)
	}
	await.Must(t, srv.Start(true))
	if err := probe(ctx); err != nil {
		t.Errorf("a node that is there again: %v", err)
	}
	if v, err := s.Do(ctx, "ping"); v != "PONG" || err != nil {
		t.Errorf("ping: %v, %v", v, err)
	}
}
