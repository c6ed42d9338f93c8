package redisstore

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/hasplock/hasp/backend"
)

func TestParse(t *testing.T) {
	for node, want := range map[string]string{
		"redis://host":                    "[host:6379]",
		"redis://host:1/":                 "[host:1]",
		"rediss://host:1/12":              "TLS [host:1] db 12",
		"redis://[::1]":                   "[[::1]:6379]",
		"redis://[fe80::1%eth0]:7/1":      "[[fe80::1%eth0]:7] db 1",
		"redis://:pw@host":                "[host:6379] password pw",
		"redis://ann:p%40%3F%25@host":     "[host:6379] user ann password p@?%",
		"redis://ann:p@/:#w@[::1]:7/0":    "[[::1]:7] user ann password p@/:#w",
		"unix:///run/redis.sock":          "[/run/redis.sock]",
		"unix:///run/a@/b.sock":           "[/run/a@/b.sock]",
		"unix://ann:p%40w@/run/a@/b.sock": "[/run/a@/b.sock] user ann password p@w",
		"redis-sentinel://s1/mymaster":    "[s1:26379] master mymaster",
		"rediss-sentinel://ann:p@/w@s1:1,[::1],s3/my%2Fmaster/2": "" +
			"TLS [s1:1 [::1]:26379 s3:26379] user ann password p@/w master my/master db 2",
		"redis-cluster://a":               "[a:6379]",
		"rediss-cluster://:pw@a:7000,b/0": "TLS [a:7000 b:6379] password pw",
	} {
		a, err := parse(node)
		got := fmt.Sprint(a.addrs)
		if a.tls {
			got = "TLS " + got
		}
		for _, part := range []struct{ name, value string }{
			{" user ", a.user}, {" password ", a.password}, {" master ", a.master},
		} {
			if part.value != "" {
				got += part.name + part.value
			}
		}
		if a.db != 0 {
			got += fmt.Sprint(" db ", a.db)
		}
		if got != want || err != nil {
			t.Errorf("%s: got %s, %v; want %s", node, got, err, want)
		}
		if addr, err := Address(node); addr != a.addrs[0] || err != nil {
			t.Errorf("%s: the address: got %q, %v", node, addr, err)
		}
	}
}

func TestURLsAreRefusedWithoutShowingSecrets(t *testing.T) {
	for url, want := range map[string]string{
		"":                                       "want redis://",
		"ann:hunter2@host:6379":                  "want redis://",
		"http://ann:hunter2@host":                "want redis://",
		"redis://ann:hunter2%zz@host":            "percent",
		"redis://ann@host":                       "user without a password",
		"redis://ann:hunter2@":                   "a host is missing: want redis://localhost:6379",
		"redis://ann:hunter2@:7000/1":            "a host is missing",
		"redis://ann:hunter2@::1":                "brackets",
		"redis://ann:hunter2@[::1":               "brackets",
		"redis://ann:hunter2@h:x":                "port between",
		"redis://ann:hunter2@h:0":                "port between",
		"redis://ann:hunter2@h:70000":            "port between",
		"redis://ann:hunter2@a:1,b:2":            "one host",
		"redis://ann:hunter2@a:1, b:2":           "a space",
		"redis:///host:6379":                     "a host is missing",
		"redis://ann:hunter2@a/0,redis://b":      "write redis:// once",
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

		// Parameters must fit their scheme.
		"redis://h?ca=f":                          "rediss://",
		"redis-cluster://h?ca=f":                  "rediss://",
		"unix:///s?server_name=f":                 "rediss://",
		"rediss://h?key=k":                        "go together",
		"rediss://h?cert=c":                       "go together",
		"redis://h?db=2":                          "redis://…/2",
		"redis-sentinel://h/m?db=2":               "redis-sentinel://…/2",
		"redis-cluster://h?db=2":                  "no databases",
		"unix:///s?db=two":                        "number of a database",
		"redis-cluster://h?sentinel_password=p":   "redis-sentinel://",
		"redis-sentinel://h/m?sentinel_user=u":    "sentinel_password",
		"redis://h?replicas=-1":                   "0 or more",
		"redis://h?replicas=some":                 "replicas",
		"redis://h?allow_eviction=some":           "allow_eviction",
		"rediss://h?ca=/dev/null":                 "ca: /dev/null holds no certificate",
		"rediss://h?ca=/no/file":                  "ca: … no such file",
		"rediss://h?cert=/dev/null&key=/dev/null": "cert=/dev/null",
	} {
		node, params := withParams(url)
		_, _, err := Prepare(node, params, 0)
		wantsInvalid(t, url, err, want)
	}
	for _, url := range []string{
		"rediss://h?server_name=n", "unix:///s?db=2", "rediss-cluster://h?replicas=0",
		"rediss-sentinel://h/m?server_name=n&sentinel_user=u&sentinel_password=p&replicas=2",
	} {
		prepared(t, url)
	}
}

// wantsInvalid fails the test unless err is ErrInvalid, names what is wanted, and has neither
// the user nor the password of the URL.
func wantsInvalid(t *testing.T, url string, err error, want string) {
	t.Helper()
	if wantsText(t, err, want); !errors.Is(err, backend.ErrInvalid) {
		t.Errorf("%s: got %v, want ErrInvalid", url, err)
	}
	if strings.Contains(fmt.Sprint(err), "ann") {
		t.Errorf("%s: %v tells a secret", url, err)
	}
}

func TestNodesSplitsLists(t *testing.T) {
	for list, want := range map[string]string{
		"redis://a":                        "redis://a",
		"redis://a:1,b:2,c:3":              "redis://a:1 redis://b:2 redis://c:3",
		"redis://a,b/7":                    "redis://a/7 redis://b/7",
		"rediss://:p@a,[::1]:7,c/0":        "rediss://:p@a/0 rediss://:p@[::1]:7/0 rediss://:p@c/0",
		"redis://ann:p@,/:#w@a:1,b:2/3":    "redis://ann:p@,/:#w@a:1/3 redis://ann:p@,/:#w@b:2/3",
		"unix:///run/a,b.sock":             "unix:///run/a,b.sock",
		"unix://ann:p%40@/run/a,b@/c.sock": "unix://ann:p%40@/run/a,b@/c.sock",
	} {
		got, err := Nodes(list)
		if strings.Join(got, " ") != want || err != nil {
			t.Errorf("%s: got %q, %v; want %s", list, got, err, want)
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
		wantsInvalid(t, list, err, want)
	}
}
