-- renewshared prolongs any number of shared holds, also several of one key.
-- $1 keys, $2 tokens, $3 lock_timeout, $4 terms in µs
-- Returns the position of each claim that was renewed, from 1 on.
WITH {setting}, claims AS MATERIALIZED (
    SELECT * FROM unnest($1::bytea[], $2::text[], $4::bigint[]) WITH ORDINALITY AS c (key, token, ttl, n)
), wishes AS MATERIALIZED (
    SELECT key, jsonb_object_agg(token, ttl) AS terms FROM claims GROUP BY key
), locked AS MATERIALIZED (
    SELECT l.key FROM setting, {table} l WHERE l.key = ANY($1::bytea[])
    ORDER BY l.key FOR NO KEY UPDATE OF l -- in one order, as renew does
), moment AS MATERIALIZED (
    -- One reading of the clock for a row, after it is locked: readers and expires must agree on
    -- which holds have ended.
    SELECT key, clock_timestamp() AS now FROM locked
), renewed AS (
    UPDATE {table} l SET (readers, expires) = (
        SELECT jsonb_object_agg(key, jsonb_set(value, '{end}', to_jsonb(until))), max(until)
        FROM (
            SELECT r.key, r.value, CASE WHEN w.terms ? r.key
                THEN greatest({readerend}, m.now + (w.terms ->> r.key)::bigint * interval '1 us')
                ELSE {readerend} END AS until
            -- Holds that have ended are dropped, and so not renewed.
            FROM jsonb_each(l.readers) r WHERE {readerend} > m.now) present)
    FROM moment m, wishes w
    WHERE l.key = m.key AND w.key = l.key AND l.readers IS NOT NULL AND l.expires > m.now
    RETURNING l.key, l.readers
)
SELECT c.n FROM renewed r JOIN claims c ON c.key = r.key WHERE r.readers ? c.token
