/*
 * queue: redlock's queue of waiters. README.md says what this shows and how to run it.
 *
 * Checked: no caller waits for ever. Each client that lives gets the key, or leaves, TIMES times,
 * and then the model ends. A wait that cannot go on is an invalid end state. With ANY_QUEUE the
 * queue gives any answer, and only this is checked: the key has at most one holder.
 *
 * A look is a waiter's next attempt. It may happen at any moment. A look that changes nothing is
 * not a step. So a state in which only such looks are left is an end state, and an error. The model
 * does not check how often waiters look, or that rivals with different leads stop splitting the
 * votes.
 *
 * Nodes do not lose data here; redlock.pml is about that. Limits: LOSSES messages and runs of
 * leave.lua are lost or late, DEAD clients die, LEAVES callers leave. MOVES times, a client sees
 * another lead, or does not ask its lead first. The first DOWN nodes may stop.
 */

#ifndef CLIENTS
#define CLIENTS 2
#endif
#ifndef TIMES
#define TIMES 2
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef DEAD
#define DEAD 0
#endif
#ifndef MOVES
#define MOVES 1
#endif
#ifndef DOWN
#define DOWN 0
#endif
#ifndef LEAVES
#define LEAVES 1
#endif

#define NODES 3
#define QUORUM 2
#define NOBODY CLIENTS
#define eachClient for (i : 0 .. CLIENTS - 1)

/* Client. Each call is a Wait; its first attempt may also stand for an Acquire. */
#define IDLE 0
#define ASKS_LEAD 1  /* askLead */
#define ASKS_ALL 2
#define WAITS 3      /* sleep */
#define HOLDS 4
#define GONE 5       /* the process is stopped */
byte state[CLIENTS];
byte times[CLIENTS];
byte lead[CLIENTS];       /* the node that the last attempt has asked first */
byte since[CLIENTS];      /* the waiter's number in the order of arrival */
bool woken[CLIENTS];      /* a message has woken the waiter since its last look */
byte asked[CLIENTS];      /* the nodes that have answered the attempt, as bits */
byte yes[CLIENTS];        /* the nodes that have voted yes */
byte releasing[CLIENTS];  /* the nodes that must still release a record of an earlier attempt */
byte wakes[CLIENTS];      /* the nodes in releasing whose release wakes the first waiter */

/* Node. */
byte record[NODES];  /* the client whose record is there */
byte places[NODES];  /* the waiters in the queue, as bits */
bool stale[NODES];   /* a waiter that has died or left still has a place, before all others */
bool down[NODES];

byte arrivals;
byte losses;
byte dead;
byte moves;
byte leaves;
byte i;
byte head;  /* the waiter to wake; NOBODY between steps */

#define leader lead[c]  /* the lead of the client c */
#define bit(mask, n) (((mask) >> (n)) & 1)
#define add(mask, n) mask = mask | (1 << (n))
#define remove(mask, n) mask = mask & ~(1 << (n))
#define quorumOf(mask) (bit(mask, 0) + bit(mask, 1) + bit(mask, 2) >= QUORUM)
#define queued(c, n) bit(places[n], c)
#define before(o, c, n) (o < CLIENTS && o != c && queued(o, n) && since[o] < since[c])
#if CLIENTS == 2
#define first(c, n) (!stale[n] && !before(0, c, n) && !before(1, c, n))
#else
#define first(c, n) (!stale[n] && !before(0, c, n) && !before(1, c, n) && !before(2, c, n))
#endif
#define free(n) (record[n] == NOBODY)

/* useful says whether a look changes anything. */
#define useful(c) (down[leader] || !queued(c, leader) || free(leader) && first(c, leader))

/* The broken variants. */
#ifdef NO_LOOKS
#define looks(c) !queued(c, leader)  /* a waiter in the queue looks only when it is woken */
#else
#define looks(c) useful(c)
#endif
#ifdef PLACES_STAY
#define ends(n) false
#else
#define ends(n) stale[n]
#endif
#ifdef LEAVES_SILENTLY
#define wakesNext(n) false
#else
#define wakesNext(n) free(n)
#endif
#ifdef ANY_QUEUE
#define says(c, n) true  /* it may say that c is first */
#define saysNot(c, n) true
#else
#define says(c, n) first(c, n)
#define saysNot(c, n) !first(c, n)
#endif
#ifdef QUEUE_VOTES
#define takes(n) true  /* the first waiter gets the lead's vote although the key is held */
#else
#define takes(n) free(n)
#endif

/* wake is the function of turns.lua. If the first place in the queue belongs to a
 * waiter that is gone, the message wakes nobody. */
inline wake(n) {
	head = NOBODY;
	eachClient {
		if
		:: !stale[n] && queued(i, n) && (head == NOBODY || since[i] < since[head]) -> head = i
		:: else
		fi
	}
	i = 0;
	if
	:: head != NOBODY -> woken[head] = true; printf("node %d: wakes client %d\n", n, head)
	:: head != NOBODY && losses < LOSSES -> losses++; printf("node %d: the message for client %d is lost\n", n, head)
	:: head == NOBODY
	fi;
	head = NOBODY
}

/* leave is leave.lua. The place stays if leave.lua is lost or late, or if a request arrives after
 * it. */
inline leave(c, n) {
	if
	:: queued(c, n) && !down[n] ->
		remove(places[n], c);
		if
		:: wakesNext(n) -> wake(n)
		:: !wakesNext(n)
		:: losses < LOSSES -> losses++; stale[n] = true
		fi
	:: !queued(c, n) && !down[n] && state[c] == ASKS_LEAD && losses < LOSSES -> losses++; stale[n] = true
	:: !queued(c, n) || down[n]
	fi
}

/* cleanUp releases the votes of an attempt. The release on the lead wakes the first waiter of its
 * queue. */
inline cleanUp(c) {
	releasing[c] = releasing[c] | yes[c];
	wakes[c] = wakes[c] & ~yes[c] | yes[c] & (1 << leader);
	yes[c] = 0;
	asked[c] = 0
}

inline endCall(c) {
	state[c] = IDLE;
	times[c]++;
	since[c] = 0;
	woken[c] = false
}

/* look begins an attempt, with the lead that the client sees. */
inline look(c, n) {
	printf("client %d: looks, with node %d as its lead\n", c, n);
	if
	:: leader != n -> leave(c, leader)
	:: else
	fi;
	leader = n;
	woken[c] = false;
	state[c] = ASKS_LEAD
}

proctype Client(byte c) {
	do
	:: d_step { state[c] == IDLE && times[c] < TIMES ->
		arrivals++;
		since[c] = arrivals;
		state[c] = WAITS;
		printf("client %d: calls\n", c)
	}
	:: atomic { state[c] == WAITS && (woken[c] || looks(c)) ->
		if
		:: !down[leader] -> look(c, leader)
		:: down[leader] -> look(c, 1 - leader)  /* another node leads for this client */
		fi
	}
	:: atomic { state[c] == WAITS && moves < MOVES && !down[1 - leader] -> moves++; look(c, 1 - leader) }
	/* A client that has met no rival asks all nodes, without asking its lead first. */
	:: d_step { state[c] == ASKS_LEAD && !queued(c, leader) && moves < MOVES -> moves++; state[c] = ASKS_ALL }
	/* The lead does not answer. */
	:: d_step { state[c] == ASKS_LEAD && down[leader] -> state[c] = ASKS_ALL }
	/* queue.lua. */
	:: d_step { state[c] == ASKS_LEAD && !down[leader] && takes(leader) && says(c, leader) ->
		printf("node %d: as the lead, votes for client %d\n", leader, c);
		remove(places[leader], c);
		record[leader] = c;
		yes[c] = 1 << leader;
		asked[c] = yes[c];
		state[c] = ASKS_ALL
	}
	:: d_step { state[c] == ASKS_LEAD && !down[leader] && (!takes(leader) || saysNot(c, leader)) ->
		printf("node %d: as the lead, refuses client %d\n", leader, c);
		add(places[leader], c);
		state[c] = WAITS
	}
	:: d_step { state[c] == ASKS_ALL && quorumOf(yes[c]) ->
		printf("client %d: holds the key\n", c);
		eachClient { assert(state[i] != HOLDS) }  /* one holder */
		i = 0;
		asked[c] = 0;
		state[c] = HOLDS
	}
	:: d_step { state[c] == ASKS_ALL && asked[c] == 7 && !quorumOf(yes[c]) ->
		printf("client %d: is refused\n", c);
		cleanUp(c);
		state[c] = WAITS
	}
	/* Unlock. The releases wake the first waiter of each node. */
	:: d_step { state[c] == HOLDS ->
		printf("client %d: unlocks\n", c);
		releasing[c] = releasing[c] | yes[c];
		wakes[c] = wakes[c] | yes[c];
		yes[c] = 0;
		endCall(c)
	}
	:: atomic { leaves < LEAVES && state[c] >= ASKS_LEAD && state[c] <= WAITS ->
		printf("client %d: leaves\n", c);
		leaves++;
		leave(c, leader);
		cleanUp(c);
		endCall(c)
	}
	:: d_step { state[c] != IDLE && dead < DEAD ->
		printf("client %d: dies\n", c);
		dead++;
		if
		:: queued(c, leader) -> stale[leader] = true; remove(places[leader], c)
		:: else
		fi;
		state[c] = GONE;
		yes[c] = 0;
		asked[c] = 0;
		releasing[c] = 0;
		wakes[c] = 0;
		woken[c] = false
	}
	:: state[c] == GONE || state[c] == IDLE && times[c] == TIMES -> break
	od
}

/* Link runs the other requests of client c at node n. */
proctype Link(byte c; byte n) {
end:	do
	/* acquire.lua, or SET NX. */
	:: d_step { state[c] == ASKS_ALL && !bit(asked[c], n) ->
		if
		:: free(n) && !down[n] ->
			printf("node %d: votes for client %d\n", n, c);
			record[n] = c;
			add(yes[c], n)
		:: else
		fi;
		add(asked[c], n)
	}
	/* release.lua. */
	:: atomic { bit(releasing[c], n) ->
		printf("node %d: releases the record of client %d\n", n, c);
		remove(releasing[c], n);
		record[n] = NOBODY;
		if
		:: bit(wakes[c], n) && !down[n] -> wake(n)
		:: else
		fi;
		remove(wakes[c], n)
	}
	/* The term of a client that has died ends. This wakes no waiter. */
	:: d_step { state[c] == GONE && record[n] == c -> record[n] = NOBODY }
	od
}

proctype Node(byte n) {
end:	do
	/* A waiter that has not looked for a second counts as gone. */
	:: d_step { ends(n) -> stale[n] = false }
	:: d_step { n < DOWN && !down[n] ->
		printf("node %d: stops\n", n);
		down[n] = true;
		places[n] = 0;
		stale[n] = false
	}
	od
}

init {
	d_step {
		for (i : 0 .. NODES - 1) { record[i] = NOBODY }
		i = 0;
		head = NOBODY
	}
	atomic {
		for (i : 0 .. NODES - 1) { run Node(i) }
		eachClient {
			run Client(i);
			run Link(i, 0);
			run Link(i, 1);
			run Link(i, 2)
		}
		i = 0
	}
}
