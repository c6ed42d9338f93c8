package main

import (
	"fmt"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	_ "github.com/hasplock/hasp/memlock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// strategy is what "hasp strategies" tells of one.
type strategy struct {
	Name  string `json:"name"`
	Reach string `json:"reach,omitempty"`
	Order string `json:"order,omitempty"`
	Fence bool   `json:"fence"`
	URL   string `json:"url"`
	About string `json:"about,omitempty"`
}

// described are the strategies that come with hasp.
var described = []strategy{
	{"memlock", "process", "in order of arrival", true, "memlock://", "one process: tests, examples"},
	{"filelock", "host", "none", true, "filelock:///var/lock/app", "the processes of one host, without a server"},
	{"spinlock", "network", "none", true, "spinlock+redis://localhost:6379/0", "one Redis; asks again and again"},
	{"pubsublock", "network", "none", true, "pubsublock+redis://localhost:6379/0", "one Redis; woken by a release, as Redisson's locks are"},
	{"fairlock", "network", "in order of arrival", true, "fairlock+redis://localhost:6379/0", "one Redis; served in order, handed from one to the next"},
	{"redlock", "network", "none", true, "redlock+redis://host1:6379,host2:6379,host3:6379", "several Redis masters, any minority of which may fail"},
}

// known returns the registered strategies, with what can be told of them.
func known() []strategy {
	var all []strategy
	for _, name := range hasp.Strategies() {
		i := slices.IndexFunc(described, func(s strategy) bool { return s.Name == name })
		if i < 0 {
			all = append(all, strategy{Name: name, URL: name + "://"})
		} else {
			all = append(all, described[i])
		}
	}
	return all
}

func (a *app) strategiesCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "strategies",
		Short: "List the strategies that --url can name",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			if asJSON {
				return a.printJSON(known())
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "STRATEGY\tEXCLUDES WITHIN ONE\tORDER\tFENCE\tURL\tFOR")
			for _, s := range known() {
				fence := "no"
				if s.Fence {
					fence = "yes"
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", s.Name, s.Reach, s.Order, fence, s.URL, s.About)
			}
			return w.Flush()
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
