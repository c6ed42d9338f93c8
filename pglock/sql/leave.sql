-- leave ends one shared hold. The last one wakes the next waiter, as release does.
-- $1 key, $2 channel, $3 lock_timeout, $4 token
-- Returns a row if the token held the key.
WITH {setting}, found AS MATERIALIZED (
    SELECT l.* FROM setting, {table} l WHERE l.key = $1 FOR NO KEY UPDATE OF l
), rest AS MATERIALIZED (
    -- The other shared holds, by one reading of the clock.
    SELECT jsonb_object_agg(r.key, r.value) AS readers, max({readerend}) AS expires
    FROM (SELECT readers, clock_timestamp() AS at FROM found) l, jsonb_each(l.readers - $4::text) r
    WHERE {readerend} > l.at
), locked AS MATERIALIZED (
    -- While other shared holds go on, the heir stays: its other callers may still come.
    SELECT l.key, l.waiters, l.ends, rest.readers, rest.expires, rest.readers IS NULL AS frees,
        rest.readers IS NULL AS wakes, rest.readers IS NOT NULL AS stays, 0::bigint AS quits
    FROM found l, rest WHERE (l.readers -> $4::text ->> 'end')::timestamptz > clock_timestamp()
), {pass}, freed AS (
    UPDATE {table} l SET readers = k.readers, expires = k.expires, since = p.now, {passes}
    FROM passed p, locked k WHERE l.key = p.key
    RETURNING p.wakes
)
SELECT set_config('synchronous_commit', 'off', true), {wake} FROM freed
