package redisstore

import (
	"strconv"
	"testing"
	"time"
)

func TestClockOfAServer(t *testing.T) {
	sent := time.Unix(1000, 0)
	got := sent.Add(time.Second)
	for at, want := range map[time.Duration]time.Duration{
		-5 * time.Second: -5 * time.Second, 0: 0, time.Second: 0, 3 * time.Second: 2 * time.Second,
	} {
		reply := []any{strconv.FormatInt(sent.Add(at).Unix(), 10), "0"}
		if d, ok := ahead(reply, sent, got); d != want || !ok {
			t.Errorf("%v after the call was sent: got %v, %v, want %v", at, d, ok, want)
		}
	}
	for _, reply := range []any{nil, "1", []any{"1"}, []any{"x", "0"}} {
		if _, ok := ahead(reply, sent, got); ok {
			t.Errorf("%v counts as a time", reply)
		}
	}
}
