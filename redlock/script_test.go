package redlock

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// scriptsOf has the parts and the keys of each script.
var scriptsOf = map[string][2]string{
	"acquire": {"acquire", "k fence mark"},
	"lead":    {"clock turns queue acquire", "k fence mark turns looks waits"},
	"leave":   {"clock turns leave", "k turns looks waits"},
	"renew":   {"clock own renew", "k mark fence"},
	"release": {"release", "k turns looks waits"},
	"repair":  {"clock repair", "k"},
	"inspect": {"inspect", "k fence"},
	"break":   {"clock turns break", "k turns looks waits"},
	"mark":    {"clock mark", "mark"},
}

// Every branch of the scripts gives the reply that its header names.
func TestScripts(t *testing.T) {
	s := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	rdb := s.Client()
	info := await.Value(rdb.Info(t.Context(), "server").Result())
	relative := regexp.MustCompile(`@-?\d+`)

	// run runs a script, whose name comes before its arguments, on a server without data. It returns
	// what is wrong. A case is a name, the commands before the script, a regular expression for the
	// whole reply, as fmt prints it, and commands after the script, each with an expression for its
	// reply. @-500 is the time half a second ago, in ms. In a command, _ is a space in a field. An
	// argument - is empty.
	run := func(t *testing.T, script string, c [4]string) (wrong []string) {
		now := time.Now().UnixMilli()
		timed := func(at string) string {
			ago, _ := strconv.ParseInt(at[1:], 10, 64)
			return strconv.FormatInt(now+ago, 10)
		}
		// do sends a command, of which the first fields may be given alone.
		do := func(command string, first ...any) any {
			for _, field := range strings.Fields(relative.ReplaceAllStringFunc(command, timed)) {
				if field == "-" {
					field = ""
				}
				first = append(first, strings.ReplaceAll(field, "_", " "))
			}
			reply, err := rdb.Do(t.Context(), first...).Result()
			if err != nil {
				return err
			}
			return reply
		}
		check := func(what string, got any, want string) {
			if text := fmt.Sprint(got); !regexp.MustCompile("(?s)^" + want + "$").MatchString(text) {
				wrong = append(wrong, fmt.Sprintf("%s: got %q, want %s", what, text, want))
			}
		}

		do("flushall")
		before, reply, after := c[1], c[2], c[3]
		for command := range strings.SplitSeq(before, "; ") {
			if err, ok := do(cmp.Or(command, "ping")).(error); ok {
				t.Fatalf("%s: %v", command, err)
			}
		}
		name, args, _ := strings.Cut(script, " ")
		parts, keys := strings.Fields(scriptsOf[name][0]), scriptsOf[name][1]
		got := do(keys+" "+args, "eval", source(parts...), len(strings.Fields(keys)))
		do("acl setuser default +@all")
		check("the reply", got, reply)
		for pair := range strings.SplitSeq(after, "; ") {
			command, want, _ := strings.Cut(cmp.Or(pair, "ping = PONG"), " = ")
			check("afterwards "+command, do(command), want)
		}
		return wrong
	}

	all := recordScripts()
	maps.Copy(all, markScripts(runOf(info), time.Now()))
	for script, cases := range all {
		for _, c := range cases {
			t.Run(c[0], func(t *testing.T) {
				await.Undisturbed(t, 200*time.Millisecond, func() { rdb.Ping(t.Context()) }, func() string { return strings.Join(run(t, script, c), "; ") })
			})
		}
	}
}

// recordScripts are the runs of the scripts for records and fences.
func recordScripts() map[string][][4]string {
	const denied = `.*(NOPERM|can't run this command|ACL failure in script).*` // by version of the server
	return map[string][][4]string{
		"acquire token-of-a-claim#me 5000 -": {
			{"acquire: free, no fence", "set mark m; set fence x", `\[1 0 m # Server.*\]`, `pttl k = [45]\d\d\d`},
			{"acquire: held, no memory", "set k other; set mark m; config set maxmemory 1", `\[0 m\]`, "config set maxmemory 0 = OK"},
			{"acquire: free, no memory", "config set maxmemory 1", ".*(OOM|maxmemory).*", "config set maxmemory 0 = OK"},
		},
		"acquire token-of-a-claim#me 5000 9000": {
			{"acquire: held, marked", "set k other; set mark m", `\[0 m\]`, "get k = other"},
			{"acquire: first fence", "", `\[1 \d{16}  # Server.*\]`, "get k = token-of-a-claim#me"},
			{"acquire: fence by the clock", "set fence 7; set mark m", `\[1 \d{16} m # Server.*\]`, "get fence = 7"},
			{"acquire: fence above the clock", "set fence 9000000000000000", `\[1 9000000000000001  # Server.*\]`, ""},
			{"acquire: largest fence", "set fence 9007199254740990", `\[1 9007199254740991  # Server.*\]`, "get k = token-of-a-claim#me"},
			{"acquire: last fence", "set fence 9007199254740991", `\[-1\]`, "exists k = 0"},
			{"acquire: counter is no number", "set fence x1", `\[-1\]`, "exists k = 0"},
			{"acquire: counter is a list", "lpush fence 1", `\[-1\]`, "exists k = 0"},
			{"acquire: counter cannot be read", "acl setuser default -getrange", denied, "exists k = 0"},
		},
		"lead token-of-a-claim#me 5000 - me 0": {
			{"lead: free", "set mark m", `\[1 0 m # Server.*\]`, "exists turns = 0"},
			{"lead: held, first", "set k other; set mark m", `\[0 m 1\]`, `zrange turns 0 -1 = \[me\]; pttl turns = [12]\d{3}; pttl waits = [12]\d{3}`},
			{"lead: held, behind", "zadd turns @-500 she; zadd looks @-200 she; set waits 1; set k other", `\[0  0\]`, `zrange turns 0 -1 = \[she me\]`},
			{"lead: free, another's turn", "zadd turns @-500 she; zadd looks @-200 she; set waits 1", `\[0  2\]`, "exists k = 0"},
			{"lead: free, its turn", "zadd turns @-500 me; zadd looks @-200 me; set waits 1; zadd turns @-400 she; zadd looks @-200 she; set waits 1", `\[1 .*\]`, `zrange turns 0 -1 = \[she\]`},
			{"lead: free, the first is gone", "zadd turns @-5000 she; zadd looks @-1100 she; set waits 1", `\[1 .*\]`, "exists turns = 0"},
			{"lead: free, a look in the future", "zadd turns @-5000 she; zadd looks @90000 she; set waits 1", `\[1 .*\]`, "exists looks = 0"},
			{"lead: the queue is a list", "lpush turns 1", `\[1 .*\]`, "type turns = list"},
			{"lead: looks are a list", "lpush looks 1; set k other", `\[0  1\]`, "type looks = list"},
			{"lead: no right to a queue", "zadd turns @-500 she; zadd looks @-200 she; set waits 1; acl setuser default -zrange", `\[1 .*\]`, "get k = token-of-a-claim#me"},
		},
		"lead token-of-a-claim#me 5000 9000 me 0": {
			{"lead: fenced", "set fence 9000000000000000", `\[1 9000000000000001  # Server.*\]`, "get k = token-of-a-claim#me"},
		},
		"lead token-of-a-claim#me 5000 - me 60000": {
			{"lead: held, has waited longer", "zadd turns @-500 she; zadd looks @-200 she; set waits 1; set k other", `\[0  1\]`, `zrange turns 0 -1 = \[me she\]`},
		},
		"lead token-of-a-claim#me 5000 - - 0": {
			{"lead: held, does not wait", "set k other", `\[0  1\]`, "exists turns = 0"},
			{"lead: free, another's turn, does not wait", "zadd turns @-500 she; zadd looks @-200 she; set waits 1", `\[0  2\]`, `zrange turns 0 -1 = \[she\]`},
		},
		"leave me channel": {
			{"leave", "zadd turns @-500 me; zadd looks @-200 me; set waits 1; zadd turns @-400 she; zadd looks @-200 she; set waits 1", "1", `zrange turns 0 -1 = \[she\]`},
			{"leave: nobody", "", "1", ""},
		},
		"renew token-of-a-claim# - 5 9000": {
			{"raise: first", "set k token-of-a-claim#me", `\[1  \d{13}\]`, "get fence = 5"},
			{"raise: a mark", "set k token-of-a-claim#me; set mark run_0_1000", `\[1 run 0 1000 \d{13}\]`, "get fence = 5"},
			{"raise: higher", "set k token-of-a-claim#me; set fence 4", `\[1  \d{13}\]`, "get fence = 5"},
			{"raise: never lower", "set k token-of-a-claim#me; set fence 6", `\[1  \d{13}\]`, `get fence = 6; pttl fence = [89]\d\d\d`},
			{"raise: the term of the hold stays", "set k token-of-a-claim#me px 1000", `\[1  \d{13}\]`, `pttl k = \d{1,3}|1000`},
			{"raise: no record", "", `\[0  \d{13}\]`, "get fence = 5"},
			{"raise: counter is no number", "set fence x", `\[-1\]`, "get fence = x"},
			{"raise: counter is a list", "lpush fence 1", `\[-1\]`, ""},
			{"raise: counter cannot be read", "acl setuser default -getrange", denied, "exists fence = 0"},
		},
		"renew token-of-a-claim# 5000 - 9000": {
			{"renew: longer", "set k token-of-a-claim#me px 1000", `\[1  \d{13}\]`, `pttl k = [45]\d\d\d`},
			{"renew: never shorter", "set k token-of-a-claim#me px 90000; set mark m", `\[1 m \d{13}\]`, `pttl k = [89]\d{4}`},
			{"renew: without an end", "set k token-of-a-claim#me", `\[1  \d{13}\]`, "pttl k = -1"},
			{"renew: kept", "set k kept-token-of-a-claim#me px 2000", `\[0  \d{13}\]`, `pttl k = [12]\d\d\d`},
			{"renew: the lock is a list", "lpush k 1", `\[0  \d{13}\]`, ""},
			{"renew: cannot be read", "set k token-of-a-claim#me; acl setuser default -getrange", denied, ""},
		},
		"renew token-of-a-claim# 5000 5 9000": {
			{"renew: gone, fence stays", "", `\[0  \d{13}\]`, "get fence = 5"},
			{"renew: fence is higher", "set fence 6", `\[0  \d{13}\]`, `get fence = 6; pttl fence = [89]\d\d\d`},
			{"renew: counter is no number", "set fence x", `\[0  \d{13}\]`, "get fence = x"},
			{"renew: counter is a list", "lpush fence 1", `\[0  \d{13}\]`, "type fence = list"},
		},
		"release token-of-a-claim channel token-of-a-claim -": {
			{"release", "set k token-of-a-claim#me", "1", "exists k = 0"},
			{"release: any attempt", "set k token-of-a-claim~3#me", "1", "exists k = 0"},
			{"release: wakes the first waiter", "zadd turns @-500 d~she; zadd looks @-200 d~she; set waits 1; set k token-of-a-claim#me", "2", "exists k = 0"},
			{"release: a longer token-of-a-claim", "set k token-of-a-claims#me", "0", "exists k = 1"},
			{"release: no number of an attempt", "set k token-of-a-claim~#me px 1000", "0", "exists k = 1"},
			{"release: half a number of an attempt", "set k token-of-a-claim~2x#me px 1000", "0", "exists k = 1"},
			{"release: no owner", "set k token-of-a-claim~2 px 1000", "0", "exists k = 1"},
			{"release: the queue is a list", "lpush turns 1; set waits 1; set k token-of-a-claim#me", "1", "exists k = 0"},
			{"release: free", "", "0", ""},
			{"release: a list", "lpush k 1", "0", "exists k = 1"},
			{"release: cannot be read", "set k token-of-a-claim#me; acl setuser default -getrange -mget", denied, "exists k = 1"},
			{"release: no right to read the sign", "set k token-of-a-claim#me; acl setuser default -mget", "1", "exists k = 0"},
			{"release: cannot publish", "set k token-of-a-claim#me; acl setuser default -publish", "1", "exists k = 0"},
		},
		"release token-of-a-claim# - token-of-a-claim -": {
			{"release: one attempt", "set k token-of-a-claim~3#me", "0", "exists k = 1"},
			{"release: no channel", "set k token-of-a-claim#me", "1", "exists k = 0"},
		},
		"release token-of-a-claim channel token-of-a-claim 5000": {
			{"keep: shorter", "set k token-of-a-claim#me px 90000", "1", `pttl k = [45]\d\d\d`},
			{"keep: longer", "set k token-of-a-claim#me px 1000", "1", `pttl k = [45]\d\d\d`},
			{"keep: any attempt", "set k token-of-a-claim~3#me", "1", "get k = kept-token-of-a-claim~3#me"},
			{"keep: again", "set k kept-token-of-a-claim#me", "0", "get k = kept-token-of-a-claim#me"},
			{"keep: tells the first waiter", "zadd turns @-500 d~she; zadd looks @-200 d~she; set waits 1; set k token-of-a-claim#me", "2", "exists k = 1"},
			{"keep: no memory", "set k token-of-a-claim#me px 90000; config set maxmemory 1", "1", "config set maxmemory 0 = OK"},
		},
		"repair token-of-a-claim#me @60000": {
			{"repair", "", "1", `pttl k = [2-6]\d{4}`},
			{"repair: held", "set k other", "0", "get k = other"},
			{"repair: its own, shorter", "set k token-of-a-claim#me px 1000", "1", `pttl k = [2-6]\d{4}`},
			{"repair: its own, longer", "set k token-of-a-claim#me px 90000", "1", `pttl k = [89]\d{4}`},
			{"repair: a list", "lpush k 1", "0", "type k = list"},
		},
		"repair token-of-a-claim#me @-60000": {
			{"repair: too late", "", "0", "exists k = 0"},
		},
		"inspect": {
			{"inspect: free", "", `\[-2  \]`, ""},
			{"inspect: held", "set k token-of-a-claim#me px 5000; set fence 7", `\[[45]\d\d\d token-of-a-claim#me 7\]`, ""},
			{"inspect: lists", "lpush k 1; lpush fence 1", `\[-1  \]`, ""},
			{"inspect: a foreign set", "zadd k 1 a", `\[-1  \]`, ""},
		},
		"break channel broken": {
			{"break", "lpush k 1", "1", "exists k = 0"},
			{"break: free", "", "0", ""},
			{"break: cannot publish", "set k other; acl setuser default -publish", "1", "exists k = 0"},
		},
	}
}

// markScripts are the runs of mark.lua on the server of that run. The longest term is
// 1000 s, so the times differ by more than a test takes.
func markScripts(run string, now time.Time) map[string][][4]string {
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
	// keeps expects that the reply has the mark, and that the node keeps it.
	keeps := func(name, before, mark string) [4]string {
		return [4]string{"mark: " + name, before, `\[` + mark + " " + run + ` \d{13}\]`, "get mark = " + mark}
	}
	past := ms(-500)
	waits := run + " " + about(1000) + " 1000000"
	cases := [][4]string{
		keeps("none", "", waits),
		keeps("not of hasp", "set mark x", waits),
		keeps("of another run", "set mark other_0_3000000", run+" "+about(3000)+" 3000000"),
		keeps("no right to all of INFO", "acl setuser default -info +info|server", waits),
		{"mark: evicts", "config set maxmemory 90mb; config set maxmemory-policy volatile-lru", ".*may evict.*", "config set maxmemory-policy noeviction = OK"},
		{"mark: a replica", "config set replica-read-only no; replicaof 127.0.0.1 1", ".*is a replica.*", "replicaof no one = OK"},
		{"mark: has no end", "set mark " + run + "_0_1000000 px 5000", `\[.*\]`, "pttl mark = -1"},
	}
	for _, c := range [][4]string{ // the name, what the old mark has after its run, and what the new one has
		{"kept", past + " 1000000", past + " 1000000"},
		{"kept, waiting", ms(300) + " 1000000", ms(300) + " 1000000"},
		{"kept, a longer term since", ms(300) + " 500000", ms(800) + " 1000000"},
		{"kept, no longer waiting, a longer term since", past + " 500000", ms(0) + " 1000000"},
		{"kept, votes, a longer term since", "0 500000", "0 1000000"},
		{"kept, names a longer term", ms(300) + " 3000000", ms(300) + " 3000000"},
		{"kept, the clock was ahead", ms(9000) + " 1000000", about(1000) + " 1000000"},
	} {
		old := strings.ReplaceAll(run+" "+c[1], " ", "_")
		cases = append(cases, keeps(c[0], "set mark "+old, run+" "+c[2]))
	}
	return map[string][][4]string{
		"mark 1000000 - 0":     cases,
		"mark 1000000 - 0 0 1": {{"mark: may evict", cases[4][1], `\[.*\]`, cases[4][3]}},

		"mark 1000000 " + run + " " + ms(500): {keeps("new set", "", run+" 0 1000000")},
		"mark 1000000 " + run + " " + past:    {keeps("new set, too late", "", waits)},
		"mark 1000000 other " + ms(500):       {keeps("new set, another run", "", waits)},
	}
}
