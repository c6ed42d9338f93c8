package redlock

import (
	"cmp"
	"fmt"
	"math"
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
	s := redistest.Start(t, redistest.Real)
	rdb := s.Client()
	server := runOf(rdb.Info(t.Context(), "server").Val())
	relative, absolute := regexp.MustCompile(`@-?\d+`), regexp.MustCompile(`\b\d{13}\b`)

	// run runs a script, whose name comes before its arguments, on a server without data. It
	// returns what is wrong. A case is a name, the commands before the script, a regular expression
	// for the whole reply, as fmt prints it, and commands after the script, each with an expression
	// for its reply. In a command, @-500 is the time half a second ago, in ms, _ is a space in a
	// field, and a field - is empty. In a reply, @-500 is about 500 s ago, and @-500! is exactly
	// that. RUN is the server's run.
	run := func(t *testing.T, script string, c [4]string) (wrong []string) {
		now := time.Now().UnixMilli()
		timed := func(at string) string {
			return fmt.Sprint(now + await.Value(strconv.ParseInt(at[1:], 10, 64)))
		}
		// do sends a command, of which the first fields may be given alone.
		do := func(command string, first ...any) any {
			command = strings.ReplaceAll(relative.ReplaceAllStringFunc(command, timed), "RUN", server)
			for _, field := range strings.Fields(command) {
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
		since := func(at string) string {
			ms := await.Value(strconv.ParseInt(at, 10, 64)) - now
			text := fmt.Sprint("@", 100*int(math.Round(float64(ms)/100_000)))
			if ms%100_000 == 0 {
				text += "!"
			}
			return text
		}
		check := func(what string, got any, want string) {
			text := absolute.ReplaceAllStringFunc(strings.ReplaceAll(fmt.Sprint(got), server, "RUN"), since)
			if !regexp.MustCompile("(?s)^" + want + "$").MatchString(text) {
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

	for script, cases := range scriptCases() {
		for _, c := range cases {
			t.Run(c[0], func(t *testing.T) {
				await.Undisturbed(t, 200*time.Millisecond, func() { rdb.Ping(t.Context()) }, func() string { return strings.Join(run(t, script, c), "; ") })
			})
		}
	}
}

// scriptCases has the cases of each script with its arguments. For marks, the longest term is 1000
// s, so the times differ by more than a test takes.
func scriptCases() map[string][][4]string {
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
			{"raise: first", "set k token-of-a-claim#me", `\[1  @0!?\]`, "get fence = 5"},
			{"raise: a mark", "set k token-of-a-claim#me; set mark run_0_1000", `\[1 run 0 1000 @0!?\]`, "get fence = 5"},
			{"raise: higher", "set k token-of-a-claim#me; set fence 4", `\[1  @0!?\]`, "get fence = 5"},
			{"raise: never lower", "set k token-of-a-claim#me; set fence 6", `\[1  @0!?\]`, `get fence = 6; pttl fence = [89]\d\d\d`},
			{"raise: the term of the hold stays", "set k token-of-a-claim#me px 1000", `\[1  @0!?\]`, `pttl k = \d{1,3}|1000`},
			{"raise: no record", "", `\[0  @0!?\]`, "get fence = 5"},
			{"raise: counter is no number", "set fence x", `\[-1\]`, "get fence = x"},
			{"raise: counter is a list", "lpush fence 1", `\[-1\]`, ""},
			{"raise: counter cannot be read", "acl setuser default -getrange", denied, "exists fence = 0"},
		},
		"renew token-of-a-claim# 5000 - 9000": {
			{"renew: longer", "set k token-of-a-claim#me px 1000", `\[1  @0!?\]`, `pttl k = [45]\d\d\d`},
			{"renew: never shorter", "set k token-of-a-claim#me px 90000; set mark m", `\[1 m @0!?\]`, `pttl k = [89]\d{4}`},
			{"renew: without an end", "set k token-of-a-claim#me", `\[1  @0!?\]`, "pttl k = -1"},
			{"renew: kept", "set k kept-token-of-a-claim#me px 2000", `\[0  @0!?\]`, `pttl k = [12]\d\d\d`},
			{"renew: the lock is a list", "lpush k 1", `\[0  @0!?\]`, ""},
			{"renew: cannot be read", "set k token-of-a-claim#me; acl setuser default -getrange", denied, ""},
		},
		"renew token-of-a-claim# 5000 5 9000": {
			{"renew: gone, fence stays", "", `\[0  @0!?\]`, "get fence = 5"},
			{"renew: fence is higher", "set fence 6", `\[0  @0!?\]`, `get fence = 6; pttl fence = [89]\d\d\d`},
			{"renew: counter is no number", "set fence x", `\[0  @0!?\]`, "get fence = x"},
			{"renew: counter is a list", "lpush fence 1", `\[0  @0!?\]`, "type fence = list"},
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

		"mark 1000000 - 0": {
			{"mark: none", "", `\[RUN @1000!? 1000000 RUN @0!?\]`, "get mark = RUN @1000!? 1000000"},
			{"mark: not of hasp", "set mark x", `\[RUN @1000!? 1000000 RUN @0!?\]`, "get mark = RUN @1000!? 1000000"},
			{"mark: of another run", "set mark other_0_3000000", `\[RUN @3000!? 3000000 RUN @0!?\]`, "get mark = RUN @3000!? 3000000"},
			{"mark: no right to all of INFO", "acl setuser default -info +info|server", `\[RUN @1000!? 1000000 RUN @0!?\]`, "get mark = RUN @1000!? 1000000"},
			{"mark: evicts", "config set maxmemory 90mb; config set maxmemory-policy volatile-lru", ".*may evict.*", "config set maxmemory-policy noeviction = OK"},
			{"mark: a replica", "config set replica-read-only no; replicaof 127.0.0.1 1", ".*is a replica.*", "replicaof no one = OK"},
			{"mark: has no end", "set mark RUN_0_1000000 px 5000", `\[.*\]`, "pttl mark = -1"},
			{"mark: kept", "set mark RUN_@-500000_1000000", `\[RUN @-500! 1000000 RUN @0!?\]`, "get mark = RUN @-500! 1000000"},
			{"mark: kept, waiting", "set mark RUN_@300000_1000000", `\[RUN @300! 1000000 RUN @0!?\]`, "get mark = RUN @300! 1000000"},
			{"mark: kept, a longer term since", "set mark RUN_@300000_500000", `\[RUN @800! 1000000 RUN @0!?\]`, "get mark = RUN @800! 1000000"},
			{"mark: kept, no longer waiting, a longer term since", "set mark RUN_@-500000_500000", `\[RUN @0! 1000000 RUN @0!?\]`, "get mark = RUN @0! 1000000"},
			{"mark: kept, votes, a longer term since", "set mark RUN_0_500000", `\[RUN 0 1000000 RUN @0!?\]`, "get mark = RUN 0 1000000"},
			{"mark: kept, names a longer term", "set mark RUN_@300000_3000000", `\[RUN @300! 3000000 RUN @0!?\]`, "get mark = RUN @300! 3000000"},
			{"mark: kept, the clock was ahead", "set mark RUN_@9000000_1000000", `\[RUN @1000!? 1000000 RUN @0!?\]`, "get mark = RUN @1000!? 1000000"},
		},
		"mark 1000000 - 0 0 1": {
			{"mark: may evict", "config set maxmemory 90mb; config set maxmemory-policy volatile-lru", `\[.*\]`, "config set maxmemory-policy noeviction = OK"},
		},
		"mark 1000000 RUN @500000": {
			{"mark: new set", "", `\[RUN 0 1000000 RUN @0!?\]`, "get mark = RUN 0 1000000"},
		},
		"mark 1000000 RUN @-500000": {
			{"mark: new set, too late", "", `\[RUN @1000!? 1000000 RUN @0!?\]`, "get mark = RUN @1000!? 1000000"},
		},
		"mark 1000000 other @500000": {
			{"mark: new set, another run", "", `\[RUN @1000!? 1000000 RUN @0!?\]`, "get mark = RUN @1000!? 1000000"},
		},
	}
}
