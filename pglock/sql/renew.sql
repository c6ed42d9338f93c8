-- renew prolongs any number of holds that are not shared.
-- $1 keys, $2 tokens, $3 lock_timeout, $4 terms in µs
-- Returns the position of each claim that was renewed, from 1 on.
WITH {setting}, locked AS MATERIALIZED (
    -- The rows are locked in one order, so that renewals of several callers never
    -- deadlock. FOR NO KEY UPDATE passes a row that is locked FOR KEY SHARE.
    SELECT l.key FROM setting, {table} l WHERE l.key = ANY($1::bytea[])
    ORDER BY l.key FOR NO KEY UPDATE OF l
)
UPDATE {table} l
SET expires = greatest(l.expires, clock_timestamp() + c.ttl * interval '1 us')
FROM locked, unnest($1::bytea[], $2::text[], $4::bigint[]) WITH ORDINALITY AS c (key, token, ttl, n)
-- If the row has changed since the statement began, PostgreSQL checks its last version again.
WHERE l.key = locked.key AND c.key = l.key AND l.token = c.token AND l.expires > clock_timestamp()
RETURNING c.n
