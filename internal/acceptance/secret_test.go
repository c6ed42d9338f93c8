package acceptance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// Events of a Client end in logs. No event contains a password, even if a reply of
// the server does.
func TestEventsHoldNoPassword(t *testing.T) {
	t.Parallel()
	const password = "hunter2"
	for _, strategy := range []string{"spinlock", "pubsublock", "fairlock", "redlock"} {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			srv := redistest.Start(t, &redistest.Options{Own: true, Password: password})
			p := srv.Proxy()
			c := hasp.Config{Strategy: strategy, Nodes: []string{"redis://:" + password + "@" + p.Addr()}}
			if strategy == "redlock" {
				c.Params = hasp.Params{"allow_unsafe_nodes": "true"}
			}
			var mu sync.Mutex // guards texts and failed
			var texts []string
			failed := map[hasp.EventKind]bool{}
			observe := func(_ context.Context, e hasp.Event) {
				mu.Lock()
				defer mu.Unlock()
				failed[e.Kind] = failed[e.Kind] || e.Err != nil
				texts = append(texts, fmt.Sprintf("%+v", e))
				for err := e.Err; err != nil; err = errors.Unwrap(err) {
					texts = append(texts, fmt.Sprintf("%v: %v %+v %#v", e.Kind, err, err, err))
				}
			}
			client, err := c.Open(t.Context(), &hasp.Options{TTL: 6 * time.Second, Timeout: 5 * time.Second, Observe: observe})
			must(t, err)
			defer client.Close()
			long, short := lock(t, client, "key-long", hasp.WithTTL(time.Minute)), lock(t, client, "key-short")
			p.Answer("key-", "-ERR not with "+password+"\r\n")
			_, refusal := client.Lock(t.Context(), "key-other")
			<-short.Context().Done()
			for _, err := range []error{refusal, short.Unlock(t.Context()), long.Unlock(t.Context())} {
				if err == nil || strings.Contains(err.Error(), password) {
					t.Errorf("got %v", err)
				}
			}
			p.Forgive()
			client.Close() // after the last event
			mu.Lock()
			defer mu.Unlock()
			for _, kind := range []hasp.EventKind{hasp.EventRefused, hasp.EventReleased, hasp.EventLost, hasp.EventRenewFailed} {
				if !failed[kind] {
					t.Errorf("no event says %v and why", kind)
				}
			}
			for _, text := range texts {
				if strings.Contains(text, password) {
					t.Error(text)
				}
			}
		})
	}
}
