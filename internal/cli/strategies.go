package cli

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/hasplock/hasp/backend"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	_ "github.com/hasplock/hasp/memlock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// Strategy is a row in the table of "hasp strategies".
type Strategy struct {
	Name  string
	Reach backend.Reach // process, host or network
	Order string        // "arrival", "usually arrival" or "none"
	URL   string        // an example
	About string
}

// InOrder is the Order of a strategy that serves waiters in order of arrival.
const InOrder = "arrival"

// strategyTable lists the strategies of this program.
var strategyTable = []Strategy{
	{"memlock", "process", InOrder, "memlock://", "one process: tests and examples"},
	{"filelock", "host", "none", "filelock:///var/lib/app/locks", "files; no server"},
	{"spinlock", "network", "none", "spinlock+redis://localhost:6379/0", "one Redis; polls"},
	{"pubsublock", "network", "none", "pubsublock+redis://localhost:6379/0",
		"one Redis; a release wakes the waiters; shares locks with Redisson"},
	{"fairlock", "network", InOrder, "fairlock+redis://localhost:6379/0",
		"one Redis; first come, first served"},
	{"redlock", "network", "usually arrival", "redlock+redis://host1:6379,host2:6379,host3:6379",
		"several Redis masters, of which a minority may fail"},
}

// describe returns the description of a strategy. If it has none, the result is the zero Strategy.
func describe(name string) Strategy {
	for _, s := range strategyTable {
		if s.Name == name {
			return s
		}
	}

	return Strategy{}
}

func (a *app) strategiesCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "strategies",
		Short: "List the strategies that --url can name",
		Long: `strategies lists the strategies that --url can name. The columns are:

  REACH   which programs share the locks: those in one process, those on one
          host, or those in a network that reach the same store
  ORDER   whether waiters get a key in their order of arrival, usually in that
          order, or in none
  URL     an example`,
		RunE: func(*cobra.Command, []string) error {
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "STRATEGY\tREACH\tORDER\tURL\tABOUT")
			for _, s := range strategyTable {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", s.Name, s.Reach, s.Order, s.URL, s.About)
			}
			return w.Flush()
		},
	}
}
