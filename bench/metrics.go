package main

// metric is a column.
type metric struct {
	name   string
	title  string
	spread bool // is shown, too
	lower  bool // is better
	rival  bool // counts in the summary
	ofBare bool // is followed by the ratio to what is bare
	grows  bool // is looked at over keys, waiters or leases
}

// metrics are the columns of each scenario.
var metrics = map[string][]metric{
	uncontended: {
		{name: "pairs_per_s", title: "pairs/s", spread: true, rival: true, ofBare: true},
		{name: "p50_us", title: "p50 µs", spread: true, lower: true},
		{name: "p99_us", title: "p99 µs", spread: true, lower: true, rival: true},
		{name: "stuck", title: "stuck", lower: true},
		{name: "allocs_per_pair", title: "allocs", lower: true, rival: true, grows: true},
		{name: "commands_per_pair", title: "commands", lower: true, grows: true},
		{name: "scripts_per_pair", title: "scripts", lower: true},
		{name: "bytes_per_pair", title: "bytes", lower: true, grows: true},
		{name: "client_cpu_s_per_100k", title: "client CPU s/100k", lower: true, rival: true, grows: true},
		{name: "server_cpu_s_per_100k", title: "server CPU s/100k", lower: true, grows: true},
	},
	contended: {
		{name: "acquisitions_per_s", title: "acquisitions/s", spread: true, rival: true, ofBare: true},
		{name: "holders_per_s", title: "changes of holder/s", spread: true, rival: true},
		{name: "changes_per_s", title: "changes of process/s", spread: true, rival: true},
		{name: "handover_p50_us", title: "hand-over p50 µs", lower: true, ofBare: true},
		{name: "handover_p99_us", title: "p99 µs", lower: true},
		{name: "between_p50_us", title: "between processes p50 µs", spread: true, lower: true, rival: true, ofBare: true},
		{name: "between_p99_us", title: "p99 µs", lower: true},
		{name: "commands_per_lock", title: "commands", lower: true, rival: true, grows: true},
		{name: "scripts_per_lock", title: "scripts", lower: true, grows: true},
		{name: "server_cpu_s_per_100k", title: "server CPU s/100k", lower: true, grows: true},
		{name: "longest_wait_ms", title: "longest wait ms", lower: true, rival: true, grows: true},
		{name: "share_least", title: "least share"},
		{name: "share_most", title: "most", lower: true},
		{name: "share_ratio", title: "most/least", lower: true},
		{name: "share_none", title: "had nothing", lower: true},
		{name: "overlaps", title: "two at once", lower: true},
		{name: "refused", title: "errors", lower: true},
	},
	leases: {
		{name: "term_s", title: "term s"},
		{name: "renewals_per_s", title: "renewals/s", spread: true},
		{name: "client_core_percent", title: "client, % of a core", spread: true, lower: true},
		{name: "client_keeping_percent", title: "client, for the leases alone", spread: true, lower: true, rival: true, grows: true},
		{name: "server_core_percent", title: "server, % of a core", spread: true, lower: true},
		{name: "server_keeping_percent", title: "server, for the leases alone", spread: true, lower: true, grows: true},
		{name: "goroutines", title: "goroutines", lower: true, rival: true, grows: true},
		{name: "client_bytes_per_lease", title: "client bytes/lease", lower: true, grows: true},
		{name: "server_bytes_per_lease", title: "server bytes/lease", lower: true, grows: true},
		{name: "lost", title: "lost", lower: true},
		{name: "p50_us", title: "a lone pair p50 µs", spread: true, lower: true, grows: true},
		{name: "p99_us", title: "p99 µs", lower: true, rival: true, grows: true},
		{name: "lock_p99_us", title: "its Lock p99 µs", spread: true, lower: true},
		{name: "alone_lock_p99_us", title: "without leases", lower: true},
	},
	masters: {
		{name: "healthy_lock_p50_ms", title: "lock, all healthy, p50 ms", lower: true},
		{name: "lock_p50_ms", title: "lock p50 ms", spread: true, lower: true, rival: true, ofBare: true},
		{name: "lock_p99_ms", title: "p99 ms", lower: true},
		{name: "unlock_p50_ms", title: "unlock p50 ms", spread: true, lower: true, rival: true, ofBare: true},
		{name: "unlock_p99_ms", title: "p99 ms", lower: true},
		{name: "pairs", title: "pairs"},
		{name: "orphans_per_100", title: "orphan keys/100 pairs", spread: true, lower: true, rival: true},
	},
}

// abouts say what a scenario is.
var abouts = map[string]string{
	uncontended: "Each caller locks and unlocks keys that nobody else wants; a pair is a Lock and an Unlock. Commands are those that the server counts, inside scripts, too; bytes go both ways. " +
		"In each round a contestant has several short turns. " +
		"*Stuck* are callers who still waited for a key of their own a second after the end. *Of bare* compares with `bare`, here and below with `bare-quorum` for five nodes, and for one key with `bare-publish`.",
	contended: "All callers want one key, again as soon as they have given it back. A hand-over is from the moment before Unlock until the next caller has the key who waited for it then; " +
		"`bare-publish` is a message that goes round by a script that publishes it. " +
		"Of those who poll only the lucky count there: who came upon the key before its last holder had it again. A change of holder is to another caller, a change of process to one of another process. Shares are acquisitions per caller in the time measured, which is short. " +
		"*Two at once* counts holds that began before the one before had ended; *errors* are those of an Unlock by the holder, or of a Lock with time left.",
	leases: "Leases are held, and renewed by the library, while a lone caller locks and unlocks a key up to 100 times a second. " +
		"*For the leases alone* is less what the lone caller cost in the moments before, when no lease was held; the table without leases shows how far off that may be. " +
		"Bytes of the client are heap and stacks. Of an unreachable node, nothing arrives and nothing comes back; renewals and the server's share are those of the other four. " +
		"etcd renews a session, whatever the number of its locks. " +
		"Contestants that are not listed do not renew by themselves.",
	masters: "One caller, five masters; each pair on a key of its own. Orphans are keys on any node that nobody holds, a second and a half after the last pair.",
}
