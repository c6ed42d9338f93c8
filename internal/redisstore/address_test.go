package redisstore

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/hasplock/hasp/backend"
)

func TestParseTakesURLsApart(t *testing.T) {
	for node, want := range map[string]address{
		"redis://host":                    {scheme: "redis", host: "host", addr: "host:6379"},
		"redis://":                        {scheme: "redis", host: "localhost", addr: "localhost:6379"},
		"redis://:7000":                   {scheme: "redis", host: "localhost", addr: "localhost:7000"},
		"redis://host:1/":                 {scheme: "redis", host: "host", addr: "host:1"},
		"rediss://host:1/12":              {scheme: "rediss", host: "host", addr: "host:1", db: 12},
		"redis://[::1]":                   {scheme: "redis", host: "::1", addr: "[::1]:6379"},
		"redis://[fe80::1%eth0]:7/1":      {scheme: "redis", host: "fe80::1%eth0", addr: "[fe80::1%eth0]:7", db: 1},
		"redis://:pw@host":                {scheme: "redis", host: "host", addr: "host:6379", password: "pw"},
		"redis://ann:p%40%3F%25@host":     {scheme: "redis", host: "host", addr: "host:6379", user: "ann", password: "p@?%"},
		"redis://ann:p@/:#w@[::1]:7/0":    {scheme: "redis", host: "::1", addr: "[::1]:7", user: "ann", password: "p@/:#w"},
		"unix:///run/redis.sock":          {scheme: "unix", addr: "/run/redis.sock"},
		"unix:///run/a@/b.sock":           {scheme: "unix", addr: "/run/a@/b.sock"},
		"unix://ann:p%40w@/run/a@/b.sock": {scheme: "unix", addr: "/run/a@/b.sock", user: "ann", password: "p@w"},
	} {
		if got, err := parse(node); got != want || err != nil {
			t.Errorf("%s: got %+v, %v; want %+v", node, got, err, want)
		}
	}
}

func TestParseRefusesWithoutTellingSecrets(t *testing.T) {
	for node, want := range map[string]string{
		"":                                  "want redis://",
		"ann:hunter2@host:6379":             "want redis://",
		"http://ann:hunter2@host":           "want redis://",
		"redis://ann:hunter2%zz@host":       "percent",
		"redis://ann@host":                  "user without a password",
		"redis://ann:hunter2@::1":           "brackets",
		"redis://ann:hunter2@[::1":          "brackets",
		"redis://ann:hunter2@h:x":           "port between",
		"redis://ann:hunter2@h:0":           "port between",
		"redis://ann:hunter2@h:70000":       "port between",
		"redis://ann:hunter2@a:1,b:2":       "one host",
		"redis://ann:hunter2@h/zero":        "number of a database",
		"redis://ann:hunter2@h/-1":          "number of a database",
		"redis://h/ann:hunter2":             "number of a database",
		"unix://ann:hunter2@run/redis.sock": "absolute path",
		"unix://ann:hunter2%@/redis.sock":   "percent",
		"unix://":                           "absolute path",
	} {
		_, err := parse(node)
		if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: got %v, want ErrInvalid about %q", node, err, want)
		}
		if strings.Contains(fmt.Sprint(err), "hunter2") || strings.Contains(fmt.Sprint(err), "ann") {
			t.Errorf("%s: %v tells a secret", node, err)
		}
	}
}

func TestParamsGoWithTheirScheme(t *testing.T) {
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
		{"redis://h", map[string]string{"db": "2"}, "redis://host:port/2"},
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
