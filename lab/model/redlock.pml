/*
 * redlock: three nodes, two clients, one key. README.md says what this shows and how to run it.
 *
 * Checked: two clients never have leases at the same time. A node's record never outlasts its
 * client's last term. With FENCES, each fence is larger than all earlier fences.
 *
 * Messages. A request, once sent, may reach a node at any later time, any number of times, or
 * never. So no channel is needed: a node may run each request that was ever sent. A reply is kept
 * in a field until the client reads it, at any later time or never. Votes of no are not kept,
 * because a client may give up at any time anyway.
 *
 * Time is an order of events. Each attempt and each renewal of a client begins a term, numbered
 * from 1. The event that ends a term also ends a lease that has no later term. After this event,
 * each node may forget a record with this term at any moment, or keep it. So a node never forgets a
 * record before the term has ended by the client's clock. The speed of clocks does not matter.
 *
 * Records of attempts that have ended are removed immediately. A record that stayed could only
 * refuse requests, and a refused request has the same effect as a late one. The queue of waiters
 * can also only refuse, so it is not modelled here: see queue.pml.
 *
 * Sizes: TERMS terms for client 0, TERMS1 for client 1, FAULTS faults in all.
 */

#ifndef TERMS
#define TERMS 2
#endif
#ifndef TERMS1
#define TERMS1 TERMS  /* the terms of client 1 */
#endif
#ifndef FAULTS
#define FAULTS 1
#endif

#define NODES 3
#define QUORUM 2

/* AT is the index of client c and node n in an array for all pairs. */
#define AT(c, n) ((c) * NODES + (n))
#define voteAt(c, n) vote[AT(c, n)]
#define markAt(c, n) voteMark[AT(c, n)]
#define sureAt(c, n) sure[AT(c, n)]

#define eachNode for (i : 0 .. NODES - 1)

/* Client. */
#define IDLE 0     /* no attempt */
#define ASKING 1   /* tryAcquire: the nodes vote */
#define RAISING 2  /* confirm: a quorum has voted yes, and is asked for the record, and stores the fence */
#define HOLDS 3    /* the caller has a lease */
byte state[2];
byte began[2];    /* the last term that has begun */
byte ended[2];    /* all terms up to this one have ended */
byte attempt[2];  /* the last attempt: the number of its first term */
byte until[2];    /* the term with which the lease ends */
byte fence[2];    /* the fence of the attempt that has won */
byte raised[2];   /* the nodes that have confirmed the attempt and stored its fence, as bits */
bool slow[2];     /* the votes of the attempt may be too old, so it must be confirmed */

/* The ballot of an attempt. A vote that is SENT has not been checked yet. */
#define NONE 0
#define SENT 1
#define YES 2
byte vote[2 * NODES];
byte voteMark[2 * NODES];  /* the mark of the vote; 0 if it does not name the voter's run */
byte proposal[2 * NODES];  /* the fence that the node proposes */
byte asked[2];  /* the nodes that have run the first command of a vote, and not the second, as bits */

byte sure[2 * NODES];  /* a node's record counts for renewals until this term ends */

/* The last renewal of a lease. */
byte renewal[2];    /* the term of the renewal, or 0 */
byte renewYes[2];   /* the nodes that had a record that counts, as bits */
byte unsure[2];     /* the nodes that had a record that does not count, as bits */
byte lost[2];       /* the nodes that had no record, as bits */
byte mended[2];     /* the nodes to which a repair has written the record, as bits */
bool confirmed[2];  /* a quorum is in renewYes, so the nodes in lost and unsure get a repair */

/* Node. */
byte records[NODES];  /* the client that has a record there, as a bit */
byte expires[2 * NODES];  /* the term of each record */
byte counter[NODES];  /* the fence counter */
byte mark[NODES];     /* 0 if there is none */
bool thisRun[NODES];  /* the mark names the run of the server that answers */

/* Marks are numbered in the order in which they are made. A set in use has mark 1, and a node with
 * mark 1 does not wait. A node with another mark waits until all terms that had begun when the mark
 * was made have ended. In the code such a node waits for max_ttl, the longest term. */
#define MARKS (2 + 3 * FAULTS)
byte marks;
byte waitsFor[2 * MARKS];  /* by mark and client, the last term that the mark waits for, or 0 */

#ifdef RECORD_PER_TOKEN
byte token[2];  /* the last term that began before the present token */
#endif

byte faults;
byte endsWith[2];  /* the answers to an attempt are too old with this term of the other client; 0 if none */
byte lastFence;  /* the largest fence of all leases so far */

byte i;  /* the index of loops; 0 between steps */

#define over(m) (waitsFor[2 * (m)] == 0 && waitsFor[2 * (m) + 1] == 0)
#define counted(m) ((m) != 0 && over(m))  /* a node with this mark has waited */
#define bit(mask, n) (((mask) >> (n)) & 1)
#define add(mask, n) mask = mask | (1 << (n))
#define remove(mask, n) mask = mask & ~(1 << (n))
#define has(c, n) bit(records[n], c)
#define quorumOf(mask) (bit(mask, 0) + bit(mask, 1) + bit(mask, 2) >= QUORUM)
#define holds(c) (state[c] == HOLDS)
#define trying(c) (state[c] == ASKING || state[c] == RAISING)
#define voted(c) ((voteAt(c, 0) == YES) + (voteAt(c, 1) == YES) + (voteAt(c, 2) == YES))
#define mayVote(n) (mark[n] != 0 && thisRun[n])

/* markOfVote is the mark that comes with a vote. */
#ifdef RUN_ELSEWHERE
#define markOfVote(n) mark[n]  /* the run is asked on a connection to the old server */
#else
#define markOfVote(n) (thisRun[n] -> mark[n] : 0)
#endif

/* counts says where a fence counts. */
#ifdef FENCE_ANYWHERE
#define counts(c, n) true
#else
#ifdef FORGETFUL_CONFIRM
#define counts(c, n) has(c, n)
#else
#define counts(c, n) (has(c, n) && counted(mark[n]))
#endif
#endif

/* mayHold says when a lease with a fence begins. */
#ifdef FENCE_NOT_STORED
#define mayHold(c) true
#else
#define mayHold(c) quorumOf(raised[c])
#endif

/* isSure says whether a record counts for a renewal. */
#ifdef RENEW_ANYWHERE
#define isSure(c, n) true
#else
#ifdef SURE_FOREVER
#define isSure(c, n) (sureAt(c, n) > 0)
#else
#define isSure(c, n) (sureAt(c, n) > ended[c])
#endif
#endif

/* enter writes a record. */
inline enter(c, n, term) {
	add(records[n], c);
	expires[AT(c, n)] = term
}

/* forget removes the record of a client. */
inline forget(c, n) {
	remove(records[n], c);
	expires[AT(c, n)] = 0
}

inline forgetAll(n) {
	forget(0, n);
	forget(1, n)
}

/* raise raises the fence counter of a node. */
inline raise(c, n) {
	if
	:: counter[n] < fence[c] -> counter[n] = fence[c]
	:: else
	fi
}

#define open(n) (records[n] == 0)
#define mayExpire(c, n) (has(c, n) && ended[c] >= expires[AT(c, n)])

/* clearBallot resets fields that are no longer needed, so that spin finds more states equal. */
inline clearBallot(c) {
	eachNode {
		voteAt(c, i) = NONE;
		markAt(c, i) = 0;
		proposal[AT(c, i)] = 0
	}
	i = 0;
	raised[c] = 0;
	asked[c] = 0
}

inline clearRenewal(c) {
	renewal[c] = 0;
	renewYes[c] = 0;
	unsure[c] = 0;
	lost[c] = 0;
	mended[c] = 0;
	confirmed[c] = false
}

/* becomesSure makes a record count for renewals after a repair. The code does this at least
 * attemptTime before the end of the record's term. The answers to an attempt may be that old when
 * it wins. So an attempt that the other client has in flight now ends before that, or asks again. */
inline becomesSure(c, n) {
	sureAt(c, n) = renewal[c];
#ifndef SURE_LATE
	if
	:: trying(1 - c) && endsWith[1 - c] == 0 -> endsWith[1 - c] = renewal[c]
	:: else
	fi
#endif
}

/* end ends an attempt, with or without a lease. Then its records may be released. */
inline end(c) {
#ifdef RECORD_PER_TOKEN
	if
	:: holds(c) -> token[c] = began[c]
	:: else
	fi;
#endif
	state[c] = IDLE;
	endsWith[c] = 0;
	until[c] = 0;
	fence[c] = 0;
	slow[c] = false;
	clearBallot(c);
#ifndef REPAIR_OVERWRITES
	clearRenewal(c);
#endif
	eachNode {
		sureAt(c, i) = 0;
		forget(c, i)
	}
	i = 0
}

/* hold begins a lease. */
inline hold(c) {
	printf("client %d: holds the key, fence %d\n", c, fence[c]);
	assert(state[1 - c] != HOLDS);  /* one holder */
#ifdef FENCES
#ifndef NOFENCECHECK
	assert(fence[c] > lastFence);  /* growing fences */
	lastFence = fence[c];
#endif
#endif
	state[c] = HOLDS;
	endsWith[c] = 0;
	slow[c] = false;
	until[c] = attempt[c];
	eachNode {
		if
		:: voteAt(c, i) == YES || (voteAt(c, i) == SENT && counted(markAt(c, i))) ->
			sureAt(c, i) = attempt[c]
		:: else
		fi
	}
	i = 0;
	clearBallot(c)
}

/* endTerm ends the next term of a client, and what must end with the term. */
inline endTerm(c, other) {
	ended[c]++;
	printf("time: term %d of client %d ends\n", ended[c], c);
	eachNode {
		assert(ended[c] < began[c] || ended[c] >= expires[AT(c, i)])  /* no record outlasts its term */
	}
	if
	:: endsWith[other] > 0 && ended[c] >= endsWith[other] ->
		endsWith[other] = 0;
#ifndef SLOW_WINS
		slow[other] = true;
		raised[other] = 0  /* these answers are too old as well */
#endif
	:: else
	fi;
#ifndef LATE_END
	if
	:: holds(c) && ended[c] >= until[c] -> end(c)
	:: trying(c) && ended[c] >= attempt[c] -> end(c)
	:: else
	fi;
#endif
	for (i : 0 .. MARKS - 1) {
		if
		:: waitsFor[2 * i + c] <= ended[c] -> waitsFor[2 * i + c] = 0
		:: else
		fi
	}
	i = 0
}

/* newMark gives a node a mark. If wait is true, the node waits for all terms that have begun. */
inline newMark(n, wait) {
	mark[n] = marks + 1;
	marks++;
	thisRun[n] = true;
	waitsFor[2 * marks] = (wait && ended[0] < began[0] -> began[0] : 0);
	waitsFor[2 * marks + 1] = (wait && ended[1] < began[1] -> began[1] : 0)
}

#define next(n) (((n) + 1) % NODES)
#ifdef VOTES_AT_ONCE
#define mustWait false
#else
#define mustWait true
#endif

/* refreshMark finds out whether the set is new, and then stands for mark.lua. A set is new if a
 * majority answers and no node that answers has a mark. Spin chooses freely which nodes answer, so
 * a second node without a mark is enough. */
inline refreshMark(n) {
	if
	:: mark[n] == 0 && mark[next(n)] == 0 ->
		newMark(next(n), false);
		newMark(n, false)
	:: mark[n] == 0 && mark[next(n)] != 0 && mark[next(next(n))] == 0 ->
		newMark(next(next(n)), false);
		newMark(n, false)
	:: else -> newMark(n, mustWait)
	fi
}

/* countable says whether checkVote may check a vote now. */
#define countable(c, n) (voteAt(c, n) == SENT && (markAt(c, n) == 0 || over(markAt(c, n))))
#ifdef WAITS_FOR_REPLY
#define waited(m) true  /* the wait counts when the reply is read */
#else
#define waited(m) over(m)
#endif

/* checkVote checks a vote. A vote with a mark of the voter's own run counts when the wait of that
 * mark is over. Any other vote needs a mark first, and then the record must still be there. */
inline checkVote(c, n) {
	printf("client %d: checks the vote of node %d\n", c, n);
	if
	:: markAt(c, n) == 0 && !mayVote(n) -> refreshMark(n)
	:: else
	fi;
	if
	:: markAt(c, n) != 0 -> voteAt(c, n) = YES; markAt(c, n) = 0
	:: markAt(c, n) == 0 && has(c, n) && waited(mark[n]) -> markAt(c, n) = mark[n]
	:: else -> voteAt(c, n) = NONE
	fi
}

/* mayCount says whether the wait of the node is over when it is asked. The vote of a node that still
 * waits never counts, however late its reply is read. */
#define mayCount(n) (markOfVote(n) == 0 || waited(markOfVote(n)))

/* sendVote sends the vote of a node, with its mark. */
inline sendVote(c, n) {
	if
	:: holds(c) && counted(markOfVote(n)) && sureAt(c, n) < attempt[c] ->
		sureAt(c, n) = attempt[c]  /* a late vote */
	:: state[c] == ASKING && voteAt(c, n) == NONE && mayCount(n) ->
		voteAt(c, n) = SENT;
		markAt(c, n) = markOfVote(n);
#ifdef FENCES
		proposal[AT(c, n)] = counter[n] + 1
#endif
	:: else
	fi
}

#define terms(c) (c == 0 -> TERMS : TERMS1)
#define mayBegin(c) (state[c] == IDLE && began[c] < terms(c) && (c == 0 || began[0] > 0))
inline begin(c) {
	began[c]++;
	attempt[c] = began[c];
	state[c] = ASKING;
	clearRenewal(c)
}

proctype Client(byte c) {
	do
	/* Acquire, or the next attempt of a Wait. Clients are alike, so client 0 begins first. */
	:: d_step { mayBegin(c) ->
		begin(c);
		printf("client %d: asks all nodes, attempt %d\n", c, attempt[c])
	}
	:: d_step { state[c] == ASKING && voted(c) >= QUORUM && ended[c] < attempt[c] ->
		printf("client %d: has a quorum of votes\n", c);
#ifdef FENCES
		eachNode {
			if
			:: voteAt(c, i) == YES && proposal[AT(c, i)] > fence[c] -> fence[c] = proposal[AT(c, i)]
			:: else
			fi
		}
		i = 0;
		state[c] = RAISING
#else
		if
		:: slow[c] ->
			printf("client %d: asks again\n", c);
			state[c] = RAISING
		:: else -> hold(c)
		fi
#endif
	}
	:: d_step { state[c] == RAISING && mayHold(c) && ended[c] < attempt[c] -> hold(c) }
	/* The attempt is refused, or its caller leaves, or it takes too long. */
	:: d_step { trying(c) ->
		printf("client %d: gives up\n", c);
		end(c)
	}
	/* Unlock. */
	:: d_step { holds(c) ->
		printf("client %d: unlocks\n", c);
		end(c)
	}
	/* Renew. */
	:: d_step { holds(c) && began[c] < terms(c) ->
		began[c]++;
		clearRenewal(c);
		renewal[c] = began[c];
		printf("client %d: renews, term %d\n", c, renewal[c])
	}
	/* A quorum has renewed the lease. A lease that has ended is never renewed. */
	:: d_step { holds(c) && renewal[c] > until[c] && quorumOf(renewYes[c]) ->
		until[c] = renewal[c];
		confirmed[c] = true;
		printf("client %d: is renewed\n", c)
	}
	od
}

/* Link runs the requests of client c at node n, and checks its votes. The other steps are scripts. */
proctype Link(byte c; byte n) {
	do
	:: d_step { state[c] == ASKING && countable(c, n) -> checkVote(c, n) }
#ifdef FENCES
	/* acquire.lua. */
	:: d_step { (trying(c) || holds(c)) && open(n) ->
		printf("node %d: votes for client %d, attempt %d\n", n, c, attempt[c]);
		enter(c, n, attempt[c]);
		sendVote(c, n)
	}
#else
#ifdef MARK_FIRST
	:: d_step { state[c] == ASKING && voteAt(c, n) == NONE && !bit(asked[c], n) && mayCount(n) ->
		printf("node %d: GET of the mark for client %d, attempt %d\n", n, c, attempt[c]);
		markAt(c, n) = markOfVote(n);
		add(asked[c], n)
	}
	:: d_step { state[c] == ASKING && bit(asked[c], n) && open(n) ->
		printf("node %d: SET for client %d, attempt %d\n", n, c, attempt[c]);
		enter(c, n, attempt[c]);
		voteAt(c, n) = SENT;
		remove(asked[c], n)
	}
#else
	/* SET NX, and GET of the mark on the same connection, whose server is known. A script that does
	 * both at once, on the lead, can do no more than that. The two are one step if
	 * the client has a lease already, because a loss between them is like one after both; and if no
	 * fault is left, unless the node has no mark yet. */
	:: d_step { (state[c] == ASKING || holds(c)) && open(n) ->
		printf("node %d: SET for client %d, attempt %d\n", n, c, attempt[c]);
		enter(c, n, attempt[c]);
		if
		:: holds(c) || faults == FAULTS && mark[n] != 0 -> sendVote(c, n)
		:: state[c] == ASKING && (faults < FAULTS || mark[n] == 0) && voteAt(c, n) == NONE && mayCount(n) ->
			add(asked[c], n)
		:: else
		fi
	}
	:: d_step { bit(asked[c], n) ->
		printf("node %d: GET of the mark for client %d, attempt %d\n", n, c, attempt[c]);
		remove(asked[c], n);
		sendVote(c, n)
	}
#endif
#endif
	/* The term of the record ends on the node. */
	:: d_step { mayExpire(c, n) ->
		printf("node %d: the record of client %d expires\n", n, c);
		forget(c, n)
	}
	/* renew.lua without a term. The answer counts only where the attempt has its record, and the
	 * mark does not make the node wait. */
	:: d_step { state[c] == RAISING && !bit(raised[c], n) && (counter[n] < fence[c] || counts(c, n)) ->
		printf("node %d: confirms client %d, fence %d\n", n, c, fence[c]);
		raise(c, n);
		if
		:: counts(c, n) -> add(raised[c], n)
		:: else
		fi
	}
	/* renew.lua. It also raises the counter, whether or not the record is there. */
	:: d_step { holds(c) && renewal[c] > 0 && !bit(renewYes[c] | unsure[c] | lost[c] | mended[c], n) ->
		raise(c, n);
		if
		:: has(c, n) ->
			printf("node %d: renews the record of client %d\n", n, c);
			if
			:: isSure(c, n) ->
				add(renewYes[c], n);
				sureAt(c, n) = renewal[c];
				enter(c, n, renewal[c])
			:: else -> add(unsure[c], n)
			fi
		:: else ->
			printf("node %d: has no record of client %d to renew\n", n, c);
			add(lost[c], n);
			sureAt(c, n) = 0
		fi
	}
	/* repair.lua. */
	:: d_step { holds(c) && confirmed[c] && bit(lost[c] | unsure[c], n) && ended[c] < renewal[c] && (has(c, n) || open(n)) ->
		printf("node %d: repairs the record of client %d\n", n, c);
		enter(c, n, renewal[c]);
		remove(lost[c], n);
		remove(unsure[c], n);
		add(mended[c], n)
	}
	/* The record counts from the next renewal on. */
	:: d_step { holds(c) && confirmed[c] && bit(mended[c], n) && ended[c] < renewal[c] ->
		printf("node %d: its record of client %d is sure\n", n, c);
		remove(mended[c], n);
		becomesSure(c, n)
	}
#ifdef REPAIR_OVERWRITES
	/* The repair of a lease that has ended arrives late, and writes over another record. */
	:: d_step { state[c] == IDLE && confirmed[c] && bit(lost[c], n) && ended[c] < renewal[c] && has(1 - c, n) ->
		printf("node %d: a late repair for client %d replaces the record of client %d\n", n, c, 1 - c);
		forgetAll(n)
	}
#endif
#ifdef RELEASE_ANY
	/* The release of an attempt that has ended does not compare the token. */
	:: d_step { (state[c] == IDLE && attempt[c] > 0 || attempt[c] > 1) && records[n] != 0 ->
		printf("node %d: a release of client %d removes the record\n", n, c);
		forgetAll(n)
	}
#endif
#ifdef RECORD_PER_TOKEN
	/* The clean-up of an earlier attempt with the same token removes the record of this attempt. */
	:: d_step { state[c] != IDLE && attempt[c] > token[c] + 1 && has(c, n) ->
		printf("node %d: the clean-up of an earlier attempt removes the record of client %d\n", n, c);
		forget(c, n)
	}
#endif
	/* A refusal or a renewal finds no mark, or a driver uses the node for the first time. */
	:: d_step { !mayVote(n) ->
		printf("client %d: asks node %d for its mark\n", c, n);
		refreshMark(n)
	}
	od
}

/* Time ends terms. */
proctype Time(byte c; byte other) {
	do
	:: d_step { ended[c] < began[c] -> endTerm(c, other) }
#ifdef LATE_END
	:: d_step { holds(c) && ended[c] >= until[c] -> end(c) }
#endif
	od
}

inline lose(n) {
	forgetAll(n);
	counter[n] = 0;
	faults++
}

/* A node loses its records. (A node that is down for a while and keeps them is only late.) Nodes
 * are alike, so the first fault hits node 0, and the second one node 0 or 1. Between faults,
 * operators wait until the other nodes vote. */
#define ready(n) (thisRun[n] && counted(mark[n]))
#ifdef QUICK_RESTARTS
#define mayFail(n) (n == 0 || faults > 0)
#else
#define mayFail(n) ((n == 0 || faults > 0) && ready(next(n)) && ready(next(next(n))))
#endif
proctype Faults(byte n) {
	do
	/* The server restarts without its data, or loses it by FLUSHALL. */
	:: d_step { faults < FAULTS && mayFail(n) ->
		printf("fault: node %d loses its data\n", n);
		lose(n);
		mark[n] = 0;
		thisRun[n] = false
	}
	/* A replica takes over the address. It has the mark, and lacks the newest record. */
	:: d_step { faults < FAULTS && mayFail(n) && mayVote(n) ->
		printf("fault: a replica takes over as node %d\n", n);
		lose(n);
		thisRun[n] = false
	}
#ifdef MARKS_EXPIRE
	:: d_step { faults == FAULTS && mark[n] == 1 ->
		printf("fault: the mark of node %d expires\n", n);
		mark[n] = 0;
		thisRun[n] = false
	}
#endif
	od
}

init {
	d_step {
		eachNode {
			mark[i] = 1;
			thisRun[i] = true
		}
		i = 0;
		marks = 1
	}
	atomic {
		run Time(0, 1);
		run Time(1, 0);
		run Faults(0);
		run Faults(1);
		eachNode {
			run Link(0, i);
			run Link(1, i)
		}
		i = 0;
		run Client(0);
		run Client(1)
	}
}
