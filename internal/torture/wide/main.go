// Command wide measures locks whose servers and clients are far apart:
//
//	go run ./internal/torture/wide
//
// Each server and each of two client processes has a network namespace of its own, and a
// switch delays the packets between them. This needs Linux and root. One Redis has a client
// nearby and a client far away. Redlock has three masters in three regions, and its clients
// are in two of them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9/logging"

	_ "github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/torture/hosts"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

// near is the time there and back between hosts of one region.
const near = time.Millisecond

// distances are the times there and back that are measured.
var distances = []time.Duration{time.Millisecond, 10 * time.Millisecond, 80 * time.Millisecond}

// terms are the terms of leases that the far client keeps, in units of the distance.
var terms = []int{10, 15, 20, 30, 40}

func main() {
	if crew.Role() != "" {
		work(crew.Parent())
	}
	names := flag.String("strategy", "spinlock,pubsublock,fairlock,redlock", "comma-separated `names` of strategies")
	flag.Parse()
	if err := hosts.Apart(); err != nil {
		fmt.Fprintln(os.Stderr, "wide:", err)
		os.Exit(2)
	}
	logging.Disable()

	strategies := strings.Split(*names, ",")
	fmt.Print("| strategy | there and back | Lock | Unlock | hand-over to the far client | to the near client | holds of the far client |")
	for _, k := range terms {
		fmt.Printf(" lost of %d, term of %d× |", kept, k)
	}
	fmt.Println(" a lease and term: commands | bytes |")
	fmt.Println("|---|" + strings.Repeat("--:|", 8+len(terms)))
	rows := make([][]string, len(strategies))
	errs := make([]error, len(strategies))
	var wg sync.WaitGroup
	for i, strategy := range strategies {
		wg.Go(func() { rows[i], errs[i] = measureAll(strategy) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		fmt.Fprintln(os.Stderr, "wide:", err)
		os.Exit(2)
	}
	for _, some := range rows {
		fmt.Println(strings.Join(some, "\n"))
	}
}

// measureAll returns the rows of a strategy. Nearly all of its time is spent waiting, so all
// strategies are measured at once.
func measureAll(strategy string) (rows []string, err error) {
	for _, d := range distances {
		row, err := measure(strategy, d)
		if err != nil {
			return nil, fmt.Errorf("%s, %v: %w", strategy, d, err)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// world is some servers and two clients on hosts.
type world struct {
	*redistest.Lab
	net     *hosts.Net
	servers []*redistest.Server
	url     string
	clients [2]*crew.Process // the near one and the far one
}

// measure returns a row of the table.
func measure(strategy string, distance time.Duration) (row string, err error) {
	w := &world{Lab: &redistest.Lab{}}
	defer w.Close()
	err = w.Do(func() error {
		w.open(strategy, distance)
		row = w.row(strategy, distance)
		return nil
	})
	return row, err
}

// open makes the hosts. A host of a client is in the region of the server with its number, and
// all clients and servers of other regions are distant. The near client of one Redis is in
// the region of the server.
func (w *world) open(strategy string, distance time.Duration) {
	n, err := hosts.Start(1)
	w.Check(err)
	w.Cleanup(n.Close)
	w.net = n

	type place struct {
		host   *hosts.Host
		region int
	}
	var all []place
	add := func(region int) *hosts.Host {
		h, err := n.Host()
		w.Check(err)
		for _, p := range all {
			d := near
			if p.region != region {
				d = distance
			}
			n.Impose(hosts.Fault{Delay: d / 2}, hosts.Between([]*hosts.Host{h}, []*hosts.Host{p.host})...)
		}
		all = append(all, place{h, region})
		return h
	}

	servers, query := 1, ""
	if strategy == "redlock" {
		servers, query = 3, "?max_ttl=1m"
	}
	var addrs []string
	for i := range servers {
		s := redistest.Start(w.Lab, &redistest.Options{Own: true, Real: true, Where: func() (*redistest.Place, error) {
			h := add(i)
			return &redistest.Place{IP: h.Addr.String(), Do: h.Do}, nil
		}})
		w.servers, addrs = append(w.servers, s), append(addrs, s.Addr)
	}
	w.url = strategy + "+redis://" + strings.Join(addrs, ",") + "/0" + query
	for i := range w.clients {
		w.Check(add(i).Do(func() (err error) {
			w.clients[i], err = crew.Start("", "client")
			return err
		}))
		w.Cleanup(w.clients[i].End)
	}
}

// ask sends an order to some clients, and returns their replies.
func (w *world) ask(o order, clients ...*crew.Process) []reply {
	o.URL = w.url
	all := make([]reply, len(clients))
	for _, c := range clients {
		w.Check(c.Send(o))
	}
	for i, c := range clients {
		w.Check(c.Receive(&all[i]))
		if all[i].Err != "" {
			w.Fatal(all[i].Err)
		}
	}
	return all
}

func (w *world) row(strategy string, distance time.Duration) string {
	far := w.clients[1]
	lone := w.ask(order{Op: "lone", N: 40}, far)[0]
	var locks, unlocks []time.Duration
	for _, h := range lone.Holds {
		locks, unlocks = append(locks, time.Duration(h.Got-h.Asked)), append(unlocks, time.Duration(h.Freed-h.Ended))
	}

	both := w.ask(order{Op: "contend", For: 8 * time.Second}, w.clients[:]...)
	var gaps [2][]time.Duration // of hand-overs to a client from the other
	type turn struct {
		hold
		client int
	}
	var turns []turn
	for client, r := range both {
		for _, h := range r.Holds {
			turns = append(turns, turn{h, client})
		}
	}
	slices.SortFunc(turns, func(a, b turn) int { return int(a.Got - b.Got) })
	for i := 1; i < len(turns); i++ {
		if a, b := turns[i-1], turns[i]; a.client != b.client && b.Asked < a.Ended {
			gaps[b.client] = append(gaps[b.client], time.Duration(b.Got-a.Ended))
		}
	}

	row := []string{strategy, fmt.Sprint(distance), median(locks), median(unlocks), median(gaps[1]), median(gaps[0]),
		fmt.Sprintf("%d %%", 100*len(both[1].Holds)/max(len(turns), 1))}
	for _, k := range terms {
		lost := "–"
		if term := time.Duration(k) * distance; term >= leastTerm {
			lost = fmt.Sprint(w.ask(order{Op: "keep", TTL: term, For: 3 * term}, far)[0].Lost)
		}
		row = append(row, lost)
	}

	const term, periods = time.Second, 6
	commands, bytes := w.use()
	w.ask(order{Op: "keep", TTL: max(term, 30*distance), For: periods * max(term, 30*distance)}, far)
	after, sent := w.use()
	per := float64(kept * periods)
	row = append(row, fmt.Sprintf("%.1f", float64(after-commands)/per), fmt.Sprintf("%.0f", float64(sent-bytes)/per))
	return "| " + strings.Join(row, " | ") + " |"
}

// median returns the median and the longest of some times.
func median(all []time.Duration) string {
	if len(all) == 0 {
		return "–"
	}
	slices.Sort(all)
	ms := func(d time.Duration) string { return strconv.FormatFloat(float64(d)/1e6, 'f', 1, 64) }
	return ms(all[(len(all)-1)/2]) + " / " + ms(all[len(all)-1]) + " ms"
}

// use returns how many commands all servers have carried out, and how many bytes they have
// received and sent.
func (w *world) use() (commands, bytes int) {
	for _, s := range w.servers {
		info, err := s.Client().InfoMap(context.Background(), "stats").Result()
		w.Check(err)
		for name, sum := range map[string]*int{"total_commands_processed": &commands, "total_net_input_bytes": &bytes, "total_net_output_bytes": &bytes} {
			n, err := strconv.Atoi(info["Stats"][name])
			w.Check(err)
			*sum += n
		}
	}
	return commands, bytes
}
