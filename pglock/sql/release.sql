-- release frees a key, or keeps it taken without a holder for a period. It wakes the next waiter,
-- which alone may take the key for a second, or learns when the period ends.
-- $1 key, $2 token, $3 the period in µs or NULL, $4 channel, $5 lock_timeout
-- Returns a row if the token held the key.
WITH setting AS MATERIALIZED (
    SELECT set_config('lock_timeout', $5, true)
), locked AS MATERIALIZED (
    SELECT l.*, $3::bigint IS NULL AS frees, true AS wakes, 0::bigint AS quits FROM setting, {table} l
    WHERE l.key = $1 AND l.token = $2 AND l.expires > clock_timestamp() FOR NO KEY UPDATE OF l
), {pass}, freed AS (
    -- The row stays, because it has the fence. At the commit, others see that the key is free.
    UPDATE {table} l SET token = NULL, expires = p.now + $3::bigint * interval '1 us',
        owner = CASE WHEN $3 IS NULL THEN '' ELSE l.owner END,
        since = CASE WHEN $3 IS NULL THEN p.now ELSE l.since END,
        {passes}
    FROM passed p WHERE l.key = p.key
    RETURNING p.wakes
)
-- A release does not wait for the disk, because if a crash loses it, the hold ends with its term.
-- But a release that keeps the key taken waits: the key must stay taken after a crash.
SELECT CASE WHEN $3 IS NULL THEN set_config('synchronous_commit', 'off', true) END, {wake $4} FROM freed
