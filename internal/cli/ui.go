package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/cli/ui"
)

// uiToken is the environment variable that replaces --token.
const uiToken = "HASP_UI_TOKEN"

// minToken is the length of the shortest token, in characters.
const minToken = 16

func (a *app) uiCommand() *cobra.Command {
	var o ui.Options
	cmd := &cobra.Command{
		Use:   "ui [PREFIX]",
		Short: "Show the locks on a web page that updates itself",
		Long: `ui serves a web page that shows the keys that are held or waited for, and begin
with PREFIX, as they change: the holder, the age, the term, the fence, and how many
callers wait. For each key the page has a timeline and the queue. The page only
reads. "hasp break" frees a key.

ui prints the address of the page, and runs until Ctrl-C. While no browser is
connected, it leaves the store alone. Otherwise it lists the store twice a second,
once for all browsers. After a list it rests for at least twice as long as the
list took.

If --listen is not a loopback address, a token is required. Each browser presents
it once: append ?token=TOKEN to the address. Without a token
all users of this host can open the page. Put the token into ` + uiToken + `: other
users of this host can read the arguments of a program. docs/ui.md has more.`,
		Example: `  hasp ui
  hasp ui mail: --url fairlock+redis://localhost:6379
  export ` + uiToken + `=$(openssl rand -hex 16); echo $` + uiToken + `
  hasp ui --listen 0.0.0.0:7420`,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Prefix = strings.Join(args, "") // there is at most one argument
			return a.ui(cmd, o)
		},
	}

	f := cmd.Flags()
	f.StringVar(&o.Listen, "listen", "127.0.0.1:7420",
		"serve the page at `HOST:PORT`; port 0 is any free one")
	f.StringVar(&o.Token, "token", "",
		"let only browsers in that present `TOKEN` (default: "+uiToken+" in the environment)")
	f.StringSliceVar(&o.Hosts, "host", nil,
		"another `NAME` of this host, under which browsers reach the page; may be repeated")
	return cmd
}

// ui serves the page until Ctrl-C. It returns an error if other hosts could read the page without a
// token.
func (a *app) ui(cmd *cobra.Command, o ui.Options) error {
	isInFlag := o.Token != "" // the token is in the command line
	o.Token = cmp.Or(o.Token, os.Getenv(uiToken))
	if err := checkListen(o); err != nil {
		return err
	}
	if isInFlag {
		a.complain("warning: other users of this host can read --token in the process list; "+
			"put the token into %s", uiToken)
	}

	client, err := a.open(cmd, cmd.CommandPath(), nil)
	if err != nil {
		return err
	}
	defer client.Close()
	if o.Token != "" {
		a.store.secret = append(a.store.secret, o.Token)
	}
	o.Store = a.strategy
	o.Ordered = describe(a.strategy).Order == InOrder
	o.Redact = a.store.redact

	ln, err := listenAt(cmd.Context(), o.Listen)
	if err != nil {
		return err
	}
	o.Listen = ln.Addr().String()
	addr := ln.Addr().(*net.TCPAddr)
	if o.Token == "" && !addr.IP.IsLoopback() { // the name localhost may resolve to any address
		ln.Close()
		return usagef("--listen: other hosts can reach %s, so it needs --token, "+
			"or %s in the environment", o.Listen, uiToken)
	}

	// A browser cannot open an unspecified address such as 0.0.0.0, so show the name of this host.
	hostPort := o.Listen
	if name, err := os.Hostname(); err == nil && addr.IP.IsUnspecified() {
		o.Hosts = append(o.Hosts, name)
		hostPort = net.JoinHostPort(name, strconv.Itoa(addr.Port))
	}
	_, err = fmt.Fprintf(a.out, "hasp ui: the locks of %s are at http://%s/ until Ctrl-C\n",
		o.Store, hostPort)
	if err == nil && o.Token != "" {
		_, err = fmt.Fprintf(a.out,
			"hasp ui: open http://%s/?token=TOKEN with your token in place of TOKEN\n", hostPort)
	}
	if err != nil {
		ln.Close()
		return err
	}
	return ui.New(client, o).Serve(cmd.Context(), ln)
}

// checkListen returns an error if o.Listen is not HOST:PORT, if other hosts could read the page
// without a token, or if the token is too short.
func checkListen(o ui.Options) error {
	host, _, err := net.SplitHostPort(o.Listen)
	switch {
	case err != nil:
		return usagef("--listen %s: want HOST:PORT, such as 127.0.0.1:7420", text.Quote(o.Listen))
	case strings.Contains(strings.Join(o.Hosts, ""), "/"):
		return usagef("--host: want a name or an address, without https://")
	case o.Token == "" && !ui.IsLoopback(host):
		return usagef("--listen %s: other hosts can reach this address, so it needs --token, "+
			"or %s in the environment", text.Quote(o.Listen), uiToken)
	case o.Token != "" && len(o.Token) < minToken:
		return usagef("the token has %d characters: want %d or more", len(o.Token), minToken)
	}
	return nil
}

// listenAt listens at an address HOST:PORT. Its errors name the flag --listen.
func listenAt(ctx context.Context, at string) (net.Listener, error) {
	var config net.ListenConfig
	ln, err := config.Listen(ctx, "tcp", at)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("--listen %s: another program has this port; "+
			"use port 0 for any free one", at)
	case err != nil:
		return nil, usagef("--listen: %w", err)
	}

	return ln, nil
}
