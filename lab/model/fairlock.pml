/*
 * fairlock: one Redis, and clients that wait for one key. README.md says what this shows and how
 * to run it.
 *
 * Checked without PROGRESS: two clients never have a lease at the same time. A message about a
 * hand-over may come at any later time, any number of times, or never. Replies may be lost or late.
 * A record may expire at any time, and a client may count as dead at any time.
 *
 * Checked with PROGRESS: no place is lost. Each client that lives gets the key TIMES times, and
 * then the model ends. A wait that cannot go on is an invalid end state. DEAD clients stop while
 * they wait. LOSSES messages and replies are lost.
 *
 * Time is an order of events. A client numbers its calls. A record notes how many calls its client
 * had sent when the record was written. The holder counts its term from the call notBefore. When a
 * record expires, the terms of all calls that were sent before the record was written have ended
 * (over). So a lease that counts from one of these calls has ended as well.
 */

#ifndef CLIENTS
#define CLIENTS 2
#endif
#ifndef CALLS
#define CALLS 4   /* calls for each client, without PROGRESS */
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
#define ROUNDS CALLS
#define NOBODY CLIENTS

/* Client. A claim begins only when the client's previous claim has left nothing in the store. */
#define IDLE 0
#define ASKS 1     /* an enqueue is to be sent, or in flight */
#define QUEUED 2   /* the store has confirmed the place */
#define HANDED 3   /* a message or a reply has announced the hold */
#define HOLDS 4
#define GONE 5     /* the process is stopped */
byte state[CLIENTS];
byte first[CLIENTS];      /* the first round of the present claim */
byte round[CLIENTS];      /* 0 without a claim */
byte calls[CLIENTS];      /* how many calls the client has sent */
byte over[CLIENTS];       /* terms counted from calls up to this one have ended */
byte notBefore[CLIENTS];  /* the call from which the term counts; 0 if there is none */
bool unsure[CLIENTS];     /* an enqueue of this round was not answered, so messages do not count */
byte sent[CLIENTS];       /* the call of an enqueue or a poll in flight, or 0 */
byte reply[CLIENTS];
#define NONE 0
#define PLACE 1   /* the token is in the queue */
#define MINE 2    /* the token holds the key */
#define GIVEN 3   /* this call itself has handed the key over */
#define LOST 4    /* a poll has not found the place */

/* Store. An entry of the queue is a client; its round is in inRound. Its place is its index. */
byte holder = NOBODY;
byte held;                /* the first round of the claim that holds the key */
byte since;               /* how many calls the holder had sent when the record was written */
byte queue[CLIENTS];
byte length;
byte inRound[CLIENTS];    /* the round of the entry; 0 if the client has none */
bool alive[CLIENTS];      /* the client's places count as alive */
bool told[CLIENTS * (ROUNDS + 1)];  /* the message about the hand-over in this round was published */
byte losses;
byte dead;
byte i;  /* the index of loops; 0 between steps */
byte times[CLIENTS];

#define ROUND(c, r) ((c) * (ROUNDS + 1) + (r))
#define max(a, b) ((a) > (b) -> (a) : (b))
#ifdef PROGRESS
#define maySend(c) true
#define mayWait(c) (times[c] < TIMES)
#define useful(c) (holder == NOBODY || holder == c || inRound[c] == 0)
#define mayExpire (state[holder] == GONE || state[holder] == QUEUED && sent[holder] == 0 && !told[ROUND(holder, round[holder])])
#define mayDie(c) (state[c] == GONE)
#define mayLose (losses < LOSSES)
#else
#define maySend(c) (calls[c] < CALLS)
#define mayWait(c) (maySend(c) && (c == 0 || calls[0] > 0 || state[0] != IDLE))  /* clients are alike */
#define useful(c) true
#define mayExpire true
#define mayDie(c) (inRound[c] > 0)
#define mayLose true
#endif

#ifdef PROGRESS
#define progress 1
#else
#define progress 0
#endif

/* The broken variants. */
#ifdef UNSURE_IGNORED
#define minds false
#else
#define minds true
#endif
#ifdef TERM_FROM_MESSAGE
#define lateTerm(c) notBefore[c] = over[c] + 1
#else
#define lateTerm(c) skip
#endif
#ifdef RELEASE_ANY
#define releases(c) (calls[c] > 0)
#else
#define releases(c) (holder == c)
#endif
#ifdef NO_POLLS
#define polls false
#else
#define polls true
#endif

#define asking(c) (state[c] == ASKS || state[c] == QUEUED)

inline send(c) {
#ifdef PROGRESS
	calls[c] = 1;
#else
	calls[c]++;
#endif
	sent[c] = calls[c]
}

/* drop removes the entry of a client from the queue. */
inline drop(c) {
	inRound[c] = 0;
	alive[c] = false;
	i = 0;
	do
	:: i < length && queue[i] != c -> i++
	:: else -> break
	od;
	do
	:: i + 1 < length -> queue[i] = queue[i + 1]; i++
	:: else -> break
	od;
	length--;
	queue[length] = 0;
	i = 0
}

#define holds(c) (holder == c && held == first[c])

inline grant(c) {
	printf("store: grants the key to client %d\n", c);
	holder = c;
	held = first[c];
	since = calls[c]
}

inline free() {
	holder = NOBODY;
	held = 0;
	since = 0
}

/* handOver offers a free key to the waiters in order. The calling client gets it in the reply, and
 * any other client by a message. */
byte head;
inline handOver(own) {
	do
	:: holder == NOBODY && length > 0 ->
		head = queue[0];
		if
		:: alive[head] ->
			grant(head);
			if
			/* A message for a claim that has ended is left out: the next claim has another token.
			 * */
			:: head != own && state[head] != IDLE -> told[ROUND(head, inRound[head])] = true
			:: else
			fi
		:: else
		fi;
		drop(head)
	:: else -> break
	od;
	head = 0
}

/* answered ends the call in flight. */
inline answered(c) {
	sent[c] = 0;
	reply[c] = NONE
}

inline newRound(c) {
	state[c] = ASKS;
	answered(c);
	unsure[c] = false;
	notBefore[c] = 0;
	round[c]++
}

inline handed(c) {
	state[c] = HANDED;
	answered(c);
	unsure[c] = false
}

inline leave(c) {
	/* The next claim has another token, so messages about this claim do not count for it. */
	for (i : first[c] .. round[c]) { told[ROUND(c, i)] = false }
	i = 0;
	round[c] = 0;
	first[c] = 0;
	state[c] = IDLE;
	answered(c);
	unsure[c] = false;
	notBefore[c] = 0
}

/* enqueue.lua. */
inline enqueue(c) {
	if
	:: holds(c) -> since = calls[c]; reply[c] = MINE
	:: holder == NOBODY && length == 0 -> grant(c); reply[c] = GIVEN
	:: else ->
		if
		:: inRound[c] == 0 -> queue[length] = c; length++; inRound[c] = round[c]
		:: else
		fi;
		alive[c] = true;
		handOver(c);
		reply[c] = (holds(c) -> GIVEN : PLACE)
	fi
}

proctype Client(byte c) {
	do
	:: d_step { state[c] == IDLE && mayWait(c) && holder != c && inRound[c] == 0 ->
		newRound(c);
		first[c] = round[c];
		printf("client %d: waits, round %d\n", c, round[c])
	}
	/* An enqueue. A repeated one may change notBefore: a message counts only if each enqueue of its
	 * round was answered, and each reply sets notBefore again. fairlock keeps notBefore all the
	 * same. */
	:: d_step { state[c] == ASKS && sent[c] == 0 && maySend(c) ->
		send(c);
		printf("client %d: sends enqueue, call %d\n", c, calls[c]);
		notBefore[c] = calls[c]
	}
	:: d_step { state[c] == ASKS && reply[c] != NONE ->
		printf("client %d: gets the reply %d\n", c, reply[c]);
		if
		:: reply[c] == PLACE ->
			state[c] = QUEUED;
			notBefore[c] = sent[c];
			answered(c)
		:: reply[c] == MINE || reply[c] == GIVEN -> notBefore[c] = sent[c]; handed(c)
		:: else -> leave(c)
		fi
	}
	/* A poll. */
	:: d_step { state[c] == QUEUED && sent[c] == 0 && maySend(c) && useful(c) && polls ->
		send(c);
		printf("client %d: sends a poll, call %d\n", c, calls[c])
	}
	:: d_step { state[c] == QUEUED && reply[c] != NONE ->
		printf("client %d: gets the reply %d to its poll\n", c, reply[c]);
		if
		:: reply[c] == MINE -> handed(c)  /* the term counts from notBefore */
		:: reply[c] == GIVEN -> notBefore[c] = sent[c]; handed(c)
		:: reply[c] == PLACE -> notBefore[c] = sent[c]; answered(c)
		:: reply[c] == LOST && round[c] < ROUNDS -> newRound(c)
		:: else -> leave(c)
		fi
	}
	/* A call or its reply is lost. */
	:: d_step { sent[c] > 0 && mayLose ->
		printf("client %d: gets no reply\n", c);
		losses = losses + progress;
		unsure[c] = unsure[c] || state[c] == ASKS;
		answered(c)
	}
	/* A message about a hand-over. In the code, a message of another round, or one that follows an
	 * unanswered enqueue of this round, only makes the client poll. */
	:: d_step { asking(c) && told[ROUND(c, round[c])] && !(unsure[c] && minds) ->
		printf("client %d: gets the message of round %d\n", c, round[c]);
		lateTerm(c);
		handed(c)
	}
#ifdef NO_ROUNDS
	:: d_step { state[c] == QUEUED && round[c] > first[c] && told[ROUND(c, round[c] - 1)] ->
		printf("client %d: gets an old message\n", c);
		handed(c)
	}
#endif
	:: d_step { state[c] == HANDED && notBefore[c] > over[c] ->
		printf("client %d: holds the key\n", c);
		for (i : 0 .. CLIENTS - 1) { assert(state[i] != HOLDS) }
		i = 0;
		state[c] = HOLDS
	}
	:: d_step { state[c] == HANDED && notBefore[c] <= over[c] && round[c] < ROUNDS -> newRound(c) }
	:: d_step { state[c] == HOLDS ->
		printf("client %d: unlocks\n", c);
		times[c] = times[c] + progress;
		leave(c)
	}
#ifdef PROGRESS
	:: d_step { state[c] == QUEUED && dead < DEAD -> dead++; state[c] = GONE; answered(c) }
	:: state[c] == GONE || state[c] == IDLE && times[c] == TIMES -> break
#else
	/* The caller leaves. */
	:: d_step { asking(c) || state[c] == HANDED -> leave(c) }
#endif
	od
}

/* Store runs the scripts of one client. */
proctype Store(byte c) {
end:	do
	:: d_step { state[c] == ASKS && sent[c] > 0 && reply[c] == NONE ->
		printf("store: enqueue of client %d\n", c);
		enqueue(c)
	}
	:: d_step { state[c] == QUEUED && sent[c] > 0 && reply[c] == NONE ->
		printf("store: poll of client %d\n", c);
		if
		:: inRound[c] == 0 -> reply[c] = LOST
		:: else -> reply[c] = PLACE; alive[c] = true
		fi;
		if
		:: holder == NOBODY -> handOver(c); reply[c] = (holds(c) -> GIVEN : reply[c])
		:: holds(c) -> reply[c] = MINE
		:: else
		fi
	}
	/* release.lua, after the claim of the client has ended. */
	:: d_step { holder != NOBODY && state[c] == IDLE && releases(c) ->
		printf("store: a release of client %d frees the key of client %d\n", c, holder);
		free();
		handOver(NOBODY)
	}
	:: d_step { state[c] == IDLE && inRound[c] > 0 -> drop(c) }
	:: d_step { alive[c] && mayDie(c) -> alive[c] = false }
#ifdef PROGRESS
	:: d_step { told[ROUND(c, round[c])] && mayLose && state[c] != GONE ->
		printf("store: the message for client %d is lost\n", c);
		told[ROUND(c, round[c])] = false;
		losses++
	}
#endif
	/* The record expires. */
	:: d_step { holder == c && mayExpire ->
		printf("store: the record of client %d expires\n", c);
		over[c] = since * (1 - progress);
		free();
		if
		:: state[c] == HOLDS && notBefore[c] <= over[c] -> leave(c)
		:: else
		fi
	}
	od
}

init {
	atomic {
		for (i : 0 .. CLIENTS - 1) { run Client(i); run Store(i) }
		i = 0
	}
}
