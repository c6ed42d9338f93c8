-- renew prolongs any number of holds, also several shared holds of one key.
-- $1 keys, $2 tokens, $3 terms in µs, $4 lock_timeout
-- Returns the position of each claim that was renewed, from 1 on.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $4, true)
), locked AS MATERIALIZED (
    -- The rows are locked in one order, so that renewals of several callers never
    -- deadlock. FOR NO KEY UPDATE passes a row that is locked FOR KEY SHARE.
    SELECT l.key, l.token, l.readers, l.expires FROM setting, {table} l WHERE l.key = ANY($1::bytea[])
    ORDER BY l.key FOR NO KEY UPDATE OF l
), moment AS MATERIALIZED (
    -- One reading of the clock for a row, after it is locked: readers and expires must agree on
    -- which holds have ended.
    SELECT *, clock_timestamp() AS now FROM locked
), holds AS MATERIALIZED (
    -- All holds of these keys that have not ended, with the position of the claim, if any.
    SELECT m.key, h.token, h.owner, greatest(h.until, m.now + c.ttl * interval '1 us') AS until, c.n
    FROM moment m CROSS JOIN LATERAL (
        SELECT m.token, NULL AS owner, m.expires AS until WHERE m.token IS NOT NULL
        UNION ALL
        SELECT r.key, r.value ->> 'owner', (r.value ->> 'end')::timestamptz FROM jsonb_each(m.readers) r
    ) h LEFT JOIN unnest($1, $2::text[], $3::bigint[]) WITH ORDINALITY AS c (key, token, ttl, n)
        ON c.key = m.key AND c.token = h.token
    WHERE h.until > m.now
), renewed AS (
    UPDATE {table} l SET expires = h.expires, readers = CASE WHEN l.readers IS NOT NULL THEN h.readers END
    FROM (
        SELECT key, max(until) AS expires,
            jsonb_object_agg(token, jsonb_build_object('owner', owner, 'end', until)) AS readers
        FROM holds GROUP BY key HAVING count(n) > 0
    ) h WHERE l.key = h.key
    RETURNING l.key
)
SELECT n FROM holds JOIN renewed USING (key) WHERE n IS NOT NULL
