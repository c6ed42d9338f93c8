-- take takes a key that is free, or puts the caller into the line of those who wait for it.
-- $1 key, $2 token, $3 owner, $4 term in µs, $5 whether a fence was asked for, $6 lock_timeout for a
-- grant, $7 the number of a waiter, or 0; $8 when to enter the line: 0 never, 1 only if refused by
-- shared holds, 2 if refused (see entry in listen.go); $9 lock_timeout for the line, $10 how long a
-- place in the line is kept, in µs
-- Returns one row with the fence, or one row about the hold, or no row if another caller has taken
-- the key since this statement began. The owner is in hexadecimal. The rest of the term is in µs,
-- or NULL if it has no end. The last column says whether the caller need not ask again.
WITH seen AS MATERIALIZED (
    -- Look first. Most refusals then lock no row and write nothing.
    SELECT l.owner, l.readers, l.expires,
        $8::int = 0 OR $8 = 1 AND l.readers IS NULL OR {settled} AS settled
    FROM {table} l WHERE l.key = $1 AND {held}
), {patience}, taken AS (
    INSERT INTO {table} AS l (key, token, owner, since, expires, fence, fenced)
    SELECT $1, $2, $3, clock_timestamp(), {term}, {micros}, $5
    FROM setting WHERE NOT EXISTS (SELECT FROM seen)
    ON CONFLICT (key) DO UPDATE SET
        -- Setting the key makes PostgreSQL lock the row FOR UPDATE. So this waits for a
        -- transaction that guards a write of the last holder by FOR KEY SHARE.
        key = excluded.key,
        token = excluded.token, owner = excluded.owner, readers = NULL,
        -- The clock is read again: locking the row may have taken time.
        since = clock_timestamp(),
        expires = {term},
        -- The row is locked, so l.fence is the fence of the last hold, whichever that is.
        fence = greatest(l.fence + 1, {micros}),
        fenced = excluded.fenced,
        heir = NULL, heir_until = NULL,
        {leaves}
    -- This condition decides. Unlike seen, it sees the last version of the row.
    WHERE {held} IS NOT TRUE
    RETURNING fence
), waits AS (
    -- If the key has become free since this statement began, no release wakes the caller. Then
    -- this writes nothing, and the caller attempts again.
    UPDATE {table} l SET {enters} FROM setting, seen
    WHERE l.key = $1 AND NOT seen.settled AND {held}
    RETURNING 1
)
SELECT fence, '', false, NULL::bigint, true, NULL::text FROM taken
UNION ALL
{refusal}
