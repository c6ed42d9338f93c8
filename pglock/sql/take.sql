-- take takes a key, or puts the caller into the line of those who wait for it. A shared claim also
-- joins shared holds, but not while a caller waits that came first and wants the key alone.
-- $1 key, $2 token, $3 owner, $4 term in µs, $5 whether a fence was asked for, $6 lock_timeout for a
-- grant, $7 the number of a waiter, or 0; $8 when to enter the line: 0 never, 2 if refused, 1 only if
-- refused by shared holds; $9 lock_timeout for the line, $10 whether the claim is shared, $11 channel
-- Returns one row with the fence, or one row about the hold, or no row if another caller has taken
-- the key since this statement began. The owner is in hexadecimal. The rest of the term is in µs,
-- or NULL if it has no end. The fifth column says whether the caller need not ask again.
WITH seen AS MATERIALIZED (
    -- Look first. Most refusals then lock no row and write nothing.
    SELECT l.owner, l.readers, l.expires,
        $8::int = 0 OR $8 = 1 AND l.readers IS NULL
        OR coalesce(cardinality(l.waiters), 0) >= 100 -- the line is full
        OR EXISTS ( -- the waiter keeps its place for half its time
            SELECT FROM unnest(l.waiters, l.ends) AS w (id, until)
            WHERE w.id = $7 AND {present} AND w.until > clock_timestamp() + interval '1.5 s') AS settled
    FROM {table} l WHERE l.key = $1 AND {refuses}
), setting AS MATERIALIZED (
    -- Only one who takes the key waits for transactions that guard a write.
    SELECT set_config('lock_timeout', CASE WHEN EXISTS (SELECT FROM seen) THEN $9 ELSE $6 END, true),
        clock_timestamp() AS now, clock_timestamp() + $4::bigint * interval '1 us' AS until
), taken AS (
    INSERT INTO {table} AS l (key, token, owner, readers, since, expires, fence, fenced)
    SELECT $1, CASE WHEN NOT $10::bool THEN $2::text END, $3::bytea,
        CASE WHEN $10 THEN jsonb_build_object($2, jsonb_build_object('owner', encode($3, 'hex'), 'end', until)) END,
        now, until, (extract(epoch FROM now) * 1000000)::bigint, $5
    FROM setting WHERE NOT EXISTS (SELECT FROM seen)
    ON CONFLICT (key) DO UPDATE SET
        -- Setting the key makes PostgreSQL lock the row FOR UPDATE. So this waits for a
        -- transaction that guards a write of the last holder by FOR KEY SHARE.
        key = excluded.key,
        token = excluded.token, owner = excluded.owner, since = excluded.since,
        -- The other shared holds stay, unless they have ended. For a claim that is not shared, the
        -- result is NULL.
        readers = coalesce((
            SELECT jsonb_object_agg(r.key, r.value) FROM jsonb_each(l.readers) r
            WHERE (r.value ->> 'end')::timestamptz > clock_timestamp()), '{}') || excluded.readers,
        expires = greatest(excluded.expires, l.expires),
        -- The row is locked, so l.fence is the fence of the last hold, whichever that is.
        fence = greatest(l.fence + 1, excluded.fence), fenced = excluded.fenced,
        -- The other shared callers that wait at the same place come now.
        heir = CASE WHEN l.heir < 0 AND l.heir_until > clock_timestamp() THEN l.heir ELSE NULLIF(least($7, 0), 0) END,
        heir_until = CASE WHEN l.heir < 0 AND l.heir_until > clock_timestamp() THEN l.heir_until
            ELSE clock_timestamp() + interval '100 ms' END,
        (waiters, ends) = (
            SELECT array_agg(w.id ORDER BY w.n), array_agg(w.until ORDER BY w.n)
            FROM unnest(l.waiters, l.ends) WITH ORDINALITY AS w (id, until, n)
            WHERE w.id <> $7 AND {present})
    -- This condition decides. Unlike seen, it sees the last version of the row.
    WHERE NOT {refuses}
    RETURNING fence, CASE WHEN $10 THEN waiters[1] END AS next
), waits AS (
    -- If the row would not refuse the caller any more, no release wakes the caller. Then this writes
    -- nothing, and the caller attempts again. A waiter that is in the line keeps its place.
    UPDATE {table} l SET (waiters, ends) = (
        SELECT array_agg(p.id ORDER BY p.n), array_agg(p.until ORDER BY p.n)
        FROM (
            SELECT w.id, max(w.until) AS until, min(w.n) AS n
            FROM unnest(l.waiters || $7, l.ends || clock_timestamp() + interval '3 s')
                WITH ORDINALITY AS w (id, until, n)
            WHERE {present} GROUP BY w.id
        ) p)
    FROM setting, seen WHERE l.key = $1 AND NOT seen.settled AND {refuses}
    RETURNING 1
)
-- A place in the line does not wait for the disk: if a crash loses it, the caller asks in a second.
-- A grant does, because another caller could get the key after a crash.
-- If the next waiter wants a shared hold as well, it can join now. It then wakes the next one.
SELECT fence, '', false, NULL::bigint, true,
    CASE WHEN next < 0 THEN pg_notify($11::text || '_' || (-next >> 32), next::text)::text END
FROM taken
UNION ALL
SELECT NULL, CASE WHEN readers IS NULL THEN encode(owner, 'hex') ELSE coalesce((
        SELECT r.value ->> 'owner' FROM jsonb_each(readers) r
        WHERE (r.value ->> 'end')::timestamptz > clock_timestamp() LIMIT 1), '') END,
    readers IS NOT NULL,
    (extract(epoch FROM NULLIF(expires, 'infinity') - clock_timestamp()) * 1000000)::bigint,
    settled OR EXISTS (SELECT FROM waits),
    CASE WHEN EXISTS (SELECT FROM waits) THEN set_config('synchronous_commit', 'off', true) END
FROM seen
