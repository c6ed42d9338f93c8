package acceptance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
)

// secret is a password that no output may contain. A fuzzer cannot produce it by chance.
const secret = "S3cretOfThe5tore"

// opened opens c with a context that has ended, so that it connects to no server. It returns the
// error.
func opened(t *testing.T, c hasp.Config) error {
	t.Helper()
	if c.Strategy == "filelock" {
		return nil // Open of filelock would make directories
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	client, err := c.Open(ctx, nil)
	if err == nil {
		client.Close()
	}
	return err
}

// shows fails the test if any way to print what shows the secret.
func shows(t *testing.T, what any) {
	t.Helper()
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		if s := fmt.Sprintf(verb, what); strings.Contains(s, secret) {
			t.Errorf("%s shows the password: %s", verb, s)
		}
	}
}

// FuzzParseURL checks that ParseURL returns a Config or ErrInvalid for any text, and Open a Client
// or ErrInvalid for any Config. Neither the error nor the Config shows a password, even if the
// password contains characters that separate parts of a URL. Packages hasp and redisstore test
// Open.
func FuzzParseURL(f *testing.F) {
	for _, s := range []string{
		"", "memlock://", "spinlock+redis://user:%s@host:6379/0?ttl=10s", "fairlock+redis-sentinel://:%s@a,b:1/m/0?sentinel_password=%s&turns=x",
		"pubsublock+unix://u:%s@/path?db=x", "redlock+rediss://u:%s@a,b,c?ca=/none", "redlock+redis://u:%s@a,b", "spinlock+redis-cluster://:%s@a:x",
		"spinlock+redis://u:a?%s@h", "spinlock+redis://u:a?%s=@h", "spinlock+redis://u:a?b&%s&c=@h:1/0", "spinlock+redis://u:a?b&%s&%s&c=@h", "u:%s@h://x",
		"spinlock+redis://u:%%%s@h", "spinlock+redis://u:%s@[::1", "spinlock+redis://%s@h", "memlock+redis://u:%s@h", "x+u:%s@h://x",
		"+?://", "x+?://", "x?y=://z",
		"spinlock+redis://u:%s@h:x/0?fence_ttl=x", "redlock+redis://u:%s@a,b,c/x?max_ttl=1", "pubsublock+rediss://:%s@h?ca=/none",
		"fairlock+redis-sentinel://u:p@h/m?sentinel_password=%s", "fairlock+redis-cluster://u:%s@h?db=1", "memlock+redis://u:%s@h?ttl=1",
		"spinlock+unix://u:%s@x?replicas=-1",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, form string) {
		if strings.Contains(form, secret) {
			return
		}
		raw := strings.ReplaceAll(form, "%s", secret)
		private := strings.Contains(form, "@") || strings.Contains(form, "password")
		c, err := hasp.ParseURL(raw)
		if err != nil {
			if !errors.Is(err, hasp.ErrInvalid) {
				t.Errorf("%q: %v", raw, err)
			}
			if private {
				shows(t, err)
			}
			return
		}
		if private && !strings.Contains(c.Strategy, secret) { // the strategy may be shown
			shows(t, c)
		}
		if err := opened(t, c); err != nil && !errors.Is(err, hasp.ErrInvalid) && !errors.Is(err, context.Canceled) {
			t.Errorf("%q: neither invalid nor cancelled: %v", raw, err)
		}
	})
}
