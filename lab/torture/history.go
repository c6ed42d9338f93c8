package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// entry is a line of a history.
type entry struct {
	Strategy string
	Losing   bool   `json:",omitempty"`
	Client   string `json:",omitempty"`
	report
}

// write adds a line to the history. Each line is one write, so lines of two runs do not mix.
func (o options) write(client string, e report) {
	if o.history != nil {
		_ = json.NewEncoder(o.history).Encode(entry{o.strategy, o.losing, client, e})
	}
}

// replay checks the runs of a history again, for all promises but progress, leftovers and growth.
func replay(history io.Reader, out io.Writer) (kept bool, err error) {
	var all []*nemesis
	runs, procs := map[entry]*nemesis{}, map[entry]*proc{} // by strategy and losing, and by client
	for lines := json.NewDecoder(history); lines.More(); {
		var e entry
		if err := lines.Decode(&e); err != nil {
			return false, err
		}
		of, from := entry{Strategy: e.Strategy, Losing: e.Losing}, entry{e.Strategy, e.Losing, e.Client, report{}}
		if runs[of] == nil {
			o := options{strategy: e.Strategy, losing: e.Losing}
			runs[of] = &nemesis{run: &run{options: o, rec: newRecord(o)}}
			all = append(all, runs[of])
		}
		if procs[from] == nil {
			procs[from] = &proc{}
			_, _ = fmt.Sscanf(e.Client, "client %d.%d", &procs[from].seat, &procs[from].gen)
		}
		switch n, p := runs[of], procs[from]; e.What {
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
	if len(all) == 0 {
		return false, errors.New("the history has no run")
	}

	kept = true
	for _, n := range all {
		f := n.check()
		fmt.Fprintf(out, "%s, faults that take locks away: %v: %d holds, %d times two callers at once, %d broken promises\n",
			n.strategy, n.losing, f.Holds, f.Overlaps, len(n.wrong))
		for _, v := range n.wrong {
			fmt.Fprintf(out, "- **%s**: %s\n", v.promise, v.what)
		}
		kept = kept && len(n.wrong) == 0
	}
	return kept, nil
}
