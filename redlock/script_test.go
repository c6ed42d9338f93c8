package redlock

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// scriptCase is one run of a script on a server without data.
type scriptCase struct {
	name   string
	src    string
	before []string // commands; spaces separate fields, and _ is a space in a field
	keys   []string
	args   []any
	reply  string // a regular expression for the whole reply, as fmt prints it
	after  string // a command
	left   string // a regular expression for its reply
}

// Every branch of the scripts gives the reply that its header names.
func TestScripts(t *testing.T) {
	s := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	rdb := s.Client()
	info, err := rdb.Info(t.Context(), "server").Result()
	await.Must(t, err)
	do := func(t *testing.T, command string) any {
		t.Helper()
		var args []any
		for f := range strings.SplitSeq(command, " ") {
			args = append(args, strings.ReplaceAll(f, "_", " "))
		}
		reply, err := rdb.Do(t.Context(), args...).Result()
		if err != nil {
			reply = err
		}
		return reply
	}

	// run runs a case, and returns what is wrong.
	run := func(t *testing.T, c scriptCase) (wrong []string) {
		do(t, "flushall")
		now := time.Now().UnixMilli()
		// @-500 is the time half a second ago.
		timed := func(command string) string {
			return regexp.MustCompile(`@-?\d+`).ReplaceAllStringFunc(command, func(at string) string {
				ago, _ := strconv.ParseInt(at[1:], 10, 64)
				return strconv.FormatInt(now+ago, 10)
			})
		}
		for _, command := range c.before {
			if err, ok := do(t, timed(command)).(error); ok {
				t.Fatalf("%s: %v", command, err)
			}
		}
		reply, err := rdb.Eval(t.Context(), c.src, c.keys, c.args...).Result()
		if err != nil {
			reply = err
		}
		do(t, "acl setuser default +@all")
		if got := fmt.Sprint(reply); !regexp.MustCompile("(?s)^" + c.reply + "$").MatchString(got) {
			wrong = append(wrong, fmt.Sprintf("got %q, want %s", got, c.reply))
		}
		if got := fmt.Sprint(do(t, timed(c.after))); c.after != "" && !regexp.MustCompile("(?s)^"+c.left+"$").MatchString(got) {
			wrong = append(wrong, fmt.Sprintf("afterwards %s is %q, want %s", c.after, got, c.left))
		}
		return wrong
	}

	for _, c := range append(recordScripts(), markScripts(runOf(info), time.Now())...) {
		t.Run(c.name, func(t *testing.T) {
			await.Undisturbed(t, 200*time.Millisecond, func() { rdb.Ping(t.Context()) }, func() string { return strings.Join(run(t, c), "; ") })
		})
	}
}

// recordScripts are the runs of the scripts for records and fences.
func recordScripts() []scriptCase {
	acquire := []string{"k", "fence", "mark"}
	renew, release := []string{"k", "mark", "fence"}, []any{"token-of-a-claim", "channel", "token-of-a-claim", ""}
	queued, lead := []string{"k", "turns", "looks", "waits"}, []string{"k", "fence", "mark", "turns", "looks", "waits"}
	acquires := source("acquire")
	leads := source("clock", "turns", "queue") + acquires
	stands := func(waiter string, arrived, looked int64) []string {
		return []string{fmt.Sprintf("zadd turns @%d %s", arrived, waiter), fmt.Sprintf("zadd looks @%d %s", looked, waiter), "set waits 1"}
	}
	renews, repairs := source("clock", "own", "renew"), source("clock", "repair")
	releases, breaks, inspects := source("release"), source("clock", "turns", "break"), source("inspect")
	const denied = `.*(NOPERM|can't run this command|ACL failure in script).*` // by version of the server
	return []scriptCase{
		{"acquire: held", acquires, []string{"set k other"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[0 \]`, "get k", "other"},
		{"acquire: free, no fence", acquires, []string{"set mark m", "set fence x"}, acquire, []any{"token-of-a-claim#me", 5000, ""}, `\[1 0 m # Server.*\]`, "pttl k", `[45]\d\d\d`},
		{"acquire: held, marked", acquires, []string{"set k other", "set mark m"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[0 m\]`, "", ""},
		{"acquire: held, no memory", acquires, []string{"set k other", "set mark m", "config set maxmemory 1"}, acquire, []any{"token-of-a-claim#me", 5000, ""}, `\[0 m\]`, "config set maxmemory 0", "OK"},
		{"acquire: free, no memory", acquires, []string{"config set maxmemory 1"}, acquire, []any{"token-of-a-claim#me", 5000, ""}, ".*(OOM|maxmemory).*", "config set maxmemory 0", "OK"},
		{"acquire: first fence", acquires, nil, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[1 \d{16}  # Server.*\]`, "get k", "token-of-a-claim#me"},
		{"acquire: fence by the clock", acquires, []string{"set fence 7", "set mark m"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[1 \d{16} m # Server.*\]`, "get fence", "7"},
		{"acquire: fence above the clock", acquires, []string{"set fence 9000000000000000"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[1 9000000000000001  # Server.*\]`, "", ""},
		{"acquire: largest fence", acquires, []string{"set fence 9007199254740990"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[1 9007199254740991  # Server.*\]`, "get k", "token-of-a-claim#me"},
		{"acquire: last fence", acquires, []string{"set fence 9007199254740991"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[-1\]`, "exists k", "0"},
		{"acquire: counter is no number", acquires, []string{"set fence x1"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[-1\]`, "exists k", "0"},
		{"acquire: counter is a list", acquires, []string{"lpush fence 1"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, `\[-1\]`, "exists k", "0"},
		{"acquire: counter cannot be read", acquires, []string{"acl setuser default -getrange"}, acquire, []any{"token-of-a-claim#me", 5000, 9000}, denied, "exists k", "0"},

		{"lead: free", leads, []string{"set mark m"}, lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[1 0 m # Server.*\]`, "exists turns", "0"},
		{"lead: fenced", leads, []string{"set fence 9000000000000000"}, lead, []any{"token-of-a-claim#me", 5000, 9000, "me", 0}, `\[1 9000000000000001  # Server.*\]`, "get k", "token-of-a-claim#me"},
		{"lead: held, first", leads, []string{"set k other", "set mark m"}, lead, []any{"token-of-a-claim#me", 5000, "", "me", 7000}, `\[0 m 1\]`, "zrange turns 0 -1", `\[me\]`},
		{"lead: held, the queue ends", leads, []string{"set k other"}, lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[0  1\]`, "pttl turns", `[12]\d{3}`},
		{"lead: held, the sign ends", leads, []string{"set k other"}, lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[0  1\]`, "pttl waits", `[12]\d{3}`},
		{"lead: held, behind", leads, append(stands("she", -500, -200), "set k other"), lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[0  0\]`, "zrange turns 0 -1", `\[she me\]`},
		{"lead: held, has waited longer", leads, append(stands("she", -500, -200), "set k other"), lead, []any{"token-of-a-claim#me", 5000, "", "me", 60000}, `\[0  1\]`, "zrange turns 0 -1", `\[me she\]`},
		{"lead: held, does not wait", leads, []string{"set k other"}, lead, []any{"token-of-a-claim#me", 5000, "", "", 0}, `\[0  1\]`, "exists turns", "0"},
		{"lead: free, another's turn", leads, stands("she", -500, -200), lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[0  2\]`, "exists k", "0"},
		{"lead: free, another's turn, does not wait", leads, stands("she", -500, -200), lead, []any{"token-of-a-claim#me", 5000, "", "", 0}, `\[0  2\]`, "zrange turns 0 -1", `\[she\]`},
		{"lead: free, its turn", leads, append(stands("me", -500, -200), stands("she", -400, -200)...), lead, []any{"token-of-a-claim#me", 5000, "", "me", 500}, `\[1 .*\]`, "zrange turns 0 -1", `\[she\]`},
		{"lead: free, the first is gone", leads, stands("she", -5000, -1100), lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[1 .*\]`, "exists turns", "0"},
		{"lead: free, a look in the future", leads, stands("she", -5000, 90000), lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[1 .*\]`, "exists looks", "0"},
		{"lead: the queue is a list", leads, []string{"lpush turns 1"}, lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[1 .*\]`, "type turns", "list"},
		{"lead: no right to a queue", leads, append(stands("she", -500, -200), "acl setuser default -zrange"), lead, []any{"token-of-a-claim#me", 5000, "", "me", 0}, `\[1 .*\]`, "get k", "token-of-a-claim#me"},

		{"leave", source("clock", "turns", "leave"), append(stands("me", -500, -200), stands("she", -400, -200)...), queued, []any{"me", "channel"}, "1", "zrange turns 0 -1", `\[she\]`},
		{"leave: nobody", source("clock", "turns", "leave"), nil, queued, []any{"me", "channel"}, "1", "", ""},

		{"raise: first", renews, []string{"set k token-of-a-claim#me"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[1  \d{13}\]`, "get fence", "5"},
		{"raise: a mark", renews, []string{"set k token-of-a-claim#me", "set mark run_0_1000"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[1 run 0 1000 \d{13}\]`, "get fence", "5"},
		{"raise: higher", renews, []string{"set k token-of-a-claim#me", "set fence 4"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[1  \d{13}\]`, "get fence", "5"},
		{"raise: never lower", renews, []string{"set k token-of-a-claim#me", "set fence 6"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[1  \d{13}\]`, "get fence", "6"},
		{"raise: its term goes on", renews, []string{"set k token-of-a-claim#me", "set fence 6"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[1  \d{13}\]`, "pttl fence", `[89]\d\d\d`},
		{"raise: the term of the hold stays", renews, []string{"set k token-of-a-claim#me px 1000"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[1  \d{13}\]`, "pttl k", `\d{1,3}|1000`},
		{"raise: no record", renews, nil, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[0  \d{13}\]`, "get fence", "5"},
		{"raise: counter is no number", renews, []string{"set fence x"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[-1\]`, "get fence", "x"},
		{"raise: counter is a list", renews, []string{"lpush fence 1"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, `\[-1\]`, "", ""},
		{"raise: counter cannot be read", renews, []string{"acl setuser default -getrange"}, renew, []any{"token-of-a-claim#", "", "5", 9000}, denied, "exists fence", "0"},

		{"renew: longer", renews, []string{"set k token-of-a-claim#me px 1000"}, renew, []any{"token-of-a-claim#", 5000, "", 9000}, `\[1 \]`, "pttl k", `[45]\d\d\d`},
		{"renew: never shorter", renews, []string{"set k token-of-a-claim#me px 90000", "set mark m"}, renew, []any{"token-of-a-claim#", 5000, "", 9000}, `\[1 m\]`, "pttl k", `[89]\d{4}`},
		{"renew: without an end", renews, []string{"set k token-of-a-claim#me"}, renew, []any{"token-of-a-claim#", 5000, "", 9000}, `\[1 \]`, "pttl k", "-1"},
		{"renew: gone, fence stays", renews, nil, renew, []any{"token-of-a-claim#", 5000, "5", 9000}, `\[0  \d{13}\]`, "get fence", "5"},
		{"renew: fence is higher", renews, []string{"set fence 6"}, renew, []any{"token-of-a-claim#", 5000, "5", 9000}, `\[0  \d{13}\]`, "pttl fence", `[89]\d\d\d`},
		{"renew: never lowers a fence", renews, []string{"set fence 6"}, renew, []any{"token-of-a-claim#", 5000, "5", 9000}, `\[0  \d{13}\]`, "get fence", "6"},
		{"renew: counter is no number", renews, []string{"set fence x"}, renew, []any{"token-of-a-claim#", 5000, "5", 9000}, `\[0  \d{13}\]`, "get fence", "x"},
		{"renew: counter is a list", renews, []string{"lpush fence 1"}, renew, []any{"token-of-a-claim#", 5000, "5", 9000}, `\[0  \d{13}\]`, "type fence", "list"},
		{"renew: the lock is a list", renews, []string{"lpush k 1"}, renew, []any{"token-of-a-claim#", 5000, "", 9000}, `\[0  \d{13}\]`, "", ""},
		{"renew: cannot be read", renews, []string{"set k token-of-a-claim#me", "acl setuser default -getrange"}, renew, []any{"token-of-a-claim#", 5000, "", 9000}, denied, "", ""},

		{"release", releases, []string{"set k token-of-a-claim#me"}, queued, release, "1", "exists k", "0"},
		{"release: any attempt", releases, []string{"set k token-of-a-claim~3#me"}, queued, release, "1", "exists k", "0"},
		{"release: one attempt", releases, []string{"set k token-of-a-claim~3#me"}, queued, []any{"token-of-a-claim#", "", "token-of-a-claim", ""}, "0", "exists k", "1"},
		{"release: no channel", releases, []string{"set k token-of-a-claim#me"}, queued, []any{"token-of-a-claim#", "", "token-of-a-claim", ""}, "1", "exists k", "0"},
		{"release: wakes the first waiter", releases, append(stands("d~she", -500, -200), "set k token-of-a-claim#me"), queued, release, "2", "exists k", "0"},
		{"release: a longer token-of-a-claim", releases, []string{"set k token-of-a-claims#me"}, queued, release, "0", "exists k", "1"},
		{"release: no number of an attempt", releases, []string{"set k token-of-a-claim~#me px 1000"}, queued, release, "0", "exists k", "1"},
		{"release: half a number of an attempt", releases, []string{"set k token-of-a-claim~2x#me px 1000"}, queued, release, "0", "exists k", "1"},
		{"release: no owner", releases, []string{"set k token-of-a-claim~2 px 1000"}, queued, release, "0", "exists k", "1"},
		{"release: free", releases, nil, queued, release, "0", "", ""},
		{"release: a list", releases, []string{"lpush k 1"}, queued, release, "0", "exists k", "1"},
		{"release: cannot be read", releases, []string{"set k token-of-a-claim#me", "acl setuser default -getrange -mget"}, queued, release, denied, "exists k", "1"},
		{"release: no right to read the sign", releases, []string{"set k token-of-a-claim#me", "acl setuser default -mget"}, queued, release, "1", "exists k", "0"},
		{"release: cannot publish", releases, []string{"set k token-of-a-claim#me", "acl setuser default -publish"}, queued, release, "1", "exists k", "0"},

		{"keep: shorter", releases, []string{"set k token-of-a-claim#me px 90000"}, queued, []any{"token-of-a-claim", "channel", "token-of-a-claim", 5000}, "1", "pttl k", `[45]\d\d\d`},
		{"keep: longer", releases, []string{"set k token-of-a-claim#me px 1000"}, queued, []any{"token-of-a-claim#", "channel", "token-of-a-claim", 5000}, "1", "pttl k", `[45]\d\d\d`},
		{"keep: any attempt", releases, []string{"set k token-of-a-claim~3#me"}, queued, []any{"token-of-a-claim", "channel", "token-of-a-claim", 5000}, "1", "get k", "kept-token-of-a-claim~3#me"},
		{"keep: again", releases, []string{"set k kept-token-of-a-claim#me"}, queued, []any{"token-of-a-claim", "channel", "token-of-a-claim", 5000}, "0", "get k", "kept-token-of-a-claim#me"},
		{"keep: tells the first waiter", releases, append(stands("d~she", -500, -200), "set k token-of-a-claim#me"), queued, []any{"token-of-a-claim", "channel", "token-of-a-claim", 5000}, "2", "exists k", "1"},
		{"keep: no memory", releases, []string{"set k token-of-a-claim#me px 90000", "config set maxmemory 1"}, queued, []any{"token-of-a-claim", "channel", "token-of-a-claim", 5000}, "1", "config set maxmemory 0", "OK"},
		{"renew: kept", renews, []string{"set k kept-token-of-a-claim#me px 5000"}, renew, []any{"token-of-a-claim#", 90000, "", 9000}, `\[0  \d{13}\]`, "pttl k", `[45]\d\d\d`},

		{"repair", repairs, nil, []string{"k"}, []any{"token-of-a-claim#me", time.Now().Add(time.Minute).UnixMilli()}, "1", "pttl k", `[2-6]\d{4}`},
		{"repair: too late", repairs, nil, []string{"k"}, []any{"token-of-a-claim#me", time.Now().Add(-time.Minute).UnixMilli()}, "0", "exists k", "0"},
		{"repair: held", repairs, []string{"set k other"}, []string{"k"}, []any{"token-of-a-claim#me", time.Now().Add(time.Minute).UnixMilli()}, "0", "get k", "other"},
		{"repair: its own, shorter", repairs, []string{"set k token-of-a-claim#me px 1000"}, []string{"k"}, []any{"token-of-a-claim#me", time.Now().Add(time.Minute).UnixMilli()}, "1", "pttl k", `[2-6]\d{4}`},
		{"repair: its own, longer", repairs, []string{"set k token-of-a-claim#me px 90000"}, []string{"k"}, []any{"token-of-a-claim#me", time.Now().Add(time.Minute).UnixMilli()}, "1", "pttl k", `[89]\d{4}`},
		{"repair: a list", repairs, []string{"lpush k 1"}, []string{"k"}, []any{"token-of-a-claim#me", time.Now().Add(time.Minute).UnixMilli()}, "0", "type k", "list"},

		{"inspect: free", inspects, nil, []string{"k", "fence"}, nil, `\[-2  \]`, "", ""},
		{"inspect: held", inspects, []string{"set k token-of-a-claim#me px 5000", "set fence 7"}, []string{"k", "fence"}, nil, `\[[45]\d\d\d token-of-a-claim#me 7\]`, "", ""},
		{"inspect: lists", inspects, []string{"lpush k 1", "lpush fence 1"}, []string{"k", "fence"}, nil, `\[-1  \]`, "", ""},

		{"inspect: a foreign set", inspects, []string{"zadd k 1 a"}, []string{"k", "fence"}, nil, `\[-1  \]`, "", ""},

		{"break", breaks, []string{"lpush k 1"}, queued, []any{"channel", "broken"}, "1", "exists k", "0"},
		{"break: free", breaks, nil, queued, []any{"channel", "broken"}, "0", "", ""},
		{"break: cannot publish", breaks, []string{"set k other", "acl setuser default -publish"}, queued, []any{"channel", "broken"}, "1", "exists k", "0"},
	}
}

// markScripts are the runs of mark.lua on the server of that run. The longest term is
// 1000 s, so the times differ by more than a test takes.
func markScripts(run string, now time.Time) []scriptCase {
	ms := func(seconds int) string { return fmt.Sprint(now.UnixMilli() + int64(seconds)*1000) }
	// about matches a time from seconds to 99 s later.
	about := func(seconds int) string {
		from := now.Unix() + int64(seconds)
		var all []string
		for s := from; s < from+99; s++ {
			all = append(all, fmt.Sprint(s))
		}
		return "(" + strings.Join(all, "|") + `)\d{3}`
	}
	all := func(name string, before []string, args []any, mark string) scriptCase {
		return scriptCase{"mark: " + name, source("mark"), before, []string{"mark"}, args, `\[` + mark + " " + run + ` \d{13}\]`, "get mark", mark}
	}
	past := ms(-500)
	args := []any{1000000, "", 0, ""}
	cases := []scriptCase{
		all("none", nil, args, run+" "+about(1000)+" 1000000"),
		all("not of hasp", []string{"set mark x"}, args, run+" "+about(1000)+" 1000000"),
		all("of another run", []string{"set mark other_0_3000000"}, args, run+" "+about(3000)+" 3000000"),
		all("no right to all of INFO", []string{"acl setuser default -info +info|server"}, args, run+" "+about(1000)+" 1000000"),
		{"mark: evicts", source("mark"), []string{"config set maxmemory 90mb", "config set maxmemory-policy volatile-lru"}, []string{"mark"}, args, ".*may evict.*", "config set maxmemory-policy noeviction", "OK"},
		{"mark: may evict", source("mark"), []string{"config set maxmemory 90mb", "config set maxmemory-policy volatile-lru"}, []string{"mark"}, []any{1000000, "", 0, "", 0, 1}, `\[.*\]`, "config set maxmemory-policy noeviction", "OK"},
		{"mark: a replica", source("mark"), []string{"config set replica-read-only no", "replicaof 127.0.0.1 1"}, []string{"mark"}, args, ".*is a replica.*", "replicaof no one", "OK"},
		{"mark: has no end", source("mark"), []string{"set mark " + run + "_0_1000000 px 5000"}, []string{"mark"}, args, `\[.*\]`, "pttl mark", "-1"},
		all("new set", nil, []any{1000000, run, ms(500), ""}, run+" 0 1000000"),
		all("new set, too late", nil, []any{1000000, run, past, ""}, run+" "+about(1000)+" 1000000"),
		all("new set, another run", nil, []any{1000000, "other", ms(500), ""}, run+" "+about(1000)+" 1000000"),
	}
	for _, c := range []struct{ name, from, known, waited, want string }{
		{"kept", past, "1000000", "", past + " 1000000"},
		{"kept, waiting", ms(300), "1000000", "", ms(300) + " 1000000"},
		{"kept, a longer term since", ms(300), "500000", "", ms(800) + " 1000000"},
		{"kept, no longer waiting, a longer term since", past, "500000", "", ms(0) + " 1000000"},
		{"kept, waited for a shorter term", ms(300), "500000", run + " " + ms(300) + " 500000", ms(800) + " 1000000"},
		{"kept, votes, a longer term since", "0", "500000", "", "0 1000000"},
		{"kept, names a longer term", ms(300), "3000000", "", ms(300) + " 3000000"},
		{"kept, the clock was ahead", ms(9000), "1000000", "", about(1000) + " 1000000"},
		{"kept, waited", ms(300), "1000000", run + " " + ms(300) + " 1000000", "0 1000000"},
	} {
		cases = append(cases, all(c.name, []string{"set mark " + run + "_" + c.from + "_" + c.known}, []any{1000000, "", 0, c.waited}, run+" "+c.want))
	}
	return cases
}
