-- leave ends one shared hold. The last one wakes the next waiter, as release does.
-- $1 key, $2 token, $3 channel, $4 lock_timeout
-- Returns a row if the token held the key.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $4, true)
), found AS MATERIALIZED (
    SELECT l.* FROM setting, {table} l WHERE l.key = $1 FOR NO KEY UPDATE OF l
), rest AS MATERIALIZED (
    -- The other shared holds, by one reading of the clock.
    SELECT jsonb_object_agg(r.key, r.value) AS readers, max((r.value ->> 'end')::timestamptz) AS expires
    FROM (SELECT readers, clock_timestamp() AS at FROM found) l, jsonb_each(l.readers - $2::text) r
    WHERE (r.value ->> 'end')::timestamptz > l.at
), locked AS MATERIALIZED (
    SELECT l.key, l.waiters, l.ends, rest.readers, rest.expires,
        rest.readers IS NULL AS frees, rest.readers IS NULL AS wakes, 0::bigint AS quits
    FROM found l, rest WHERE (l.readers -> $2::text ->> 'end')::timestamptz > clock_timestamp()
), {pass}, freed AS (
    -- While other shared holds go on, the heir stays: its other callers may still come.
    UPDATE {table} l SET readers = k.readers, expires = k.expires, since = p.now,
        waiters = p.waiters, ends = p.ends,
        heir = CASE WHEN k.frees THEN p.heir ELSE l.heir END,
        heir_until = CASE WHEN k.frees THEN least(p.now + interval '1 s', p.heir_end) ELSE l.heir_until END
    FROM passed p, locked k WHERE l.key = p.key
    RETURNING p.wakes
)
SELECT set_config('synchronous_commit', 'off', true), {wake $3} FROM freed
