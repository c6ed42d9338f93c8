-- renewshared prolongs any number of shared holds, also several of one key.
-- $1 keys, $2 tokens, $3 terms in µs, $4 lock_timeout
-- Returns the position of each claim that was renewed, from 1 on.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $4, true)
), claims AS MATERIALIZED (
    SELECT * FROM unnest($1::bytea[], $2::text[], $3::bigint[]) WITH ORDINALITY AS c (key, token, ttl, n)
), wishes AS MATERIALIZED (
    SELECT key, jsonb_object_agg(token, ttl) AS terms, max(ttl) AS longest FROM claims GROUP BY key
), locked AS MATERIALIZED (
    SELECT l.key FROM setting, {table} l WHERE l.key = ANY($1::bytea[])
    ORDER BY l.key FOR NO KEY UPDATE OF l -- in one order, as renew does
), moment AS MATERIALIZED (
    -- One reading of the clock for a row, after it is locked: readers and expires must agree on
    -- which holds have ended.
    SELECT key, clock_timestamp() AS now FROM locked
), renewed AS (
    UPDATE {table} l SET
        -- Holds that have ended are dropped, and so not renewed.
        readers = (
            SELECT jsonb_object_agg(r.key, CASE WHEN w.terms ? r.key
                THEN jsonb_set(r.value, '{end}', to_jsonb(greatest((r.value ->> 'end')::timestamptz,
                    m.now + (w.terms ->> r.key)::bigint * interval '1 us')))
                ELSE r.value END)
            FROM jsonb_each(l.readers) r WHERE (r.value ->> 'end')::timestamptz > m.now),
        expires = (
            SELECT max(CASE WHEN w.terms ? r.key
                THEN greatest((r.value ->> 'end')::timestamptz,
                    m.now + (w.terms ->> r.key)::bigint * interval '1 us')
                ELSE (r.value ->> 'end')::timestamptz END)
            FROM jsonb_each(l.readers) r WHERE (r.value ->> 'end')::timestamptz > m.now)
    FROM moment m, wishes w
    WHERE l.key = m.key AND w.key = l.key AND l.readers IS NOT NULL AND l.expires > m.now
    RETURNING l.key, l.readers
)
SELECT c.n FROM renewed r JOIN claims c ON c.key = r.key WHERE r.readers ? c.token
