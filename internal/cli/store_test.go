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

func TestBadInput(t *testing.T) {
	t.Setenv("HASP_URL", store(t))
	t.Setenv(uiToken, "")
	dir, taken := t.TempDir(), await.Value(net.Listen("tcp", "127.0.0.1:0"))
	defer taken.Close()
	config := func(content string) string { return file(t, "hasp.yaml", content, 0o600) }
	redis := "spinlock+redis://user:" + secret + "@127.0.0.1"
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"unknown command":      {[]string{"rum"}, exitUsage, `unknown command "rum" for "hasp"; did you mean run `},
		"unknown flag":         {[]string{"inspect", "--tll", "key"}, exitUsage, `unknown flag: --tll (see "hasp inspect --help")`},
		"no key":               {[]string{"inspect"}, exitUsage, `no key given: want "hasp inspect KEY" (see "hasp inspect --help")`},
		"two keys":             {[]string{"break", "a", "b"}, exitUsage, `2 arguments given: want "hasp break KEY"`},
		"no command":           {[]string{"run", "key"}, exitUsage, `no command given: want "hasp run KEY -- COMMAND`},
		"nothing after --":     {[]string{"run", "key", "--"}, exitUsage, "no command given"},
		"no --":                {[]string{"run", "key", "true"}, exitUsage, `no "--" before the command: want "hasp run KEY -- COMMAND`},
		"no run arguments":     {[]string{"run"}, exitUsage, "no key given"},
		"only a command":       {[]string{"run", "--", "true"}, exitUsage, "no key given"},
		"two keys, run":        {[]string{"run", "a", "b", "--", "true"}, exitUsage, "2 keys given"},
		"not a duration":       {[]string{"run", "key", "--ttl", "soon", "--", "true"}, exitUsage, "invalid duration"},
		"empty key":            {[]string{"run", "", "--", "true"}, exitUsage, "empty key"},
		"empty key, inspect":   {[]string{"inspect", ""}, exitUsage, "empty key"},
		"short ttl":            {[]string{"run", "key", "--ttl", "99ms", "--", "true"}, exitUsage, "ttl 99ms is below 100ms"},
		"short ttl in the url": {[]string{"run", "key", "--url", "memlock://?ttl=99ms", "--", "true"}, exitUsage, "ttl 99ms is below 100ms"},
		"argument of demo":     {[]string{"demo", "5"}, exitUsage, `unknown command "5" for "hasp demo"`},

		"empty url":           {[]string{"inspect", "key", "--url", ""}, exitUsage, "--url is empty"},
		"no url":              {[]string{"inspect", "key", "--url", "localhost:6379"}, exitUsage, "want STRATEGY://"},
		"unknown strategy":    {[]string{"inspect", "key", "--url", "spinlok+redis://h"}, exitUsage, `unknown strategy "spinlok" (want one of fairlock, `},
		"no strategy":         {[]string{"inspect", "key", "--url", "://h"}, exitUsage, "want the name of a strategy first"},
		"of another module":   {[]string{"inspect", "key", "--url", "pglock+postgres://h/db"}, exitUsage, `this hasp is built without pglock: in the clone, "go -C cmd/hasp-all install ."`},
		"no strategy, redis":  {[]string{"inspect", "key", "--url", "redis://h"}, exitUsage, `"redis" is a transport: put a strategy before it, as in spinlock+redis://… (want one of fairlock, `},
		"unknown parameter":   {[]string{"inspect", "key", "--url", "memlock://?tll=5s"}, exitUsage, `unknown parameter "tll"`},
		"bad parameter":       {[]string{"inspect", "key", "--url", "memlock://?ttl=long"}, exitUsage, "want a positive duration"},
		"bad escape":          {[]string{"inspect", "key", "--url", redis + "/?ttl=%zz"}, exitUsage, "malformed parameters"},
		"bad port":            {[]string{"inspect", "key", "--url", redis + ":port"}, exitUsage, "port"},
		"bad database":        {[]string{"inspect", "key", "--url", redis + "/zero"}, exitUsage, "database"},
		"control characters":  {[]string{"inspect", "key", "--url", "mem\x1b[2Jlock://"}, exitUsage, `unknown strategy "mem\x1b[2Jlock"`},
		"url and config":      {[]string{"inspect", "key", "--url", "memlock://", "--config", "x"}, exitUsage, "--config and --url exclude each other"},
		"no server":           {[]string{"inspect", "key", "--url", redis + ":1"}, exitStore, "connection refused"},
		"directory is a file": {[]string{"inspect", "key", "--url", "filelock://" + unwritable(t, "file")}, exitStore, "not a directory"},

		"escapes in a path": {[]string{"inspect", "key", "--url", "filelock://" + unwritable(t, "\x1b[2J")}, exitStore, `\x1b[2J`},

		"no such config":      {[]string{"inspect", "key", "--config", dir + "/none"}, exitUsage, "no such file"},
		"config is empty":     {[]string{"inspect", "key", "--config", config("")}, exitUsage, `want "strategy: NAME", "nodes: [URL, `},
		"config, not yaml":    {[]string{"inspect", "key", "--config", config("a: b: " + secret)}, exitUsage, "want"},
		"unknown field":       {[]string{"inspect", "key", "--config", config("strategy: memlock\nnode: x")}, exitUsage, `line 2: unknown field "node" (want strategy, nodes, params)`},
		"nodes, not a list":   {[]string{"inspect", "key", "--config", config("nodes: " + secret)}, exitUsage, `line 1: want "strategy: NAME", "nodes: [URL, `},
		"params, not a map":   {[]string{"inspect", "key", "--config", config("params: [" + secret + "]")}, exitUsage, `"params: {NAME: VALUE, `},
		"parameter is a list": {[]string{"inspect", "key", "--config", config("strategy: memlock\nparams: {ttl: [1s]}")}, exitUsage, "line 2"},
		"config, a URL":       {[]string{"inspect", "key", "--config", config("strategy: fairlock+redis://:" + secret + "@h")}, exitUsage, "put a URL into nodes"},
		"field given twice":   {[]string{"inspect", "key", "--config", config("strategy: memlock\nstrategy: memlock")}, exitUsage, "each once"},
		"unquoted *":          {[]string{"inspect", "key", "--config", config("nodes: [*topsecret]")}, exitUsage, "quote a value that begins with * or !"},
		"config, a tag":       {[]string{"inspect", "key", "--config", config("params: {ttl: !!int " + secret + "}")}, exitUsage, "quote a value that begins with * or !"},
		"config, only a tag":  {[]string{"inspect", "key", "--config", config("!!" + secret + "0")}, exitUsage, "each once"},
		"nodes, only a tag":   {[]string{"inspect", "key", "--config", config("nodes: !" + secret)}, exitUsage, "want"},
		"a field of two":      {[]string{"inspect", "key", "--config", config("0 " + secret + ":")}, exitUsage, "line 1"},
		"no ]":                {[]string{"inspect", "key", "--config", config("strategy: spinlock\nnodes: [redis://h\nparams: {ttl: 10s}")}, exitUsage, "want"},
		"no colon":            {[]string{"inspect", "key", "--config", config("strategy: spinlock\nnodes\nparams: {}")}, exitUsage, "want"},
		"two documents":       {[]string{"inspect", "key", "--config", config("strategy: memlock\n---\nstrategy: memlock")}, exitUsage, "want one YAML document"},
		"config, no strategy": {[]string{"inspect", "key", "--config", config("params: {ttl: 5s}")}, exitUsage, "no strategy given"},
		"config, unknown":     {[]string{"inspect", "key", "--config", config("strategy: memlok")}, exitUsage, `unknown strategy "memlok" (want one of fairlock, `},
		"config, parameter":   {[]string{"inspect", "key", "--config", config("strategy: memlock\nparams: {tll: 5}")}, exitUsage, `unknown parameter "tll"`},
		"config, refused":     {[]string{"inspect", "key", "--config", config("strategy: spinlock\nnodes: ['redis://:" + secret + "@127.0.0.1:1']")}, exitStore, "connection refused"},

		"demo, no increments": {[]string{"demo", "--increments", "0"}, exitUsage, "--increments 0: want 1 or more"},
		"demo, ttl":           {[]string{"demo", "--ttl", "5ms"}, exitUsage, "ttl 5ms is below 100ms"},
		"demo, one process":   {[]string{"demo", "--url", "memlock://"}, exitUsage, "excludes the callers of one process"},
		"demo, no store":      {[]string{"demo", "--url", redis + ":1"}, exitStore, "connection refused"},
		"conform, no store":   {[]string{"conform", "--url", redis + ":1"}, exitStore, "connection refused"},
		"conform, parameter":  {[]string{"conform", "--url", "memlock://?tll=5s"}, exitUsage, `unknown parameter "tll"`},
		"shared, unsupported": {[]string{"run", "key", "--shared", "--url", "unfenced://", "--", "true"}, exitUsage, "hasp: --shared: this strategy has no shared locks"},
		"negative min hold":   {[]string{"run", "key", "--min-hold", "-1s", "--", "true"}, exitUsage, "hold"},
		"negative grace":      {[]string{"run", "key", "--grace", "-1s", "--", "true"}, exitUsage, "--wait and --grace cannot be negative"},
		"negative wait":       {[]string{"run", "key", "--wait", "-1s", "--", "true"}, exitUsage, "--wait and --grace cannot be negative"},
		"wait or not":         {[]string{"run", "key", "--wait", "1s", "--no-wait", "--", "true"}, exitUsage, "--no-wait and --wait exclude each other: give one of them"},
		"wait for no time":    {[]string{"run", "key", "-w", "soon", "--", "true"}, exitUsage, "invalid duration"},
		"inspect, slots":      {[]string{"inspect", "key", "--slots", "101"}, exitUsage, "--slots 101: want 1 to 100"},
		"inspect, check":      {[]string{"inspect", "key", "--check", "--url", redis + ":1"}, exitStore, "connection refused"},
		"doctor, no store":    {[]string{"doctor", "--url", redis + ":1"}, exitStore, "connection refused"},
		"lock, no key":        {[]string{"lock"}, exitUsage, `no key given: want "hasp lock KEY --ttl DURATION"`},
		"renew, no handle":    {[]string{"renew"}, exitUsage, `no handle given: want "hasp renew HANDLE|-"`},
		"lead, no command":    {[]string{"lead", "key"}, exitUsage, `no command given: want "hasp lead KEY`},
		"lock, no ttl":        {[]string{"lock", "key"}, exitUsage, "give --ttl"},
		"lock, wait":          {[]string{"lock", "key", "--ttl", "1m", "-w", "-1"}, exitUsage, "max wait"},
		"lock, ttl":           {[]string{"lock", "key", "--ttl", "1ms"}, exitUsage, "ttl 1ms is below 100ms"},
		"unlock, no handle":   {[]string{"unlock", secret}, exitUsage, "this is not a handle that hasp lock has printed"},
		"unlock, empty":       {[]string{"unlock", "-"}, exitUsage, "this is not a handle that hasp lock has printed"},
		"unlock, no token":    {[]string{"renew", `{"key":"k","ttl_ns":1000000000}`}, exitUsage, "this is not a handle of Detach"},
		"unlock, other store": {[]string{"unlock", `{"key":"k","token":"AAAAAAAAAAAAAAAAAAAAAA","ttl_ns":1000000000}`}, exitLost, `"k": lease lost: this handle holds nothing, because the key was unlocked or broken, its term has ended, or the handle is of another store, strategy or prefix: lock the key again if you still need it`},
		"no slots":            {[]string{"run", "key", "--slots", "0", "--", "true"}, exitUsage, "0 slots: give 1 to 100"},
		"shared slots":        {[]string{"run", "key", "--shared", "--slots", "2", "--", "true"}, exitUsage, "--shared and --slots exclude each other"},
		"shared, kept":        {[]string{"run", "key", "--shared", "--min-hold", "2s", "--", "true"}, exitUsage, "--min-hold and --shared exclude each other"},
		"fence, unsupported":  {[]string{"run", "key", "--fence", "--url", "unfenced://", "--", "true"}, exitUsage, "unsupported"},
		"lead, grace":         {[]string{"lead", "key", "--grace", "-1s", "--", "true"}, exitUsage, "--grace cannot be negative"},
		"lead, short ttl":     {[]string{"lead", "key", "--ttl", "1ms", "--", "true"}, exitUsage, "ttl 1ms is below 100ms"},
		"ui, all addresses":   {[]string{"ui", "--listen", "0.0.0.0:0"}, exitUsage, "needs --token"},
		"ui, no address":      {[]string{"ui", "--listen", ":0"}, exitUsage, "needs --token"},
		"ui, IPv6":            {[]string{"ui", "--listen", "[::]:0"}, exitUsage, "needs --token"},
		"ui, an address":      {[]string{"ui", "--listen", "192.0.2.1:0"}, exitUsage, "needs --token"},
		"ui, a name":          {[]string{"ui", "--listen", "host.example:0"}, exitUsage, "needs --token"},
		"ui, no port":         {[]string{"ui", "--listen", "127.0.0.1"}, exitUsage, "want HOST:PORT"},
		"ui, port is taken":   {[]string{"ui", "--listen", taken.Addr().String()}, exitFailed, "another program has this port"},
		"ui, short token":     {[]string{"ui", "--token", "short"}, exitUsage, "want 16 or more"},
		"ui, two prefixes":    {[]string{"ui", "a", "b"}, exitUsage, "accepts at most 1 arg(s), received 2"},
		"ui, demo without":    {[]string{"demo", "--ui", "--no-lock"}, exitUsage, "--no-lock and --ui exclude each other"},
		"break without asking": {[]string{"break", "key", "--url", "unfenced://"}, exitUsage,
			`cannot inspect: unsupported operation`},
	} {
		t.Run(name, func(t *testing.T) { call(c.args...).refused(t, c.code, c.says) })
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
			entries, err := os.ReadDir(dir)
			must(t, err)
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
	contains(t, call("lock", "key", "--ttl", "1m", "--url", "memlock://").want(t, exitUsage).err, "no other command can unlock them")
}
