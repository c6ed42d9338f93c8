package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// entry is a line of a history.
type entry struct {
	Run    string // options.name
	Client string `json:",omitempty"`
	report
}

const losingRun = ", losing"

// name returns the strategy, followed by losingRun if the faults take locks away.
func (o options) name() string { return o.strategy + strings.Repeat(losingRun, one(o.losing)) }

// write adds a line to the history. Each line is one write, so lines of two runs do not mix.
func (o options) write(client string, e report) {
	if o.history != nil {
		_ = json.NewEncoder(o.history).Encode(entry{o.name(), client, e})
	}
}

// replay checks a history again. It omits the promises about progress, leftovers and growth.
func replay(history io.Reader, out io.Writer) (kept bool, err error) {
	runs, procs := map[string]*nemesis{}, map[string]*proc{}
	for lines := json.NewDecoder(history); lines.More(); {
		var e entry
		if err := lines.Decode(&e); err != nil {
			return false, err
		}
		n, p := runs[e.Run], procs[e.Run+e.Client]
		if n == nil {
			var o options
			o.strategy, o.losing = strings.CutSuffix(e.Run, losingRun)
			n = &nemesis{run: &run{options: o, rec: newRecord(o)}}
			runs[e.Run] = n
		}
		if p == nil {
			p = &proc{}
			_, _ = fmt.Sscanf(e.Client, "client %d.%d", &p.seat, &p.gen)
			procs[e.Run+e.Client] = p
		}
		switch e.What {
		case lossy:
			n.losses = append(n.losses, [2]int64{e.T, e.End})
		case thinned:
			n.thinned = append(n.thinned, [2]int64{e.T, e.End})
		case died:
			n.rec.died(p, e.T)
		case used:
		default:
			n.rec.take(p, e.report)
		}
	}

	kept = len(runs) > 0
	for name, n := range runs {
		f := n.check()
		fmt.Fprintf(out, "%s: %d holds, %d times two callers at once, %d broken promises\n", name, f.Holds, f.Overlaps, len(n.wrong))
		for _, v := range n.wrong {
			fmt.Fprintf(out, "- **%s**: %s\n", v.promise, v.what)
		}
		kept = kept && len(n.wrong) == 0
	}
	return kept, nil
}
