/*
 * intent: readers that keep coming, and a writer that waits for the same key of redlock. README.md
 * says what this shows and how to run it.
 *
 * Checked: if each process goes on, every endless run reaches the label progress again and again.
 * The label stands where the writer gets the key. With DEAD the writer stops at any moment, and the
 * label stands where a reader gets the key.
 *
 * The intent of a living writer lasts until the writer's next attempt. The code ensures this: the
 * intent's time to live includes the time of an attempt. In all, LOSSES requests or intents are
 * lost.
 */

#ifndef LOSSES
#define LOSSES 2
#endif

#define READERS 2
#define NODES 3
#define QUORUM 2

byte members[NODES];  /* the readers whose member a node has, as bits */
bool writer[NODES];   /* the node has the writer's record */
bool intent[NODES];
bool stopped;         /* the writer has died */
byte losses;
byte votes[READERS + 1];

#ifdef NO_INTENT
#define sendsIntent false
#else
#define sendsIntent true
#endif
#ifdef INTENT_STAYS
#define mayEnd(n) false
#else
#define mayEnd(n) (stopped && intent[n])
#endif
#ifdef LEFT_ONCE
bool left[NODES];  /* the intent was sent */
#define repeats(n) !left[n]
#define note(n) left[n] = true
#else
#define repeats(n) true
#define note(n) skip
#endif

/* join.lua. A request may be lost. */
inline join(c, n) {
	atomic {
		if
		:: !writer[n] && !intent[n] -> members[n] = members[n] | (1 << c); votes[c]++
		:: else
		:: losses < LOSSES -> losses++
		fi
	}
}

inline leaveShared(c, n) {
	members[n] = members[n] & ~(1 << c)
}

proctype Reader(byte c) {
	do
	:: join(c, 0);
		join(c, 1);
		join(c, 2);
		if
		:: votes[c] >= QUORUM ->
#ifdef DEAD
progress:
#endif
			printf("reader %d: holds the key\n", c)
		:: else -> printf("reader %d: is refused\n", c)
		fi;
		votes[c] = 0;
		/* release.lua */
		leaveShared(c, 0);
		leaveShared(c, 1);
		leaveShared(c, 2)
	od
}

/* acquire.lua of the writer. */
inline take(n) {
	atomic {
		if
		:: members[n] == 0 -> writer[n] = true; votes[READERS]++
		:: else
		:: losses < LOSSES -> losses++
		fi
	}
}

inline leaveIntent(n) {
	atomic {
		if
		:: repeats(n) && sendsIntent -> intent[n] = true; note(n)
		:: else
		:: losses < LOSSES -> losses++; note(n)
		fi
	}
}

proctype Writer() {
	do
	:: take(0);
		take(1);
		take(2);
		if
		:: votes[READERS] >= QUORUM ->
			votes[READERS] = 0;
#ifndef DEAD
progress:
#endif
			printf("writer: holds the key\n");
			d_step {  /* endIntent */
				intent[0] = false;
				intent[1] = false;
				intent[2] = false
			}
		:: else ->
			votes[READERS] = 0;
			printf("writer: is refused, and leaves intents\n");
			leaveIntent(0);
			leaveIntent(1);
			leaveIntent(2)
		fi;
		/* release.lua, or the clean-up of the attempt */
		writer[0] = false;
		writer[1] = false;
		writer[2] = false
	od unless { stopped -> votes[READERS] = 0 }
}

/* Node removes the intent and the record of a writer that has died. */
proctype Node(byte n) {
end:	do
	:: atomic { mayEnd(n) -> intent[n] = false }
	:: atomic { stopped && writer[n] -> writer[n] = false }
	od
}

proctype Death() {
#ifdef DEAD
	stopped = true
#else
	skip
#endif
}

init {
	atomic {
		run Reader(0);
		run Reader(1);
		run Writer();
		run Node(0);
		run Node(1);
		run Node(2);
		run Death()
	}
}
