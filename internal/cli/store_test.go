package cli

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/memlock"
)

// unfenced is a strategy that claims none of the abilities that a driver may lack.
type unfenced struct{ backend.Driver }

func (unfenced) Traits() backend.Traits { return backend.Traits{Reach: backend.Process} }

func init() {
	s := new(memlock.Store)
	hasp.Register("unfenced", func(context.Context, hasp.Config) (backend.Driver, error) {
		return unfenced{s.Driver()}, nil
	})
}

const secret = "s3cr%21t-pw"

// redisURL returns the URL of spinlock on s. Each test has its own prefix.
func redisURL(t *testing.T, s *redistest.Server) string {
	return "spinlock+" + s.URL() + "?prefix=" + strings.ReplaceAll(t.Name(), "/", "-") + ":"
}

// refused checks the exit code. It also checks that stderr is one line, without a stack trace and
// without the secret.
func (o outcome) refused(t *testing.T, code int, says string) {
	t.Helper()
	o.want(t, code)
	lines := strings.Split(strings.TrimSuffix(o.err, "\n"), "\n")
	if strings.Contains(lines[0], "warning: --url holds a password") {
		lines = lines[1:]
	}
	if len(lines) != 1 || !strings.HasPrefix(lines[0], "hasp: ") {
		t.Errorf("stderr: want one line that begins with hasp:, got\n%s", o.err)
	}
	contains(t, o.err, says)
	for _, bad := range []string{secret[:4], "goroutine", "Usage:", ".go:", "\x1b"} {
		if strings.Contains(o.err+o.out, bad) {
			t.Errorf("%q is in:\n%s", bad, o.err+o.out)
		}
	}
	o.prints(t, "")
}

// unwritable returns a path below a file. Not even root can create a file there.
func unwritable(t *testing.T, name string) string {
	t.Helper()
	return filepath.Join(file(t, name, "", 0o600), "directory")
}

// Each line of arguments is refused with one line, in hasp's own words. In a line, REDIS is a URL
// with a password and no port, and ” is an empty argument.
func TestBadInput(t *testing.T) {
	t.Setenv("HASP_URL", store(t))
	t.Setenv(uiToken, "")
	taken := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	defer taken.Close()
	const redis = "spinlock+redis://user:" + secret + "@127.0.0.1"
	for code, lines := range map[int]map[string]string{
		exitUsage: {
			"rum":                      `there is no command "rum"; did you mean run (see "hasp --help")`,
			"xyz":                      `there is no command "xyz" (see "hasp --help")`,
			"inspect --tll key":        `there is no flag --tll (see "hasp inspect --help")`,
			"inspect ---tll key":       `there is no flag ---tll (see`,
			"run key -q -- true":       `there is no flag -q (see`,
			"run key --wait":           `--wait needs a value (see`,
			"run key -w":               `-w needs a value (see`,
			"run key --slots x -- a":   `--slots "x": want a number (see`,
			"run key --skip=x -- a":    `--skip "x": want true or false (see`,
			"run key --ttl soon -- a":  `--ttl "soon": want a duration such as 90s or 1h30m, or a number`,
			"run key -w soon -- a":     `--wait "soon": want a duration`,
			"run key --grace inf -- a": `--grace "inf": want a duration`,
			"demo --ttl soon":          `--ttl "soon": want a duration`,
			"inspect":                  `no key given: want "hasp inspect KEY" (see "hasp inspect --help")`,
			"break a b":                `too many arguments (quote one that has blanks): want "hasp break KEY"`,
			"demo 5":                   `too many arguments (quote one that has blanks): want "hasp demo"`,
			"ui a b":                   `too many arguments (quote one that has blanks): want "hasp ui [PREFIX]"`,
			"lock":                     `no key given: want "hasp lock KEY --ttl DURATION"`,
			"renew":                    `no handle given: want "hasp renew HANDLE|-"`,
			"run":                      "no key given",
			"run -- true":              "no key given",
			"run key":                  `no command given: want "hasp run KEY -- COMMAND`,
			"run key --":               "no command given",
			"run key true":             `no "--" before the command: want "hasp run KEY -- COMMAND`,
			"run a b -- true":          "2 keys given",
			"lead key":                 `no command given: want "hasp lead KEY`,

			"run ” -- true":                             "empty key",
			"inspect ”":                                 "empty key",
			"inspect key --slots 101":                   "--slots 101: want 1 to 100",
			"run key --ttl 99ms -- true":                "ttl 99ms is below 100ms",
			"run key --url memlock://?ttl=99ms -- true": "ttl 99ms is below 100ms",
			"lead key --ttl 1ms -- true":                "ttl 1ms is below 100ms",
			"run key --skip --ttl 1ms -- true":          "ttl 1ms is below 100ms",
			"lock key --ttl 1ms":                        "ttl 1ms is below 100ms",
			"demo --ttl 5ms":                            "ttl 5ms is below 100ms",
			"demo --increments 0":                       "--increments 0: want 1 or more",
			"demo --url memlock://":                     "excludes the callers of one process",
			"demo --ui --no-lock":                       "--no-lock and --ui exclude each other",
			"run key --min-hold -1 -- true":             "hold",
			"run key --max-hold 0 -- true":              "hold",
			"run key --grace -1s -- true":               "--wait and --grace cannot be negative",
			"run key --wait -1s -- true":                "--wait and --grace cannot be negative",
			"lead key --grace -1s -- true":              "--grace cannot be negative",
			"run key -w 1 --no-wait -- true":            "--no-wait and --wait exclude each other: give one of them",
			"run key --slots 0 -- true":                 "0 slots: give 1 to 100",
			"run key --shared --slots 2 -- true":        "--shared and --slots exclude each other",
			"run key --shared --min-hold 2 -- true":     "--min-hold and --shared exclude each other",
			"inspect key --url memlock:// --config x":   "--config and --url exclude each other",

			"run key --shared --url unfenced:// -- true": "hasp: --shared: this strategy has no shared locks",
			"run key --fence --url unfenced:// -- true":  "unsupported",
			"break key --url unfenced://":                "cannot inspect: unsupported operation",
			"lock key":                                   "give --ttl",
			"lock key --ttl 1m -w -1":                    "max wait",
			"unlock " + secret:                           "this is not a handle that hasp lock has printed",
			"unlock -":                                   "this is not a handle that hasp lock has printed",
			`renew {"key":"k","ttl_ns":1000000000}`:      "this is not a handle of Detach",

			"inspect key --url ”":                        "--url is empty",
			"inspect key --url localhost:6379":           "want STRATEGY://",
			"inspect key --url ://h":                     "want the name of a strategy first",
			"inspect key --url spinlok+redis://h":        `unknown strategy "spinlok" (want one of fairlock, `,
			"inspect key --url mem\x1b[2Jlock://":        `unknown strategy "mem\x1b[2Jlock"`,
			"inspect key --url pglock+postgres://h/db":   `this hasp is built without pglock: in the clone, "go -C cmd/hasp-all install ."`,
			"inspect key --url redis://h":                `"redis" is a transport: put a strategy before it, as in spinlock+redis://…, pglock+postgres://… or `,
			"inspect key --url memlock://?tll=5s":        `unknown parameter "tll"`,
			"conform --url memlock://?tll=5s":            `unknown parameter "tll"`,
			"inspect key --url memlock://?ttl=long":      "want a positive duration",
			"inspect key --url " + redis + "/?ttl=%zz":   "malformed parameters",
			"inspect key --url " + redis + ":port":       "port",
			"inspect key --url " + redis + "/zero":       "database",
			"inspect key --config " + t.TempDir() + "/n": "no such file",

			"ui --listen 0.0.0.0:0":                          "needs --token",
			"ui --listen :0":                                 "needs --token",
			"ui --listen [::]:0":                             "needs --token",
			"ui --listen 192.0.2.1:0":                        "needs --token",
			"ui --listen host.example:0":                     "needs --token",
			"ui --listen 127.0.0.1":                          "want HOST:PORT",
			"ui --token short":                               "want 16 or more",
			"ui --host https://x":                            "--host: want a name",
			"ui --listen 127.0.0.1:99999":                    "invalid port",
			"help foo":                                       `there is no command "foo"`,
			"inspect key --url etcd://h":                     `"etcd" is a transport`,
			"inspect key --url memlock://?ttl=1s;timeout=2s": "separate parameters by & alone",
			`renew --ttl 0 {"key":"k","token":"0123456789012345678901"}`: `renew "k": invalid: ttl 0s is below 100ms`,
		},
		exitStore: {
			"inspect key --url " + redis + ":1":                        "connection refused",
			"inspect key --check --url " + redis + ":1":                "connection refused",
			"demo --url " + redis + ":1":                               "connection refused",
			"conform --url " + redis + ":1":                            "connection refused",
			"doctor --url " + redis + ":1":                             "connection refused",
			"inspect key --url filelock://" + unwritable(t, "file"):    "not a directory",
			"inspect key --url filelock://" + unwritable(t, "\x1b[2J"): `\x1b[2J`,
			"inspect key --config " + config(t, "strategy: spinlock\nnodes: ['"+strings.TrimPrefix(redis, "spinlock+")+":1']"): "connection refused",
		},
		exitLost: {
			`unlock {"key":"k","token":"AAAAAAAAAAAAAAAAAAAAAA","ttl_ns":1000000000}`: `"k": lease lost: this handle holds nothing, `,
		},
		exitFailed: {"ui --listen " + taken.Addr().String(): "another program has this port"},
	} {
		for line, says := range lines {
			args := strings.Fields(line)
			for i, arg := range args {
				args[i] = strings.TrimPrefix(arg, "”")
			}
			t.Run(line, func(t *testing.T) { call(args...).refused(t, code, says) })
		}
	}
}

func config(t *testing.T, content string) string {
	t.Helper()
	return file(t, "hasp.yaml", content, 0o600)
}

func TestBadConfig(t *testing.T) {
	t.Parallel()
	const form = `want "strategy: NAME", "nodes: [URL, …]" and "params: {NAME: VALUE, …}", each once; quote a value that begins with * or !`
	for content, says := range map[string]string{
		"":                                    form,
		"a: b: " + secret:                     form,
		"nodes: " + secret:                    "line 1: " + form,
		"params: [" + secret + "]":            form,
		"params: {ttl: !!int " + secret + "}": form,
		"nodes: [*" + secret + "]":            form,
		"!!" + secret + "0":                   form,
		"nodes: !" + secret:                   form,
		"0 " + secret + ":":                   "line 1: " + form,
		"strategy: spinlock\nnodes: [redis://h\na: x": form,
		"strategy: spinlock\nnodes\nparams: {}":       form,
		"strategy: memlock\nparams: {ttl: [1s]}":      "line 2: " + form,
		"strategy: memlock\nstrategy: memlock":        form,
		"strategy: memlock\nnode: x":                  `line 2: unknown field "node" (want strategy, nodes, params)`,
		"strategy: memlock\n---\nstrategy: memlock":   "want one YAML document",
		"strategy: fairlock+redis://:" + secret + "@": "put a URL into nodes",
		"params: {ttl: 5s}":                           "no strategy given",
		"strategy: memlok":                            `unknown strategy "memlok" (want one of fairlock, `,
		"strategy: memlock\nparams: {tll: 5}":         `unknown parameter "tll"`,
	} {
		call("inspect", "key", "--config", config(t, content)).refused(t, exitUsage, says)
	}
}

func TestPasswordOnTheCommandLineIsWarnedOf(t *testing.T) {
	for _, harmless := range []string{"spinlock+redis://user@127.0.0.1:1", store(t)} {
		if o := call("inspect", "key", "--url", harmless); strings.Contains(o.err, "warning") {
			t.Errorf("%s: %s", harmless, o.err)
		}
	}
	t.Setenv("HASP_URL", "")
	call("inspect", "key").refused(t, exitUsage, "HASP_URL is empty: give it a URL, or unset it for filelock://")
}

func TestWhereTheLocksAreKept(t *testing.T) {
	for _, used := range []string{"url", "config", "env", "state"} {
		dirs := map[string]string{"url": t.TempDir(), "config": t.TempDir(), "env": t.TempDir(), "state": t.TempDir()}
		config := file(t, "hasp.yaml", "strategy: filelock\nnodes: ["+dirs["config"]+"]\nparams: {ttl: 20s, prefix: 7}\n", 0o600)
		env := "filelock://" + dirs["env"]
		if used == "state" {
			env = ""
		}
		flags := map[string][]string{"url": {"--url", "filelock://" + dirs["url"]}, "config": {"--config", config}}[used]
		cmd := self(t, "hasp", env, append(append([]string{"run", "key"}, flags...), "--", "true")...)
		cmd.Env = append(cmd.Env, "XDG_STATE_HOME="+dirs["state"])
		start(t, cmd).wait().want(t, 0)
		for name, dir := range dirs {
			entries := await.Value(os.ReadDir(dir))
			if got, want := len(entries) > 0, name == used; got != want {
				t.Errorf("store of %s: %s used: %v", used, name, got)
			}
		}
	}
}

func TestRedactRemovesPasswords(t *testing.T) {
	t.Parallel()
	for node, text := range map[string]string{
		"redis://u:pa%20ss@h":   "denied: pa%20ss, pa ss",
		"redis://:a@h":          "dial redis://:a@h: a bad day",
		"redis://u:p@ss:word@h": "denied: p@ss:word",
	} {
		var s storeFlags
		s.learn(hasp.Config{Nodes: []string{node}})
		got := s.redact(text)
		for _, pw := range s.secret {
			if strings.Contains(got, ":"+pw+"@") || len(pw) > 3 && strings.Contains(got, pw) {
				t.Errorf("%s: %q", node, got)
			}
		}
		if len(s.secret) == 0 {
			t.Errorf("%s: no password found", node)
		}
	}
}

func TestLockInsideThisProcessIsWarnedOf(t *testing.T) {
	for _, args := range [][]string{{"run", "key", "--url", "memlock://", "--", "true"}, {"inspect", "key", "--url", "memlock://"}} {
		contains(t, call(args...).want(t, 0).err, "hasp: warning: memlock")
	}
	call("lock", "key", "--ttl", "1m", "--url", "memlock://").fails(t, exitUsage, "no other command can unlock them")
}
