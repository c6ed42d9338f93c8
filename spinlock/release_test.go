package spinlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// commandOf returns the command of the server that deletes a key by its value, or an empty
// string.
func commandOf(ctx context.Context, rdb *redis.Client) string {
	for _, name := range []string{"delex", "delifeq"} {
		args := []any{name, "no such key", "ifeq", ""}
		if name == "delifeq" {
			args = append(args[:2], "")
		}
		if rdb.Do(ctx, args...).Err() == nil {
			return name
		}
	}
	return ""
}

// needCommand returns commandOf, and skips the test if there is none.
func needCommand(t *testing.T, rdb *redis.Client) string {
	t.Helper()
	name := commandOf(t.Context(), rdb)
	if name == "" {
		t.Skipf("needs Redis 8.4 or Valkey 9, in %s", redistest.ServerEnv)
	}
	return name
}

// proxied returns a rig whose driver reaches the server through a proxy.
func proxied(t *testing.T, o *redistest.Options) (rig, *faultproxy.Proxy) {
	t.Helper()
	r := setup(t, o)
	p := r.Server.Proxy()
	behind := r.Server.ClientOptions()
	behind.Addr = p.Addr()
	rdb := redis.NewClient(behind)
	t.Cleanup(func() { rdb.Close() })
	r.Driver = open(rdb)
	return r, p
}

// releasing returns the commands of one release of a claim, by their names, and its error.
func releasing(t *testing.T, r rig, p *faultproxy.Proxy, c backend.Claim) (names string, err error) {
	t.Helper()
	p.Commands()
	err = r.Driver.Release(t.Context(), c)
	var all []string
	for _, command := range p.Commands() {
		name, _, _ := strings.Cut(command, " ")
		all = append(all, name)
	}
	return strings.Join(all, " "), err
}

// released fails the test unless a release of a new hold frees the key with these commands.
func released(t *testing.T, what string, r rig, p *faultproxy.Proxy, want ...string) {
	t.Helper()
	c := claim("k")
	r.Acquire(t, c)
	names, err := releasing(t, r, p, c)
	if names != strings.Join(want, " ") || err != nil {
		t.Errorf("%s: got %q, %v; want %q", what, names, err, want)
	}
	if n := r.Redis.Exists(t.Context(), "k").Val(); n != 0 {
		t.Errorf("%s: the key is not free", what)
	}
}

// A driver releases by the server's own command if there is one, and otherwise by the
// script. Both tell a loss from a release by the token alone.
func TestReleaseByTheCommandOfTheServer(t *testing.T) {
	r, p := proxied(t, &redistest.Options{Own: true, Real: true})
	ctx := t.Context()
	command := commandOf(ctx, r.Redis)
	t.Logf("command: %q", command)
	by, then := []string{"evalsha"}, []string{"evalsha"}
	if command != "" {
		by, then = []string{command}, []string{command, "evalsha"}
	}
	released(t, "first", r, p, "eval")
	released(t, "second", r, p, by...)
	released(t, "third", r, p, by...)

	lost := func(what string, c backend.Claim) {
		t.Helper()
		if names, err := releasing(t, r, p, c); names != strings.Join(then, " ") || !errors.Is(err, backend.ErrLost) {
			t.Errorf("%s: got %q, %v; want %q", what, names, err, then)
		}
	}
	c := claim("k")
	lost("a free key", c)
	other := claim("k")
	r.Acquire(t, other)
	lost("a key of another token", c)
	if !strategy.Has(ctx, r.Redis, other) {
		t.Error("the hold of another token has gone")
	}
	renamed := other
	renamed.Owner = "someone else" // no proof, so the release counts
	if names, err := releasing(t, r, p, renamed); names != strings.Join(then, " ") || err != nil {
		t.Errorf("another owner: got %q, %v", names, err)
	}

	r.Redis.SAdd(ctx, "k", "member")
	lost("a set", c)
	r.Redis.Del(ctx, "k")

	kept := claim("k")
	r.Acquire(t, kept)
	kept.KeepUntil = time.Now().Add(time.Minute)
	r.Release(t, kept)
	kept.KeepUntil = time.Time{}
	lost("a hold that was kept", kept)
	if left := r.Left(t, "k"); left <= 0 {
		t.Errorf("the key is not kept: %v", left)
	}
	r.Redis.Del(ctx, "k")
	released(t, "after all that", r, p, by...)
}

// If the reply to the command is lost, the release can be repeated, as with the script.
func TestLostReplyToTheCommand(t *testing.T) {
	r, p := proxied(t, &redistest.Options{Own: true, Real: true})
	command := needCommand(t, r.Redis)
	released(t, "first", r, p, "eval")
	released(t, "second", r, p, command)

	c := claim("k")
	r.Acquire(t, c)
	p.Fail(command+" ", faultproxy.LoseReply)
	outage(t, "reply lost", r.Driver.Release(t.Context(), c))
	other := claim("k")
	r.Acquire(t, other)
	if err := r.Driver.Release(t.Context(), c); !errors.Is(err, backend.ErrLost) {
		t.Errorf("again: got %v, want ErrLost", err)
	}
	if !strategy.Has(t.Context(), r.Redis, other) {
		t.Error("the hold of another token has gone")
	}

	p.Fail(command+" ", faultproxy.LoseRequest)
	outage(t, "command lost", r.Driver.Release(t.Context(), other))
	r.Release(t, other)
	released(t, "last", r, p, command)
}

// A server that lacks the command, or refuses it, releases by the script. One refusal is
// enough, unless the reason passes.
func TestReleaseWithoutTheCommand(t *testing.T) {
	const lasts, passes = true, false
	for what, c := range map[string]struct {
		reply string // of the server, if it is not the one that it gives anyway
		lasts bool
	}{
		"unknown to the server": {"", lasts},
		"unknown to a proxy":    {"-ERR unsupported command\r\n", lasts},
		"forbidden":             {"-NOPERM User x has no permissions to run the command\r\n", lasts},
		"busy":                  {"-BUSY Redis is busy running a script\r\n", passes},
		"not the master":        {"-READONLY You can't write against a read only replica.\r\n", passes},
		"deletes nothing":       {":0\r\n", passes},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			r, p, command := misled(t, "")
			if c.reply != "" {
				p.Answer(command+" ", c.reply)
			}
			released(t, "refused", r, p, command, "evalsha")
			if c.lasts {
				released(t, "then", r, p, "evalsha")
			} else {
				released(t, "then", r, p, command, "evalsha")
			}
		})
	}
}

// misled returns a rig whose driver believes that its server has a command. If the command
// is an empty string, it is one that the server does not have.
func misled(t *testing.T, command string) (r rig, p *faultproxy.Proxy, _ string) {
	t.Helper()
	r, p = proxied(t, nil)
	if command == "" {
		command = "delifeq"
		if commandOf(t.Context(), r.Redis) == command {
			command = "delex"
		}
	}
	p.Answer(" find", fmt.Sprintf("*2\r\n:1\r\n$%d\r\n%s\r\n", len(command), command))
	c := claim("other")
	r.Acquire(t, c)
	r.Release(t, c)
	p.Forgive()

	// The server has not got the script yet, because the proxy has answered. This frees the
	// key as well.
	direct := open(r.Redis)
	if err := direct.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	return r, p, command
}

// Each command has arguments of its own.
func TestTheCommandHasTheWholeRecord(t *testing.T) {
	for command, condition := range map[string]string{"delex": "ifeq ", "delifeq": ""} {
		r, p, _ := misled(t, command)
		p.Answer(command+" ", ":1\r\n")
		c := claim("k")
		r.Acquire(t, c)
		p.Commands()
		r.Release(t, c)
		want := command + " k " + condition + c.Token + "#" + c.Owner
		if all := p.Commands(); len(all) != 1 || all[0] != want {
			t.Errorf("got %q, want %q", all, want)
		}
	}
}

// A proxy may close the connection at a command that it does not know. Then the release is
// repeated by the script. Later outages are no reason to give up a command that worked.
func TestNoAnswerToTheCommand(t *testing.T) {
	r, p, command := misled(t, "")
	c := claim("k")
	r.Acquire(t, c)
	p.Fail(command+" ", faultproxy.LoseRequest)
	outage(t, "closed", r.Driver.Release(t.Context(), c))
	if names, err := releasing(t, r, p, c); names != "evalsha" || err != nil {
		t.Errorf("repeated: got %q, %v", names, err)
	}
	released(t, "next", r, p, "evalsha")

	for _, answer := range []string{":1\r\n", ":0\r\n"} {
		r, p, command := misled(t, "")
		p.Answer(command+" ", answer)
		r.Acquire(t, c)
		r.Release(t, c)
		p.Forgive()
		r.Redis.Del(t.Context(), "k")

		r.Acquire(t, c)
		p.Fail(command+" ", faultproxy.LoseRequest)
		outage(t, "an outage", r.Driver.Release(t.Context(), c))
		p.Answer(command+" ", "+OK\r\n")
		outage(t, "an invalid reply", r.Driver.Release(t.Context(), c))
		p.Forgive()
		p.Answer(command+" ", ":0\r\n")
		if names, err := releasing(t, r, p, c); names != command+" evalsha" || err != nil {
			t.Errorf("after an outage: got %q, %v", names, err)
		}
	}
}

// A user without the right to the command releases by the script. The driver asks before it
// sends the command, so the ACL log gets no entry.
func TestReleaseWithoutTheRight(t *testing.T) {
	r, p := proxied(t, &redistest.Options{Own: true, Real: true})
	command := needCommand(t, r.Redis)
	r.Forbid(t, "-"+command)
	released(t, "first", r, p, "eval")
	released(t, "second", r, p, "evalsha")
	if log := r.Redis.ACLLog(t.Context(), 10).Val(); len(log) != 0 {
		t.Errorf("ACL log: %v", log)
	}

	// The right is taken later.
	r.Forbid(t, "+"+command)
	r, p = proxied(t, &redistest.Options{Own: true, Real: true})
	released(t, "first of another driver", r, p, "eval")
	released(t, "second of another driver", r, p, command)
	r.Forbid(t, "-"+command)
	released(t, "forbidden", r, p, command, "evalsha")
	released(t, "afterwards", r, p, "evalsha")
}
