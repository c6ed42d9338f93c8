-- release ends a hold of a key, or all its holds, or takes a waiter out of its line. If the key is
-- free then, it wakes the next waiter, which alone may take the key for a second.
-- $1 key; $2 token, or NULL to end all holds; $3 for how many µs the key stays taken without a
-- holder, or NULL; $4 the number of a waiter that gives up, or 0; $5 channel; $6 lock_timeout
-- Returns whether a hold has ended, or no row if nothing has changed.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $6, true)
), locked AS MATERIALIZED (
    -- Lock the row whatever it has, because an attempt that puts the waiter into the line may wait
    -- for the row before this statement.
    SELECT l.* FROM setting, {table} l WHERE l.key = $1 FOR NO KEY UPDATE OF l
), moment AS MATERIALIZED (
    -- One reading of the clock, after the row is locked: all decisions about ends must agree.
    SELECT *, clock_timestamp() AS now FROM locked
), rest AS MATERIALIZED (
    -- The shared holds that stay; none if $2 is NULL.
    SELECT jsonb_object_agg(r.key, r.value) AS readers, max((r.value ->> 'end')::timestamptz) AS expires
    FROM moment m, jsonb_each(m.readers - $2::text) r WHERE (r.value ->> 'end')::timestamptz > m.now
), line AS MATERIALIZED (
    SELECT array_agg(w.id ORDER BY w.n) AS ids, array_agg(w.until ORDER BY w.n) AS untils
    FROM moment m, unnest(m.waiters, m.ends) WITH ORDINALITY AS w (id, until, n)
    WHERE w.id <> $4 AND w.until > m.now AND w.until <= m.now + interval '3 s'
), found AS MATERIALIZED (
    SELECT m.key, m.now, rest.readers, rest.expires, line.ids, line.untils,
        m.readers IS NOT NULL AS shared,
        (m.expires > m.now AND ($2 IS NULL OR m.token = $2
            OR (m.readers -> $2 ->> 'end')::timestamptz > m.now)) IS TRUE AS over,
        (m.heir = $4::bigint OR $4 = ANY (m.waiters)) IS TRUE AS quits,
        -- A release has just woken the waiter that gives up. So the next one is woken instead.
        (m.heir = $4 AND m.expires IS NULL) IS TRUE AS passes
    FROM moment m, rest, line
), change AS MATERIALIZED (
    SELECT *, passes OR over AND readers IS NULL AND $3::bigint IS NULL AS frees,
        -- If shared holds have the key, the next waiter may be one that can join them once the
        -- waiter that gives up is gone. After a release with $3, the next waiter learns of the end.
        CASE WHEN passes OR over AND readers IS NULL OR quits AND shared THEN ids[1] END AS wakes
    FROM found WHERE over OR quits
), freed AS (
    -- The row stays, because it has the fence. At the commit, others see that the key is free.
    UPDATE {table} l SET
        token = CASE WHEN NOT c.over THEN l.token END,
        owner = CASE WHEN c.over AND $3 IS NULL THEN '' ELSE l.owner END,
        readers = CASE WHEN c.over THEN c.readers ELSE l.readers END,
        since = CASE WHEN c.over AND $3 IS NULL THEN c.now ELSE l.since END,
        expires = CASE WHEN c.over THEN coalesce(c.expires, c.now + $3 * interval '1 us') ELSE l.expires END,
        -- An heir leaves the line. If it has died, only its second is lost. It may give up sooner.
        waiters = c.ids[1 + c.frees::int:],
        ends = c.untils[1 + c.frees::int:],
        heir = CASE WHEN c.frees THEN c.ids[1] ELSE l.heir END,
        heir_until = CASE WHEN c.frees THEN least(c.now + interval '1 s', c.untils[1]) ELSE l.heir_until END
    FROM change c WHERE l.key = c.key
    RETURNING c.over, c.wakes
)
-- This does not wait for the disk, because if a crash loses it, the hold ends with its term, and the
-- waiter after 3 s. But a break waits, and so does a release that keeps the key taken: both must
-- last.
SELECT over, CASE WHEN wakes IS NOT NULL THEN pg_notify($5::text || '_' || (abs(wakes) >> 32), wakes::text)::text END,
    CASE WHEN $2 IS NOT NULL AND $3 IS NULL THEN set_config('synchronous_commit', 'off', true) END
FROM freed
