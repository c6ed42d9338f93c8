-- release frees a key, or keeps it taken without a holder for a period. It wakes the next waiter,
-- which alone may take the key for a second, or learns when the period ends.
-- $1 key, $2 channel, $3 lock_timeout, $4 token, or NULL to end every hold; $5 the period in µs or
-- NULL
-- Returns a row if the token held the key.
WITH {setting}, locked AS MATERIALIZED (
    SELECT l.*, $5::bigint IS NULL AS frees, true AS wakes, false AS stays, 0::bigint AS quits
    FROM setting, {table} l
    WHERE l.key = $1 AND ($4::text IS NULL OR l.token = $4) AND l.expires > clock_timestamp()
    FOR NO KEY UPDATE OF l
), {pass}, freed AS (
    -- The row stays, because it has the fence. At the commit, others see that the key is free.
    UPDATE {table} l SET token = NULL, readers = NULL, expires = p.now + $5 * interval '1 us',
        owner = CASE WHEN $5 IS NULL THEN '' ELSE l.owner END,
        since = CASE WHEN $5 IS NULL THEN p.now ELSE l.since END,
        {passes}
    FROM passed p WHERE l.key = p.key
    RETURNING p.wakes
)
-- A release does not wait for the disk, because if a crash loses it, the hold ends with its term.
-- But a release that keeps the key taken waits: the key must stay taken after a crash. So does one
-- that ends every hold, because their holders go on.
SELECT CASE WHEN $4 IS NOT NULL AND $5 IS NULL THEN set_config('synchronous_commit', 'off', true) END, {wake}
FROM freed
